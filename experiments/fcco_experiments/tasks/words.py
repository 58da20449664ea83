"""What the tasks of this package share beside their training: columns, words, the verdict."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from fcco.methods import ALIASES

from .. import data
from ..prose import paragraphs
from ..task import Experiment, Method, Metric, Page, Panel, Progress, Row, Task
from .judge import judge


class BaseTask(Task):
    """A task whose sentences stand in a template, one block for each place.

    Attributes:
        template: the file, in this folder.
        problem: made of a config and, perhaps, a progress.
        methods: a line for each method word.
        references: words of methods that solve another problem.
        parts: of the data, in the order of their columns.
    """

    template: ClassVar[str]
    problem: ClassVar[type[Any]]
    methods: ClassVar[Mapping[str, str]]
    references: ClassVar[tuple[str, ...]]
    parts: ClassVar[tuple[str, ...]] = ("test", "train", "val")

    @abstractmethod
    def figures(self, config: Any) -> Iterable[tuple[Metric, str]]:
        """Figures of each part of the data, see `by_part`."""

    @abstractmethod
    def once(self, config: Any) -> tuple[Metric, ...]:
        """Figures of a whole run."""

    @abstractmethod
    def card(self, config: Any) -> dict[str, str]:
        """What is said of the data; see `described`."""

    @abstractmethod
    def panels(self, config: Any) -> Iterable[Panel]:
        """Plots of a comparison; of figures that no run has, the report draws none."""

    def clouds(self, config: Any) -> Iterable[Panel]:
        """Plots of a sweep, see `Page`."""
        return ()

    def entries(self, config: Any) -> Mapping[str, tuple[str, ...]]:
        """Names of the entries of lists."""
        return {}

    @abstractmethod
    def build(self, config: Any, method: Method) -> object:
        """A method on a small model, to see whether its settings are right."""

    def words(self, block: str, config: Any, **values: Any) -> tuple[str, ...]:
        """The paragraphs of a block."""
        return paragraphs(f"{self.template}/page.j2", block, config=config, **values)

    def described(self, config: Experiment, **unless: str) -> dict[str, str]:
        """What the card of the data says for this task; `unless` for data without such words."""
        known = config.data in data.names()
        return unless | (data.card(config.data).words.get(self.name, {}) if known else {})

    def metrics(self, config: Any) -> tuple[Metric, ...]:
        columns = by_part(*self.figures(config), parts=self.parts) + self.once(config)
        return tuple(sorted(columns, key=lambda metric: not metric.headline))

    def page(self, config: Any) -> Page:
        values = {"card": self.card(config), "rule": self.judged(config)}
        (title,) = self.words("title", config, **values)
        return Page(
            title=title,
            question=self.words("question", config, **values),
            metrics=self.metrics(config),
            panels=tuple(self.panels(config)),
            entries=self.entries(config),
            references=self.named(config),
            clouds=tuple(self.clouds(config)),
            glossary=self.glossary(config),
        )

    def load(self, config: Any) -> Any:
        return self.problem(config)

    def fetch(self, config: Any, progress: Progress | None = None) -> Any:
        return self.problem(config, progress)

    def check(self, config: Any) -> list[tuple[tuple[str, ...], str]]:
        problems = list(self.wrong(config))
        for name, method in config.methods.items():
            try:
                self.build(config, method)
            except (TypeError, ValueError) as error:
                problems.append((("methods", name), str(error)))
        return problems

    def wrong(self, config: Any) -> Iterable[tuple[tuple[str, ...], str]]:
        """What is wrong beside the methods, as `Task.check` says it."""
        return ()

    def verdict(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        return self.words("verdict", config, **self.outcome(config, methods))

    def next_steps(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        return self.words("next_steps", config, **self.outcome(config, methods))

    def outcome(self, config: Any, methods: Mapping[str, list[Row]]) -> dict[str, Any]:
        """What the sentences of the verdict are made from: the judgement, and whom they name."""
        verdict, others = judge(self, config, methods), self.named(config)
        return {
            "verdict": verdict, "final": verdict.final, "best": verdict.best,
            "order": verdict.order, "references": [n for n in verdict.order if n in others],
            "reference": next((name for name in verdict.order if name in others), None),
            "ours": next((name for name in verdict.order if name not in others), None),
            "key": verdict.rule.objective if verdict.rule else "",
        }  # fmt: skip

    def named(self, config: Experiment) -> tuple[str, ...]:
        """The references of a config, by the names that tables show."""
        return tuple(n for n, method in config.methods.items() if method.method in self.references)

    def glossary(self, config: Experiment) -> dict[str, str]:
        """One line for each method of a config."""
        result = {}
        for name, method in config.methods.items():
            known = method.method in self.methods
            word = method.method if known else ALIASES.get(method.method, "")
            step = f"The weights are stepped by {_UPDATES[method.update]}"
            if method.independent:
                step += "; a second, independent batch in each step carries the gradient"
            result[name] = f"{self.methods.get(word, '')} {step}.".strip()
        return result


_UPDATES = {"adam": "Adam", "momentum": "SGD with momentum", "sgd": "SGD"}


SECONDS = Metric("seconds", "seconds", "none", 1, True, "training time of a run")
SPEED = Metric(
    "samples_per_second", "samples a second", "none", 0, False,
    "in training, evaluations not counted",
)  # fmt: skip


def by_part(*metrics: tuple[Metric, str], parts: Sequence[str]) -> tuple[Metric, ...]:
    """A column of each metric for each part of the data, with the part in its key and its label.

    The text beside a metric names the parts whose column is in the first table.

    >>> (metric,) = by_part((Metric("auc", "AUC"), ""), parts=["val"])
    >>> metric.key, metric.label, metric.headline
    ('val_auc', 'AUC, validation', False)
    """
    words = {"val": "validation"}
    return tuple(
        replace(
            metric, key=f"{part}_{metric.key}", label=f"{metric.label}, {words.get(part, part)}",
            headline=part in shown.split(),
        )
        for part in parts
        for metric, shown in metrics
    )  # fmt: skip
