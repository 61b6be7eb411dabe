"""The report: self-contained, marked where simulated, the same figures as the table."""

import json
import re

import pytest

from servelab import bundle, report

pytest.importorskip("matplotlib")


@pytest.fixture
def campaign(tmp_path):
    """Two sealed runs of a simulated campaign: eagle3 wins at 1, loses at 100."""
    for mode, rates in (("baseline", {1: 50.0, 100: 2000.0}), ("eagle3", {1: 80.0, 100: 1500.0})):
        run_id = f"20261129T10150{len(mode) % 10}Z-{mode}"
        path = tmp_path / "demo" / run_id
        path.mkdir(parents=True)
        run = {
            "schema": "servelab.run/1",
            "run_id": run_id,
            "campaign": "demo",
            "mode": mode,
            "status": "ok",
            "started": "2026-11-29T10:15:00Z",
            "simulated": {"profile": "crossing", "time_scale": 5},
        }
        levels = [
            {"concurrency": c, "valid": True, "invalid_reasons": [], "output_tok_s": r, "accept_length": None}
            for c, r in rates.items()
        ]
        summary = {"levels": levels, "workload": {"seed": 1}, "server": {"model": "<script>alert(1)</script>"}}
        (path / "run.json").write_text(json.dumps(run))
        (path / "summary.json").write_text(json.dumps(summary))
        bundle.seal(path)
    return tmp_path / "demo"


def test_one_file_without_a_network(campaign):
    html, _ = report.write(campaign)
    page = html.read_text()
    # The only addresses are the names of XML vocabularies; nothing is loaded.
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#)", page)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_simulated_is_on_page_chart_table_and_markdown(campaign):
    html, text = report.write(campaign)
    page = html.read_text()
    assert 'class="simulated"' in page
    assert "<!-- simulated (crossing, time ×5) -->" in page  # the chart's watermark
    assert "verdict (simulated)" in page
    assert text.startswith("# demo (simulated)")


def test_answer_first_and_figures(campaign):
    html, text = report.write(campaign)
    page = html.read_text()
    # ln 1.6 = 0.4700 at ln 1 = 0; ln 0.75 = −0.2877 at ln 100 = 4.6052;
    # root 0.4700 / 0.7577 · 4.6052 = 2.8566 = ln 17.4.
    assert "eagle3 pays up to C ≈ 17 (between the measured levels 1 and 100)" in page
    assert page.index("eagle3 pays up to") < page.index("<svg")
    assert "| 100 | 2000.0 | 1500.0 | 0.75 | — | baseline faster |" in text


def test_writing_twice_gives_the_same_file(campaign):
    first = report.write(campaign)[0].read_bytes()
    assert report.write(campaign)[0].read_bytes() == first
