"""The task: its data, its networks, its trainings, and the words of its report."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ... import backbones, data, distributed
from ...data.grouped import GroupedData, GroupedPart, Samples, Vectors
from ...task import Method, Page, Problem, Row, Rule, Task
from . import judge, words
from .config import GroupDRO
from .methods import build
from .model import Classifier, head, standardise
from .training import GroupDROTraining

__all__ = ["TASK", "GroupDROProblem", "GroupDROTask"]

Progress = Callable[[str, int, int | None], None]


class GroupDROProblem(Problem):
    """A data set with groups, and the network for it.

    Args:
        config: of the experiment.
        progress: is told about downloads and the computation of features.
    """

    def __init__(self, config: GroupDRO, progress: Progress | None = None) -> None:
        self.config = config
        self.device = distributed.device(config.device)
        self.data = _data(config, progress)
        self.samples = self._samples(progress)
        self._parts: dict[int, Mapping[str, GroupedPart]] = {}

    def _samples(self, progress: Progress | None) -> Samples:
        """What batches are made of: features, token ids, images or vectors."""
        config, found = self.config, self.data
        if config.backbone == "none":
            return found.samples
        if config.train == "head":
            return backbones.features(
                config.backbone, found, pretrained=config.pretrained, weights=config.weights,
                size=config.size, tokens=config.tokens, device=self.device, progress=progress,
            )  # fmt: skip
        return backbones.encode(
            config.backbone, found.samples, tokens=config.tokens, weights=config.weights,
            progress=progress,
        )  # fmt: skip

    def parts(self, seed: int) -> Mapping[str, GroupedPart]:
        """Training, validation and test data of a seed."""
        if seed not in self._parts:
            self._parts[seed] = self.data.cut(seed)
        return self._parts[seed]

    def start(self, method: Method, seed: int) -> GroupDROTraining:
        """A run from its first step."""
        parts, samples = self.parts(seed), self.samples
        vectors = self.config.train == "head" or self.config.backbone == "none"
        if isinstance(samples, Vectors):
            values = samples.values
            if vectors:
                values = standardise(values, parts["train"].rows)
            samples = Vectors(values.to(self.device))
        torch.manual_seed(seed)  # the first weights, the same for every method
        model = (self._top(samples) if vectors else self.network()).to(self.device)
        return GroupDROTraining(
            self.config, method, seed, model, samples, parts, self.data.summary, self.device
        )

    def _top(self, vectors: Samples) -> nn.Module:
        first: Any = vectors[0]
        return Classifier(None, head(len(first), self.config.hidden, len(self.data.class_names)))

    def network(self, progress: Progress | None = None) -> nn.Module:
        """The backbone, with its first weights, and a head on top."""
        config = self.config
        backbone = backbones.build(
            config.backbone, pretrained=config.pretrained, weights=config.weights, size=config.size,
            tokens=config.tokens, recompute=config.recompute, batch_norm=config.batch_norm,
            progress=progress,
        )  # fmt: skip
        return Classifier(backbone, head(backbone.width, config.hidden, len(self.data.class_names)))

    def fingerprint(self) -> str:
        """Of the data."""
        return self.data.fingerprint


def _data(config: GroupDRO, progress: Progress | None) -> GroupedData:
    options: dict[str, Any] = {"distinct": True} if config.distinct else {}
    found = data.load_grouped(config.data, limit=config.sample_limit, progress=progress, **options)
    wanted = "vector" if config.backbone == "none" else backbones.kind(config.backbone)
    if wanted != found.kind:
        raise ValueError(
            f"`backbone: {config.backbone}` takes data of the kind {wanted}, but {config.data} is of the "  # noqa: E501
            f"kind {found.kind}."
        )
    return found


class GroupDROTask(Task):
    """Group DRO with CVaR."""

    name = "group-dro"
    config = GroupDRO

    def grid_name(self, config: Any) -> str:
        """The usual grid: the paper's, or one for heads on features."""
        return "appendix" if config.train == "all" else "wide"

    def fetch(self, config: Any, progress: Progress | None = None) -> None:
        """Data, weights and features, once, before several processes load them."""
        problem = GroupDROProblem(config, progress)
        if config.backbone != "none" and config.train == "all":
            problem.network(progress)  # weights that are nowhere to be had end it here

    def load(self, config: Any) -> GroupDROProblem:
        """Data and network."""
        return GroupDROProblem(config)

    def check(self, config: Any) -> list[tuple[tuple[str, ...], str]]:
        """Backbones and methods that do not fit, before any training: where, and why."""
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
        """The report's words and plots."""
        return words.page(config)

    def verdict(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        """Who won."""
        return judge.verdict(config, methods)

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        """What a reader must know about a run."""
        return judge.warnings(config, row)

    def rule(self, config: Any) -> Rule:
        """How settings are chosen: never by test figures."""
        return Rule(judge.score_rule(config), functools.partial(judge.score, config), "train_cvar")


TASK = GroupDROTask()
