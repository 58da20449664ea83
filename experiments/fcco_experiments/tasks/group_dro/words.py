"""The report's words, columns and plots."""

from __future__ import annotations

from ...task import Metric, Page, Panel
from .config import GroupDRO
from .judge import references, score_rule
from .told import TOLD, Told, entries

__all__ = ["page"]

_NAMES = {"train": "train", "val": "validation", "test": "test"}


def page(config: GroupDRO) -> Page:
    """What a reader sees, in order."""
    told = TOLD.get(config.data, Told(config.data, "its class", "its groups"))
    return Page(
        title=f"The worst {_share(config)} of groups: {told.title}",
        question=_question(config, told),
        metrics=_metrics(config, told),
        panels=_panels(config, told),
        entries=entries(config.data),
        references=references(config),
    )


def _share(config: GroupDRO) -> str:
    return f"{100 * config.ratio:g} %"


def _question(config: GroupDRO, told: Told) -> tuple[str, ...]:
    if config.backbone == "none":
        network = "A small network" if config.hidden else "A linear classifier"
    else:
        network = f"A network ({config.backbone}"
        network += ", pretrained)" if config.pretrained else ", from random weights)"
    frozen = (
        " The network itself stays as it is; a classifier on top of it is trained."
        if config.backbone != "none" and config.train == "head"
        else ""
    )
    return (
        f"{network} learns {told.asked}. The samples come in groups: {told.groups}.{frozen} "
        "Usual training makes the average loss over all samples small, and rare or hard groups may "
        f"pay for it. Here the aim is the average loss of the worst {_share(config)} of groups, "
        "known as the conditional value at risk (CVaR).",
        "Which groups are the worst changes while the network learns. A threshold takes care of "
        "that: only what a group's loss exceeds it by counts, and the threshold is moved until "
        f"{_share(config)} of the groups lie above it; where that is no whole number, one group "
        f"counts in part. A batch shows {config.groups_per_batch} groups with {config.per_group} "
        "samples each, so the loss of a group is a noisy guess, and of most groups there is none. "
        "The methods differ in what they make of that.",
        _methods(config),
        f"All methods start from the same weights and draw the same number of samples, "
        f"{config.epochs} passes over the training data, with {_count(len(config.seeds))}. "
        f"Settings are chosen by the same rule for each: {score_rule(config)}. The CVaR in tables "
        "and plots is that of all samples, with the best threshold for them, whatever a method "
        "believes it to be.",
        f"{told.trusted} {told.without if config.distinct else told.repeats}".strip(),
    )


def _count(seeds: int) -> str:
    return "one seed" if seeds == 1 else f"{seeds} seeds"


def _methods(config: GroupDRO) -> str:
    """A sentence for each method that the config has."""
    words = {each.method for each in config.methods.values()}
    return " ".join(text for word, text in _METHODS.items() if word in words) or (
        "No method is given."
    )


_METHODS = {
    "sonex": "SONEX keeps a running value of every group's loss, corrected for the steps of the "
    "weights, rounds off the corner at the threshold, and averages gradients over steps (with "
    "momentum or Adam).",
    "sonx": "SONX keeps the same running values, with the corner and without averaged gradients.",
    "alexr2": "ALEXR2 keeps them too, and solves a row of easier problems that hold the weights "
    "near where they are.",
    "ooa": "OOA keeps a weight for each group instead and raises it where the loss of a batch is "
    "high; with CVaR no weight may exceed that of one in the worst groups, without it all weight "
    "may go to one group.",
    "erm": "ERM, the average over samples, ignores groups; it is there for reference.",
    "uniform": "Uniform is the average over groups, also for reference.",
}


