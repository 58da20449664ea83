"""How many samples the baselines need to reach the training CVaR that SONEX ends with.

    python -m research.group_dro_samples FOLDER [--long FOLDER2] [--json]

Reads the runs of `fcco compare group-dro` (`--long`: a second folder of the same experiment, in
which baselines ran for more epochs; a baseline that is there is taken from there). SONEX is the
setting with the lowest final training CVaR among those whose method is sonex. For each other
method it prints two figures, both from mean curves over seeds, straight between evaluations:

* `needs`: samples until its CVaR is at SONEX's final one, as a multiple of all of SONEX's samples;
  `> x`: it was not within its own samples, x times SONEX's;
* `matched after`: samples after which SONEX was at its final CVaR, as a share of its samples.

Runs that diverged or did not finish are left out.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fcco_experiments.store import Comparison, FolderError, load_comparison

Curve = Sequence[tuple[float, float]]
"""Samples and training CVaR at each evaluation."""
GOAL = 1.5
RIVALS = ("sonx", "ooa")
"""Methods of the goal: the fastest of their settings shall need 1.5 times SONEX's samples."""


def curves(comparison: Comparison) -> dict[str, tuple[str, list[Curve]]]:
    """For each name with finished runs: its method, and samples and training CVaR per seed."""
    found: dict[str, tuple[str, list[Curve]]] = {}
    for run in comparison.runs:
        if run.result is None or run.diverged is not None:
            continue
        line = [(row["samples"], row["train_cvar"]) for row in run.rows]
        found.setdefault(run.name, (run.method["method"], []))[1].append(line)
    return found


def samples_to_reach(lines: Sequence[Curve], target: float) -> float | None:
    """Samples after which a mean curve over seeds is first at or below a value; None if never.

    Args:
        lines: one per seed: (samples, value) at each evaluation. The k-th evaluations are
            averaged; where a seed has fewer, the mean ends there.
        target: the value.

    Between two evaluations the curve is a straight line.

    Example:
        >>> samples_to_reach([[(0, 1.0), (100, 0.5)], [(0, 0.8), (100, 0.3)]], 0.65)
        50.0
    """
    before: tuple[float, float] | None = None
    for places in zip(*lines, strict=False):
        samples, value = (fmean(column) for column in zip(*places, strict=True))
        if value <= target:
            if before is None or not math.isfinite(before[1]):
                return samples
            share = (before[1] - target) / (before[1] - value)
            return before[0] + share * (samples - before[0])
        before = samples, value
    return None


def ending(own: list[Curve]) -> tuple[float, float]:
    """Samples and CVaR at the end, means over seeds."""
    ends = [line[-1] for line in own]
    return sum(end[0] for end in ends) / len(ends), sum(end[1] for end in ends) / len(ends)


def compare(
    short: dict[str, tuple[str, list[Curve]]], long: dict[str, tuple[str, list[Curve]]]
) -> dict[str, Any]:
    """The figures of every baseline against SONEX."""
    ours = {name: own for name, (word, own) in short.items() if word == "sonex"}
    if not ours:
        raise SystemExit("The folder has no finished run of sonex.")
    name = min(ours, key=lambda each: ending(ours[each])[1])
    samples, final = ending(ours[name])
    rows = []
    for other, (word, own) in {**short, **long}.items():
        if word == "sonex":
            continue
        drawn, reached = ending(own)
        needed, matched = samples_to_reach(own, final), samples_to_reach(ours[name], reached)
        rows.append(
            {
                "method": other,
                "word": word,
                "final": reached,
                "samples": drawn,
                "seeds": len(own),
                "needs": None if needed is None else needed / samples,
                "more_than": drawn / samples if needed is None else None,
                "matched_after": None if matched is None else matched / drawn,
            }
        )
    result = {"sonex": name, "final": final, "samples": samples, "seeds": len(ours[name])}
    return result | {"baselines": rows, "goal": GOAL, "met": met(rows)}


def met(rows: list[dict[str, Any]]) -> bool | None:
    """Whether each of SONX and OOA needs 1.5 times the samples; None if their runs are too short.

    Needing that many is also shown by not being there after as many.
    """
    rivals = [row for row in rows if row["word"] in RIVALS]
    if any(row["needs"] is not None and row["needs"] < GOAL for row in rivals):
        return False
    if not rivals or any(row["needs"] is None and row["more_than"] < GOAL for row in rivals):
        return None
    return True


def shown(told: dict[str, Any]) -> str:
    """The same for people."""
    lines = [
        f"{told['sonex']}: training CVaR {told['final']:.4f} after {told['samples']:,.0f} samples "
        f"({told['seeds']} seeds)",
        f"{'method':22}{'final CVaR':>11}{'samples':>12}{'needs':>9}{'matched after':>15}",
    ]
    for row in told["baselines"]:
        many = row["needs"]
        needs = f"> {row['more_than']:.2f}" if many is None else f"{many:.2f}"
        share = row["matched_after"]
        matched = "never" if share is None else f"{100 * share:.0f} %"
        lines.append(
            f"{row['method']:22}{row['final']:11.4f}{row['samples']:12,.0f}{needs:>9}{matched:>15}"
        )
    lines += [
        f"> {row['more_than']:.2f}: {row['method']} is not there within its "
        f"{row['samples']:,.0f} samples."
        for row in told["baselines"]
        if row["needs"] is None
    ]
    verdict = {True: "met", False: "missed", None: "open, the baselines must run longer (--long)"}
    lines.append(f"Goal, {GOAL} times the samples for SONX and OOA: {verdict[told['met']]}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--long", type=Path)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    try:
        short = curves(load_comparison(asked.folder))
        long = curves(load_comparison(asked.long)) if asked.long else {}
    except FolderError as error:
        raise SystemExit(str(error)) from error
    told = compare(short, long)
    print(json.dumps(told) if asked.json else shown(told))


if __name__ == "__main__":
    main()
