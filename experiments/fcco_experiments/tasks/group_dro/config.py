"""The fields of a group DRO experiment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..base import Scheduled
from ..network import Networked


@dataclass(frozen=True, kw_only=True)
class GroupDRO(Scheduled, Networked):
    r"""The average loss of the worst groups.

    .. math::
        \min_{w,s}\; s + \frac1{rn}\sum_{i=1}^n [L_i(w) - s]_+, \qquad
        L_i(w) = \mathrm E\bigl[\ell(w; x, y) \mid \text{group } i\bigr]

    Args:
        distinct: drop texts that repeat one of their own group, so that no copy of a training text
            is a test text.
        choose_by: the figure by which a sweep chooses settings and, on test data, a comparison is
            judged: `"val_cvar"`; `"train_cvar"`, how well the problem is solved, whatever that is
            worth on other data; or an accuracy over the reported groups, `"val_worst_accuracy"` or
            `"val_tenth_accuracy"` (tenth percentile), whichever the data set has.
        spectrum: compute the smallest eigenvalue of the groups' Jacobian Gram matrix at the end
            (assumption LBSV), over all weights.
    """

    ratio: float = 0.15  # r, the share of groups that count; alpha in the paper's appendix
    batch: int = 64  # samples of a batch, B1 B2
    groups_per_batch: int = 4  # B1; 0: as many as there are with two samples each
    sample_limit: int = 0  # at most so many samples of each group are kept; 0 keeps all
    distinct: bool = False
    choose_by: Literal["train_cvar", "val_cvar", "val_worst_accuracy", "val_tenth_accuracy"] = (
        "val_cvar"
    )
    spectrum: bool = False
    accumulate: int = 1  # micro-batches that a batch is cut into

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            raise ValueError(f"`ratio` must be in (0, 1] but is: {self.ratio}.")
        self.at_least(1, "batch", "accumulate")
        self.at_least(0, "sample_limit", "groups_per_batch")
        if self.groups_per_batch and self.batch % self.groups_per_batch:
            raise ValueError(
                f"`batch` must be a multiple of groups_per_batch = {self.groups_per_batch} "
                f"but is: {self.batch}."
            )
        if self.groups_per_batch % self.accumulate:
            raise ValueError(
                f"`accumulate` must divide groups_per_batch = {self.groups_per_batch} (micro-"
                f"batches hold whole groups) but is: {self.accumulate}."
            )

    def with_groups(self, number: int) -> GroupDRO:
        """This config for data of so many groups: a number of groups instead of 0."""
        if self.groups_per_batch:
            return self
        most = max(1, min(number, self.batch // 2))
        sizes = range(most, 0, -1)
        fitting = (n for n in sizes if self.batch % n == 0 and n % self.accumulate == 0)
        return replace(self, groups_per_batch=next(fitting, self.accumulate))

    @property
    def per_group(self) -> int:
        """B2, samples of each group in a batch."""
        return self.batch // self.groups_per_batch

    @property
    def share(self) -> str:
        """The ratio in words."""
        return f"{100 * self.ratio:g} %"

    @property
    def by_accuracy(self) -> bool:
        """Whether settings are chosen by an accuracy, not by the CVaR."""
        return self.choose_by.endswith("accuracy")
