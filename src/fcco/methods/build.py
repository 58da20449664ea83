"""Build an objective of a method: `constrained` for limits, the others for any outer function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _checks
from ..constraints import ConstrainedObjective
from ..continual import ReferenceLosses
from ..group_dro import GroupObjective
from ..objective import Compositional
from ..outer import AbstractOuter
from ..terms import AbstractTerm
from ..terms.limits import Limit, Tolerance
from .registry import ALIASES, METHODS, ROWS, settings_of
from .settings import Problem, Settings

_WORDS = (*(row.name for row in ROWS if "limits" in row.use), *ALIASES)


def constrained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    limits: Mapping[str, Limit] | Sequence[str] | int,
    method: str | Settings = "multipliers",
    *,
    tolerance: Tolerance | None = None,
    margin: float = 0.0,
    reference: ReferenceLosses | None = None,
    objective: AbstractTerm | None = None,
    process_group: Any = "auto",
    offload: bool = False,
    **settings: Any,
) -> ConstrainedObjective:
    r"""Minimise a loss while values stay within their limits.

    | limit | meaning |
    |---|---|
    | `{"women": 0.5}` | at most 0.5 |
    | `{"recall": fcco.AtLeast(0.9)}` | at least 0.9 |
    | `{"mean": (0.20, 0.26)}` | between the two; None for a side that is open |
    | `{"calibration": fcco.Equal(0.0)}` | equal to 0 |

    Limits of all kinds may be mixed. Call the objective with a function that returns `(loss,
    values)`; it returns a loss for `backward()`. Then step `objective.optimizer`: your optimizer,
    or for some methods a wrapper of it. The multiplier of a lower limit is negative.

    Args:
        model: your model.
        optimizer: your optimizer.
        limits: by name, as above; or the names, or their number m, with `tolerance` as the limit.
        method: a word, with its settings as further keywords, or the settings themselves:
            `method="sonex", smoothing=0.1, penalty=10` is `method=Sonex(smoothing=0.1,
            penalty=10)`. `"multipliers"` needs none. `fcco.methods.table("limits")` has them all.
        tolerance: one limit, or one for each value, where `limits` has none; 0 unless given.
        margin: train for that much less than an upper limit and more than a lower one (not for
            equalities).
        reference: losses of another model on the rows that the limits are for. The limits are then
            those of differences, "at most 0.02 worse than it", and a call names the rows:
            `objective(function, index, rows=rows)`.
        objective: a term, when the loss too is a function of tracked values. The function then
            returns `{"objective": entries, "constraints": values}`, or `(loss, {...})`, and `index`
            is a dict likewise.
        process_group: see `Compositional`.
        offload: see `Compositional`.
        settings: of a method that was given by a word.

    Example:
        >>> import fcco, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> objective = fcco.constrained(model, optimizer, {"mean": fcco.AtLeast(0.5)})
        >>> output = lambda: model(torch.ones(4, 2)).squeeze(1)
        >>> loss = objective(lambda: (output().square(), {"mean": output().mean()}))
        >>> loss.backward()
        >>> objective.optimizer.step()
        >>> list(objective.multipliers())
        ['mean']
    """
    if isinstance(method, Settings):
        chosen, call = method, f"constrained(method={type(method).__name__}(...))"
        if settings:
            name = next(iter(settings))
            raise ValueError(f"`{call}` has its settings already: leave `{name}` out.")
    else:
        if method not in _WORDS:
            _checks.one_of("constrained", "method", method, _WORDS)
        call = f"constrained(method={method!r})"
        chosen = settings_of(call, ALIASES.get(method, method), settings)
    if chosen.word not in _WORDS:
        raise ValueError(f"`{call}` is no method for limits; see `fcco.methods.table('limits')`.")
    if objective is not None and not chosen.couples:
        words = [word for word in _WORDS if word in METHODS and METHODS[word].couples]
        raise ValueError(
            f"`{call}` takes no `objective`, a coupled term of the objective: that needs a method "
            f"on tracked values, {', '.join(words)}."
        )
    if isinstance(limits, Mapping):
        if tolerance is not None:
            raise ValueError("`constrained(limits={...})` has the limits: leave `tolerance` out.")
        tolerance = list(limits.values())
    elif isinstance(limits, (str, float)) or (
        isinstance(limits, Iterable) and any(isinstance(each, (int, float)) for each in limits)
    ):
        raise ValueError(
            "`constrained(limits=...)` must be a dict of limits by name, such as "
            f'{{"women": 0.5}}, but is: {limits!r}.'
        )
    names = tuple(limits) if isinstance(limits, Iterable) else None
    number: Any = limits if names is None else len(names)
    if not names:
        _checks.integer("constrained", "limits", number, 1)
    tolerance = 0.0 if tolerance is None else tolerance
    bound = {"tolerance": tolerance, "margin": margin, "names": names, "call": "constrained"}
    term = chosen.term(Problem(model, int(number), bound, process_group))
    return ConstrainedObjective(
        model, chosen.stepped(optimizer, term), term, method=chosen.word, objective=objective,
        process_group=process_group, offload=offload, reference=reference,
    )  # fmt: skip


def _recipe(word: str, **defaults: Any) -> Callable[..., Compositional]:
    """A function that builds the method for any outer function."""

    def build(
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        outer: AbstractOuter,
        num_inner: int,
        *,
        process_group: Any = "auto",
        offload: bool = False,
        **settings: Any,
    ) -> Compositional:
        chosen: Any = settings_of(word, word, {**defaults, **settings, "outer": outer})
        term = chosen.term(Problem(model, num_inner))
        stepped = chosen.stepped(optimizer, term)
        made = Compositional(model, stepped, term, process_group=process_group, offload=offload)
        made.method = word
        return made

    build.__name__ = build.__qualname__ = word
    build.__doc__ = f"The mean of `outer` over `num_inner` blocks, by `{METHODS[word].__name__}`."
    return build


# For any outer function: `sonex(model, optimizer, outer, num_inner, **settings)`.
sonex = _recipe("sonex", smoothing="auto")
alexr2 = _recipe("alexr2", smoothing="auto")
sonx, sox, alexr = _recipe("sonx"), _recipe("sox"), _recipe("alexr")


def ooa(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_groups: int,
    *,
    process_group: Any = "auto",
    **settings: Any,
) -> GroupObjective:
    """Group DRO with online weights: the settings of `Ooa`, for `num_groups` groups."""
    term = _term("ooa", "num_groups", model, num_groups, settings)
    return GroupObjective(model, optimizer, term, process_group=process_group)


def ctc_dro(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_groups: int,
    *,
    process_group: Any = "auto",
    **settings: Any,
) -> GroupObjective:
    """CTC-DRO: the settings of `CtcDro`, for `num_groups` groups."""
    term = _term("ctc-dro", "num_groups", model, num_groups, settings)
    return GroupObjective(model, optimizer, term, process_group=process_group)


def scent(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_inner: int,
    *,
    process_group: Any = "auto",
    **settings: Any,
) -> Compositional:
    """The log-mean-exp of `num_inner` blocks by `Scent`, with its settings."""
    term = _term("scent", "num_inner", model, num_inner, settings)
    return Compositional(model, optimizer, term, process_group=process_group)


def _term(word: str, name: str, model: nn.Module, number: int, settings: Mapping[str, Any]) -> Any:
    call = word.replace("-", "_")
    _checks.integer(call, name, number, 1)
    return settings_of(call, word, settings).term(Problem(model, number))
