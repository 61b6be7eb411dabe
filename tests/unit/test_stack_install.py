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


# As pip 25.1 and uv 0.13.9 printed it, of a directory without that wheel and of one that is not there.
PIP_MISSING = """\
Looking in links: /shared/wheels
ERROR: Could not find a version that satisfies the requirement sglang==0.5.15 (from versions: none)
ERROR: No matching distribution found for sglang==0.5.15
"""
UV_MISSING = """\
Using Python 3.11.7 environment at: /opt/servelab/stacks/s
error: No solution found when resolving dependencies
  cause: Because sglang was not found in the provided package locations and you require sglang==0.5.15, we can \
conclude that your requirements are unsatisfiable.
"""
PIP_NOWHERE = """\
Looking in links: /shared/wheels
WARNING: Location '/shared/wheels' is ignored: it is either a non-existing path or lacks a specific scheme.
ERROR: Could not find a version that satisfies the requirement sglang==0.5.15 (from versions: none)
ERROR: No matching distribution found for sglang==0.5.15
"""
UV_NOWHERE = """\
Using Python 3.11.7 environment at: /opt/servelab/stacks/s
error: Failed to read `--find-links` directory: /shared/wheels
  cause: No such file or directory (os error 2)
"""


@pytest.mark.parametrize(
    ("printed", "what"),
    [
        (PIP_MISSING, "has no wheel of sglang==0.5.15 that fits"),
        (UV_MISSING, "has no wheel of sglang==0.5.15 that fits"),
        (PIP_NOWHERE, "does not exist here"),
        (UV_NOWHERE, "does not exist here"),
    ],
)
def test_a_wheelhouse_that_was_filled_for_something_else_is_named_with_the_way_to_fill_it(printed, what):
    assert stack_install.install_failure(printed, "/shared/wheels") == (
        f"The wheelhouse /shared/wheels {what}; fill it with playbooks/wheelhouse.yml for this release and this "
        "Python, and bring it to this machine."
    )


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
