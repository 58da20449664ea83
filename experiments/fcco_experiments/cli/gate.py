"""The command `fcco gate`: is a new model worse than the old one on any segment of a table?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import ConfigError
from .display import Printer, printable
from .options import PATH

if TYPE_CHECKING:
    import numpy as np

    from ..data.table import Table

LOSSES = ("log", "error", "squared", "absolute")
OWN = "the columns"  # losses that the table holds


@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@click.option("--data", type=PATH, required=True, metavar="FILE", help="csv, tsv or parquet.")
@click.option(
    "--segments",
    multiple=True,
    metavar="A,B,..",
    help="Columns; each value is a segment. COLUMN=VALUE divides the rows into that value and all "
    "others; a cell such as `a|b` is in several segments.",
)
@click.option(
    "--label",
    metavar="COLUMN",
    help="The label, if OLD and NEW are scores or predictions of it, not losses. COLUMN=VALUE asks "
    "whether the column has that value.",
)
@click.option(
    "--loss",
    type=click.Choice(LOSSES),
    help="With --label. log: log loss of scores from 0 to 1, the probability of the second value "
    "of the label; error: 0/1 error of predicted labels; squared or absolute error. Unless given: "
    "error if all predictions are values of the label, else log.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    metavar="X",
    help="How much worse the mean loss of a segment may be; 0.01 unless given, with --label.",
)
@click.option(
    "--level",
    type=click.FloatRange(0.5, 1, max_open=True),
    default=0.95,
    metavar="P",
    help="Confidence of all verdicts together; 0.95 unless given.",
)
@click.option(
    "--min-rows",
    type=click.IntRange(min=2),
    default=20,
    metavar="N",
    help="Segments with fewer rows are not tested; 20 unless given.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the verdicts as JSON on the last line."
)
@click.option("--quiet", is_flag=True, help="Show no table.")
def gate(
    old: str,
    new: str,
    data: Path,
    segments: Sequence[str],
    label: str | None,
    loss: str | None,
    tolerance: float | None,
    level: float,
    min_rows: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Test that a new model is not worse than the old one, on all rows and on each segment.

    OLD and NEW are columns of a table.

    A segment passes if its mean loss is worse by at most the tolerance, with 95 % confidence for
    all segments together. A segment with too few rows does not pass. Use rows on which no model was
    trained or chosen.

    Exit code: 0 if all pass, 1 if not, 2 for a mistake in the command or in the table.
    """
    import numpy as np

    from fcco.certificate import certify

    from ..data.sources import WrongData
    from ..data.table import read_table

    if old == new:
        raise ConfigError(f"OLD and NEW are the same column, `{old}`.")
    if label is None and loss is not None:
        raise ConfigError("--loss needs --label: without it the columns are losses themselves.")
    if label is None and tolerance is None:
        raise ConfigError("Say --tolerance in the units of your losses: how much worse is allowed?")
    try:
        table = read_table(data)
        if len(table.frame) == 0:
            raise ConfigError(f"--data: {data} has no rows.")
        kind, (before, after) = _losses(table, old, new, label, loss)
        members = _members(table, segments)
    except WrongData as error:
        hint = "" if label else " (Columns of predictions need --label.)"
        raise ConfigError(f"{error}{hint}") from error
    allowed = 0.01 if tolerance is None else tolerance
    if not max(np.abs(after).max(), np.abs(before).max()) < 1e150:  # the square is a number
        raise ConfigError(f"The losses of `{old}` and `{new}` are too large to be summed up.")
    certificate = certify(
        {name: after[rows] for name, rows in members.items()},
        allowed,
        reference={name: before[rows] for name, rows in members.items()},
        level=level,
        min_rows=min_rows,
    )
    rows = [
        {
            "segment": each.name, "rows": each.rows, "old": float(before[own].mean()),
            "new": float(after[own].mean()), "difference": each.value, "bound": each.bound,
            "verdict": each.verdict,
        }
        for each, own in zip(certificate.rows, members.values(), strict=True)
    ]  # fmt: skip
    found: dict[str, Any] = {
        "passed": certificate.passed, "loss": kind, "tolerance": allowed, "level": level,
        "segments": rows,
    }  # fmt: skip
    printer = Printer({"wide": False, "as_json": as_json, "quiet": quiet})
    worst = sorted(rows, key=lambda row: (row["verdict"] == "pass", -row["difference"]))
    printer.table([HEADS, *(cells(row) for row in worst)])
    printer.text(summary(found))
    printer.json(found)
    raise click.exceptions.Exit(0 if certificate.passed else 1)


