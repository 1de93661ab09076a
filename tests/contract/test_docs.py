"""The pages: each is on the site's list, and what they link to is there."""

from __future__ import annotations

import re

import pytest

from tests.environment import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))


def test_every_page_is_on_the_list():
    """That of mkdocs.yml; `make docs` builds the site with warnings as errors."""
    listed = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == [page.relative_to(ROOT / "docs").as_posix() for page in PAGES]


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
