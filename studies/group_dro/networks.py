"""Networks trained end to end: every method with four settings, then fresh splits."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from fcco_experiments import backbones
from fcco_experiments.data.grouped import Vectors
from fcco_experiments.task import Method
from fcco_experiments.tasks.group_dro.training import GroupDROTraining
from fcco_experiments.tasks.network import Classifier

from .data import Prepared, load
from .heads import setting_of

TUNING = (1000, 1001)
FRESH = (2000, 2001, 2002, 2003, 2004)
RULE = "val_cvar"


def grids(text: bool) -> dict[str, list[Method]]:
    """Four settings of each method; the learning rates suit a pretrained network for texts or not.

    All but SONX, which is a plain subgradient method, take steps of Adam.
    """
    low, high = (2e-5, 1e-4) if text else (1e-4, 4e-4)
    rates = (low / 2, low, (low * high) ** 0.5, high)
    tracking = {"gamma": 0.5, "correction": 0.1, "read": "new"}
    double = {"gamma": 0.5, "theta": 0.125, "smoothing": 0.1, "nu": 0.1, "inner_steps": 5}

    def pairs(word: str, name: str, values: Sequence[float], **settings: Any) -> list[Method]:
        return [
            Method(method=word, lr=lr, settings={**settings, name: value})
            for lr, value in itertools.product((low, high), values)
        ]

    return {
        "automatic": [Method(method="sonex", lr=lr) for lr in rates],
        "sonex": pairs("sonex", "smoothing", (0.1, 1.0), **tracking),
        "sonx": [
            Method(method="sonx", lr=lr, update="sgd", settings=tracking)
            for lr in (0.001, 0.003, 0.01, 0.03)
        ],
        "ooa": pairs("ooa", "step", (0.01, 0.1), plain=True),
        "ooa-cvar": pairs("ooa", "step", (0.01, 0.1)),
        # One outer step for five inner ones, so its rates are larger.
        "alexr2": [
            replace(method, lr=2 * method.lr)
            for method in pairs("alexr2", "eta", (0.005, 0.05), **double)
        ],
        "uniform": [Method(method="uniform", lr=lr) for lr in rates],
        "erm": [Method(method="erm", lr=lr) for lr in rates],
    }


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        name: of the method's row.
        method: its setting.
        seed: of the split, the first weights of the head and the batches.
        epochs: of training.
        spectrum: whether the least eigenvalue of the groups' gradients is computed at the end.
    """

    name: str
    method: Method
    seed: int
    epochs: int
    spectrum: bool = False


@functools.cache
def _loaded(file: Path, device: str) -> tuple[Prepared, Vectors]:
    data = load(file)
    return data, Vectors(data.inputs.to(device))


def _run(file: Path, job: Job, device: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    data, samples = _loaded(file, device)
    # A step schedule that ends as low in fewer epochs.
    decay = max(1, round(data.config.decay_epochs * job.epochs / data.config.epochs))
    config = replace(data.config, epochs=job.epochs, decay_epochs=decay, spectrum=job.spectrum)
    torch.manual_seed(job.seed)
    backbone = backbones.build(
        config.backbone, pretrained=config.pretrained, weights=config.weights, size=config.size,
        tokens=config.tokens, batch_norm=config.batch_norm,
    )  # fmt: skip
    model = Classifier(backbone, backbone.width, config.hidden, data.classes).to(device)
    training = GroupDROTraining(
        config, job.method, job.seed, model, samples, data.parts[job.seed], data.summary,
        torch.device(device),
    )  # fmt: skip
    row: dict[str, Any] = {
        "name": job.name, "seed": job.seed, "epochs": job.epochs, "setting": setting_of(job.method)
    }  # fmt: skip
    start = time.perf_counter()
    try:
        for _ in range(training.steps_per_epoch * job.epochs):
            training.step()
        row |= {k: v for k, v in training.evaluate().items() if isinstance(v, float)}
        if job.spectrum:
            row |= training.spectrum()
    except (FloatingPointError, RuntimeError) as error:
        if "finite" not in str(error) and not isinstance(error, FloatingPointError):
            raise
        row["died"] = True
    return {**row, "seconds": round(time.perf_counter() - start, 1)}


def study(
    file: Path,
    output: Path,
    workers: int,
    device: str,
    only: Sequence[str],
    seconds: float,
    epochs: int,
    fresh: int,
) -> None:
    """Tune on two seeds, then train fresh ones; a line of JSON for each run.

    Args:
        file: of `prepare`.
        output: a file of JSON lines; runs that it holds are not made again.
        workers: processes that share the device.
        device: where to train.
        only: names of methods; all unless given.
        seconds: no run begins after so many.
        epochs: of every run: settings that suit a short training may not suit a long one.
        fresh: number of fresh seeds.
    """
    data, start, until = load(file), time.perf_counter(), time.time() + seconds
    decay = {"celeba": 0.02}.get(data.config.data, 0.01)  # the appendix
    kind = data.config.kind == "text"
    methods = {
        name: [replace(method, weight_decay=decay) for method in grid]
        for name, grid in grids(kind).items()
        if not only or name in only
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in output.open()] if output.exists() else []
    with output.open("a") as lines, ProcessPoolExecutor(workers, get_context("spawn")) as pool:

        def run(stage: str, jobs: Sequence[Job]) -> list[dict[str, Any]]:
            known = [row for row in done if row["stage"] == stage]
            have = {(row["name"], row["seed"], json.dumps(row["setting"])) for row in known}
            left = [
                job
                for job in jobs
                if (job.name, job.seed, json.dumps(setting_of(job.method))) not in have
            ]
            submitted = {pool.submit(_in_time, file, job, device, until): job for job in left}
            for future in as_completed(submitted):
                try:
                    row = future.result()
                except Exception as error:  # the others go on
                    print(submitted[future], repr(error), flush=True)
                    continue
                if row is None:
                    continue
                row = {
                    "stage": stage, "data": data.config.data, "backbone": data.config.backbone,
                    **row,
                }  # fmt: skip
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                known.append(row)
                print(
                    f"{time.perf_counter() - start:5.0f} s {stage} {row['name']} {row['seed']} "
                    f"{row['setting']} {row.get('train_cvar', 9):.3f} {row.get(RULE, 9):.3f} "
                    f"{row['seconds']} s",
                    flush=True,
                )
            return known

        tuning = [
            Job(name, method, seed, epochs)
            for seed in TUNING
            for name, grid in methods.items()
            for method in grid
        ]
        found = run("tuning", tuning)
        chosen = {}
        for name, grid in methods.items():
            scores = [_score(found, name, method) for method in grid]
            chosen[name] = grid[scores.index(min(scores))]
        # Seed by seed, so that what is cut off at the end is a whole seed.
        spectrum = not (kind and data.config.data == "amazon")  # 636 gradients of a network
        run("fresh", [
            Job(name, method, seed, epochs, spectrum=spectrum and seed == FRESH[0])
            for seed in FRESH[:fresh]
            for name, method in chosen.items()
        ])  # fmt: skip


def _score(found: Sequence[dict[str, Any]], name: str, method: Method) -> float:
    """The mean figure over the tuning seeds; infinite where a run failed or is missing."""
    own = [r for r in found if r["name"] == name and r["setting"] == setting_of(method)]
    return fmean(row.get(RULE, inf) for row in own) if len(own) >= len(TUNING) else inf


def _in_time(file: Path, job: Job, device: str, until: float) -> dict[str, Any] | None:
    """The run, or None when it would begin too late."""
    return None if time.time() > until else _run(file, job, device)
