"""The task: its data, its networks, its trainings, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ... import data
from ...data.grouped import GroupedData
from ...prose import paragraphs
from ...task import Method, Page, Progress, Row, Rule, Task
from ..network import NetworkProblem
from ..verdict import glossary, judge, keyed, metrics, panels
from .config import GroupDRO
from .model import REFERENCES, build
from .training import GroupDROTraining

PAGE = "group_dro/page.j2"
SMALL = 20
"""A test group with fewer samples says little: one of them is more than five points."""
FAR = 0.5
"""A threshold that is off by more than this share of the CVaR counts the wrong groups."""

_SUMMARIES = {"worst_accuracy": "worst group", "tenth_accuracy": "10th percentile"}
"""Rows have one of these figures, as `GroupedData.summary` says."""
_PARTS = {"train": "train", "test": "test", "val": "validation"}


class GroupDROProblem(NetworkProblem):
    """A data set with groups, and the network for it."""

    def __init__(self, config: GroupDRO, progress: Progress | None = None) -> None:
        loaded = _load(config, progress)
        config = config.with_groups(len(loaded.cut(0)["train"].group_names))
        super().__init__(config, loaded, len(loaded.class_names), progress)

    def start(self, method: Method, seed: int) -> GroupDROTraining:
        model, samples = self.begin(seed)
        parts, summary = self.parts(seed), self.data.summary
        return GroupDROTraining(
            self.config, method, seed, model, samples, parts, summary, self.device
        )


def _load(config: GroupDRO, progress: Progress | None) -> GroupedData:
    options: dict[str, Any] = {"distinct": True} if config.distinct else {}
    loaded = data.load_grouped(
        config.data, columns=config.columns, size=config.size, limit=config.sample_limit,
        progress=progress, **options,
    )  # fmt: skip
    if config.by_accuracy and loaded.summary not in config.choose_by:
        raise ValueError(
            f"`choose_by: {config.choose_by}` is no figure of {config.data}: its groups are summed "
            f"up by val_{loaded.summary}_accuracy."
        )
    return loaded


class GroupDROTask(Task):
    """Group DRO with CVaR."""

    name = "group-dro"
    config = GroupDRO

    def grid_name(self, config: Any) -> str:
        return "appendix" if config.train == "all" else "wide"

    def fetch(self, config: Any, progress: Progress | None = None) -> GroupDROProblem:
        return GroupDROProblem(config, progress).fetched(progress)

    def load(self, config: Any) -> GroupDROProblem:
        return GroupDROProblem(config)

    def check(self, config: Any) -> list[tuple[tuple[str, ...], str]]:
        problems = config.kind_problem()
        if config.distinct and not problems and config.kind != "text":
            problems.append((("distinct",), f"`distinct` is for texts, not for {config.kind}s."))
        for name, method in config.methods.items():
            try:
                build(nn.Linear(1, 1), method, torch.ones(8), config.ratio)
            except (TypeError, ValueError) as error:
                problems.append((("methods", name), str(error)))
        return problems

    def rule(self, config: Any) -> Rule:
        """The figure `choose_by`; the verdict takes that of the test data instead of validation."""

        def score(row: Row) -> tuple[float, ...]:
            value = row[config.choose_by]
            return (-value, row["val_cvar"]) if config.by_accuracy else (value,)

        (text,) = paragraphs(PAGE, "rule", config=config)
        return Rule(text, score, objective=config.choose_by.replace("val_", "test_"))

    def verdict(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        return paragraphs(PAGE, "verdict", **self._outcome(config, methods))

    def next_steps(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        return paragraphs(PAGE, "next_steps", **self._outcome(config, methods))

    def _outcome(self, config: GroupDRO, methods: Mapping[str, list[Row]]) -> dict[str, Any]:
        """What the sentences of the verdict are made from."""
        verdict = judge(self, config, methods)
        best, key = verdict.best, self.rule(config).objective
        references = [name for name in verdict.order if name in _references(config)]
        labels = {f"test_{name}": label for name, label in _SUMMARIES.items()}
        return {
            "config": config, "verdict": verdict, "final": verdict.final, "best": best, "key": key,
            "order": verdict.order, "references": references, "labels": labels,
            "ours": next((name for name in verdict.order if name not in references), None),
            "accuracy": next((a for a in labels if best and a in methods[best][0]), key),
        }  # fmt: skip

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        """Figures that mean less than they seem to."""
        cvar, smallest = row["train_cvar"], row.get("test_smallest", SMALL)
        off = abs(row.get("threshold", 0.0) - row.get("threshold_exact", 0.0))
        worst = row.get("test_worst_accuracy", row.get("test_tenth_accuracy"))
        return paragraphs(
            PAGE, "warnings", row=row, off=off > FAR * cvar,
            blind=row.get("tracking_error", 0.0) > cvar,
            smallest=smallest if smallest < SMALL else 0,
            one_answer=worst == 0 and row["test_accuracy"] > 0.5,
        )  # fmt: skip

    def page(self, config: Any) -> Page:
        card, rule = keyed(PAGE, "card", config=config), self.rule(config)
        (title,) = paragraphs(PAGE, "title", config=config, card=card)
        columns = metrics(PAGE, _PARTS, config=config)
        return Page(
            title=title,
            question=paragraphs(PAGE, "question", config=config, card=card, rule=rule),
            metrics=tuple(sorted(columns, key=lambda metric: not metric.headline)),
            panels=panels(PAGE, "panels", config=config, summaries=_SUMMARIES),
            entries=dict.fromkeys(("losses", "test_reported", "weights"), ()),  # named by the runs
            references=_references(config),
            glossary=glossary(PAGE, config.methods),
        )


def _references(config: GroupDRO) -> tuple[str, ...]:
    """The methods of a config that minimise another average."""
    return tuple(name for name, method in config.methods.items() if method.method in REFERENCES)


TASK = GroupDROTask()
