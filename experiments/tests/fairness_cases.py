"""A small fairness problem for tests: generated data, every method, scores in NumPy."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fcco_experiments.data import load
from fcco_experiments.task import Method
from fcco_experiments.tasks.fairness import Fairness
from fcco_experiments.tasks.fairness.model import Cells
from fcco_experiments.tasks.fairness.training import FairnessTraining

DOUBLE = torch.float64
_LOOP: dict[str, Any] = {"proximal": 1e-2, "inner_steps": 4}
METHODS = {
    "erm": Method("erm", 1e-2),
    "automatic": Method("automatic", 1e-2),
    "sonex": Method("sonex", 1e-2, settings={"penalty": 10, "smoothing": 2e-3, "gamma": 0.5}),
    "alexr2": Method(
        "alexr2", 1e-2, independent=True,
        settings={"penalty": 10, "smoothing": 2e-3, "nu": 0.1, "eta": 0.01, "inner_steps": 3},
    ),
    "sonx": Method("sonx", 1e-2, update="sgd", settings={"penalty": 10, "gamma": 0.5}),
    "yang2025": Method("yang2025", 1e-2, update="momentum", settings={"penalty": 10}),
    "sox": Method("sox", 1e-2, settings={"penalty": 100, "gamma": 0.5}),
    "li2024": Method("li2024", 1e-2, settings={"penalty": 100}),
    "icppac": Method(
        "icppac", 1e-1, update="sgd", independent=True, settings=_LOOP | {"tau": 1, "theta": 0.1}
    ),
    "ssg": Method("ssg", 1e-2, update="sgd", settings={"threshold": 0.05}),
    "oss": Method("oss", 1.0, update="sgd", settings=_LOOP),
    "alexr": Method("alexr", 1e-2, settings={"penalty": 10, "dual_step": 0.1}),
    "liu2025": Method(
        "liu2025", 1e-2, update="sgd",
        settings={"penalty": 10, "smoothing": 2e-3, "refresh_every": 4},
    ),
}  # fmt: skip
"""Every word that the task knows, with the settings it needs."""


def config(**changes: Any) -> Fairness:
    """A config whose runs take milliseconds."""
    small: dict[str, Any] = {
        "data": "synthetic", "epochs": 4, "hidden": (5,), "batch": 16, "tolerance": 0.02,
        "thresholds": (-1.0, 0.5, 1.5), "validation": 0.25,
    }  # fmt: skip
    return Fairness(**(small | changes))


@functools.cache
def float_parts() -> dict[str, Cells]:
    loaded = load("synthetic", rows=160, test_rows=90, features=4, validation=0.25)
    return {
        name: Cells.of(name, part.features, part.label, part.group)
        for name, part in loaded.parts().items()
    }


def parts() -> dict[str, Cells]:
    """Train, validation and test data with cells of different size, in the default precision."""
    kind = torch.get_default_dtype()
    return {n: replace(p, inputs=p.inputs.to(kind)) for n, p in float_parts().items()}


def start(method: str | Method, seed: int = 0, **changes: Any) -> FairnessTraining:
    """A run of a method of `METHODS`, or of one's own."""
    chosen = METHODS[method] if isinstance(method, str) else method
    return FairnessTraining(config(**changes), chosen, seed, parts())


def with_settings(method: str, **settings: Any) -> Method:
    """A method of `METHODS` with other settings."""
    return replace(METHODS[method], settings=METHODS[method].settings | settings)


def in_double(run: FairnessTraining) -> FairnessTraining:
    """The same run in float64, to look at (not to step)."""
    run.model.double()
    run.parts = {n: replace(p, inputs=p.inputs.double()) for n, p in run.parts.items()}
    run.train = run.parts["train"]
    return run


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def outputs(run: FairnessTraining, part: str) -> np.ndarray:
    """The network's output, layer by layer in NumPy."""
    layers = [p.detach().double().numpy() for p in run.model.body.parameters()]
    x = run.parts[part].inputs.double().numpy()
    for place in range(0, len(layers), 2):
        x = x @ layers[place].T + layers[place + 1]
        if place + 2 < len(layers):
            x = np.maximum(x, 0)
    return x[:, 0]
