"""Bundles: whole or not at all, never overwritten."""

import json
import tarfile

import pytest

from servelab import bundle, ledger
from servelab.cli import main

RUN = {
    "schema": "servelab.run/1",
    "run_id": "20261129T101500Z-eagle3",
    "campaign": "adhoc",
    "mode": "eagle3",
    "status": "ok",
    "reason": None,
    "started": "2026-11-29T10:15:00Z",
    "ended": "2026-11-29T10:25:00Z",
    "simulated": {"profile": "story", "time_scale": 5},
}
SUMMARY = {
    "server": {"sglang_version": "0.5.23"},
    "levels": [
        {"concurrency": 1, "valid": True, "output_tok_s": 54.1},
        {"concurrency": 70, "valid": True, "output_tok_s": 315.0},
        {"concurrency": 250, "valid": False, "output_tok_s": 900.0},
    ],
}


@pytest.fixture
def made(tmp_path):
    """A sealed bundle directory as the guest makes it."""
    path = tmp_path / "made"
    (path / "levels").mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(RUN))
    (path / "summary.json").write_text(json.dumps(SUMMARY))
    (path / "levels" / "level-0001.jsonl").write_text("{}\n")
    bundle.seal(path)
    return path


def pack(path, tar):
    with tarfile.open(tar, "w:gz") as archive:
        archive.add(path, arcname=".")
    return tar


def test_receive_gives_the_bundle_its_name_and_a_ledger_line(made, tmp_path):
    target = bundle.receive(pack(made, tmp_path / "x.tar.gz"), tmp_path / "results" / "adhoc")
    assert target == tmp_path / "results" / "adhoc" / "20261129T101500Z-eagle3"
    assert bundle.problems(target) == []
    (line,) = (tmp_path / "results" / ledger.FILE).read_text().splitlines()
    entry = json.loads(line)
    assert entry["mode"] == "eagle3"
    assert entry["best_tok_s"] == 315.0  # the invalid level's 900 does not count
    assert entry["bundle"] == "adhoc/20261129T101500Z-eagle3"
    assert entry["simulated"] == {"profile": "story", "time_scale": 5}


def test_a_second_bundle_of_the_same_name_is_refused(made, tmp_path):
    tar = pack(made, tmp_path / "x.tar.gz")
    target = bundle.receive(tar, tmp_path / "r" / "adhoc")
    with pytest.raises(bundle.BundleError, match="exists, and results are never overwritten"):
        bundle.receive(tar, tmp_path / "r" / "adhoc")
    assert sorted(p.name for p in target.parent.iterdir()) == [target.name]
    assert len((tmp_path / "r" / ledger.FILE).read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda p: (p / "summary.json").write_text("{}"), "summary.json was changed after the run"),
        (lambda p: (p / "summary.json").unlink(), "summary.json is listed in SHA256SUMS and missing"),
        (lambda p: (p / "extra").write_text("x"), "extra is not listed in SHA256SUMS"),
        (lambda p: (p / "SHA256SUMS").unlink(), "has no SHA256SUMS"),
    ],
)
def test_a_damaged_archive_leaves_nothing(made, tmp_path, harm, sentence):
    harm(made)
    campaign = tmp_path / "r" / "adhoc"
    with pytest.raises(bundle.BundleError, match=sentence):
        bundle.receive(pack(made, tmp_path / "x.tar.gz"), campaign)
    assert list(campaign.iterdir()) == []
    assert not (tmp_path / "r" / ledger.FILE).exists()


def test_a_torn_archive_is_refused(made, tmp_path):
    tar = pack(made, tmp_path / "x.tar.gz")
    tar.write_bytes(tar.read_bytes()[:100])
    with pytest.raises(bundle.BundleError, match="cannot be unpacked"):
        bundle.receive(tar, tmp_path / "r" / "adhoc")


def test_an_archive_that_climbs_out_is_refused(made, tmp_path):
    tar = tmp_path / "x.tar.gz"
    with tarfile.open(tar, "w:gz") as archive:
        archive.add(made / "run.json", arcname="../../escaped")
    with pytest.raises(bundle.BundleError, match="cannot be unpacked"):
        bundle.receive(tar, tmp_path / "r" / "adhoc")
    assert not (tmp_path / "escaped").exists()


def test_a_link_in_an_archive_is_refused(made, tmp_path):
    (made / "levels" / "elsewhere").symlink_to("/etc/passwd")
    with pytest.raises(bundle.BundleError, match=r"'\./levels/elsewhere' is no plain file below the bundle"):
        bundle.receive(pack(made, tmp_path / "x.tar.gz"), tmp_path / "r" / "adhoc")
    assert list((tmp_path / "r" / "adhoc").iterdir()) == []


def test_modes_and_owners_of_the_guest_do_not_come_along(made, tmp_path):
    (made / "run.json").chmod(0o4777)
    target = bundle.receive(pack(made, tmp_path / "x.tar.gz"), tmp_path / "r" / "adhoc")
    assert (target / "run.json").stat().st_mode & 0o7777 == 0o644


def test_a_run_without_a_name_of_the_right_form_is_refused(made, tmp_path):
    (made / "run.json").write_text(json.dumps({**RUN, "run_id": "../evil"}))
    bundle.seal(made)
    with pytest.raises(bundle.BundleError, match=r"names its run '\.\./evil'"):
        bundle.receive(pack(made, tmp_path / "x.tar.gz"), tmp_path / "r" / "adhoc")


def test_unknown_schema_is_said(made):
    (made / "run.json").write_text(json.dumps({**RUN, "schema": "servelab.run/9"}))
    with pytest.raises(bundle.BundleError, match=r"schema 'servelab.run/9'; this version reads 'servelab.run/1'"):
        bundle.read(made)


def test_export_takes_secrets_out_and_import_verifies(made, tmp_path, capsys):
    source = made.rename(tmp_path / RUN["run_id"])
    (source / "server.log").write_text("started with --api-key s3cret-s3cret\n")
    bundle.seal(source)
    assert main(["bundle", "export", str(source), "--into", str(tmp_path)]) == 0
    tar = tmp_path / f"{RUN['run_id']}.tar.gz"
    assert capsys.readouterr().out.strip() == str(tar)
    assert main(["bundle", "import", str(tar), "--into", str(tmp_path / "r" / "imported")]) == 0
    target = tmp_path / "r" / "imported" / RUN["run_id"]
    assert bundle.problems(target) == []
    assert (target / "server.log").read_text() == "started with --api-key [redacted]\n"
    assert json.loads((target / "summary.json").read_text()) == SUMMARY
    assert (source / "server.log").read_text() == "started with --api-key s3cret-s3cret\n"
    assert main(["bundle", "export", str(source), "--into", str(tmp_path)]) == 1  # never overwritten


def test_a_damaged_bundle_is_not_given_away(made, tmp_path):
    (made / "summary.json").write_text("{}")
    with pytest.raises(bundle.BundleError, match="is damaged and is not given away"):
        bundle.export(made, tmp_path)
    assert list(tmp_path.iterdir()) == [made]
