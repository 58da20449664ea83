"""The page of a comparison: numbers against NumPy and SciPy, marks, and that it stands alone."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import scipy.stats
from fcco_experiments import report, stats
from fcco_experiments.report import plots
from fcco_experiments.report.page import by_method
from fcco_experiments.report.style import COLOURS, TOKENS, styles
from fcco_experiments.store import Comparison, SavedRun
from fcco_experiments.task import Experiment, Metric, Page, Panel, Problem, Row, Rule, Task
from fcco_experiments.tasks.judge import judge
from hypothesis import given
from hypothesis import strategies as st

PAGE = Page(
    title="Fair scores",
    question=("Which method?", "By what <rule> & why?"),
    metrics=(
        Metric("train_inside", "Inside", "none", 2, True),
        Metric("test_auc", "AUC", "higher", 3, True, "Ranks <well>."),
        Metric("test_gap", "Gap", "lower", 3, True, "Apart."),
        Metric("train_auc", "Train AUC", "higher", 3),
        Metric("seconds", "seconds", "none", 1, True),
        Metric("kkt_stationarity", "Stationarity", "lower", 3),
    ),
    panels=(
        Panel("tradeoff", "test_auc", "Price", "AUC", "test_gap", "gap", x_reference=0.05),
        Panel("curve", "train_auc", "Learning", "AUC"),
        Panel("curve", "train_violation", "Worst", "value", reference=0.0),
    ),
)


class Fair(Task):
    """A page, a rule with a limit on the gap, and a warning."""

    name = "fairness"
    config = Experiment
    limit = 0.05

    def __init__(self, page: Page = PAGE) -> None:
        self.shown = page

    def load(self, config: Any) -> Problem:
        raise NotImplementedError

    def page(self, config: Any) -> Page:
        return self.shown

    def verdict(self, config: Any, methods: Any) -> tuple[str, ...]:
        self.asked = methods
        return (f"{next(iter(methods))} wins & <b>how</b>.",)

    def next_steps(self, config: Any, methods: Any) -> tuple[str, ...]:
        return ("More epochs: `fcco compare --epochs <20>`.",)

    def rule(self, config: Any) -> Rule:
        return Rule("gap first", lambda row: (0.0,), "test_auc", "test_gap", self.limit)

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        inside = row.get("train_inside", 1.0)
        return (f"Vacuous: {inside:.3f} inside.",) if inside < 0.1 else ()


def one(name="SONEX", seed=0, epochs=6, level=0.0, folder=None, word=None, **final) -> SavedRun:
    rng = np.random.default_rng([seed, round(1000 * level)])
    rows: list[dict[str, Any]] = []
    for epoch in range(epochs + 1):
        values = (0.3 * math.exp(-epoch) + level / 10 + 0.01 * rng.standard_normal(14)).tolist()
        rows.append(
            {"epoch": epoch, "step": 10 * epoch, "samples": 1280 * epoch, "seconds": epoch * 0.5}
            | {f"{part}_auc": 0.8 + 0.01 * epoch + level for part in ("train", "val", "test")}
            | {f"{part}_gap": 0.02 + level + 0.001 * seed for part in ("train", "val", "test")}
            | {"train_violation": max(values), "train_inside": 0.9, "constraints": values}
            | {"test_constraints": values, "multipliers": [0.5] * 14}
        )
    rows[-1] |= final
    end = {"kkt_stationarity": 1e-5, "singular_value": 0.3}
    result = {"final": rows[-1], "end": end, "warnings": [], "diverged": None}
    result |= {"seconds": 3.0, "samples": 7680, "fingerprint": "a"}
    method = {"method": word or name.lower(), "lr": 0.01, "settings": {"penalty": 20.0}}
    environment = {"python": "3.12", "torch": "2.13", "command": "x", "start": f"2026-0{seed + 1}"}
    return SavedRun(folder, name, seed, method, rows, result, environment)  # pyright: ignore


def several(tmp_path, runs, **meta) -> Comparison:
    names = list(dict.fromkeys(run.name for run in runs))
    seeds = sorted({run.seed for run in runs})
    told = {"task": "fairness", "config_name": "adult", "methods": names, "seeds": seeds}
    told |= {"config": {"data": "adult", "epochs": 6}, "command": "fcco compare fairness"}
    told |= {"created": "2026-11-15T10:00:00", "fcco": "0.1.0", "quick": False}
    return Comparison(tmp_path, told | meta, runs)


def usual(tmp_path) -> Comparison:
    levels = {"SONEX": 0.02, "SOX": 0.01, "A+b_c.d-e": 0.0}
    return several(tmp_path, [one(n, s, level=v) for n, v in levels.items() for s in (0, 1)])


class Checked(HTMLParser):
    """Balanced tags, headings in order, no address but inside the page, ids and links in pairs."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.level = 0
        self.ids: list[str] = []
        self.links: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.look(attrs)
        assert tag not in ("script", "link", "iframe", "img", "image", "object")
        given = dict(attrs)
        if tag == "th":
            assert given["scope"] in ("row", "col")
        if given.get("role") == "img":
            assert given["aria-label"]
        if re.fullmatch(r"h[1-6]", tag):
            assert int(tag[1]) <= self.level + 1
            self.level = int(tag[1])
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.look(attrs)

    def look(self, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "srcset", "href", "xlink:href"):
                assert value.startswith("#"), value
                self.links.add(value[1:])
            self.links |= set(re.findall(r"url\(#([^)]+)\)", value or ""))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(page: str) -> str:
    parser = Checked()
    parser.feed(page)
    parser.close()
    assert not parser.open and len(parser.ids) == len(set(parser.ids))
    assert parser.links <= set(parser.ids), "every link has an end"
    body = page[page.index("<body") :]
    assert "http" not in body and "data:image" not in page
    assert not re.search(r"#[0-9a-fA-F]{6}\b", body) and "<style" not in body, "CSS variables alone"
    drawn = drawings(page)
    assert len(drawn) == len(set(drawn)), "each picture is there once"
    return page


