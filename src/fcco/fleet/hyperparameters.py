"""The hyperparameters of all runs as tensors, those that follow a schedule included.

Every estimator and update has a named tuple of the numbers it needs. For one member its fields are
numbers, tensors or functions of the step; in a fleet they are tensors with one row per run, in
double precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..terms.limits import Limits
from .run import Flag, Unsupported

__all__ = [
    "Hyperparameter",
    "Hyperparameters",
    "LimitHyperparameters",
    "RunHyperparameters",
    "Template",
    "as_flag",
]

Hyperparameter = Any
"""A number, a tensor or a function of the step; in a fleet a tensor."""
SMOOTHING = "estimator.smoothing"


class RunHyperparameters(NamedTuple):
    """All hyperparameters of a run: named tuples of its update and its estimator."""

    update: Any
    estimator: Any


class LimitHyperparameters(NamedTuple):
    """The limits of constraints, see `fcco.terms.coupled.Limits`."""

    tolerance: Hyperparameter
    margin: Hyperparameter

    @classmethod
    def of(cls, limits: Limits) -> LimitHyperparameters:
        """Those of some limits, with one tolerance per block."""
        if not limits.upper:
            raise Unsupported("A fleet has upper limits alone: write value >= b as -value <= -b.")
        return cls(limits.tolerance.expand(limits.number), limits.margin)

    def excess(self, values: Tensor) -> Tensor:
        """How far values (n,) or (n, d1) are above their limits, margin included."""
        tolerance = self.tolerance if values.dim() == 1 else self.tolerance.unsqueeze(-1)
        return values - tolerance + self.margin


@dataclass(frozen=True)
class Template:
    """A frozen dataclass without its numbers: an outer function or a dual rule.

    Every field that is a number (`float`) may differ between runs; all others must be equal.

    Example:
        >>> import torch, fcco
        >>> template, numbers = Template.of(fcco.Hinge(2.0))
        >>> numbers
        {'scale': 2.0}
        >>> template.build({"scale": torch.tensor(3.0)})
        Hinge(scale=tensor(3.))
    """

    example: Any = dataclasses.field(compare=False)  # one such object
    object_type: type
    constants: tuple[tuple[str, object], ...]  # names and values of fields that are no numbers
    numbers: tuple[str, ...]  # names of those that are
    nested: tuple[tuple[str, Template], ...]  # fields that are such dataclasses themselves

    @classmethod
    def of(cls, value: Any) -> tuple[Template, dict[str, Hyperparameter]]:
        """The template of an object, and its numbers by name."""
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            raise Unsupported(
                f"{value!r} is no dataclass: a fleet cannot tell which of its numbers may differ."
            )
        numbers: dict[str, Hyperparameter] = {}
        constants, names, nested = [], [], []
        for field in dataclasses.fields(value):
            name, part = field.name, getattr(value, field.name)
            if dataclasses.is_dataclass(part) and not isinstance(part, type):
                template, numbers[name] = cls.of(part)
                nested.append((name, template))
            elif "float" in str(field.type) and isinstance(part, (int, float)):
                names.append(name)
                numbers[name] = float(part)
            elif isinstance(part, Tensor) or not isinstance(part, Hashable):
                raise Unsupported(
                    f"A fleet cannot compare `{type(value).__name__}.{name}`, "
                    f"a {type(part).__name__}, between runs."
                )
            else:
                constants.append((name, part))
        parts = tuple(constants), tuple(names), tuple(nested)
        return cls(value, type(value), *parts), numbers

    def build(self, numbers: Mapping[str, Any]) -> Any:
        """The object with other numbers, which may be tensors."""
        changes = {name: numbers[name] for name in self.numbers}
        changes |= {name: template.build(numbers[name]) for name, template in self.nested}
        return dataclasses.replace(self.example, **changes)


def as_flag(mask: np.ndarray[Any, Any], device: torch.device) -> Flag:
    """A bool when all runs agree, else a tensor."""
    return bool(mask[0]) if mask.all() or not mask.any() else torch.from_numpy(mask).to(device)


class Hyperparameters:
    """The hyperparameters of all runs, by name and as the named tuples that a step takes.

    Args:
        runs: those of each run.
        device: of the tensors.

    Attributes:
        tensors: the named tuples with one row per run, at the step of the last `advance`.

    Example:
        >>> class Steps(NamedTuple):
        ...     lr: Any
        >>> runs = [Steps(0.1), Steps(lambda step: 1 / (step + 1))]
        >>> hyperparameters = Hyperparameters(runs, torch.device("cpu"))
        >>> hyperparameters.advance(3)
        >>> hyperparameters["lr"].tolist(), hyperparameters.tensors
        ([0.1, 0.25], Steps(lr=tensor([0.1000, 0.2500], dtype=torch.float64)))
    """

    def __init__(self, runs: Sequence[Any], device: torch.device) -> None:
        self.device = device
        self._given = [_by_path(hyperparameters) for hyperparameters in runs]
        self.tensors: Any = tree_map(lambda *rows: _stacked(rows, 0, device), *runs)
        paths = _by_path(self.tensors)
        # The shortest name that is left, outer levels first: `lr`, and then `constraint.lr`.
        self._tensors: dict[str, Tensor] = {}
        self._paths: dict[str, str] = {}
        for path in sorted(paths, key=lambda path: path.count(".")):
            parts = path.split(".")
            ends = (".".join(parts[k:]) for k in reversed(range(len(parts))))
            name = next(end for end in ends if end not in self._paths)
            self._tensors[name], self._paths[name] = paths[path], path
        self.scheduled = [
            name
            for name, path in self._paths.items()
            if any(callable(given[path]) for given in self._given)
        ]
        self._smoothed = np.zeros(len(runs), dtype=bool)
        if SMOOTHING in paths:
            self._note_smoothing(paths[SMOOTHING])

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def items(self) -> Any:
        """Names and tensors."""
        return self._tensors.items()

    def advance(self, step: int) -> None:
        """Evaluate the schedules at a step."""
        for name in self.scheduled:
            path = self._paths[name]
            rows = _stacked([given[path] for given in self._given], step)
            if path == SMOOTHING:
                self._note_smoothing(rows)
            self._tensors[name].copy_(rows)  # in place: a captured step reads it there

    def set(self, values: Mapping[str, float | Sequence[float] | Tensor]) -> None:
        """Change some, by name: all or, when one cannot be set, none."""
        checked = {}
        for name, value in values.items():
            if name not in self._tensors or name in self.scheduled:
                free = sorted(set(self._tensors) - set(self.scheduled))
                raise ValueError(
                    f"`Fleet.set_hyperparameters` cannot set {name!r} (it follows a schedule, or "
                    f"is not known) but: {', '.join(free)}."
                )
            rows, tensor = torch.as_tensor(value, dtype=torch.float64), self._tensors[name]
            if rows.dim() == 1:  # one per run, for all blocks
                rows = rows.view(-1, *(1 for _ in tensor.shape[1:]))
            checked[name] = rows.to(self.device).expand_as(tensor)  # raises when it does not fit
        for name, rows in checked.items():
            self._tensors[name].copy_(rows)
            if self._paths[name] == SMOOTHING:
                self._note_smoothing(rows)

    def _note_smoothing(self, smoothing: Tensor) -> None:
        # Kept on the host, where it selects the program, so that no step waits for the device.
        self._smoothed = (smoothing > 0).cpu().numpy()

    def smoothed(self) -> Flag:
        """Whether lambda is above 0."""
        return as_flag(self._smoothed, self.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the tensors by name."""
        return {name: value.clone() for name, value in self._tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave, but for schedules, which follow the step."""
        self.set({name: value for name, value in state.items() if name not in self.scheduled})


def _stacked(rows: Sequence[Any], step: int, device: torch.device | None = None) -> Any:
    """One tensor of the numbers of all runs at a step."""
    if rows[0] is None:  # a number that this method does without
        return None
    values = [row(step) if callable(row) else row for row in rows]
    wide = [torch.as_tensor(value, dtype=torch.float64) for value in values]
    return torch.stack(wide).to(device)


def _by_path(tree: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested named tuples and dicts by dotted path; None is left out."""
    fields = tree._asdict() if hasattr(tree, "_asdict") else tree
    if not isinstance(fields, dict):
        return {} if tree is None else {path: tree}
    prefix = f"{path}." if path else ""
    parts = [_by_path(part, prefix + name) for name, part in fields.items()]
    return {name: leaf for part in parts for name, leaf in part.items()}
