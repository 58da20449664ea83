"""Accelerate and Lightning take the same path as the plain loop.

integration_cases.py has the problem and the loop.
"""

from __future__ import annotations

import copy
import csv
import functools
import itertools
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from integration_cases import (
    BATCH,
    EPOCHS,
    SAMPLES,
    ModelAndObjective,
    Samples,
    assert_same,
    distance,
    dro,
    loader,
    loss_of,
    make,
    plain,
    run_on_two_ranks,
    sgd,
)
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

import fcco

# Lightning's and Accelerate's remarks on loops as short as these, and on torch; by their text, so
# that warnings of fcco stay errors.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "You defined a `validation_step` but have no `val_dataloader`",
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint",
    )
]


def test_the_correction_matters():
    for accumulate in (1, 2):
        assert distance(plain(accumulate)[0], plain(accumulate, correction=0.0)[0]) > 1e-4


# --- batches of groups, resumed ---------------------------------------------------------------

STEPS = 4  # per epoch


def group_loader(workers: int = 0, epoch: int = 0, **ranks: Any) -> DataLoader[Any]:
    data = Samples()
    sampler = fcco.GroupBatchSampler(
        data.group, groups_per_batch=2, per_group=4, batches_per_epoch=STEPS, seed=3, **ranks
    )
    sampler.set_epoch(epoch)
    generator = torch.Generator()  # as in `loader`
    return DataLoader(data, batch_sampler=sampler, generator=generator, num_workers=workers)