def html_of(comparison: Comparison, task: Task | None = None) -> str:
    task = task or Fair()
    values = stats.table(comparison, task.page(None).metrics)
    asked = Experiment(data="adult", seeds=tuple(comparison.meta["seeds"]))
    return checked(report.render(comparison, values, task, asked))


def drawings(page: str) -> list[str]:
    return re.findall(r'<svg class="drawing".*?</svg>', page, re.DOTALL)


def cells(page: str, table: str) -> dict[str, list[str]]:
    """Rows of the table with that caption: the head of each and its cells, as HTML."""
    body = re.search(rf"<caption><span>{table}.*?</table>", page, re.DOTALL)
    assert body, table
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', body[0], re.DOTALL)
    plain = {re.sub(r"<svg.*?</svg>|<span.*", "", head, flags=re.DOTALL): r for head, r in rows}
    return {head.strip(): re.findall(r"<td.*?</td>", row) for head, row in plain.items()}


def text_of(cell: str) -> str:
    text = re.sub(r'<span class="hidden">.*?</span>|<[^>]+>|&nbsp;', " ", cell)
    return " ".join(text.split())


def heads(page: str, table: str) -> list[str]:
    body = re.search(rf"<caption><span>{table}.*?</thead>", page, re.DOTALL)
    assert body
    return [text_of(head) for head in re.findall(r"<th .*?</th>", body[0], re.DOTALL)]


def test_the_verdict_comes_first_and_every_part_is_there(tmp_path):
    page = html_of(usual(tmp_path))
    order = ['id="winner"', "SONEX wins", "<caption><span>Final figures", 'id="next"', 'id="quest']
    order += ['id="tradeoff"', 'id="curves"', 'id="figures"', 'id="repeat"']
    found = [page.index(part) for part in order]
    assert found == sorted(found)
    for text in ("Fair scores", "3 methods", "6 runs", "penalty", "A+b_c.d-e"):
        assert text in page
    assert "2026-01 to 2026-02" in page and 'class="warning"' not in page
    assert "<code>fcco compare --epochs &lt;20&gt;</code>" in page
    assert "wins &amp; &lt;b&gt;how" in page and "&lt;rule&gt; &amp; why" in page
    assert str(tmp_path) not in page
    assert html_of(usual(tmp_path)) == page, "the same runs give the same bytes"
    assert len(page) < 250_000


