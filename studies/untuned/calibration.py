"""Do trackers know how far off they are? Groups whose true losses are known, read by the sampler.

    python -m studies.untuned.calibration --json    # a table; last line: one JSON object
    python -m studies.untuned.calibration --quick   # fewer sizes, one seed

There is no model: the losses of the samples are simulated, and go through `GroupBatchSampler` and
`InnerTracker(gamma="auto")` as in training. A sample's loss is the true loss of its group plus a
deviation of its own, which is fixed and has mean 0 in its group; so the samples of a small group
that a batch leaves out make up for those that it has. Groups differ in the size of deviations.
True losses stand still, go at random, or converge, each group to a limit of its own.

After the last step, over the groups that were seen: the share whose loss is within one and two
standard errors of its estimate (of a normal error 68 % and 95 %; goals 60-76 % and 92-98 %), the
root mean square of the errors that `error()` says, divided by the true one, and that itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from fcco import GroupBatchSampler
from fcco.tracker import InnerTracker

MODELS = ("still", "walk", "converging")
BATCHES = (8, 32)
SIZES = (4, 8, 20, 60)
GROUPS, STEPS = 1000, 500
DRIFT = 0.3
"""Of a true loss between two visits of its group, on average, in deviations of samples."""
GOALS = {"within_1": (0.60, 0.76), "within_2": (0.92, 0.98)}


@dataclass(frozen=True)
class Case:
    """A simulated training.

    Attributes:
        model: how true losses move.
        batch: groups in a batch.
        size: samples of a group.
        per_group: samples of each group in a batch.
        groups: how many there are.
        steps: of the training.
        scale: factor of all losses.
        spread: of the logarithm of the deviation of samples, over groups.
    """

    model: str = "still"
    batch: int = 32
    size: int = 20
    per_group: int = 2
    groups: int = GROUPS
    steps: int = STEPS
    scale: float = 1.0
    spread: float = 0.4


def simulate(case: Case, seed: int = 0, **settings: Any) -> tuple[InnerTracker, np.ndarray]:
    """The tracker after the last step, with `settings`, and the true losses."""
    draw, number = np.random.default_rng(seed), case.groups
    ids = np.arange(number).repeat(case.size)
    apart = draw.normal(size=(number, case.size))
    apart = apart - apart.mean(1, keepdims=True)
    apart = (apart * np.exp(case.spread * draw.normal(size=(number, 1)))).reshape(-1)
    sampler = GroupBatchSampler(ids, case.batch, case.per_group, seed=seed)
    options: dict[str, Any] = {"gamma": "auto", "correction": 0.0, "read": "new", **settings}
    tracker = InnerTracker(number, dtype=torch.float64, **options)
    true, between = 3 + draw.normal(size=number), number / case.batch
    goal, rate = draw.normal(size=number), draw.uniform(0.5, 1.5, size=number)
    for step in range(case.steps):
        if case.model == "walk":
            true = true + DRIFT / between**0.5 * draw.normal(size=number)
        elif case.model == "converging":  # like 1/t, beginning slowly enough to be followed
            true = true - rate * (true - goal) / (step + 4 * between)
        batch = np.array(sampler.draw())
        losses = case.scale * (true[ids[batch]] + apart[batch])
        tracker(torch.from_numpy(losses), torch.from_numpy(ids[batch]))
    return tracker, true


def calibration(case: Case, seeds: int = 3, **settings: Any) -> dict[str, float]:
    """The figures of a case, see the top of this file."""
    errors, said = [], []
    for seed in range(seeds):
        tracker, true = simulate(case, seed, **settings)
        seen, known = tracker.seen.numpy(), tracker.error().numpy()
        errors.append(abs(tracker.rows.numpy() / case.scale - true)[seen])
        said.append(known[seen] / case.scale)
    error, told = np.concatenate(errors), np.concatenate(said)
    knows = ~np.isnan(told)
    rms = float(np.sqrt(np.mean(error**2)))
    error, told = error[knows], told[knows]
    return {
        "within_1": float(np.mean(error <= told)),
        "within_2": float(np.mean(error <= 2 * told)),
        "said_to_true": float(np.sqrt(np.mean(told**2) / np.mean(error**2))),
        "rms": rms,
        "gamma": tracker.gamma,
        "known": float(np.mean(knows)),
    }


def run(quick: bool, seeds: int = 3) -> dict[str, Any]:
    """All cases, printed; two sizes of groups and one seed if `quick`."""
    sizes, seeds = ((4, 20), 1) if quick else (SIZES, seeds)
    found, met = [], 0
    print(f"{'model':<12}{'batch':>7}{'size':>6}{'each':>6}{'within 1':>10}{'within 2':>10}"
          f"{'said/true':>11}{'true rms':>10}{'gamma':>7}{'known':>7}")  # fmt: skip
    for model, batch, size in itertools.product(MODELS, BATCHES, sizes):
        for each in (2,) if size == 4 else (2, 4):
            case = Case(model, batch, size, each)
            row = calibration(case, seeds)
            found.append({**asdict(case), **row})
            good = all(low <= row[name] <= high for name, (low, high) in GOALS.items())
            met += good
            print(f"{model:<12}{batch:>7}{size:>6}{each:>6}{row['within_1']:>10.1%}"
                  f"{row['within_2']:>10.1%}{row['said_to_true']:>11.2f}{row['rms']:>10.3f}"
                  f"{row['gamma']:>7.3f}{row['known']:>7.1%}"
                  f"{'' if good else '  MISSED'}", flush=True)  # fmt: skip
    print(f"within the goals: {met} of {len(found)}")
    return {"cases": found, "met": met}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--quick", action="store_true", help="two sizes of groups, one seed")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = run(options.quick, options.seeds)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
