"""The task: its data, its trainings, and its report."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from ... import data
from ...task import Method, Page, Problem, Progress, Row, Rule, Task
from . import report
from .config import Fairness
from .fleet import FairnessFleet, MethodCache
from .model import CellBatches, Cells, Scorer, network, scorer
from .training import FairnessTraining, build

__all__ = ["TASK", "FairnessProblem", "FairnessTask"]


class FairnessProblem(Problem):
    """A data set in cells.

    Args:
        config: of the experiment.
    """

    def __init__(self, config: Fairness) -> None:
        self.config = config
        self._parts: dict[int, dict[str, Cells]] = {}
        self._fingerprint = self._load(0).fingerprint

    def _load(self, seed: int) -> data.FairnessData:
        config = self.config
        loaded = data.load(config.data, validation=config.validation, seed=seed)
        self._parts[seed] = {
            name: Cells.of(f"fairness({config.data}: {name})", p.features, p.label, p.group)
            for name, p in loaded.parts().items()
        }
        return loaded

    def parts(self, seed: int) -> dict[str, Cells]:
        """Training, validation and test data; the seed splits the first two (and makes generated
        data).
        """
        if seed not in self._parts:
            self._load(seed)
        return self._parts[seed]

    def start(self, method: Method, seed: int) -> FairnessTraining:
        """A run from its first step."""
        return FairnessTraining(self.config, method, seed, self.parts(seed))

    def fingerprint(self) -> str:
        """Of the data."""
        return self._fingerprint

    @cached_property
    def _methods(self) -> MethodCache:
        return MethodCache(self.config, scorer(self.config, 0, self.parts(0)["train"]))

    def fleet_kind(self, method: Method, seed: int) -> Hashable | None:
        """Runs of one kind can be trained together; None: this one alone."""
        kind = self._methods.kind(method)
        if kind is None:
            return None
        # Seeds split the data, not always into parts of quite the same size.
        copies = 2 if method.independent else 1
        return kind, CellBatches(
            self.config, seed, self.parts(seed)["train"], copies
        ).steps_per_epoch

    def fleet(self, runs: Sequence[tuple[Method, int]], device: torch.device) -> FairnessFleet:
        """Runs of one kind from their first step."""
        return FairnessFleet(self.config, runs, self.parts, self._methods, device)


class FairnessTask(Task):
    """AUC maximisation under ROC fairness constraints."""

    name = "fairness"
    config = Fairness
    fleets = True

    def config_name(self, data: str, setting: str | None) -> str:
        """`adult`, `adult-paper`, ...: the setting `meaningful` has the bare name."""
        return data if setting in (None, "meaningful") else f"{data}-{setting}"

    def grid_name(self, config: Any) -> str:
        """The usual grid: the paper's for its unbounded score, else the one with free trackers."""
        return "appendix" if config.score == "unbounded" else "wide"

    def fetch(self, config: Any, progress: Progress | None = None) -> None:
        """Get the files of the data set, once, before several processes load them."""
        data.load(config.data, progress=progress)

    def load(self, config: Any) -> FairnessProblem:
        """Data in cells."""
        return FairnessProblem(config)

    def check(self, config: Any) -> list[tuple[tuple[str, ...], str]]:
        """Methods whose settings do not fit, before any training: where, and why."""
        problems = []
        for name, method in config.methods.items():
            model = Scorer(network(1, (1,)), torch.full((4,), 0.25), True, config.thresholds)
            try:
                build(model, method, 2 * len(config.thresholds), config.tolerance)
            except (TypeError, ValueError) as error:
                problems.append((("methods", name), str(error)))
        return problems

    def page(self, config: Any) -> Page:
        """The report's words and plots."""
        return report.page(config)

    def verdict(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        """Who won."""
        return report.verdict(config, methods)

    def next_steps(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        """What to try next."""
        return report.next_steps(config, methods)

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        """What a reader must know about a run."""
        return report.warnings(config, row)

    def rule(self, config: Any) -> Rule:
        """How settings are chosen: never by test figures."""
        return report.rule(config)


TASK = FairnessTask()
