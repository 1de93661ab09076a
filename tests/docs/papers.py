"""docs/papers.md, made from docs/papers.tsv: paper -> module -> test -> command.

python -m tests.docs.papers
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parents[2] / "docs"
HEAD = """# Papers

Papers that are implemented here, with the module, the test that compares it with the paper's definition, and a command
that shows it. Use it to find the code of a technique. A module's docstring says which part of a paper it follows, and
where it departs from it; "in part" says what of the paper's mechanism is missing. Made from [papers.tsv](papers.tsv)
by `python -m tests.docs.papers`; a test checks that each module names its paper and that tests and commands exist.

| paper | technique | module | test | command |
|---|---|---|---|---|
"""


class Paper(NamedTuple):
    """A row of the table.

    Attributes:
        paper: arXiv number.
        name: technique of the paper.
        module, test: files.
        command: one shell command that shows it.
        missing: parts of the paper's mechanism that are not there; empty: none.
    """

    paper: str
    name: str
    module: str
    test: str
    command: str
    missing: str


def papers() -> list[Paper]:
    """The rows."""
    with (FOLDER / "papers.tsv").open(newline="") as file:
        head, *rows = csv.reader(file, delimiter="\t")
    assert tuple(head) == Paper._fields
    return [Paper(*row) for row in rows]


def page() -> str:
    """The page."""
    rows = [
        f"| [{row.paper}](https://arxiv.org/abs/{row.paper}) | {row.name}"
        f"{f'; **in part**, missing: {row.missing}' if row.missing else ''} | `{row.module}` | `{row.test}` "
        f"| `{row.command}` |\n"
        for row in sorted(papers(), key=lambda row: (row.module, row.paper))
    ]
    return HEAD + "".join(rows)


if __name__ == "__main__":
    (FOLDER / "papers.md").write_text(page())
