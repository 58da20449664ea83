"""A small group DRO problem, trained in the plain loop: what every framework must reproduce.

The plain loop is itself compared with SONEX by hand in test_training_loop.py.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, Dataset

import fcco

GROUPS, EPOCHS, BATCH, SAMPLES = 4, 2, 8, 64


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
        model, optimizer, GROUPS, ratio=0.5, smoothing=1.0, gamma=0.3, correction=correction
    )


def loss_of(objective: fcco.Compositional, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return objective(lambda: softplus(-batch["y"] * model(batch["x"])), batch["group"])


ModelAndObjective = tuple[nn.Module, fcco.CVaRGroupDRO]


@functools.cache
def plain(accumulate: int = 1, correction: float = 0.6, epochs: int = EPOCHS) -> ModelAndObjective:
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


def run_on_two_ranks(file: str, *arguments: Any, **environment: str) -> None:
    """Run a file under torchrun, with two processes."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, file, *map(str, arguments)]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | environment
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]


def distance(one: nn.Module, two: nn.Module) -> float:
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def assert_same(
    model: nn.Module, objective: fcco.CVaRGroupDRO, expected: ModelAndObjective
) -> None:
    assert distance(make(), model) > 0.01
    assert distance(expected[0], model) == 0.0
    exactly: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(objective.group_losses(), expected[1].group_losses(), **exactly)
    torch.testing.assert_close(objective.threshold, expected[1].threshold, **exactly)
    assert objective.term.step == expected[1].term.step
