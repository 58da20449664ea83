"""Pictures beside other libraries and methods, from the runs in docs/results."""

from __future__ import annotations

import statistics
from pathlib import Path

from fcco_experiments.report.style import colour
from fcco_experiments.stats import paired
from matplotlib.axes import Axes

from studies.estimators import __main__ as estimators_study
from studies.identities import __main__ as identities_study
from studies.identities.comments import WORDS
from studies.identities.training import END_TO_END
from studies.xrisk import __main__ as ranking_study
from studies.xrisk.__main__ import TITLES
from studies.xrisk.problems import metrics_of

from .. import tables as pages
from . import card
from .card import ERM, GRID, IMAGES, INK, LIMIT, MUTED, OURS, PAGE
from .races import GREY, legend


def draw() -> list[Path]:
    """All of them."""
    return [ranking(), identities(), estimators(), steps()]


def rows(axes: Axes, number: int) -> None:
    """One row for each figure, from the top; vertical lines only."""
    card.quiet(axes, 12.5)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set(ylim=(number - 0.5, -0.5), yticks=())


def ranking() -> Path:
    """The metric of ours less that of LibAUC and of cross-entropy, with 95 % intervals."""
    found = ranking_study.published()
    figures = [(data, metric) for data in TITLES for metric in metrics_of(data)]
    high, told = 30, []
    with card.figure(520, 118 + high * len(figures), 15) as figure:
        height = 72 * figure.get_figheight()
        axes = figure.add_axes((0.38, 50 / height, 0.58, high * len(figures) / height))
        rows(axes, len(figures))
        axes.axvline(0, color=MUTED, linewidth=1.4)
        axes.set(xlim=(-0.055, 0.055))
        axes.set_xticks((-0.04, -0.02, 0, 0.02, 0.04), ("−0.04", "−0.02", "0", "+0.02", "+0.04"))
        for row, (data, metric) in enumerate(figures):
            mine = ranking_study.Cell(data, metric, "ours")
            rivals = zip(ranking_study.rivals(mine), ("libauc", "erm"), (-0.15, 0.15), strict=True)
            for rival, word, shift in rivals:
                gap = paired(found[mine], found[rival])
                axes.errorbar(
                    gap.mean, row + shift, xerr=gap.high - gap.mean, fmt="o", color=colour(word),
                    markersize=7, elinewidth=2, markeredgewidth=0, zorder=3,
                )  # fmt: skip
                if word == "libauc":
                    told.append(f"{TITLES[data]} {metric} {gap.mean:+.3f}")
            beside = axes.get_yaxis_transform()
            first = row == 0 or figures[row - 1][0] != data
            if first:
                axes.text(
                    -0.62, row, TITLES[data], transform=beside, va="center", fontweight="bold",
                    fontsize=13,
                )  # fmt: skip
                axes.plot(
                    (-0.62, 1), (row - 0.5,) * 2, color=GRID, linewidth=1, transform=beside,
                    clip_on=False,
                )  # fmt: skip
            axes.text(
                -0.03, row, metric, transform=beside, va="center", ha="right", color=MUTED,
                fontsize=12.5,
            )  # fmt: skip
        figure.text(
            0.03, 1 - 24 / height, "Metric of fcco less the other's, test data, 95 %", va="center"
        )
        legend(
            figure, [("LibAUC", colour("libauc")), ("cross-entropy", ERM)], 1 - 50 / height,
            (0.02, 0.2),
        )  # fmt: skip
        axes.set_xlabel("fcco is better →", loc="right", fontsize=12.5, color=MUTED)
        alt = f"Metric on test data, fcco less LibAUC's loss for it: {', '.join(told)}."
        return card.save(figure, IMAGES / "ranking.svg", alt)


