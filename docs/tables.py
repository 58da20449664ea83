"""Write the tables of pages anew, from the registry of methods and from published runs.

    python -m docs.tables

A table follows a line `<!-- methods: COLUMN | COLUMN -->`, whose columns are facts of the
registry, or `<!-- table: NAME WORDS -->` with a name of `TABLES`, which is called with the words.
`tests/test_tables.py` finds a table that is not up to date.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fcco_experiments import sweep

from docs import paper
from fcco.methods import table
from studies import afrisenti, demo, many_groups, no_regressions, publish, small_batches
from studies.convergence import __main__ as convergence
from studies.estimators import __main__ as estimators
from studies.group_dro import cards as group_dro_cards
from studies.group_dro import report as group_dro
from studies.identities import __main__ as identities
from studies.untuned import constraints as untuned_limits
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


def processes() -> list[list[str]]:
    """What objectives add to a step of DDP, as `benchmarks.processes` measured it."""
    found = json.loads((DOCS / "results/step-cost/processes.json").read_text())["rows"]
    took = {(each["processes"], each["objective"]): each["milliseconds"] for each in found}
    rows = [["processes", "mean loss, ms", "`CVaRGroupDRO` adds, ms", "`constrained` adds, ms"]]
    for number in sorted({number for number, _ in took}):
        plain = took[number, "mean"]
        added = [f"{took[number, name] - plain:.2f}" for name in ("groups", "limits")]
        rows.append([str(number), f"{plain:.2f}", *added])
    return rows


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


def settings(first: str, names: dict[str, str]) -> list[list[str]]:
    """Rows of a table of settings: what the page calls them, and their names in the run."""
    found = publish.table("automatic-settings")
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
    found = publish.table("automatic-settings")
    names = {
        "the rule": "fcco",
        "fixed, 6.7": "SONEX 1",
        "uniform weights": "uniform",
        "OOA": "OOA",
    }
    rows = [[shown, *(f"{v:.3f}" for v in found["networks"][n])] for shown, n in names.items()]
    return [["", *found["cells"]], *rows]


# Tables of `fcco compare`: a column is a figure and how it is shown, "±3" with the deviation.

Figures = dict[str, dict[str, dict[str, float]]]
DATA = {
    "fairness": {"adult": "Adult", "compas": "COMPAS"},
    "continual": {"weather": "weather", "bdd100k-subset": "BDD100K"},
}


def compare(*folders: str) -> Figures:
    """Figures of each method, from one folder or several."""
    found = [publish.table(folder)["methods"] for folder in folders]
    return {name: own for each in found for name, own in each.items()}


def cells(own: dict[str, dict[str, float]], columns: Iterable[str], scale: float = 1) -> list[str]:
    """The figures of a method."""
    row = []
    for key, form in (column.split() for column in columns):
        figure = own.get(key)
        if figure is None:
            row.append("-")
        elif form[0] != "±":
            row.append(format(scale * figure["mean"], form))
        else:
            mean, std = (f"{scale * figure[k]:.{form[1:]}f}" for k in ("mean", "std"))
            row.append(f"{mean} ± {std}")
    return row


def compared(columns: dict[str, str], *folders: str, first: str = "method") -> list[list[str]]:
    """All methods."""
    rows = [[name, *cells(own, columns.values())] for name, own in compare(*folders).items()]
    return [[first, *columns], *rows]


def beside(
    columns: dict[str, str],
    sides: dict[str, Figures],
    names: dict[str, list[str]],
    head: list[str],
    scale: float = 1,
) -> list[list[str]]:
    """Some methods on two data sets.

    Args:
        columns: what is shown of each.
        sides: the figures by data set.
        names: the first cells of the row of each method.
        head: of these cells.
        scale: of all figures.
    """  # fmt: skip
    for side in sides:
        first, *rest = columns
        head = [*head, f"{side}: {first}", *rest]
    rows = [head]
    for name, own in names.items():
        shown = (cells(side[name], columns.values(), scale) for side in sides.values())
        rows.append([*own, *(cell for each in shown for cell in each)])
    return rows


def tried(folder: str) -> dict[str, str]:
    """The number of settings of each method of a sweep."""
    found = sweep.read(DOCS / "results" / folder)
    assert found is not None, folder
    counts = Counter(entry["method"] for entry in found["settings"])
    return {name: str(count) for name, count in counts.items()}


WORST = {"AUC": "train_auc ±4", "worst": "train_violation ±4"}
INSIDE = {"inside": "train_inside ±3"}


def fairness_short() -> list[list[str]]:
    """Settings tried, and figures of the usual methods, on both data sets."""
    counts = tried("fairness-adult-full-sweep") | tried("fairness-adult-automatic-sweep")
    own = ("automatic", "sonex", "alexr2", "sox", "sonx", "icppac", "erm")
    sides = {
        title: compare(f"fairness-{data}", f"fairness-{data}-automatic")
        for data, title in DATA["fairness"].items()
    }
    columns = {"AUC": "test_auc .4f", "gap": "test_gap .3f", "excess": "train_violation .4f"}
    names = {name: [name, counts.get(name, "-")] for name in own}
    return beside(columns, sides, names, ["method", "settings tried"])


LEARNED = {
    "rho": "penalty g", "gain, test": "test_target_gain ±3",
    "forgetting, test": "test_forgetting ±3", "forgetting, train": "train_forgetting ±3",
    "kept, train": "train_kept .1f",
    "worst, train": "train_violation ±3",
}  # fmt: skip


def continual_short(form: str = ".1f") -> list[list[str]]:
    """In percent, by the images that the constraints use."""
    penalties = ("automatic", "sonex", "sox")
    blocks = {  # the setting, the end of a method's name, its methods
        "training": ("seen", "", (*penalties, "weighted", "replay")),
        "held-out": ("held-out", "", (*penalties, "weighted", "replay")),
        "split": ("held-out", "-split", penalties),
        "-": ("seen", "", ("finetune",)),
    }
    keys = {"gain": "test_target_gain", "lost": "test_forgetting", "all classes": "test_accuracy"}
    columns = {title: f"{key} {form}" for title, key in keys.items()}
    rows: list[list[str]] = []
    for images, (setting, end, methods) in blocks.items():
        sides = {t: compare(f"continual-{d}-{setting}") for d, t in DATA["continual"].items()}
        names = {m + end: [m, images] for m in methods}
        found = beside(columns, sides, names, ["method", "images"], scale=100)
        rows = rows + found[1:] if rows else found
    return rows


def untuned() -> list[list[str]]:
    """Ours without a setting: the problems, in other units and with small batches."""
    found = publish.table("untuned")["constraints"]
    rows = [["objective / violation", "original", *untuned_limits.VARIANTS]]
    for name in untuned_limits.PROBLEMS:
        ends = ["", *(f" / {variant}" for variant in untuned_limits.VARIANTS)]
        rows.append([name, *(_kept(found[name + end]["fcco"]) for end in ends)])
    return rows


_SIDE_BY_SIDE = {
    "adult": "Adult",
    "compas": "COMPAS",
    "convex": "convex",
    "sampled": "1,000 sampled",
    "docs": "docs' problem",
}


def _beside(labels: dict[str, str]) -> list[list[str]]:
    """Methods with their defaults, on the problems that peers were run on."""
    found = publish.table("untuned")["constraints"]
    rows = [
        [label, *(_kept(found[name][method]) for name in _SIDE_BY_SIDE)]
        for method, label in labels.items()
    ]
    return [["objective / violation", *_SIDE_BY_SIDE.values()], *rows]


def untuned_short() -> list[list[str]]:
    """Ours without a setting, the defaults of peers, and the best of each library, tuned."""
    kept = ("Cooper simultaneous", "Cooper augmented", "HCT nuPI", "HCT PBM", "HCT SSG")
    rows = _beside({"fcco": "**fcco, no setting**", **{name: name for name in kept}})
    return [*rows, *_beside({"tuned": "best of all, tuned"})[1:]]


def untuned_peers() -> list[list[str]]:
    """All defaults, and the best tuned."""
    names = list(publish.table("untuned")["constraints"]["adult"])
    labels = {name: name for name in names if name != "HCT ALM"}  # the figures of the next
    labels |= {"Cooper alternating": "Cooper alternating (= HCT ALM)", "tuned": "best tuned"}
    return _beside(
        {"fcco": "**fcco, no setting**", **{k: labels[k] for k in labels if k != "fcco"}}
    )


def untuned_sampled() -> list[list[str]]:
    """The defaults of peers on the sampled problem, in other units and with small batches."""
    found = publish.table("untuned")["constraints"]
    ends = ["", *(f" / {variant}" for variant in untuned_limits.VARIANTS)]
    return [
        ["objective / violation", "original", *untuned_limits.VARIANTS],
        *(
            [name, *(_kept(found[f"sampled{end}"][name]) for end in ends)]
            for name in found["sampled / values x 100"]
        ),
    ]


def _kept(row: dict[str, float]) -> str:
    return f"{row['objective']:.4g} / {row['violation']:+.3f}"


TABLES: dict[str, Callable[..., list[list[str]]]] = {
    "settings": settings_defaults,
    "settings-gamma": settings_gamma,
    "settings-networks": settings_networks,
    "settings-shape": settings_shape,
    "settings-width": settings_width,
    "paper-theory": paper.theory,
    "paper-experiments": paper.experiments,
    "processes": processes,
    "step-cost": step_cost,
    "step-cost-cpu": step_cost_cpu,
    "step-cost-gpu": step_cost_gpu,
    "convergence": lambda output: convergence.relative(publish.table("convergence"), output),
    "estimators": lambda: estimators.summary(estimators.published()),
    "estimators-short": lambda: estimators.summary(
        estimators.published(), "ours", *(n for n in estimators.RIVALS if n != "GridSearch")
    ),
    "group-dro-cards": group_dro_cards.published,
    "group-dro-networks": group_dro.networks,
    "group-dro-networks-short": group_dro.networks_short,
    "group-dro-heads": group_dro.heads,
    "group-dro-eigenvalues": group_dro.eigenvalues,
    "identities": lambda *words: identities.table(identities.published(" ".join(words))),
    "identities-short": lambda: identities.table(
        identities.published("end to end"), "AUC", "TPR", "largest excess", "within", "proved"
    ),
    "identities-groups": lambda: identities.by_group(identities.published("end to end")),
    "demo": demo.table,
    "many-groups": many_groups.table,
    "no-regressions": no_regressions.published,
    "afrisenti": afrisenti.published,
    "fairness": lambda data: compared(
        {"test AUC": "test_auc ±4", "test gap": "test_gap ±3", "train AUC": "train_auc ±4",
         "train worst": "train_violation ±4"},
        f"fairness-{data}-automatic", f"fairness-{data}",
    ),
    "fairness-paper": lambda data: compared(
        WORST | {"gap": "train_gap ±3"} | INSIDE, f"fairness-{data}-paper"
    ),
    "fairness-residuals": lambda: compared(
        {"stationarity": "kkt_stationarity ±3",
         "with the best multipliers": "kkt_best_stationarity ±3",
         "least singular value": "singular_value_violated ±3"},
        "fairness-adult-automatic", "fairness-adult",
    ),
    "fairness-short": fairness_short,
    "continual": lambda data: compared(LEARNED, f"continual-{data}"),
    "continual-rho": lambda: compared(
        {"gain, training": "train_target_gain ±3", "gain, test": "test_target_gain ±3",
         "lost, test": "test_forgetting ±3", "kept, training": "train_kept .2f"},
        "continual-weather-rho", first="penalty",
    ),
    "continual-short": continual_short,
    "continual-unseen": lambda: continual_short("±1"),
    "group-dro-ablation": lambda data, name: compared(
        {"train CVaR": "train_cvar ±3", "test CVaR": "test_cvar ±3",
         "tracking error": "tracking_error ±3"},
        f"group-dro-{data}-{name}",
    ),
    "small-batches": small_batches.published,
    "untuned": untuned,
    "untuned-short": untuned_short,
    "untuned-peers": untuned_peers,
    "untuned-sampled": untuned_sampled,
    "xrisk": lambda: xrisk.table(xrisk.published()),
    "xrisk-short": lambda: xrisk.short_table(xrisk.published()),
}  # fmt: skip


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