def test_judged_figures_come_first_with_their_limit(tmp_path):
    values = {"A": [(0.9, 0.06), (0.8, 0.02)], "B": [(0.7, 0.08), (0.72, 0.09)]}
    values |= {"C": [(0.8, 0.01), (0.9, 0.03)], "free": [(0.95, 0.4), (0.96, 0.5)]}
    runs = [
        one(name, seed, test_auc=auc, test_gap=gap, seconds=seed + 0.5)
        for name, own in values.items()
        for seed, (auc, gap) in enumerate(own)
    ]
    comparison = several(tmp_path, runs)
    page = html_of(comparison)
    assert heads(page, "Final") == [
        "Method", "AUC ↑", "Gap ↓ limit 0.05", "seconds", "Inside",
    ]  # fmt: skip
    rows = cells(page, "Final figures")
    table = stats.table(comparison, PAGE.metrics)
    terminal = {
        row[0]: row[1:]
        for row in stats.cells(
            table, stats.columns(PAGE.metrics, Fair().rule(None)), Fair().rule(None)
        )
    }
    assert terminal["method"] == ["AUC ↑", "Gap ↓ ≤ 0.05", "seconds"]
    best = max(np.mean(own, axis=0)[0] for own in values.values())  # of the reference, too
    for name, own in values.items():
        (auc, gap), (auc_std, gap_std) = np.mean(own, axis=0), np.std(own, axis=0, ddof=1)
        mark, met = ("✓", "met") if gap <= 0.05 else ("✗", "broken")
        star = "★ " if auc == best else ""
        assert text_of(rows[name][0]) == f"{star}{auc:.3f} ± {auc_std:.3f}"
        assert text_of(rows[name][1]) == f"{mark} {gap:.3f} ± {gap_std:.3f}"
        assert f'class="{met}"' in rows[name][1]
        assert terminal[name] == [
            f"{auc:.3f} ± {auc_std:.3f}", f"{gap:.3f} ± {gap_std:.3f} {mark}", "1.0 ± 0.7",
        ]  # fmt: skip
    wide = stats.cells(
        table, stats.columns(PAGE.metrics, Fair().rule(None), wide=True), Fair().rule(None)
    )
    assert wide[0][1:] == ["AUC ↑", "Gap ↓ ≤ 0.05", "seconds", "Inside"]


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("better", ["higher", "lower"])
def test_one_judge_decides_against_enumeration(seed, better):
    """Within the limit first, then the best mean; it wins if no pair of methods may be turned."""
    dice = np.random.default_rng(seed)
    count, spread = int(dice.integers(1, 5)), float(dice.choice([1e-3, 0.05]))
    seeds = int(dice.integers(1, 5))
    values = {
        f"m{k}": np.stack(
            [dice.normal(dice.uniform(0.6, 0.9), spread, seeds),
             dice.normal(dice.uniform(0, 0.1), spread, seeds)], 1,
        )
        for k in range(count)
    }  # fmt: skip
    metrics = (Metric("test_auc", "AUC", better), Metric("test_gap", "gap", "lower"))
    task = Fair(replace(PAGE, metrics=metrics))
    asked = Experiment(data="a", seeds=tuple(range(seeds)))
    methods = {
        name: [{"epoch": 3, "test_auc": a, "test_gap": g} for a, g in own.tolist()]
        for name, own in values.items()
    }
    found = judge(task, asked, methods)
    sign = 1 if better == "higher" else -1
    mean = {name: own.mean(0) for name, own in values.items()}

    def ahead(one: str, other: str) -> bool:
        mine, theirs = (max(0.0, mean[name][1] - task.limit) for name in (one, other))
        return (mine, -sign * mean[one][0]) < (theirs, -sign * mean[other][0])

    (best,) = [one for one in mean if all(ahead(one, other) for other in mean if other != one)]
    assert found.best == best
    within = {name for name in mean if mean[name][1] <= task.limit}
    assert set(found.within) == within

    def sure(other: str) -> bool:
        if seeds < 2:
            return False
        pair = (values[best][:, 0], values[other][:, 0])
        pair = pair if sign > 0 else pair[::-1]
        if other not in within:
            pair = (values[other][:, 1], values[best][:, 1])
        return scipy.stats.ttest_rel(pair[0], pair[1]).confidence_interval(0.95).low > 0

    others = [name for name in mean if name != best]
    assert found.wins == (best in within and bool(others) and all(map(sure, others)))


