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
of AUC over 0.005. Then come fresh seeds. Finished runs are kept in the file `--out`; another run
with the same file continues.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from studies.runner import Job, Runner, short

from . import comments
from .methods import LIMIT, METHODS, Setting
from .training import END_TO_END, PLANS, WORDS, Figures, Files, run

LOSS = 0.005  # of AUC, that may be given for the rates
SEEDS = range(10, 100)
QUICK_STEPS = 100

Found = dict[str, tuple[Setting, list[Figures]]]


def train(options: argparse.Namespace) -> Found:
    """For each method the chosen setting, and the figures by seed."""
    files = Files(options.tokens or options.arrays, options.weights, options.device)
    runner = Runner(partial(run, files=files), Figures, options.workers, options.out)
    grids = {name: METHODS[name].grid(PLANS[options.problem].rates) for name in METHODS}

    def job(method: str, setting: Setting, seed: int) -> Job:
        return Job(options.problem, method, setting, seed, evaluations=options.steps)

    chosen = {name: grid[0] for name, grid in grids.items()}
    if not options.quick:
        seeds = range(options.tuning)
        jobs = {
            name: [[job(name, setting, seed) for seed in seeds] for setting in grid]
            for name, grid in grids.items()
        }
        runner([each for grid in jobs.values() for some in grid for each in some], "settings")
        tried = {
            name: [validation([runner.known[each.key] for each in some]) for some in grid]
            for name, grid in jobs.items()
        }
        places = choose(tried)
        chosen = {name: grids[name][place] for name, place in places.items()}
    seeds = SEEDS[: options.seeds]
    jobs = {name: [job(name, chosen[name], seed) for seed in seeds] for name in METHODS}
    runner([each for some in jobs.values() for each in some], "seeds")
    return {
        name: (chosen[name], [runner.known[each.key] for each in some])
        for name, some in jobs.items()
    }


def validation(runs: list[Figures]) -> tuple[float, float]:
    """AUC, and the largest excess with its standard error, on validation data: means over runs."""
    auc = statistics.fmean(each.auc["val"] for each in runs)
    return auc, statistics.fmean(max(each.doubtful_excess("val")) for each in runs)


def choose(tried: dict[str, list[tuple[float, float]]]) -> dict[str, int]:
    """The place of the chosen setting of each method, from what `validation` gave for each."""
    most = max(auc for auc, _ in tried["erm"])

    def shortfall(auc: float, excess: float) -> float:
        return max(excess / LIMIT, (most - auc) / LOSS)

    places = {name: [shortfall(*each) for each in some] for name, some in tried.items()}
    places["erm"] = [-auc for auc, _ in tried["erm"]]
    return {name: values.index(min(values)) for name, values in places.items()}


def figures(own: Figures, erm: Figures) -> dict[str, float]:
    """What is reported of a run on test data."""
    from scipy.stats import binomtest

    limit, excess = own.fpr["test"] + LIMIT, own.excess("test")
    tests = [(wrong, number, limit) for wrong, number in own.groups["test"]]
    above, below = (
        [binomtest(*each, alternative=side).pvalue < 0.05 for each in tests]
        for side in ("greater", "less")
    )
    return {
        "auc": own.auc["test"],
        "auc loss": erm.auc["test"] - own.auc["test"],
        "fpr": own.fpr["test"],
        "tpr": own.tpr["test"],
        "largest excess": max(excess),
        "groups within": sum(each <= LIMIT for each in excess),
        "groups above": int(sum(above)),
        "groups proved": int(sum(below)),
    }


def collect(found: Found) -> dict[str, dict[str, dict[str, float]]]:
    """In the form of the JSON: mean and standard deviation over seeds."""
    told: dict[str, dict[str, dict[str, float]]] = {}
    for name, (_, runs) in found.items():
        pairs = zip(runs, found["erm"][1], strict=True)
        rows = [figures(own, erm) for own, erm in pairs]
        told[name] = {}
        for figure in rows[0]:
            values = [row[figure] for row in rows]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            told[name][figure] = {
                "mean": round(statistics.fmean(values), 5), "std": round(spread, 5),
            }  # fmt: skip
    return told


