"""The report: self-contained, marked where simulated, the same figures as the table."""

import json
import re

import made_campaign
import pytest

from servelab import report
from servelab.cli import main


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Five repetitions of a simulated campaign whose crossover is C = 40, and their report: (directory, page, text)."""
    campaign = made_campaign.make(tmp_path_factory.mktemp("results") / "demo")
    html, text = report.write(campaign)
    return campaign, html.read_text(), text


@pytest.fixture
def single(tmp_path):
    return made_campaign.make(tmp_path / "demo", repetitions=1, noise=0.0)


def test_one_file_without_a_network(written):
    _, page, _ = written
    # The only addresses are the names of XML vocabularies; nothing is loaded.
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#)", page)
    assert not re.search(r"url\((?!#)", page)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_simulated_is_on_page_every_chart_table_and_markdown(written):
    _, page, text = written
    assert 'class="simulated"' in page
    assert page.count("<svg") == 5
    assert page.count(">simulated (crossing, time ×5)</text>") == 5
    assert "verdict (simulated)" in page
    assert text.startswith("# demo (simulated)")


def test_answer_first_with_an_interval_that_holds_the_truth(written):
    _, page, text = written
    found = re.search(r"eagle3 pays up to C = ([\d.]+) \[([\d.]+), ([\d.]+)\]; beyond, baseline is faster\.", page)
    estimate, low, high = map(float, found.groups())
    assert low <= 40 <= high
    assert estimate == pytest.approx(40, rel=0.06)  # no extra levels were measured here
    assert page.index(found[0]) < page.index("<svg")
    assert found[0] in text


def test_figures_of_single_runs_by_hand(single):
    html, text = report.write(single)
    # C=100: 100 / 70 ms = 1428.6 tok/s and 250 / 205 ms = 1219.5 tok/s, ratio 0.85; a step of eagle3 205 ms.
    assert "| 100 | 1428.6 | 1219.5 | 0.85 | 2.50 | baseline faster |" in text
    assert "One run per mode" in text
    # At 2.5 tokens a verify may cost 2.5 · 70 = 175 ms, or must yield 205 / 70 = 2.93 tokens.
    assert (
        "C=100: a step of eagle3 takes 205.0 ms and yields 2.50 tokens, one of baseline takes 70.0 ms for one. "
        "It does not pay: at this accept length it may take 175.0 ms, or at this step time it must yield 2.93 tokens."
    ) in html.read_text()


def test_what_it_takes_to_repeat_a_run_is_there(written):
    _, page, _ = written
    assert (
        "ansible-playbook bench.yml -e mode=eagle3 -e campaign=demo -e levels=1,2,5,10,30,70,100 -e bench_seed=3"
        in page
    )
    for fact in ("580.95.05", "588ec39a", "Debian GNU/Linux 13 (trixie)", "638274; 620000"):
        assert fact in page


def test_a_refused_headline_is_none_and_forced_carries_its_reasons(single, capsys):
    provenance = next(single.glob("*-eagle3")) / "provenance.json"
    provenance.write_text(provenance.read_text().replace("580.95.05", "590.1"))
    page = report.write(single)[0].read_text()
    assert "No headline: these runs cannot be compared." in page
    assert "pays up to" not in page
    assert main(["report", str(single), "--force"]) == 0
    page = (single / "report.html").read_text()
    assert "NOT COMPARABLE, printed by force: In one run of each, eagle3 pays up to" in page
    assert "the driver differs: 580.95.05/580.95.05" in page


def test_charts_take_the_pages_colours_and_are_files_too(written):
    campaign, page, _ = written
    charts = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert "var(--base)" in charts
    assert "currentColor" in charts
    assert not re.search(r"#(?!000000|ffffff)[0-9a-f]{6}\b", charts)  # every colour is a variable of the page
    names = sorted(path.name for path in campaign.glob("*.png"))
    assert names == [
        f"report-eagle3-{name}.png" for name in ("cards", "distributions", "pareto", "steps", "throughput")
    ]


def test_writing_twice_gives_the_same_file(written):
    campaign, page, _ = written
    assert report.write(campaign)[0].read_text() == page


def test_a_crossover_comes_with_the_configuration_for_one_server(written):
    campaign, page, text = written
    # The crossover is near 40, and no log tells the batch: batches up to 40 speculate, those padded to 48 do not.
    document = {"1": {"candidate_steps": [2]}, "48": {"candidate_steps": [0]}}
    assert json.loads((campaign / "adaptive-eagle3.json").read_text()) == document
    assert f"with adaptive-eagle3.json ({json.dumps(document)})." in text
    assert "Which mode at which load (simulated)" in page
    assert json.loads((campaign / "routes.json").read_text())[0] == {"from": 1, "mode": "eagle3"}
