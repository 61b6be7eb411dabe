#!/usr/bin/env python3
"""Try the allreduce patch on every published release of SGLang and print which test passed on which.

    scripts/patch_matrix.py [--write]      --write also puts the table into docs/allreduce.md

The releases are asked of the package index; of every wheel only the files that concern the allreduce are kept.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "unit" / "test_sglang_patch.py"
DOCUMENT = ROOT / "docs" / "allreduce.md"
BEGIN, END = "<!-- matrix: scripts/patch_matrix.py --write -->", "<!-- end of matrix -->"

# Column → the tests (their names begin so) that must all have passed.
COLUMNS = {
    "applied": ["test_the_shape_is_found", "test_a_second_time_nothing_changes"],
    "shut without the variable": ["test_without_the_variable", "test_only_the_value_1_opens_the_gate"],
    "opened, launched, capped": ["test_forced_the_kernel_is_launched", "test_the_cap_is_a_variable"],
    "v2 refused": ["test_forced_version_2_stays_refused"],
    "bytes restored": ["test_reverting_restores_every_byte"],
    "altered copy refused": ["test_an_edited_file_is_refused"],
}


class Outcomes:
    """A pytest plugin: release → test → the outcomes of all its cases."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.shapes: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.get_closest_marker("every_shape")]
        self.shapes |= items[0].module.SHAPES if items else {}  # type: ignore[attr-defined]
        # One release after the other, so that a download is followed by what it is for.
        order = list(dict.fromkeys(map(self._release, items)))
        items.sort(key=lambda item: order.index(self._release(item)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name, _, case = report.nodeid.rpartition("::")[2].partition("[")
        if (match := re.search(r"\d+(\.\d+)+(\.post\d+)?", case)) and (report.when == "call" or not report.passed):
            self.found[match[0]][name].append(report.outcome)

    @staticmethod
    def _release(item: pytest.Item) -> str:
        return str(item.callspec.params["release"])  # type: ignore[attr-defined]


def cell(tests: dict[str, list[str]], prefixes: list[str]) -> str:
    """yes: all passed; –: no such test for this release; else the worst outcome."""
    outcomes = [outcome for name, all_of in tests.items() for outcome in all_of if name.startswith(tuple(prefixes))]
    if not outcomes:
        return "–"
    return "yes" if set(outcomes) == {"passed"} else "**FAILED**" if "failed" in outcomes else "not tried"


def table(outcomes: Outcomes) -> str:
    """Return the matrix as a Markdown table, in the order in which the releases were tried."""
    rows = ["| release | shape | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---|" * len(COLUMNS)]
    for release, tests in outcomes.found.items():
        cells = [cell(tests, prefixes) for prefixes in COLUMNS.values()]
        rows.append(f"| {release} | {outcomes.shapes.get(release, 'unknown')} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> int:
    """Run the tests; the exit status is pytest's."""
    outcomes = Outcomes()
    status = pytest.main([str(TESTS), "--all-releases", "-q", f"--rootdir={ROOT}"], plugins=[outcomes])
    if not outcomes.found:
        return int(status) or 1
    matrix = table(outcomes)
    print(f"\n{matrix}\n\n{len(outcomes.found)} releases.")
    if "--write" in sys.argv[1:] and status == 0:
        head, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
        DOCUMENT.write_text(f"{head}{BEGIN}\n\n{matrix}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
