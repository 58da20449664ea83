"""What the settings of all methods have in common: frozen dataclasses that build an objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from .. import _checks
from .._schedules import Smoothing
from ..outer import AbstractOuter, Hinge
from ..terms import AbstractTerm, CoupledTerm
from ..tracker import InnerTracker, like_model

Auto = Literal["auto"]
"""A setting that the method finds by itself."""


@dataclass(frozen=True)
class Problem:
    """What a term is built for: a model, a number of blocks, and their limits if there are any."""

    model: nn.Module
    number: int
    limits: Mapping[str, Any] = field(default_factory=dict)  # for `Limits`
    process_group: Any = "auto"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of the settings of a method: they make its term and say what steps."""

    word: ClassVar[str]  # by which the method is chosen
    couples: ClassVar[bool] = True  # beside a coupled term, `constrained(objective=...)`
    sampled: ClassVar[bool] = True  # a step may look at a part of the limits

    @classmethod
    def missing(cls, given: Mapping[str, Any]) -> list[str]:
        """The settings that must be given and are not."""
        needed = (f.name for f in fields(cls) if f.default is MISSING)
        return [name for name in needed if name not in given]

    def term(self, problem: Problem) -> Any:
        """The term of the method."""
        raise NotImplementedError

    def stepped(self, optimizer: torch.optim.Optimizer, term: Any) -> torch.optim.Optimizer:
        """The optimizer to step: the user's, or one around it."""
        return optimizer


@dataclass(frozen=True, kw_only=True)
class TrackedSettings(Settings):
    """Base of methods that keep a table of values; for the settings see `InnerTracker`."""

    on_nonfinite: Literal["raise", "skip"] = "raise"
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None

    def table(self, model: nn.Module) -> dict[str, Any]:
        options: dict[str, Any] = like_model(model, {"on_nonfinite": self.on_nonfinite})
        own = {"dtype": self.dtype, "device": self.device}
        return options | {name: value for name, value in own.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Penalty(TrackedSettings):
    r"""Base of penalties :math:`\frac1m\sum_i f(g_i - \text{tolerance}_i)` of tracked values.

    Args:
        penalty: rho of the penalty function; exact for rho/m above the largest multiplier.
        outer: a function of your own in its place, with its own weight.
        dim: d1, where `outer` leaves it open.
    """

    penalty: float | None = None
    outer: AbstractOuter | None = None
    dim: int | None = None

    kind: ClassVar[Any] = Hinge
    requires: ClassVar[tuple[str, ...]] = ()  # facts that f must declare
    smoothing: ClassVar[Smoothing] = 0.0  # a setting of some

    @classmethod
    def missing(cls, given: Mapping[str, Any]) -> list[str]:
        missing = super().missing(given)
        if given.get("outer") is None and given.get("penalty") is None:
            missing.append("penalty")
        return missing

    def function(self) -> AbstractOuter:
        """The penalty function, or the caller's own."""
        if self.outer is None:
            if self.penalty is None:
                raise ValueError(f"`{self.word}(penalty=...)` is needed unless `outer` is given.")
            _checks.positive(self.word, "penalty", self.penalty)
            return self.kind(self.penalty)
        if self.penalty is not None:
            raise ValueError(f"`{self.word}(outer=...)` has its own weight: leave `penalty` out.")
        _checks.requires(self.word, self.outer, *self.requires)
        return self.outer

    def dimension(self, outer: AbstractOuter) -> int:
        dim = outer.dim if self.dim is None else self.dim
        if dim is None:
            raise ValueError(f"`{self.word}(dim=...)` is needed: {outer!r} takes any length.")
        return dim

    def tracking(self) -> dict[str, Any]:
        """Options of the `InnerTracker`."""
        raise NotImplementedError

    def term(self, problem: Problem) -> AbstractTerm:
        outer = self.function()
        options = self.table(problem.model) | self.tracking()
        tracker = InnerTracker(problem.number, self.dimension(outer), **options)
        return CoupledTerm(outer, tracker, smoothing=self.smoothing, **problem.limits)
