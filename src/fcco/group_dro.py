"""Group DRO: ready objectives for the worst groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import _checks, _watch
from ._schedules import Smoothing
from .continual import ReferenceLosses
from .inputs import Index
from .objective import Compositional
from .outer import CVaR
from .report import GroupReport, group_report
from .terms import CVaRTerm
from .tracker import for_model

__all__ = ["CVaRGroupDRO", "GroupObjective"]


class GroupObjective(Compositional):
    """Base of objectives over the losses of groups, such as `CVaRGroupDRO` and `methods.ooa`."""

    def cvar(self, losses: Tensor | None = None) -> Tensor:
        """CVaR with the exact threshold: of the known group losses, or of those given."""
        return self.term.value() if losses is None else CVaR(self.term.ratio)(losses)

    def group_losses(self) -> Tensor:
        """The tracked (or last seen) group losses, NaN where a group was never seen."""
        tracker = self.term.tracker
        return torch.where(tracker.seen, tracker.rows, torch.nan)

    def group_weights(self) -> Tensor:
        """The weight of each group in the gradient, NaN for one never seen; they sum to about 1."""
        return self.term.group_weights()

    def report(
        self,
        *,
        function: Callable[[], Any] | None = None,
        index: Index = None,
        rows: Any = None,
        held_out: Any = None,
    ) -> GroupReport:
        """A table of the group losses and weights, and what they say about the settings.

        Args:
            function: as in a call of the objective: the losses within a group are then compared.
                Nothing is updated.
            index: of that call.
            rows: of that call.
            held_out: mean losses on samples that are not trained on, to find groups that the
                model overfits: (n,), a dict by group, or what `fcco.group_mean` returns. With a
                `reference`, differences from its losses.
        """
        return group_report(self, self.group_weights(), function, index, held_out, rows)


class CVaRGroupDRO(GroupObjective):
    r"""Minimise the mean loss of the worst groups (CVaR over groups), by SONEX.

    .. math::
        \min_w\; \mathrm{CVaR}_r\bigl(L_1(w), \dots, L_n(w)\bigr)
        = \min_{w,s}\; s + \frac1{rn}\sum_i [L_i(w) - s]_+

    Call it with a function that returns the loss of each sample, and the group of each sample. It
    keeps a running estimate of each group's loss, and from these the threshold s and the weights of
    the groups. Nothing needs to be set: how fast the estimates follow and how far the kink at s is
    rounded come from their errors (docs/concepts/automatic-settings.md). The paper's SONEX is
    `smoothing=0.1, gamma=0.1, correction="auto", read="old"`, its SONX the same with
    `smoothing=0`, and with a `ProximalPoint` optimizer it is ALEXR2.

    Args:
        model: your model.
        optimizer: the optimizer that you step.
        num_groups: the number n of groups; not needed with `names`.
        ratio: the share r of the groups that count; 1 is the mean over groups, 1/n the worst group.
        smoothing: how far the kink at s is rounded: `fcco.Width(0.1)` in units of the loss; a
            number is lambda of the paper, and the width lambda / r. See `OuterTerm`.
        gamma: weight of the new loss in a group's running estimate; `"auto"` weighs noise against
            lag.
        correction: weight gamma' of a correction that needs a second forward pass at the previous
            parameters, see `InnerTracker`.
        read: which estimates the gradient uses: after this batch (`"new"`) or before it (`"old"`,
            as in the paper), which are older by n over the groups in a batch steps.
        reference: losses of another model on the training rows. The groups are then compared by
            how much worse than that model they are, and a call names the rows:
            `objective(function, index, rows=rows)`. Losses that no model can lower then cancel.
        names: of the groups, in the order of their ids, for reports and errors.
        process_group: see `Compositional`, as is `offload`.
        table: `on_nonfinite`, `dtype` and `device` of the `InnerTracker`; the last two are the
            model's unless given.

    Example:
        >>> import fcco, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> dro = fcco.CVaRGroupDRO(model, optimizer, num_groups=3, ratio=1 / 3)
        >>> x, group = torch.randn(6, 2), torch.tensor([0, 0, 1, 1, 2, 2])
        >>> loss = dro(lambda: (model(x).squeeze(1) - 9 * group).square(), group)
        >>> loss.backward()
        >>> optimizer.step()
        >>> dro.group_losses().argmax().item()
        2
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        num_groups: int | None = None,
        ratio: float | None = None,
        *,
        smoothing: Smoothing = "auto",
        gamma: float | Literal["auto"] = "auto",
        correction: float | Literal["theory", "auto"] = 0.0,
        read: Literal["old", "new"] = "new",
        reference: ReferenceLosses | None = None,
        names: Sequence[str] | None = None,
        process_group: Any = "auto",
        offload: bool = False,
        **table: Any,
    ) -> None:
        named = None if names is None else tuple(names)
        number: Any = len(named) if named and num_groups is None else num_groups
        if table:
            settings = [*inspect.signature(CVaRGroupDRO).parameters][2:-1]
            settings += ["on_nonfinite", "dtype", "device"]
            _checks.known("CVaRGroupDRO", table, settings)
        if number is None or ratio is None:
            raise TypeError("`CVaRGroupDRO` needs num_groups or names, and a ratio, such as 0.2.")
        _checks.integer("CVaRGroupDRO", "num_groups", number, 1)
        _checks.in_interval("CVaRGroupDRO", "ratio", ratio, 0.0, 1.0, open_low=True)
        if named is not None and {len(named), len(set(named))} != {number}:
            raise ValueError(f"`CVaRGroupDRO(names=...)` must be {number} different names: {names}")
        if ratio * number < 1 - 1e-6:
            _watch.warn(
                f"`CVaRGroupDRO(ratio={ratio:g})` of {number} groups is less than one: the worst "
                f"group counts, as with ratio=1/{number}."
            )
        if gamma == "auto" and correction != 0:
            raise ValueError(
                f"`CVaRGroupDRO(correction={correction!r})` needs a number for `gamma`: with "
                "'auto' the lag of the estimates is weighed without a second forward pass."
            )
        options = {"gamma": gamma, "correction": correction, "read": read, "measure": gamma != 0}
        tracker = for_model(model, number, **options, **table)
        term = CVaRTerm(tracker, ratio, smoothing=smoothing)
        term.names = named
        super().__init__(
            model, optimizer, term, process_group=process_group, offload=offload,
            reference=reference,
        )  # fmt: skip

    @property
    def threshold(self) -> Tensor:
        """The current threshold s of CVaR."""
        return self.term.threshold

    @property
    def ratio(self) -> float:
        return self.term.ratio

    @property
    def num_groups(self) -> int:
        return self.term.tracker.num_inner
