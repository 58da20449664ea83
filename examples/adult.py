"""A limit and the worst groups on census data, with the library's defaults: `make demo`.

Adult (UCI): does a person earn more than 50,000 dollars? One network, optimizer, schedule and
number of steps for all; they were chosen on validation rows for the mean loss. What is trained on:

* a limit on a gap: the shares of women and of men above 50K that the model finds (its true-positive
  rates) differ by at most 0.02. Beside it a penalty and
  a multiplier by hand, whose weight or step one has to choose.
* the worst two of eight groups, women or men x married or not x below or above 50K. Beside it the
  mean loss in balanced batches, and group DRO by hand.

Prints a table; writes `demo/report.html` and the figures, `demo/figures.json`. All of it is about
the official test rows unless it says training.

    python -m examples.adult
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from fcco_experiments import data
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import fcco
from examples.adult_page import (
    BALANCED_MEAN,
    BY_HAND,
    LIMIT,
    LIMITED,
    MEAN,
    OURS,
    WORST,
    Runs,
    page,
    tables,
    verdicts,
)

RATE, EPOCHS, BATCH = 0.003, 10, 512
GROUPS = [
    f"{married} {sex}, {income}"
    for sex in ("women", "men")
    for married in ("unmarried", "married")
    for income in ("below", "above")
]
Loss = Callable[..., Tensor]  # of a batch: features, label, whether a woman, group


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and test rows; the data are fetched if this machine does not have them."""
    adult = data.load("adult", validation=0.0)
    names = adult.feature_names
    spouse = [names.index(f"marital-status=Married-{kind}-spouse") for kind in ("civ", "AF")]
    parts = []
    for part in (adult.train, adult.test):
        x, y = torch.tensor(part.features), torch.tensor(part.label)
        woman = torch.tensor(part.group) == adult.group_names.index("Female")
        married = (x[:, spouse] > 0).any(1)
        parts.append(TensorDataset(x, y.float(), woman, 4 * ~woman + 2 * married + y))
    return parts[0], parts[1]


def gap(scores: Tensor, y: Tensor, woman: Tensor) -> fcco.Measured:
    """Of people above 50K: the share that is found, of women minus of men."""
    women, men = scores[woman & (y == 1)], scores[~woman & (y == 1)]
    count = (women > 0).float().mean() - (men > 0).float().mean()
    return fcco.Measured(count, torch.sigmoid(women).mean() - torch.sigmoid(men).mean())


# What is trained on. Each makes a loss from the model and its optimizer.


def mean(model: nn.Module, optimizer: torch.optim.Optimizer) -> Loss:
    return lambda x, y, woman, group: cross_entropy(model(x).squeeze(1), y)


def limit(model: nn.Module, optimizer: torch.optim.Optimizer) -> Loss:
    objective = fcco.constrained(model, optimizer, {"gap": (-LIMIT, LIMIT)})

    def loss(x: Tensor, y: Tensor, woman: Tensor, group: Tensor) -> Tensor:
        def loss_and_values() -> tuple[Tensor, dict[str, Any]]:
            scores = model(x).squeeze(1)
            return cross_entropy(scores, y), {"gap": gap(scores, y, woman)}

        return objective(loss_and_values)

    return loss


def penalty(weight: float) -> Callable[..., Loss]:
    def method(model: nn.Module, optimizer: torch.optim.Optimizer) -> Loss:
        def loss(x: Tensor, y: Tensor, woman: Tensor, group: Tensor) -> Tensor:
            scores = model(x).squeeze(1)
            excess = gap(scores, y, woman).surrogate.abs() - LIMIT
            return cross_entropy(scores, y) + weight * excess.relu()

        return loss

    return method


def multiplier(step: float) -> Callable[..., Loss]:
    def method(model: nn.Module, optimizer: torch.optim.Optimizer) -> Loss:
        weights = torch.zeros(2)  # of the upper and of the lower limit

        def loss(x: Tensor, y: Tensor, woman: Tensor, group: Tensor) -> Tensor:
            scores = model(x).squeeze(1)
            count, soft = gap(scores, y, woman)
            weights.add_(step * (torch.stack([count, -count]) - LIMIT)).clamp_(min=0)
            return cross_entropy(scores, y) + weights @ torch.stack([soft, -soft])

        return loss

    return method


def worst_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> Loss:
    dro = fcco.CVaRGroupDRO(model, optimizer, names=GROUPS, ratio=WORST / len(GROUPS))

    def loss(x: Tensor, y: Tensor, woman: Tensor, group: Tensor) -> Tensor:
        return dro(lambda: cross_entropy(model(x).squeeze(1), y, reduction="none"), group)

    return loss


