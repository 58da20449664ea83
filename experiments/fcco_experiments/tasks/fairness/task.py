"""The task: its data, its trainings, and its report."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fcco.fleet import Member, Unsupported, signature_of
from fcco.methods import ALIASES

from ... import data
from ...prose import paragraphs
from ...task import Method, Page, Problem, Progress, Row, Rule, Task
from ..verdict import glossary, judge, metrics, panels
from .config import Fairness
from .fleet import FairnessFleet
from .model import CellBatches, Cells, Scorer
from .training import PAIRED, UNCONSTRAINED, BuiltMethod, FairnessTraining, copies

PAGE = "fairness/page.j2"
FEW = 0.10
"""Below this share of scores between the thresholds, the constraints see almost nobody."""
APART = 0.10
"""ROC curves that differ by more than this are not equal for any purpose."""
NEAR = 0.015
"""A worst constraint value up to this counts as nearly met."""

_LISTS = ("constraints", "val_constraints", "test_constraints", "multipliers", "best_multipliers")


class FairnessProblem(Problem):
    """A data set in cells."""

    def __init__(self, config: Fairness, progress: Progress | None = None) -> None:
        self.config = config
        loaded = self._load(0, progress)
        self._fingerprint, self._parts = loaded.fingerprint, {0: self._cells(loaded)}
        self._methods: dict[str, tuple[BuiltMethod, Hashable | None]] = {}
        self._model = Scorer(config, 0, self.parts(0)["train"])

    def _load(self, seed: int, progress: Progress | None = None) -> data.FairnessData:
        """The data; the seed splits off the validation part (and makes generated data)."""
        config = self.config
        return data.load(
            config.data, columns=config.columns, validation=config.validation, seed=seed,
            progress=progress,
        )  # fmt: skip

    def _cells(self, loaded: data.FairnessData) -> dict[str, Cells]:
        return {
            name: Cells.of(f"{self.config.data}: {name}", part.features, part.label, part.group)
            for name, part in loaded.parts().items()
        }

    def parts(self, seed: int) -> dict[str, Cells]:
        """Training, validation (where there is a share for it) and test data of a seed."""
        if seed not in self._parts:
            self._parts[seed] = self._cells(self._load(seed))
        return self._parts[seed]

    def start(self, method: Method, seed: int) -> FairnessTraining:
        return FairnessTraining(self.config, method, seed, self.parts(seed))

    def fingerprint(self) -> str:
        return self._fingerprint

    def _built(self, method: Method) -> tuple[BuiltMethod, Hashable | None]:
        """A method that nobody steps, and what runs of one fleet share; None: no fleet holds it."""
        key = repr(method)
        if key not in self._methods:
            built = BuiltMethod(self._model, method, self.config)
            try:
                signature = signature_of(Member(self._model, built.optimizer, built.objective))
                paired = ALIASES.get(method.method, method.method) in PAIRED
                kind = signature, method.independent, paired
            except Unsupported:
                kind = None
            self._methods[key] = built, kind
        return self._methods[key]

    def fleet_kind(self, method: Method, seed: int) -> Hashable | None:
        kind = self._built(method)[1]
        if kind is None:
            return None
        # Seeds split the data, not always into parts of quite the same size.
        train, number = self.parts(seed)["train"], copies(self.config, method)
        return kind, CellBatches(self.config, seed, train, number).steps_per_epoch

    def fleet(self, runs: Sequence[tuple[Method, int]], device: torch.device) -> FairnessFleet:
        return FairnessFleet(
            self.config, runs, self.parts, lambda method: self._built(method)[0], device
        )


class FairnessTask(Task):
    """AUC maximisation under ROC fairness constraints."""

    name = "fairness"
    config = Fairness
    fleets = True

    def config_name(self, data: str, setting: str | None) -> str:
        return data if setting in (None, "meaningful") else f"{data}-{setting}"

    def grid_name(self, config: Any) -> str:
        return "appendix" if config.score == "unbounded" else "wide"

    def fetch(self, config: Any, progress: Progress | None = None) -> FairnessProblem:
        return FairnessProblem(config, progress)

    def load(self, config: Any) -> FairnessProblem:
        return FairnessProblem(config)

    def check(self, config: Any) -> list[tuple[tuple[str, ...], str]]:
        problems = []
        for name, method in config.methods.items():
            try:
                BuiltMethod(nn.Linear(1, 1), method, config)
            except (TypeError, ValueError) as error:
                problems.append((("methods", name), str(error)))
        return problems

    def rule(self, config: Any) -> Rule:
        """Feasible first, then the AUC, both on validation data."""
        if config.validation == 0:
            raise ValueError("A choice needs validation data: `validation` must be above 0.")
        return self.judged(config)

    def judged(self, config: Any) -> Rule:
        def score(row: Row) -> tuple[float, ...]:
            return max(0.0, row[f"val_{config.judged}"] - config.feasible_limit), -row["val_auc"]

        (text,) = paragraphs(PAGE, "rule", config=config)
        return Rule(
            text, score, objective="test_auc", constraint=f"test_{config.judged}",
            limit=config.feasible_limit, limited=True,
        )  # fmt: skip

    def verdict(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        return paragraphs(PAGE, "verdict", **self._outcome(config, methods))

    def next_steps(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        return paragraphs(PAGE, "next_steps", **self._outcome(config, methods))

    def _outcome(self, config: Fairness, methods: Mapping[str, list[Row]]) -> dict[str, Any]:
        """What the sentences of the verdict are made from."""
        verdict = judge(self, config, methods)
        best, final = verdict.best, verdict.final
        free = next((n for n in verdict.order if n in _references(config)), None)
        # Of a method with constraints: whether those that training sees are met, or nearly.
        met = best and best != free and final.mean(best, "train_violation") <= NEAR
        return {
            "config": config, "verdict": verdict, "final": final, "best": best, "free": free,
            "key": f"test_{config.judged}", "met": met,
        }  # fmt: skip

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        """Constraints that are met without meaning anything."""
        nearly_met, several = row["train_violation"] <= NEAR, len(config.thresholds) > 1
        return paragraphs(
            PAGE, "warnings", config=config, row=row,
            vacuous=nearly_met and several and row["train_inside"] < FEW,
            in_name=nearly_met and row["train_excess_gap"] > APART,
        )  # fmt: skip

    def page(self, config: Any) -> Page:
        (title,) = paragraphs(PAGE, "title", config=config)
        parts = {"test": "test", "train": "train"}
        clouds = ({"val": "validation"} if config.validation else {}) | parts
        return Page(
            title=title,
            question=paragraphs(PAGE, "question", config=config),
            metrics=metrics(PAGE, parts | clouds),
            panels=panels(PAGE, "panels", config=config),
            entries=dict.fromkeys(_LISTS, config.constraint_names),
            references=_references(config),
            clouds=panels(PAGE, "clouds", config=config, parts=clouds),
            glossary=glossary(PAGE, config.methods, ALIASES),
        )


def _references(config: Fairness) -> tuple[str, ...]:
    """The methods of a config that train without constraints."""
    return tuple(n for n, method in config.methods.items() if method.method == UNCONSTRAINED)


TASK = FairnessTask()
