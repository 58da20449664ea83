"""The tables of docs/research/paper.md: what each item of the paper gave, from published runs."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from fcco_experiments import config, sweep, tasks

from studies import publish
from studies.convergence import __main__ as convergence
from studies.group_dro import report as group_dro

Figures = dict[str, dict[str, dict[str, float]]]
Rows = list[list[str]]
HEAD = ["in the paper", "here", "what it gave here", "the paper", "verdict"]
TITLES = {"celeba": "CelebA", "amazon": "Amazon"}
CLAIMED = ("sonex", "sonx", "ooa-cvar")  # what Figure 1 compares
TUNED = ("alexr2", "sonex", "sox", "sonx", "icppac")


def methods(folder: str) -> Figures:
    """Figures of `fcco compare`."""
    return publish.table(folder)["methods"]


def means(found: Figures, key: str, names: Iterable[str], digits: int, scale: float = 1) -> str:
    """The mean of a figure for several methods: "SONEX 0.927, SOX 0.930"."""
    return ", ".join(
        f"{name.upper()} {scale * found[name][key]['mean']:.{digits}f}" for name in names
    )


def span(values: Iterable[float], form: str) -> str:
    """From the smallest to the largest."""
    own = sorted(values)
    return f"{own[0]:{form}} to {own[-1]:{form}}"


def ends(found: Figures, key: str, form: str, names: Iterable[str] = TUNED) -> str:
    """The smallest and the largest mean of several methods."""
    return span((found[name][key]["mean"] for name in names if key in found[name]), form)


def penalties(found: Figures) -> str:
    """Gain and loss of each penalty in points: "SONEX 0.01: 93.4, 11.7"."""
    told = []
    for name, own in found.items():
        word, _, penalty = name.partition("-")
        pair = (100 * own[key]["mean"] for key in ("test_target_gain", "test_forgetting"))
        told.append(f"{word.upper()} {penalty}: {', '.join(f'{value:.1f}' for value in pair)}")
    return "; ".join(told)


def networks(key: str) -> str:
    """A figure of networks trained end to end, by data set."""
    runs, told = group_dro.published("networks"), []
    for data in group_dro.DATA:
        found = group_dro.by_name(group_dro.fresh(runs, data), CLAIMED)
        cells = [f"{fmean(run[key] for run in own):.3f}" for own in found.values()]
        told.append(f"{TITLES.get(data, data)} {', '.join(cells)}")
    return "; ".join(told)


def eigenvalues(name: str) -> str:
    """The smallest one of a method, by data set."""
    head, *rows = group_dro.eigenvalues()
    return ", ".join(f"{TITLES.get(row[0], row[0])} {row[head.index(name)]}" for row in rows)


def race(name: str) -> str:
    """Samples of a method relative to SONEX, from the smallest problem to the largest."""
    rows = convergence.relative(publish.table("convergence"), "last")
    cells = next(row[1:] for row in rows if row[0] == name)
    return span((float(cell.split()[0]) for cell in cells if cell[:1].isdigit()), ".1f")


def sizes(task: str, name: str, grid: str, names: Iterable[str]) -> str:
    """How many settings of each method a whole grid has."""
    own = tasks.get(task)
    whole = sweep.settings_of(sweep.read_grid(own, grid), config.load(own, name), limit=0)
    families = [setting.family for setting in whole]
    return ", ".join(f"{name.upper()} {families.count(name):,}" for name in names)


def theory() -> Rows:
    """Algorithms, assumptions, theorems and Tables 1 and 2."""
    adult = methods("fairness-adult")
    eigen, singular = "singular_value", "singular_value_violated"
    return [HEAD, *[
        ["Algorithm 1, SONEX",
         '`fcco.constrained(..., "sonex")`; groups: `CVaRGroupDRO(smoothing=0.1, gamma=0.1, '
         'correction="auto", read="old")`',
         "equal to a NumPy transcription to 1e-12 (`tests/test_transcription.py`)",
         "–", "holds"],
        ["Algorithm 2, ALEXR2", '`"alexr2"` in both', "the same",
         "line 13 has a factor too many (E11)", "holds, corrected"],
        ["Adam-type steps, their assumption, theorem and corollary", "any `torch.optim` optimizer",
         "as AdamW", "first step and lemma as printed are wrong (E22, E23)", "holds, corrected"],
        ["Tables 1 and 2: methods to compare with", "`fcco methods`",
         "SONX, SOX, OOA, OSS, ICPPAC, SSG, Li et al., Yang et al., Liu and Xu; "
         "MSVR as a correction",
         "OOA for CVaR, SONX, SOX, ICPPAC", "all here"],
        ["Table 1: order 5 instead of 6", "`python -m studies.convergence`",
         f"samples of SONEX: SONX needs {race('SONX')} times as many, ALEXR2 {race('ALEXR2')}",
         "orders of upper bounds", "fewer samples than SONX; orders cannot be told apart"],
        ["Table 2: the same under constraints", "the same, problems S3 and S3b",
         f"SOX (Li et al.) {race('SOX')}, ICPPAC {race('ICPPAC')} times those of SONEX",
         "orders of upper bounds", "as Table 1"],
        ["Assumption 3.2, A1 to A3", "`convex`, `monotone`, `weak_convexity`, `lipschitz` of "
         "outer functions", "compared with samples in tests; a method refuses what it has no "
         "theory for", "assumed", "checked"],
        ["Bounded noise", "`report()`", "standard errors of all tracked values", "assumed",
         "measured"],
        ["Lipschitz in mean (MLC0)", "–", "needed by `correction=\"theory\"` alone (E5)",
         "assumed", "cannot be checked from finitely many points"],
        ["Smallest eigenvalue (LBSV), Table 6", "`diagnostics.eigenvalues`",
         f"SONEX: {eigenvalues('sonex')}; automatic, which failed on CelebA: "
         f"{eigenvalues('automatic')}", "0.02 to 0.03; 0.27 to 0.90", "holds where training does"],
        ["Smallest singular value of constraints", "`diagnostics.constraint_condition`",
         f"Adult, all constraints: at most {max(m[eigen]['mean'] for m in adult.values()):.1e}; "
         f"the violated ones: {ends(adult, singular, '.2f', adult)}", "assumed for all",
         "does not hold; holds for the violated ones, which the proof uses"],
        ["Envelopes, Bregman distance, weak convexity; smoothed implies approximately stationary",
         "`fcco.outer.MoreauEnvelope`", "against brute force in tests; the rest follows", "–",
         "holds"],
        ["Approximately implies nearly stationary",
         "[proof](details/mathematics.md#notions-of-stationarity)",
         "with the constants of the proof; a counterexample without LBSV runs there",
         "without constants (E24, E25)", "holds, corrected"],
        ["Theorems and corollaries on SONEX and ALEXR2",
         "[settings](details/mathematics.md#settings-of-the-theorems)",
         "orders kept (E4, E9, E10, E12 to E14); accuracy 0.1 on a toy asks for $10^8$ steps",
         "$\\epsilon^{-5}$", "cannot be run"],
        ["KKT points, both propositions and the theorem", "`diagnostics.kkt`",
         "the violation left follows its [law](../concepts/laws.md)",
         "penalty above $m(C_g+1)/\\delta$: enough, not needed (E27)", "holds"],
    ]]  # fmt: skip


def experiments() -> Rows:
    """Figures 1 to 7, Tables 3 to 6 and grids."""
    printed = {name: methods(f"fairness-{name}-paper") for name in ("adult", "compas")}
    meant = {name: methods(f"fairness-{name}") for name in ("adult", "compas")}
    weather = methods("continual-weather")
    both, shown = ("sonex", "sox"), ("alexr2", "sox", "sonx")
    beta = methods("group-dro-amazon-beta")
    update = methods("group-dro-amazon-update")
    best = {
        kind: min(own["train_cvar"]["mean"] for name, own in update.items() if kind in name)
        for kind in ("adam", "momentum")
    }
    return [HEAD, *[
        ["Figure 1, training loss", "`fcco compare group-dro --data celeba --setting paper`, or "
         "`amazon`, `camelyon17` (not run); here `python -m studies.group_dro networks`",
         f"SONEX, SONX, OOA: {networks('train_cvar')}", "SONEX below both",
         "holds on smaller data; `report.html` draws the curves"],
        ["Figure 1, test accuracy", "the same", f"SONEX, SONX, OOA: {networks('test_accuracy')}",
         "SONEX above both", "holds in the mean, within the spread of OOA"],
        ["Figure 2", "`fcco compare fairness --data adult --setting paper`, or `compas`",
         f"training AUC, Adult: {means(printed['adult'], 'train_auc', shown, 3)}"
         f"; COMPAS: {means(printed['compas'], 'train_auc', shown, 3)}",
         "ALEXR2 ahead, 0.8975 on Adult", "does not hold"],
        ["the same, score of mean 0 and deviation 1", "`fcco compare fairness --data adult`",
         f"test AUC, Adult: {means(meant['adult'], 'test_auc', shown, 3)}; "
         f"COMPAS: {means(meant['compas'], 'test_auc', shown, 3)}",
         "–", "holds on Adult, not on COMPAS"],
        ["Figure 3", "`fcco compare continual --data weather`; `--data bdd100k --setting paper` "
         "(not run)",
         f"gain in points: {means(weather, 'test_target_gain', both, 1, 100)}; lost: "
         f"{means(weather, 'test_forgetting', both, 1, 100)}", "SONEX gains more",
         "does not hold"],
        ["Figures 4 and 5", "`fcco compare continual --data weather --setting rho`",
         f"gain, lost by penalty: {penalties(methods('continual-weather-rho'))}; `report.html` "
         "draws the worst constraint", "SONEX keeps more at equal gain", "no difference"],
        ["Figures 6 and 7", "`report.html` of Figure 2",
         f"worst constraint, Adult: {ends(printed['adult'], 'train_violation', '.3f')}; largest "
         f"true gap: {ends(printed['adult'], 'train_gap', '.2f')}", "all near or below 0",
         "holds, and means nothing"],
        ["Table 3, SONEX", "`fcco compare group-dro --data amazon --setting beta`",
         "training CVaR for 0.1, 0.3, 0.5, 1: "
         + ", ".join(f"{own['train_cvar']['mean']:.3f}" for own in beta.values())
         + f"; deviations of {max(own['train_cvar']['std'] for own in beta.values()):.2f}",
         "0.566, 0.556, 0.577, 0.578", "no difference here"],
        ["Table 5, SONEX", "`fcco compare group-dro --data amazon --setting update`",
         f"Adam {best['adam']:.3f}, momentum {best['momentum']:.3f}, each at its best rate",
         "0.566, 0.967", "holds, by less"],
        ["Tables 3 to 5, ALEXR2", "`fcco compare fairness --data adult --setting beta`, `theta`, "
         "`update`", "no published run", "0.8969 to 0.8976 (Table 4 repeats Table 3, E31); 0.8975, "
         "0.861", "cannot be said"],
        ["Grid of group DRO",
         "`fcco sweep group-dro --data amazon --setting paper --grid appendix --limit 0`",
         sizes("group-dro", "amazon-paper", "appendix", ("sonex", "sonx", "ooa-cvar"))
         + " settings", "the same candidates", "not run"],
        ["Grid of fairness", "`fcco sweep fairness --data adult --setting paper --grid paper`",
         sizes("fairness", "adult-paper", "paper", TUNED) + " settings, all run", "–", "run"],
        ["Grid of continual learning", "`fcco sweep continual --data bdd100k --grid paper`",
         sizes("continual", "bdd100k-paper", "paper", both) + " penalties", "–", "not run"],
    ]]  # fmt: skip
