"""A (simulated) server with keys, run as its unit runs it: they are asked for, and found nowhere but in their file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from sim_process import Sim

from servelab.cli import main
from servelab.shared import readiness_http
from servelab.shared.redact import redact_value

MODULE_UTILS = Path(__file__).parents[2] / "plugins" / "module_utils"
KEY, ADMIN = "SENTINEL-api-4711-xx", "SENTINEL-admin-4711-xx"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """What the role brings to a machine, below a prefix."""
    run, secrets = tmp_path / "opt/servelab/run", tmp_path / "etc/servelab/secrets"
    for directory in (run, secrets, tmp_path / "var/log/servelab/baseline"):
        directory.mkdir(parents=True)
    for name in ("run_server.py", "redact.py"):
        (run / name).write_bytes((MODULE_UTILS / name).read_bytes())
    (secrets / "server.yaml").write_text(json.dumps({"api-key": KEY, "admin-api-key": ADMIN}))
    (secrets / "api_key").write_text(KEY)
    return tmp_path


def words_of(pid: int) -> bytes:
    """Command line and environment of a process."""
    return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))


def test_a_server_with_keys_gives_none_away(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(kept / "etc/servelab/secrets/server.yaml")
    logs = kept / "var/log/servelab/baseline"
    filter_ = [
        sys.executable,
        str(kept / "opt/servelab/run/run_server.py"),
        "--secrets",
        config,
        "--logs",
        str(logs),
        "--",
    ]
    with Sim(
        tmp_path, "--config", config, before=filter_, environ={"INVOCATION_ID": "feed0001"}, time_scale=100
    ) as sim:
        sim.wait_ready()
        url = f"http://127.0.0.1:{sim.port}"
        assert sim.ask("GET", "/v1/models")[0] == 401
        assert sim.ask("GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}"})[0] == 200
        # The probes find the key where the role put it, and need none to be given.
        readiness_http.use_key_of(str(kept))
        try:
            assert readiness_http.ask(f"{url}/v1/models", 10).status == 200
            assert readiness_http.complete(url, None, "Say something", 4, 20).status == 200
            info = readiness_http.ask(f"{url}/server_info", 10).body
        finally:
            readiness_http.use_key_of(str(tmp_path / "nowhere"))
        assert readiness_http.ask(f"{url}/v1/models", 10).status == 401
        # SGLang does say it here: what is collected must pass redact_value.
        assert KEY in json.dumps(info) and "SENTINEL" not in json.dumps(redact_value(info))
        processes = [sim.process.pid, *sim.children()]
        assert len(processes) > 2
        assert [pid for pid in processes if b"SENTINEL" in words_of(pid)] == []
        sim.process.terminate()
        sim.process.wait(20)
    log = logs / "feed0001.log"
    text = log.read_text()
    assert "[redacted]" in text and "server_args=" in text
    said = main(["diagnose", str(log)])
    assert said == 4
    assert "asked to stop" in capsys.readouterr().out
    holders = [path for path in tmp_path.rglob("*") if path.is_file() and b"SENTINEL" in path.read_bytes()]
    assert {path.parent.name for path in holders} == {"secrets"}


def test_a_config_that_cannot_be_read_starts_nothing(kept: Path, tmp_path: Path) -> None:
    config = kept / "etc/servelab/secrets/server.yaml"
    config.write_text(f'{{"api-key": "{KEY}"')
    with Sim(tmp_path, "--config", str(config)) as sim:
        assert sim.process.wait(20) == 1
        assert "Failed to read config file" in sim.log() and "SENTINEL" not in sim.log()
