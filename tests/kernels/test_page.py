"""docs/internals/kernels.md agrees with the stored record."""

from __future__ import annotations

import types

from tests.kernels import page
from tests.proofs.kernels.aot import matrices

TOY = types.SimpleNamespace(
    CELLS=(("small", "v4:2x2x1"), ("small", "h100:1x2"), ("large", "v4:2x2x1"), ("large", "h100:1x2")),
    EXEMPT={("large", "v4:2x2x1"): "too | large"},
)


def test_the_page_is_that_of_the_record():
    text = page.PAGE.read_text()
    assert text == page.render(text, page.record(), matrices()), "python -m tests.kernels.page"


def test_a_table():
    each = {"small / v4:2x2x1": {"temporaries": 0.1, "temp_gib": 0.5}, "large / v4:2x2x1": {"temp_gib": 0.0}}
    record = {"cases": [{"name": "toy_compiles", "each": each}]}
    written = page.render("# Kernels\n", record, {"toy": TOY})
    assert written == page.render(written, record, {"toy": TOY})
    head, _, small, large = (line for line in written.splitlines() if line.startswith("|"))
    assert head == "| shape | v4 | h100 |"
    assert small == "| small | 512.0 | not compiled yet |"
    assert large == "| large | too / large | not compiled yet |"
    assert page.NOTHING in page.render(written, None, {"toy": TOY})
    assert page.render(written, None, {"toy": TOY}).startswith("# Kernels\n\n## Toy\n")
