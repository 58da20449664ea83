"""The study of twelve languages: a published table is what runs gave."""

from __future__ import annotations

import numpy as np

from studies import afrisenti, publish


def test_the_published_table_has_every_method_and_language():
    found = publish.table("afrisenti")
    assert list(found["methods"]) == list(afrisenti.METHODS)
    for name, own in found["methods"].items():
        assert own["setting"] in afrisenti.METHODS[name]
        assert np.shape(own["test"]) == (5, len(found["languages"])) == (5, 12)