def test_methods_are_compared_on_the_seeds_that_both_have():
    """A seed more, of either, does not count; without a common one there is no interval."""
    dice = np.random.default_rng(3)
    seeds = {"a": range(5), "b": range(2, 8), "c": range(20, 24)}
    auc = {name: {k: 0.8 - 0.1 * (name > "a") + dice.normal(0, 0.01) for k in own}
           for name, own in seeds.items()}  # fmt: skip
    methods = {
        name: [{"epoch": 1, "seed": k, "test_auc": v, "test_gap": 0.0} for k, v in own.items()]
        for name, own in auc.items()
    }
    asked = Experiment(data="a", seeds=tuple(range(5)))
    found = judge(Fair(), asked, methods)
    both = [2, 3, 4]
    test = scipy.stats.ttest_rel([auc["b"][k] for k in both], [auc["a"][k] for k in both])
    gap = found.final.difference("b", "a", "test_auc")
    assert found.best == "a" and gap.pairs == 3
    assert (gap.low, gap.high) == pytest.approx(tuple(test.confidence_interval(0.95)))
    lead = found.leads["b"]
    assert (lead.low, lead.high) == pytest.approx((-gap.high, -gap.low))
    assert not found.wins, "c has no seed in common with a"
    del methods["c"]
    assert judge(Fair(), asked, methods).wins == (gap.high < 0)


def test_without_a_rule_or_a_direction_and_of_runs_that_ended_early_nobody_is_first():
    rows = [{"epoch": 3, "test_auc": 0.5, "test_gap": 0.0}] * 2
    asked = Experiment(data="a", seeds=(0, 1))
    early = [rows[0], rows[0] | {"epoch": 2, "test_auc": 0.9}]
    broken = [rows[0], rows[0] | {"test_gap": math.nan}]
    found = judge(Fair(), asked, {"a": rows, "early": early, "broken": broken, "none": []})
    assert found.order == ("a",) and not found.wins
    assert judge(Fair(), asked, {}).best is None
    aimless = Fair(replace(PAGE, metrics=(Metric("test_auc", "AUC"),)))
    assert judge(aimless, asked, {"a": rows}).best is None


def test_one_seed_shows_no_deviation_and_80_columns_are_enough(tmp_path):
    comparison = several(tmp_path, [one("sonex"), one("alexr2-with-one-batch", test_auc=0.7)])
    page, task = html_of(comparison), Fair()
    assert "±" not in page[page.index("<body") :]
    table = stats.table(comparison, PAGE.metrics)
    shown = stats.cells(table, stats.columns(PAGE.metrics, task.rule(None)), task.rule(None))
    assert "±" not in str(shown)
    two = several(tmp_path, [*comparison.runs, one("alexr2-with-one-batch", 1, level=0.11)])
    table = stats.table(two, PAGE.metrics)
    rows = stats.cells(table, stats.columns(PAGE.metrics, task.rule(None)), task.rule(None))
    assert "± " in rows[2][1] and "±" not in str(rows[1])
    assert sum(max(len(row[k]) for row in rows) + 3 for k in range(4)) + 1 <= 80


