"""The report's words, columns and plots."""

from __future__ import annotations

from ...task import Metric, Page, Panel
from .config import Continual
from .judge import allowed, references, score_rule
from .told import TOLD, Told, listed

__all__ = ["page"]

_NAMES = {"train": "train", "val": "validation", "test": "test"}
_PROTECTED = ("constraints", "zero_one", "test_zero_one", "multipliers", "best_multipliers")
_CLASSES = ("test_accuracies",)


def page(config: Continual) -> Page:
    """What a reader sees, in order."""
    told = TOLD.get(config.data, Told(config.data))
    return Page(
        title=f"Learn {config.target}, forget nothing: {told.title}",
        question=_question(config, told),
        metrics=_metrics(config),
        panels=_panels(config),
        entries={
            **dict.fromkeys(_PROTECTED, config.protected),
            **dict.fromkeys(_CLASSES, config.classes),
        },
        references=references(config),
    )


def _question(config: Continual, told: Told) -> tuple[str, ...]:
    count = len(config.protected)
    return (
        f"A model that compares images with sentences tells classes apart: {told.images}, each "
        f'taken for the class whose sentence, such as "{config.prompt.format(config.target)}", is '
        f"the most similar. It knows {listed(config.protected)}. Now it shall learn "
        f"{config.target}, and get worse at none of the others: the usual fine-tuning on a new "
        "class forgets old ones.",
        f"What is minimised is the global contrastive loss of the pairs of {config.target}: every "
        "image shall be more similar to its own caption than to the captions of all pairs of "
        "protected classes in the data, and every caption likewise; a batch shows a few of them, "
        f"the rest is remembered. {_number(count)} constraint{'s' if count > 1 else ''} "
        f"stand{'' if count > 1 else 's'} beside it, one for each protected class: its mean "
        "logistic loss over the training images may not exceed that of the old model, which was "
        "measured once.",
        _model(config),
        _methods(config),
        f"All methods start from the same old model and draw the same batches, {config.epochs} "
        f"times {config.steps_per_epoch} of {config.batch} pairs of {config.target} and "
        f"{config.negatives} of the others, with {config.per_class} images of "
        f"{_all(config)} for the constraints, {_seeds(len(config.seeds))}. Settings are chosen by "
        f"the same rule for each: {score_rule(config)}.",
        f"Constraints are on losses, but what a user notices is accuracy: a class counts as kept "
        f"if it loses no more than {allowed(config)} on training data, and as retained if it loses "
        "nothing. Whether that holds on test data too is another question, which the test columns "
        f"answer. {told.trusted}",
    )


def _number(number: int) -> str:
    """At the beginning of a sentence."""
    words = ("One", "Two", "Three", "Four", "Five", "Six")
    return words[number - 1] if number <= len(words) else str(number)


def _all(config: Continual) -> str:
    some, number = config.classes_per_batch, len(config.protected)
    return (
        f"{some} of the {number} protected classes"
        if 0 < some < number
        else ("each protected class")
    )


def _seeds(number: int) -> str:
    return "from one seed" if number == 1 else f"from {number} seeds"


def _model(config: Continual) -> str:
    if config.image_backbone == "none":
        text = "The model here is small: two linear maps into a common space of "
        text += f"{config.width} dimensions, from generated vectors and made-up ones for words."
        if config.hidden:
            text = text.replace("two linear maps", "a small network and a linear map")
    else:
        start = "pretrained" if config.pretrained else "from random weights"
        text = f"The model has two backbones, {config.image_backbone} for images and "
        text += (
            f"{config.text_backbone} for texts ({start}), and a projection of each into a common "
        )
        text += {
            "projections": "space. The backbones stay as they are; the projections are trained.",
            "text": "space. The projections and the backbone of texts are trained.",
            "all": "space. All of it is trained.",
        }[config.train]
    if config.old:
        text += " The old model was given."
    else:
        text += " The old model comes from training on pairs of the protected classes alone, for "
        text += f"{config.old_epochs} epochs."
    if config.heads:
        text += " The sentences of each protected class have a small correction of their own "
        text += f"(rank {config.heads}), zero at the start, so that a class can be kept by "
        text += "weights that are in no other class's sentences."
    if config.extra_pairs:
        text += f" Further pairs for {config.target} come from another collection."
    return text


def _methods(config: Continual) -> str:
    """A sentence for each method that the config has."""
    words = {each.method for each in config.methods.values()}
    return " ".join(text for word, text in _METHODS.items() if word in words) or (
        "No method is given."
    )


_METHODS = {
    "sonex": "SONEX adds a penalty to the loss, rho times the mean of the parts by which "
    "constraints are violated, with the corner rounded off; it keeps a running value of every "
    "constraint, corrected for the steps of the weights, and averages gradients over steps (Adam). "
    "A finite rho suffices for such a penalty.",
    "sox": "SOX squares these parts instead (Li et al., 2024): a small violation then costs nearly "
    "nothing, so rho must be large; its running values are plain averages.",
    "sonx": "SONX keeps the corner and the corrected running values, and steps without averaged "
    "gradients.",
    "alexr2": "ALEXR2 takes SONEX's penalty and solves a row of easier problems that hold the "
    "weights near where they are.",
    "weighted": "Weighted adds the mean loss of the protected classes with a fixed weight: it may "
    "trade one class for another.",
    "replay": "Replay contrasts the pairs of all classes, old ones too, and asks for nothing more.",
    "finetune": "Finetune, the contrastive loss alone, keeps nothing; it is there for reference.",
}


