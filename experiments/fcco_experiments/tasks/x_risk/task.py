"""The task: its data, its trainings, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ... import data
from ...data.grouped import GroupedData
from ...data.sources import WrongData, few
from ...prose import paragraphs
from ...task import Method, Page, Progress, Row, Rule, Task
from ..network import NetworkProblem
from ..verdict import glossary, judge, keyed, metrics, panels
from .config import XRisk
from .model import REFERENCES, build
from .training import XRiskTraining

PAGE = "x_risk/page.j2"
SMALL = 50
"""With fewer positives in the test data, one of them moves the average precision by points."""
NAMES = {
    "ap": "average precision", "auc": "AUC", "pauc": "partial AUC", "tpauc": "two-way partial AUC",
    "ndcg": "NDCG",
}  # fmt: skip
_PARTS = {"train": "train", "test": "test", "val": "validation"}


class XRiskProblem(NetworkProblem):
    """A data set with a binary label, or of lists, and the network for it."""

    def __init__(self, config: XRisk, progress: Progress | None = None) -> None:
        loaded = _load(config, progress)
        self.values = _values(config, loaded)
        super().__init__(config, loaded, 1, progress)

    def start(self, method: Method, seed: int) -> XRiskTraining:
        config, parts = self.config, self.parts(seed)
        for name, part in parts.items() if not config.lists else ():
            if len(torch.unique(part.label)) < 2:
                raise WrongData(f"`{config.data}`: the {name} data have one class alone.")
        model, samples = self.begin(seed, scale=config.scale)
        return XRiskTraining(config, method, seed, model, samples, parts, self.values, self.device)


def _load(config: XRisk, progress: Progress | None) -> GroupedData:
    options: dict[str, Any] = {"keep": config.sample_limit, "progress": progress}
    columns = config.columns
    if columns.overlapping:
        raise WrongData("`overlapping` is for group-dro; leave it out.")
    if columns.group and not config.lists:
        raise WrongData("`group` is the query of a row, for `risk: ndcg`; leave it out.")
    if not data.is_table(config.data):
        label = columns.label or data.card(config.data).columns.label
        return data.load_grouped(config.data, label="" if config.lists else label, **options)
    if config.lists and not columns.group:
        raise WrongData(f"{config.data}: say which column is the query: --group COLUMN.")
    return data.load_grouped(
        config.data, columns=columns, size=config.size, whole_groups=config.lists, **options
    )


def _values(config: XRisk, loaded: GroupedData) -> Tensor:
    """What each class stands for: 0 and 1, or a relevance."""
    names = loaded.class_names
    if not config.lists:
        if len(names) != 2:
            raise WrongData(
                f"`label` must have two values but has {len(names)} in {config.data}: "
                f"{few(names, 8)}. Compare one with all others by --label COLUMN=VALUE."
            )
        return torch.tensor([0.0, 1.0])
    try:
        values = torch.tensor([float(name) for name in names])
    except ValueError as error:
        raise WrongData(
            f"`label`: relevance must be numbers but is, in {config.data}: {few(names, 8)}."
        ) from error
    if values.min() < 0:
        raise WrongData(f"`label`: relevance must be at least 0 but is: {values.min():g}.")
    return values


class XRiskTask(Task):
    """X-risks."""

    name = "x-risk"
    config = XRisk

    def grid_name(self, config: Any) -> str:
        return "lists" if config.lists else "wide"

    def fetch(self, config: Any, progress: Progress | None = None) -> XRiskProblem:
        return XRiskProblem(config, progress).fetched(progress)

    def load(self, config: Any) -> XRiskProblem:
        return XRiskProblem(config)

    def check(self, config: Any) -> list[tuple[tuple[str, ...], str]]:
        problems = config.kind_problem()
        label, query = torch.tensor([0.0, 1.0]), torch.tensor([0, 0])
        for name, method in config.methods.items():
            try:
                build(nn.Linear(1, 1), method, config, label, query)
            except (TypeError, ValueError) as error:
                problems.append((("methods", name), str(error)))
        return problems

    def rule(self, config: Any) -> Rule:
        """The figure `risk`; the verdict takes that of the test data instead of validation."""
        (text,) = paragraphs(PAGE, "rule", config=config, names=NAMES)
        key = f"val_{config.risk}"
        return Rule(text, lambda row: (-row[key],), objective=f"test_{config.risk}")

    def verdict(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        return paragraphs(PAGE, "verdict", **self._outcome(config, methods))

    def next_steps(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        return paragraphs(PAGE, "next_steps", **self._outcome(config, methods))

    def _outcome(self, config: XRisk, methods: Mapping[str, list[Row]]) -> dict[str, Any]:
        """What the sentences of the verdict are made from."""
        verdict, references = judge(self, config, methods), _references(config)
        return {
            "config": config, "verdict": verdict, "final": verdict.final, "names": NAMES,
            "key": self.rule(config).objective, "order": verdict.order, "best": verdict.best,
            "ours": next((name for name in verdict.order if name not in references), None),
            "reference": next((name for name in verdict.order if name in references), None),
        }  # fmt: skip

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        """Figures that mean less than they seem to."""
        number = row.get("test_positives", SMALL)
        return paragraphs(PAGE, "warnings", positives=number if number < SMALL else 0)

    def page(self, config: Any) -> Page:
        card, rule = keyed(PAGE, "card", config=config), self.rule(config)
        (title,) = paragraphs(PAGE, "title", config=config, card=card, names=NAMES)
        columns = metrics(PAGE, _PARTS, config=config)
        return Page(
            title=title,
            question=paragraphs(PAGE, "question", config=config, card=card, rule=rule),
            metrics=tuple(sorted(columns, key=lambda metric: not metric.headline)),
            panels=panels(PAGE, "panels", config=config, names=NAMES),
            references=_references(config),
            glossary=glossary(PAGE, config.methods),
        )


def _references(config: XRisk) -> tuple[str, ...]:
    """The methods of a config that minimise a loss of single samples."""
    return tuple(name for name, method in config.methods.items() if method.method in REFERENCES)


TASK = XRiskTask()
