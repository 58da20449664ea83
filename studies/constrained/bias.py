"""How wrong a penalty on mini-batch values is, against the batch size, in a real run.

    python -m studies.constrained.bias --publish
    python -m studies.constrained.bias --quick --json     # two sizes, few steps

At each of the last steps of a training run the penalised quantity is computed three ways: from all
data (the truth), from the batch, and from the running estimates of the same run. What is shown is
the mean difference to the truth over steps and constraints, on COMPAS.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from fcco_experiments.data import MissingData
from torch.nn.functional import relu

import fcco
from studies import publish
from studies.runner import command, parse, short

from .fairness import RocFairness
from .problems import adam

SIZES = (4, 8, 16, 32, 64, 128)


def measure(
    problem: RocFairness, sizes: tuple[int, ...] = SIZES, steps: int = 600, seed: int = 0
) -> dict[str, list[float]]:
    """Bias of |gap| and of [|gap| - kappa]_+ for batches of 4 times `sizes` samples."""
    result: dict[str, list[float]] = {"batch": [4.0 * size for size in sizes]}
    for size in sizes:
        smaller = problem.stated("pairs")
        smaller.per_cell = size
        for name, value in _one(smaller, steps, seed).items():
            result.setdefault(name, []).append(value)
    return result


def _one(problem: RocFairness, steps: int, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    model = problem.model()
    optimizer, draw = adam(problem, model), problem.batches(seed)
    outer = fcco.outer.TwoSidedHinge(problem.kappa, 14.0)
    objective = fcco.constrained(
        model, optimizer, problem.num_constraints, "sonex", outer=outer, smoothing=1e-2,
        gamma=0.02,
    )  # fmt: skip
    found: dict[str, list[float]] = {}
    for number in range(steps):
        batch = draw()
        if number > steps // 2 and number % 5 == 0:
            with torch.no_grad():
                truth = problem.gaps(problem.rates(model))
                sources = {
                    "batch": problem.measure(model, batch)[1],
                    "tracked": objective.term.tracker.value,
                }
            true = (truth[:, 0] - truth[:, 1]).abs()
            found.setdefault("gap truth", []).append(true.mean().item())
            for source, rates in sources.items():
                gap = (rates[:, 0] - rates[:, 1]).abs()
                hinges = relu(gap - problem.kappa) - relu(true - problem.kappa)
                found.setdefault(f"gap {source}", []).append((gap - true).mean().item())
                found.setdefault(f"hinge {source}", []).append(hinges.mean().item())
        objective(lambda: problem.measure(model, batch)).backward()  # noqa: B023
        for group in optimizer.param_groups:  # the estimates settle as the learning rate falls
            group["lr"] = problem.schedule.lr * (1.0 if number < steps // 4 else 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: statistics.fmean(values) for name, values in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("constrained.bias", __doc__)
    options = parse(parser, arguments, (1, 1))
    try:
        problem = RocFairness.load("compas")
    except (MissingData, FileNotFoundError) as reason:
        parser.exit(1, f"{short(reason)}\n")
    found = measure(problem, SIZES[:2], 40) if options.quick else measure(problem)
    print(publish.plain([[name, *(f"{x:.4g}" for x in row)] for name, row in found.items()]))
    publish.conclude(options, "constrained-bias", {"bias": found})


if __name__ == "__main__":
    main()
