"""The global contrastive loss as a coupled term: one block of two inner values for each pair."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize as unit_length

from .. import _checks
from ..outer import LogMeanExp
from ..terms import AbstractTerm
from ..tracker import InnerTracker, Tracked, value_of
from .kernel import compute_dtype, log_means

__all__ = ["ContrastiveTerm", "Temperature"]

Temperature = float | Callable[[], Tensor]


class ContrastiveTerm(AbstractTerm):
    r"""Every pair against all others of the data set, tracked from small batches.

    With s_ij the inner product of image i and text j, pair i has two inner values,

    .. math::
        g_i = \Bigl(\operatorname*{mean}_j e^{(s_{ij} - s_{ii})/\tau},\;
                    \operatorname*{mean}_j e^{(s_{ji} - s_{ii})/\tau}\Bigr),

    means over its negatives j in the *data set*, and the term is

    .. math::
        \frac1n\sum_{i=1}^n \tau\bigl[\log(g_{i1} + e) + \log(g_{i2} + e) + 2\,\text{radius}\bigr].

    A batch estimates g_i by the mean over its own negatives, without bias for any batch size; a
    tracker follows log g_i. (A mean that counts pair i itself would be biased: i has weight 1/B
    in a batch but 1/n in the data set.) The paper's loss is the mean over all j including i.
    Because (1/n)(1 + (n-1) g) = ((n-1)/n)(g + 1/(n-1)), the default offset e = 1/(n-1) gives this
    very loss, up to the constant 2 tau log((n-1)/n).

    The weight of the exponentials in the gradient, tau / (u + e), is bounded when u is read after
    its update, `read="new"`, the default here and in SogCLR, iSogCLR and FastCLIP: an entry then
    counts at most 1/gamma times what it would in a full batch. `read="old"` is what the paper's
    Algorithm 1 prints; there a g_i that grew since its last visit counts g_i/u_i times.

    Micro-batches between two optimizer steps are separate batches: negatives come only from the
    same micro-batch, and the means of one pair in several are averaged. Pairs that share an image
    or a text, and a pair drawn twice, are no negatives of each other: give them one `label`.

    Args:
        num_pairs: n, the number of anchors in the data set.
        temperature: tau, a number, or a function without arguments that returns it as a tensor
            with gradient, `lambda: model.log_temperature.exp()`; it is then learned. A learned tau
            must depend on parameters of the model, so that it is known at w_{t-1} too. It is asked
            for after the forward pass; under FSDP2, where parameters are whole only inside the
            forward pass, return what that computed.
        gamma: weight of the fresh means (gamma_1); 1 keeps no memory.
        correction: gamma_1' of MSVR; 0 is a moving average and needs no second forward pass.
        offset: e; None is 1/(n-1). With labels or anchors, 1 over the number of negatives that a
            pair has in the data set.
        radius: rho of the robust form, tau (log(g + e) + rho): a learned tau then has a finite
            optimum instead of falling to 0 (iSogCLR, FastCLIP v3).
        scaled: the factor tau in front; False is CLIP's form.
        normalize: scale the features to unit length first, in float32.
        chunk: see `log_means`.
        process_group: see `Compositional`; give both the same.
        options: further options of `InnerTracker` (`read`, `on_nonfinite`, `dtype`, `device`, ...).

    Example:
        >>> import torch, fcco
        >>> image, text = torch.nn.Linear(4, 3), torch.nn.Linear(5, 3)
        >>> model = torch.nn.ModuleList([image, text])
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> term = fcco.ContrastiveTerm(num_pairs=100, temperature=0.1, gamma=0.8)
        >>> objective = fcco.Compositional(model, optimizer, term)
        >>> x, t, index = torch.randn(8, 4), torch.randn(8, 5), torch.arange(8)
        >>> loss = objective(lambda: term.inner(image(x), text(t)), index)
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()

    References:
        Z. Yuan et al., Provable stochastic optimization for global contrastive learning: small
        batch does not harm performance, 2022 (SogCLR). Z.-H. Qiu et al., Not all semantics are
        created equal: contrastive self-supervised learning with automatic temperature
        individualization, 2023 (iSogCLR). X. Wei et al., FastCLIP: a suite of optimization
        techniques to accelerate CLIP training with limited resources, 2024. X. Chen et al.,
        Stochastic momentum methods for non-smooth non-convex finite-sum coupled compositional
        optimization, 2025 (the paper). The outer function is smooth: bounded features and a fixed
        tau fall under SOX's analysis, O(n eps^-4) steps with batches of constant size.
    """

    def __init__(
        self,
        num_pairs: int,
        *,
        temperature: Temperature = 0.05,
        gamma: float = 0.8,
        correction: float | Literal["theory", "auto"] = 0.1,
        offset: float | None = None,
        radius: float = 0.0,
        scaled: bool = True,
        normalize: bool = True,
        chunk: int | None = None,
        process_group: Any = "auto",
        **options: Any,
    ) -> None:
        call = "ContrastiveTerm"
        _checks.integer(call, "num_pairs", num_pairs, 2)
        if not callable(temperature):
            _checks.positive(call, "temperature", temperature)
        if offset is not None:
            _checks.in_interval(call, "offset", offset, 0.0, math.inf, open_high=True)
        _checks.in_interval(call, "radius", radius, 0.0, math.inf, open_high=True)
        if radius and not scaled:
            raise ValueError(
                f"`{call}(radius=...)` is multiplied by the factor tau in front, which "
                "`scaled=False` leaves out: it would only add a constant."
            )
        if chunk is not None:
            _checks.integer(call, "chunk", chunk, 1)
        options.setdefault("read", "new")
        super().__init__(
            InnerTracker(
                num_pairs, 2, gamma=gamma, correction=correction, log_space=True, **options
            )
        )
        self._temperature = temperature
        self.outer = LogMeanExp(1.0, 1 / (num_pairs - 1) if offset is None else offset)
        self.radius, self.scaled, self.normalize = radius, scaled, normalize
        self.chunk, self._process_group = chunk, process_group

    def temperature(self) -> float | Tensor:
        """The current tau, with gradient when it is learned."""
        return self._temperature() if callable(self._temperature) else self._temperature

    def inner(
        self,
        images: Tensor,
        texts: Tensor,
        *,
        label: Tensor | None = None,
        anchor: Tensor | None = None,
    ) -> Tensor:
        """The inner values of this term: log g_i of each anchor, over the negatives of the batch.

        Args:
            images: features (B, d); row i belongs to row i of `texts`.
            texts: features (B, d).
            label: integers (B,); pairs with the same label are no negatives of each other.
            anchor: booleans (B,); only these pairs get a row, but all are negatives. The index
                that you give the objective then has one entry for each anchor.
        """
        if self.normalize and images.is_floating_point() and texts.is_floating_point():
            kind = compute_dtype(images, texts)
            with torch.autocast(images.device.type, enabled=False):
                images = unit_length(images.to(kind), dim=-1)
                texts = unit_length(texts.to(kind), dim=-1)
        return log_means(
            images,
            texts,
            self.temperature(),
            label=label,
            anchor=anchor,
            chunk=self.chunk,
            process_group=self._process_group,
        )

    def loss(self, tracked: Tracked) -> Tensor:
        """The mean over the sampled pairs, which estimates the mean over all."""
        tau = self.temperature()
        known = tau.detach().reshape(()).to(tracked.value) if isinstance(tau, Tensor) else tau
        share = 1 / max(tracked.index.shape[0], 1)
        values, slope = self.outer.value_and_gradient(tracked.value)
        logs, slope = (values + self.radius).sum() * share, slope * share
        if not self.scaled:
            return tracked.attach(logs, slope)
        loss = tracked.attach(logs * known, slope * known)
        if isinstance(tau, Tensor) and tau.requires_grad:
            # The factor in front depends on tau too. Every rank adds the same: they are averaged.
            factor = tau.reshape(()).to(logs)
            loss = value_of(loss, gradient_of=logs * factor)
        return loss

    def evaluate(self, entries: Tensor) -> Tensor:
        """The loss of entries log g_i, shape (A, 2), with gradient and without tracking."""
        logs = (self.outer(entries) + self.radius).sum() / max(len(entries), 1)
        return logs * self.temperature() if self.scaled else logs

    def value(self) -> Tensor:
        """The objective at the tracked u, over the pairs seen; NaN before the first."""
        with torch.no_grad():
            table = self.table()
            return self.evaluate(table) if len(table) else table.new_tensor(math.nan)
