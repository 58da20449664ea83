"""Accelerate: `prepare` with an objective, and with samplers that know the processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    prepare_data_loader,
)
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.utils.data import DataLoader

from ..groups import ResumableSampler
from ..optim import MethodOptimizer
from . import _shared
from ._shared import ResumableLoader, log_values

__all__ = ["check_loader", "log_values", "prepare"]


def prepare(
    accelerator: Accelerator, *objects: Any, objective: Callable[[Any, Any], nn.Module]
) -> tuple[Any, ...]:
    """Call `accelerator.prepare(*objects)`; the objective comes as one more result at the end.

    A method's optimizer around yours is returned in its place. The batches of a loader with a
    sampler of `fcco.groups` are not divided once more; `save_state` has its position, too.

    Args:
        accelerator: yours.
        objects: models, optimizers, loaders and schedulers, as for `accelerator.prepare`; the
            loaders as you made them.
        objective: makes the objective from the prepared model and optimizer (lists of them, if
            there are several).
    """
    samplers = {
        k: sampler for k, each in enumerate(objects) if (sampler := _sampler_in(each)) is not None
    }
    for k, sampler in samplers.items():
        if isinstance(objects[k], (DataLoaderShard, DataLoaderDispatcher)):
            raise ValueError(
                "`prepare(...)` needs the loader as you made it, not what `accelerator.prepare` "
                f"returned for it, which has wrapped its {type(sampler).__name__}."
            )
        check_loader(accelerator, objects[k])
    models, optimizers = _of_kind(nn.Module, objects), _of_kind(torch.optim.Optimizer, objects)
    if not models or not optimizers:
        missing = "optimizer" if models else "model"
        raise ValueError(f"`prepare(...)` needs the {missing} too: the objective is built on it.")
    rest = iter(accelerator.prepare(*(each for k, each in enumerate(objects) if k not in samplers)))
    results = [
        _PreparedLoader(_on_device(accelerator, each)) if k in samplers else next(rest)
        for k, each in enumerate(objects)
    ]
    for each in _of_kind(AcceleratedScheduler, results if samplers else ()):
        each.split_batches = True  # else it steps once for each process
    parts = (_of_kind(kind, results) for kind in (nn.Module, torch.optim.Optimizer))
    made: Any = objective(*(found[0] if len(found) == 1 else found for found in parts))
    if not isinstance(made, nn.Module):
        raise TypeError(f"`prepare(objective=...)` must make an objective but made: {made!r}.")
    outer = made.optimizer
    if isinstance(outer, MethodOptimizer):  # prepared in place of yours, so that it is saved too
        places = _shared.stepped_by(outer, results)
        if len(places) != 1:
            raise ValueError(
                f"`prepare(objective=...)` made an objective whose {type(outer).__name__} steps "
                f"{len(places)} of the optimizers given to `prepare(...)`; it must be one."
            )
        results[places[0]] = accelerator.prepare_optimizer(outer)
    made.to(accelerator.device)
    state = _shared.TrainingState(made, {f"object {k}": sampler for k, sampler in samplers.items()})
    accelerator.register_for_checkpointing(state)
    _check_at_first_call(accelerator, made, samplers.values())
    return (*results, made)


def check_loader(accelerator: Accelerator, loader: Any) -> None:
    """Raise unless each process gets its part of each batch, in a loop without our `prepare`."""
    sampler = _sampler_in(loader)
    if sampler is None:
        return
    several = accelerator.num_processes > 1
    shared = isinstance(loader, DataLoaderDispatcher)
    if several and (shared or isinstance(loader.batch_sampler, BatchSamplerShard)):
        how = "sends the batches of the first process to all" if shared else "divides its batches"
        raise ValueError(
            f"`accelerator.prepare` {how}, but {type(sampler).__name__} gives each process its "
            "part of every batch by itself. Use `fcco.integrations.accelerate.prepare`."
        )
    rank, number = accelerator.process_index, accelerator.num_processes
    _shared.check_ranks(sampler, rank, number, "Make it after the Accelerator.")


class _PreparedLoader(ResumableLoader):
    """Around a loader of Accelerate, which counts epochs too, but from 0, and tells the sampler."""

    def __iter__(self) -> Iterator[Any]:
        self.loader.set_epoch(self.batches.epoch)
        return super().__iter__()


def _of_kind(kind: type, objects: Collection[Any]) -> list[Any]:
    return [each for each in objects if isinstance(each, kind)]


def _check_at_first_call(
    accelerator: Accelerator, objective: nn.Module, samplers: Collection[ResumableSampler[Any]]
) -> None:
    """Raise, at the first call of the objective, if its loader went to `accelerator.prepare`."""

    def check(objective: nn.Module, args: Any) -> None:
        handle.remove()
        loader = accelerator.gradient_state.active_dataloader
        sampler = _sampler_in(loader)
        if sampler is not None and not any(sampler is each for each in samplers):
            check_loader(accelerator, loader)
            raise ValueError(
                f"The loader with a {type(sampler).__name__} was not given to `fcco.integrations."
                "accelerate.prepare`: its position would not be saved."
            )

    handle = objective.register_forward_pre_hook(check)


def _sampler_in(loader: Any) -> ResumableSampler[Any] | None:
    """The sampler of a loader, prepared or not."""
    if isinstance(loader, DataLoader) and isinstance(loader.batch_sampler, BatchSamplerShard):
        inner: Any = loader.batch_sampler.batch_sampler
        return inner if isinstance(inner, ResumableSampler) else None
    return _shared.sampler_of(loader)


def _on_device(accelerator: Accelerator, loader: DataLoader[Any]) -> Any:
    """A loader as Accelerate makes it for one process."""
    return prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=accelerator.device_placement,
        dispatch_batches=False,
        non_blocking=accelerator.non_blocking,
    )
