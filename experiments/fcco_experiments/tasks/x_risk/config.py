"""The fields of an X-risk experiment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..base import Scheduled
from ..network import Networked


@dataclass(frozen=True, kw_only=True)
class XRisk(Scheduled, Networked):
    """Scores that rank well: positives above negatives, relevant rows of a query above others.

    Args:
        risk: the figure that counts, by which settings are chosen on validation data and methods
            are judged on test data: `"ap"`, average precision; `"auc"`; `"pauc"`, the AUC up to
            the false positive rate `max_fpr`; `"tpauc"`, the same above the true positive rate
            `min_tpr` alone; or, for lists, `"ndcg"` of the first `k` rows of each query.
        warm: share of the steps in which methods that minimise an X-risk minimise the
            cross-entropy instead, before anything else (the squared error, for lists).
        positives: how many samples of a batch are positives, for those methods; 0: a half.
        queries: how many queries a batch has, for lists; 0: as many as there is room for with all
            rows of an average one, but four at least.
        scale: scale features to mean 0 and deviation 1 over the training rows.
        sample_limit: about so many samples are kept, of each class and part its share; 0 keeps
            all.
    """

    risk: Literal["ap", "auc", "pauc", "tpauc", "ndcg"] = "ap"
    max_fpr: float = 0.3
    min_tpr: float = 0.5
    k: int = 0  # 0: all rows of a query
    warm: float = 0.5
    batch: int = 64
    positives: int = 0
    queries: int = 0
    scale: bool = True
    sample_limit: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        super().__post_init__()
        self.at_least(2, "batch")
        self.at_least(0, "k", "positives", "queries", "sample_limit")
        for name, low, high in (("max_fpr", 0, 1), ("min_tpr", 0, 1)):
            value = getattr(self, name)
            if not (low < value <= high if name == "max_fpr" else low <= value < high):
                limits = "(0, 1]" if name == "max_fpr" else "[0, 1)"
                raise ValueError(f"`{name}` must be in {limits} but is: {value}.")
        if not 0 <= self.warm < 1:
            raise ValueError(f"`warm` must be in [0, 1) but is: {self.warm}.")
        if self.positives >= self.batch:
            raise ValueError(
                f"`positives` must be below batch = {self.batch} but is: {self.positives}."
            )
        if self.queries > self.batch // 2:
            raise ValueError(
                f"`queries` must be at most {self.batch // 2}, so that a batch of {self.batch} "
                f"has two rows of each, but is: {self.queries}."
            )
        if self.precision == "float16":
            raise ValueError("`precision` must be float32 or bfloat16 but is: float16.")

    @property
    def lists(self) -> bool:
        """Whether the data are lists to rank."""
        return self.risk == "ndcg"
