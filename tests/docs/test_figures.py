"""Figures that pages quote are those of the stored records."""

from __future__ import annotations

import pytest

from tests.docs import quoted_figures
from tests.docs.quoted_figures import FIGURES, Quoted


@pytest.mark.parametrize("what", FIGURES)
def test_a_page_quotes_the_record(what):
    quoted = FIGURES[what]
    assert quoted.text() == quoted.filled(), "run python -m tests.docs.quoted_figures"


def test_figures_are_put_into_the_passage_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(quoted_figures.environment, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    quoted = Quoted("page.md", ("peak of ", " and ", " bytes"), lambda: ["1.5", "22"])
    page.write_text("A peak of 3. A peak\nof 1.07 and 1.13\nbytes. 7 bytes.\n")
    assert quoted.filled() == "A peak of 3. A peak\nof 1.5 and 22\nbytes. 7 bytes.\n"
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match=r"docs/page\.md has 0 passages"):
        quoted.filled()