def group_dro(model: nn.Module, optimizer: torch.optim.Optimizer) -> Loss:
    weights = torch.ones(len(GROUPS))

    def loss(x: Tensor, y: Tensor, woman: Tensor, group: Tensor) -> Tensor:
        losses = cross_entropy(model(x).squeeze(1), y, reduction="none")
        means = fcco.group_mean(losses, group, len(GROUPS)).values
        weights.mul_(torch.exp(0.01 * means.detach())).div_(weights.sum())
        return weights @ means

    return loss


LIMITS: dict[str, Callable[..., Loss]] = {
    MEAN: mean,
    **{f"penalty by hand, weight {weight:g}": penalty(weight) for weight in (0.1, 1, 10)},
    **{f"multiplier by hand, step {step:g}": multiplier(step) for step in (0.01, 0.1)},
    LIMITED: limit,
}
BALANCED: dict[str, Callable[..., Loss]] = {  # every batch has the groups alike
    BALANCED_MEAN: mean,
    BY_HAND: group_dro,
    OURS: worst_groups,
}


def train(name: str, rows: TensorDataset, seed: int, epochs: int = EPOCHS) -> nn.Module:
    torch.manual_seed(seed)
    x, _, _, group = rows.tensors
    model = nn.Sequential(nn.Linear(x.shape[1], 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    if name in BALANCED:
        sampler = fcco.GroupBatchSampler(group, batch_size=BATCH, seed=seed)
    else:
        sampler = BatchSampler(RandomSampler(rows), BATCH, drop_last=True)
    batches = DataLoader(rows, sampler=sampler, batch_size=None)  # whole batches at once: faster
    # To nearly 0: at a constant rate the last steps move what is limited at random.
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, epochs * len(batches))
    loss_of = (LIMITS | BALANCED)[name](model, optimizer)
    for _ in range(epochs):
        for batch in batches:
            loss_of(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return model


@torch.no_grad()
def measure(model: nn.Module, rows: TensorDataset) -> dict[str, Any]:
    """Figures of a model on these rows; `rates` are false positives and true positives."""
    x, y, woman, group = rows.tensors
    scores = model(x).squeeze(1)
    right = ((scores > 0) == y.bool()).float()
    losses = cross_entropy(scores, y, reduction="none")
    losses, accuracies = (fcco.group_mean(v, group, len(GROUPS)).values for v in (losses, right))
    thresholds = scores.unique()
    thresholds = torch.cat([thresholds, thresholds.new_zeros(1)])
    curves, variance = {}, 0.0
    for name, own in (("women", woman), ("men", ~woman)):
        curves[name] = [above(scores[own & (y == label)], thresholds) for label in (0, 1)]
        found = curves[name][1][-1].item()
        variance += found * (1 - found) / int((own & (y == 1)).sum())
    pairs = [one - other for one, other in zip(*curves.values(), strict=True)]
    shown = torch.linspace(0, len(thresholds) - 2, 200).long()
    return {
        "accuracy": right.mean().item(),
        "gap": pairs[1][-1].item(),
        "error": math.sqrt(variance),  # of the gap: other rows of the same kind have another
        "ROC gap": max(pair.abs().max().item() for pair in pairs),
        "worst": losses.topk(WORST).values.mean().item(),
        "lowest": accuracies.min().item(),
        "groups": accuracies.tolist(),
        "rates": {name: [rate[-1].item() for rate in own] for name, own in curves.items()},
        "curves": {
            name: [[round(share, 4) for share in rate[shown].tolist()] for rate in own]
            for name, own in curves.items()
        },
    }


def above(scores: Tensor, thresholds: Tensor) -> Tensor:
    """The share of scores above each threshold."""
    place = torch.searchsorted(scores.sort().values, thresholds, right=True)
    return 1 - place.float() / len(scores)


def main(
    folder: str | Path = "demo", seeds: Sequence[int] = range(5), epochs: int = EPOCHS
) -> Runs:
    torch.set_num_threads(1)  # small matrices: more are slower
    rows, test = load()
    runs: Runs = {name: {"train": [], "test": []} for name in (*LIMITS, *BALANCED)}
    for seed in seeds:
        for name, own in runs.items():
            model = train(name, rows, seed, epochs)
            own["train"].append(measure(model, rows))
            own["test"].append(measure(model, test))
            del own["train"][-1]["curves"]
            if seed != seeds[0]:  # one picture is drawn
                del own["test"][-1]["curves"]
        print(f"seed {seed} done", file=sys.stderr)
    for table in tables(runs):
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for first, *others in table:
            cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
            print(f"{first:<{widths[0]}}", *cells, sep="  ")
        print()
    for sentence in verdicts(runs):
        print(textwrap.fill(sentence, 98), end="\n\n")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figures.json").write_text(json.dumps(runs, indent=1))
    (folder / "report.html").write_text(page(verdicts(runs), tables(runs), runs, GROUPS))
    print(f"Report: {folder / 'report.html'}")
    return runs


if __name__ == "__main__":
    main()
