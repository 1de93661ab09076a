"""Figures that pages quote are those of the stored records."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests import environment
from tests.proofs import stored


def measured(group: str, name: str) -> Any:
    """Worst errors of a stored proof."""
    cases = json.loads((stored.FOLDER / f"{group}.json").read_text())["cases"]
    return next(case["worst_error"] for case in cases if case["name"] == name)


def loading() -> list[str]:
    found = measured("real_models", "smollm2_memory")
    return [f"{found[dtype]:.2f}" for dtype in ("float32", "bfloat16")]


FIGURES: dict[str, tuple[str, str, Callable[[], list[str]]]] = {
    "loading": (
        "performance.md",
        r"peak memory of ([\d.]+) \(float32\) and ([\d.]+) \(bfloat16\) of the weights' bytes",
        loading,
    ),
}
"""What -> (page of docs/, pattern whose groups are the figures, the figures)."""


@pytest.mark.parametrize("what", FIGURES)
def test_a_page_quotes_the_record(what):
    page, pattern, figures = FIGURES[what]
    text = (environment.ROOT / "docs" / page).read_text()
    found = re.findall(pattern.replace(" ", r"\s+"), text)
    assert [list(one) for one in found] == [figures()]
