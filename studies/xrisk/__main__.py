"""Average precision, partial AUC and NDCG: ours beside LibAUC, plain losses and LambdaRank.

    python -m studies.xrisk --json --workers 14 --out build/xrisk.jsonl
    python -m studies.xrisk --quick --json               # under three minutes
    python -m studies.xrisk --data hiv                   # part of it

A multilayer perceptron on fixed features. Every X-risk starts from the same cross-entropy (a third
of the steps) and takes the same batches; cross-entropy and focal loss have as many steps in all.
Each method has four settings, chosen by the metric itself on validation data (mean of two seeds);
then come fresh seeds with the chosen one. Of each run counts the checkpoint that is best on
validation data: for an X-risk one after its start, for the plain losses any. Reported is the metric
on test data:

| metric | meaning |
|---|---|
| `AP` | average precision |
| `pAUC` | area of the ROC curve at FPR <= 0.3, over 0.3; not McClish's rescaling of it |
| `tpAUC` | area where FPR <= 0.5 and TPR >= 0.5, over 0.25 |
| `NDCG@5`, `NDCG@10` | mean over queries, gains 2^relevance - 1 |

The full study takes two CPU-hours or so. LibAUC and LightGBM are left out where they are not
installed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fcco_experiments.stats import paired, spread

from studies import publish
from studies.runner import Job, Runner, available, command, note, parse, published_runs, tuned

from .methods import METHODS, OURS, PLAIN, Setting, missing
from .problems import DATA, load, metrics_of
from .training import run

TUNING_SEEDS, SEEDS = (0, 1), range(10, 100)
QUICK_STEPS, QUICK_DATA = 90, ("hiv", "ranking")


class Cell(NamedTuple):
    """A method on a metric of a data set."""

    data: str
    metric: str
    method: str


Found = dict[Cell, list[float]]
"""The metric on test data by seed."""


def cells(data: Iterable[str] = DATA) -> list[Cell]:
    return [Cell(d, metric, m) for d in data for metric in metrics_of(d) for m in METHODS[metric]]


def train(some: Sequence[Cell], runner: Runner, seeds: int, quick: bool = False) -> Found:
    """Choose a setting for each cell, and measure it on fresh seeds."""

    def job(cell: Cell, setting: Setting, seed: int) -> Job:
        """A plain loss is trained once for all metrics of its data."""
        problem = cell.data if cell.method in PLAIN else f"{cell.data} / {cell.metric}"
        return Job(problem, cell.method, setting, seed, evaluations=QUICK_STEPS if quick else None)

    def choose(tried: dict[Cell, list[list[dict[str, Any]]]]) -> dict[Cell, int]:
        places = {}
        for cell, own in tried.items():
            means = [spread(each["val"][cell.metric] for each in runs)[0] for runs in own]
            # A run that diverged is less than any other.
            means = [mean if math.isfinite(mean) else -math.inf for mean in means]
            places[cell] = means.index(max(means))
        return places

    grids = {cell: METHODS[cell.metric][cell.method] for cell in some}
    found = tuned(runner, grids, job, () if quick else TUNING_SEEDS, SEEDS[:seeds], choose)
    return {cell: [each["test"][cell.metric] for each in own] for cell, (_, own) in found.items()}


def published() -> Found:
    """All of it, from the published runs."""
    return train(cells(), published_runs("xrisk"), 10)


def table(found: Found) -> list[list[str]]:
    """Means, and ours less each, with interval."""
    rows = [["data, metric", "method", "mean ± std", "ours − it, 95 %"]]
    for cell, values in found.items():
        mine = found.get(cell._replace(method=OURS))
        versus = "" if mine is None or cell.method == OURS else publish.ahead_by(mine, values)
        rows.append([f"{cell.data}, {cell.metric}", cell.method, publish.mean_std(values), versus])
    return rows


COUNTERPARTS = {"AP": "SOAP", "pAUC": "SOPA", "tpAUC": "STACO", "NDCG@5": "SONG", "NDCG@10": "SONG"}
"""The loss of LibAUC for the same metric."""
TITLES = {
    "hiv": "HIV molecules", "toxicity": "toxic comments", "bald": "bald faces",
    "gray_hair": "gray hair", "ranking": "query lists",
}  # fmt: skip


def rivals(cell: Cell) -> list[Cell]:
    """LibAUC's loss for the same metric, and cross-entropy."""
    plain = "listwise" if cell.data == "ranking" else "bce"
    return [
        cell._replace(method=f"libauc {COUNTERPARTS[cell.metric]}"),
        cell._replace(method=plain),
    ]


def short_table(found: Found) -> list[list[str]]:
    """Means of ours and both rivals; bold where the interval of the difference excludes 0."""
    rows = [["data", "metric", "fcco", "LibAUC", "cross-entropy"]]
    for cell, mine in found.items():
        if cell.method == OURS:
            row = [TITLES[cell.data], cell.metric, f"{spread(mine)[0]:.3f}"]
            for rival in rivals(cell):
                mark = "**" if paired(mine, found[rival]).decided else ""
                name = rival.method.removeprefix("libauc ") if "libauc" in rival.method else ""
                row.append(f"{mark}{spread(found[rival])[0]:.3f}{mark} {name}".rstrip())
            rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("xrisk", __doc__)
    parser.add_argument("--data", nargs="+", choices=list(DATA), help="all of them unless given")
    options = parse(parser, arguments, (2, 10))
    gone = missing()
    for prefix, reason in gone.items():
        note(options.left_out, f"{prefix} is left out: {reason}")
    # The features of a backbone take long, the first time; no worker computes them.
    wanted = options.data or (QUICK_DATA if options.quick else DATA)
    some = cells(available(wanted, load, options.left_out))
    some = [cell for cell in some if not cell.method.startswith(tuple(gone))]
    if not some:
        parser.exit(1, "Nothing is left to train.\n")
    runner = Runner(run, dict, options.workers, options.out)
    found = train(some, runner, options.seeds, options.quick)
    rows = table(found)
    print(publish.plain(rows))
    told = {"rows": rows, "left_out": options.left_out}
    publish.conclude(options, "xrisk", told, runner.entries())


if __name__ == "__main__":
    main()