def identities() -> Path:
    """The false-positive rate of each identity, plainly trained and constrained."""
    found = identities_study.published(END_TO_END)
    plain, ours = (
        [identities_study.rates(found[method][1], place) for place in range(len(WORDS))]
        for method in ("erm", "ours")
    )
    limit = (
        statistics.fmean(run["fpr"]["test"] for run in found["ours"][1]) + identities_study.LIMIT
    )
    order = sorted(range(len(WORDS)), key=lambda place: -plain[place])
    names, high = list(WORDS), 25
    with card.figure(520, 132 + high * len(order), 15) as figure:
        height = 72 * figure.get_figheight()
        axes = figure.add_axes((0.3, 50 / height, 0.66, high * len(order) / height))
        rows(axes, len(order))
        axes.set(xlim=(0, 0.4))
        axes.set_xticks((0, 0.1, 0.2, 0.3, 0.4), ("0", "10", "20", "30", "40 %"))
        axes.axvline(limit, color=LIMIT, linewidth=1.4, linestyle=(0, (3, 2)))
        axes.annotate(
            f"limit {100 * limit:.1f} %", (limit, 1), (4, 5), xycoords=("data", "axes fraction"),
            textcoords="offset points", color=LIMIT, fontsize=12.5,
        )  # fmt: skip
        for row, place in enumerate(order):
            axes.plot((ours[place], plain[place]), (row, row), color=OURS, alpha=0.45, linewidth=2)
            axes.plot(
                plain[place], row, "o", color=PAGE, markeredgecolor=ERM, markeredgewidth=2,
                markersize=8, zorder=3,
            )  # fmt: skip
            axes.plot(ours[place], row, "o", color=OURS, markersize=9, zorder=4)
            axes.annotate(
                names[place], (0, row), (-10, 0), textcoords="offset points", ha="right",
                va="center", fontsize=12.5,
            )  # fmt: skip
        figure.text(0.03, 1 - 24 / height, "Harmless comments called toxic, test data", va="center")
        legend(
            figure, [("plainly trained", ERM), ("fcco.constrained", OURS)], 1 - 50 / height,
            (0.02, 0.28), hollow=("plainly trained",),
        )  # fmt: skip
        axes.set_xlabel("of the comments that name it", loc="right", fontsize=12.5, color=MUTED)
        worst = order[0]
        alt = (
            f"False-positive rates of {len(order)} identities. Plainly trained: from "
            f"{min(plain):.3f} to {plain[worst]:.3f} ({names[worst]}); with a constraint for each: "
            f"from {min(ours):.3f} to {max(ours):.3f}, all below the limit of {limit:.3f}."
        )
        return card.save(figure, IMAGES / "identities.svg", alt)


RIVALS = {
    "ExponentiatedGradient, boosting": ("ExpGrad, boosting", False),
    "ExponentiatedGradient, logistic": ("ExpGrad, logistic", True),
}
"""What is in colour beside the estimators: its label, and whether its marks are hollow."""
TABLES = {
    "adult": "Adult", "compas": "COMPAS", "bank": "bank", "meps": "MEPS", "credit": "credit",
}  # fmt: skip
SHORT = {"demographic_parity": "parity", "equalized_odds": "odds"}


