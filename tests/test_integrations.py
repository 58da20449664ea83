"""Accelerate and Lightning take the same path as the plain loop.

The plain loop is itself compared with SONEX by hand in test_training_loop.py.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, Dataset

import fcco

GROUPS, EPOCHS, BATCH, SAMPLES = 4, 2, 8, 64
# Third parties warn about workers, checkpoints and their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dropout = 0.0 if "WORLD_SIZE" in os.environ else 0.2  # ranks would draw other masks
        layers = nn.Linear(3, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 1)
        self.layers = nn.Sequential(*layers).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze(1)


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(2)
        self.x = torch.randn(SAMPLES, 3, generator=draw, dtype=torch.float64)
        self.group = torch.randint(GROUPS, (SAMPLES,), generator=draw)
        self.y = torch.sign(self.x[:, 0] + 0.5 * self.group * self.x[:, 1])

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        return {"x": self.x[item], "y": self.y[item], "group": self.group[item]}


def loader() -> DataLoader[Any]:
    # A loader draws a number at the start of each pass; not from the stream of the dropout masks.
    return DataLoader(Samples(), batch_size=BATCH, generator=torch.Generator())


def make() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.7)


def dro(model: nn.Module, optimizer: Any, correction: float = 0.6) -> fcco.CVaRGroupDRO:
    """A wide smoothing: the weight of each group depends on u, so a wrong u cannot hide."""
    return fcco.CVaRGroupDRO(
        model, optimizer, GROUPS, ratio=0.5, smoothing=1.0, gamma=0.3, correction=correction,
        threshold="table",
    )  # fmt: skip


def loss_of(objective: fcco.Compositional, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return objective(lambda: softplus(-batch["y"] * model(batch["x"])), batch["group"])


Path_ = tuple[nn.Module, fcco.CVaRGroupDRO]


@functools.cache
def plain(accumulate: int = 1, correction: float = 0.6, epochs: int = EPOCHS) -> Path_:
    model = make()
    optimizer = sgd(model)
    objective = dro(model, optimizer, correction)
    torch.manual_seed(1)
    for _ in range(epochs):
        for number, batch in enumerate(loader(), start=1):
            (loss_of(objective, model, batch) / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model, objective


def distance(one: nn.Module, two: nn.Module) -> float:
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def assert_same(model: nn.Module, objective: fcco.CVaRGroupDRO, expected: Path_) -> None:
    assert distance(make(), model) > 0.01
    assert distance(expected[0], model) <= 1e-12
    torch.testing.assert_close(
        objective.group_losses(), expected[1].group_losses(), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(objective.threshold, expected[1].threshold, rtol=0, atol=1e-12)
    assert objective.term.step == expected[1].term.step


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


def accelerated(accelerator: Any, after_prepare: bool, epochs: int = EPOCHS) -> Path_:
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
