"""HTML report on a compiled program: self-contained, valid, silent, and consistent with the program."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from jaxllm.compiler import live_ranges, program_walker
from jaxllm.compiler.aot import CompileReport
from jaxllm.compiler.program_report import ProgramReport
from jaxllm.compiler.timeline import Rates
from tests.compiler.test_walker import PLACES, SAID, made_up
from tests.serve.browser import CHROMIUM, Page

VOID = {"meta", "link", "br"}
SHAPES = {"rect", "line", "path", "circle", "polygon"}


def reading(estimate: str = SAID, platform: str = "h100:1x8", rates: bool = True) -> ProgramReport:
    text = made_up(estimate)
    program, memory = program_walker.read(text, PLACES), live_ranges.read(text)
    report = CompileReport(
        name="a <step> & more", topology=platform, num_devices=8, jax="0", compiler="xla 1", lower_seconds=1.0,
        compile_seconds=2.0, argument_bytes=4096, output_bytes=0, alias_bytes=0, temp_bytes=memory.temp_bytes,
        code_bytes=0, host_bytes=0, hbm_bytes=2**20, collectives=program.collectives, cycles=None, unknown_loops=0,
    )  # fmt: skip
    return ProgramReport(report, program, memory, Rates(1e6, 1e6, lambda exchange: 1e-3) if rates else None)


class Parsed(HTMLParser):
    """Checks that elements nest, and collects them."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_needs_nothing_else():
    parsed = Parsed(reading().html())
    assert "script" not in {tag for tag, _ in parsed.tags}
    links = [value for _, attrs in parsed.tags for key, value in attrs.items() if key in ("src", "href")]
    assert links == ["data:,"]
    assert not re.search(r"url\(|@import|https?:", reading().html())


def test_the_page_says_what_it_is_made_of():
    one = reading()
    parsed = Parsed(one.html())
    assert "a <step> & more on h100:1x8" in parsed.text
    assert "xla 1" in parsed.text
    assert "by roofline alone" in parsed.text
    assert all(word in parsed.text for word in ("data+tensor+network", "all-gather", "all-reduce"))
    assert one.timeline is not None
    assert sum(tag == "polygon" for tag, _ in parsed.tags) == 1 + len(one.memory.live), "arguments and each kind"
    assert all(name in parsed.text for name in one.memory.live)


def test_unknown_kernels_are_named():
    assert "counted as nothing: z (5 runs)" in Parsed(reading("").html()).text
    assert "counted as nothing" not in Parsed(reading().html()).text


def test_without_rates_there_are_sizes_and_no_times():
    text = Parsed(reading(rates=False).html()).text
    assert "Memory of a device" in text
    assert "roofline" not in text


def test_numbers_are_finite_and_inside():
    """Every coordinate is a number in its picture."""
    size = (0.0, 0.0)
    for tag, attrs in Parsed(reading().html()).tags:
        if tag == "svg":
            size = tuple(float(n) for n in (attrs["viewbox"] or "").split()[2:])
        if tag in SHAPES:
            for key, limit in (("x", 0), ("x1", 0), ("x2", 0), ("cx", 0), ("y", 1), ("y1", 1), ("y2", 1), ("cy", 1)):
                if attrs.get(key) is not None:
                    assert -1 <= float(attrs[key] or "nan") <= size[limit] + 1, (tag, attrs)
            assert "nan" not in str(attrs)
            assert "inf" not in str(attrs.get("d"))


def test_a_notebook_shows_it_in_a_frame():
    (frame,) = [attrs for tag, attrs in Parsed(reading()._repr_html_()).tags if tag == "iframe"]
    assert frame["srcdoc"] == reading().html()


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt install chromium")
def test_a_browser_has_nothing_to_complain_of(tmp_path):
    file = tmp_path / "step.html"
    file.write_text(reading().html())
    page = Page(file.as_uri(), tmp_path / "browser")
    try:
        assert page.run("document.querySelectorAll('svg').length") == 3
        assert page.run("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.run("[...document.querySelectorAll('svg text')].every(t => t.getBBox().x >= 0)")
        assert page.complaints == []
    finally:
        page.close()