HEADS = ("segment", "rows", "old", "new", "worse by", "at most", "verdict")


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    from ..stats import fixed

    numbers = (row[key] for key in ("old", "new", "difference", "bound"))
    shown = ("unknown" if number is None else fixed(number, 4) for number in numbers)
    return [row["segment"], f"{row['rows']:,}", *shown, row["verdict"]]


def summary(found: dict[str, Any]) -> str:
    """The overall verdict in words."""
    verdicts = [row["verdict"] for row in found["segments"]]
    parts = [f"{verdicts.count('pass')} of {len(verdicts)} pass"]
    parts += [f"{n} {w}" for w in ("fail", "too few rows") if (n := verdicts.count(w))]
    return (
        f"{'Passed' if found['passed'] else 'Not passed'}: {', '.join(parts)} (loss: "
        f"{found['loss']}, at most {found['tolerance']:g} worse; all bounds together hold with a "
        f"probability of {100 * found['level']:g} %)"
    )


def _losses(
    table: Table, old: str, new: str, label: str | None, loss: str | None
) -> tuple[str, list[np.ndarray]]:
    """The kind of loss, and the losses of both models."""
    import numpy as np

    from ..data.table import coded, numbers_in, plain_cells

    if label is None:
        return OWN, [numbers_in(table, "OLD", old), numbers_in(table, "NEW", new)]
    columns = {"OLD": old, "NEW": new}
    if loss in ("squared", "absolute"):
        truth = numbers_in(table, "label", label)
        power = 2 if loss == "squared" else 1
        found = [numbers_in(table, *column) for column in columns.items()]
        return loss, [np.abs(each - truth) ** power for each in found]
    codes, words = coded(table, "label", label)
    texts = [plain_cells(table, *column) for column in columns.items()]
    hard = label in table.frame and all(text.isin(words).all() for text in texts)
    if loss == "error" or (loss is None and hard):
        for text, (role, name) in zip(texts, columns.items(), strict=True):
            if not text.isin(words).any():
                raise ConfigError(
                    f"`{role}`: no row of `{name}` has a value of the label, which are "
                    f"{', '.join(words[:5])}."
                )
        truth = plain_cells(table, "label", label)
        return "error", [(text != truth).to_numpy(float) for text in texts]
    if len(words) != 2:
        raise ConfigError(
            f"`label`: {label} has {len(words)} values, and log loss is for two. Name one as "
            f"--label '{label}={words[0]}', or give predictions of it in OLD and NEW."
        )
    scores = [numbers_in(table, *column) for column in columns.items()]
    for score, (role, name) in zip(scores, columns.items(), strict=True):
        if score.min() < 0 or score.max() > 1:
            raise ConfigError(
                f"`{role}`: `{name}` goes from {score.min():g} to {score.max():g}: a log loss "
                "needs probabilities from 0 to 1. Another loss: --loss squared."
            )
    near = [np.where(codes == 1, score, 1 - score) for score in scores]
    return "log", [-np.log(np.maximum(each, 1e-6)) for each in near]


def _members(table: Table, segments: Sequence[str]) -> dict[str, np.ndarray]:
    """The rows of each segment, all rows first."""
    import numpy as np

    from ..data.table import MOST_CATEGORIES, coded, memberships

    found = {"all rows": np.arange(len(table.frame))}
    for name in (part.strip() for each in segments for part in each.split(",") if part.strip()):
        column = table.frame.get(name)
        if column is not None and column.str.contains("|", regex=False).any():
            matrix, words = memberships(table, [name])
        else:
            codes, words = coded(table, "segments", name)
            if len(words) > MOST_CATEGORIES:
                raise ConfigError(
                    f"--segments: {name} has {len(words):,} different values; up to "
                    f"{MOST_CATEGORIES} are tested. Make classes of it."
                )
            matrix = codes[:, None] == np.arange(len(words))
        for word, rows in zip(words, matrix.T, strict=True):
            text = word if "=" in name else f"{name} = {word}"
            found[printable(text)] = np.flatnonzero(rows)
    return found