def test_ties_at_the_digits_shown_are_all_best_and_diverged_methods_never(tmp_path):
    bad = one("bad", 1, test_auc=0.97)
    assert bad.result
    bad = replace(bad, result=bad.result | {"diverged": "why"})
    runs = [one("high", test_auc=0.9), one("low", test_auc=0.8), one("tie", test_auc=0.90049)]
    runs += [one("bad", test_auc=0.95), bad]
    task = Fair()
    page = html_of(several(tmp_path, runs), task)
    rows = cells(page, "Final figures")
    assert [name for name, row in rows.items() if "★" in row[0]] == ["high", "tie"]
    assert "best: " in rows["high"][0], "not by colour alone"
    assert "0.960" in rows["bad"][0] and len(task.asked["bad"]) == 2
    groups = by_method(several(tmp_path, runs))
    look = styles({name: name for name in groups})
    whole = plots.curves(groups, PAGE.panels[2], look, "x")
    alone = plots.curves(groups | {"bad": groups["bad"][:1]}, PAGE.panels[2], look, "x")
    assert whole == alone, "a run that diverged is not drawn"
    assert plots.curves({"bad": [bad]}, PAGE.panels[2], look, "x"), "but where it is all there is"


def test_what_a_reader_must_know_stands_in_the_box(tmp_path):
    bad, open_one = one("SOX", 1), one("SONX", 1)
    assert bad.result
    bad = replace(bad, result=bad.result | {"diverged": "not finite at <step> 7"})
    runs = [one("SONEX", k, train_inside=0.01 + k / 100) for k in (0, 1)]
    runs += [one("SOX", 0), bad, one("SONX", 0), replace(open_one, result=None), one("ALEXR2", 0)]
    other = one("ALEXR2", 0)
    assert other.result and runs[-1].result
    runs[-1].result["fingerprint"] = "b"
    runs[-1].result["warnings"] = ["Own words."]
    page = html_of(several(tmp_path, runs))
    box = re.search(r'<aside class="warning".*?</aside>', page, re.DOTALL)
    assert box and page.index("wins") < box.start() < page.index("<table")
    said = dict(re.findall(r"<li><b>(.*?)</b> (.*?)</li>", box[0]))
    assert "different data" in said["All runs"] and said["ALEXR2"] == "Own words."
    assert "not finite at &lt;step&gt; 7" in said["SOX, seed 1"]
    assert "Not finished" in said["SONX, seed 1"] and said["ALEXR2, seed 1"] == "Not started."
    assert said["SONEX"] == "Vacuous: 0.010 inside. (Numbers from SONEX, seed 0.)"


def test_what_all_methods_are_told_is_told_once(tmp_path):
    runs = [one(n, train_inside=0.01 + k / 100) for k, n in enumerate(("A", "B"))]
    said = re.findall(r"<li><b>(.*?)</b> (.*?)</li>", html_of(several(tmp_path, runs)))
    assert said == [("All methods", "Vacuous: 0.010 inside. (Numbers from A, seed 0.)")]


def test_a_small_figure_is_not_shown_as_zero(tmp_path):
    page = html_of(several(tmp_path, [one(seed=0), one(seed=1)]))
    row = next(v for k, v in cells(page, "All figures").items() if k.startswith("Stationarity"))
    assert "1.00e−5" in row[0], "not 0.000"


@pytest.mark.parametrize("broken", [math.nan, math.inf, None, "word"])
def test_broken_and_missing_values_do_no_harm(tmp_path, broken):
    keys = ("test_auc", "test_gap", "train_auc", "train_violation", "constraints", "epoch")
    run = one("odd", **dict.fromkeys(keys, broken))
    bare = one("bare", epochs=0)
    assert bare.result
    bare = replace(bare, rows=[{}], result=bare.result | {"final": {}, "end": {}})
    lists = one("lists", constraints=[broken] * 3, multipliers=[broken])
    rows = cells(html_of(several(tmp_path, [run, bare, lists, one("good")])), "Final figures")
    assert [text_of(cell) for cell in rows["bare"]] == ["–"] * 4
    assert text_of(rows["odd"][0]) in ("n/a", "∞", "–") and "0.860" in rows["good"][0]


