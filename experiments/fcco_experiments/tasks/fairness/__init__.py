"""AUC maximisation under ROC fairness constraints."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fcco.fleet import Member, Unsupported, signature_of
from fcco.methods import ALIASES

from ... import data
from ...task import Method, Metric, Panel, Problem, Row, Rule
from ..base import KKT, SECONDS, BaseTask
from .model import CellBatches, Cells, Fairness, Scorer
from .training import (
    PAIRED,
    UNCONSTRAINED,
    BuiltMethod,
    FairnessFleet,
    FairnessTraining,
)

__all__ = ["TASK", "Fairness", "FairnessProblem", "FairnessTask"]

FEW = 0.10
"""Below this share of scores between the thresholds, the constraints see almost nobody."""
APART = 0.10
"""ROC curves that differ by more than this are not equal for any purpose."""
NEAR = 0.015
"""A worst constraint value up to this counts as nearly met."""

METRICS = (  # with the parts whose column is in the first table
    (Metric("auc", "AUC", "higher", 4, meaning="probability that a positive person scores above a"
        " negative one"), "test train"),
    (Metric("excess_gap", "ROC gap beyond chance", "lower", 3, meaning="true gap beyond chance,"
        " root of true gap squared minus chance squared (0 if negative)"), "test"),
    (Metric("gap", "true gap", "lower", 3, meaning="largest difference of TPR or FPR between the"
        " groups over all thresholds"), "test train"),
    (Metric("gap_floor", "by chance", "none", 3, meaning="the gap that equal curves show on average"
        " on a sample of this size"), "test"),
    (Metric("violation", "worst", "lower", 4, meaning="largest smoothed gap minus the tolerance;"
        " should be at most 0"), "test train"),
    (Metric("inside", "inside", "none", 3, meaning="share of the scores between the lowest and the"
        " highest threshold"), "test train"),
    (Metric("tpr_gap", "TPR gap", "lower", 3, meaning="largest difference between the groups in the"
        " share of positive people above a threshold"), ""),
    (Metric("fpr_gap", "FPR gap", "lower", 3, meaning="the same for negative people"), ""),
)  # fmt: skip
AT_THE_END = (
    SECONDS,
    *KKT,
    Metric("singular_value", "least singular value", "none", 4, meaning="of the Jacobian of all"
        " constraints at the end, where one is violated"),
    Metric("singular_value_violated", "least singular value, violated constraints", "none", 4,
        meaning="of the Jacobian of the violated constraints alone"),
)  # fmt: skip


class FairnessProblem(Problem):
    """A data set in cells."""

    def __init__(self, config: Fairness, loaded: data.GroupedData | None = None) -> None:
        self.config = config
        self.data = loaded or data.load_grouped(
            config.data, columns=config.columns, validation=config.validation
        )
        self._parts: dict[int, dict[str, Cells]] = {}
        self._fingerprint = data.arrays(self.data, 0).fingerprint
        self._methods: dict[str, tuple[BuiltMethod, Hashable | None]] = {}
        self._model = Scorer(config, 0, self.parts(0)["train"])

    def parts(self, seed: int) -> dict[str, Cells]:
        """Training, validation (where there is a share for it) and test data of a seed."""
        if seed not in self._parts:
            found = data.arrays(self.data, seed).parts()
            self._parts[seed] = {
                name: Cells.of(f"{self.config.data}: {name}", own.features, own.label, own.group)
                for name, own in found.items()
            }
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
        train, number = self.parts(seed)["train"], 1 + method.independent
        return kind, CellBatches(self.config, seed, train, number).steps_per_epoch

    def fleet(self, runs: Sequence[tuple[Method, int]], device: torch.device) -> FairnessFleet:
        return FairnessFleet(
            self.config, runs, self.parts, lambda method: self._built(method)[0], device
        )


class FairnessTask(BaseTask):
    """AUC maximisation under ROC fairness constraints."""

    name, template = "fairness", "fairness"
    config, problem = Fairness, FairnessProblem
    fleets = True
    references = (UNCONSTRAINED,)

    def config_name(self, data: str, setting: str | None) -> str:
        return data if setting in (None, "meaningful") else f"{data}-{setting}"

    def grid_name(self, config: Any) -> str:
        return "appendix" if config.score == "unbounded" else "wide"

    def build(self, config: Any, method: Method) -> BuiltMethod:
        return BuiltMethod(nn.Linear(1, 1), method, config)

    def rule(self, config: Any) -> Rule:
        """Feasible first, then the AUC, both on validation data."""
        if config.validation == 0:
            raise ValueError("A choice needs validation data: `validation` must be above 0.")
        return self.judged(config)

    def judged(self, config: Any) -> Rule:
        def score(row: Row) -> tuple[float, ...]:
            return max(0.0, row[f"val_{config.judged}"] - config.feasible_limit), -row["val_auc"]

        (text,) = self.words("rule", config)
        return Rule(
            text, score, objective="test_auc", constraint=f"test_{config.judged}",
            limit=config.feasible_limit, limited=True,
        )  # fmt: skip

    def outcome(self, config: Fairness, methods: Mapping[str, list[Row]]) -> dict[str, Any]:
        found = super().outcome(config, methods)
        best, free = found["best"], found["reference"]
        # Of a method with constraints: whether those that training sees are met, or nearly.
        met = best and best != free and found["final"].mean(best, "train_violation") <= NEAR
        return found | {"free": free, "key": f"test_{config.judged}", "met": met}

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        """Constraints that are met without meaning anything."""
        nearly_met, several = row["train_violation"] <= NEAR, len(config.thresholds) > 1
        return self.words(
            "warnings", config, row=row,
            vacuous=nearly_met and several and row["train_inside"] < FEW,
            in_name=nearly_met and row["train_excess_gap"] > APART,
        )  # fmt: skip

    def figures(self, config: Any) -> Sequence[tuple[Metric, str]]:
        return METRICS

    def metrics(self, config: Any) -> tuple[Metric, ...]:
        found = super().metrics(config)
        return tuple(m for m in found if config.validation or not m.key.startswith("val_"))

    def once(self, config: Any) -> tuple[Metric, ...]:
        return AT_THE_END

    def card(self, config: Any) -> dict[str, str]:
        columns, asks, groups = config.columns, f"the label of {config.data}", ""
        if columns.label:
            asks = f"the column {columns.label} of {config.data}"
            groups = f"those of the column {' and '.join(columns.group)}"
        return self.described(config, title=config.data, asks=asks, groups=groups)

    def panels(self, config: Fairness) -> Iterator[Panel]:
        limit = config.feasible_limit if config.feasible_by == "gap" else None
        title = "The price of equal ROC curves (test data): up and left is better"
        yield Panel(
            "tradeoff", "test_auc", title, "AUC", "test_excess_gap", "ROC gap beyond chance",
            x_reference=limit,
        )  # fmt: skip
        yield Panel("curve", "train_auc", "AUC on training data", "AUC")
        title = "Worst constraint on training data: should be at most 0"
        yield Panel("curve", "train_violation", title, "worst |gap| - tolerance", reference=0.0)
        yield Panel("curve", "test_auc", "AUC on test data", "AUC")
        yield Panel("curve", "test_gap", "True ROC gap on test data", "largest gap")


TASK = FairnessTask()
