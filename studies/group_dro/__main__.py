"""Group DRO on CelebA, sentiment and Amazon: all methods with equal tuning, many seeds.

    python -m studies.group_dro heads --data celeba --workers 2 --out build/heads.jsonl
    python -m studies.group_dro networks --data celeba --workers 4 --out build/networks.jsonl

Every run is one of the task `fcco compare group-dro`. `heads` trains linear heads on features of a
frozen network with the settings that `fcco sweep` found for the configs; only the automatic method
is tuned here, by a learning rate and a momentum. `networks` trains every weight, on a GPU; it tunes
four settings of each method. Settings are chosen on validation data of tuning seeds; fresh seeds
have splits of their own.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from fcco_experiments import config as configs
from fcco_experiments import environment
from fcco_experiments.config import ConfigError
from fcco_experiments.data import MissingData
from fcco_experiments.stats import spread
from fcco_experiments.store import clean
from fcco_experiments.task import Method
from fcco_experiments.tasks.group_dro import TASK

from studies import publish
from studies.runner import Job, Runner, command, parse, short, tuned

from . import report
from .training import run

TUNING = {"heads": (1000,), "networks": (1000, 1001)}
FRESH = range(2000, 2100)
RULES = {"val_cvar": "", "train_cvar": "-train"}
"""By which figure settings of heads were chosen, and how the config with those settings ends."""
DECAY = {"celeba": 0.02, "sentiment": 0.01, "amazon": 0.01}  # the appendix
AUTOMATIC = "automatic"


def network_grids(text: bool, decay: float) -> dict[str, list[Method]]:
    """Four settings of each method; the learning rates suit a pretrained network for texts or not.

    All but SONX, which is a plain subgradient method, take steps of Adam.
    """
    low, high = (2e-5, 1e-4) if text else (1e-4, 4e-4)
    rates = (low / 2, low, (low * high) ** 0.5, high)
    tracking = {"gamma": 0.5, "correction": 0.1, "read": "new"}
    double = {"gamma": 0.5, "theta": 0.125, "smoothing": 0.1, "nu": 0.1, "inner_steps": 5}

    def pairs(word: str, name: str, values: Sequence[float], **settings: Any) -> list[Method]:
        return [
            Method(method=word, lr=lr, settings={**settings, name: value})
            for lr, value in itertools.product((low, high), values)
        ]

    grids = {
        AUTOMATIC: [Method(method="sonex", lr=lr) for lr in rates],
        "sonex": pairs("sonex", "smoothing", (0.1, 1.0), **tracking),
        "sonx": [
            Method(method="sonx", lr=lr, update="sgd", settings=tracking)  # type: ignore[arg-type]
            for lr in (0.001, 0.003, 0.01, 0.03)
        ],
        "ooa": pairs("ooa", "step", (0.01, 0.1), plain=True),
        "ooa-cvar": pairs("ooa", "step", (0.01, 0.1)),
        # One outer step for five inner ones, so its rates are larger.
        "alexr2": [
            replace(method, lr=2 * method.lr)
            for method in pairs("alexr2", "eta", (0.005, 0.05), **double)
        ],
        "uniform": [Method(method="uniform", lr=lr) for lr in rates],
        "erm": [Method(method="erm", lr=lr) for lr in rates],
    }
    return {n: [replace(m, weight_decay=decay) for m in own] for n, own in grids.items()}


def head_grids(data: str, rule: str) -> dict[str, list[Method]]:
    """The settings of the config, and those that the automatic method chooses from."""
    found = configs.load(TASK, data + RULES[rule]).methods
    automatic = [
        Method(method="sonex", lr=lr, beta=beta, weight_decay=DECAY[data])
        for lr in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
        for beta in (0.1, 0.5, 0.8)
    ]
    return {AUTOMATIC: automatic, **{name: [method] for name, method in found.items()}}


def train(
    part: str, config: str, rule: str, grids: dict[str, list[Method]], runner: Runner, seeds: int
) -> list[report.Run]:
    """Rows of the fresh seeds of every method; what is tuned has several settings."""

    def job(name: str, method: Method, seed: int) -> Job:
        return Job(config, name, asdict(method), seed)

    def choose(tried: dict[str, list[list[dict[str, Any]]]]) -> dict[str, int]:
        """The least mean; a setting with a run that died counts as the worst."""
        found = {}
        for name, own in tried.items():
            means = [spread(row.get(rule, math.nan) for row in runs)[0] for runs in own]
            found[name] = means.index(min(means, key=lambda mean: (math.isnan(mean), mean)))
        return found

    found: dict[str, Any] = {}
    for several, tuning in ((True, TUNING[part]), (False, ())):
        some = {name: own for name, own in grids.items() if (len(own) > 1) == several}
        found |= tuned(runner, some, job, tuning, FRESH[:seeds], choose)
    same = {"data": config.partition("-")[0], "stage": rule if part == "heads" else "fresh"}
    return [
        {**same, "name": name, "seed": seed, "setting": setting_of(found[name][0]), **row}
        for name in grids
        for seed, row in zip(FRESH, found[name][1], strict=False)
    ]


def setting_of(method: Method) -> dict[str, Any]:
    """The numbers of a setting, for a table."""
    beta = {} if method.update == "sgd" else {"beta": method.beta}
    return {"lr": method.lr, "update": method.update, **beta, **method.settings}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("group_dro", __doc__)
    add = parser.add_argument
    add("part", choices=list(TUNING))
    add("--data", required=True, choices=list(DECAY))
    add("--device", default="auto", help="the GPU where there is one")
    add("--epochs", type=int, help="4 of `networks`, else those of the config")
    options = parse(parser, arguments, (1, 10))
    heads, data = options.part == "heads", options.data
    overrides = [f"device={environment.device(options.device)}", f"spectrum={not heads}".lower()]
    rows: list[report.Run] = []
    try:
        first = configs.load(TASK, data)
        epochs = options.epochs or (1 if options.quick else None if heads else 4)
        if epochs is not None:  # a step schedule that ends as low in fewer epochs
            decay = max(1, round(first.decay_epochs * epochs / first.epochs))
            overrides += [f"epochs={epochs}", f"decay_epochs={decay}"]
        do = partial(run, overrides=tuple(overrides))
        runner = Runner(do, dict, options.workers, options.out)
        for rule, end in RULES.items() if heads else [("val_cvar", "-finetune")]:
            text = first.kind == "text"
            grids = head_grids(data, rule) if heads else network_grids(text, DECAY[data])
            if options.quick:
                grids = {name: own[:1] for name, own in grids.items()}
            found = train(options.part, data + end, rule, grids, runner, options.seeds)
            print(publish.plain(report.table(found, list(grids), AUTOMATIC)))
            rows += found
    except (ConfigError, MissingData) as reason:
        parser.exit(1, f"{short(reason)}\n")
    if options.publish:
        report.write(options.part, rows, options.commit)
    if options.json:
        print(json.dumps(clean({"rows": rows})))


if __name__ == "__main__":
    main()
