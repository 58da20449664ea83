"""Accelerate: `prepare` with an objective, and with samplers that know the processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

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
from ._shared import check_ranks, load_objective, log_values, sampler_of, stepped_by

__all__ = ["ResumableLoader", "check_loader", "log_values", "prepare"]


def prepare(
    accelerator: Accelerator, *objects: Any, objective: Callable[[Any, Any], nn.Module]
) -> tuple[Any, ...]:
    """Call `accelerator.prepare(*objects)`; the objective comes as one more result at the end.

    * If the method has an optimizer around yours (`alexr2`, `ssg`), that one is returned in its
      place.
    * A loader with a sampler of `fcco.groups` becomes a `ResumableLoader`. Its batches are not
      divided over the processes: the sampler gives each process its part of every batch.
      `split_batches`, `dispatch_batches` and `even_batches` do not apply to it.
    * `accelerator.save_state` and `load_state` include the objective and the positions of these
      samplers. After `load_state`, a loop over the loader goes on with the next batch, also in the
      middle of an epoch and with loader workers. Save after a step of the optimizer.
    * A scheduler makes one step for each of the optimizer's, on several processes too.

    With sharded parameters (FSDP2) the first step after `load_state` is made without correction,
    because the file has w_{t-1} of the first process only.

    Args:
        accelerator: yours.
        objects: models, optimizers, loaders and schedulers, as for `accelerator.prepare`; the
            loaders as you made them.
        objective: makes the objective from the prepared model and optimizer (lists of them, if
            there are several).

    Example:
        >>> import torch, fcco
        >>> from accelerate import Accelerator
        >>> from fcco.integrations.accelerate import prepare
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> group = torch.arange(4).repeat(5)
        >>> data = torch.utils.data.TensorDataset(torch.randn(20, 3), group)
        >>> sampler = fcco.GroupBatchSampler(group, batch_size=8)
        >>> loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
        >>> model, optimizer, loader, dro = prepare(
        ...     accelerator, model, optimizer, loader,
        ...     objective=lambda m, o: fcco.CVaRGroupDRO(m, o, num_groups=4, ratio=0.5),
        ... )
        >>> for x, g in loader:
        ...     accelerator.backward(dro(lambda: model(x).squeeze(1).exp(), g))
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """
    models = [each for each in objects if isinstance(each, nn.Module)]
    optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
    if not models or not optimizers:
        missing = "optimizer" if models else "model"
        raise ValueError(f"`prepare(...)` needs the {missing} too: the objective is built on it.")
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
    rest = iter(accelerator.prepare(*(each for k, each in enumerate(objects) if k not in samplers)))
    results = [
        ResumableLoader(_on_device(accelerator, each), samplers[k]) if k in samplers else next(rest)
        for k, each in enumerate(objects)
    ]
    for each in results:
        if samplers and isinstance(each, AcceleratedScheduler):
            each.split_batches = True  # else it steps once for each process
    made: Any = objective(
        *(
            found[0] if len(found) == 1 else found
            for kind in (nn.Module, torch.optim.Optimizer)
            if (found := [each for each in results if isinstance(each, kind)])
        )
    )
    if not isinstance(made, nn.Module):
        raise TypeError(f"`prepare(objective=...)` must make an objective but made: {made!r}.")
    outer = made.optimizer
    if isinstance(outer, MethodOptimizer):  # prepared in place of yours, so that it is saved too
        places = stepped_by(outer, results)
        if len(places) != 1:
            raise ValueError(
                f"`prepare(objective=...)` made an objective whose {type(outer).__name__} steps "
                f"{len(places)} of the optimizers given to `prepare(...)`; it must be one."
            )
        results[places[0]] = accelerator.prepare_optimizer(outer)
    made.to(accelerator.device)
    state = _TrainingState(made, list(samplers.values()))
    accelerator.register_for_checkpointing(state)
    _check_at_first_call(accelerator, state)
    return (*results, made)


def check_loader(accelerator: Accelerator, loader: Any) -> None:
    """Raise unless each process gets its part of the batches of a `GroupBatchSampler`.

    `accelerator.prepare` divides the batches over the processes, though the sampler has done so
    already. `prepare` does not; this is for loops that go without it.

    Example:
        >>> import torch, fcco
        >>> from accelerate import Accelerator
        >>> from fcco.integrations.accelerate import check_loader
        >>> sampler = fcco.GroupBatchSampler([0, 0, 1, 1], batch_size=2)
        >>> loader = torch.utils.data.DataLoader(range(4), batch_sampler=sampler)
        >>> check_loader(Accelerator(cpu=True), loader)
    """
    sampler = _sampler_in(loader)
    if sampler is None:
        return
    several = accelerator.num_processes > 1
    if several and isinstance(loader, DataLoaderDispatcher):
        how = "sends the batches of the first process to all"
    elif several and isinstance(loader.batch_sampler, BatchSamplerShard):
        how = "divides its batches over the processes"
    else:
        rank, number = accelerator.process_index, accelerator.num_processes
        check_ranks(sampler, rank, number, "Make it after the Accelerator.")
        return
    raise ValueError(
        f"`accelerator.prepare` {how}, but {type(sampler).__name__} gives each process its part "
        "of every batch by itself. Use `fcco.integrations.accelerate.prepare`."
    )


class ResumableLoader:
    """A loader whose sampler knows which batches the loop has had; `prepare` makes it."""

    def __init__(self, loader: Any, sampler: ResumableSampler[Any]) -> None:
        self._loader, self.batch_sampler = loader, sampler

    def __iter__(self) -> Iterator[Any]:
        """The rest of the sampler's epoch."""
        sampler = self.batch_sampler
        # The loader counts epochs too, but from 0, and tells the sampler.
        self._loader.set_epoch(sampler.epoch)
        for batch in sampler.consume(self._loader):
            position = sampler.state_dict()
            yield batch
            if sampler.state_dict() != position:
                raise RuntimeError(
                    "The position of the sampler has changed inside a loop over its loader, by "
                    "`accelerator.load_state` perhaps: leave the loop first, and begin a new one."
                )

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    @property
    def sampler(self) -> NoReturn:
        """Refused: `skip_first_batches` asks for it."""
        raise TypeError(
            "This loader goes on after the last batch by itself; `skip_first_batches` would skip "
            "others. Its sampler is `loader.batch_sampler`."
        )


