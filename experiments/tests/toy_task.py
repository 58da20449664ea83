"""A task that trains in milliseconds: a noisy quadratic with one constraint, and every method."""

from __future__ import annotations

import errno
import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from fcco_experiments.data.sources import LOG
from fcco_experiments.task import (
    Experiment,
    Method,
    Metric,
    Page,
    Panel,
    Problem,
    Row,
    Rule,
    Task,
    Training,
)

import fcco

FINAL = 0.3  # the constraint: the mean coordinate is at most this; without it, 1 is best


@dataclass(frozen=True)
class Shape:
    """Of the problem."""

    dimension: int = 5
    noise: float = 0.2
    kind: Literal["plain", "steep"] = "plain"


@dataclass(frozen=True, kw_only=True)
class ToyConfig(Experiment):
    """Fields of the toy experiment.

    `slow` are seconds of sleep in each step (or TOY_SLOW of the environment); `kill` is a seed and
    a step before which its process kills itself; `break_at` a step that fails.
    """

    steps: int = 4
    shape: Shape = field(default_factory=Shape)
    slow: float = 0.0
    kill: tuple[int, int] | None = None
    break_at: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise ValueError(f"`steps` must be at least 1 but is: {self.steps}.")


class ToyTraining(Training):
    def __init__(self, config: ToyConfig, method: Method, seed: int) -> None:
        self.config, self.method, self.seed, self.done = config, method, seed, 0
        shape = config.shape
        self.model = torch.nn.Linear(shape.dimension, 1, bias=False).double()
        torch.nn.init.normal_(self.model.weight)  # from the global generator
        lr, kept = method.lr, 1 - method.beta
        parameters = self.model.parameters()
        if method.update == "adam":
            optimizer: Any = torch.optim.Adam(parameters, lr=lr, betas=(kept, 0.999))
        else:
            kept = kept if method.update == "momentum" else 0.0
            optimizer = torch.optim.SGD(parameters, lr=lr, momentum=kept, dampening=kept)
        settings: dict[str, Any] = dict(method.settings)
        self.objective: Any = fcco.constrained(
            self.model, optimizer, 1, method.method, tolerance=FINAL, **settings
        )
        self.generator = torch.Generator().manual_seed(seed)
        self.steps_per_epoch, self.samples_per_step = config.steps, 8

    def _values(self, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.model.weight.view(-1)
        return (weight - 1 - noise).square().mean() / 2, (weight + noise).mean().view(1)

    def step(self) -> None:
        time.sleep(float(os.environ.get("TOY_SLOW", self.config.slow)))
        if self.config.kill == (self.seed, self.done) and not os.environ.get("TOY_SPARE"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.done == self.config.break_at:
            raise ValueError("the shapes do not fit: infinite or NaN")
        shape = self.config.shape
        own = torch.randn(shape.dimension, generator=self.generator, dtype=torch.float64)
        shared = torch.randn(shape.dimension, dtype=torch.float64)  # the global generator
        noise = shape.noise * (own + shared) / 2
        self.objective(lambda: self._values(noise)).backward()
        self.objective.optimizer.step()
        self.objective.optimizer.zero_grad()
        self.done += 1

    @torch.no_grad()
    def evaluate(self) -> Row:
        loss, value = self._values(torch.zeros(()))
        row = {"loss": loss.item(), "val_loss": loss.item(), "val_excess": value.item() - FINAL}
        return row | {"test_loss": loss.item(), "excess": (value - FINAL).tolist()}

    def finish(self) -> Row:
        return {"norm": self.model.weight.norm().item(), "unknown": math.nan}

    def state_dict(self) -> dict[str, Any]:
        return {
            "done": self.done,
            "model": self.model.state_dict(),
            "optimizer": self.objective.optimizer.state_dict(),
            "objective": self.objective.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done = state["done"]
        self.model.load_state_dict(state["model"])
        self.objective.optimizer.load_state_dict(state["optimizer"])
        self.objective.load_state_dict(state["objective"])
        self.generator.set_state(state["generator"])


def no_space(number: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class ToyProblem(Problem):
    """TOY_FULL of the environment fills the disk of a process that begins a run."""

    built = 0  # how often, in this process

    def __init__(self, config: ToyConfig) -> None:
        if config.data == "nowhere":
            raise FileNotFoundError("no file nowhere.csv in any of the places")
        self.config = config
        ToyProblem.built += 1

    def start(self, method: Method, seed: int) -> ToyTraining:
        if os.environ.get("TOY_FULL"):
            os.fsync = no_space
        return ToyTraining(self.config, method, seed)

    def fingerprint(self) -> str:
        return os.environ.get("TOY_DATA", f"toy {self.config.shape.dimension}")


class ToyTask(Task):
    name = "toy"
    config: type[Experiment] = ToyConfig
    configs = Path(__file__).parent / "toy_configs"

    def load(self, config: Any) -> ToyProblem:
        if config.data == "far":  # says which folder of data it sees
            LOG.info("fetching far.csv for %s", os.environ.get("FCCO_DATA"))
        if config.data == "unreachable":
            raise OSError("the network is down")
        return ToyProblem(config)

    def page(self, config: Any) -> Page:
        metrics = (
            Metric("loss", "loss", "lower", headline=True, meaning="distance to the target"),
            Metric("val_excess", "excess", "lower", headline=True),
            Metric("norm", "norm", digits=2),
        )
        panels = (Panel("curve", y="loss", title="Loss"),)
        return Page("Toy", ("What is asked.",), metrics, panels)

    def verdict(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        return ("Nobody won.",)

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        return ("the constraint is violated",) if row["val_excess"] > 0.2 else ()

    def rule(self, config: Any) -> Rule:
        if config is not None and config.note == "nothing to choose by":
            raise ValueError("there are no validation data.")

        def score(row: Row) -> tuple[float, ...]:
            assert not any(key.startswith("test") for key in row)
            return max(0.0, row["val_excess"] - 0.05), row["val_loss"]

        text = "violation above 0.05 first, then the loss, on validation data"
        return Rule(text, score, objective="test_loss", limited=True)

    def grid_name(self, config: Any) -> str:
        return config.data

    def check(self, config: Any) -> list[tuple[tuple[str, ...], str]]:
        """Settings that no method has."""
        known = {"penalty", "smoothing", "gamma", "nu", "eta", "inner_steps"}
        return [
            (("methods", name, "settings", key), f"`{name}` has no setting `{key}`.")
            for name, method in config.methods.items()
            for key in method.settings
            if key not in known
        ]


TASK = ToyTask()
