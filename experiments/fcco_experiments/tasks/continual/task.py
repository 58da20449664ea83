"""The task: its configs, its problem, and its report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ... import backbones
from ...prose import paragraphs
from ...task import Page, Progress, Row, Rule, Task
from ..verdict import glossary, judge, metrics, panels
from .config import Continual
from .problem import ContinualProblem
from .training import BuiltMethod

PAGE = "continual/page.j2"
REFERENCES = ("finetune",)
"""Methods that do not try to keep anything."""
SMALL = 50
"""A test class with fewer images says little: one of them is more than two points."""
NEAR = 0.01
"""A logistic loss that rose by no more than this counts as kept, and a gap below it as noise."""
CHANCE = 0.05
"""A mean accuracy of the classes no further above that of guessing is that of guessing."""

_PROTECTED = ("constraints", "zero_one", "test_zero_one", "multipliers", "best_multipliers")


class ContinualTask(Task):
    """Contrastive fine-tuning under non-forgetting constraints."""

    name = "continual"
    config = Continual

    def grid_name(self, config: Any) -> str:
        return "paper" if config.train == "all" else "wide"

    def fetch(self, config: Any, progress: Progress | None = None) -> ContinualProblem:
        """Data, weights, features and old models, once, before several processes load them."""
        problem = ContinualProblem(config, progress)
        for number, seed in enumerate(config.seeds):
            if progress is not None:
                progress("old models", number, len(config.seeds))
            problem.make_old(seed)  # the first rank of a machine alone is here
        return problem

    def load(self, config: Any) -> ContinualProblem:
        return ContinualProblem(config)

    def check(self, config: Any) -> list[tuple[tuple[str, ...], str]]:
        problems: list[tuple[tuple[str, ...], str]] = []
        for side in ("image", "text"):
            key, name = f"{side}_backbone", getattr(config, f"{side}_backbone")
            try:
                kind = side if name == "none" else backbones.kind(name)
            except ValueError as error:
                problems.append(((key,), str(error)))
                continue
            texts = side == "image" and config.columns.text  # of a table, in the place of images
            if kind != side and not texts:
                problems.append(((key,), f"`{key}: {name}` takes {kind}s, not {side}s."))
        for name, method in config.methods.items():
            try:
                BuiltMethod(nn.Linear(1, 1), method, config, 2, 2)
            except (TypeError, ValueError) as error:
                problems.append((("methods", name), str(error)))
        return problems

    def rule(self, config: Any) -> Rule:
        """What is forgotten beyond the limit first, then the accuracy of the target."""
        (text,) = _words("rule", config)
        if config.choose_by == "validation":
            return Rule(text, _score(config), objective="test_accuracy")
        return Rule(
            text, _score(config), objective="test_target_gain", constraint="train_excess",
            limit=0.0, limited=True,
        )  # fmt: skip

    def verdict(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        return _words("verdict", config, **self._outcome(config, methods))

    def next_steps(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        return _words("next_steps", config, **self._outcome(config, methods))

    def candidates(self, config: Any, methods: Mapping[str, list[Row]]) -> list[str]:
        """Of each method one setting, the one that the rule prefers: test data choose none."""
        score = _score(config)

        def mean_score(name: str) -> tuple[float, ...]:
            columns = zip(*map(score, methods[name]), strict=True)
            return tuple(math.fsum(column) / len(methods[name]) for column in columns)

        preferred: dict[str, str] = {}
        for name in sorted(methods, key=mean_score):
            preferred.setdefault(_word(config, name), name)
        return list(preferred.values())

    def _outcome(self, config: Continual, methods: Mapping[str, list[Row]]) -> dict[str, Any]:
        """What the sentences of the verdict are made from."""
        verdict = judge(self, config, methods)
        final, order = verdict.final, verdict.order
        words = {_word(config, name): name for name in order}
        names = [
            n for n in final.rows if _word(config, n) not in REFERENCES and n not in final.early
        ]
        duel = None
        if "sonex" in words and "sox" in words:
            gap = final.difference(words["sonex"], words["sox"], "test_target_gain")
            duel = {"ours": words["sonex"], "theirs": words["sox"], "gap": gap}
        return {
            "verdict": verdict, "final": final, "names": names, "best": verdict.best, "duel": duel,
            "keepers": [name for name in names if final.mean(name, "train_kept") == 1],
            "order": order, "free": next((words[w] for w in REFERENCES if w in words), None),
        }  # fmt: skip

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        """Figures that mean less than they seem to."""
        lost, constraints = row["zero_one"], row["constraints"]
        gain, error = row["train_target_gain"], row.get("tracking_error", 0.0)
        counts = row.get("test_counts", (SMALL,))
        return _words(
            "warnings",
            config,
            row=row,
            guessing=row["train_accuracy"] <= 1 / len(config.classes) + CHANCE,
            still=gain == 0 and not any(lost) and max(map(abs, constraints)) < 1e-3,
            error=error if error > max(NEAR, *map(abs, constraints)) else 0.0,
            near=NEAR if row["train_violation"] <= NEAR and row["train_kept"] < 1 else 0.0,
            worst=lost.index(max(lost)),
            capped=_capped(config, row, error),
            smallest=counts.index(min(counts)) if min(counts) < SMALL else None,
        )

    def page(self, config: Any) -> Page:
        (title,) = _words("title", config)
        parts = {"test": "test", "train": "train", "val": "validation"}
        columns = metrics(PAGE, parts, config=config, allowed=_allowed(config))
        return Page(
            title=title,
            question=_words("question", config, rule=self.rule(config)),
            metrics=tuple(sorted(columns, key=lambda metric: not metric.headline)),
            panels=panels(PAGE, "panels", config=config),
            entries={
                **dict.fromkeys(_PROTECTED, config.protected),
                "test_accuracies": config.classes,
            },
            references=tuple(
                name for name, method in config.methods.items() if method.method in REFERENCES
            ),
            glossary=glossary(PAGE, config.methods),
        )


def _score(config: Continual) -> Callable[[Row], tuple[float, ...]]:
    """The smaller the better: what is forgotten, the target's accuracy, the largest constraint.

    Protected classes are judged where the constraints live, the target on validation data; or all
    classes on validation data. Test figures are never looked at.
    """
    if config.choose_by == "validation":
        return lambda row: (-row["val_accuracy"],)
    return lambda row: (row["train_excess"], -row["val_target_accuracy"], row["train_violation"])


def _allowed(config: Continual) -> str:
    (text,) = paragraphs(PAGE, "allowed", config=config)
    return text


def _words(block: str, config: Continual, **values: Any) -> tuple[str, ...]:
    return paragraphs(PAGE, block, config=config, allowed=_allowed(config), **values)


def _word(config: Continual, name: str) -> str:
    """The method of a name, such as `sonex` of `sonex-rho-10@3`."""
    family = name if name in config.methods else name.rpartition("@")[0]
    return config.methods[family].method if family in config.methods else name


def _capped(config: Continual, row: Row, error: float) -> list[str]:
    """Classes that are forgotten although their multiplier is the most that the penalty can pay."""
    if "penalty" not in row or "multipliers" not in row:
        return []
    cap, multipliers = row["penalty"] / len(config.protected), row["multipliers"]
    if max(multipliers) > (1 + 1e-3) * cap:  # a squared hinge has no such limit
        return []
    return [
        name
        for name, value, price in zip(
            config.protected, row["constraints"], multipliers, strict=True
        )
        if price >= (1 - 1e-3) * cap and value > max(NEAR, error)
    ]


TASK = ContinualTask()
