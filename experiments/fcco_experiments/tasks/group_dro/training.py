"""One run: batches, steps, figures, and the spectrum of the groups' gradients at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fcco
from fcco._distributed import find_group
from fcco.groups import GroupBatchSampler
from fcco.inputs import mean_loss
from fcco.rules.cvar import threshold

from ... import strategy
from ...data.grouped import GroupedPart, Samples
from ...task import Method, Row
from ..base import PART_KEYS, BaseTraining, Batches, autocast, chunks
from .config import GroupDRO
from .model import FEW, build, figures, shown, shown_names

_SMALLEST_SCALE = 1e-6
"""A scale of gradients below this has been halved 36 times in vain."""
_MOST_BYTES = 1 << 36
"""Of the gradients of all groups, which the spectrum holds at once."""


class Batch(NamedTuple):
    """Raw inputs with labels and group ids, on the device."""

    inputs: Tensor
    label: Tensor
    group: Tensor


class GroupDROTraining(BaseTraining):
    """A method on a data set from a seed; `summary` is that of `GroupedData`."""

    def __init__(
        self,
        config: GroupDRO,
        method: Method,
        seed: int,
        model: nn.Module,
        samples: Samples,
        parts: Mapping[str, GroupedPart],
        summary: str,
        device: torch.device,
    ) -> None:
        self.samples, self.parts, self.summary = samples, parts, summary
        train = self.train = parts["train"]
        self.copies = 2 if method.independent else 1
        self._steps_per_epoch = -(-len(train) // (config.batch * self.copies))
        model = strategy.wrap(model, device)
        total = self._steps_per_epoch * config.epochs
        built = build(model, method, torch.bincount(train.group), config.ratio, total)
        # Where groups overlap, a sample that is drawn for one counts in that one alone.
        drawn = train.memberships()
        group, number, size = drawn.group, config.groups_per_batch, config.per_group
        if built.objective is None:  # without one (ERM) all samples are one group
            drawn, group, number, size = train, torch.zeros_like(train.rows), 1, config.batch
        sampler = GroupBatchSampler(
            group, number, size * self.copies, batches_per_epoch=self._steps_per_epoch, seed=seed
        )
        batches = Batches(config, samples, [drawn.rows], [sampler], device)
        super().__init__(config, method, model, built, batches, device)
        ids = drawn.group if drawn.member is None else group
        self._label, self._group = drawn.label.to(device), ids.to(device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "float16")
        self._check()

    def _check(self) -> None:
        """Refuse options that do not go together, before any step."""
        config, ranks = self.config, find_group()
        if config.precision == "float16" and self.method.method == "alexr2":
            raise ValueError(
                "`precision: float16` scales gradients and skips steps, which the proximal point "
                "of alexr2 does not know; use bfloat16."
            )
        micro = config.accumulate * (1 if ranks is None else ranks.size)
        if config.accumulate > 1 and config.groups_per_batch % micro:
            raise ValueError(
                f"`groups_per_batch` = {config.groups_per_batch} must be a multiple of "
                f"accumulate times processes, {micro}: micro-batches hold whole groups."
            )
        number = len(self.train.group_names)
        size = 8 * number * sum(w.numel() for w in self.model.parameters() if w.requires_grad)
        if config.spectrum and size > _MOST_BYTES:
            raise ValueError(
                f"`spectrum` holds the gradients of all {number} groups at once, here "
                f"{size / 2**30:.0f} GiB, more than {_MOST_BYTES >> 30}; leave it out."
            )

    @property
    def samples_per_step(self) -> int:
        return self.config.batch * self.copies

    @property
    def steps_per_epoch(self) -> int:
        return self._steps_per_epoch

    # Steps.

    def update(self) -> None:
        pieces = self.draw()
        while not self._try_step(pieces):
            if self.scaler.get_scale() < _SMALLEST_SCALE:
                raise FloatingPointError("The gradients are not finite, however they are scaled.")

    def draw(self) -> list[tuple[Batch, Batch | None]]:
        """The micro-batches of a step, each of whole groups, with an independent one if wanted.

        Of each group the odd samples are the independent batch: odd in the batch of all ranks, so
        that any number of ranks makes the same two batches.
        """
        inputs, (places,) = self.batches.draw()
        places = places.to(self.device)
        columns = (inputs, self._label[places], self._group[places])
        split = (column.tensor_split(self.config.accumulate) for column in columns)
        pieces = [Batch(*piece) for piece in zip(*split, strict=True)]
        if self.copies == 1:
            return [(piece, None) for piece in pieces]
        (sampler,) = self.batches.samplers
        first = self.samples_per_step * sampler.rank // sampler.world_size  # of this rank
        halves = slice(first % 2, None, 2), slice(1 - first % 2, None, 2)
        return [
            tuple(Batch(*(column[half] for column in piece)) for half in halves) for piece in pieces
        ]  # pyright: ignore[reportReturnType]

    def _try_step(self, pieces: list[tuple[Batch, Batch | None]]) -> bool:
        """Make a step; False when scaled gradients overflowed, which makes the scale smaller.

        The same batch must come again then: the tracker waits for the step with its samples, and a
        checkpoint would not hold them.
        """
        objective = self.built.objective
        for batch, other in pieces:
            if objective is None:
                loss = mean_loss(self._losses(batch), find_group())
            elif other is None:
                loss = objective(lambda b=batch: self._losses(b), batch.group)
            else:
                loss = objective(
                    lambda b=batch: self._losses(b), batch.group,
                    gradient=lambda b=other: self._losses(b), gradient_index=other.group,
                )  # fmt: skip
            self.scaler.scale(loss / len(pieces)).backward()
        optimizer, scale = self.built.optimizer, self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        return self.scaler.get_scale() >= scale

    def _losses(self, batch: Batch) -> Tensor:
        return cross_entropy(self._scores(batch.inputs), batch.label, reduction="none")

    def _scores(self, inputs: Tensor) -> Tensor:
        with autocast(self.config, self.device):
            scores = self.model(inputs)
        return scores if self.config.precision == "float32" else scores.float()

    # Figures.

    def evaluate(self) -> Row:
        row, losses, config = Row(), {}, self.config
        with self.evaluating():
            for name, part in self.parts.items():
                samples = self._sample_figures(part)
                found, losses[name] = figures(
                    PART_KEYS[name], part, *samples, config.ratio, self.summary
                )
                row |= found
        true, objective = losses["train"], self.built.objective
        row["losses"] = shown(true)
        if isinstance(objective, fcco.CVaRGroupDRO):
            tracked = objective.group_losses().double().cpu()
            error = (tracked - true)[~tracked.isnan()]  # of groups that batches have shown
            if len(error):
                smoothing = float(objective.term.smoothing)
                exact = threshold(true, config.ratio, smoothing)[0]
                row["tracking_error"] = error.square().mean().sqrt().item()
                row["threshold"] = objective.threshold.item()
                row["threshold_exact"] = exact.item()
        if objective is not None and len(true) <= FEW:
            row["weights"] = objective.group_weights().nan_to_num(nan=0.0).tolist()
        return row

    @torch.no_grad()
    def _sample_figures(self, part: GroupedPart) -> tuple[Tensor, Tensor]:
        """Loss of each sample and whether it was classified rightly, in float64, on the CPU."""
        ranks, label = find_group(), part.label.to(self.device)
        sums = torch.zeros(3, len(part), dtype=torch.float64, device=self.device)
        loss, right, seen = sums
        for places, inputs in chunks(self.config, self.samples, part.rows, self.device, ranks):
            here, scores = places.to(self.device), self._scores(inputs)
            loss[here] = cross_entropy(scores, label[here], reduction="none").double()
            right[here] = (scores.argmax(1) == label[here]).double()
            seen[here] = 1.0
        if ranks is not None:
            torch.distributed.all_reduce(sums, group=ranks.handle)
        return (loss / seen).cpu(), (right / seen).cpu()

    def finish(self) -> Row:
        names = shown_names(self.train.group_names)
        row: Row = {"losses_names": names, "weights_names": names, **self.speed()}
        row["test_reported_names"] = shown_names(self.parts["test"].reported_names)
        if self.config.spectrum:
            with self.evaluating():
                row |= self.spectrum()
        return row

    def spectrum(self) -> Row:
        r"""The smallest eigenvalue of :math:`J J^\top`, rows :math:`\nabla L_i(w)` (assumption
        LBSV), over all weights.

        With the threshold s as a further variable each row gets the entry -1 (the derivative of
        L_i - s), which adds 1 to every entry of the matrix.
        """
        rows = self._jacobian()
        gram = torch.stack([rows @ row for row in rows]).double()
        plain, bordered = (torch.linalg.eigvalsh(matrix) for matrix in (gram, gram + 1.0))
        return {
            "gram_smallest": max(plain[0].item(), 0.0),
            "gram_smallest_with_s": max(bordered[0].item(), 0.0),
            "gram_largest": plain[-1].item(),
        }

    def _jacobian(self) -> Tensor:
        """The gradient of each group's training loss, (n, d), batch by batch, in float64.

        Unlike `fcco.diagnostics.eigenvalues` it needs the graph of one batch at a time, so
        a group may have thousands of images; the price is memory for n gradients. Batches are no
        larger than those in training, since those of evaluation need room for no graph.
        """
        small = min(self.config.batch, self.config.evaluate_batch)
        config, part = replace(self.config, evaluate_batch=small), self.train.memberships()
        model = strategy.unwrapped(self.model)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        sizes, total = torch.bincount(part.group), sum(w.numel() for w in weights)
        result = torch.zeros(len(sizes), total, dtype=torch.float64, device=self.device)
        for group, size in enumerate(sizes):
            members = torch.nonzero(part.group == group).squeeze(1)
            label = part.label[members].to(self.device)
            for places, inputs in chunks(config, self.samples, part.rows[members], self.device):
                with torch.enable_grad():
                    here = label[places.to(self.device)]
                    loss = cross_entropy(model(inputs), here, reduction="sum")
                    gradients = torch.autograd.grad(loss, weights)
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                result[group] += flat.double() / size
        return result

    # State.

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.scaler.load_state_dict(dict(state["scaler"]))
