"""Multi-instance learning: AUC of bags whose score is pooled over their instances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _checks
from ..objective import Compositional
from ..outer import ClassSeparation
from ..terms import NestedTerm
from ..tracker import for_model
from .base import as_labels, check_gamma, read_scores, takes_no_values

__all__ = ["MultiInstanceAUC"]


class MultiInstanceAUC(Compositional):
    r"""Maximise the AUC of bags of instances, with a smooth maximum as the score of a bag.

    .. math::
        H_b(w) = \tau\log\operatorname*{mean}_{x\in b} e^{h(w; x)/\tau}, \qquad
        \min_w\; \operatorname{Var}_+ H + \operatorname{Var}_- H
            + [\,m + \mathbb E_- H - \mathbb E_+ H\,]_+^2

    Three levels (`fcco.terms.NestedTerm`): a block is a bag, g_b = mean exp(h / tau) is tracked in
    log space from the instances of the bag that a batch holds; the class means of H and H^2 are
    tracked too; f is `fcco.outer.ClassSeparation`. Bags may be larger than a batch.

    Args:
        model: your model, which scores instances.
        optimizer: your optimizer.
        labels: 0 or 1 for each bag of the training set.
        temperature: tau; small is the maximum over the instances, large their mean.
        margin: m.
        gamma: weight of the new mean of a bag.
        gamma_classes: weight of the new class means; `"auto"` weighs noise against lag.
        process_group: see `Compositional`.

    Example:
        >>> import torch
        >>> from fcco import xrisk
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        >>> risk = xrisk.MultiInstanceAUC(model, optimizer, labels=[1, 0, 0])
        >>> x, bag = torch.randn(6, 2), torch.tensor([0, 0, 1, 1, 2, 2])
        >>> loss = risk(lambda: model(x).squeeze(1), bag)
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()

    References:
        D. Zhu et al., Provable multi-instance deep AUC maximization with stochastic pooling, 2023
        (MIDAM).
    """

    labels: Tensor
    warm_up = pool = takes_no_values  # type: ignore[assignment]

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        labels: Any,
        *,
        temperature: float = 1.0,
        margin: float = 1.0,
        gamma: float = 0.5,
        gamma_classes: float | Literal["auto"] = "auto",
        process_group: Any = "auto",
    ) -> None:
        _checks.positive("MultiInstanceAUC", "temperature", temperature)
        _checks.positive("MultiInstanceAUC", "margin", margin)
        _checks.in_interval("MultiInstanceAUC", "gamma", gamma, 0.0, 1.0, open_low=True)
        check_gamma("MultiInstanceAUC", gamma_classes, "gamma_classes")
        table = as_labels("`MultiInstanceAUC(labels=...)`", labels)
        if table.dim() != 1 or not 0 < int(table.sum()) < len(table):
            raise ValueError(
                "`MultiInstanceAUC(labels=...)` must be a vector with positive (1) and negative "
                "(0) bags."
            )
        options: dict[str, Any] = {"correction": 0.0, "read": "new"}
        bags = for_model(model, len(table), gamma=gamma, log_space=True, **options)
        means = for_model(model, 1, 4, gamma=gamma_classes, **options)
        term = NestedTerm(ClassSeparation(margin), self._class_means, bags, means)
        super().__init__(model, optimizer, term, process_group=process_group)
        self.temperature = temperature
        self.register_buffer("labels", table.to(bags.value.device), persistent=False)

    def _class_means(self, u: Tensor, index: Tensor) -> Tensor:
        """The class means of H and H^2 over some bags."""
        scores, positive = self.temperature * u, self.labels[index] == 1
        if bool(positive.all()) or not bool(positive.any()):
            raise ValueError(
                "`MultiInstanceAUC`: a batch must hold bags of both classes, but the labels of its "
                f"{len(index)} bags are all {int(positive[0])}; nothing was updated."
            )
        sides = [scores[positive], scores[~positive]]
        return torch.stack([part for h in sides for part in (h.mean(), h.square().mean())])

    def forward(self, function: Callable[[], Any], bag: Any) -> Tensor:  # type: ignore[override]
        """The loss of one batch of instances.

        Args:
            function: runs the model and returns the scores of the instances, (B,), or
                (loss, scores).
            bag: number of the bag of each instance, (B,); the (global) batch must hold bags of both
                classes.
        """

        def entries() -> Any:
            loss, scores = read_scores("MultiInstanceAUC", function)
            scores = scores / self.temperature
            return scores if loss is None else (loss, scores)

        return super().forward(entries, bag)
