"""Tables of pages: generating them again changes nothing. Published files name a clean commit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs import tables
from studies.publish import RESULTS

PAGES = [page for page in tables.PAGES if tables.MARK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_those_of_the_registry_and_of_published_runs(page):
    text = page.read_text(encoding="utf-8")
    assert tables.renewed(text) == text, "run `python -m docs.tables`"


def is_clean(path: Path) -> bool:
    found = json.loads(path.read_text(encoding="utf-8"))
    meta = found.get("meta", found) if isinstance(found, dict) else {}
    revision = meta.get("environment", meta).get("revision") or meta.get("commit") or ""
    return all(re.fullmatch("[0-9a-f]{7,40}", each) for each in revision.split("; "))


def test_published_files_name_a_clean_commit():
    unclean = {path.parent.name for path in RESULTS.rglob("*.json") if not is_clean(path)}
    assert not unclean
