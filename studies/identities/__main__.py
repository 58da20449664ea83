r"""False-positive rates of identities: constraints, group DRO, reweighting, plain training.

    python -m studies.identities --json --out build/identities.jsonl
    python -m studies.identities --words --json          # also told which identities are named
    python -m studies.identities --quick --json          # two minutes
    python -m studies.identities --train all --json      # the whole network, on a GPU

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

import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from fcco_experiments.data import MissingData
from scipy.stats import binomtest

from studies import publish
from studies.runner import Job, Runner, command, parse, published_runs, short, tuned

from . import comments
from .training import END_TO_END, LIMIT, METHODS, NAMED, PLANS, Figures, Setting, grid, run

LOSS = 0.005  # of AUC, that may be given for the rates
SEEDS = range(10, 100)
QUICK_STEPS = 100
BUDGET = {END_TO_END: (1, 3)}  # seeds for settings, fresh ones
USUAL = (2, 10)

Found = dict[str, tuple[Setting, list[Figures]]]


def train(problem: str, runner: Runner, tuning: int, seeds: int, steps: int | None = None) -> Found:
    """For each method the chosen setting, and the figures by seed."""
    grids = {method: grid(method, PLANS[problem].rates) for method in METHODS}

    def job(method: str, setting: Setting, seed: int) -> Job:
        return Job(problem, method, setting, seed, evaluations=steps)

    return tuned(runner, grids, job, range(tuning), SEEDS[:seeds], choose)


def published(problem: str) -> Found:
    """All of it, from the published runs."""
    return train(problem, published_runs("identities"), *BUDGET.get(problem, USUAL))


def excess(own: Figures, part: str) -> list[float]:
    """The rate of each identity less that of all comments."""
    return [wrong / number - own["fpr"][part] for wrong, number in own["groups"][part]]


def doubtful_excess(own: Figures, part: str) -> list[float]:
    """The same and one standard error that a rate at the limit would have."""
    rate = own["fpr"][part] + LIMIT
    errors = [(rate * (1 - rate) / number) ** 0.5 for _, number in own["groups"][part]]
    return [sum(pair) for pair in zip(excess(own, part), errors, strict=True)]


def choose(tried: Mapping[str, list[list[Figures]]]) -> dict[str, int]:
    """The place of the chosen setting of each method, from validation data."""

    def aims(runs: list[Figures]) -> tuple[float, float]:
        worst = statistics.fmean(max(doubtful_excess(each, "val")) for each in runs)
        return statistics.fmean(each["auc"]["val"] for each in runs), worst

    found = {name: [aims(runs) for runs in own] for name, own in tried.items()}
    most = max(auc for auc, _ in found["erm"])
    places = {
        name: [max(worst / LIMIT, (most - auc) / LOSS) for auc, worst in own]
        for name, own in found.items()
    }
    places["erm"] = [-auc for auc, _ in found["erm"]]
    return {name: values.index(min(values)) for name, values in places.items()}


def figures(own: Figures, erm: Figures) -> dict[str, float]:
    """What is reported of a run on test data."""
    limit, found = own["fpr"]["test"] + LIMIT, excess(own, "test")

    def rejected(side: str) -> int:
        """Identities whose rate is on that side of the limit by more than chance."""
        tests = (binomtest(wrong, n, limit, side) for wrong, n in own["groups"]["test"])
        return sum(bool(test.pvalue < 0.05) for test in tests)

    return {
        "auc": own["auc"]["test"],
        "auc loss": erm["auc"]["test"] - own["auc"]["test"],
        "fpr": own["fpr"]["test"],
        "tpr": own["tpr"]["test"],
        "largest excess": max(found),
        "groups within": sum(each <= LIMIT for each in found),
        "groups above": rejected("greater"),
        "groups proved": rejected("less"),
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
    counts = (run["groups"]["test"][place] for run in runs)
    return statistics.fmean(wrong / number for wrong, number in counts)


def by_group(found: Found) -> list[list[str]]:
    """The rate of each identity, with the standard error of so many test comments."""
    every = [runs for _, runs in found.values()]
    overall = (f"{statistics.fmean(run['fpr']['test'] for run in runs):.3f}" for runs in every)
    rows = [["identity", "comments", *found], ["all comments", "", *overall]]
    for place, group in enumerate(comments.WORDS):
        number = every[0][0]["groups"]["test"][place][1]
        means = (rates(runs, place) for runs in every)
        cells = (f"{rate:.3f} ± {(rate * (1 - rate) / number) ** 0.5:.3f}" for rate in means)
        rows.append([group, str(number), *cells])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("identities", __doc__)
    add = parser.add_argument
    add("--train", choices=("head", "all"), default="head")
    add("--words", action="store_true", help="a head is told the identities too")
    whole = parser.parse_args(arguments).train == "all"
    problem_budget = BUDGET[END_TO_END] if whole else USUAL
    options = parse(parser, arguments, (2, problem_budget[1]))
    if whole and options.words:
        parser.error("--words is for a head: a whole network reads the words themselves.")
    problem = END_TO_END if whole else NAMED if options.words else "features"
    kind = "tokens" if whole else "counts" if options.quick else "features"
    tuning, steps = (0, QUICK_STEPS) if options.quick else (problem_budget[0], None)
    runner = Runner(partial(run, kind=kind), dict, options.workers, options.out)
    try:
        comments.load(kind, options.words)  # features are computed once
        found = train(problem, runner, tuning, options.seeds, steps)
    except (MissingData, FileNotFoundError) as reason:
        parser.exit(1, f"{short(reason)}\n")
    rows = {problem: table(found), "groups": by_group(found)}
    print("\n\n".join(publish.plain(own) for own in rows.values()) + "\n")
    for name, (setting, _) in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in setting.items()))
    device = "cuda" if whole and torch.cuda.is_available() else "cpu"
    publish.conclude(options, "identities", rows, runner.entries(), device)


if __name__ == "__main__":
    main()
