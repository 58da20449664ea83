"""Results as files of docs/results and as tables: what was measured, with what, at which commit."""

from __future__ import annotations

import functools
import gzip
import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fcco_experiments import environment
from fcco_experiments.stats import paired, spread
from fcco_experiments.store import clean

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
RUNS, TABLE = "runs.jsonl.gz", "table.json"
FACTS = ("revision", "python", "torch", "numpy", "fcco", "processor", "cores")
_PLACES = ("--out", "--cache", "--arrays", "--commit")  # of this machine; each with a value


@functools.cache
def machine(device: str) -> dict[str, Any]:
    """As it was at first: what is published changes the checkout."""
    return environment.describe(device)


def about(device: str = "cpu", commit: str | None = None) -> dict[str, Any]:
    """The command of this process, the commit, versions and the machine.

    Args:
        device: where it was measured.
        commit: of the code, where git is not at hand.
    """
    found = dict(machine(device))
    if found["device"] != "cpu":
        found["processor"] = found["device"]
    words, given = ["python"], iter(sys.orig_argv[1:])  # -m studies.NAME ...
    for word in given:
        if word in _PLACES:
            next(given, None)
        elif word != "--publish" and word.partition("=")[0] not in _PLACES:
            words.append(word)
    said = {"command": " ".join(words)} | {key: found[key] for key in FACTS}
    return said | ({"revision": commit} if commit else {})


def refuse_dirty(facts: Mapping[str, Any]) -> None:
    """Stop before anything is published that no commit can make again."""
    revision = facts["revision"]
    if revision is None or revision.endswith("-dirty"):
        raise SystemExit(
            f"Nothing is published: results name the commit that made them, and this is {revision}."
            " Commit your changes, or name it by --commit."
        )


def write(
    folder: Path,
    figures: Mapping[str, Any],
    runs: Mapping[str, Any] | None = None,
    device: str = "cpu",
    commit: str | None = None,
) -> None:
    """Publish what a study or a benchmark found, if it was made at a clean commit.

    Args:
        folder: of `table.json` and `runs.jsonl.gz`.
        figures: by name.
        runs: results by the key of their job.
        device: as for `about`.
        commit: likewise.
    """
    facts = about(device, commit)
    refuse_dirty(facts)
    folder.mkdir(parents=True, exist_ok=True)
    table = json.dumps(clean({"meta": facts, **figures}), indent=1, ensure_ascii=False)
    (folder / TABLE).write_text(table + "\n")
    if runs is not None:
        lines = [json.dumps({"job": key, "trace": trace}) + "\n" for key, trace in runs.items()]
        # Without a time: the same runs are the same bytes.
        (folder / RUNS).write_bytes(gzip.compress("".join(lines).encode(), mtime=0))


def conclude(
    options: Namespace,
    name: str,
    figures: Mapping[str, Any],
    runs: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> None:
    """What a study ends with, by its options: files in docs/results, a line of JSON."""
    if options.publish:
        write(RESULTS / name, figures, runs, device, options.commit)
    if options.json:
        print(json.dumps(clean(figures)))


def table(name: str) -> dict[str, Any]:
    """The figures in a folder of results."""
    return json.loads((RESULTS / name / TABLE).read_text())


def runs(name: str) -> Path:
    """The runs in a folder of results, as a cache of `Runner`."""
    return RESULTS / name / RUNS


def plain(rows: Iterable[Sequence[str]]) -> str:
    """A table for a terminal, from its head and its rows; without marks of Markdown."""
    table = [[cell.replace("**", "").replace("\\|", "|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if k else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )


def mean_std(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation over seeds."""
    mean, deviation = spread(values)
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def ahead_by(one: Sequence[float], other: Sequence[float], digits: int = 3) -> str:
    """The paired difference with its 95 % interval; bold where that excludes 0."""
    gap = paired(one, other)
    text = f"{gap.mean:+.{digits}f} ± {gap.high - gap.mean:.{digits}f}"
    return f"**{text}**" if gap.decided else text
