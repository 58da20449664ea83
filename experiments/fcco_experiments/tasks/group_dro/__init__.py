"""Group DRO with CVaR: images, texts and vectors in groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ... import data
from ...task import Method, Metric, Panel, Row, Rule
from ..base import SECONDS, BaseTask, Stepped
from ..network import NetworkProblem
from .training import REFERENCES, GroupDRO, GroupDROTraining, build

__all__ = ["TASK", "GroupDRO", "GroupDROProblem", "GroupDROTask", "GroupDROTraining", "build"]

SMALL = 20
"""A test group with fewer samples says little: one of them is more than five points."""
FAR = 0.5
"""A threshold that is off by more than this share of the CVaR counts the wrong groups."""

_SUMMARIES = {"worst_accuracy": "worst group", "tenth_accuracy": "10th percentile"}
"""Rows have one of these figures, as `GroupedData.summary` says."""
AT_THE_END = (
    SECONDS,
    Metric("tracking_error", "tracking error", "lower", 4, meaning="how far a method's running"
        " values of the group losses are from the true ones (root mean square over groups)"),
    Metric("threshold", "threshold", meaning="the one that the method ended with"),
    Metric("threshold_exact", "best threshold", meaning="the one that the true group losses ask"
        " for"),
    Metric("gram_smallest", "least eigenvalue", meaning="of the Gram matrix of the gradients of all"
        " group losses: above 0, no group's gradient can be made of the others' (assumption LBSV of"
        " the theory)"),
    Metric("gram_smallest_with_s", "least eigenvalue, with threshold", meaning="the same with the"
        " threshold as one more weight"),
    Metric("gram_largest", "largest eigenvalue", meaning="of the same matrix"),
)  # fmt: skip


class GroupDROProblem(NetworkProblem):
    """A data set with groups, and the network for it."""

    def __init__(self, config: GroupDRO) -> None:
        options: dict[str, Any] = {"distinct": True} if config.distinct else {}
        loaded = data.load_grouped(
            config.data, columns=config.columns, size=config.size, limit=config.sample_limit,
            **options,
        )  # fmt: skip
        config = config.with_groups(len(loaded.cut(0)["train"].group_names))
        super().__init__(config, loaded, len(loaded.class_names))

    def start(self, method: Method, seed: int) -> GroupDROTraining:
        model, samples = self.begin(seed)
        parts, summary = self.parts(seed), self.data.summary
        return GroupDROTraining(
            self.config, method, seed, model, samples, parts, summary, self.device
        )


class GroupDROTask(BaseTask):
    """Group DRO with CVaR."""

    name, template = "group-dro", "group_dro"
    config, problem = GroupDRO, GroupDROProblem
    references = REFERENCES
    parts = ("train", "test", "val")

    def grid_name(self, config: Any) -> str:
        return "appendix" if config.train == "all" else "wide"

    def wrong(self, config: Any) -> list[tuple[tuple[str, ...], str]]:
        problems = config.kind_problem()
        if config.distinct and not problems and config.kind != "text":
            problems.append((("distinct",), f"`distinct` is for texts, not for {config.kind}s."))
        return problems

    def build(self, config: Any, method: Method) -> Stepped:
        return build(nn.Linear(1, 1), method, config, torch.ones(8))

    def rule(self, config: Any) -> Rule:
        """The figure `choose_by`; the verdict takes that of the test data instead of validation."""
        (text,) = self.words("rule", config)
        objective = config.choose_by.replace("val_", "test_")
        return Rule(text, lambda row: (row[config.choose_by],), objective=objective)

    def outcome(self, config: GroupDRO, methods: Mapping[str, list[Row]]) -> dict[str, Any]:
        found = super().outcome(config, methods)
        labels = {f"test_{name}": label for name, label in _SUMMARIES.items()}
        first = methods[found["best"]][0] if found["best"] else {}
        accuracy = next((key for key in labels if key in first), found["key"])
        return found | {"labels": labels, "accuracy": accuracy}

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        """Figures that mean less than they seem to."""
        cvar, smallest = row["train_cvar"], row.get("test_smallest", SMALL)
        off = abs(row.get("threshold", 0.0) - row.get("threshold_exact", 0.0))
        worst = row.get("test_worst_accuracy", row.get("test_tenth_accuracy"))
        return self.words(
            "warnings", config, row=row, off=off > FAR * cvar,
            blind=row.get("tracking_error", 0.0) > cvar,
            smallest=smallest if smallest < SMALL else 0,
            one_answer=worst == 0 and row["test_accuracy"] > 0.5,
        )  # fmt: skip

    def once(self, config: Any) -> tuple[Metric, ...]:
        return AT_THE_END

    def card(self, config: Any) -> dict[str, str]:
        columns = config.columns
        groups = f"those of {' and '.join(columns.group)}" if columns.group else ""
        if columns.overlapping:
            groups = f"those of {', '.join(columns.overlapping)}, which overlap: a sample counts in"
            groups += " each of its groups, or in none"
        return self.described(
            config, title=config.data, groups=groups or "those of the data set",
            asks=f"the column {columns.label}" if columns.label else "the class of a sample",
            notes="Test accuracies are those of samples that no training has seen; a warning says"
            " where a group has few of them.",
        )  # fmt: skip

    def figures(self, config: GroupDRO) -> Iterator[tuple[Metric, str]]:
        average = f"average loss of the worst {config.share} of groups, best threshold"
        yield Metric("cvar", "CVaR", "lower", meaning=average), "train test"
        reported = "accuracy that nine of ten reported groups have or exceed"
        lowest = "accuracy of the reported group that has the lowest"
        yield Metric("worst_accuracy", "worst group", "higher", 3, meaning=lowest), "test"
        yield Metric("tenth_accuracy", "10th percentile", "higher", 3, meaning=reported), "test"
        right = "share of all samples that are classified correctly"
        yield Metric("accuracy", "accuracy", "higher", 3, meaning=right), "test"
        each = "mean of the accuracies of the reported groups, each counted once"
        yield Metric("group_accuracy", "mean of groups", "higher", 3, meaning=each), ""
        largest = "loss of the one group that has the largest"
        yield Metric("worst_loss", "largest group loss", "lower", meaning=largest), ""
        mean = "mean of the group losses, each counted once"
        yield Metric("group_loss", "group loss", "lower", meaning=mean), ""
        yield Metric("loss", "loss", "lower", meaning="mean loss of all samples"), ""

    def panels(self, config: GroupDRO) -> Iterator[Panel]:
        for key, label in _SUMMARIES.items():
            title = "What it costs on average (test data): up and right is better"
            yield Panel("tradeoff", f"test_{key}", title, label, "test_accuracy", "accuracy")
        title = f"Training: average loss of the worst {config.share} of groups"
        yield Panel("curve", "train_cvar", title, "CVaR, train")
        yield Panel("curve", "test_cvar", "The same on test data", "CVaR, test")
        yield Panel("curve", "test_worst_accuracy", "Test accuracy of the worst group", "accuracy")
        title = "Test accuracy that nine of ten groups have or exceed"
        yield Panel("curve", "test_tenth_accuracy", title, "accuracy")
        yield Panel("curve", "test_accuracy", "Test accuracy over all samples", "accuracy")


TASK = GroupDROTask()
