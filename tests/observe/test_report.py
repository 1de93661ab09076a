"""HTML reports of runs: self-contained, opened by a browser, and with the run's figures in them."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from jaxllm.cli import main
from jaxllm.files import DataError
from jaxllm.observe import html_report
from jaxllm.observe.event_log import goodput
from jaxllm.observe.run_record import read_record
from jaxllm.svg import MOST_POINTS, Line, chart, downsample, log_ticks, number, stacked_bar, ticks
from tests.observe.made import events, write_run
from tests.serve.browser import CHROMIUM, Page


def test_goodput_is_the_whole_time_and_counts_each_step_once():
    account = goodput(events())
    assert account is not None
    assert account.total == 300
    assert account.lost == 30, "steps 31 to 40 of 21 to 40, which took 60 s"
    assert account.waiting == 2 + 2
    assert account.steps == 60 - 2 + 30 - 2 + 90
    assert account.down == 24
    assert account.other == {
        "starting": 20, "initialising": 4, "restoring": 6, "compiling": 25, "saving": 6, "evaluating": 4, "ending": 1
    }  # fmt: skip
    assert sum(size for _, size in account.parts()) == account.total
    assert account.restarts == ((40, 30),)
    assert account.fraction == pytest.approx(176 / 300)


def test_all_that_time_is_spent_on_has_a_colour_of_its_own():
    account = goodput(events())
    assert account is not None
    assert sorted(html_report.TIME_COLORS) == sorted(name for name, _ in account.parts())
    bar = stacked_bar([(name, 1.0, n) for n, name in enumerate(html_report.TIME_COLORS)], title="time")
    assert len(set(re.findall(r'<rect class="([^"]+)"', bar))) == len(html_report.TIME_COLORS)


def test_between_two_layers_there_is_no_tick():
    drawn = chart([Line("", [0, 1, 2], [1.0, 2.0, 3.0])], title="norm")
    assert re.findall(r'middle">([^<]+)<', drawn) == ["0", "1", "2"]
    drawn = chart([Line("", [0, 0.5, 1], [1.0, 2.0, 3.0])], title="seconds")
    assert re.findall(r'middle">([^<]+)<', drawn) == ["0", "0.2", "0.4", "0.6", "0.8", "1"]


def test_goodput_of_a_log_cut_anywhere_adds_up():
    whole = events()
    for end in range(1, len(whole) + 1):
        account = goodput(whole[:end])
        assert account is not None
        assert sum(size for _, size in account.parts()) == pytest.approx(whole[end - 1]["time"] - 1000)
    assert goodput([]) is None


def test_a_page_has_the_figures_and_needs_nothing_else(tmp_path):
    run = write_run(tmp_path)
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    for what in (
        "1.2300",
        "58.7% of 5m00s",
        "60 of 60",
        "40.0%",
        "4 x TPU v6 lite",
        "0123456789ab",
        "10 steps repeated",
    ):
        assert what in page, what
    titles = re.findall(r'class="title"[^>]*>([^<]+)<', page)
    assert titles == [
        "loss", "learning rate", "gradient norm", "parameter norm", "update norm", "tokens per second", "MFU", "HFU",
        "step time", "waiting for data", "memory",
    ]  # fmt: skip
    assert not re.search(r"https?:|<script|<link(?! rel=\"icon\" href=\"data:,\")|@import|url\(|src=", page)


def test_what_a_page_shows_is_escaped(tmp_path):
    run = write_run(tmp_path, name="a<b>&c", source="<script>alert(1)</script>")
    page = html_report.html_report(read_record(run))
    assert "<script" not in page
    assert "a&lt;b&gt;&amp;c" in page


def test_two_runs_over_one_another(tmp_path, capsys):
    one, two = write_run(tmp_path, "one"), write_run(tmp_path, "two", seed=1, mesh="fsdp=2,tensor=2")
    out = tmp_path / "both.html"
    assert main(["compare", str(one), str(two), "--out", str(out)]) == 0
    page = out.read_text()
    assert "&quot;fsdp=2,tensor=2&quot;" in page
    loss = page.split("<figure>")[1]
    assert (loss.count('class="line c0"'), loss.count('class="line c1"')) == (2, 2), "a path and a place in the legend"
    assert main(["compare", str(one), "--out", str(out)]) == 2
    assert "two runs" in capsys.readouterr().err


def test_the_text_has_the_same_account(tmp_path, capsys):
    assert main(["report", str(write_run(tmp_path)), "--text"]) == 0
    said = capsys.readouterr().out
    for line in (
        "goodput            58.7% of 5m00s",
        "steps                  2m56s   58.7%",
        "down                  24.0 s    8.0%",
        "resumed after step 30, 10 steps repeated",
    ):
        assert line in said, said


def test_a_directory_without_a_run_is_refused_by_name(tmp_path, capsys):
    write_run(tmp_path / "runs", "mine")
    assert main(["report", str(tmp_path / "runs")]) == 2
    assert "Runs in it: mine" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"no config\.json"):
        read_record(tmp_path / "nothing")


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    run = write_run(tmp_path)
    for file in ("metrics.jsonl", "events.jsonl"):
        (run / file).unlink()
    assert "not finished" in html_report.html_report(read_record(run))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_it_in_light_and_dark_on_a_phone(tmp_path):
    run = write_run(tmp_path)
    assert main(["report", str(run)]) == 0
    page = Page((run / "report.html").as_uri(), tmp_path / "browser")
    try:
        grounds = []
        for scheme in ("light", "dark"):
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            grounds.append(page.run("getComputedStyle(document.body).backgroundColor"))
        assert grounds == ["rgb(255, 255, 255)", "rgb(17, 22, 28)"]
        page.call("Emulation.setDeviceMetricsOverride", width=375, height=800, deviceScaleFactor=2, mobile=True)
        assert page.run("document.documentElement.scrollWidth") <= 375, "nothing sticks out"
        size = page.run("document.querySelector('svg text').getBoundingClientRect().height")
        assert size >= 9, "letters can be read"
        assert page.run("performance.getEntriesByType('resource').length") == 0, "nothing is fetched"
        assert page.run("document.querySelectorAll('figure svg path').length") >= 11
        outline = "getComputedStyle(document.querySelector('.bar rect')).stroke"
        assert page.run(outline) == "none", "an outline, one unit wide, would be a per cent of the bar"
        assert page.complaints == []
    finally:
        page.close()


# The pictures


def test_thinning_keeps_every_spike(rng):
    rng = random.Random(int(rng.integers(2**32)))
    ys: list[float | None] = [rng.random() for _ in range(10_000)]
    high, low, gap = rng.sample(range(10_000), 3)
    ys[high], ys[low], ys[gap] = 7.0, -7.0, None
    kept = downsample(range(10_000), ys)
    assert len(kept) <= MOST_POINTS
    assert {(high, 7.0), (low, -7.0), (0, ys[0]), (9_999, ys[-1])} <= set(kept)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})


def test_ticks_are_round_and_inside(rng):
    rng = random.Random(int(rng.integers(2**32)))
    for _ in range(200):
        low = rng.uniform(-1, 1) * 10 ** rng.randint(-6, 6)
        high = low + 10 ** rng.uniform(-3, 3) * max(abs(low), 1e-9)
        found = ticks(low, high, 5)
        slack = 1e-6 * (high - low)
        assert 2 <= len(found) <= 10
        assert all(low - slack <= value <= high + slack for value in found)
        assert len({round((b - a) / (found[1] - found[0]), 6) for a, b in itertools.pairwise(found)}) == 1
        assert all(low % 5 - 1e-9 <= value <= low % 5 + 0.3 + 1e-9 for value in log_ticks(low % 5, low % 5 + 0.3))


def test_a_line_of_what_cannot_be_drawn():
    gaps = chart([Line("x", [1, 2, 3, 4], [1.0, float("nan"), None, 2.0])], title="t")
    assert re.findall(r' d="(M[^"]*)"', gaps)[0].count("M") == 2
    assert "no values" in chart([Line("x", [1], [0.0])], title="t", log=True)
    assert "no values" in chart([], title="t")
    assert "<circle" in chart([Line("x", [1], [3.0])], title="t"), "one value is a point"
    with pytest.raises(ValueError, match="2 values of x and 1 of y"):
        Line("x", [1, 2], [1.0])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234567, "1.235M"), (12_300, "12.3k"), (4096, "4096"), (0.035, "0.035"), (2e-4, "2.0e-04")],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_bytes_read_from_memory_are_reported():
    event = {"event": "restored", "step": 8, "own_bytes": 3 * 2**19, "peer_bytes": 2**20}
    said = "state of step 8 read from memory: 1.50 MiB of the readers' own hosts, 1.00 MiB of others"
    assert html_report.failure_line(event) == said
