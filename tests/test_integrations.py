"""Accelerate and Lightning take the same path as the plain loop.

integration_cases.py has the problem and the loop.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
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
    sgd,
)
from torch import Tensor
from torch.utils.data import DataLoader

import fcco

# Third parties warn about workers, checkpoints and their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_correction_matters():
    for accumulate in (1, 2):
        assert distance(plain(accumulate)[0], plain(accumulate, correction=0.0)[0]) > 1e-4


# --- Accelerate -------------------------------------------------------------------------------


@pytest.fixture
def accelerate() -> Any:
    module = pytest.importorskip("accelerate")
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    yield module
    state.AcceleratorState._reset_state(reset_partial_state=True)


def accelerated(accelerator: Any, after_prepare: bool, epochs: int = EPOCHS) -> ModelAndObjective:
    model = make()
    optimizer: Any = sgd(model)
    objective = None if after_prepare else dro(model, optimizer)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader())
    objective = objective or dro(model, optimizer)
    torch.manual_seed(1)
    for _ in range(epochs):
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(objective, model, batch))
                optimizer.step()
                optimizer.zero_grad()
    return model, objective


@pytest.mark.parametrize(("accumulate", "after_prepare"), [(1, True), (2, False)])
def test_accelerate(accelerate, accumulate, after_prepare):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    assert_same(*accelerated(accelerator, after_prepare), plain(accumulate))


def test_accelerate_checkpoint(accelerate, tmp_path):
    """`register_for_checkpointing(objective)`: `save_state` and `load_state` then carry it."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = make()
    optimizer: Any = sgd(model)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader())
    objective = dro(model, optimizer)
    accelerator.register_for_checkpointing(objective)

    def epoch() -> None:
        for batch in data:
            accelerator.backward(loss_of(objective, model, batch))
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(1)
    epoch()
    accelerator.save_state(str(tmp_path / "middle"))
    epoch()  # goes astray: the state below must undo it
    accelerator.load_state(str(tmp_path / "middle"))
    epoch()
    assert_same(model, objective, plain())


def test_accelerate_bfloat16(accelerate):
    """Mixed precision by Accelerate: u stays in the precision of the parameters."""
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = make().float(), None
    optimizer = sgd(model)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader())
    objective = dro(model, optimizer)
    for batch in data:
        batch = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
        loss = loss_of(objective, model, batch)
        assert torch.isfinite(loss)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert objective.term.tracker.value.dtype == torch.float32


# --- Lightning --------------------------------------------------------------------------------


def lightning_module(automatic: bool = True) -> Any:
    pl = pytest.importorskip("lightning.pytorch")

    class Task(pl.LightningModule):
        """Optimizer and objective are made here, so that a checkpoint finds the objective."""

        def __init__(self) -> None:
            super().__init__()
            self.net = make()
            self.sgd = sgd(self.net)
            self.objective = dro(self.net, self.sgd)
            self.automatic_optimization = automatic

        def training_step(self, batch: Any, number: int) -> Tensor | None:
            loss = loss_of(self.objective, self.net, batch)
            if automatic:
                return loss
            optimizer: Any = self.optimizers()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return None

        def validation_step(self, batch: Any, number: int) -> None:
            loss_of(self.objective, self.net, batch)

        def configure_optimizers(self) -> Any:
            return self.sgd

    return Task()


def lightning_trainer(folder: Path, **options: Any) -> Any:
    pl = pytest.importorskip("lightning.pytorch")
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(silent, False) | {
        "accelerator": "cpu", "devices": 1, "default_root_dir": folder, "max_epochs": EPOCHS
    }  # fmt: skip
    return pl.Trainer(**(quiet | options))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning(tmp_path, accumulate):
    """Automatic optimization runs forward and backward inside `optimizer.step(closure)`.

    Validation, before the first step and after each epoch, changes nothing.
    """
    task = lightning_module()
    trainer = lightning_trainer(tmp_path, accumulate_grad_batches=accumulate)
    torch.manual_seed(1)
    trainer.fit(task, loader(), loader() if accumulate == 1 else None)
    assert_same(task.net, task.objective, plain(accumulate))


def test_lightning_manual_optimization(tmp_path):
    task = lightning_module(automatic=False)
    torch.manual_seed(1)
    lightning_trainer(tmp_path).fit(task, loader())
    assert_same(task.net, task.objective, plain())


def test_lightning_checkpoint(tmp_path):
    """The objective is a part of the module: tracker, threshold and w_{t-1} are saved with it."""
    task = lightning_module()
    names = list(task.state_dict())
    assert sum("layers.0.weight" in name for name in names) == 1, "the model is there once"
    assert "objective.terms.inner.tracker.value" in names
    assert len(list(task.parameters())) == len(list(task.net.parameters()))
    torch.manual_seed(1)
    first = lightning_trainer(tmp_path, max_epochs=1)
    first.fit(task, loader())
    first.save_checkpoint(tmp_path / "middle.ckpt")
    random = torch.get_rng_state()

    resumed = lightning_module()
    torch.set_rng_state(random)
    lightning_trainer(tmp_path).fit(resumed, loader(), ckpt_path=tmp_path / "middle.ckpt")
    assert_same(resumed.net, resumed.objective, plain())


# --- two processes ----------------------------------------------------------------------------


def loader_of_rank() -> DataLoader[Any]:
    """Every second sample: the batches of two ranks together are those of `loader`."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mine = torch.utils.data.Subset(Samples(), list(range(rank, SAMPLES, world)))
    return DataLoader(mine, batch_size=BATCH // world)


def worker(framework: str, out: str) -> None:
    """Train under DDP as the framework sets it up; rank 0 leaves its result in a file."""
    with tempfile.TemporaryDirectory() as folder:
        if framework == "accelerate":
            from accelerate import Accelerator

            accelerator = Accelerator(cpu=True)
            model = make()
            model, optimizer = accelerator.prepare(model, sgd(model))
            objective = dro(model, optimizer)
            for _ in range(EPOCHS):
                for batch in loader_of_rank():
                    accelerator.backward(loss_of(objective, model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
        else:
            task = lightning_module()
            options = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
            lightning_trainer(Path(folder), **options).fit(task, loader_of_rank())
            model, objective = task.net, task.objective
        if os.environ["RANK"] == "0":
            torch.save([[p.detach() for p in model.parameters()], objective.group_losses()], out)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_two_processes(framework, tmp_path, monkeypatch):
    """Each framework's DDP equals one process on the global batch."""
    pytest.importorskip(framework)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, __file__, framework, str(tmp_path / "out.pt")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    parameters, u = torch.load(tmp_path / "out.pt")
    monkeypatch.setenv("WORLD_SIZE", "1")  # no dropout here either
    model, objective = plain.__wrapped__()
    for ours, expected in zip(parameters, model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(u, objective.group_losses(), rtol=0, atol=1e-10)


if __name__ == "__main__":
    worker(*sys.argv[1:])
