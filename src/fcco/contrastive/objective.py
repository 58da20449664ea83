"""The global contrastive loss: a coupled term with two inner values per pair, and an objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize as unit_length

from .. import _checks
from .._distributed import find_group
from ..objective import Compositional
from ..outer import LogMeanExp
from ..terms import AbstractTerm, BlockParameters
from ..tracker import Batch, InnerTracker, Tracked, for_model, value_of
from .kernel import compute_dtype, log_means

TEMPERATURES = (0.005, 1.0)
"""The interval of individual temperatures."""


class _Slopes(NamedTuple):
    """What a step of individual temperatures needs of a batch, without gradient."""

    pairs: Tensor  # number of each pair, (A,)
    entries: Tensor  # log g_i, (A, 2)
    by_tau: Tensor  # their derivatives by tau_i, (A, 2)

    @classmethod
    def of(cls, entries: Tensor) -> _Slopes:
        """Those that `inner` left in the graph of its entries, converted or selected from since."""
        node: Any = entries.grad_fn
        while node is not None and cls not in node.metadata:
            node = node.next_functions[0][0] if node.next_functions else None
        nothing = entries.detach()[:0]
        return cls(nothing[:, 0].long(), nothing, nothing) if node is None else node.metadata[cls]


class ContrastiveTerm(AbstractTerm):
    r"""Contrastive loss of each pair against all others of the data set, from small batches.

    With s_ij the inner product of image i and text j, pair i has two inner values,

    .. math::
        g_i = \Bigl(\operatorname*{mean}_j e^{(s_{ij} - s_{ii})/\tau},\;
                    \operatorname*{mean}_j e^{(s_{ji} - s_{ii})/\tau}\Bigr),

    means over its negatives j in the *data set*, and the term is

    .. math::
        \frac1n\sum_{i=1}^n \tau\bigl[\log(g_{i1} + e) + \log(g_{i2} + e) + 2\,\text{radius}\bigr].

    A tracker follows log g_i, of which the mean over the negatives in a batch is an estimate. With
    `temperature="individual"` each side of each pair has a tau of its own, kept in a table and
    minimised with the weights by steps of its gradient (iSogCLR, FastCLIP v2).

    Negatives come from the same micro-batch. Pairs that share an image or a text, and a pair drawn
    twice, are no negatives of each other: give them one `label`.

    Args:
        num_pairs: n, the number of anchors in the data set.
        temperature: tau, a number; or `"individual"`, with a `radius` above 0; or, to learn it, a
            function that returns it with gradient, `lambda: model.log_temperature.exp()`, from
            parameters of the model alone. It is called after the forward pass; under FSDP2, return
            a tensor that this pass computed.
        offset: e; None is 1/(n-1). With labels or anchors, 1 over the negatives of a pair.
        radius: of the robust form, which a learned tau needs (iSogCLR, FastCLIP v3).
        first_temperature: individual tau_i before their first step.
        temperature_lr: step size of individual tau_i, which stay in [0.005, 1].
        scaled: multiply by tau; False is CLIP's form.
        normalize: scale the features to unit length first, in float32.
        chunk: see `log_means`.
        process_group: see `Compositional`; give both the same one.
        options: of `InnerTracker`. Unless given, `gamma=0.8` (gamma_1), `correction=0.0` and
            `read="new"`, as in SogCLR.

    References:
        Z. Yuan et al., Provable stochastic optimization for global contrastive learning: small
        batch does not harm performance, 2022 (SogCLR). Z.-H. Qiu et al., Not all semantics are
        created equal: contrastive self-supervised learning with automatic temperature
        individualization, 2023 (iSogCLR). X. Wei et al., FastCLIP: a suite of optimization
        techniques to accelerate CLIP training with limited resources, 2024.
    """

    overlapping = False  # a block is one pair

    def __init__(
        self,
        num_pairs: int,
        *,
        temperature: float | Callable[[], Tensor] | Literal["individual"] = 0.05,
        offset: float | None = None,
        radius: float = 0.0,
        first_temperature: float = 0.05,
        temperature_lr: float = 1e-3,
        scaled: bool = True,
        normalize: bool = True,
        chunk: int | None = None,
        process_group: Any = "auto",
        **options: Any,
    ) -> None:
        call = "ContrastiveTerm"
        _checks.integer(call, "num_pairs", num_pairs, 2)
        if isinstance(temperature, str):
            _checks.one_of(call, "temperature", temperature, ("individual",))
            _checks.positive(call, "temperature_lr", temperature_lr)
            _checks.in_interval(call, "first_temperature", first_temperature, *TEMPERATURES)
            if not radius > 0:
                raise ValueError(
                    f"`{call}(temperature='individual')` needs a `radius` above 0: otherwise every "
                    "tau_i falls to its lower bound."
                )
        elif not callable(temperature):
            _checks.positive(call, "temperature", temperature)
        _checks.finite(call, "radius", radius, 0.0)
        if radius and not scaled:
            raise ValueError(f"`{call}(radius=...)` with `scaled=False` is only a constant.")
        options = {"gamma": 0.8, "correction": 0.0, "read": "new", **options}
        super().__init__(InnerTracker(num_pairs, 2, log_space=True, **options))
        self._temperature = temperature
        self.first_temperature, self.temperature_lr = first_temperature, temperature_lr
        self.temperatures: BlockParameters | None = None
        if temperature == "individual":
            like = self.tracker.value
            self.temperatures = BlockParameters(
                num_pairs, 2, bounds=TEMPERATURES, dtype=like.dtype, device=like.device
            )
        self.outer = LogMeanExp(1.0, 1 / (num_pairs - 1) if offset is None else offset)
        self.radius, self.scaled, self.normalize = radius, scaled, normalize
        self.chunk, self._process_group = chunk, process_group

    def __getstate__(self) -> dict[str, Any]:
        if callable(self._temperature):
            raise TypeError(
                "`ContrastiveTerm` cannot be copied or pickled with a function as `temperature`, "
                "which refers to the parameters of this model: use `state_dict()`."
            )
        return self.__dict__

    def temperature(self, index: Tensor | None = None) -> float | Tensor:
        """The current tau, with gradient if it is learned; the individual ones of some pairs."""
        tau, table = self._temperature, self.temperatures
        if isinstance(tau, str):
            assert table is not None
            return table.read(index, table.value.new_tensor(self.first_temperature))
        return tau() if callable(tau) else tau

    def inner(
        self,
        images: Tensor,
        texts: Tensor,
        index: Any = None,
        *,
        label: Tensor | None = None,
        anchor: Tensor | None = None,
    ) -> Tensor:
        """The inner values of a batch: log g_i of each anchor, over the negatives in the batch.

        Args:
            images: features, see `log_means` for these, `label` and `anchor`.
            texts: features.
            index: what you give the objective (with `anchor`, one entry for each), for individual
                temperatures; others do not need it.
        """
        # Integers go on to `log_means`, which refuses them.
        if self.normalize and images.is_floating_point() and texts.is_floating_point():
            dtype = compute_dtype(images, texts)
            with torch.autocast(images.device.type, enabled=False):
                images = unit_length(images.to(dtype), dim=-1)
                texts = unit_length(texts.to(dtype), dim=-1)
        ids = None
        if self.temperatures is not None:  # without an index, `log_means` looks at their number
            ids = torch.arange(self.tracker.num_inner) if index is None else torch.as_tensor(index)
            ids = ids.to(self.tracker.value.device)
        entries = log_means(
            images, texts, self.temperature(ids),
            label=label, anchor=anchor, chunk=self.chunk, process_group=self._process_group,
        )  # fmt: skip
        node: Any = entries.grad_fn
        if ids is not None and node is not None and self.tracker.updating:
            # They go with the entries to `loss`, which knows u.
            node.metadata[_Slopes] = _Slopes(ids, entries.detach(), node.by_tau)
        return entries

    def loss(self, tracked: Tracked) -> Tensor:
        """The mean over the sampled pairs, which estimates the mean over all."""
        tau, share = self.temperature(tracked.index), 1 / max(len(tracked.ids), 1)
        known = tau.detach().to(tracked.value) if isinstance(tau, Tensor) else tau
        values, slope = self.outer.value_and_gradient(tracked.value)
        logs, slope = values + self.radius, slope * share
        if not self.scaled:
            return tracked.as_loss(logs.sum() * share, slope)
        if self.temperatures is not None and tracked.step is not None:
            self._step_temperatures(self.temperatures, tracked, logs)
        loss = tracked.as_loss((logs * known).sum() * share, slope * known)
        if isinstance(tau, Tensor) and tau.requires_grad:
            # The entries carry the gradient of their own tau; this adds that of the factor tau.
            # All ranks add the same, and DDP averages.
            loss = value_of(loss, gradient_of=logs.sum() * share * tau.reshape(()).to(logs))
        return loss

    def _step_temperatures(self, table: BlockParameters, tracked: Tracked, logs: Tensor) -> None:
        r"""A step of tau_i along its gradient; `logs` are log(u_i + e) + radius of `tracked`.

        .. math::
            \frac{\partial}{\partial\tau_i}\,\tau_i\bigl[\log(g_i + e) + \text{radius}\bigr]
            = \log(u_i + e) + \text{radius} + \frac{\tau_i}{u_i + e}
            \frac{\partial g_i}{\partial\tau_i}
        """
        pairs, entries, by_tau = _Slopes.of(tracked.entries)
        number = len(tracked.index)
        if number == 0:  # on all ranks
            return
        tau = self.temperature(pairs)
        # `tracked.index` is sorted; a pair that the tracker has skipped is not in it.
        place = torch.searchsorted(tracked.index, pairs).clamp(max=number - 1)
        u, logs = tracked.value[place], logs[place]
        # d(log u) = dg / u, as in `Tracked.factors`, and d(log g) / d(tau) of the batch.
        factors = self.outer.gradient(u) * torch.exp((entries.to(u) - u).clamp(max=60))
        stepped = tau - self.temperature_lr * (logs + tau * factors * by_tau.to(u))
        # A pair whose values are not finite is skipped by the tracker, and keeps its tau.
        there = (tracked.index[place] == pairs) & stepped.isfinite().all(1)
        stepped = torch.where(there.unsqueeze(1), stepped, tau)
        assert tracked.step is not None
        table.propose(tracked.step, pairs, stepped, find_group(self._process_group))

    def evaluate(self, entries: Tensor, index: Tensor | None = None) -> Tensor:
        """The loss at inner values log g_i, (A, 2), of some pairs, with gradient, not tracked."""
        logs = self.outer(entries) + self.radius
        logs = logs * self.temperature(index) if self.scaled else logs
        return logs.sum() / max(len(entries), 1)

    def value(self) -> Tensor:
        """The loss at the tracked u, over the pairs seen so far; NaN if there are none."""
        with torch.no_grad():
            table, seen = self.table(), self.tracker.seen.nonzero().squeeze(1)
            return self.evaluate(table, seen) if len(table) else table.new_tensor(math.nan)


class GlobalContrastive(Compositional):
    """Contrastive learning of two encoders against all pairs of the data set (SogCLR, FastCLIP).

    The objective with a `ContrastiveTerm` alone. Call it with a function that returns the features
    of a batch of pairs, `(image features, text features)`, or `(loss, (image features, text
    features))` with an ordinary loss g0. On several ranks the negatives are those of the global
    batch. `options` are those of `ContrastiveTerm`, such as `temperature` and `gamma`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        num_pairs: int,
        *,
        process_group: Any = "auto",
        offload: bool = False,
        **options: Any,
    ) -> None:
        like = for_model(model, 1).value
        options = {"device": like.device, "dtype": like.dtype, **options}
        term = ContrastiveTerm(num_pairs, process_group=process_group, **options)
        super().__init__(model, optimizer, term, process_group=process_group, offload=offload)

    def forward(  # type: ignore[override]
        self,
        inner: Callable[[], Any],
        index: Any = None,
        *,
        label: Tensor | None = None,
        anchor: Tensor | None = None,
    ) -> Tensor:
        """The loss of one batch of pairs.

        Args:
            inner: runs the model; returns `(image features, text features)`.
            index: number of each pair in the data set, from 0 to n - 1; None if the batch is the
                data set. With `anchor` too, one for each pair.
            label: see `log_means`, as for `anchor`.
        """
        if anchor is not None and index is not None:
            index = torch.as_tensor(index)[anchor.to(torch.as_tensor(index).device)]
        return super().forward(self._entries(inner, index, label, anchor), index)

    def pool(self, batches: Iterable[tuple[Any, Any]]) -> dict[str, Batch]:
        """As `Compositional.pool`; every rank must have the same number of batches."""
        return super().pool((self._entries(inner, index), index) for inner, index in batches)

    def _entries(
        self,
        inner: Any,
        index: Any,
        label: Tensor | None = None,
        anchor: Tensor | None = None,
    ) -> Any:
        """The function of the inner values that `Compositional` takes."""
        if not callable(inner):
            return inner  # to be refused there

        def entries() -> Any:
            result = inner()
            if not isinstance(result, (tuple, list)) or len(result) != 2:
                raise ValueError(
                    "The function given to `GlobalContrastive` must return (image features, text "
                    "features) or (loss, (image features, text features)) but returned: "
                    f"{type(result).__name__}."
                )
            loss, features = (None, result) if isinstance(result[1], Tensor) else result
            values = self.term.inner(*features, index, label=label, anchor=anchor)
            return values if loss is None else (loss, values)

        return entries
