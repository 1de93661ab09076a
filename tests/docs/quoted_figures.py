"""Figures that pages quote from stored records. The proof writes them; so does `python -m tests.docs.quoted_figures`.

A page that is made of a record as a whole has a module of its own (``tests.hub.models_page``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from tests import environment
from tests.proofs import stored


class Quoted(NamedTuple):
    """Figures in the prose of a page.

    Args:
        page: name in docs/.
        words: what stands before, between and after the figures; one entry more than there are figures.
        figures: reads them from the record.
    """

    page: str
    words: tuple[str, ...]
    figures: Callable[[], list[str]]

    def text(self) -> str:
        return (environment.ROOT / "docs" / self.page).read_text()

    def pattern(self) -> re.Pattern[str]:
        """Matches the passage wherever its lines break; each figure is a group."""
        return re.compile(r"[\d.]+".join(f"({re.escape(w)})".replace(r"\ ", r"\s+") for w in self.words))

    def filled(self) -> str:
        """The page with the record's figures in it.

        Raises:
            ValueError: the passage is not there exactly once.
        """
        text = self.text()
        if (count := len(self.pattern().findall(text))) != 1:
            raise ValueError(f"docs/{self.page} has {count} passages like {' ... '.join(self.words)!r}, not one")
        figures = [*self.figures(), ""]
        return self.pattern().sub(lambda m: "".join(w + f for w, f in zip(m.groups(), figures, strict=True)), text)


def measured(group: str, name: str) -> Any:
    """Worst errors of a stored proof."""
    return next(case["worst_error"] for case in stored.read(group)["cases"] if case["name"] == name)


def loading() -> list[str]:
    found = measured("real_models", "smollm2_memory")
    return [f"{found[dtype]:.2f}" for dtype in ("float32", "bfloat16")]


FIGURES = {
    "loading": Quoted(
        "performance.md",
        ("peak memory of ", " (float32) and ", " (bfloat16) of the weights' bytes"),
        loading,
    ),
}


def write() -> None:
    """Puts the records' figures into the pages."""
    for quoted in FIGURES.values():
        (environment.ROOT / "docs" / quoted.page).write_text(quoted.filled())


if __name__ == "__main__":
    write()
