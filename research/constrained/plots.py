"""Pictures of the comparison, small PNG files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fcco_experiments.report.style import TOKENS, colour

from .report import Result, target_of
from .training import LIMIT

_COLOURS = {"ours": colour("fcco"), "Cooper": colour("cooper"), "HCT": colour("hct")}
_MARKERS = "osD^vP*X"


def _look(result: Result, number: int) -> tuple[str, str]:
    side = "ours" if result.ours else result.method.split()[0]
    return _COLOURS[side], _MARKERS[number % len(_MARKERS)]


def frontiers(results: dict[str, Sequence[Result]], path: Path) -> None:
    """Objective against violation: the chosen settings with their shifted limits, seed means."""
    plt = _pyplot()
    figure, axes = _panels(plt, len(results))
    for axis, (problem, found) in zip(axes, results.items(), strict=True):
        level = target_of(found)  # a little above the best at the limit
        if not math.isfinite(level):  # nobody got there
            level = min(t.tail_objective for result in found for t in result.base)
        for number, result in enumerate(found):
            shade, marker = _look(result, number)
            points = [
                (
                    sum(t.tail_violation for t in result.runs[shift]) / len(result.base),
                    sum(t.tail_objective for t in result.runs[shift]) / len(result.base),
                )
                for shift in sorted(result.runs)
            ]
            axis.plot(*zip(*points, strict=True), marker=marker, color=shade, ms=4, lw=1,
                      alpha=0.8, label=result.method)  # fmt: skip
        axis.axvline(LIMIT, color="grey", lw=0.8, ls=":")
        axis.set(title=problem, xlabel="largest violation", xlim=(-0.01, 0.04),
                 ylim=(level * 0.96, level * 1.04))  # fmt: skip
    axes[0].set_ylabel("objective")
    _legend(figure, axes)
    _save(figure, path)


def progress(results: dict[str, Sequence[Result]], path: Path) -> None:
    """Best objective so far within the limit, first fresh seed, against gradient evaluations."""
    plt = _pyplot()
    figure, axes = _panels(plt, len(results))
    for axis, (problem, found) in zip(axes, results.items(), strict=True):
        for number, result in enumerate(found):
            shade, marker = _look(result, number)
            best, xs, ys = float("inf"), [], []
            trace = result.base[0]
            for done, objective, violation in zip(
                trace.evaluations, trace.objective, trace.violation, strict=True
            ):
                if violation <= LIMIT:
                    best = min(best, objective)
                if best < float("inf"):
                    xs.append(done)
                    ys.append(best)
            axis.plot(xs, ys, color=shade, marker=marker, markevery=0.2, ms=4, lw=1, alpha=0.8,
                      label=result.method)  # fmt: skip
        axis.set(title=problem, xlabel="gradient evaluations")
    axes[0].set_ylabel(f"best objective with violation <= {LIMIT}")
    _legend(figure, axes)
    _save(figure, path)


def bias(measured: dict[str, list[float]], kappa: float, path: Path) -> None:
    """Error of the penalised quantity against the batch size."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.6))
    names = {"gap": "|gap|", "hinge": "[|gap| - kappa]_+"}
    for axis, (kind, title) in zip(axes, names.items(), strict=True):
        for source, shade in (("batch", TOKENS["batch"][0]), ("tracked", colour("fcco"))):
            values = [abs(value) for value in measured[f"{kind} {source}"]]
            axis.loglog(measured["batch"], values, "o-", color=shade, label=f"{source} value")
        axis.axhline(kappa, color="grey", ls=":", label="kappa")
        axis.set(title=f"bias of {title}", xlabel="batch size", ylabel="absolute value")
        axis.set_xticks(measured["batch"], [f"{size:.0f}" for size in measured["batch"]])
        axis.minorticks_off()
        axis.legend(fontsize=7)
    figure.subplots_adjust(wspace=0.35)
    _save(figure, path)


def _panels(plt: Any, number: int) -> tuple[Any, list[Any]]:
    figure, axes = plt.subplots(1, number, figsize=(3.4 * number, 4.2), squeeze=False)
    return figure, list(axes[0])


def _legend(figure: Any, axes: list[Any]) -> None:
    """One for all panels, below them."""
    entries = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(entries.values(), entries.keys(), fontsize=7, ncol=6, loc="lower center")
    figure.subplots_adjust(bottom=0.3, wspace=0.3)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, bbox_inches="tight")
    _pyplot().close(figure)
