"""The study of PACS, AudioMNIST and AfriSenti: its fleets, its figures, its choice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from studies.group_dro import cards


@pytest.fixture
def data(tmp_path, monkeypatch) -> cards.Data:
    monkeypatch.setattr(cards, "EPOCHS", {"pacs": 4})
    random, rows = np.random.RandomState(0), 96
    group, label = np.arange(rows) % 8, random.randint(0, 3, rows)
    x = random.normal(size=(rows, 5)) + label[:, None]
    parts = {}
    for seed in cards.SEEDS:
        order = (8 * random.permutation(12)[:, None] + np.arange(8)).ravel()
        for part, own in zip(cards.PARTS, np.split(order, [56, 72]), strict=True):
            parts[f"{seed}/{part}"] = np.stack([own, label[own], group[own]])
    np.savez(tmp_path / "a.npz", name="pacs", x=x.astype(np.float16), classes=3, **parts)
    return cards.read(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["automatic", "sonex", "ooa-cvar"])
def test_a_run_of_a_fleet_is_that_run_alone_and_has_the_figures_of_loops(data, name):
    setting, seed = cards.grids()[name][3], 2
    drawn = cards.batches(data, plain=False)
    fleet = cards.fleet_of(data, name, [(setting, 0), (setting, seed)], drawn)

    model: Any = cards.network(data, seed)
    alone: Any = cards.member(name, setting, model, data.groups)
    rows, label, group = data.parts[seed]["train"]
    for step, places in enumerate(drawn[:, seed]):
        if step % 20 == 0:
            rate = setting["lr"] * (1 + math.cos(math.pi * step / len(drawn))) / 2
            alone.optimizer.param_groups[0]["lr"] = rate

        def losses(places: torch.Tensor = places) -> torch.Tensor:
            logits = model(data.inputs[seed][rows[places]])
            return cross_entropy(logits, label[places], reduction="none")

        alone.objective(losses, group[places]).backward()
        alone.optimizer.step()
        alone.optimizer.zero_grad()
    for key, value in model.named_parameters():
        torch.testing.assert_close(fleet.weights()[key][1], value.detach(), rtol=1e-4, atol=1e-5)

    found = cards.figures(data, fleet, [0, seed])[1]
    for part, short in cards.PARTS.items():
        own, y, g = (each.numpy() for each in data.parts[seed][part])
        x = data.inputs[seed].numpy()[own]
        logits = x @ model.weight.detach().numpy().T + model.bias.detach().numpy()
        loss = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
        right = logits.argmax(1) == y
        means = sorted(loss[g == k].mean() for k in range(8))
        cvar = (means[-1] + 0.2 * means[-2]) / 1.2  # 15 % of 8 groups
        assert found[f"{short}_cvar"] == pytest.approx(cvar, rel=1e-4)
        worst = min(right[g == k].mean() for k in range(8))
        assert found[f"{short}_worst_accuracy"] == pytest.approx(worst)
        assert found[f"{short}_accuracy"] == pytest.approx(right.mean())
    eigenvalue, gram = cards.eigenvalue(data, fleet, 1, seed), []
    for k in range(8):
        here = rows[group == k], label[group == k]
        loss = cross_entropy(model(data.inputs[seed][here[0]]), here[1])
        flat = torch.autograd.grad(loss, list(model.parameters()))
        gram.append(torch.cat([each.flatten() for each in flat]).double())
    jacobian = torch.stack(gram)
    least = np.linalg.svd(jacobian.numpy(), compute_uv=False)[-1] ** 2
    assert eigenvalue == pytest.approx(least, rel=1e-3, abs=1e-9)


def test_validation_data_choose_and_runs_that_died_do_not_count():
    row = {"data": "pacs", "name": "erm", "seed": 0, "setting": {}}
    rows = [{**row, "val_cvar": v, **more} for v, more in ((2, {}), (1, {}), (0, {"died": 3}))]
    rows.append({**row, "val_cvar": 5, "seed": 1})
    assert [own["val_cvar"] for own in cards.chosen(rows)] == [1, 5]
