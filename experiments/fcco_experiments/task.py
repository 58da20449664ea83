"""What an experiment is made of: a config, a problem, a training, and the words for its report.

The engine and the report know nothing of fairness or groups: they see these types alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

Row = dict[str, Any]
"""One evaluation: numbers by name, and lists of numbers (one per constraint, say)."""

Setting = float | int | bool | str


@dataclass(frozen=True)
class Method:
    """One method with its settings.

    With `independent`, each step draws a second batch for the gradient (Alg. 2, line 5). Where
    an epoch is a number of samples, it then has half as many steps.
    """

    method: str  # its word, as in `fcco.constrained`
    lr: float  # of the outer loop, for double loops
    update: Literal["adam", "momentum", "sgd"] = "adam"  # momentum: SGD with momentum 1 - beta
    beta: float = 0.1  # weight of the new gradient in the momentum, Adam's 1 - beta_1
    weight_decay: float = 0.0
    independent: bool = False
    settings: dict[str, Setting] = field(default_factory=dict)  # see `fcco.constrained`


@dataclass(frozen=True)
class Columns:
    """What the columns of a table mean, for `data` that is the path of one.

    Args:
        label: the class of a row; `COLUMN=VALUE` asks whether the column has that value.
        group: one column, or several whose values are combined.
        overlapping: instead of `group`, one column of 0 and 1 for each group (`x*` stands for all
            that begin with x, `COLUMN=VALUE` for the rows with that value), or one column of lists
            such as `a|b`. A row may be in several groups, or in none.
        text: a text.
        image: the path of an image, inside `files`.
        features: numbers and categories; `x*` stands for all that begin with x. Unless given,
            every column that has no other role.
        split: train, validation or test.
        files: folder or tar archive of the images; the table's own folder unless given.
    """

    label: str = ""
    group: tuple[str, ...] = ()
    overlapping: tuple[str, ...] = ()
    text: str = ""
    image: str = ""
    features: tuple[str, ...] = ()
    split: str = ""
    files: str = ""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What every config has; a task adds its own fields.

    Args:
        data: name of a data set, or the path of a table (csv, tsv or parquet).
        columns: of that table.
        epochs: passes over the training data, counted in samples.
        seeds: one run of each method for each of them.
        methods: by the name that tables show.
        checkpoint_every: epochs between checkpoints.
        evaluate_every: epochs between evaluations.

    The class attribute `incidental` names the keys that do not change what a run computes: they may
    differ when it goes on from a checkpoint.
    """

    incidental: ClassVar[tuple[str, ...]] = ("checkpoint_every",)

    data: str
    columns: Columns = field(default_factory=Columns)
    epochs: int = 60
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    methods: dict[str, Method] = field(default_factory=dict)
    checkpoint_every: int = 5
    evaluate_every: int = 1

    @property
    def preferred_device(self) -> str | None:
        """`"auto"`, `"cpu"` or `"cuda"`; None where the config has no such choice."""
        return None

    def __post_init__(self) -> None:
        """Refuse what cannot be run; a task with checks of its own calls this first."""
        self.at_least(1, "epochs", "checkpoint_every", "evaluate_every")
        if len(set(self.seeds)) < len(self.seeds) or any(seed < 0 for seed in self.seeds):
            raise ValueError(
                f"`seeds` must be different numbers from 0 on but are: {list(self.seeds)}."
            )

    def at_least(self, low: int, *names: str) -> None:
        """Refuse smaller values of these fields."""
        for name in names:
            if getattr(self, name) < low:
                raise ValueError(f"`{name}` must be at least {low} but is: {getattr(self, name)}.")


class _Steps(ABC):
    """What is stepped and saved; the state round trips bitwise through `state_dict`."""

    steps_per_epoch: int  # methods that draw more samples make fewer
    samples_per_step: int  # of one run

    @abstractmethod
    def step(self) -> None:
        """Draw and use the next batch."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that later steps depend on."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""


class Training(_Steps):
    """One run in memory.

    Attributes:
        device: where it trains, for the record of the environment.
    """

    device: torch.device = torch.device("cpu")

    @abstractmethod
    def evaluate(self) -> Row:
        """Figures on full data; changes nothing."""

    def finish(self) -> Row:
        """Figures that are wanted once, at the end."""
        return {}


class FleetTraining(_Steps):
    """Many runs of one kind in memory, stepped together."""

    @property
    @abstractmethod
    def died(self) -> list[int]:
        """The step at which each run left the finite numbers and was frozen; -1 for the others."""

    @abstractmethod
    def evaluate(self) -> list[Row]:
        """Figures of each run on full data, numbers alone; changes nothing."""


class Problem(ABC):
    """Data and model of a task, loaded once and used by many runs."""

    @abstractmethod
    def start(self, method: Method, seed: int) -> Training:
        """A run from its first step."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the data do; a checkpoint of other data is refused."""

    def fleet_kind(self, method: Method, seed: int) -> Hashable | None:
        """Runs with the same kind can be trained together; None for one that no fleet can hold."""
        return None

    def fleet(self, runs: Sequence[tuple[Method, int]], device: torch.device) -> FleetTraining:
        """Runs of one kind (a method and a seed each) from their first step."""
        raise ValueError("This problem cannot train runs together.")


