"""The global contrastive loss written again: loops, plain exponentials, tables of u itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def negatives(number: int, label: Sequence[int] | None, i: int) -> list[int]:
    return [j for j in range(number) if j != i and (label is None or label[j] != label[i])]


def loop_means(
    images: Any,
    texts: Any,
    tau: float,
    label: Sequence[int] | None = None,
    anchor: Sequence[bool] | None = None,
) -> np.ndarray:
    """log g of both sides, one pair after the other; logarithms by the largest exponent."""
    x, t = np.asarray(images, dtype=np.float64), np.asarray(texts, dtype=np.float64)
    result = []
    for i in range(len(x)):
        if anchor is not None and not anchor[i]:
            continue
        row = []
        for side in (0, 1):
            exponents = []
            for j in negatives(len(x), label, i):
                score = sum(x[i] * t[j]) if side == 0 else sum(x[j] * t[i])
                exponents.append((score - sum(x[i] * t[i])) / tau)
            largest = max(exponents)
            total = sum(math.exp(e - largest) for e in exponents)
            row.append(largest + math.log(total / len(exponents)))
        result.append(row)
    return np.array(result).reshape(-1, 2)


def full_loss(
    images: Tensor, texts: Tensor, tau: Tensor | float, radius: float = 0.0, scaled: bool = True
) -> Tensor:
    """The paper's loss on the whole data set: means over all j, the pair itself included."""
    scores, number = images @ texts.T, len(images)
    total: Any = 0.0
    for i in range(number):
        image_side = torch.exp((scores[i, :] - scores[i, i]) / tau).sum() / number
        text_side = torch.exp((scores[:, i] - scores[i, i]) / tau).sum() / number
        total = total + torch.log(image_side) + torch.log(text_side) + 2 * radius
    return total * (tau if scaled else 1.0) / number


def naive_means(
    images: Tensor,
    texts: Tensor,
    tau: Tensor | float,
    label: Sequence[int] | None = None,
    anchor: Sequence[bool] | None = None,
) -> Tensor:
    """g itself, shape (A, 2), by torch one pair at a time: for autograd; tau may be (B, 2)."""
    scores, rows = images @ texts.T, []
    taus = torch.as_tensor(tau, dtype=images.dtype).expand(len(images), 2)
    for i in range(len(images)):
        if anchor is not None and not anchor[i]:
            continue
        others = negatives(len(images), label, i)
        one = torch.exp((scores[i, others] - scores[i, i]) / taus[i, 0]).mean()
        two = torch.exp((scores[others, i] - scores[i, i]) / taus[i, 1]).mean()
        rows.append(torch.stack([one, two]))
    return torch.stack(rows)


@dataclass
class Training:
    """SGD on the global contrastive loss, with dictionaries for u.

    Attributes:
        features: (numbers of the pairs) -> image and text features, from the parameters.
        parameters: what is trained.
        tau: () -> temperature.
    """

    features: Callable[[list[int]], tuple[Tensor, Tensor]]
    parameters: list[nn.Parameter]
    tau: Callable[[], Tensor]
    number: int
    gamma: float
    correction: float
    read: str
    lr: float
    radius: float = 0.0
    u: dict[int, np.ndarray] = field(default_factory=dict)
    before: list[Tensor] | None = None

    def step(self, ids: list[int], **options: Any) -> float:
        """One step on these pairs; the loss at the u that the gradient reads."""
        anchor = options.get("anchor")
        rows = ids if anchor is None else [i for i, on in zip(ids, anchor, strict=True) if on]
        fresh = naive_means(*self.features(ids), self.tau(), **options)
        past = fresh.detach() if self.before is None else self.at_previous(ids, options)
        at, offset = self.track(rows, fresh, past), 1 / (self.number - 1)
        tau = self.tau()
        inner = (tau.detach() * fresh / (at + offset)).sum() / len(rows)
        logs = ((at + offset).log() + self.radius).sum() / len(rows)
        self.descend(inner + tau * logs)
        return float((tau * logs).detach())

    def track(self, rows: list[int], fresh: Tensor, past: Tensor) -> Tensor:
        """Update u of these pairs; what the gradient reads."""
        read = []
        for k, i in enumerate(rows):
            now, then = fresh[k].detach().numpy(), past[k].numpy()
            old = self.u.get(i)
            if old is None:
                new = old = now
            else:
                average = (1 - self.gamma) * old + self.gamma * now
                # A correction may make u negative; trackers of logarithms have this floor.
                new = np.maximum(average + self.correction * (now - then), 1e-3 * average)
            self.u[i] = new
            read.append(old if self.read == "old" else new)
        return torch.from_numpy(np.array(read))

    def descend(self, surrogate: Tensor) -> None:
        """A step of SGD."""
        gradients = torch.autograd.grad(surrogate, self.parameters, allow_unused=True)
        self.before = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                if gradient is not None:
                    parameter -= self.lr * gradient

    def at_previous(self, ids: list[int], options: dict[str, Any]) -> Tensor:
        """The means at the parameters before the last step."""
        assert self.before is not None
        now = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            self.put(self.before)
            past = naive_means(*self.features(ids), self.tau(), **options)
            self.put(now)
        return past

    def put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)


@dataclass
class IndividualTraining(Training):
    """The same with a temperature for each side of each pair (iSogCLR), in a dictionary."""

    first: float = 0.05
    tau_lr: float = 1e-3
    bounds: tuple[float, float] = (0.005, 1.0)
    taus: dict[int, np.ndarray] = field(default_factory=dict)

    def step(self, ids: list[int], **options: Any) -> float:
        """One step on these pairs: the weights, and tau_i of the anchors."""
        number = len(ids)
        anchor, label = options.get("anchor") or [True] * number, options.get("label")
        rows = [i for i, on in zip(ids, anchor, strict=True) if on]
        taus = torch.tensor(np.array([self.taus.get(i, np.full(2, self.first)) for i in ids]))
        self.tau = lambda: taus
        images, texts = self.features(ids)
        fresh = naive_means(images, texts, taus, label, anchor)
        past = fresh.detach() if self.before is None else self.at_previous(ids, options)
        at, offset = self.track(rows, fresh, past), 1 / (self.number - 1)
        own = taus[torch.tensor(anchor)]
        loss = float((own * ((at + offset).log() + self.radius)).sum() / len(rows))

        scores = (images @ texts.T).detach().numpy()
        k = 0
        for p in range(number):
            if not anchor[p]:
                continue
            stepped = []
            for side, table in enumerate((scores, scores.T)):
                tau, u = float(own[k, side]), float(at[k, side])
                total = 0.0
                others = negatives(number, label, p)
                for j in others:
                    d = (table[p, j] - table[p, p]) / tau
                    total += math.exp(d) * d / len(others)
                slope = math.log(u + offset) + self.radius - total / (u + offset)
                stepped.append(min(max(tau - self.tau_lr * slope, self.bounds[0]), self.bounds[1]))
            self.taus[rows[k]] = np.array(stepped)
            k += 1
        self.descend((own * fresh / (at + offset)).sum() / len(rows))
        return loss
