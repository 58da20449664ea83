"""Continual learning: fine-tune an image-text model on a new class, forget none of the old ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from torch import nn

from ... import backbones
from ...task import Method, Metric, Panel, Row, Rule
from ..base import SECONDS, SPEED, BaseTask
from .model import Continual
from .problem import ContinualProblem
from .training import METHODS, Contrasting, build

__all__ = ["TASK", "Continual", "ContinualProblem", "ContinualTask"]

REFERENCES = ("finetune",)
"""Methods that do not try to keep anything."""
SMALL = 50
"""A test class with fewer images says little: one of them is more than two points."""
NEAR = 0.01
"""A logistic loss that rose by no more than this counts as kept, and a gap below it as noise."""
CHANCE = 0.05
"""A mean accuracy of the classes no further above that of guessing is that of guessing."""

_PROTECTED = ("constraints", "zero_one", "test_zero_one", "multipliers")
AT_THE_END = (
    Metric("penalty", "rho", "none", 2, True, "weight of the penalty on violated constraints"),
    SECONDS,
    Metric("objective", "contrastive loss", "lower", meaning="contrastive loss of the target, all"
        " training pairs"),
    Metric("tracking_error", "tracking error", "lower", meaning="how far a method's running values"
        " of the constraints are from the true ones (root mean square over classes)"),
    SPEED,
)  # fmt: skip


class ContinualTask(BaseTask):
    """Contrastive fine-tuning under non-forgetting constraints."""

    name, template = "continual", "continual"
    config, problem = Continual, ContinualProblem
    methods, references = METHODS, REFERENCES
    limits: ClassVar[Mapping[str, float]] = {"constraints": 0.0, "zero_one": 0.0}

    def grid_name(self, config: Any) -> str:
        return "paper" if config.train == "all" else "wide"

    def load(self, config: Any) -> ContinualProblem:
        problem = ContinualProblem(config)
        for seed in config.seeds:  # once, before several processes begin with them
            problem.make_old(seed)
        return problem

    def wrong(self, config: Any) -> Iterator[tuple[tuple[str, ...], str]]:
        for side in ("image", "text"):
            key, name = f"{side}_backbone", getattr(config, f"{side}_backbone")
            try:
                kind = side if name == "none" else backbones.kind(name)
            except ValueError as error:
                yield (key,), str(error)
                continue
            texts = side == "image" and config.columns.text  # of a table, in the place of images
            if kind != side and not texts:
                yield (key,), f"`{key}: {name}` takes {kind}s, not {side}s."

    def build(self, config: Any, method: Method) -> Contrasting:
        return build(nn.Linear(1, 1), method, config, 2, 2)

    def words(self, block: str, config: Continual, **values: Any) -> tuple[str, ...]:
        return super().words(block, config, allowed=_allowed(config), **values)

    def rule(self, config: Any) -> Rule:
        """What is forgotten beyond the limit first, then the accuracy of the target."""
        (text,) = self.words("rule", config)
        if config.choose_by == "validation":
            return Rule(text, _score(config), objective="test_accuracy")
        return Rule(
            text, _score(config), objective="test_target_gain", constraint="train_excess",
            limit=0.0, limited=True,
        )  # fmt: skip

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

    def outcome(self, config: Continual, methods: Mapping[str, list[Row]]) -> dict[str, Any]:
        found = super().outcome(config, methods)
        final, words = found["final"], {_word(config, name): name for name in found["order"]}
        names = [
            n for n in final.rows if _word(config, n) not in REFERENCES and n not in final.early
        ]
        duel = None
        if "sonex" in words and "sox" in words:
            gap = final.difference(words["sonex"], words["sox"], "test_target_gain")
            duel = {"ours": words["sonex"], "theirs": words["sox"], "gap": gap}
        return found | {
            "names": names, "duel": duel, "free": words.get("finetune"),
            "keepers": [name for name in names if final.mean(name, "train_kept") == 1],
        }  # fmt: skip

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        """Figures that mean less than they seem to."""
        lost, constraints = row["zero_one"], row["constraints"]
        gain, error = row["train_target_gain"], row.get("tracking_error", 0.0)
        counts = row.get("test_counts", (SMALL,))
        return self.words(
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

    def once(self, config: Any) -> tuple[Metric, ...]:
        return AT_THE_END

    def card(self, config: Any) -> dict[str, str]:
        return self.described(
            config, title=config.data, asks=f"the samples of {config.data}",
            notes="Test accuracies are those of images that no training has seen; look at how many"
            " of each class there are.",
        )  # fmt: skip

    def entries(self, config: Any) -> dict[str, tuple[str, ...]]:
        return {**dict.fromkeys(_PROTECTED, config.protected), "test_accuracies": config.classes}

    def figures(self, config: Continual) -> Iterator[tuple[Metric, str]]:
        target, allowed = config.target, _allowed(config)
        meaning = f"accuracy on {target}, less that of the old model"
        yield Metric("target_gain", "gain", "higher", 3, meaning=meaning), "test val"
        meaning = (
            f"accuracy that a protected class lost beyond {allowed}; 0 is asked, and judged on"
        )
        meaning += " training data"
        yield Metric("excess", "forgotten beyond limit", "lower", meaning=meaning), "train"
        meaning = "largest accuracy that a protected class lost; below 0 all became better"
        yield Metric("forgetting", "forgetting", "lower", 3, meaning=meaning), "test train"
        meaning = f"share of runs in which no protected class lost more than {allowed}"
        yield Metric("kept", "kept", "higher", 2, meaning=meaning), "train"
        meaning = "retention ratio: share of runs in which no protected class lost any accuracy"
        yield Metric("retained", "retained", "higher", 2, meaning=meaning), "test"
        meaning = "largest rise of a protected class's logistic loss; at most 0 is asked"
        yield Metric("violation", "worst constraint", "lower", meaning=meaning), "train"
        meaning = f"accuracy on {target}"
        yield Metric("target_accuracy", "target accuracy", "higher", 3, meaning=meaning), ""
        meaning = f"logistic loss of {target}, of choosing among the sentences of all classes"
        yield Metric("target_loss", "target loss", "lower", 3, meaning=meaning), ""
        meaning = "mean accuracy of the protected classes"
        yield Metric("protected_accuracy", "protected", "higher", 3, meaning=meaning), ""
        meaning = "the same, less that of the old model"
        yield Metric("protected_change", "change of protected", "higher", 3, meaning=meaning), ""
        meaning = "mean accuracy of all classes, each counted once"
        yield Metric("accuracy", "accuracy", "higher", 3, meaning=meaning), ""
        meaning = "net loss of rightly classified images, summed over protected classes"
        yield Metric("forgotten_images", "images forgotten", "lower", 1, meaning=meaning), ""

    def panels(self, config: Continual) -> Iterator[Panel]:
        target, limit, lost = config.target, config.forget_limit, "largest loss of accuracy"
        gain = f"gain of {target}"
        for part, title in (
            ("train", "What is learned, what is forgotten: up and left"),
            ("test", "The same on test data"),
        ):
            yield Panel(
                "tradeoff", "test_target_gain", title, f"{gain}, test", f"{part}_forgetting",
                f"{lost} of a protected class, {part}", reference=0.0, x_reference=limit,
            )  # fmt: skip
        for part in ("train", "test"):
            yield Panel(
                "curve", f"{part}_target_gain", f"Accuracy gained on {target}, {part}", gain
            )
        for part in ("train", "test"):
            title = f"Largest accuracy that a protected class lost, {part}"
            yield Panel("curve", f"{part}_forgetting", title, lost, reference=limit)
        title = "Worst constraint on training data: at most 0 is asked"
        yield Panel("curve", "train_violation", title, "largest rise of a loss", reference=0.0)
        yield Panel("curve", "objective", f"Contrastive loss of {target}, all pairs", "loss")
        title = "Accuracy of every class before and after (test data)"
        yield Panel("change", "test_accuracies", title, "test accuracy by class")
        for key, part in (("zero_one", "training"), ("test_zero_one", "test")):
            title = f"Accuracy lost by every protected class on {part} data"
            label = f"accuracy lost by class, {part} data"
            yield Panel("dots", key, title, label, reference=0.0)


def _score(config: Continual) -> Callable[[Row], tuple[float, ...]]:
    """The smaller the better: what is forgotten, the target's accuracy, the largest constraint.

    Protected classes are judged where the constraints live, the target on validation data; or all
    classes on validation data. Test figures are never looked at.
    """
    if config.choose_by == "validation":
        return lambda row: (-row["val_accuracy"],)
    return lambda row: (row["train_excess"], -row["val_target_accuracy"], row["train_violation"])


def _allowed(config: Continual) -> str:
    """What a protected class may lose, in words."""
    limit = config.forget_limit
    return f"the larger of {limit} and one image" if limit > 0 else "one image"


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