class _TrainingState:
    """An objective and the samplers of its loaders, for `register_for_checkpointing`."""

    def __init__(self, objective: nn.Module, samplers: list[ResumableSampler[Any]]) -> None:
        self.objective, self.samplers = objective, samplers

    def state_dict(self) -> dict[str, Any]:
        samplers = [each.state_dict() for each in self.samplers]
        return {"objective": self.objective.state_dict(), "samplers": samplers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["samplers"]) != len(self.samplers):
            raise ValueError(
                f"`load_state`: the checkpoint has the positions of {len(state['samplers'])} "
                f"samplers, but `prepare` was given {len(self.samplers)}."
            )
        load_objective(self.objective, state["objective"])
        for sampler, position in zip(self.samplers, state["samplers"], strict=True):
            sampler.load_state_dict(position)


def _check_at_first_call(accelerator: Accelerator, state: _TrainingState) -> None:
    """Raise, at the first call of the objective, if its loader went to `accelerator.prepare`."""

    def check(objective: nn.Module, args: Any) -> None:
        handle.remove()
        loader = accelerator.gradient_state.active_dataloader
        sampler = _sampler_in(loader)
        if sampler is not None and not any(sampler is each for each in state.samplers):
            check_loader(accelerator, loader)
            raise ValueError(
                f"The loader with a {type(sampler).__name__} was not given to `fcco.integrations."
                "accelerate.prepare`: its position would not be saved."
            )

    handle = state.objective.register_forward_pre_hook(check)


def _sampler_in(loader: Any) -> ResumableSampler[Any] | None:
    """The sampler of a loader, prepared or not."""
    if not isinstance(loader, DataLoader):
        return None
    if isinstance(loader.batch_sampler, BatchSamplerShard):
        inner: Any = loader.batch_sampler.batch_sampler
        return inner if isinstance(inner, ResumableSampler) else None
    sampler = sampler_of(loader)
    if sampler is not None and sampler is not loader.batch_sampler:
        raise ValueError(
            f"Accelerate would drop the {type(sampler).__name__} of `DataLoader(sampler=...)`: "
            "give it as `DataLoader(batch_sampler=...)`."
        )
    return sampler


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
