"""What a reader must know about a run: figures that mean less than they seem to."""

from __future__ import annotations

from ...task import Row
from .config import Continual
from .told import listed, points, share_of

__all__ = ["warnings"]

SMALL = 50
"""A test class with fewer images says little: one of them is more than two points."""
NEAR = 0.01
"""A logistic loss that rose by no more than this counts as kept, and a gap below it as noise."""
CHANCE = 0.05
"""A mean accuracy of the classes no further above that of guessing is that of guessing."""


def warnings(config: Continual, row: Row) -> tuple[str, ...]:
    """Figures that mean less than they seem to."""
    found, lost = [], row["zero_one"]
    constraints, error = row["constraints"], row.get("tracking_error", 0.0)
    gain, accuracy = row["train_target_gain"], row["train_target_accuracy"]
    number = len(config.classes)
    if row["train_accuracy"] <= 1 / number + CHANCE:
        found.append(
            f"Fell apart: the mean accuracy of the {number} classes on training data is "
            f"{share_of(row['train_accuracy'])}, hardly that of guessing."
        )
    elif gain == 0 and not any(lost) and max(map(abs, constraints)) < 1e-3:
        found.append("Did not move: nothing was gained or lost. Raise the learning rate.")
    elif gain <= 0:
        found.append(
            f"Nothing was learned: the accuracy of {config.target} on training data is "
            f"{share_of(accuracy)} and was {share_of(accuracy - gain)} before. Lower the penalty, "
            "or train longer."
        )
    if error > max(NEAR, *map(abs, constraints)):
        found.append(
            f"The method does not see its constraints: its running values are off by {error:.3g} "
            "(root mean square), more than any true value. Draw more samples of each class, "
            "lower gamma or the learning rate."
        )
    worst = max(range(len(lost)), key=lost.__getitem__)
    if row["train_violation"] <= NEAR and row["train_kept"] < 1:
        found.append(
            f"Kept in name only: no protected class has a logistic loss more than {NEAR:g} above "
            f"the old one, but {config.protected[worst]} lost {points(lost[worst])} of accuracy on "
            "training data."
        )
    found += _too_small(config, row, error)
    counts = row.get("test_counts", ())
    if counts and min(counts) < SMALL:
        least = min(range(number), key=counts.__getitem__)
        found.append(
            f"Small test classes: {config.classes[least]} has {counts[least]} images, and one of "
            f"them is {points(1 / counts[least])} of its accuracy. Trust means over seeds alone."
        )
    return tuple(found)


def _too_small(config: Continual, row: Row, error: float) -> list[str]:
    """A multiplier at the most that the penalty can pay, for a class that is forgotten."""
    if "penalty" not in row or "multipliers" not in row:
        return []
    cap, multipliers = row["penalty"] / len(config.protected), row["multipliers"]
    if max(multipliers) > (1 + 1e-3) * cap:  # a squared hinge has no such limit
        return []
    names = [
        name
        for name, value, own in zip(config.protected, row["constraints"], multipliers, strict=True)
        if own >= (1 - 1e-3) * cap and value > max(NEAR, error)
    ]
    if not names:
        return []
    return [
        f"Penalty too small for {listed(names)}: the multiplier is at the most that rho = "
        f"{row['penalty']:g} can give, {cap:.3g}, and the loss is still above the old one "
        f"(by up to {row['train_violation']:.3g}). Raise rho."
    ]