def _metrics(config: GroupDRO, told: Told) -> tuple[Metric, ...]:
    metrics: list[Metric] = []
    for part in ("train", "test", "val"):
        name = _NAMES[part]
        metrics += [
            Metric(
                f"{part}_cvar",
                f"CVaR, {name}",
                "lower",
                headline=part != "val",
                meaning=f"average loss of the worst {_share(config)} of groups, best threshold",
            ),
            Metric(
                f"{part}_worst_accuracy",
                f"{told.worst}, {name}",
                "higher",
                3,
                headline=part == "test",
                meaning=told.worst_meaning,
            ),
            Metric(
                f"{part}_accuracy",
                f"accuracy, {name}",
                "higher",
                3,
                headline=part == "test",
                meaning="share of all samples that are classified rightly",
            ),
            Metric(
                f"{part}_group_accuracy",
                f"mean of groups, {name}",
                "higher",
                3,
                meaning="mean of the accuracies of the reported groups, each counted once",
            ),
            Metric(
                f"{part}_worst_loss",
                f"largest group loss, {name}",
                "lower",
                meaning="loss of the one group that has the largest",
            ),
            Metric(f"{part}_group_loss", f"group loss, {name}", "lower", meaning=_GROUP_LOSS),
            Metric(f"{part}_loss", f"loss, {name}", "lower", meaning="mean loss of all samples"),
        ]
    return (
        *sorted(metrics, key=lambda metric: not metric.headline),
        Metric("seconds", "seconds", "none", 1, headline=True, meaning="training time of a run"),
        Metric(
            "tracking_error",
            "tracking error",
            "lower",
            meaning="how far a method's running values of the group losses are from the true ones "
            "(root mean square over groups)",
        ),
        Metric("threshold", "threshold", meaning="the one that the method ended with"),
        Metric(
            "threshold_exact",
            "best threshold",
            meaning="the one that the true group losses ask for",
        ),
        Metric(
            "gram_smallest",
            "least eigenvalue",
            meaning="of the Gram matrix of the gradients of all group losses: above 0, no "
            "group's gradient can be made of the others' (assumption LBSV of the theory)",
        ),
        Metric(
            "gram_smallest_with_s",
            "least eigenvalue, with threshold",
            meaning="the same with the threshold as one more weight",
        ),
        Metric("gram_largest", "largest eigenvalue", meaning="of the same matrix"),
        Metric(
            "samples_per_second",
            "samples a second",
            digits=0,
            meaning="in training, evaluations not counted",
        ),
    )


_GROUP_LOSS = "mean of the group losses, each counted once"


def _panels(config: GroupDRO, told: Told) -> tuple[Panel, ...]:
    each, shown = told.each, told.worst
    return (
        Panel(
            "tradeoff",
            y="test_worst_accuracy",
            x="train_cvar",
            title="Does a lower CVaR in training help the worst groups of the test data?",
            label=shown,
            x_label="CVaR, train",
        ),
        Panel(
            "tradeoff",
            y="test_worst_accuracy",
            x="test_accuracy",
            title="What it costs on average (test data): up and right is better",
            label=shown,
            x_label="accuracy",
        ),
        Panel(
            "curve",
            y="train_cvar",
            title=f"Training: average loss of the worst {_share(config)} of groups",
            label="CVaR, train",
            log=True,
        ),
        Panel("curve", y="test_cvar", title="The same on test data", label="CVaR, test", log=True),
        Panel("curve", y="test_worst_accuracy", title=told.curve, label="accuracy"),
        Panel("curve", y="test_accuracy", title="Test accuracy over all samples", label="accuracy"),
        Panel(
            "curve",
            y="tracking_error",
            title="How far the running values are from the true group losses",
            label="tracking error",
            log=True,
        ),
        Panel(
            "change",
            y="losses",
            title=f"{each} before and after training (training data)",
            label="training loss by group",
            log=True,
        ),
        Panel(
            "dots",
            y="test_reported",
            title=f"Test accuracy of {told.reported}",
            label="test accuracy by group",
        ),
        Panel(
            "family",
            y="losses",
            title=f"{each} over training, by method",
            label="group loss",
            log=True,
        ),
        Panel(
            "family",
            y="weights",
            title="How much each group counts, by method",
            label="weight",
        ),
    )
