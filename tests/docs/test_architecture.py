"""docs/architecture.md: its pictures are those that the command draws, and every named file exists."""

from __future__ import annotations

import re

import pytest

from benchmarks import architecture
from tests.environment import ROOT

PAGE = ROOT / "docs" / "architecture.md"


@pytest.mark.parametrize("name", architecture.PICTURES)
def test_pictures_are_drawn_by_the_command(name):
    title, boxes = architecture.PICTURES[name]
    stored = (ROOT / "docs" / "images" / f"{name}.svg").read_text()
    assert stored == architecture.draw(title, boxes), "python -m benchmarks.architecture"
    missing = [file for file in architecture.files_of(boxes) if not (ROOT / file).is_file()]
    assert not missing


def test_the_page_names_files_that_exist():
    named = [word for word in re.findall(r"`([\w/.]+)`", PAGE.read_text()) if "/" in word]
    assert len(named) > 20
    homes = (ROOT, ROOT / "jaxllm", ROOT / "jaxllm" / "infer")
    assert not [word for word in named if not any((home / word).exists() for home in homes)]
