"""Links are valid, and every page can be found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .pages import DOCS, PAGES, ROOT, anchors, links, relative


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_the_targets_of_links_exist(page: Path) -> None:
    """Files and headings."""
    for target in links(page):
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.is_file(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(goal), f"{target}: {goal.name} has no such heading"


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_relative_to(DOCS)], ids=relative)
def test_pages_of_the_site_link_within_the_site(page: Path) -> None:
    """The site consists of docs/, so other links would be broken there."""
    for target in links(page):
        path = target.partition("#")[0]
        assert not path or (page.parent / path).resolve().is_relative_to(DOCS), target


def test_every_page_is_in_the_navigation_once() -> None:
    """Decisions are for contributors and have their own index."""
    listed = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    existing = [page.relative_to(DOCS) for page in PAGES if page.is_relative_to(DOCS)]
    assert sorted(listed) == sorted(str(page) for page in existing if page.parts[0] != "decisions")


def test_every_decision_is_in_their_index_once() -> None:
    """The navigation of the site does not list them."""
    listed = re.findall(r"^\| \[\d+\]\((\S+)\)", (DOCS / "decisions" / "index.md").read_text(), re.MULTILINE)
    existing = [page.name for page in (DOCS / "decisions").glob("*.md") if page.name != "index.md"]
    assert sorted(listed) == sorted(existing)
