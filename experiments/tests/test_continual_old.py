"""An old model that is given, and losses that belong to the backbones they were measured with."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from continual_cases import (
    METHODS,
    TinyImages,
    one_thread,  # noqa: F401
    own_cache,  # noqa: F401
    problem,
    with_backbones,
)
from fcco_experiments.tasks.continual.figures import by_class

SONEX = METHODS["sonex"]


class OtherImages(TinyImages):
    """The same backbone with other weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))


@pytest.fixture
def photos(tmp_path, monkeypatch):
    return with_backbones(tmp_path, monkeypatch)


def test_old_losses_are_those_of_the_own_backbones(photos, tmp_path):
    """Frozen backbones are not in the weights that a file of losses is known by."""
    torch.save(problem(**photos).old_state(0), tmp_path / "old.pt")
    for backbone in (photos["image_backbone"], f"{__name__}:OtherImages"):
        assert __name__ in sys.modules
        fields = photos | {"image_backbone": backbone, "old": str(tmp_path / "old.pt")}
        run = problem(**fields).start(SONEX, 0)
        part, number = run.everything, len(run.config.protected)
        seen, read = run.encoder.all(run.samples, part.rows, run.encoder.texts.prompts)
        direct = by_class(run.encoder.scores(seen, read), part.label).loss[:number]
        label = run.streams.label
        kept = torch.stack([run.old_losses.value[label == k].mean() for k in range(number)])
        torch.testing.assert_close(kept.double(), direct, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("train", ["text", "all"])
def test_trained_backbones_may_start_from_a_given_model(photos, tmp_path, train):
    fields = photos | {"train": train}
    state = problem(**fields).old_state(0)
    torch.save(state, tmp_path / "old.pt")
    run = problem(**fields, old=str(tmp_path / "old.pt")).start(SONEX, 1)
    assert all(torch.equal(value, state[name]) for name, value in run.model.state_dict().items())


@pytest.mark.parametrize("content", [[1, 2], {"a": 3}, {"values": [1]}])
def test_a_file_that_holds_no_weights(tmp_path, content):
    torch.save(content, tmp_path / "old.pt")
    with pytest.raises(ValueError, match="must hold a state dict, names with tensors"):
        problem(old=str(tmp_path / "old.pt")).old_state(0)