def test_a_method_has_one_colour_on_every_page(tmp_path):
    page = html_of(several(tmp_path, [one("Ours", word="sonex"), one("SOX"), one("new")]))
    other = html_of(several(tmp_path, [one("SOX"), one("alexr2"), one("sonex")]))
    for text, names in ((page, ("Ours", "SOX", "new")), (other, ("SOX", "alexr2", "sonex"))):
        legend = dict(re.findall(r'<li><svg.*?method-(\d)\)".*?</svg>([^<]+)</li>', text)[::-1])
        legend = {name: int(number) for number, name in legend.items()}
        assert legend[names[0]] == (0 if names[0] == "Ours" else 2)
        for svg in drawings(text):
            assert set(re.findall(r"--method-(\d)", svg)) == set(map(str, legend.values()))
    looks = styles({f"s{k}": "sonex" if k < 9 else "sox" for k in range(18)})
    assert len(set(looks.values())) == 18 and {s.number for s in looks.values()} == {0, 2}
    ablation = styles({f"beta-{k}": "sonex" for k in range(5)})
    assert len({style.number for style in ablation.values()}) == 5


def test_text_keeps_its_contrast_on_every_ground():
    def light(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        parts = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot(parts, (0.2126, 0.7152, 0.0722)))

    def contrast(one: str, other: str) -> float:
        low, high = sorted((light(one), light(other)))
        return (high + 0.05) / (low + 0.05)

    pairs = [("ink", "page"), ("muted", "page"), ("link", "page"), ("ink", "panel")]
    pairs += [("muted", "panel"), ("limit", "page"), ("best", "page")]
    pairs += [(word, f"{word}-page") for word in ("warning", "best", "broken")]
    for k in (0, 1):
        for text, ground in pairs:
            assert contrast(TOKENS[text][k], TOKENS[ground][k]) >= 4.5, (text, ground, k)
        for pair in COLOURS:  # also as text, beside dots
            assert contrast(pair[k], TOKENS["page"][k]) >= 4.5, pair


points = st.lists(st.tuples(*[st.integers(-3, 3) | st.sampled_from([math.nan, math.inf])] * 2))


@given(points, st.booleans(), st.booleans())
def test_the_frontier_is_what_nothing_dominates(some, higher_x, higher_y):
    x, y = [float(a) for a, _ in some], [float(b) for _, b in some]
    sign_x, sign_y = (1 if higher_x else -1), (1 if higher_y else -1)
    finite = [i for i in range(len(x)) if math.isfinite(x[i]) and math.isfinite(y[i])]

    def dominates(j: int, i: int) -> bool:
        gain_x, gain_y = sign_x * (x[j] - x[i]), sign_y * (y[j] - y[i])
        return gain_x >= 0 and gain_y >= 0 and (gain_x > 0 or gain_y > 0)

    found = stats.frontier(x, y, higher_x, higher_y)
    assert sorted(found) == [i for i in finite if not any(dominates(j, i) for j in finite)]
    assert [x[i] for i in found] == sorted(x[i] for i in found)


# Figures: where marks stand in the drawing.


def marks_of(svg: str, number: int) -> list[tuple[float, float]]:
    """Places of the markers in a colour."""
    colour = rf"var\(--method-{number}\)"
    found = re.findall(rf'<use [^>]*x="([\d.]+)" y="([\d.]+)" style="fill: {colour}', svg)
    return [(float(x), float(y)) for x, y in found]