def plain_groups(
    lengths: tuple[int, ...] = (STEPS,) * 3, accumulate: int = 1, decay: float = 1.0
) -> ModelAndObjective:
    """So many batches of each epoch; the rate falls by `decay` at each step."""
    model = make()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    objective = dro(model, optimizer)
    torch.manual_seed(1)
    for epoch, length in enumerate(lengths):
        batches = itertools.islice(group_loader(epoch=epoch), length)
        for number, batch in enumerate(batches, start=1):
            (loss_of(objective, model, batch) / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    return model, objective


def limited(model: nn.Module, optimizer: Any) -> Any:
    """alexr2 has an optimizer around the given one, and rounds of three steps."""
    return fcco.constrained(
        model, optimizer, 4, "alexr2", tolerance=0.3, penalty=4.0, smoothing=0.2, gamma=0.3, nu=0.5,
        eta=0.1, inner_steps=3,
    )  # fmt: skip


def limited_loss(objective: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return objective(lambda: (softplus(-batch["y"] * model(batch["x"])),) * 2, batch["group"])


# The user's optimizer steps when a round of alexr2 ends; a scheduler takes the first for an error.
rounds = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


@functools.cache
def plain_limited() -> nn.Module:
    model = make()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    objective = limited(model, optimizer)
    torch.manual_seed(1)
    for epoch in range(3):
        for batch in group_loader(epoch=epoch):
            limited_loss(objective, model, batch).backward()
            objective.optimizer.step()
            objective.optimizer.zero_grad()
            scheduler.step()
    assert distance(make(), model) > 0.01
    return model


# --- Accelerate -------------------------------------------------------------------------------


@pytest.fixture
def accelerate() -> Any:
    module = pytest.importorskip("accelerate")
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    yield module
    state.AcceleratorState._reset_state(reset_partial_state=True)


def accelerated(
    accelerator: Any, data: DataLoader[Any], decay: float = 1.0, objective: Any = dro
) -> tuple[Any, ...]:
    from fcco.integrations.accelerate import prepare

    model = make()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    return prepare(accelerator, data, model, optimizer, scheduler, objective=objective)


def accelerated_steps(
    accelerator: Any, parts: tuple[Any, ...], batches: int, loss_of: Any = loss_of
) -> None:
    """Train on so many batches; after them the loop is left, in the middle of an epoch perhaps."""
    data, model, optimizer, scheduler, objective = parts
    while batches:
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(objective, model, batch))
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            batches -= 1
            if not batches:
                return


@pytest.mark.parametrize("accumulate", [1, 2])
def test_accelerate(accelerate, accumulate):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    parts = accelerated(accelerator, loader())
    torch.manual_seed(1)
    accelerated_steps(accelerator, parts, EPOCHS * SAMPLES // BATCH)
    assert_same(parts[1], parts[-1], plain(accumulate))


ONE_OR_TWO_WORKERS = [0, pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("workers", ONE_OR_TWO_WORKERS)
@pytest.mark.parametrize(("batches", "accumulate"), [(6, 1), (4, 1), (6, 2)])
def test_accelerate_resume(accelerate, tmp_path, batches, accumulate, workers):
    """In the middle of the second epoch, and after the first, in a process of its own."""
    kwargs = {"cpu": True, "gradient_accumulation_steps": accumulate}
    accelerator = accelerate.Accelerator(**kwargs)
    first = accelerated(accelerator, group_loader(workers), decay=0.9)
    torch.manual_seed(1)
    accelerated_steps(accelerator, first, batches)
    accelerator.save_state(str(tmp_path))
    accelerated_steps(accelerator, first, 3 * STEPS - batches)
    expected = plain_groups(accumulate=accumulate, decay=0.9)
    assert_same(first[1], first[-1], expected)

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(**kwargs)
    second = accelerated(accelerator, group_loader(workers), decay=0.9)
    accelerator.load_state(str(tmp_path))
    accelerated_steps(accelerator, second, 3 * STEPS - batches)
    assert_same(second[1], second[-1], expected)


@rounds
def test_accelerate_steps_the_optimizer_of_the_method(accelerate, tmp_path):
    for start, end in ((0, 5), (5, 3 * STEPS)):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True)
        parts = accelerated(accelerator, group_loader(), 0.9, limited)
        torch.manual_seed(1)
        if start:
            accelerator.load_state(str(tmp_path))  # the random state, too
        accelerated_steps(accelerator, parts, end - start, limited_loss)
        accelerator.save_state(str(tmp_path))
    assert distance(parts[1], plain_limited()) == 0.0


def test_accelerate_refuses_what_would_read_other_batches(accelerate, tmp_path):
    from accelerate.data_loader import prepare_data_loader, skip_first_batches

    from fcco.integrations.accelerate import check_loader, prepare

    accelerator = accelerate.Accelerator(cpu=True)
    model = make()
    optimizer = sgd(model)
    with pytest.raises(ValueError, match="rank 0 of 2"):
        accelerated(accelerator, group_loader(rank=0, world_size=2))
    with pytest.raises(ValueError, match="batch_sampler"):
        sampler: Any = group_loader().batch_sampler
        accelerated(accelerator, DataLoader(Samples(), batch_size=None, sampler=sampler))
    with pytest.raises(ValueError, match="as you made it"):
        accelerated(accelerator, accelerator.prepare(group_loader()))
    with pytest.raises(ValueError, match="optimizer"):
        prepare(accelerator, model, loader(), objective=dro)
    with pytest.raises(TypeError, match="objective"):
        prepare(accelerator, model, optimizer, objective=lambda model, optimizer: None)  # type: ignore

    parts = accelerated(accelerator, group_loader())
    with pytest.raises(AttributeError, match="batch_sampler"):  # it goes on by itself
        skip_first_batches(parts[0], 2)
    accelerated_steps(accelerator, parts, 2)
    accelerator.save_state(str(tmp_path))
    with pytest.raises(RuntimeError, match="load_state"):
        for _ in parts[0]:
            accelerator.load_state(str(tmp_path))

    model, optimizer, objective = prepare(accelerator, model, optimizer, objective=dro)
    with pytest.raises(ValueError, match="not given"):
        for batch in accelerator.prepare(group_loader()):
            loss_of(objective, model, batch)

    two: Any = types.SimpleNamespace(num_processes=2, process_index=0)
    for dispatch in (False, True):
        dealt = prepare_data_loader(
            group_loader(rank=0, world_size=2), num_processes=2, process_index=0,
            dispatch_batches=dispatch, put_on_device=dispatch, even_batches=False,
        )  # fmt: skip
        with pytest.raises(ValueError, match="part of every batch"):
            check_loader(two, dealt)
    check_loader(two, group_loader(rank=0, world_size=2))
    with pytest.raises(ValueError, match="rank 0 of 1"):
        check_loader(two, group_loader())


def test_positions_of_other_samplers_are_refused():
    shared = pytest.importorskip("fcco.integrations._shared")
    model = make()
    objective, sampler = dro(model, sgd(model)), group_loader().batch_sampler
    state = shared.TrainingState(objective, {"data": sampler}).state_dict()
    with pytest.raises(ValueError, match="other samplers"):
        shared.TrainingState(objective, {}).load_state_dict(state)


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:FSDP2-wrapped module .* returned a view tensor")
def test_sharded_parameters_start_without_a_correction():
    """One file for all ranks has w_{t-1} of the first only; on others it would be wrong."""
    shared = pytest.importorskip("fcco.integrations._shared")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for shard in (lambda model: model, lambda model: fsdp.fully_shard(model, mesh=mesh)):
            model = shard(make())
            optimizer = sgd(model)
            objective: Any = dro(model, optimizer)
            loss_of(objective, model, next(iter(loader()))).backward()
            optimizer.step()
            assert objective.previous.ready
            state = shared.TrainingState(objective, {})
            state.load_state_dict(state.state_dict())
            assert objective.previous.ready == (not isinstance(model, fsdp.FSDPModule))
            assert not objective.group_losses().isnan().all()
    finally:
        torch.distributed.destroy_process_group()


# --- Lightning --------------------------------------------------------------------------------


@functools.cache
def lightning_class() -> Any:
    pytest.importorskip("lightning.pytorch")
    from fcco.integrations.lightning import RobustModule

    class Task(RobustModule):
        """Its own hooks call no `super()`, as most do."""

        def __init__(self, workers: int = 0, manual: bool = False) -> None:
            super().__init__()
            self.net, self.workers = make(), workers
            self.automatic_optimization = not manual
            self.blocks = fcco.BlockSampler(10, 3, seed=0)
            self.drawn: list[list[int]] = []
            self.random: Tensor | None = None

        def training_step(self, batch: Any, number: int) -> Tensor | None:
            self.drawn.append(self.blocks.draw().tolist())
            loss = loss_of(self.objective, self.net, batch)
            if self.automatic_optimization:
                return loss
            optimizers: Any = self.optimizers()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return None

        def validation_step(self, batch: Any, number: int) -> None:
            loss_of(self.objective, self.net, batch)

        def train_dataloader(self) -> Any:
            return resumable(group_loader(self.workers))

        def configure_optimizers(self) -> Any:
            layers: Any = self.net.layers
            return (
                sgd(self.net) if self.automatic_optimization else [sgd(layers[:2]), sgd(layers[2:])]
            )

        def configure_objective(self, optimizer: Any) -> Any:
            return dro(self.net, optimizer)

        # Lightning does not save the random state, which the masks of the dropout come from.
        def on_save_checkpoint(self, checkpoint: Any) -> None:
            checkpoint["random"] = torch.get_rng_state()

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            self.random = checkpoint["random"]

        def on_train_start(self) -> None:
            if self.random is not None:
                torch.set_rng_state(self.random)

    return Task


def resumable(loader: DataLoader[Any]) -> Any:
    return pytest.importorskip("fcco.integrations.lightning").ResumableLoader(loader)


def lightning_trainer(folder: Path, **options: Any) -> Any:
    pl = pytest.importorskip("lightning.pytorch")
    silent = ("logger", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(silent, False) | {
        "accelerator": "cpu", "devices": 1, "default_root_dir": folder, "max_epochs": EPOCHS
    }  # fmt: skip
    if "callbacks" not in options:
        quiet["enable_checkpointing"] = False
    return pl.Trainer(**(quiet | options))


def fit(
    folder: Path, data: Any = None, validation: Any = None, path: str | None = None,
    task: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """A module after its training; `path` is a checkpoint in the folder, to go on from."""
    task = lightning_class()() if task is None else task
    if path is None:
        torch.manual_seed(1)
    start = None if path is None else folder / path
    lightning_trainer(folder, **options).fit(task, data, validation, ckpt_path=start)
    return task


def checkpoints(folder: Path, name: str = "{step}", **when: Any) -> Any:
    pl = pytest.importorskip("lightning.pytorch")
    return pl.callbacks.ModelCheckpoint(folder, filename=name, save_top_k=-1, **when)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning(tmp_path, accumulate):
    """Automatic optimization runs forward and backward inside `optimizer.step(closure)`.

    Validation, before the first step and after each epoch, changes nothing.
    """
    validation = loader() if accumulate == 1 else None
    task = fit(tmp_path, loader(), validation, accumulate_grad_batches=accumulate)
    assert_same(task.net, task.objective, plain(accumulate))


def test_lightning_manual_optimization_with_two_optimizers(tmp_path):
    """SGD works on each parameter alone: two of them are the one of the plain loop."""
    task = fit(tmp_path, loader(), task=lightning_class()(manual=True))
    assert len(task.objective.optimizer) == 2
    assert_same(task.net, task.objective, plain())


def test_lightning_clips_and_casts_as_the_plain_loop_does(tmp_path):
    model = make()
    optimizer = sgd(model)
    objective = dro(model, optimizer)
    torch.manual_seed(1)
    for batch in loader():
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(objective, model, batch)
        loss.backward()
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)) > 0.05
        optimizer.step()
        optimizer.zero_grad()

    options = {"gradient_clip_val": 0.05, "precision": "bf16-mixed", "max_epochs": 1}
    task = fit(tmp_path, loader(), **options)
    assert_same(task.net, task.objective, (model, objective))


RESUMED = {
    "epochs": ({}, {}, (4, 6)),
    "accumulation": ({"accumulate_grad_batches": 2}, {"accumulate": 2}, (2, 3)),
    # The epochs of Lightning are shorter than those of the sampler.
    "limit": ({"limit_train_batches": 3}, {"lengths": (3, 3, 3)}, (3, 4)),
    # Lightning counts batches and not epochs, and resumes in another way.
    "steps": ({"max_epochs": -1, "max_steps": 12}, {}, (4, 5)),
}


@pytest.mark.parametrize("workers", ONE_OR_TWO_WORKERS)
@pytest.mark.parametrize("case", RESUMED)
def test_lightning_resume(tmp_path, case, workers):
    """Within an epoch, after its last batch, and at its end: no batch is left out or twice."""
    options, same, steps = RESUMED[case]
    options = {"max_epochs": 3, **options}
    callbacks = [
        checkpoints(tmp_path, every_n_train_steps=1),
        checkpoints(tmp_path, "{step}-end", save_on_train_epoch_end=True),
    ]
    expected = plain_groups(**same)
    whole = fit(tmp_path, task=lightning_class()(workers), callbacks=callbacks, **options)
    assert_same(whole.net, whole.objective, expected)
    last = whole.trainer.global_step
    ends = {path.name for path in tmp_path.glob("*-end.ckpt")} - {f"step={last}-end.ckpt"}
    assert len(ends) == 2
    for path in [*(f"step={step}.ckpt" for step in steps), *ends]:
        resumed = fit(tmp_path, path=path, task=lightning_class()(workers), **options)
        assert_same(resumed.net, resumed.objective, expected)
        assert resumed.drawn == whole.drawn[-len(resumed.drawn) :], "the module's own sampler"


def test_lightning_resume_after_validation_within_an_epoch(tmp_path):
    callbacks = [checkpoints(tmp_path, save_on_train_epoch_end=False)]
    options: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 0.5}
    whole = fit(tmp_path, None, loader(), callbacks=callbacks, **options)
    assert_same(whole.net, whole.objective, plain_groups())
    for step in (2, 4):
        resumed = fit(tmp_path, None, loader(), path=f"step={step}.ckpt", **options)
        assert_same(resumed.net, resumed.objective, plain_groups())


@pytest.mark.parametrize("workers", ONE_OR_TWO_WORKERS)
def test_lightning_leaves_an_epoch_that_was_cut_short(tmp_path, workers):
    """Stopped by `max_steps`, Lightning goes on with a new epoch when it counts epochs."""
    task = fit(tmp_path, task=lightning_class()(workers), max_epochs=-1, max_steps=2)
    task.trainer.save_checkpoint(tmp_path / "cut.ckpt")
    task = fit(tmp_path, path="cut.ckpt", task=lightning_class()(workers), max_epochs=3)
    assert_same(task.net, task.objective, plain_groups((2, STEPS, STEPS)))


def test_lightning_loaders_made_anew(tmp_path):
    """`train_dataloader` is called again for each epoch; the new sampler goes on."""
    options: dict[str, Any] = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    whole = fit(tmp_path, callbacks=[checkpoints(tmp_path, every_n_train_steps=1)], **options)
    assert_same(whole.net, whole.objective, plain_groups())
    for step in (STEPS, STEPS + 1):  # Lightning skips the start of an epoch that was at its end
        resumed = fit(tmp_path, path=f"step={step}.ckpt", **options)
        assert_same(resumed.net, resumed.objective, plain_groups())


@rounds
def test_lightning_steps_the_optimizer_of_the_method(tmp_path):
    class Task(lightning_class()):
        def configure_objective(self, optimizer: Any) -> Any:
            return limited(self.net, optimizer)

        def training_step(self, batch: Any, number: int) -> Tensor:
            return limited_loss(self.objective, self.net, batch)

        def configure_optimizers(self) -> Any:
            optimizer = sgd(self.net)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    task = fit(tmp_path, task=Task(), max_epochs=-1, max_steps=5)
    task.trainer.save_checkpoint(tmp_path / "middle.ckpt")
    options: dict[str, Any] = {"max_epochs": -1, "max_steps": 3 * STEPS}
    task = fit(tmp_path, path="middle.ckpt", task=Task(), **options)
    assert distance(task.net, plain_limited()) == 0.0


def test_lightning_keeps_the_objective_out_of_the_module(tmp_path):
    task = fit(tmp_path, max_epochs=1)
    assert all(name.startswith("net.") for name in task.state_dict())
    assert task.objective not in list(task.modules())
    assert task.eval().objective.training is False and task.train().objective.training is True
    first = task.objective
    lightning_trainer(tmp_path, max_epochs=1).fit(task)  # new optimizers
    assert task.objective is not first and task.objective.term.step == STEPS
    with pytest.raises(RuntimeError, match="made when"):
        copy.deepcopy(task).objective  # noqa: B018


def test_lightning_logs_the_report(tmp_path):
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    logger = loggers.CSVLogger(tmp_path, name="", version="")
    task = fit(tmp_path, logger=logger, log_every_n_steps=3, max_epochs=3)
    losses, metrics = task.objective.group_losses(), task.trainer.callback_metrics
    assert not losses.isnan().any()
    assert float(metrics["worst_group_loss"]) == pytest.approx(float(losses.max()))
    assert float(metrics["group_loss/2"]) == pytest.approx(float(losses[2]))
    assert float(metrics["cvar"]) == pytest.approx(float(losses.topk(2).values.mean()))
    with open(tmp_path / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["worst_group_loss"]]
    # Every third step, and the ends of three epochs of four; Lightning counts from 0.
    assert [int(row["step"]) for row in rows] == [2, 3, 5, 7, 8, 11, 11]


@pytest.mark.parametrize("number", [3, 30])
def test_log_values_of_constraints(number):
    """Each of a few constraints, and only the whole of many."""
    shared = pytest.importorskip("fcco.integrations._shared")
    model = nn.Linear(1, 1)
    objective = fcco.constrained(
        model, torch.optim.SGD(model.parameters(), lr=0.1), number, "sonex",
        tolerance=0.5, penalty=2.0, smoothing=0.01,
    )  # fmt: skip
    values = torch.linspace(0.0, 1.0, number)
    assert shared.report_of(objective) is None, "nothing seen yet"
    objective(lambda: (model.weight.sum(), values + 0 * model.weight.sum()))
    objective.close()
    logged = shared.log_values(shared.report_of(objective))
    assert logged["worst_violation"] == pytest.approx(0.5)
    assert logged["constraints_met"] == int((values <= 0.5).sum())
    assert logged["largest_multiplier"] == pytest.approx(2.0 / number)
    assert ("violation/0" in logged) == (number == 3) and len(logged) <= 12


def test_lightning_speaks_up(tmp_path):
    pl = pytest.importorskip("lightning.pytorch")
    task_class = lightning_class()

    def changed(data: Any = None, **methods: Any) -> None:
        fit(tmp_path, data, task=type("Task", (task_class,), methods)(), max_epochs=3)

    base: Any = task_class.__mro__[1]
    with pytest.raises(NotImplementedError, match="configure_objective"):
        changed(configure_objective=base.configure_objective)
    with pytest.raises(TypeError, match="returned: None"):
        changed(configure_objective=lambda self, optimizer: None)
    with pytest.raises(ValueError, match="another"):
        changed(configure_objective=lambda self, optimizer: dro(self.net, sgd(self.net)))
    with pytest.raises(RuntimeError, match="configure_callbacks"):
        changed(configure_callbacks=lambda self: [])
    with pytest.raises(ValueError, match="rank 1 of 2"):
        changed(resumable(group_loader(rank=1, world_size=2)))
    with pytest.raises(ValueError, match="ResumableLoader"):
        changed(group_loader())
    with pytest.raises(TypeError, match="sampler of"):
        resumable(loader())
    with pytest.raises(ValueError, match="batch_sampler"):
        changed(DataLoader(Samples(), batch_size=2, sampler=group_loader().batch_sampler))  # type: ignore

    def other_loss(self: Any, batch: Any, number: int) -> Tensor:
        self.objective(lambda: softplus(-batch["y"] * self.net(batch["x"])), batch["group"])
        return self.net(batch["x"]).square().mean()

    with pytest.warns(fcco.UsageWarning, match="training_step"):
        changed(training_step=other_loss)

    class Plain(pl.LightningModule):
        training_step = lambda self, batch, number: self.net(batch["x"]).sum()  # noqa: E731
        configure_optimizers = task_class.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.net = make()

    trainer = lightning_trainer(tmp_path, max_epochs=1)
    trainer.fit(Plain(), group_loader())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.warns(fcco.UsageWarning, match="no objective"):
        both = type("Both", (Plain, base), {
            "configure_objective": lambda self, optimizer: dro(self.net, optimizer),
            "training_step": lambda self, batch, _: loss_of(self.objective, self.net, batch),
        })()  # fmt: skip
        trainer = lightning_trainer(tmp_path, max_epochs=2)
        trainer.fit(both, resumable(group_loader()), ckpt_path=tmp_path / "plain.ckpt")
    assert both.objective.term.step == STEPS
    # The same trainer has nothing to do with it in another fit.
    trainer.fit_loop.max_epochs, data = 4, group_loader()
    trainer.fit(Plain(), data)
    assert both.objective.term.step == STEPS and data.batch_sampler.epoch == 2  # type: ignore


# --- two processes ----------------------------------------------------------------------------


def worker(framework: str, out: str) -> None:
    """Train under DDP as the framework sets it up; rank 0 leaves its result in a file."""
    train = {"accelerate": accelerated_ranks, "lightning": lightning_ranks}[framework]
    model, objective = train(Path(out).parent)  # one folder for both ranks
    if os.environ["RANK"] == "0":
        torch.save([[p.detach() for p in model.parameters()], objective.group_losses()], out)
    sys.stdout.flush()
    os._exit(0)  # a thread of DDP may abort in the interpreter's shutdown


def accelerated_ranks(folder: Path) -> ModelAndObjective:
    from accelerate import Accelerator

    from fcco.integrations.accelerate import check_loader

    accelerator = Accelerator(cpu=True)
    parts = accelerated(accelerator, group_loader(), decay=0.9)
    accelerated_steps(accelerator, parts, 6)
    accelerator.save_state(str(folder / "state"))
    accelerator.wait_for_everyone()
    accelerator = Accelerator(cpu=True)
    parts = accelerated(accelerator, group_loader(), decay=0.9)
    accelerator.load_state(str(folder / "state"))
    accelerated_steps(accelerator, parts, 3 * STEPS - 6)
    with pytest.raises(ValueError, match="part of every batch"):
        check_loader(accelerator, accelerator.prepare(group_loader()))
    return parts[1], parts[-1]


def lightning_ranks(folder: Path) -> ModelAndObjective:
    """`use_distributed_sampler` stays as it is: Lightning still divides validation data."""
    sizes: list[int] = []

    class Task(lightning_class()):
        def validation_step(self, batch: Any, number: int) -> None:
            super().validation_step(batch, number)
            sizes.append(len(batch["x"]))

    options = {"strategy": "ddp", "devices": 2, "num_sanity_val_steps": 0}
    first = lightning_trainer(folder, max_epochs=-1, max_steps=6, **options)
    first.fit(Task(), None, loader())
    first.save_checkpoint(folder / "middle.ckpt")
    task = Task()
    second = lightning_trainer(folder, max_epochs=-1, max_steps=3 * STEPS, **options)
    second.fit(task, None, loader(), ckpt_path=folder / "middle.ckpt")
    assert sizes and sum(sizes) % (SAMPLES // 2) == 0 and len(sizes) % (SAMPLES // 2 // BATCH) == 0
    with pytest.raises(ValueError, match="rank 0 of 1"):
        lightning_trainer(folder, max_epochs=1, **options).fit(
            lightning_class()(), resumable(group_loader(rank=0, world_size=1))
        )
    return task.net, task.objective


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_two_processes(framework, tmp_path, monkeypatch):
    """Each framework's DDP equals one process on the global batch."""
    pytest.importorskip(framework)
    run_on_two_ranks(__file__, framework, tmp_path / "out.pt")
    parameters, u = torch.load(tmp_path / "out.pt")
    monkeypatch.setenv("WORLD_SIZE", "1")  # no dropout here either
    model, objective = plain_groups(decay=0.9 if framework == "accelerate" else 1.0)
    for ours, expected in zip(parameters, model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(u, objective.group_losses(), rtol=0, atol=1e-10)


if __name__ == "__main__":
    worker(*sys.argv[1:])
