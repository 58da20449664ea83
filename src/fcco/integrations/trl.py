"""TRL's `SFTTrainer` under limits: learn a target, and let no guarded texts get worse."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Value, concatenate_datasets
from torch import Tensor, nn
from trl import SFTTrainer

from .. import _checks
from .._distributed import find_group, sum_over_ranks
from ..continual import ReferenceLosses
from ..methods import constrained
from .transformers import GROUP_INDEX, RobustTrainer

__all__ = ["NoRegressionTrainer"]

# Columns of the mixture, beside those that the model gets.
DOMAIN = "fcco_domain"  # the name of the guarded set, None for the target
ROW = "fcco_row"  # among the guarded rows, -1 for the target
TOKENS = "fcco_tokens"  # of the row that have a loss
SCALE = "fcco_scale"  # 1 / the mean of them over the rows of the set
LENGTH = "fcco_length"  # all tokens of the row


class NoRegressionTrainer(RobustTrainer, SFTTrainer):
    r"""An `SFTTrainer` that learns a target while no guarded set gets worse.

    .. math::
        \min_w\; \text{loss}_{\text{target}}(w) \quad\text{s.t.}\quad
        \frac{\sum_{s\in D_k} n_s\,\bigl(\ell_s(w) - \ell_s(w_{\text{before}})\bigr)}
             {\sum_{s\in D_k} n_s} \le \text{tolerance}_k, \qquad k = 1,\dots,m,

    where :math:`\ell_s` is the mean loss of the :math:`n_s` tokens of row s. The losses of the
    model before are measured once, when training begins, and kept in checkpoints; on the same text
    most noise cancels. The method is the default of `fcco.constrained`.

    Rows are texts or, with `packing=True`, several texts of one set. A row counts by its tokens.

    Args:
        args: arguments of `SFTTrainer`, also by name in `kwargs`; `train_dataset` is the target.
        guarded: the sets that must not get worse, by name, in any form that `SFTTrainer` takes.
        tolerance: by how much the mean loss per token may rise; a dict for one by name.
        guarded_share: part of each batch that is guarded. An epoch is one pass over the target.
        cache: a folder that keeps the losses of the model before for further runs.
        kwargs: also of `RobustTrainer`: `groups_per_batch`.

    Attributes:
        references: the `fcco.continual.ReferenceLosses` of the guarded rows, None before training.

    References:
        G. Li et al., Model developmental safety, 2024 (arXiv:2410.03955).
    """

    def __init__(
        self,
        *args: Any,
        guarded: Mapping[str, Any],
        tolerance: float | Mapping[str, float] = 0.02,
        guarded_share: float = 0.5,
        cache: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        limits = _limits(guarded, tolerance)
        inside: dict[str, Any] = {"open_low": True, "open_high": True}
        _checks.in_interval(_CALL, "guarded_share", guarded_share, 0.0, 1.0, **inside)
        self._guarded = {name: guarded[name] for name in limits}
        self._first: int | None = None  # the place of the first guarded row
        self._cache, self._factor = cache, 1.0
        self._target_losses: list[Tensor] = []  # since the last log
        self.references: ReferenceLosses | None = None
        super().__init__(
            *args,
            objective=lambda model, optimizer: constrained(model, optimizer, limits),
            groups=DOMAIN,
            losses=self._of_rows,
            columns=(ROW, TOKENS, SCALE, LENGTH),
            ungrouped_share=1 - guarded_share,
            **kwargs,
        )

    def _refuse_settings(self, *arguments: Any) -> None:
        args: Any = self.args
        refused = {
            "dataset_kwargs={'skip_prepare_dataset': True}, nor images": self._first is None,
            "loss_type": args.loss_type != "nll",
            "parallelism_config": args.parallelism_config is not None,
        }
        for name in (name for name, given in refused.items() if given):
            raise ValueError(f"`{_CALL}` does not follow `{name}`; leave it out.")
        super()._refuse_settings(*arguments)

    # Rows.

    def _prepare_dataset(self, dataset: Any, *options: Any) -> Any:
        """The target as TRL prepares it and, after it, the guarded sets, each on its own.

        Packed, a row then has texts of one set alone.
        """
        prepare: Any = super()._prepare_dataset
        prepared = prepare(dataset, *options)
        if self._first is not None:  # for evaluations
            return prepared
        parts = [_with_columns(prepared, None, 0)]
        self._first = len(parts[0])
        for name, given in self._guarded.items():
            each = prepare(given, *options[:-1], f"guarded {name}")
            place = sum(map(len, parts)) - self._first
            parts.append(_with_columns(each, name, place).cast(parts[0].features))
        return concatenate_datasets(parts)

    def _of_rows(self, outputs: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The target's loss, and the excess of each row, whose mean over a set is that by tokens.

        A sum over the mean number of tokens, not a mean over the tokens of a batch: a ratio of two
        small sums is biased, and micro-batches could not be pooled.
        """
        assert self.references is not None
        sums, row, tokens = _sums(outputs, inputs), inputs[ROW], inputs[TOKENS]
        loss = (sums * (row < 0)).sum() * self._factor  # a mask as index would wait for the GPU
        self._target_losses.append(loss.detach())
        if self.aux_loss_enabled:  # of a mixture of experts, a mean over the micro-batch as in TRL
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss
        before = self.references(row.clamp(min=0)).to(sums)
        return loss, inputs[SCALE] * (sums - tokens * before)

    def _measure(self, model: nn.Module) -> None:
        """Measure the losses of the guarded rows, each process a share of them."""
        assert self._first is not None
        data: Any = self.train_dataset
        first = self._first
        group, batch = find_group(), self.args.per_device_eval_batch_size
        order = np.argsort(np.array(data[LENGTH])[first:], kind="stable")  # little padding
        rank, ranks = (0, 1) if group is None else (group.rank, group.size)
        own = order[rank::ranks]

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for start in range(0, len(order[::ranks]), batch):
                rows = own[start : start + batch]
                # Sharded models need all processes in each pass.
                shown = rows if len(rows) else order[:1]
                inputs: Any = self.data_collator([data[int(first + k)] for k in shown])
                inputs.pop(GROUP_INDEX)
                inputs = self._prepare_inputs(inputs)
                with self.compute_loss_context_manager():
                    outputs = model(**self._model_inputs(inputs))
                losses = _sums(outputs, inputs) / inputs[TOKENS].clamp(min=1)
                yield torch.from_numpy(rows), losses[: len(rows)]

        name = "" if self._cache is None else str(_checksum(data))
        self.references = ReferenceLosses.measure(
            model, batches, len(order), data=name, cache=self._cache
        )

    def _model_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        fused = {"fused_lm_head": True, "use_cache": False}  # log-probabilities, no logits
        return {k: v for k, v in inputs.items() if k not in self._columns} | fused

    # The loop.

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of a step; counts the tokens of the target, over which its loss is a mean."""
        batches, _ = super().get_batch_samples(*args, **kwargs)
        tokens: Any = sum(batch[TOKENS][batch[ROW] < 0].sum() for batch in batches)
        group, ranks = find_group(), 1
        if group is not None:
            tokens, ranks = sum_over_ranks(tokens.to(self.args.device), group), group.size
        # The Trainer divides by the number of batches, and gradients are means over processes.
        self._factor = ranks * len(batches) / max(float(tokens), 1.0)
        return batches, None

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """The objective's loss in training; otherwise that of TRL."""
        if not (model.training and torch.is_grad_enabled()):
            own = {k: v for k, v in inputs.items() if k not in (GROUP_INDEX, *self._columns)}
            return SFTTrainer.compute_loss(self, model, own, return_outputs, *args, **kwargs)
        if self.references is None:
            self._measure(model)
        return super().compute_loss(model, inputs, return_outputs)

    def _outputs(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        return model(**self._model_inputs(inputs))

    # Checkpoints and the log.

    def _kept(self) -> dict[str, Any]:
        return {} if self.references is None else {"references": self.references.value}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.references = ReferenceLosses(state["references"]).to(self.args.device)

    def _figures(self, report: Any) -> dict[str, float]:
        """The target's loss; of each set how much its loss has risen, the limit, the multiplier."""
        target = torch.stack(self._target_losses).mean() if self._target_losses else None
        self._target_losses.clear()
        values = super()._figures(report)
        if target is not None:
            group = find_group()
            total = target if group is None else sum_over_ranks(target, group) / group.size
            values["target_loss"] = float(total)
        for row in report.rows:
            values |= {
                f"rise/{row.name}": row.value,
                f"rise_error/{row.name}": row.error,
                f"limit/{row.name}": row.limit,
                f"multiplier/{row.name}": row.weight,
            }
        return {name: value for name, value in values.items() if not np.isnan(value)}


_CALL = NoRegressionTrainer.__name__


def _limits(guarded: Any, tolerance: Any) -> dict[str, float]:
    """The limit of each guarded set, in the order in which `RobustTrainer` numbers them."""
    if not isinstance(guarded, Mapping) or not guarded:
        raise TypeError(
            f"`{_CALL}(guarded=...)` must be a dict of datasets by name, but is: "
            f"{type(guarded).__name__ if guarded else 'empty'}."
        )
    given = tolerance if isinstance(tolerance, Mapping) else dict.fromkeys(guarded, tolerance)
    if set(given) != set(guarded):
        raise ValueError(
            f"`{_CALL}(tolerance=...)` must have the names of `guarded`, {sorted(guarded)}, but "
            f"has: {sorted(given)}."
        )
    for limit in given.values():
        _checks.in_interval(_CALL, "tolerance", limit, -math.inf, math.inf)
    return {name: given[name] for name in sorted(guarded)}


def _with_columns(data: Any, name: str | None, first: int) -> Dataset:
    """A prepared set with what `NoRegressionTrainer` must know of each row."""
    place = f"`{_CALL}({'train_dataset' if name is None else f'guarded[{name!r}]'})`"
    if not isinstance(data, Dataset) or not len(data):
        raise TypeError(f"{place} must be a `datasets.Dataset` with rows, as TRL prepares it.")
    wanted = ("input_ids", "labels", "seq_lengths")
    data = data.with_format(None)
    data = data.select_columns([column for column in wanted if column in data.column_names])
    tokens = np.array([_tokens(row) for row in data])
    guarded = name is not None
    if guarded and not tokens.any():
        raise ValueError(f"{place} has no token with a loss.")
    columns = {
        ROW: np.arange(first, first + len(data)) if guarded else np.full(len(data), -1),
        TOKENS: tokens,
        SCALE: np.full(len(data), 1 / tokens.mean() if guarded else 0.0),
        LENGTH: np.array([len(row) for row in data["input_ids"]]),
    }
    domain: Any = [name] * len(data)
    data = data.add_column(DOMAIN, domain, feature=Value("string"))
    for column, values in columns.items():
        data = data.add_column(column, values)  # type: ignore[arg-type]
    return data


def _tokens(row: Mapping[str, Any]) -> int:
    """The tokens of a row with a loss: those that have a label, but for the first of each text."""
    labels = np.array(row["labels"])
    labels[np.cumsum([0, *row.get("seq_lengths", [])[:-1]])] = -100
    return int((labels != -100).sum())


def _sums(outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The sum of the losses of the tokens of each row, padded or one after another."""
    losses, lengths = -outputs.log_probs, inputs[LENGTH]  # 0 where there is no label
    losses = losses.to(torch.promote_types(losses.dtype, torch.float32))
    if len(losses) == len(lengths):
        return losses.sum(1)
    places = torch.arange(len(lengths), device=losses.device)
    row = places.repeat_interleave(lengths)[1:]  # of the token that a loss is for
    return losses.new_zeros(len(lengths)).index_add(0, row, losses[0, : len(row)])


def _checksum(data: Dataset) -> int:
    """Of all tokens and labels."""
    found = 0
    for row in data:
        found = zlib.crc32(repr((row["input_ids"], row["labels"])).encode(), found)  # type: ignore
    return found
