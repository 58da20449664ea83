"""Long json lists, record by record."""

from __future__ import annotations

import io
import json

import pytest
from fcco_experiments.data import WrongData
from fcco_experiments.data.bdd100k import records


def test_records_are_read_in_pieces():
    rows = [{"name": f"n{k}", "labels": ["}]{", k, {"x": 'ü\\"'}] * k} for k in range(30)]
    for indent in (None, 2):
        text = json.dumps(rows, indent=indent, ensure_ascii=False)
        for chunk in (1, 2, 7, 64, 1 << 20):
            assert list(records("d", "n", io.StringIO(f"\n {text} \n"), chunk)) == rows
    assert list(records("d", "n", io.StringIO(" [ ] "), 1)) == []


def test_pieces_stay_small(monkeypatch):
    """The window never holds much more than a record; a damaged one ends the reading."""
    from fcco_experiments.data import bdd100k as module

    class Counted(io.StringIO):
        read_so_far = 0

        def read(self, size=-1):
            self.read_so_far += size
            return super().read(size)

    rows = [{"name": "x" * 200} for _ in range(500)]
    stream = Counted(json.dumps(rows))
    found = records("d", "n", stream, 256)
    for _ in range(10):
        next(found)
    assert stream.read_so_far < 10 * 200 + 2000
    monkeypatch.setattr(module, "LONGEST", 4096)
    stream = Counted('[{"name": "' + "x" * 10**6)
    with pytest.raises(WrongData, match="damaged after 0 records: Unterminated string"):
        list(records("d", "n", stream, 256))
    assert stream.read_so_far < 3 * 4096


def test_long_records_take_few_reads():
    class Counted(io.StringIO):
        reads = 0

        def read(self, size=-1):
            self.reads += 1
            return super().read(size)

    stream = Counted(json.dumps([{"name": "x" * 10**5}]))
    assert len(list(records("d", "n", stream, 64))) == 1
    assert stream.reads < 20, "each piece is twice as long"
