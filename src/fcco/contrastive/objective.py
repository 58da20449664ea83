"""The global contrastive loss as an objective of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..objective import Compositional
from ..tracker import for_model
from .term import ContrastiveTerm, Temperature

__all__ = ["GlobalContrastive"]


class GlobalContrastive(Compositional):
    r"""Contrastive learning of two towers against all pairs of the data set (SogCLR, FastCLIP).

    .. math::
        \min_w\; \frac1n\sum_{i=1}^n \tau\Bigl[
        \log\Bigl(\operatorname*{mean}_{j} e^{(s_{ij} - s_{ii})/\tau} + e\Bigr) +
        \log\Bigl(\operatorname*{mean}_{j} e^{(s_{ji} - s_{ii})/\tau} + e\Bigr)\Bigr]

    The function that you call it with returns the features of a batch of pairs, `(image features,
    text features)`, or `(loss, (image features, text features))` with an ordinary loss g0. The
    batch may be small: the means over all negatives are tracked, pair by pair. On several ranks
    the negatives are those of the global batch. For this term beside others, give a
    `ContrastiveTerm` to `Compositional`.

    Args:
        model: your model; a learned temperature must depend on its parameters.
        optimizer: your optimizer.
        num_pairs: n, the pairs of the data set.
        temperature: tau, a number or a function that returns it, see `ContrastiveTerm`.
        gamma: weight of the fresh means.
        correction: gamma' of MSVR; 0 needs no second forward pass.
        process_group: see `Compositional`.
        offload: see `Compositional`; the copy of w_{t-1} then costs no memory of the GPU at the
            peak.
        options: further options of `ContrastiveTerm` and `InnerTracker` (`offset`, `radius`,
            `scaled`, `normalize`, `chunk`, `read`, `on_nonfinite`, `dtype`, ...).

    Example:
        >>> import torch, fcco
        >>> towers = {"image": torch.nn.Linear(4, 3), "text": torch.nn.Linear(5, 3)}
        >>> model = torch.nn.ModuleDict(towers)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> objective = fcco.GlobalContrastive(model, optimizer, num_pairs=100, temperature=0.1)
        >>> x, t, index = torch.randn(8, 4), torch.randn(8, 5), torch.arange(8)
        >>> loss = objective(lambda: (model["image"](x), model["text"](t)), index)
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        num_pairs: int,
        *,
        temperature: Temperature = 0.05,
        gamma: float = 0.8,
        correction: float | Literal["theory", "auto"] = 0.1,
        process_group: Any = "auto",
        offload: bool = False,
        **options: Any,
    ) -> None:
        like = for_model(model, 1).value
        options = {"device": like.device, "dtype": like.dtype, **options}
        term = ContrastiveTerm(
            num_pairs,
            temperature=temperature,
            gamma=gamma,
            correction=correction,
            process_group=process_group,
            **options,
        )
        super().__init__(model, optimizer, term, process_group=process_group, offload=offload)

    def forward(
        self,
        inner: Callable[[], Any],
        index: Any = None,
        *,
        label: Tensor | None = None,
        anchor: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """The loss of one batch of pairs.

        Args:
            inner: runs the model; returns `(image features, text features)`.
            index: number of each pair in the data set, from 0 to n - 1; None when the batch is the
                data set. With `anchor`, of each anchor, or of all pairs (others are ignored).
            label: integers; pairs with the same label are no negatives of each other.
            anchor: booleans; only these pairs count, the others are negatives for them.
            options: further arguments of `Compositional`.
        """
        entries, own = self._entries(inner, label, anchor), _of_anchors(index, anchor)
        return super().forward(entries, own, **options)

    def warm_up(self, batches: Iterable[tuple[Any, ...]]) -> None:
        """Start every pair's u from a pass over the data; see `Compositional.warm_up`.

        Every rank must have the same number of batches, since negatives come from all ranks.

        Args:
            batches: `(function, index)`, or `(function, index, {"label": ..., "anchor": ...})` with
                what the calls will have: without the labels, pairs that are no negatives of each
                other would be taken for such.
        """
        super().warm_up(self._read(*batch) for batch in batches)

    def _read(
        self, inner: Callable[[], Any], index: Any, options: Mapping[str, Tensor] | None = None
    ) -> tuple[Callable[[], Any], Any]:
        """A batch of `warm_up` as the base class takes it."""
        given = dict(options or {})
        label, anchor = given.pop("label", None), given.pop("anchor", None)
        if given:
            raise ValueError(
                "`GlobalContrastive.warm_up` takes label and anchor with a batch but got: "
                f"{', '.join(given)}."
            )
        return self._entries(inner, label, anchor), _of_anchors(index, anchor)

    def _entries(
        self, inner: Callable[[], Any], label: Tensor | None = None, anchor: Tensor | None = None
    ) -> Callable[[], Any]:
        """The function that gives this objective's inner values."""

        def entries() -> Any:
            result = inner()
            if not isinstance(result, (tuple, list)) or len(result) != 2:
                raise ValueError(
                    "The function given to `GlobalContrastive` must return (image features, text "
                    f"features) or (loss, (image features, text features)) but returned: "
                    f"{type(result).__name__}."
                )
            loss, features = (None, result) if isinstance(result[1], Tensor) else result
            values = self.term.inner(*features, label=label, anchor=anchor)
            return values if loss is None else (loss, values)

        return entries


def _of_anchors(index: Any, anchor: Tensor | None) -> Any:
    """The index of the anchors, when it was given for all pairs."""
    if anchor is not None and isinstance(index, Tensor) and index.shape == anchor.shape:
        return index[anchor.to(index.device)]
    return index
