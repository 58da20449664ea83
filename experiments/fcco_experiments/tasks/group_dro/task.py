"""The task: its data, its networks, its trainings, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ... import backbones, data, distributed
from ...data.grouped import GroupedData, GroupedPart, Samples, Vectors
from ...task import Method, Page, Problem, Progress, Row, Rule, Task
from . import report
from .config import GroupDRO
from .model import Classifier, build, standardise
from .training import GroupDROTraining


class GroupDROProblem(Problem):
    """A data set with groups, and the network for it.

    Args:
        config: of the experiment.
        progress: is told about downloads and the computation of features.
    """

    def __init__(self, config: GroupDRO, progress: Progress | None = None) -> None:
        self.config = config
        self.device = distributed.device(config.device)
        self.data = _load(config, progress)
        self.samples = self._samples(progress)
        self._parts: dict[int, Mapping[str, GroupedPart]] = {}

    def _samples(self, progress: Progress | None) -> Samples:
        """What batches are made of: features, token ids, images or vectors."""
        config = self.config
        if config.backbone == "none":
            return self.data.samples
        if config.train == "head":
            return backbones.features(
                config.backbone, self.data, pretrained=config.pretrained, weights=config.weights,
                size=config.size, tokens=config.tokens, device=self.device, progress=progress,
            )  # fmt: skip
        return backbones.encode(
            config.backbone, self.data.samples, tokens=config.tokens, weights=config.weights,
            progress=progress,
        )  # fmt: skip

    def parts(self, seed: int) -> Mapping[str, GroupedPart]:
        """Training, validation and test data of a seed."""
        if seed not in self._parts:
            self._parts[seed] = self.data.cut(seed)
        return self._parts[seed]

    def start(self, method: Method, seed: int) -> GroupDROTraining:
        config, parts, samples = self.config, self.parts(seed), self.samples
        vectors = config.train == "head" or config.backbone == "none"
        if isinstance(samples, Vectors):
            values = samples.values
            if vectors:
                values = standardise(values, parts["train"].rows)
            samples = Vectors(values.to(self.device))
        torch.manual_seed(seed)  # the first weights, the same for every method
        if vectors:
            first: Any = samples[0]
            model = Classifier(None, len(first), config.hidden, len(self.data.class_names))
        else:
            model = self.network()
        model = model.to(self.device)
        return GroupDROTraining(
            config, method, seed, model, samples, parts, self.data.summary, self.device
        )

    def network(self, progress: Progress | None = None) -> Classifier:
        """The backbone, with its first weights, and a head on top."""
        config = self.config
        backbone = backbones.build(
            config.backbone, pretrained=config.pretrained, weights=config.weights, size=config.size,
            tokens=config.tokens, recompute=config.recompute, batch_norm=config.batch_norm,
            progress=progress,
        )  # fmt: skip
        return Classifier(backbone, backbone.width, config.hidden, len(self.data.class_names))

    def fingerprint(self) -> str:
        return self.data.fingerprint


def _load(config: GroupDRO, progress: Progress | None) -> GroupedData:
    options: dict[str, Any] = {"distinct": True} if config.distinct else {}
    loaded = data.load_grouped(config.data, limit=config.sample_limit, progress=progress, **options)
    wanted = "vector" if config.backbone == "none" else backbones.kind(config.backbone)
    if wanted != loaded.kind:
        raise ValueError(
            f"`backbone: {config.backbone}` takes data of the kind {wanted}, but {config.data} is "
            f"of the kind {loaded.kind}."
        )
    if config.choose_by.endswith("accuracy") and loaded.summary not in config.choose_by:
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

    def fetch(self, config: Any, progress: Progress | None = None) -> None:
        problem = GroupDROProblem(config, progress)
        if config.backbone != "none" and config.train == "all":
            problem.network(progress)  # weights that are nowhere to be had end it here

    def load(self, config: Any) -> GroupDROProblem:
        return GroupDROProblem(config)

    def check(self, config: Any) -> list[tuple[tuple[str, ...], str]]:
        problems: list[tuple[tuple[str, ...], str]] = []
        kind = "vector"
        if config.backbone != "none":
            try:
                kind = backbones.kind(config.backbone)
            except ValueError as error:
                problems.append((("backbone",), str(error)))
        if config.distinct and kind != "text":
            problems.append((("distinct",), f"`distinct` is for texts, not for {kind}s."))
        for name, method in config.methods.items():
            try:
                build(nn.Linear(1, 1), method, torch.ones(8), config.ratio)
            except (TypeError, ValueError) as error:
                problems.append((("methods", name), str(error)))
        return problems

    def page(self, config: Any) -> Page:
        return report.page(config)

    def rule(self, config: Any) -> Rule:
        return report.rule(config)

    def verdict(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        return report.verdict(config, methods)

    def next_steps(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        return report.next_steps(config, methods)

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        return report.warnings(config, row)


TASK = GroupDROTask()
