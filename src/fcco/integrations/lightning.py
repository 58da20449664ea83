"""Lightning: a `LightningModule` with an objective of fcco."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn

from .._watch import warn
from ..groups import ResumableSampler
from ..optim import MethodOptimizer
from ..previous import unwrap
from ..report import ConstraintReport, GroupReport
from . import _shared
from ._shared import ResumableLoader, log_values, report_of

__all__ = ["ResumableLoader", "RobustModule", "log_values"]

_UNUSED = 10  # batches without a loss of the objective that was differentiated, then a warning
_KEY = "fcco"  # in a checkpoint, of the objective and the samplers


class RobustModule(LightningModule):
    """A `LightningModule` whose loss is an objective of fcco.

    Write `configure_objective` beside `configure_optimizers`, and use `self.objective` in
    `training_step`. Give a train loader with a sampler of `fcco.groups` as a `ResumableLoader`,
    made in `train_dataloader()`. The objective, made when the fit starts, is saved in checkpoints
    with the positions of the samplers, and is no submodule.
    """

    __jit_unused_properties__ = [*LightningModule.__jit_unused_properties__, "objective"]  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._keeper = _ObjectiveKeeper()

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
    """Makes the objective of a `RobustModule`, saves it with the samplers, and logs.

    A callback and not hooks of the module, which a subclass may override without `super()`.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.objective: Any = None  # from the start of the fit on
        self._loaded: Any = None  # the state in a checkpoint
        self._batches = self._reported_step = 0
        self._epochs: list[int] = []  # of the samplers of the train loaders, at the end of the last
        self._differentiated = False  # a loss of the objective

    def __reduce__(self) -> Any:
        return type(self), ()  # a copy of the module has no objective until it is fitted

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if not isinstance(pl_module, RobustModule):  # it was in an earlier fit of this trainer
            trainer.callbacks = [each for each in trainer.callbacks if each is not self]
        elif stage == "fit":
            if self.objective is not None:
                self.objective.detach_hooks()  # a fit has new optimizers
            self._begin()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        objective = pl_module.configure_objective(pl_module.optimizers(use_pl_optimizer=False))
        call = f"`{type(pl_module).__name__}.configure_objective`"
        if not isinstance(objective, nn.Module):
            raise TypeError(f"{call} must return an objective but returned: {objective!r}.")
        several: Any = objective.optimizer
        if isinstance(several, MethodOptimizer):  # around the given ones: Lightning steps it
            inner = _shared.stepped_by(several, trainer.optimizers)
            rest = [each for k, each in enumerate(trainer.optimizers) if k not in inner]
            trainer.strategy.optimizers = [several, *rest] if inner else rest
        several = several if isinstance(several, (list, tuple)) else [several]
        stepped = {id(unwrap(each)) for each in trainer.optimizers}
        if not {id(unwrap(each)) for each in several} <= stepped:
            raise ValueError(
                f"{call} must build on the optimizer that it is given, which Lightning steps, but "
                "its objective has another."
            )
        self.objective = objective.to(pl_module.device)
        objective.register_forward_hook(self._called)

    def _called(self, objective: nn.Module, args: Any, loss: Tensor) -> None:
        if objective.training and loss.requires_grad and not self._differentiated:
            loss.register_hook(self._note_backward)

    def _note_backward(self, _: Tensor) -> None:
        self._differentiated = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for loader in _train_loaders(trainer):
            sampler = _shared.sampler_of(loader)
            if sampler is not None:
                raise ValueError(
                    f"The position of the {type(sampler).__name__} of a train loader would not be "
                    "saved: give the loader as `ResumableLoader(loader)`."
                )
        state = self._state(trainer, pl_module)
        ranks = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        remedy = "Make it in `train_dataloader()`, or give it rank= and world_size=."
        for sampler in state.samplers.values():
            _shared.check_ranks(sampler, ranks["rank"], ranks["num_replicas"], remedy)
        if self._loaded is not None:
            state.load_state_dict(self._loaded)
            self._loaded = None
        # With `max_steps`, Lightning finishes the epoch of a checkpoint from the end of one by
        # training on a batch more, unless it can validate; that batch is of the next epoch.
        loop = trainer.fit_loop
        finished = loop.epoch_loop.batch_progress.current.completed >= trainer.num_training_batches
        for loader in _resumable_loaders(trainer):
            loader.closed = loop.restarting and finished

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        loaders = _resumable_loaders(trainer)
        for loader, epoch in zip(loaders, self._epochs, strict=False):
            loader.batches.set_epoch(epoch)  # of a new one: `reload_dataloaders_every_n_epochs`
        for loader in loaders if not trainer.fit_loop.restarting else ():
            loader.leave_epoch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        for loader in _resumable_loaders(trainer) if trainer.is_last_batch else ():
            loader.leave_epoch()  # perhaps it goes on: `limit_train_batches`
        self._batches += 1
        if self._batches == _UNUSED and not self._differentiated:
            warn(
                f"No loss of `self.objective` was differentiated in {_UNUSED} batches: "
                f"`{type(pl_module).__name__}.training_step` must return it."
            )
        step, every = trainer.global_step, trainer.log_every_n_steps
        if every and step % every == 0 and step != self._reported_step:
            self._reported_step = step
            self._report(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        loaders = _resumable_loaders(trainer)
        self._epochs = [loader.batches.epoch for loader in loaders]
        for loader in loaders:
            loader.closed = False
        self._report(trainer, pl_module)

    def _report(self, trainer: Any, pl_module: Any) -> None:
        report = None if trainer.barebones else report_of(self.objective)
        if report is not None:
            pl_module.log_report(report)

    def _state(self, trainer: Any, pl_module: Any) -> _shared.TrainingState:
        # The attributes are for draws without a loader.
        samplers = {k: v for k, v in vars(pl_module).items() if isinstance(v, ResumableSampler)}
        for k, loader in enumerate(_resumable_loaders(trainer)):
            samplers[f"train loader {k}"] = loader.batches
        return _shared.TrainingState(self.objective, samplers)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        if self.objective is not None:
            checkpoint[_KEY] = self._state(trainer, pl_module).state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._loaded = checkpoint.get(_KEY)
            if self._loaded is None:
                warn("The checkpoint has no objective: its estimates and the samplers start anew.")


def _train_loaders(trainer: Trainer) -> list[Any]:
    return CombinedLoader(trainer.train_dataloader).flattened


def _resumable_loaders(trainer: Trainer) -> list[ResumableLoader]:
    return [each for each in _train_loaders(trainer) if isinstance(each, ResumableLoader)]