@dataclass(frozen=True)
class Metric:
    """A figure of the final table."""

    key: str  # in the rows
    label: str  # in the table
    better: Literal["higher", "lower", "none"] = "none"  # "none" for facts
    digits: int = 4  # after the point
    headline: bool = False  # in the first table, or only in the full one
    meaning: str = ""  # one sentence for a reader who does not know it


@dataclass(frozen=True)
class Panel:
    """A plot of the report; of runs that have no such figures, none.

    Args:
        kind: `"curve"`: `y` over epochs, a band over seeds. `"tradeoff"`: final `y` against `x`, a
            dot per run, with the frontier.
    """

    kind: Literal["curve", "tradeoff"]
    y: str  # key in the rows
    title: str  # says what to see
    label: str = ""  # of the y axis
    x: str = ""  # key of the x axis of a trade-off
    x_label: str = ""
    reference: float | None = None  # a horizontal line, such as the limit of a constraint
    x_reference: float | None = None  # a vertical one


@dataclass(frozen=True)
class Page:
    """The words and the choice of plots of a report.

    Args:
        question: paragraphs: what was asked, for a reader who has not read the paper.
    """

    title: str
    question: tuple[str, ...]
    metrics: tuple[Metric, ...]
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Rule:
    """How the settings of a sweep are ranked and the methods of a comparison are judged."""

    text: str  # in words
    score: Callable[[Row], tuple[float, ...]]  # of a row without test figures; smaller is better
    objective: str = ""  # key of the figure that the verdict compares
    constraint: str = ""  # key of the figure that must be at most `limit`; "" for none
    limit: float = 0.0
    limited: bool = False  # the first number of a score is the excess over a limit; 0 is feasible

    def feasible(self, score: Sequence[float]) -> bool:
        """Whether a score exceeds no limit."""
        return not self.limited or score[0] <= 0


class Task(ABC):
    """An experiment of the command line."""

    name: ClassVar[str]
    config: ClassVar[type[Experiment]]
    fleets: ClassVar[bool] = False  # its problems can train many runs at once: `Problem.fleet`
    configs: ClassVar[Path | None] = None  # folder of config files and `grids`; None: the package's

    @abstractmethod
    def load(self, config: Any) -> Problem:
        """Data and model."""

    @abstractmethod
    def page(self, config: Any) -> Page:
        """Words and plots of the report."""

    def metrics(self, config: Any) -> tuple[Metric, ...]:
        """The figures of the page, for whoever needs no words."""
        return self.page(config).metrics

    @abstractmethod
    def verdict(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        """Who won, by which rule: paragraphs from the final rows of each method."""

    def next_steps(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        """What to try next, from the final rows of each method; `code` stands in backticks."""
        return ()

    def rule(self, config: Any) -> Rule | None:
        """How settings are chosen; None without sweeps, a ValueError where nothing can choose."""
        return None

    def judged(self, config: Any) -> Rule | None:
        """What the verdict on a comparison goes by; None where it judges nothing."""
        try:
            return self.rule(config)
        except ValueError:
            return None

    def candidates(self, config: Any, methods: Mapping[str, list[Row]]) -> Iterable[str]:
        """Which of several methods compete, all unless a task says otherwise."""
        return methods

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        """What a reader must know about a final row, such as a constraint that is met vacuously."""
        return ()

    def check(self, config: Any) -> Iterable[tuple[tuple[str, ...], str]]:
        """Settings that types cannot refuse: pairs of a path as `("methods", "sonex")` and why."""
        return ()

    def config_name(self, data: str, setting: str | None) -> str:
        """The config file of a data set, as `celeba-paper`: the usual setting has the bare name."""
        return data if setting is None else f"{data}-{setting}"

    def grid_name(self, config: Any) -> str:
        """The grid of a sweep that names none."""
        return "wide"
