"""Steps of continual learning written again: float64, loops, dictionaries, plain exponentials."""

from __future__ import annotations

from typing import Any

import torch
from fcco_experiments.tasks.continual.model import made_up
from fcco_experiments.tasks.continual.training import Batch, ContinualTraining
from torch import Tensor

NAMES = ("image_projection.weight", "text_projection.base.weight", "text_projection.down",
         "text_projection.up")  # fmt: skip
CONSTRAINED = ("sonex", "sox", "sonx", "alexr2")


class Plain:
    """The model of a training, from its weights at this moment, and a method's memory.

    Args:
        run: the training; its data, texts and settings are read, none of its code is run.
        old: weights of the old model.
    """

    def __init__(self, run: ContinualTraining, old: dict[str, Tensor]) -> None:
        self.config, self.method = run.config, run.method
        state = run.model.state_dict()
        self.weights = [state[name].double().clone().requires_grad_() for name in NAMES]
        self.old = [old[name].double() for name in NAMES]
        self.protected = len(run.config.protected)
        train = run.parts["train"]
        label = dict(zip(train.rows.tolist(), train.label.tolist(), strict=True))
        rows = train.rows.tolist()
        self.targets = [row for row in rows if label[row] == self.protected]
        self.others = [row for row in rows if label[row] < self.protected]
        self.learned = run.learned[0].tolist()  # of the old model
        self.label = label | dict(zip(self.learned, run.learned[1].tolist(), strict=True))
        self.contrasted = self.others if run.method.method == "replay" else self.learned
        samples: Any = run.samples
        table = samples.values.double()
        kept = table[self.learned]
        self.images = (table - kept.mean(0)) / kept.std(0)
        self.words = run.encoder.texts.words
        self.caption = run.encoder.texts.captions.tolist()
        texts = made_up(self.words).double()
        self.texts = (texts - texts.mean(0)) / texts.std(0)
        self.u: dict[int, Tensor] = {}
        self.h: dict[int, Tensor] = {}
        self.before: list[Tensor] | None = None
        self.momentum: list[Tensor] | None = None
        self.adam = None
        self.anchor: list[Tensor] = []
        self.inner = 0

    def seen(self, row: int, weights: list[Tensor]) -> Tensor:
        vector = weights[0] @ self.images[row]
        return vector / vector.square().sum().sqrt()

    def read(self, text: str, owner: int, weights: list[Tensor]) -> Tensor:
        """A text of the class `owner`: by its head, or by the common layer for the target."""
        feature = self.texts[self.words.index(text)]
        vector = weights[1] @ feature
        if owner < self.protected:
            vector = vector + (feature @ weights[2][owner]) @ weights[3][owner]
        return vector / vector.square().sum().sqrt()

    def loss(self, row: int, weights: list[Tensor]) -> Tensor:
        """Logistic loss of choosing among the prompts of all classes."""
        image = self.seen(row, weights)
        scores = torch.stack([
            image @ self.read(self.config.prompt.format(name), owner, weights)
            for owner, name in enumerate(self.config.classes)
        ])  # fmt: skip
        scores = scores / self.config.temperature
        return torch.log(torch.exp(scores).sum()) - scores[self.label[row]]

    def means(self, rows: list[int], weights: list[Tensor]) -> list[Tensor]:
        """Both inner means of every pair of a batch."""
        images = [self.seen(row, weights) for row in rows]
        texts = [self.read(self.words[self.caption[r]], self.label[r], weights) for r in rows]
        tau, found = self.config.temperature, []
        for i, row in enumerate(rows):
            own = [j for j, other in enumerate(rows) if self.label[other] != self.label[row]]
            here = images[i] @ texts[i]
            one = torch.stack([torch.exp((images[i] @ texts[j] - here) / tau) for j in own])
            two = torch.stack([torch.exp((images[j] @ texts[i] - here) / tau) for j in own])
            found.append(torch.stack([one.mean(), two.mean()]))
        return found

    def values(self, batch: Batch, weights: list[Tensor]) -> tuple[dict, dict, Tensor]:
        """Means of each anchor, of each constraint, and the mean difference of all samples."""
        rows = [self.targets[k] for k in batch.anchors]
        rows += [self.contrasted[k] for k in batch.negatives]
        everyone = self.method.method == "replay"
        anchors: dict[int, list[Tensor]] = {}
        for row, mean in zip(rows, self.means(rows, weights), strict=True):
            if everyone or self.label[row] == self.protected:
                anchors.setdefault(row, []).append(mean)
        classes: dict[int, list[Tensor]] = {}
        for place in batch.kept.tolist():
            row = self.others[place]
            lost = self.loss(row, weights) - self.loss(row, self.old).detach()
            classes.setdefault(self.label[row], []).append(lost)
        every = torch.stack([lost for own in classes.values() for lost in own])
        means = [{k: torch.stack(v).mean(0) for k, v in d.items()} for d in (anchors, classes)]
        return means[0], means[1], every.mean()

    def tracked(
        self, table: dict, fresh: dict, past: dict | None, gamma: float, more: float, read: str
    ) -> dict:
        """One update of the running values; what enters the slope."""
        used = {}
        for key, value in fresh.items():
            now = value.detach()
            if key not in table:
                table[key] = used[key] = now
                continue
            then = now if past is None else past[key]
            new = (1 - gamma) * table[key] + gamma * now + more * (now - then)
            used[key] = table[key] if read == "old" else new
            table[key] = new
        return used

    def gradient(self, batch: Batch) -> list[Tensor]:
        """The estimator of the gradient; the memory moves."""
        method, given = self.method.method, dict(self.method.settings)
        fresh, h, every = self.values(batch, self.weights)
        past = past_h = None
        if self.before is not None:
            past, past_h, _ = self.values(batch, self.before)
        usual = 0.1 if method in ("sonex", "sonx", "alexr2") else 0.0
        u = self.tracked(
            self.u, fresh, past, float(given.get("contrast_gamma", 0.8)),
            usual, "new",
        )  # fmt: skip
        assert all(bool((value > 0).all()) for value in u.values()), "or there is a floor"
        tau, offset = self.config.temperature, 1 / len(self.contrasted)
        total: Any = sum((tau * fresh[i] / (u[i] + offset)).sum() for i in fresh) / len(fresh)
        if method == "weighted":
            total = total + float(given["weight"]) * every
        if method in CONSTRAINED:
            gamma, rho = float(given.get("gamma", 0.8)), float(given["penalty"])
            more = 0.125 * 0.8 if method == "alexr2" else float(given.get("correction", 0.0))
            read = "new" if method in ("alexr2", "sox") else "old"
            v = self.tracked(self.h, h, past_h, gamma, more, read)
            slopes = {k: self.slope(method, value, rho, given) for k, value in v.items()}
            if batch.steered is not None:
                own = [self.learned[place] for place in batch.steered.tolist()]
                h = {
                    k: torch.stack(
                        [self.loss(r, self.weights) for r in own if self.label[r] == k]
                    ).mean()
                    for k in h
                }
            total = total + sum(slopes[k] * h[k] for k in h) / len(h)
        return list(torch.autograd.grad(total, self.weights))

    def slope(self, method: str, value: Tensor, rho: float, given: dict) -> Tensor:
        if method == "sox":
            return rho * value.clamp(min=0)
        if method == "sonx":
            return rho * (value > 0).double()
        return (value / float(given["smoothing"])).clamp(0, rho)

    def step(self, batch: Batch) -> None:
        """A step of the method."""
        gradient = self.gradient(batch)
        start = [w.detach().clone() for w in self.weights]
        if self.method.method != "alexr2":
            self.before = start
            self.outer(gradient)
            return
        nu, eta = (float(self.method.settings[name]) for name in ("nu", "eta"))
        if self.inner == 0:
            self.anchor = start
        self.before, self.inner = start, self.inner + 1
        with torch.no_grad():
            for w, home, g in zip(self.weights, self.anchor, gradient, strict=True):
                w.copy_((nu * w + eta * home - eta * nu * g) / (eta + nu))
        if self.inner == self.method.settings["inner_steps"]:
            ends = [
                (home - w.detach()) / nu for w, home in zip(self.weights, self.anchor, strict=True)
            ]
            with torch.no_grad():
                for w, home in zip(self.weights, self.anchor, strict=True):
                    w.copy_(home)
            self.outer(ends)
            self.inner, self.before = 0, None

    def outer(self, gradient: list[Tensor]) -> None:
        own = self.method
        if own.update == "adam":
            if self.adam is None:
                self.adam = torch.optim.AdamW(
                    self.weights, lr=own.lr, betas=(0.9, 0.999), weight_decay=own.weight_decay
                )
            for w, g in zip(self.weights, gradient, strict=True):
                w.grad = g
            self.adam.step()
            return
        if own.update == "momentum" and self.momentum is not None:
            pairs = zip(self.momentum, gradient, strict=True)
            gradient = [(1 - own.beta) * v + own.beta * g for v, g in pairs]
        self.momentum = gradient
        with torch.no_grad():
            for w, g in zip(self.weights, gradient, strict=True):
                w -= own.lr * g

    def vector(self) -> Tensor:
        return torch.cat([w.detach().reshape(-1) for w in self.weights])
