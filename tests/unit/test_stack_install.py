"""What pip and uv say when they cannot install, in one sentence; which releases the locks' names make."""

from __future__ import annotations

import pytest

from servelab.shared import stack_install

WANTED, GOT = "0" * 64, "6bc31bbbec6dfaaedc1676dbc11dbda96fe22a2b5c400e9ebad113fec44a9dc6"

# As pip 25.1 printed it.
PIP = f"""\
ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the package versions, \
please update the hashes. Otherwise, examine the package contents carefully; someone may have tampered with them.
    annotated-doc==0.0.7 from https://index/packages/annotated_doc-0.0.7-py3-none-any.whl (from -r bad.txt (line 1)):
        Expected sha256 {WANTED}
             Got        {GOT}

"""
# As uv 0.13.9 printed it.
UV = f"""\
Resolved 1 package in 290ms
error: Failed to download `annotated-doc==0.0.7`
  cause: Hash mismatch for `annotated-doc==0.0.7`

         Expected:
           sha256:{WANTED}

         Computed:
           sha256:{GOT}
"""


@pytest.mark.parametrize(
    ("printed", "what"),
    [
        (PIP, "annotated-doc==0.0.7 from https://index/packages/annotated_doc-0.0.7-py3-none-any.whl"),
        (UV, "annotated-doc==0.0.7"),
    ],
)
def test_a_wheel_that_is_not_the_locked_one_is_named(printed, what):
    said = stack_install.install_failure(printed)
    assert said.startswith(f"{what} is not what was locked: its sha256 is {GOT}, and {WANTED} was expected.")
    assert "\n" not in said


def test_one_of_several_hashes_is_enough_to_tell():
    several = PIP.replace("             Got", f"        Expected     or {'1' * 64}\n             Got")
    assert f"and {WANTED} was expected" in stack_install.install_failure(several)


def test_other_failures_keep_their_last_errors():
    printed = (
        "Looking in links: /shared/wheels\n"
        "ERROR: Could not find a version that satisfies the requirement torch==2.14.1 (from versions: none)\n"
        "ERROR: No matching distribution found for torch==2.14.1\n"
        "\n[notice] A new release of pip is available\n"
    )
    said = stack_install.install_failure(printed)
    assert said.endswith("ERROR: No matching distribution found for torch==2.14.1")
    assert "notice" not in said
    assert stack_install.install_failure("") == "No reason was given."


def test_releases_and_pythons_from_the_names_of_locks():
    names = ["0.5.9-py3.9.txt", "0.5.12-py3.13.txt", "0.5.12-py3.9.txt", "0.5.12.post1-py3.11.txt", "uv.txt"]
    assert stack_install.locks_known(names) == {
        "0.5.9": ["3.9"],
        "0.5.12": ["3.9", "3.13"],
        "0.5.12.post1": ["3.11"],
    }
    assert list(stack_install.locks_known(names)) == ["0.5.9", "0.5.12", "0.5.12.post1"]
