"""Group DRO: ready objectives for the worst groups."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ._schedules import Smoothing
from .inputs import Index, known_settings
from .objective import Compositional
from .optim import ProximalPoint
from .outer import CVaR
from .previous import unwrap
from .report import GroupReport, group_report
from .terms import CVaRTerm
from .tracker import GAMMA, THETA, for_model

__all__ = ["CVaRGroupDRO", "GroupObjective", "OnlineGroupDRO"]


class GroupObjective(Compositional):
    """An objective over the losses of groups, which reports each loss and their CVaR."""

    def cvar(self, losses: Tensor | None = None) -> Tensor:
        """CVaR with the exact threshold: of the known group losses, or of those given.

        For a result to report, give the full-data group losses.
        """
        return self.term.value() if losses is None else CVaR(self.term.ratio)(losses)

    def group_losses(self) -> Tensor:
        """The tracked (or last seen) group losses, NaN where a group was never seen."""
        tracker = self.term.tracker
        return torch.where(tracker.seen, tracker.rows, torch.nan)

    @abc.abstractmethod
    def group_weights(self) -> Tensor:
        """The weight of each group in the gradient."""

    def report(
        self, *, function: Callable[[], Any] | None = None, index: Index = None
    ) -> GroupReport:
        """A table of the group losses and weights, and what they say about the settings.

        `print(objective.report())` shows it; `fcco.report` lists what it can find. It waits for the
        device, so it is not for every step.

        Args:
            function: a function as in a call of the objective, best on a large batch: its losses
                are then compared with the tracked ones, and within each group. It runs once, in
                the mode that the model is in; nothing is updated.
            index: the group of each of its losses.
        """
        return group_report(self, self.group_weights(), function, index)


class CVaRGroupDRO(GroupObjective):
    r"""Minimise the average loss of the worst groups (CVaR over groups), by SONEX.

    .. math::
        \min_w\; \mathrm{CVaR}_r\bigl(L_1(w), \dots, L_n(w)\bigr)
        = \min_{w,s}\; s + \frac1{rn}\sum_i [L_i(w) - s]_+

    Give it a function that returns per-sample losses, and the group of each sample (with a
    correction the function runs a second time, without gradient, at w_{t-1}); it tracks the group
    losses, owns the threshold s and weighs the groups. With `smoothing=0` it is SONX, with
    `correction=0` a moving average only, and with a `ProximalPoint` optimizer ALEXR2, with ALEXR2's
    defaults.

    Args:
        model: your model.
        optimizer: your optimizer.
        num_groups: n.
        ratio: r, the share of groups that count; 1 is the plain mean over groups, 1/n the worst.
        smoothing: lambda; the quadratic zone is lambda / r wide, in units of the loss. Or that
            width itself, `fcco.Width(0.1)`.
        gamma: weight of the new group loss; None is 0.1, or 0.8 for ALEXR2.
        correction: gamma' of the tracker, see `InnerTracker`; None is `"auto"`, or 0.125 gamma for
            ALEXR2.
        read: which u enters the gradient, see `InnerTracker`; None is `"old"`, or `"new"` for
            ALEXR2.
        threshold: rule for s, see `CVaRTerm`.
        threshold_lr: its step size, for the gradient rules.
        process_group: see `Compositional`.
        offload: see `Compositional`.
        options: further options of `InnerTracker` (`on_nonfinite`, `dtype`, ...).

    Example:
        >>> import torch, fcco
        >>> from torch.nn.functional import binary_cross_entropy_with_logits as bce
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        >>> dro = fcco.CVaRGroupDRO(model, optimizer, num_groups=4, ratio=0.5, smoothing=0.1)
        >>> x, y = torch.randn(8, 2), torch.ones(8)
        >>> group = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
        >>> loss = dro(lambda: bce(model(x).squeeze(1), y, reduction="none"), group)
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()
        >>> bool(dro.cvar() > dro.group_losses().mean())
        True
    """

    @known_settings()
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        num_groups: int,
        ratio: float,
        *,
        smoothing: Smoothing = 0.1,
        gamma: float | None = None,
        correction: float | Literal["theory", "auto"] | None = None,
        read: Literal["old", "new"] | None = None,
        threshold: Literal["exact", "gradient", "table"] = "exact",
        threshold_lr: float = 0.1,
        process_group: Any = "auto",
        offload: bool = False,
        **options: Any,
    ) -> None:
        several = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
        double_loop = any(isinstance(unwrap(each), ProximalPoint) for each in several)
        gamma = (GAMMA if double_loop else 0.1) if gamma is None else gamma
        if correction is None:
            correction = THETA * gamma if double_loop else "auto"
        read = read or ("new" if double_loop else "old")
        tracker = for_model(
            model, num_groups, gamma=gamma, correction=correction, read=read, **options
        )
        term = CVaRTerm(
            tracker,
            ratio,
            smoothing=smoothing,
            threshold=threshold,
            threshold_lr=threshold_lr,
        )
        super().__init__(model, optimizer, term, process_group=process_group, offload=offload)

    def group_weights(self) -> Tensor:
        """The weight of each group in the gradient, NaN for one never seen.

        Once all groups are seen the weights sum to about 1.
        """
        return self.term.weights()

    @property
    def threshold(self) -> Tensor:
        """The current s."""
        return self.term.threshold


class OnlineGroupDRO(GroupObjective):
    """The objective that `fcco.methods.ooa` returns; its only term is a `GroupWeights`."""

    def group_weights(self) -> Tensor:
        """The current weights p of the groups; they sum to 1."""
        return self.term.current.clone()
