"""Documentation pages: those of mkdocs.yml exist, and so do the targets of their links."""

from __future__ import annotations

import re

import pytest

from tests.environment import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))


def test_the_list_of_the_site_names_pages_that_are_there():
    """The list is in mkdocs.yml. A page that is not on it is found by the site's search."""
    listed = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed)) > 20
    assert set(listed) <= {page.relative_to(ROOT / "docs").as_posix() for page in PAGES}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tpu_scripts/README.md", *PAGES], ids=lambda p: p.name
)
def test_links_lead_somewhere(page):
    """To a file, and to a heading of it where one is named."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name}: {target}"