def estimators() -> Path:
    """Accuracy relative to ours, and the gap, of fairlearn's methods and OxonFair."""
    study = estimators_study
    found = study.published()
    figures = [(table, constraint) for table in TABLES for constraint in SHORT]
    high, told, shade = 32, [], colour("fairlearn")
    with card.figure(560, 134 + high * len(figures), 15) as figure:
        height = 72 * figure.get_figheight()
        panels = [
            figure.add_axes((left, 50 / height, wide, high * len(figures) / height))
            for left, wide in ((0.24, 0.4), (0.69, 0.28))
        ]
        for axes in panels:
            rows(axes, len(figures))
        panels[0].set(xlim=(-0.023, 0.017))
        panels[0].set_xticks((-0.02, -0.01, 0, 0.01), ("−0.02", "−0.01", "0", "+0.01"))
        panels[1].set(xlim=(0, 0.095))
        panels[1].set_xticks((0, 0.02, 0.05, 0.08), ("0", "0.02", "0.05", "0.08"))
        panels[1].axvline(0.02, color=LIMIT, linewidth=1.4, linestyle=(0, (3, 2)))
        for row, (table, constraint) in enumerate(figures):
            mine = study.Cell(table, constraint, study.OURS)
            base, gap = (study.mean(found[mine], key) for key in ("accuracy", "gap"))
            for label, names in study.RIVALS.items():
                rival = study.best(found, mine, names)
                assert rival is not None
                accuracy, other = (study.mean(found[rival], key) for key in ("accuracy", "gap"))
                for axes, value in zip(panels, (accuracy - base, other), strict=True):
                    if label not in RIVALS:
                        axes.plot(value, row, "o", **GREY, markersize=8, markeredgewidth=0)
                        continue
                    axes.plot(
                        value, row, "o", color=PAGE if RIVALS[label][1] else shade, markersize=8,
                        markeredgecolor=shade, markeredgewidth=2, zorder=3,
                    )  # fmt: skip
                if label in RIVALS:
                    told.append(f"{table} {SHORT[constraint]} {label} {accuracy - base:+.4f}")
            for axes, value in zip(panels, (0, gap), strict=True):
                axes.plot(value, row, "o", color=OURS, markersize=9, zorder=4)
            beside = panels[0].get_yaxis_transform()
            if constraint == "demographic_parity":
                panels[0].text(
                    -0.55, row, TABLES[table], transform=beside, va="center", fontsize=13,
                    fontweight="bold",
                )  # fmt: skip
            panels[0].text(
                -0.04, row, SHORT[constraint], transform=beside, va="center", ha="right",
                color=MUTED, fontsize=12.5,
            )  # fmt: skip
        figure.text(0.03, 1 - 24 / height, "Accuracy and gap on test rows", va="center")
        entries = [("fcco", OURS), *((label, shade) for label, _ in RIVALS.values())]
        hollow = [label for label, empty in RIVALS.values() if empty]
        legend(
            figure, [*entries, ("others", MUTED)], 1 - 50 / height, (0.02, 0.14, 0.46, 0.77),
            hollow,
        )  # fmt: skip
        for axes, text in zip(panels, ("accuracy less fcco's", "gap (← better)"), strict=True):
            axes.set_title(text, loc="left", fontsize=12.5, color=INK, pad=6)
        alt = f"Accuracy of fairlearn's methods less that of fcco: {', '.join(told)}."
        return card.save(figure, IMAGES / "estimators.svg", alt)


def steps() -> Path:
    """Time of a step with all defaults relative to a plain one."""
    figures = [
        (f"{device}, {pages.model_name(key)}", each["defaults"], each["plain_ms"])
        for device in ("CPU", "H200")
        for key, each in pages.steps(device.lower()).items()
        if "compiled" not in key
    ]
    figures = [
        (name, each["ratio"] if isinstance(each, dict) else each, plain)
        for name, each, plain in figures
    ]
    high, told = 44, []
    with card.figure(520, 96 + high * len(figures), 15) as figure:
        height = 72 * figure.get_figheight()
        axes = figure.add_axes((0.04, 50 / height, 0.92, high * len(figures) / height))
        rows(axes, len(figures))
        axes.set(xlim=(0.9, 2.2))
        axes.set_xticks((1, 1.5, 2), ("1", "1.5", "2"))
        axes.axvline(1, color=MUTED, linewidth=1.4)
        for row, (name, ratio, plain) in enumerate(figures):
            axes.text(1.01, row - 0.22, f"{name}, {plain:g} ms", va="center", fontsize=12.5)
            axes.plot((1, ratio), (row + 0.2,) * 2, color=OURS, alpha=0.45, linewidth=2, zorder=2)
            axes.plot(ratio, row + 0.2, "o", color=OURS, markersize=9, zorder=4)
            axes.text(
                max(ratio, 1) + 0.03, row + 0.2, f"{ratio:.2f}", va="center", fontsize=12.5,
                color=OURS, fontweight="bold",
            )  # fmt: skip
            told.append(f"{name}: {ratio:.2f}")
        figure.text(0.03, 1 - 24 / height, "Time of a step ÷ that of a plain one", va="center")
        alt = (
            "Time of a step of CVaRGroupDRO with all defaults, 1,000 groups, over that of a plain "
            f"one. {'; '.join(told)}."
        )
        return card.save(figure, IMAGES / "step-cost.svg", alt)