def test_a_tradeoff_shows_means_at_their_places_and_the_frontier(tmp_path):
    places = {
        "sonex": [(0.05, 0.90)],
        "alexr2": [(0.06, 0.91), (0.08, 0.93)],
        "sox": [(0.09, 0.89)],
    }
    runs = [
        one(name, k, test_gap=x, test_auc=y)
        for name, own in places.items()
        for k, (x, y) in enumerate(own)
    ]
    groups = by_method(several(tmp_path, runs))
    look = styles({name: name for name in groups})
    plot = plots.scatter(groups, PAGE.panels[0], look, PAGE.metrics, "x")
    assert plot and plot.facts == {"front": ["sonex", "alexr2"], "alone": False, "several": True}
    number = {name: style.number for name, style in look.items()}
    # The last mark of a method is its mean.
    x = {name: marks_of(plot.svg, number[name])[-1][0] for name in places}
    y = {name: marks_of(plot.svg, number[name])[-1][1] for name in places}
    assert (x["alexr2"] - x["sonex"]) / (x["sox"] - x["sonex"]) == pytest.approx(0.5, abs=0.01)
    assert (y["alexr2"] - y["sox"]) / (y["sonex"] - y["sox"]) == pytest.approx(3.0, abs=0.01)
    page = html_of(several(tmp_path, runs))
    assert "Dotted line: gap = 0.05." in page


def test_curves_are_means_with_the_extent_over_seeds():
    runs = [one(seed=k) for k in (0, 1)]
    for k, run in enumerate(runs):
        for row in run.rows:
            row["train_auc"] = float(row["epoch"] + k)
    runs[1].rows.pop()
    runs[1].rows[2]["train_auc"] = math.nan
    found = plots.curve(runs, "train_auc")
    assert found.epochs == [0, 1, 2, 3, 4, 5, 6]
    assert found.mean == [0.5, 1.5, 2.0, 3.5, 4.5, 5.5, 6.0]
    assert found.low == [0, 1, 2, 3, 4, 5, 6] and found.high == [1, 2, 2, 4, 5, 6, 6]


def test_the_frame_leaves_out_a_method_that_is_far_off(tmp_path):
    runs = by_method(several(tmp_path, [one(n, epochs=20) for n in "abcd"]))
    for row in runs["d"][0].rows:
        row["train_violation"] = 50.0
    plot = plots.curves(runs, PAGE.panels[2], styles({name: name for name in runs}), "x")
    assert plot and plot.facts["cut"] and ">50<" not in plot.svg


FALLS = [0.5, 0.70, 0.80, 0.78, 0.74, 0.71, 0.70]


def learned(name: str, seed: int, values: list[float], **final: float) -> SavedRun:
    """A run whose validation AUC over the epochs is given, and a test AUC 0.1 below it."""
    run = one(name, seed, epochs=len(values) - 1)
    for row, value in zip(run.rows, values, strict=True):
        row |= {"val_auc": value, "test_auc": value - 0.1}
    run.rows[-1].update(final)
    return run


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([FALLS, FALLS], True),
        ([FALLS], True),
        ([FALLS, FALLS[::-1]], False),  # seeds disagree
        ([[0.5, 0.70, 0.80, 0.80, 0.79, 0.79, 0.79]] * 2, False),  # hardly worse
        ([[0.5, 0.60, 0.65, 0.70, 0.75, 0.80, 0.70]] * 2, False),  # late
        ([[0.5, 0.60, 0.65, 0.70, 0.75, 0.80, 0.81]] * 2, False),
    ],
)
def test_overfitting_is_named_with_the_best_epoch_and_its_test_figure(tmp_path, values, found):
    unlimited = Rule("", lambda row: (0.0,), "test_auc")
    task, limited = Fair(), Fair()
    task.rule = lambda config: unlimited  # type: ignore[method-assign]
    runs = [learned("free", k, own) for k, own in enumerate(values)]
    for asked in (task, limited):
        page = html_of(several(tmp_path, runs), asked)
        # Under a limit the AUC may fall for a reason.
        assert ("Overfitted" in page) == (found and asked is task)
    if found:
        (text,) = re.findall(r"Overfitted.*", html_of(several(tmp_path, runs), task))
        for figure in ("epoch 2", "0.800", "0.700", "epoch 6"):
            assert figure in text, (figure, text)
        assert "--epochs 2" in text
