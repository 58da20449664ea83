"""A task whose runs can be a fleet, in microseconds and without `fcco.fleet`.

A run is w <- w - lr (w - 1 - e_t) with noise e_t of its seed; those of the method `alexr2` are for
no fleet. The environment makes trouble: FLEET_STOP is a step before which the process gets SIGINT,
FLEET_FITS the number of runs that fit into memory, FLEET_BREAK a learning rate whose fleet breaks,
FLEET_NAN one whose figures are not finite.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from fcco_experiments.task import FleetTraining, Method, Row
from toy_task import FINAL, ToyConfig, ToyProblem, ToyTask

HUGE = 1e6
"""Beyond this a run has left the finite numbers."""


def noise(seed: int, step: int) -> float:
    return float(np.random.default_rng([seed, step]).normal()) / 4


def figures(weight: float) -> Row:
    loss = (weight - 1) ** 2 / 2
    return {"loss": loss, "val_loss": loss, "val_excess": weight - FINAL, "test_loss": 2 * loss}


class ToyFleet(FleetTraining):
    made: ClassVar[list[int]] = []  # sizes of all fleets

    def __init__(self, config: ToyConfig, runs: Sequence[tuple[Method, int]]) -> None:
        self.made.append(len(runs))
        if len(runs) > int(os.environ.get("FLEET_FITS", "1000")):
            raise torch.OutOfMemoryError("CUDA out of memory (as a test says).")
        self.config, self.runs, self.steps = config, list(runs), 0
        self.weight = torch.zeros(len(runs), dtype=torch.float64)
        self.lr = torch.tensor([method.lr for method, _ in runs], dtype=torch.float64)
        self.gone = torch.full((len(runs),), -1)
        self.steps_per_epoch, self.samples_per_step = config.steps, 8

    @property
    def died(self) -> list[int]:
        return self.gone.tolist()

    def step(self) -> None:
        time.sleep(float(os.environ.get("TOY_SLOW", 0)))
        if os.environ.get("FLEET_STOP") == str(self.steps):
            os.kill(os.getpid(), signal.SIGINT)
        if float(os.environ.get("FLEET_BREAK", "-1")) in self.lr:
            raise TypeError("the shapes do not fit")
        seeds = {seed: noise(seed, self.steps) for _, seed in self.runs}
        drawn = torch.tensor([seeds[seed] for _, seed in self.runs], dtype=torch.float64)
        new = self.weight - self.lr * (self.weight - 1 - drawn)
        bad = (new.abs() > HUGE) & (self.gone < 0)
        self.gone[bad] = self.steps
        self.weight = torch.where(self.gone < 0, new, self.weight)
        self.steps += 1

    def evaluate(self) -> list[Row]:
        rows = [figures(weight) for weight in self.weight.tolist()]
        broken = float(os.environ.get("FLEET_NAN", "-1"))
        for row, (method, _) in zip(rows, self.runs, strict=True):
            if method.lr == broken and self.steps > 6:
                row["val_loss"] = float("nan")
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "weight": self.weight, "gone": self.gone}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        self.weight.copy_(state["weight"])
        self.gone.copy_(state["gone"])


class FleetProblem(ToyProblem):
    def fleet_kind(self, method: Method, seed: int) -> Hashable | None:
        return None if method.method == "alexr2" else (method.update, self.config.steps)

    def fleet(self, runs: Sequence[tuple[Method, int]], device: torch.device) -> ToyFleet:
        assert device.type == "cpu"
        assert len({self.fleet_kind(*each) for each in runs}) == 1
        return ToyFleet(self.config, runs)  # type: ignore[arg-type]


class FleetTask(ToyTask):
    name = "fleet-toy"
    fleets = True

    def load(self, config: Any) -> FleetProblem:
        return FleetProblem(config)


TASK = FleetTask()
