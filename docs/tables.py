"""Write the tables of pages anew, from the registry of methods and from published runs.

    python -m docs.tables

A table follows a line `<!-- methods: COLUMN | COLUMN -->`, whose columns are facts of the
registry, or `<!-- table: NAME WORDS -->` with a name of `TABLES`, which is called with the words.
`tests/test_tables.py` finds a table that is not up to date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fcco.methods import table
from studies import frontier
from studies.estimators import __main__ as estimators
from studies.group_dro import report as group_dro
from studies.identities import __main__ as identities
from studies.xrisk import __main__ as xrisk

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "src/fcco/__init__.py", *sorted(DOCS.rglob("*.md"))]
MARK = re.compile(r"(<!-- (?P<kind>methods|table): (?P<words>.*?) -->\n\n)(\|.*\n)*")

MODELS = {
    "mlp64": "MLP 2x64",
    "mlp256": "MLP 2x256",
    "cnn": "small CNN",
    "distilbert-128": "DistilBERT, 128 x 128 tokens",
    "resnet50-64": "ResNet-50, 64 x 224²",
    "resnet50-256": "ResNet-50, 256 x 224²",
}


def methods(columns: str) -> list[list[str]]:
    """Facts of the registry, separated by |."""
    head, *rows = table(columns=[column.strip() for column in columns.split("|")])
    return [head, *([f"`{row[0]}`", *row[1:]] for row in rows)]


def steps(device: str) -> dict[str, dict[str, Any]]:
    """What `benchmarks.overhead` measured, by model."""
    return json.loads((DOCS / f"results/step-cost/{device}.json").read_text())["models"]


def model_name(key: str) -> str:
    """The name of a model of `benchmarks.overhead`."""
    first, _, compiled = key.partition(", ")
    return MODELS[first] + f", {compiled}" * bool(compiled)


def step_cost() -> list[list[str]]:
    """All defaults, relative to a plain step."""
    rows = [["", "plain step, ms", "`CVaRGroupDRO`, 1,000 groups", "`constrained`, 306 limits"]]
    for key, each in steps("cpu").items():
        cells = [f"{each[column]:.2f}" for column in ("defaults", "constrained")]
        rows.append([f"CPU, {model_name(key)}", f"{each['plain_ms']:.2f}", *cells])
    for key, each in steps("h200").items():
        if "compiled" not in key:
            cells = [f"{each[column]['ratio']:.2f}" for column in ("defaults", "constrained")]
            rows.append([f"H200, {model_name(key)}", f"{each['plain_ms']:.2f}", *cells])
    return rows


def step_cost_cpu() -> list[list[str]]:
    """Every column of the CPU."""
    keys = ("defaults", "ema", "msvr", "forward_bound", "constrained", "by_hand", "cooper", "hct")
    rows = [["model", "plain step, ms", *(f"`{key}`" for key in keys)]]
    for model, each in steps("cpu").items():
        cells = ["-" if each[key] is None else f"{each[key]:.2f}" for key in keys]
        rows.append([model_name(model), f"{each['plain_ms']:.2f}", *cells])
    return rows


def step_cost_gpu() -> list[list[str]]:
    """Every column of the GPU: the ratio, and launches added."""
    keys = (
        "defaults", "sixteen", "constrained", "average_precision", "cvar_by_hand", "by_hand",
    )  # fmt: skip
    rows = [["model", "plain step, ms", *(f"`{key}`" for key in keys)]]
    for model, each in steps("h200").items():
        cells = [f"{each[key]['ratio']:.2f} (+{each[key]['launches']})" for key in keys]
        rows.append([model_name(model), f"{each['plain_ms']:.2f}", *cells])
    return rows


SETTINGS = "results/automatic-settings.json"  # of benchmarks.untuned.settings


def settings(first: str, names: dict[str, str]) -> list[list[str]]:
    """Rows of a table of settings: what the page calls them, and their names in the run."""
    found = json.loads((DOCS / SETTINGS).read_text())
    rows = [[first, *(f"lr {lr:g}" for lr in found["lrs"])]]
    for shown, name in names.items():
        rows.append([shown, *(f"{mean:.3f}" for mean in found["rows"][name])])
    return rows


def settings_defaults() -> list[list[str]]:
    """The defaults beside other methods."""
    return settings("", {
        "**all defaults**": "defaults",
        "uniform weights": "uniform",
        "online weights (OOA for CVaR), step 0.01": "OOA",
        r"moving average and quantile by hand, $\gamma=0.1$": "EMA + quantile",
        'SONEX as published (`smoothing=0.1, gamma=0.1, correction="auto", read="old"`)':
            "SONEX as published",
    })  # fmt: skip


def settings_gamma() -> list[list[str]]:
    """Fixed gammas."""
    fixed = {name: f"gamma {name}" for name in ("0.05", "0.2", "0.5", "0.9")}
    return settings(r"$\gamma$", {"auto": "defaults", **fixed})


def settings_shape() -> list[list[str]]:
    """Shapes of a batch of 64."""
    names = {f"{k} × {64 // k}": f"{k} x {64 // k}" for k in (2, 4, 8, 16, 64)}
    last = names.popitem()
    return settings(
        "groups × samples", {**names, "32 × 2 (the rule)": "defaults", last[0]: last[1]}
    )


def settings_width() -> list[list[str]]:
    """Widths of the rounded kink."""
    return settings("width", {
        "0 (no smoothing)": "no smoothing",
        "the rule": "defaults",
        r"fixed, 0.67 ($\lambda=0.1$)": "smoothing 0.1",
    })  # fmt: skip


def settings_networks() -> list[list[str]]:
    """A network that can fit every group."""
    found = json.loads((DOCS / SETTINGS).read_text())
    names = {
        "the rule": "fcco",
        "fixed, 6.7": "SONEX 1",
        "uniform weights": "uniform",
        "OOA": "OOA",
    }
    rows = [[shown, *(f"{v:.3f}" for v in found["networks"][n])] for shown, n in names.items()]
    return [["", *found["cells"]], *rows]


TABLES: dict[str, Callable[..., list[list[str]]]] = {
    "settings": settings_defaults,
    "settings-gamma": settings_gamma,
    "settings-networks": settings_networks,
    "settings-shape": settings_shape,
    "settings-width": settings_width,
    "step-cost": step_cost,
    "step-cost-cpu": step_cost_cpu,
    "step-cost-gpu": step_cost_gpu,
    "estimators": lambda: estimators.summary(estimators.published()),
    "estimators-short": lambda: estimators.summary(
        estimators.published(), "ours", *(n for n in estimators.RIVALS if n != "GridSearch")
    ),
    "frontier": frontier.table,
    "group-dro-networks": group_dro.networks,
    "group-dro-networks-short": group_dro.networks_short,
    "group-dro-heads": group_dro.heads,
    "group-dro-samples": group_dro.samples_table,
    "group-dro-eigenvalues": group_dro.eigenvalues,
    "identities": lambda *words: identities.table(identities.published(" ".join(words))),
    "identities-short": lambda: identities.table(
        identities.published("end to end"), "AUC", "TPR", "largest excess", "within", "proved"
    ),
    "identities-groups": lambda: identities.by_group(identities.published("end to end")),
    "xrisk": lambda: xrisk.table(xrisk.published()),
    "xrisk-short": lambda: xrisk.short_table(xrisk.published()),
}


def renewed(text: str) -> str:
    """The text with every table written anew."""

    def write(match: re.Match[str]) -> str:
        words = match["words"]
        name, *more = words.split()
        head, *rows = methods(words) if match["kind"] == "methods" else TABLES[name](*more)
        lines = [head, ["---"] * len(head), *rows]
        return match[1] + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    return MARK.sub(write, text)


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(renewed(each.read_text()))
