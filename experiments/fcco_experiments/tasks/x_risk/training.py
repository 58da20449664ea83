"""One run: batches, steps and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fcco._distributed import find_group
from fcco.groups import GroupBatchSampler
from fcco.inputs import mean_loss

from ... import strategy
from ...data.grouped import GroupedPart, Samples
from ...task import Method, Row
from ..base import PART_KEYS, BaseTraining, Batches, autocast, chunks
from .config import XRisk
from .metrics import binary_figures, list_figures
from .model import build, sample_loss

FEWEST_QUERIES = 4


def _queries(batch: int, rows: float) -> int:
    """How many queries a batch has: as many as there is room for with all rows of an average one.

    Example:
        >>> _queries(128, 15.2), _queries(128, 900.0)
        (8, 4)
    """
    return min(max(FEWEST_QUERIES, int(batch / rows)), batch // 2)


class _Streams:
    """Two streams of batches, saved together: of all samples alike, and for the risk."""

    def __init__(self, plain: Batches, own: Batches) -> None:
        self.plain, self.own = plain, own

    def state_dict(self) -> dict[str, Any]:
        return {"plain": self.plain.state_dict(), "own": self.own.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.plain.load_state_dict(state["plain"])
        self.own.load_state_dict(state["own"])


class XRiskTraining(BaseTraining):
    """A method on a data set from a seed.

    Args:
        config: of the experiment.
        method: what is minimised.
        seed: of the batches.
        model: with its first weights.
        samples: inputs by row.
        parts: rows, labels and groups; for lists the groups are the queries.
        values: of the classes: 0 and 1, or the relevance that each stands for.
        device: where to train.
    """

    def __init__(
        self,
        config: XRisk,
        method: Method,
        seed: int,
        model: nn.Module,
        samples: Samples,
        parts: Mapping[str, GroupedPart],
        values: Tensor,
        device: torch.device,
    ) -> None:
        self.samples, self.parts, self.values = samples, parts, values
        train = parts["train"]
        self._steps_per_epoch = -(-len(train) // config.batch)
        model = strategy.wrap(model, device)
        label = values[train.label]
        built = build(model, method, config, label, train.group if config.lists else None)
        # The places of each stream, in the training data.
        every, none = torch.arange(len(train)), torch.zeros_like(train.group)
        options: dict[str, Any] = {"batches_per_epoch": self._steps_per_epoch, "seed": seed}
        plain = [GroupBatchSampler(none, 1, min(config.batch, len(train)), **options)]
        if config.lists:
            self._places = [every]
            queries = config.queries or _queries(config.batch, len(train) / len(train.group_names))
            queries = min(queries, len(train.group_names))
            own = [
                GroupBatchSampler(
                    train.group, queries, config.batch // queries, small_groups="all", **options
                )
            ]
        else:
            positive = train.label == 1
            self._places = [every[positive], every[~positive]]
            wanted = config.positives or config.batch // 2
            sizes = [wanted, config.batch - wanted]
            own = [
                GroupBatchSampler(none[places], 1, min(size, len(places)), **options)
                for places, size in zip(self._places, sizes, strict=True)
            ]
        streams = _Streams(
            Batches(config, samples, [train.rows], plain, device),
            Batches(config, samples, [train.rows[places] for places in self._places], own, device),
        )
        super().__init__(config, method, model, built, streams, device)
        self._label = label.to(device)
        self._loss = sample_loss(method, config)
        self.warm_steps = round(config.warm * config.epochs * self._steps_per_epoch)

    @property
    def samples_per_step(self) -> int:
        return self.config.batch

    @property
    def steps_per_epoch(self) -> int:
        return self._steps_per_epoch

    def update(self) -> None:
        objective, optimizer = self.built.objective, self.built.optimizer
        if objective is None or self.steps < self.warm_steps:
            inputs, (index,) = self.batches.plain.draw()
            losses = self._loss(self._scores(inputs), self._label[index.to(self.device)])
            loss = mean_loss(losses, find_group())
        else:
            if self.steps == self.warm_steps:
                # The squares that Adam keeps are those of other gradients, often far larger.
                optimizer.state.clear()
            inputs, places = self.batches.own.draw()
            streams = zip(self._places, places, strict=True)
            index = torch.cat([own[place] for own, place in streams]).to(self.device)
            known = () if self.config.lists else (self._label[index],)
            loss = objective(lambda: self._scores(inputs), *known, index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def _scores(self, inputs: Tensor) -> Tensor:
        with autocast(self.config, self.device):
            scores = self.model(inputs).squeeze(1)
        return scores if self.config.precision == "float32" else scores.float()

    def evaluate(self) -> Row:
        row, config = Row(), self.config
        with self.evaluating():
            for part, own in self.parts.items():
                name = PART_KEYS[part]
                label, scores = self.values[own.label].numpy(), self._part_scores(own).numpy()
                if config.lists:
                    row |= list_figures(name, label, scores, own.group.numpy(), config.k)
                else:
                    row |= binary_figures(name, label, scores, config.min_tpr, config.max_fpr)
        return row

    @torch.no_grad()
    def _part_scores(self, part: GroupedPart) -> Tensor:
        """The score of each sample, in float64, on the CPU."""
        ranks = find_group()
        sums = torch.zeros(2, len(part), dtype=torch.float64, device=self.device)
        for places, inputs in chunks(self.config, self.samples, part.rows, self.device, ranks):
            here = places.to(self.device)
            sums[0, here], sums[1, here] = self._scores(inputs).double(), 1.0
        if ranks is not None:
            torch.distributed.all_reduce(sums, group=ranks.handle)
        return (sums[0] / sums[1]).cpu()

    def finish(self) -> Row:
        part = self.parts["test"]
        number = len(part.group_names) if self.config.lists else int((part.label == 1).sum())
        return {"test_queries" if self.config.lists else "test_positives": number, **self.speed()}
