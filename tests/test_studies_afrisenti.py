"""The study of twelve languages: its score, and that a published table is what runs gave."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from studies import afrisenti, publish

metrics = pytest.importorskip("sklearn.metrics")


def test_the_score_is_the_macro_f1_of_each_language():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 3, generator=generator)
    y = torch.randint(3, (300,), generator=generator)
    language = torch.randint(4, (300,), generator=generator)
    found = afrisenti.f1(logits, afrisenti.Split(logits, y, 3 * language + y), 4)
    for k in range(4):
        own = language == k
        expected = metrics.f1_score(y[own], logits[own].argmax(1), average="macro")
        assert found[k] == pytest.approx(expected, abs=1e-5)


def test_the_published_table_has_every_method_and_language():
    found = publish.table("afrisenti")
    assert list(found["methods"]) == list(afrisenti.METHODS)
    for name, own in found["methods"].items():
        assert own["setting"] in afrisenti.METHODS[name]
        assert np.shape(own["test"]) == (5, len(found["languages"])) == (5, 12)
