"""Do trackers know how far off they are? Groups whose true losses are known, read by the sampler.

    python -m studies.untuned.calibration --json    # a table; last line: one JSON object
    python -m studies.untuned.calibration --quick   # fewer sizes, one seed

There is no model: the losses of the samples are simulated, and go through `GroupBatchSampler` and
`InnerTracker(gamma="auto")` as in training. A sample's loss is the true loss of its group plus a
deviation of its own, which is fixed and has mean 0 in its group; so the samples of a small group
that a batch leaves out make up for those that it has. Groups differ in the size of deviations.
True losses stand still, go at random, or converge, each group to a limit of its own.

After the last step, over the groups whose error is known: the share whose loss is within one and
two standard errors of its estimate (of a normal error 68 % and 95 %; goals 60-76 % and 92-98 %),
the root mean square of the errors that `error()` says, divided by the true one, and that itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from fcco import GroupBatchSampler
from fcco.tracker import InnerTracker
from studies import publish
from studies.runner import command, parse

MODELS = ("still", "walk", "converging")
BATCHES, SIZES = (8, 32), (4, 8, 20, 60)  # groups in a batch, samples of a group
GROUPS, STEPS = 1000, 500
DRIFT = 0.3
"""Of a true loss between two visits of its group, on average, in deviations of samples."""
GOALS = {"within_1": (0.60, 0.76), "within_2": (0.92, 0.98)}


def simulate(
    model: str, batch: int, size: int, per_group: int, seed: int
) -> tuple[InnerTracker, np.ndarray]:
    """The tracker after the last step, and the true losses."""
    draw, ids = np.random.default_rng(seed), np.arange(GROUPS).repeat(size)
    apart = draw.normal(size=(GROUPS, size))
    apart = apart - apart.mean(1, keepdims=True)
    apart = (apart * np.exp(0.4 * draw.normal(size=(GROUPS, 1)))).reshape(-1)
    sampler = GroupBatchSampler(ids, batch, per_group, seed=seed)
    tracker = InnerTracker(GROUPS, gamma="auto", correction=0.0, read="new", dtype=torch.float64)
    true, between = 3 + draw.normal(size=GROUPS), GROUPS / batch
    goal, rate = draw.normal(size=GROUPS), draw.uniform(0.5, 1.5, size=GROUPS)
    for step in range(STEPS):
        if model == "walk":
            true = true + DRIFT / between**0.5 * draw.normal(size=GROUPS)
        elif model == "converging":  # like 1/t, beginning slowly enough to be followed
            true = true - rate * (true - goal) / (step + 4 * between)
        rows = np.array(sampler.draw())
        tracker(torch.from_numpy(true[ids[rows]] + apart[rows]), torch.from_numpy(ids[rows]))
    return tracker, true


def figures(model: str, batch: int, size: int, per_group: int, seeds: int) -> dict[str, float]:
    """The figures of a case, see the top of this file."""
    errors, said = [], []
    for seed in range(seeds):
        tracker, true = simulate(model, batch, size, per_group, seed)
        error = tracker.error().numpy()
        known = tracker.seen.numpy() & ~np.isnan(error)
        errors.append(abs(tracker.rows.numpy() - true)[known])
        said.append(error[known])
    error, told = np.concatenate(errors), np.concatenate(said)
    true_rms, told_rms = np.mean(error**2) ** 0.5, np.mean(told**2) ** 0.5
    return {
        "within_1": float(np.mean(error <= told)),
        "within_2": float(np.mean(error <= 2 * told)),
        "said_to_true": float(told_rms / true_rms),
        "rms": float(true_rms),
        "gamma": tracker.gamma,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(command("untuned.calibration", __doc__), arguments, (1, 3))
    found, rows = [], [["case", "within 1", "within 2", "said / true", "true rms", "gamma", ""]]
    sizes = SIZES[::2] if options.quick else SIZES
    for model, batch, size in itertools.product(MODELS, BATCHES, sizes):
        for each in (2,) if size == 4 else (2, 4):
            own = figures(model, batch, size, each, options.seeds)
            case = {"model": model, "batch": batch, "size": size, "per_group": each}
            found.append({**case, **own})
            good = all(low <= own[name] <= high for name, (low, high) in GOALS.items())
            name = f"{model}, {batch} x {each} of {size}"
            rows.append(
                [name, *(f"{value:.3f}" for value in own.values()), "" if good else "MISSED"]
            )
    print(publish.plain(rows))
    publish.conclude(options, "calibration", {"cases": found})


if __name__ == "__main__":
    main()
