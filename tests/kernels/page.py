"""The tables of docs/internals/kernels.md, made of the stored record of `make proof kernels`; the text around them is
written.

python -m tests.kernels.page        writes them
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests import environment
from tests.proofs import stored
from tests.proofs.kernels.aot import matrices

PAGE = environment.ROOT / "docs" / "internals" / "kernels.md"
RECORD = stored.FOLDER / "kernels.json"
BEGIN, END = "<!-- {}: generated -->\n", "<!-- end -->"
NOTHING = "Not compiled yet: `make proof kernels`.\n"


def table(matrix: Any, each: Mapping[str, Mapping[str, float]] | None) -> str:
    """Shapes by kinds of device: MiB of temporaries where it compiles, else a part of the compiler's reason.

    Args:
        matrix: see tests/proofs/kernels/aot.py.
        each: errors of each cell, of the record; None if there are none.
    """
    if each is None:
        return NOTHING
    kinds = list(dict.fromkeys(cell[-1].partition(":")[0] for cell in matrix.CELLS))
    rows: dict[str, dict[str, str]] = {}
    for cell in matrix.CELLS:
        errors = each.get(" / ".join(cell))
        text = "not compiled yet" if errors is None else f"{errors['temp_gib'] * 1024:.1f}"
        text = matrix.EXEMPT.get(cell, text).replace("|", "/").replace("\n", " ")
        rows.setdefault(", ".join(cell[:-1]), {})[cell[-1].partition(":")[0]] = text
    lines = [["shape", *kinds], ["---"] * (len(kinds) + 1)]
    lines += [[shape, *(found.get(kind, "") for kind in kinds)] for shape, found in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def render(page: str, record: Mapping[str, Any] | None, found: Mapping[str, Any]) -> str:
    """The page with its tables renewed; an operation that it does not mention gets a section at the end."""
    cases = {case["name"]: case for case in record["cases"]} if record else {}
    for name, matrix in found.items():
        begin = BEGIN.format(name)
        if begin not in page:
            page += f"\n## {name.replace('_', ' ').capitalize()}\n\n{begin}{END}\n"
        start = page.index(begin) + len(begin)
        case = cases.get(f"{name}_compiles")
        page = page[:start] + table(matrix, None if case is None else case["each"]) + page[page.index(END, start) :]
    return page


def record() -> Mapping[str, Any] | None:
    """The stored record; None before the first complete run."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else None


def write() -> None:
    """Writes the tables."""
    PAGE.write_text(render(PAGE.read_text(), record(), matrices()))


if __name__ == "__main__":
    write()
    print(PAGE)