def markdown(found: Found) -> str:
    """The table of methods in docs/research/details/identities.md."""
    lines = [
        "| | AUC | less than ERM | TPR | largest excess | within | above by more than chance "
        "| proved |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in collect(found).items():
        cells = [
            told(row[figure], digits)
            for figure, digits in (
                ("auc", 4), ("auc loss", 4), ("tpr", 3), ("largest excess", 3),
                ("groups within", 1), ("groups above", 1), ("groups proved", 1),
            )
        ]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def told(value: dict[str, float], digits: int) -> str:
    """Mean and standard deviation."""
    return f"{value['mean']:.{digits}f} ± {value['std']:.{digits}f}"


def by_group(found: Found) -> str:
    """The rate of each identity, mean over seeds, with the standard error of the test comments."""
    names = list(found)
    lines = [f"| identity | comments | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    overall = " | ".join(
        f"{statistics.fmean(each.fpr['test'] for each in runs):.3f}" for _, runs in found.values()
    )
    lines.append(f"| all comments | | {overall} |")
    for place, group in enumerate(comments.WORDS):
        number, cells = 0, []
        for _, runs in found.values():
            counts = [each.groups["test"][place] for each in runs]
            number = counts[0][1]
            rate = statistics.fmean(wrong / number for wrong, number in counts)
            cells.append(f"{rate:.3f} ± {(rate * (1 - rate) / number) ** 0.5:.3f}")
        lines.append(f"| {group} | {number} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m studies.identities", description=summary, epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument(
        "--quick", action="store_true", help="few steps, two seeds, no choice, words for features"
    )
    parser.add_argument("--train", choices=("head", "all"), default="head")
    parser.add_argument("--words", action="store_true", help="a head is told the identities too")
    parser.add_argument("--seeds", type=int, help="10; 3 of a whole network, 2 with --quick")
    parser.add_argument("--tuning", type=int, help="seeds for the settings: 2, 1 of a network")
    parser.add_argument("--steps", type=int, help="of every run")
    parser.add_argument("--workers", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--out", type=Path, help="file of JSON lines with finished runs")
    parser.add_argument("--arrays", type=Path, metavar="FILE", help="features, as .npz")
    parser.add_argument("--tokens", type=Path, metavar="FILE", help="for --train all")
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="for --train all")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write both files and stop")
    parser.add_argument("--device", help="of a whole network; the GPU where there is one")
    options = parser.parse_args(arguments)
    if options.save:
        comments.save(options.save)
        return
    whole = options.train == "all"
    if whole and options.tokens is None:
        parser.error("--train all needs --tokens FILE, written by --save.")
    if whole and options.words:
        parser.error("--words is for a head: a whole network reads the words themselves.")
    if not whole and (options.tokens or options.weights):
        parser.error("--tokens and --weights are for --train all.")
    options.problem = END_TO_END if whole else WORDS if options.words else "features"
    options.seeds = options.seeds or (2 if options.quick else 3 if whole else 10)
    options.tuning = options.tuning or (1 if whole else 2)
    options.steps = options.steps or (QUICK_STEPS if options.quick else None)
    gpu = whole and torch.cuda.is_available()
    options.device = options.device or ("cuda" if gpu else "cpu")
    try:
        with tempfile.TemporaryDirectory() as folder:
            if options.quick and not whole and options.arrays is None:
                print("Reading the comments; features are counts of words.", file=sys.stderr)
                options.arrays = Path(folder) / "counts.npz"
                np.savez(options.arrays, **comments.read("counts"))  # type: ignore[arg-type]
            found = train(options)
    except FileNotFoundError as reason:
        parser.exit(1, f"{short(reason)}\n")
    print(f"{markdown(found)}\n\n{by_group(found)}\n")
    for name, (setting, _) in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in setting.items()))
    if options.json:
        print(json.dumps(collect(found)))


if __name__ == "__main__":
    main()
