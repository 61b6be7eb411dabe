"""What `ansible-galaxy collection build` would publish: the collection, and nothing that a run leaves behind."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What lies about in a working checkout and must never leave it.
STRAY = [
    "results/adhoc/20261129T101500Z-eagle3/server.log",
    "results/ledger.jsonl",
    ".lab/ssh/id_ed25519",
    "inventory/lab/id_ed25519",
    "inventory/mine/group_vars/all/vault.yml",
    "inventory/mine/server.pem",
    "inventory/mine/api.key",
    ".venv/bin/activate",
    "plugins/modules/__pycache__/x.pyc",
]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The names in the tarball built from a copy of the committed files plus STRAY."""
    tmp = tmp_path_factory.mktemp("publish")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, tmp / "tree" / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target, follow_symlinks=False)
    for name in STRAY:
        path = tmp / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("stray")
    galaxy = Path(sys.executable).with_name("ansible-galaxy")
    subprocess.run([galaxy, "collection", "build", "--output-path", tmp / "out"], cwd=tmp / "tree", check=True)
    (tarball,) = (tmp / "out").glob("servelab-sglang-*.tar.gz")
    with tarfile.open(tarball) as archive:
        return set(archive.getnames())


def test_the_collection_is_in_it(published):
    wanted = {"MANIFEST.json", "README.md", "meta/runtime.yml", "plugins/module_utils/__init__.py", "site.yml"}
    assert wanted <= published


@pytest.mark.parametrize("name", STRAY)
def test_nothing_stray_is_in_it(published, name):
    assert name not in published


def test_the_self_link_is_not_in_it(published):
    assert not [name for name in published if name.startswith("collections")]
