"""X-risks: average precision, partial AUC and NDCG, on rare classes and on lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ... import data as sets
from ...data.grouped import GroupedData
from ...data.sources import WrongData, few
from ...task import Method, Metric, Panel, Row, Rule
from ..base import SECONDS, BaseTask, Stepped
from ..network import NetworkProblem
from .training import REFERENCES, XRisk, XRiskTraining, build

__all__ = ["TASK", "XRisk", "XRiskProblem", "XRiskTask"]

SMALL = 50
"""With fewer positives in the test data, one of them moves the average precision by points."""
NAMES = {
    "ap": "average precision", "auc": "AUC", "pauc": "partial AUC", "tpauc": "two-way partial AUC",
    "ndcg": "NDCG",
}  # fmt: skip


class XRiskProblem(NetworkProblem):
    """A data set with a binary label, or of lists, and the network for it."""

    def __init__(self, config: XRisk) -> None:
        loaded = _load(config)
        self.values = _values(config, loaded)
        super().__init__(config, loaded, 1)

    def start(self, method: Method, seed: int) -> XRiskTraining:
        config, parts = self.config, self.parts(seed)
        for name, part in parts.items() if not config.lists else ():
            if len(torch.unique(part.label)) < 2:
                raise WrongData(f"`{config.data}`: the {name} data have one class alone.")
        model, samples = self.begin(seed, scale=config.scale)
        return XRiskTraining(config, method, seed, model, samples, parts, self.values, self.device)


def _load(config: XRisk) -> GroupedData:
    options: dict[str, Any] = {"keep": config.sample_limit}
    columns = config.columns
    if columns.overlapping:
        raise WrongData("`overlapping` is for group-dro; leave it out.")
    if columns.group and not config.lists:
        raise WrongData("`group` is the query of a row, for `risk: ndcg`; leave it out.")
    if not sets.is_table(config.data):
        label = columns.label or sets.card(config.data).columns.label
        return sets.load_grouped(config.data, label="" if config.lists else label, **options)
    if config.lists and not columns.group:
        raise WrongData(f"{config.data}: say which column is the query: --group COLUMN.")
    return sets.load_grouped(
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


class XRiskTask(BaseTask):
    """X-risks."""

    name, template = "x-risk", "x_risk"
    config, problem = XRisk, XRiskProblem
    references = REFERENCES
    parts = ("train", "test", "val")

    def grid_name(self, config: Any) -> str:
        return "lists" if config.lists else "wide"

    def wrong(self, config: Any) -> list[tuple[tuple[str, ...], str]]:
        return config.kind_problem()

    def build(self, config: Any, method: Method) -> Stepped:
        label, query = torch.tensor([0.0, 1.0]), torch.tensor([0, 0])
        return build(nn.Linear(1, 1), method, config, label, query)

    def words(self, block: str, config: Any, **values: Any) -> tuple[str, ...]:
        return super().words(block, config, names=NAMES, **values)

    def rule(self, config: Any) -> Rule:
        """The figure `risk`; the verdict takes that of the test data instead of validation."""
        (text,) = self.words("rule", config)
        key = f"val_{config.risk}"
        return Rule(text, lambda row: (-row[key],), objective=f"test_{config.risk}")

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        """Figures that mean less than they seem to."""
        number = row.get("test_positives", SMALL)
        return self.words("warnings", config, positives=number if number < SMALL else 0)

    def once(self, config: Any) -> tuple[Metric, ...]:
        kind = "queries" if config.lists else "positives"
        meaning = f"{kind} in the test data"
        number = Metric(f"test_{kind}", f"test {kind}", "none", 0, meaning=meaning)
        return number, SECONDS

    def card(self, config: Any) -> dict[str, str]:
        label = config.columns.label
        card = self.described(
            config, title=config.data, asks=f"the column {label}" if label else "the positives",
            notes="Figures are those of samples that no training has seen; a warning says where"
            " there are few positives.",
        )  # fmt: skip
        if label and not sets.is_table(config.data):
            card["title"] += f", {label.replace('_', ' ').lower()}"
            card["asks"] += f", {label}"
        return card

    def figures(self, config: XRisk) -> Iterator[tuple[Metric, str]]:
        if config.lists:
            at, rows = (f" at {config.k}", f"the first {config.k}") if config.k else ("", "all")
            meaning = (
                f"mean over queries of the gain of {rows} rows, discounted by place, as a share"
            )
            meaning += " of the best order's"
            yield Metric("ndcg", f"NDCG{at}", "higher", meaning=meaning), "test val"
            meaning = "the same of all rows of each query"
            yield Metric("ndcg_all", "NDCG, whole lists", "higher", meaning=meaning), ""
            return
        meanings = {
            "ap": "average precision: the mean over positives of the share of positives among all"
            " samples that score at least as high",
            "auc": "share of pairs of a positive and a negative in which the positive scores"
            " higher",
            "pauc": f"area under the ROC curve up to a false positive rate of {config.max_fpr}, 0.5"
            " for random scores",
            "tpauc": f"the part of that area above a true positive rate of {config.min_tpr}, from 0"
            " to 1",
        }
        for key, meaning in meanings.items():
            label = "AP" if key == "ap" else NAMES[key]
            shown = "test val" if key == config.risk else "test"
            yield Metric(key, label, "higher", meaning=meaning), shown

    def panels(self, config: XRisk) -> Iterator[Panel]:
        name, key = NAMES[config.risk], config.risk
        if not config.lists:
            title = "Average precision and AUC need not agree (test data)"
            yield Panel("tradeoff", "test_ap", title, NAMES["ap"], "test_auc", "AUC")
        title = f"{name[0].upper()}{name[1:]} on test data"
        yield Panel("curve", f"test_{key}", title, f"{name}, test")
        title = "On validation data, by which settings are chosen"
        yield Panel("curve", f"val_{key}", title, f"{name}, validation")
        yield Panel("curve", f"train_{key}", "On training data", f"{name}, train")


TASK = XRiskTask()
