"""The page's table of starts is made of the kept figures."""

from __future__ import annotations

import json

from benchmarks import cold_start


def test_the_page_has_the_kept_figures(tmp_path):
    found = json.loads(cold_start.FILE.read_text())
    written = cold_start.PAGE.read_text()
    assert cold_start.BEGIN + cold_start.table(found) + cold_start.END in written
    page, file = tmp_path / "page.md", tmp_path / "figures" / "start.json"
    page.write_text(written)
    found["rounds"]["llm"]["cold"] = [[77.71, 1.0]] * 3
    cold_start.keep(found, file, page)
    assert json.loads(file.read_text()) == found
    assert "| 77.7 |" in page.read_text()
    assert page.read_text().replace("77.7", "") != written.replace("77.7", "")
    cold_start.keep(json.loads(cold_start.FILE.read_text()), file, page)
    assert page.read_text() == written


def test_figures_hold_what_is_asked():
    found = json.loads(cold_start.FILE.read_text())
    assert set(found["rounds"]) == set(cold_start.ASKED)
    for way, asked in cold_start.ASKED.items():
        for kind, most in zip(("cold", "warm"), asked, strict=True):
            assert sorted(seconds for seconds, _ in found["rounds"][way][kind])[1] < most
    assert all(one["late"] == 0 for kind in found["programs"].values() for one in kind)
    for kind, programs in found["programs"].items():
        for (ready, _), one in zip(found["rounds"]["serve"][kind], programs, strict=True):
            assert one["seconds"] > ready  # all programs, not the first