def _metrics(config: Continual) -> tuple[Metric, ...]:
    metrics: list[Metric] = []
    for part in ("test", "train", "val"):
        name, test = _NAMES[part], part == "test"
        train = part == "train"
        metrics += [
            Metric(
                f"{part}_target_gain", f"gain, {name}", "higher", 3, part != "train",
                f"accuracy on {config.target}, less that of the old model",
            ),
            Metric(
                f"{part}_forgetting", f"forgetting, {name}", "lower", 3, part != "val",
                "largest accuracy that a protected class lost; below 0 all became better",
            ),
            Metric(
                f"{part}_kept", f"kept, {name}", "higher", 2, train,
                f"share of runs in which no protected class lost more than {allowed(config)}",
            ),
            Metric(
                f"{part}_retained", f"retained, {name}", "higher", 2, test,
                "retention ratio: share of runs in which no protected class lost any accuracy",
            ),
            Metric(
                f"{part}_violation", f"worst constraint, {name}", "lower", 4, train,
                "largest rise of a protected class's logistic loss; at most 0 is asked",
            ),
            Metric(f"{part}_target_accuracy", f"{config.target}, {name}", "higher", 3),
            Metric(
                f"{part}_target_loss", f"loss of {config.target}, {name}", "lower", 3,
                meaning="logistic loss of choosing among the sentences of all classes",
            ),
            Metric(
                f"{part}_protected_accuracy", f"protected, {name}", "higher", 3,
                meaning="mean accuracy of the protected classes",
            ),
            Metric(
                f"{part}_protected_change", f"change of protected, {name}", "higher", 3,
                meaning="the same, less that of the old model",
            ),
            Metric(
                f"{part}_accuracy", f"accuracy, {name}", "higher", 3,
                meaning="mean accuracy of all classes, each counted once",
            ),
            Metric(
                f"{part}_excess", f"beyond the limit, {name}", "lower", 3,
                meaning=f"accuracy that a protected class lost beyond {allowed(config)}",
            ),
            Metric(
                f"{part}_forgotten_images", f"images forgotten, {name}", "lower", 1,
                meaning="net loss of rightly classified images, summed over protected classes",
            ),
        ]  # fmt: skip
    return (*sorted(metrics, key=lambda metric: not metric.headline), *_END)


_KKT = "with {} multipliers: length of the Lagrangian's gradient on all training data"
_END = (
    Metric("penalty", "rho", "none", 2, True, "weight of the penalty on violated constraints"),
    Metric("seconds", "seconds", "none", 1, True, "training time of a run"),
    Metric("objective", "contrastive loss", "lower", meaning="of the target, all training pairs"),
    Metric(
        "tracking_error", "tracking error", "lower",
        meaning="how far a method's running values of the constraints are from the true ones "
        "(root mean square over classes)",
    ),
    Metric("kkt_stationarity", "KKT stationarity", "lower", meaning=_KKT.format("its own")),
    Metric("kkt_feasibility", "KKT feasibility", "lower"),
    Metric("kkt_complementarity", "KKT complementarity", "lower"),
    Metric(
        "kkt_best_stationarity", "KKT stationarity, best multipliers", "lower",
        meaning=_KKT.format("the best possible"),
    ),
    Metric("kkt_best_complementarity", "KKT complementarity, best multipliers", "lower"),
    Metric(
        "samples_per_second", "samples a second", digits=0,
        meaning="in training, evaluations not counted",
    ),
)  # fmt: skip


def _panels(config: Continual) -> tuple[Panel, ...]:
    target, limit = config.target, config.forget_limit
    gain, lost = f"gain of {target}", "largest loss of accuracy"
    return (
        Panel(
            "tradeoff", "test_target_gain", "What is learned, what is forgotten: up and left",
            f"{gain}, test", "train_forgetting", f"{lost} of a protected class, train",
            0.0, limit,
        ),
        Panel(
            "tradeoff", "test_target_gain", "The same on test data", f"{gain}, test",
            "test_forgetting", f"{lost} of a protected class, test", 0.0, limit,
        ),
        Panel("curve", "train_target_gain", f"Accuracy gained on {target}, train", gain),
        Panel("curve", "test_target_gain", f"Accuracy gained on {target}, test", gain),
        Panel(
            "curve", "train_forgetting",
            "Largest accuracy that a protected class lost, train", lost, reference=limit,
        ),
        Panel(
            "curve", "test_forgetting",
            "Largest accuracy that a protected class lost, test", lost, reference=limit,
        ),
        Panel(
            "curve", "train_violation",
            "Worst constraint on training data: at most 0 is asked", "largest rise of a loss",
            reference=0.0,
        ),
        Panel("curve", "objective", f"Contrastive loss of {target}, all pairs", "loss"),
        Panel(
            "change", "test_accuracies", "Accuracy of every class before and after (test data)",
            "test accuracy by class",
        ),
        Panel(
            "dots", "zero_one", "Accuracy lost by every protected class on training data",
            "accuracy lost by class, training data", reference=0.0,
        ),
        Panel(
            "dots", "test_zero_one", "Accuracy lost by every protected class on test data",
            "accuracy lost by class, test data", reference=0.0,
        ),
        Panel(
            "family", "zero_one", "Accuracy lost by every protected class (train), by method",
            "accuracy lost", reference=0.0,
        ),
        Panel(
            "family", "constraints", "Rise of every protected class's loss (train), by method",
            "loss - old loss", reference=0.0,
        ),
        Panel("family", "multipliers", "Multipliers: the price of each class", "multiplier"),
    )  # fmt: skip
