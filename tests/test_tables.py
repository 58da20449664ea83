"""Tables of pages: generating them again changes nothing."""

from __future__ import annotations

import pytest

from docs import tables

PAGES = [page for page in tables.PAGES if tables.MARK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_those_of_the_registry_and_of_published_runs(page):
    text = page.read_text(encoding="utf-8")
    assert tables.renewed(text) == text, "run `python -m docs.tables`"
