"""Lightning: a `LightningModule` with an objective of fcco."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn

from .._watch import warn
from ..groups import ResumableSampler
from ..optim import MethodOptimizer
from ..previous import unwrap
from ..report import ConstraintReport, GroupReport
from ._shared import (
    check_ranks,
    load_objective,
    log_values,
    report_of,
    sampler_of,
    start_epoch,
    stepped_by,
)

__all__ = ["RobustModule", "log_values"]

_UNUSED = 10  # batches after which an objective whose loss was never differentiated is warned of
_KEY = "fcco"  # in a checkpoint, of the objective and the samplers


class RobustModule(LightningModule):
    """A `LightningModule` whose loss is an objective of fcco.

    Write `configure_objective` beside `configure_optimizers`, and use `self.objective` in
    `training_step`. The rest is done:

    * The objective is made when the fit starts, on the optimizers that Lightning made. It is no
      submodule: the module's `state_dict()` is that of the model. It is in `eval()` mode when the
      module is.
    * Checkpoints hold the objective and the position of the samplers of `fcco.groups`: those of
      the train loaders, and those that are attributes of the module. A resumed run goes on with
      the next batch, also in the middle of an epoch and with loader workers.
    * Lightning leaves a train loader with such a sampler as it is. On several devices make the
      sampler in `train_dataloader()`, where it learns its rank.
    * `log_values` of the report are logged every `Trainer(log_every_n_steps=...)` steps and at the
      end of each epoch; see `log_report`.

    With an existing module as a base, name both: `class Robust(RobustModule, Existing)`.

    Example:
        >>> import torch, fcco
        >>> from torch.nn.functional import softplus
        >>> from fcco.integrations.lightning import RobustModule
        >>> class Robust(RobustModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = torch.nn.Linear(3, 1)
        ...
        ...     def configure_optimizers(self):
        ...         return torch.optim.AdamW(self.net.parameters(), lr=0.01)
        ...
        ...     def configure_objective(self, optimizer):
        ...         return fcco.CVaRGroupDRO(self.net, optimizer, num_groups=4, ratio=0.5)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         x, y, group = batch
        ...         return self.objective(lambda: softplus(-y * self.net(x).squeeze(1)), group)
    """

    __jit_unused_properties__ = [*LightningModule.__jit_unused_properties__, "objective"]  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._keeper = _ObjectiveKeeper()

    def _new_keeper(self) -> _ObjectiveKeeper:
        if self._keeper.objective is not None:
            self._keeper.objective.detach_hooks()  # a fit has new optimizers
        self._keeper = _ObjectiveKeeper()
        return self._keeper

    def configure_objective(self, optimizer: Any) -> nn.Module:
        """Make the objective on what `configure_optimizers` made: an optimizer, or a list.

        To be written by you.
        """
        raise NotImplementedError(
            f"`{type(self).__name__}` needs `configure_objective(self, optimizer)`, which returns "
            "an objective such as `fcco.CVaRGroupDRO(self.net, optimizer, ...)`."
        )

    @property
    def objective(self) -> Any:
        """The objective, from the start of a fit on."""
        objective = self._keeper.objective
        if objective is None:
            raise RuntimeError(
                f"`{type(self).__name__}.objective` is made when `Trainer.fit` starts. In a fit: "
                "`configure_callbacks` must return `[*super().configure_callbacks(), ...]`."
            )
        if objective.training != self.training:
            objective.train(self.training)
        return objective

    def log_report(self, report: GroupReport | ConstraintReport) -> None:
        """Log a report of the objective; override it to log something else, or nothing."""
        self.log_dict(log_values(report), sync_dist=True)  # equal on all ranks

    def configure_callbacks(self) -> list[Callback]:
        """The callback that makes, saves and reports the objective."""
        others = super().configure_callbacks()
        others = [others] if isinstance(others, Callback) else others
        return [*others, self._keeper]


class _ObjectiveKeeper(Callback):
    """Makes the objective of a `RobustModule`, counts its samplers' batches, saves and logs.

    A callback and not hooks of the module, which a subclass may override without `super()`.
    """

    def __init__(self) -> None:
        self.objective: Any = None  # from the start of the fit on
        self.samplers: list[ResumableSampler[Any]] = []  # of the train loaders, in their order
        self._replaced: list[ResumableSampler[Any]] = []
        self._loaders_in_use = False
        self._loaded: Any = None  # the state in a checkpoint
        self._batches = self._reported_step = 0
        self._differentiated = False  # a loss of the objective

    def __reduce__(self) -> Any:
        return type(self), ()  # a copy of the module has no objective until it is fitted

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        connector, others = trainer._data_connector, [x for x in trainer.callbacks if x is not self]
        if not isinstance(pl_module, RobustModule):  # it was in an earlier fit of this trainer
            trainer.callbacks = others
            vars(connector).pop("_prepare_dataloader")
            return
        keeper = pl_module._new_keeper()
        # The first one, so that a checkpoint of any other callback has the batch counted.
        trainer.callbacks = [keeper, *others]
        # There is no hook between `train_dataloader()` and the first batches, which workers ask
        # the sampler for at once. This method puts a `DistributedSampler` into a loader.
        original = functools.partial(type(connector)._prepare_dataloader, connector)

        def prepare(dataloader: Any, shuffle: bool, mode: RunningStage) -> Any:
            sampler = sampler_of(dataloader) if mode == RunningStage.TRAINING else None
            if sampler is None:
                return original(dataloader, shuffle=shuffle, mode=mode)
            keeper._begin(sampler, trainer, pl_module)
            # These make a loader resumable in the eyes of Lightning, which warns of others.
            dataloader.state_dict = sampler.state_dict
            dataloader.load_state_dict = sampler.load_state_dict
            return dataloader

        connector._prepare_dataloader = prepare

    def _begin(self, sampler: ResumableSampler[Any], trainer: Any, pl_module: Any) -> None:
        """Let the sampler of a train loader start where it should."""
        _check_ranks(trainer, sampler)
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise ValueError(
                "`training_step(self, dataloader_iter)` takes as many batches as it likes: a "
                f"checkpoint could not tell where the {type(sampler).__name__} stands. Write "
                "`training_step(self, batch, batch_idx)`."
            )
        if self._loaders_in_use:  # `reload_dataloaders_every_n_epochs`
            self._replaced, self.samplers, self._loaders_in_use = self.samplers, [], False
        place = len(self.samplers)
        self.samplers.append(sampler)
        sampler.advance(0)  # from now on, batches count when they were trained on
        if self._loaded is not None and place < len(self._loaded["samplers"]):
            sampler.load_state_dict(self._loaded["samplers"][place])
        elif place < len(self._replaced):
            sampler.set_epoch(self._replaced[place].epoch)
        if not trainer.fit_loop.restarting:
            start_epoch(sampler)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        objective = pl_module.configure_objective(pl_module.optimizers(use_pl_optimizer=False))
        call = f"`{type(pl_module).__name__}.configure_objective`"
        if not isinstance(objective, nn.Module):
            raise TypeError(f"{call} must return an objective but returned: {objective!r}.")
        several: Any = objective.optimizer
        if isinstance(several, MethodOptimizer):  # around the given ones: Lightning steps it
            inner = stepped_by(several, trainer.optimizers)
            rest = [each for k, each in enumerate(trainer.optimizers) if k not in inner]
            trainer.strategy.optimizers = [several, *rest] if inner else rest
        several = several if isinstance(several, (list, tuple)) else [several]
        stepped = {id(unwrap(each)) for each in trainer.optimizers}
        if not {id(unwrap(each)) for each in several} <= stepped:
            raise ValueError(
                f"{call} must build on the optimizer that it is given, which Lightning steps, but "
                "its objective has another."
            )
        for sampler in _samplers_of(pl_module).values():
            _check_ranks(trainer, sampler)
        self.objective = objective.to(pl_module.device)
        self._handle = objective.register_forward_hook(self._called)
        if self._loaded is not None:
            self._restore(pl_module)

    def _called(self, objective: nn.Module, args: Any, loss: Tensor) -> None:
        if objective.training and loss.requires_grad:
            loss.register_hook(self._note_backward)

    def _note_backward(self, _: Tensor) -> None:
        self._differentiated = True
        self._handle.remove()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        loaders = CombinedLoader(trainer.train_dataloader).flattened
        used = [sampler for each in loaders if (sampler := sampler_of(each)) is not None]
        if list(map(id, used)) != list(map(id, self.samplers)):
            raise RuntimeError(
                "The train loaders do not draw from the samplers that they were given: something "
                "has replaced them, or Lightning has changed."
            )
        if self._loaded is not None and len(self._loaded["samplers"]) != len(self.samplers):
            warn(
                f"The checkpoint has the positions of {len(self._loaded['samplers'])} samplers, "
                f"but the train loaders have {len(self.samplers)}: data are read again or left out."
            )
        self._loaders_in_use, self._loaded = True, None
        # With `max_steps`, Lightning finishes the epoch of a checkpoint from the end of one by
        # training on a batch more, unless it can validate; that batch is of the next epoch.
        loop = trainer.fit_loop
        finished = loop.epoch_loop.batch_progress.current.completed >= trainer.num_training_batches
        if self.samplers and loop.restarting and finished:
            loop._data_fetcher.done = True

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.fit_loop.restarting:
            for sampler in self.samplers:
                start_epoch(sampler)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        for sampler in self.samplers:
            sampler.advance()
            if trainer.is_last_batch:  # perhaps not the sampler's: `limit_train_batches`
                start_epoch(sampler)
        self._batches += 1
        if self._batches == _UNUSED and not self._differentiated:
            warn(
                f"{_UNUSED} batches were trained on, but no loss of `self.objective` was "
                f"differentiated: `{type(pl_module).__name__}.training_step` must return it, or "
                "give it to `self.manual_backward`."
            )
        step, every = trainer.global_step, trainer.log_every_n_steps
        if every and step % every == 0 and step != self._reported_step:
            self._reported_step = step
            self._report(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._loaders_in_use = True  # not at its start, a hook that a resumed epoch may skip
        self._report(trainer, pl_module)

    def _report(self, trainer: Any, pl_module: Any) -> None:
        report = None if trainer.barebones else report_of(self.objective)
        if report is not None:
            pl_module.log_report(report)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        if self.objective is not None:
            checkpoint[_KEY] = {
                "objective": self.objective.state_dict(),
                "samplers": [each.state_dict() for each in self.samplers],
                "attributes": {k: v.state_dict() for k, v in _samplers_of(pl_module).items()},
            }

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._loaded = checkpoint.get(_KEY)
        if self._loaded is None:
            warn("The checkpoint has no objective: its estimates and the samplers start anew.")
        elif self.objective is not None:  # strategies that load after the start of the fit
            self._restore(pl_module)

    def _restore(self, pl_module: Any) -> None:
        load_objective(self.objective, self._loaded["objective"])
        for name, sampler in _samplers_of(pl_module).items():
            if name in self._loaded["attributes"]:
                sampler.load_state_dict(self._loaded["attributes"][name])
        for sampler, position in zip(self.samplers, self._loaded["samplers"], strict=False):
            sampler.load_state_dict(position)


def _samplers_of(module: LightningModule) -> dict[str, ResumableSampler[Any]]:
    """Samplers that are attributes of the module, for draws without a loader."""
    return {k: v for k, v in vars(module).items() if isinstance(v, ResumableSampler)}


def _check_ranks(trainer: Trainer, sampler: ResumableSampler[Any]) -> None:
    ranks = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
    remedy = "Make it in `train_dataloader()`, or give it rank= and world_size=."
    check_ranks(sampler, ranks["rank"], ranks["num_replicas"], remedy)
