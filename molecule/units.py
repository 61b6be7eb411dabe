"""What the scenarios read of a mode's unit and record."""

from __future__ import annotations

import json

from testinfra.host import Host

UNITS = "/etc/systemd/system"
# What converge.yml gives.
SECRETS = ("SENTINELapikey4711", "SENTINELadminkey4711", "hf_SENTINELtoken4711")


def directives(host: Host, mode: str) -> dict[str, list[str]]:
    """The lines of a unit: {directive: values in order}."""
    found: dict[str, list[str]] = {}
    for line in host.file(f"{UNITS}/servelab-{mode}.service").content_string.splitlines():
        if "=" in line and not line.startswith("#"):
            name, value = line.split("=", 1)
            found.setdefault(name, []).append(value)
    return found


def flags(host: Host, mode: str) -> list[str]:
    return [word for word in _command(host, mode) if word.startswith("--")]


def value_of(host: Host, mode: str, flag: str) -> str | None:
    command = _command(host, mode)
    for position, word in enumerate(command):
        if word == flag:
            return command[position + 1]
        if word.startswith(f"{flag}="):
            return word.split("=", 1)[1]
    return None


def _command(host: Host, mode: str) -> list[str]:
    return json.loads(host.file(f"/etc/servelab/modes/{mode}.json").content_string)["command"]


def assert_valid_and_at_rest(host: Host, mode: str) -> None:
    assert host.check_output(f"systemd-analyze verify servelab-{mode}.service 2>&1") == ""
    assert not host.service(f"servelab-{mode}").is_running
    # No [Install] section: it cannot be started at boot by mistake.
    assert host.run(f"systemctl is-enabled servelab-{mode}").stdout.strip() == "static"


def assert_seen_to_answer(host: Host, mode: str) -> None:
    assert host.file(f"/var/lib/servelab/proofs/{mode}.json").exists
    journal = host.check_output(f"journalctl --unit servelab-{mode} --output cat")
    assert "simulated" in journal
    assert "POST /v1/completions HTTP/1.1" in journal


def assert_cards_are_idle(host: Host) -> None:
    used = host.check_output("nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits").split()
    # 4 MiB is what such a card reports when it is idle.
    assert [int(mib) for mib in used] == [4] * 8


def assert_no_secret_anywhere(host: Host) -> None:
    """On the whole guest: files, journal, what systemd shows, every command line and every environment."""
    for secret in SECRETS:
        found = host.run(
            "grep -rlaI --exclude-dir=secrets -e %s /etc /opt /root /run /srv /tmp /var 2>/dev/null",
            secret,
        ).stdout.split()
        assert found == []
        assert host.run("journalctl --all | grep -c -e %s", secret).stdout.strip() == "0"
        shown = "systemctl show 'servelab-*' ; cat /etc/systemd/system/servelab-*; systemctl show-environment"
        assert host.run(f"({shown}) | grep -c -e %s", secret).stdout.strip() == "0"


def assert_logged_without_a_secret(host: Host, mode: str) -> None:
    """Each start has a log of its own, in which the keys are taken out."""
    directory = f"/var/log/servelab/{mode}"
    logs = host.file(directory).listdir()
    fields = host.check_output(f"journalctl -u servelab-{mode} -o json --output-fields=_SYSTEMD_INVOCATION_ID")
    starts = {json.loads(line).get("_SYSTEMD_INVOCATION_ID") for line in fields.splitlines()}
    assert logs and {name.removesuffix(".log") for name in logs} <= starts
    content = host.file(f"{directory}/{logs[0]}").content_string
    assert "'api_key': '[redacted]'" in content or "api_key='[redacted]'" in content
