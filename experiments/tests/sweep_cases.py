"""Sweeps as they are saved, made up, for the tests of their report."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from fcco_experiments import report
from fcco_experiments.store import Comparison, SavedRun
from fcco_experiments.task import Metric, Page, Panel, Row, Rule
from test_experiments_report import Fair as Compared
from test_experiments_report import cells, checked, text_of

CLOUD = Panel("tradeoff", "val_auc", "Cloud", "AUC", "val_violation", "worst", x_reference=0.0)
PAGE = Page(
    title="Fair scores",
    question=("What is <asked>?",),
    metrics=(
        Metric("test_auc", "AUC, test", "higher", 4, True, "ranks well"),
        Metric("test_violation", "worst, test", "lower", 4, True),
        Metric("val_auc", "AUC, validation", "higher", 4),
        Metric("val_violation", "worst, validation", "lower", 4),
        Metric("test_only", "only test", "higher", 4, True),
    ),
    panels=(),
    clouds=(CLOUD,),
)
RULE = "the worst constraint at most 0, then the highest AUC; on validation data"
LRS, PENALTIES = (0.001, 0.01, 0.1), (1, 10)
Grid = dict[str, list[dict[str, Any]]]


class Fair(Compared):
    """A rule with or without a limit."""

    def __init__(self, page: Page = PAGE, limited: bool = True) -> None:
        super().__init__(page)
        self.limited = limited

    def rule(self, config: Any) -> Rule:
        return Rule(RULE, lambda row: (0.0,), limited=self.limited)

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        return ("Odd winner.",) if row["val_auc"] > 0.99 else ("Small test groups.",)


def grid(**values: Any) -> list[dict[str, Any]]:
    return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


USUAL: Grid = {
    "A": grid(lr=LRS, **{"settings.penalty": PENALTIES}),
    "B": grid(lr=LRS),
    "C": grid(lr=LRS),
}


def figures(rng: np.random.Generator, test: float = 0.7777) -> dict[str, Any]:
    auc, violation = 0.9 - 0.1 * rng.random(), 0.05 * rng.standard_normal()
    return {"val_auc": auc, "val_violation": violation, "train_auc": auc + 0.01} | {
        "test_auc": test, "test_violation": test, "test_only": test, "val_list": [1.0],
    }  # fmt: skip


def swept(folder, grids: Grid = USUAL, seeds=(7, 8), change=None, test=0.7777, task="fairness"):
    """A sweep as it is saved: runs, and `sweep.json`, by a rule that is written here once more."""
    rng = np.random.default_rng(0)
    runs, entries = [], []
    for family, lines in grids.items():
        for index, values in enumerate(lines):
            name, own = f"{family}@{index}", []
            for seed in seeds:
                final, diverged = figures(rng, test), None
                if change is not None:
                    diverged = change(family, index, seed, final)
                result = {"final": final, "end": {}, "warnings": [], "diverged": diverged}
                result |= {"seconds": 1.0, "samples": 9, "fingerprint": "x"}
                method = {"method": family.lower()}
                own.append(SavedRun(folder, name, seed, {}, method, [final], result, {}))
            keys = ("val_auc", "val_violation", "train_auc")
            means = {k: sum(run.figures[k] for run in own) / len(own) for k in keys}
            lost = sum(run.diverged is not None for run in own)
            score = None if lost else [max(0.0, means["val_violation"]), -means["val_auc"]]
            entries.append({
                "name": name, "method": family, "setting": values, "score": score,
                "feasible": score is not None and score[0] == 0,
                "diverged": lost, "finished": len(own), "figures": means,
            })  # fmt: skip
            runs += own
    ranking: dict[str, list[str]] = {}
    for entry in sorted(entries, key=lambda e: (e["score"] is None, e["score"] or [])):
        ranking.setdefault(entry["method"], []).append(entry["name"])
    ranking = {name: ranking[name] for name in grids}
    scored = {e["name"] for e in entries if e["score"] is not None}
    winners = {name: own[0] for name, own in ranking.items() if own[0] in scored}
    told = {"task": task, "rule": RULE, "seeds": list(seeds), "settings": entries}
    told |= {"ranking": ranking, "winners": winners}
    meta = {"task": task, "config_name": "adult", "config": {"data": "adult", "epochs": 6}}
    meta |= {"methods": [e["name"] for e in entries], "seeds": list(seeds), "command": "fcco x"}
    return Comparison(folder, meta, runs), told


def page_of(comparison, told, page=PAGE, limited=True) -> str:
    return checked(report.render_sweep(comparison, told, Fair(page, limited), None))


def table(page: str, caption: str) -> dict[str, list[str]]:
    rows = cells(page, caption)
    plain = {name: [text_of(cell) for cell in row] for name, row in rows.items()}
    return {
        name: [cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row]
        for name, row in plain.items()
    }
