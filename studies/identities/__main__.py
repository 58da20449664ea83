r"""False-positive rates of identities: constraints, group DRO, reweighting, plain training.

    python -m studies.identities --json --out build/identities.jsonl
    python -m studies.identities --words --json          # also told which identities are named
    python -m studies.identities --quick --json          # two minutes
    python -m studies.identities --save build/comments   # files for a machine with a GPU
    python -m studies.identities --train all --tokens build/comments/tokens.npz \
        --weights build/comments/minilm --json

Comments on Wikipedia's talk pages are toxic or not. 22 identities, which overlap, are told by words
in the comment. The rate of false positives of each identity should be at most 0.02 above that of
all comments, at the threshold at which 5 % of all validation comments that are not toxic are
called toxic. Reported on test data:

| figure | meaning |
|---|---|
| `auc`, `fpr`, `tpr` | of all comments |
| `auc loss` | AUC of `erm` with the same seed less this one |
| `largest excess` | of an identity's rate above that of all comments |
| `groups within` | identities with an excess of at most 0.02 |
| `groups above` | that are above by more than chance: exact binomial test, 5 % |
| `groups proved` | whose rate is below the limit with 95 % confidence, by the same test |

A head is trained on features of the frozen MiniLM, or with `--train all` the whole network. Each
method has four settings, of the whole network two. On validation data (mean of the tuning seeds)
`erm` takes the one with the largest AUC, the others the one that comes nearest to both aims, of
which the worse counts: the largest excess, plus one standard error of it, over 0.02, and the loss
of AUC over 0.005. Then come fresh seeds.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fcco_experiments.stats import spread

from studies import publish
from studies.runner import Job, Runner, command, note, parse, short, tuned

from . import comments
from .methods import LIMIT, METHODS, Setting
from .training import END_TO_END, PLANS, WORDS, Figures, Files, run

LOSS = 0.005  # of AUC, that may be given for the rates
SEEDS = range(10, 100)
QUICK_STEPS = 100
BUDGET = {END_TO_END: (1, 3)}  # seeds for settings, fresh ones
USUAL = (2, 10)

Found = dict[str, tuple[Setting, list[Figures]]]


def train(problem: str, runner: Runner, tuning: int, seeds: int, steps: int | None = None) -> Found:
    """For each method the chosen setting, and the figures by seed."""
    grids = {name: method.grid(PLANS[problem].rates) for name, method in METHODS.items()}

    def job(method: str, setting: Setting, seed: int) -> Job:
        return Job(problem, method, setting, seed, evaluations=steps)

    return tuned(runner, grids, job, range(tuning), SEEDS[:seeds], choose)


def published(problem: str) -> Found:
    """All of it, from the published runs."""
    runner = Runner(partial(run, files=Files()), Figures, 0, publish.runs("identities"))
    return train(problem, runner, *BUDGET.get(problem, USUAL))


def choose(tried: Mapping[str, list[list[Figures]]]) -> dict[str, int]:
    """The place of the chosen setting of each method, from validation data."""

    def aims(runs: list[Figures]) -> tuple[float, float]:
        excess = statistics.fmean(max(each.doubtful_excess("val")) for each in runs)
        return statistics.fmean(each.auc["val"] for each in runs), excess

    found = {name: [aims(runs) for runs in own] for name, own in tried.items()}
    most = max(auc for auc, _ in found["erm"])
    places = {
        name: [max(excess / LIMIT, (most - auc) / LOSS) for auc, excess in own]
        for name, own in found.items()
    }
    places["erm"] = [-auc for auc, _ in found["erm"]]
    return {name: values.index(min(values)) for name, values in places.items()}


def figures(own: Figures, erm: Figures) -> dict[str, float]:
    """What is reported of a run on test data."""
    from scipy.stats import binomtest

    limit, excess = own.fpr["test"] + LIMIT, own.excess("test")
    tests = [(wrong, number, limit) for wrong, number in own.groups["test"]]
    above, below = (
        sum(bool(binomtest(*each, alternative=side).pvalue < 0.05) for each in tests)
        for side in ("greater", "less")
    )
    return {
        "auc": own.auc["test"],
        "auc loss": erm.auc["test"] - own.auc["test"],
        "fpr": own.fpr["test"],
        "tpr": own.tpr["test"],
        "largest excess": max(excess),
        "groups within": sum(each <= LIMIT for each in excess),
        "groups above": above,
        "groups proved": below,
    }


def collect(found: Found) -> dict[str, dict[str, list[float]]]:
    """Each figure of each method by seed."""
    told = {}
    for name, (_, runs) in found.items():
        rows = [figures(*pair) for pair in zip(runs, found["erm"][1], strict=True)]
        told[name] = {key: [row[key] for row in rows] for key in rows[0]}
    return told


COLUMNS = {
    "AUC": ("auc", 4),
    "less than ERM": ("auc loss", 4),
    "TPR": ("tpr", 3),
    "largest excess": ("largest excess", 3),
    "within": ("groups within", 1),
    "above by more than chance": ("groups above", 1),
    "proved": ("groups proved", 1),
}


def table(found: Found, *columns: str) -> list[list[str]]:
    """Methods by figures: mean and standard deviation over seeds."""
    columns = columns or tuple(COLUMNS)
    rows = [["", *columns]]
    for name, row in collect(found).items():
        shown = (COLUMNS[column] for column in columns)
        rows.append([name, *(publish.mean_std(row[key], digits) for key, digits in shown)])
    return rows


def rates(runs: Sequence[Figures], place: int) -> float:
    """The rate of an identity, mean over seeds."""
    counts = (run.groups["test"][place] for run in runs)
    return statistics.fmean(wrong / number for wrong, number in counts)


def by_group(found: Found) -> list[list[str]]:
    """The rate of each identity, with the standard error of so many test comments."""
    every = [runs for _, runs in found.values()]
    overall = (f"{statistics.fmean(run.fpr['test'] for run in runs):.3f}" for runs in every)
    rows = [["identity", "comments", *found], ["all comments", "", *overall]]
    for place, group in enumerate(comments.WORDS):
        number = every[0][0].groups["test"][place][1]
        means = (rates(runs, place) for runs in every)
        cells = (f"{rate:.3f} ± {(rate * (1 - rate) / number) ** 0.5:.3f}" for rate in means)
        rows.append([group, str(number), *cells])
    return rows


def means(found: Found) -> dict[str, Any]:
    """Mean and standard deviation of each figure, for JSON."""
    return {
        name: {
            key: dict(zip(("mean", "std"), (round(x, 5) for x in spread(values)), strict=True))
            for key, values in row.items()
        }
        for name, row in collect(found).items()
    }


def published_figures() -> dict[str, Any]:
    return {problem: means(published(problem)) for problem in PLANS}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("identities", __doc__)
    add = parser.add_argument
    add("--train", choices=("head", "all"), default="head")
    add("--words", action="store_true", help="a head is told the identities too")
    add("--tuning", type=int, help="seeds for the settings: 2, 1 of a network")
    add("--steps", type=int, help="of every run")
    add("--arrays", type=Path, metavar="FILE", help="features, as .npz")
    add("--tokens", type=Path, metavar="FILE", help="for --train all")
    add("--weights", type=Path, metavar="FOLDER", help="for --train all")
    add("--save", type=Path, metavar="FOLDER", help="write both files and stop")
    add("--device", help="of a whole network; the GPU where there is one")
    whole = parser.parse_args(arguments).train == "all"
    problem_budget = BUDGET[END_TO_END] if whole else USUAL
    options = parse(parser, arguments, (2, problem_budget[1]))
    if options.save:
        comments.save(options.save)
        return
    if whole and options.tokens is None:
        parser.error("--train all needs --tokens FILE, written by --save.")
    if whole and options.words:
        parser.error("--words is for a head: a whole network reads the words themselves.")
    if not whole and (options.tokens or options.weights):
        parser.error("--tokens and --weights are for --train all.")
    problem = END_TO_END if whole else WORDS if options.words else "features"
    tuning = 0 if options.quick else options.tuning or problem_budget[0]
    steps = options.steps or (QUICK_STEPS if options.quick else None)
    gpu = whole and torch.cuda.is_available()
    device = options.device or ("cuda" if gpu else "cpu")
    try:
        with tempfile.TemporaryDirectory() as folder:
            if options.quick and not whole and options.arrays is None:
                note([], "Reading the comments; features are counts of words.")
                options.arrays = Path(folder) / "counts.npz"
                np.savez(options.arrays, **comments.read("counts"))  # type: ignore[arg-type]
            files = Files(options.tokens or options.arrays, options.weights, device)
            do = partial(run, files=files)
            runner = Runner(do, Figures, options.workers, options.out)
            found = train(problem, runner, tuning, options.seeds, steps)
    except FileNotFoundError as reason:
        parser.exit(1, f"{short(reason)}\n")
    print(f"{publish.plain(table(found))}\n\n{publish.plain(by_group(found))}\n")
    for name, (setting, _) in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in setting.items()))
    told = means(found)
    if options.publish:
        publish.write(
            publish.RESULTS / "identities", {problem: told}, runner.entries(),
            device=device, commit=options.commit,
        )  # fmt: skip
    if options.json:
        print(json.dumps(told))


if __name__ == "__main__":
    main()
