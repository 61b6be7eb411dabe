"""A run's files: checksums that sha256sum accepts, versions by name, and a table that never invents a number."""

import hashlib
from pathlib import Path

from servelab.shared.run_files import level_table, packages, simulated_of, write_sums


def test_sums_are_what_sha256sum_writes(tmp_path: Path) -> None:
    (tmp_path / "levels").mkdir()
    (tmp_path / "levels" / "level-0001.jsonl").write_bytes(b"{}\n")
    (tmp_path / "run.json").write_bytes(b"abc")
    write_sums(tmp_path)
    write_sums(tmp_path)
    assert (tmp_path / "SHA256SUMS").read_text() == (
        f"{hashlib.sha256(b'{}' + bytes([10])).hexdigest()}  levels/level-0001.jsonl\n"
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  run.json\n"
    )


def test_packages_by_name(tmp_path: Path) -> None:
    for name in ("sglang-0.5.23.dist-info", "flashinfer_python-0.7.2.dist-info", "torch-2.14.1+cu130.dist-info"):
        (tmp_path / name).mkdir()
    assert packages(tmp_path) == {"flashinfer-python": "0.7.2", "sglang": "0.5.23", "torch": "2.14.1+cu130"}


def test_every_witness_of_a_simulation_counts() -> None:
    said = {"profile": "story", "time_scale": 5}
    assert simulated_of({"server": {"simulated": said}}, None, "") == said
    assert simulated_of(None, {"simulated": said}, "") == said
    line = "[2026-11-29 16:50:57] simulated: profile=story, time_scale=5. No model is loaded and no GPU computes\n"
    assert simulated_of(None, None, line) == {"profile": "story", "time_scale": 5.0}
    assert simulated_of({"server": {"simulated": None}}, {"version": "0.5.23"}, "server_args=ServerArgs(…)") is None


def test_a_table_shows_gaps_as_gaps() -> None:
    levels = [
        {
            "concurrency": 10, "valid": True, "output_tok_s": 400.12, "ttft_ms": {"p50": 21.04}, "tpot_ms": {},
            "tokens_per_chunk": 2.1, "requests": {"completed": 40, "failed": 0},
        },
        {"concurrency": 30, "valid": False, "invalid_reasons": ["3 of 40 requests failed"], "output_tok_s": None},
    ]  # fmt: skip
    lines = level_table({"levels": levels}, {"profile": "story", "time_scale": 5})
    assert lines[2] == "| 10 | 400.1 | 21.0 | – | 2.10 | 40 | 0 | yes |"
    assert lines[3] == "| 30 | – | – | – | – | ? | ? | no: 3 of 40 requests failed |"
    assert lines[4] == "simulated: profile story, time scale 5"


def test_what_was_skipped_stands_below_the_table() -> None:
    lines = level_table({"levels": []}, None, {"pve_node": "no node", "nvidia_userspace": "no driver"})
    assert lines[2:] == ["skipped: nvidia_userspace (no driver)", "skipped: pve_node (no node)"]
