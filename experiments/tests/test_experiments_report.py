"""The report: what it says, what it marks, and that it stands by itself."""

import base64
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any, cast

import numpy as np
import pytest
from fcco_experiments import report, sweep
from fcco_experiments.report import plots
from fcco_experiments.report.canvas import bounds, spans_decades
from fcco_experiments.report.facts import chosen, machine_facts
from fcco_experiments.report.frontier import frontier
from fcco_experiments.report.palette import METHODS, TOKENS, family_of, styles
from fcco_experiments.report.rows import rows
from fcco_experiments.report.runs import by_method, curve, entry_names
from fcco_experiments.report.tradeoff import tradeoff
from fcco_experiments.store import Comparison, SavedRun
from fcco_experiments.task import Metric, Page, Panel, Task
from hypothesis import given
from hypothesis import strategies as st

NAMES = tuple(f"{rate} gap at {tau}" for rate in ("TPR", "FPR") for tau in range(-3, 4))
PAGE = Page(
    title="Fair scores",
    question=("Which method?", "By what <rule> & why?"),
    metrics=(
        Metric("test_auc", "AUC", "higher", 3, True, "Ranks <well>."),
        Metric("test_gap", "Gap", "lower", 3, True, "Apart."),
        Metric("train_inside", "Inside", "none", 2, True),
        Metric("train_auc", "Train AUC", "higher", 3),
        Metric("kkt_stationarity", "Stationarity", "lower", 3),
    ),
    panels=(
        Panel("tradeoff", "test_auc", "Price", "AUC", "test_gap", "gap", x_reference=0.05),
        Panel("curve", "train_auc", "Learning", "AUC"),
        Panel("curve", "train_violation", "Worst", "value", reference=0.0),
        Panel("family", "constraints", "All of them", "value", reference=0.0),
    ),
    entries={"constraints": NAMES, "test_constraints": NAMES, "multipliers": NAMES},
)


class Fair:
    name = "fairness"
    asked: Any = None

    def page(self, config):
        return PAGE

    def verdict(self, config, methods):
        self.asked = methods
        return (f"{next(iter(methods))} wins & <b>how</b>.",)

    def warnings(self, config, row):
        inside = row.get("train_inside", 1.0)
        return (f"Vacuous: {inside:.3f} inside.",) if inside < 0.1 else ()


TASK = cast(Task, Fair())


def one(name="SONEX", seed=0, epochs=6, level=0.0, folder=None, **final) -> SavedRun:
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
    method = {"method": "sonex", "lr": 0.01, "update": "adam", "settings": {"penalty": 20.0}}
    environment = {"python": "3.12", "torch": "2.13", "command": "x", "start": f"2026-0{seed + 1}"}
    return SavedRun(folder, name, seed, {}, method, rows, result, environment)  # pyright: ignore


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


def html_of(comparison: Comparison) -> str:
    page = report.render(comparison, TASK, None)
    checked = Checked()
    checked.feed(page)
    checked.close()
    assert not checked.open
    return page


class Checked(HTMLParser):
    """Balanced tags, headings in order, texts for images, nothing loaded from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.level = 0
        self.ids: list[str] = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if "id" in given:
            assert given["id"] not in self.ids
            self.ids.append(str(given["id"]))
        for name in ("src", "srcset", "href"):
            assert str(given.get(name, "data:")).startswith(("data:", "#")), given
        assert tag not in ("script", "link", "iframe")
        if tag == "img":
            assert given["alt"]
        if tag == "th":
            assert given["scope"] in ("row", "col")
        if re.fullmatch(r"h[1-6]", tag):
            assert int(tag[1]) <= self.level + 1
            self.level = int(tag[1])
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def cells(page: str, table: str) -> dict[str, list[str]]:
    """Rows of the table with that caption: the head of each and its cells, as HTML."""
    body = re.search(rf"<caption><span>{table}.*?</table>", page, re.DOTALL)
    assert body, table
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', body[0], re.DOTALL)
    plain = {re.sub(r"<svg.*?</svg>|<span.*", "", head, flags=re.DOTALL): r for head, r in rows}
    return {head.strip(): re.findall(r"<td.*?</td>", row) for head, row in plain.items()}


def drawings(page: str) -> list[str]:
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    return [base64.b64decode(text).decode() for text in found]


def test_the_page_has_every_part(tmp_path):
    page = html_of(usual(tmp_path))
    for text in ("Fair scores", "Which method?", "Price", "Learning", "All of them", "Ranks"):
        assert text in page
    for text in ("fcco compare fairness", "3 methods", "6 runs", "TPR gap at -3", "penalty"):
        assert text in page
    assert "A+b_c.d-e" in page and "2026-01 to 2026-02" in page
    assert 'class="warning"' not in page  # nothing to warn of
    assert "SONEX/seed-0/" in page and str(tmp_path) not in page


def test_words_are_escaped(tmp_path):
    class Sharp(Fair):
        def page(self, config):
            entries = {"constraints": ("<i>",) * 14}
            return replace(PAGE, title="<script>alert(1)</script>", entries=entries)

    page = report.render(usual(tmp_path), cast(Task, Sharp()), None)
    assert "<script" not in page and "&lt;script&gt;" in page and "<i>" not in page
    assert "wins &amp; &lt;b&gt;how" in page and "&lt;rule&gt; &amp; why" in page


def test_best_values_are_marked_in_both_directions(tmp_path):
    runs = [one("high", test_auc=0.9, test_gap=0.30), one("low", test_auc=0.8, test_gap=0.10)]
    runs += [one("tie", test_auc=0.90049, test_gap=0.2)]
    rows = cells(html_of(several(tmp_path, runs)), "Final figures")
    marked = {name: ["best" in cell for cell in row] for name, row in rows.items()}
    assert marked == {
        "high": [True, False, False],
        "low": [False, True, False],
        "tie": [True, False, False],  # the same at three digits
    }
    assert "★" in rows["high"][0] and "best: " in rows["high"][0]  # not by colour alone


def test_a_reference_is_no_candidate_for_the_best_figure(tmp_path):
    class WithReference(Fair):
        def page(self, config):
            return replace(PAGE, references=("free",))

    runs = [one("free", test_auc=0.95), one("high", test_auc=0.9), one("low", test_auc=0.8)]
    page = report.render(several(tmp_path, runs), cast(Task, WithReference()), None)
    rows = cells(page, "Final figures")
    assert [name for name, row in rows.items() if "best" in row[0]] == ["high"]
    assert "free is there for reference" in page


def test_the_table_is_the_mean_and_deviation_over_seeds(tmp_path):
    runs = [one(seed=k, test_auc=value) for k, value in enumerate((0.7, 0.8, 0.9))]
    row = cells(html_of(several(tmp_path, runs)), "Final figures")["SONEX"]
    assert "0.800" in row[0] and "± 0.100" in row[0]
    single = cells(html_of(several(tmp_path, runs[:1])), "Final figures")["SONEX"]
    assert "±" not in single[0] and "0.700" in single[0]


def test_what_a_reader_must_know_stands_in_the_box(tmp_path):
    bad, open_one = one("SOX", 1), one("SONX", 1)
    assert bad.result
    bad = replace(bad, result=bad.result | {"diverged": "not finite at <step> 7"})
    runs = [one("SONEX", k, train_inside=0.01 + k / 100) for k in (0, 1)]
    runs += [one("SOX", 0), bad, one("SONX", 0), replace(open_one, result=None), one("ALEXR2", 0)]
    page = html_of(several(tmp_path, runs))
    box = re.search(r'<aside class="warning".*?</aside>', page, re.DOTALL)
    assert box
    said = re.findall(r"<li><b>(.*?)</b> (.*?)</li>", box[0])
    left_out = "Tables have its last finite figures, curves leave it out."
    assert said == [
        ("SOX, seed 1", f"Diverged: not finite at &lt;step&gt; 7. {left_out}"),
        ("SONX, seed 1", "Not finished, so not in the tables."),
        ("ALEXR2, seed 1", "Not started."),
        ("SONEX, all 2 seeds", "Vacuous: 0.010 inside. (Numbers of seed 0.)"),
    ]
    assert page.index("<aside") < page.index('id="question"')


def test_runs_on_other_data_and_their_own_warnings_are_told(tmp_path):
    run, other = one("SONEX"), one("SOX")
    assert run.result and other.result
    run.result["warnings"] = ["Own words."]
    other.result["fingerprint"] = "b"
    page = html_of(several(tmp_path, [run, other]))
    assert "Own words." in page and "made on different data" in page


def test_a_diverged_run_counts_but_never_wins_and_is_not_drawn(tmp_path):
    task = Fair()
    bad = one("SOX", 1, test_auc=0.97)
    assert bad.result
    bad = replace(bad, result=bad.result | {"diverged": "why"})
    runs = [*(one(name, test_auc=0.9) for name in ("SONEX", "SONX")), one("SOX", 0, test_auc=0.95)]
    comparison = several(tmp_path, [*runs, bad])
    rows = cells(report.render(comparison, cast(Task, task), None), "Final figures")
    assert [len(rows) for rows in task.asked.values()] == [1, 1, 2]
    assert "0.960" in rows["SOX"][0] and "best" not in rows["SOX"][0]
    groups = by_method(comparison)
    look = styles(groups)
    alone = plots.curves(groups | {"SOX": groups["SOX"][:1]}, PAGE.panels[2], look)
    assert plots.curves(groups, PAGE.panels[2], look) == alone
    only_bad = plots.curves({"SOX": [bad]}, PAGE.panels[2], look)
    assert only_bad and METHODS[2][0] in only_bad.svg  # better than an empty frame


def test_violated_entries_are_marked_with_their_multipliers(tmp_path):
    values = [-0.1] * 13 + [0.2]
    runs = [one(seed=0, constraints=values), one(seed=1, constraints=[-0.3, 0.4, *values[2:]])]
    page = html_of(several(tmp_path, runs))
    rows = cells(page, "Constraints at the end")
    assert [name for name, row in rows.items() if "broken" in row[0]] == [NAMES[1], NAMES[13]]
    assert "−0.2000" in rows[NAMES[0]][0] and "ν 0.50" in rows[NAMES[0]][0]
    assert "1 of 2 seeds" in rows[NAMES[1]][0] and "seeds" not in rows[NAMES[13]][0]
    test_rows = cells(page, "Test constraints at the end")  # the limit of the training data's
    assert "broken" in "".join(map("".join, test_rows.values())) and "ν" not in str(test_rows)


def test_end_figures_keep_their_digits_and_stand_once(tmp_path):
    page = html_of(usual(tmp_path))
    row = cells(page, "Figures at the end")["SONEX"]
    assert "1.00e−5" in row[0] and "0.300" in row[1]
    assert not any("Stationarity" in head for head in cells(page, "All figures"))


@pytest.mark.parametrize("broken", [math.nan, math.inf, None, "word"])
def test_broken_and_missing_values_do_no_harm(tmp_path, broken):
    keys = ("test_auc", "test_gap", "train_auc", "train_violation", "constraints", "epoch")
    run = one("odd", **dict.fromkeys(keys, broken))
    bare = one("bare", epochs=0)
    assert bare.result
    bare = replace(bare, rows=[{}], result=bare.result | {"final": {}, "end": {}})
    lists = one("lists", constraints=[broken] * 3, multipliers=[broken])
    page = html_of(several(tmp_path, [run, bare, lists, one("good")]))
    rows = cells(page, "Final figures")
    assert rows["bare"] == ["<td>–</td>"] * 3
    assert rows["odd"][0] in ("<td>n/a</td>", "<td>–</td>") and "0.860" in rows["good"][0]


@pytest.mark.parametrize("result", ["finished", "unfinished"])
@pytest.mark.parametrize("epochs", [0, 1])
def test_a_single_short_run(tmp_path, epochs, result):
    run = one(epochs=epochs)
    if result == "unfinished":
        run = replace(run, result=None)
    page = html_of(several(tmp_path, [run]))
    assert "1 run " in page.replace("·", " ")
    assert ("No run has finished yet." in page) == (result == "unfinished")


def test_nothing_has_run(tmp_path):
    page = html_of(several(tmp_path, [], methods=["SONEX"], seeds=[0, 1]))
    assert "Not started." in page and "No run has finished yet." in page


def test_the_same_runs_give_the_same_bytes_in_both_palettes(tmp_path):
    page = html_of(usual(tmp_path))
    assert page == html_of(usual(tmp_path))
    found = drawings(page)
    assert len(found) == 2 * (1 + 2 + 3)  # trade-off, curves, a family of three; light and dark
    for light, night in zip(found[::2], found[1::2], strict=True):
        assert light != night and re.sub("#[0-9a-fA-F]{6}", "", light) == re.sub(
            "#[0-9a-fA-F]{6}", "", night
        )
        for day, dark in (*TOKENS.values(), *METHODS):
            assert day not in night and dark.upper() not in light
    assert len(page) < 400_000


def test_a_method_has_one_colour_everywhere(tmp_path):
    comparison = usual(tmp_path)
    page = html_of(comparison)
    scatter, learning, worst, *small = drawings(page)[::2]
    for k, name in enumerate(by_method(comparison)):
        colour = METHODS[k][0]
        assert all(colour in svg for svg in (scatter, learning, worst, small[k]))
        assert all(colour not in svg for j, svg in enumerate(small) if j != k), name
        assert f'stroke="var(--method-{k})"' in page


def test_many_methods_differ_and_fit(tmp_path):
    names = [f"A-long-name_{k}" for k in range(16)]
    looks = styles(names)
    assert len(set(looks.values())) == 16
    by_colour = {(look.number, look.dash) for look in looks.values()}
    assert len(by_colour) == 16  # lines differ without their markers too
    page = html_of(several(tmp_path, [one(n, level=k / 50) for k, n in enumerate(names)]))
    assert all(page.count(name) > 5 for name in names)


def test_text_keeps_its_contrast_on_every_ground():
    def light(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        parts = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot(parts, (0.2126, 0.7152, 0.0722)))

    def contrast(one: str, other: str) -> float:
        low, high = sorted((light(one), light(other)))
        return (high + 0.05) / (low + 0.05)

    pairs = [("ink", "page"), ("muted", "page"), ("link", "page"), ("ink", "panel")]
    pairs += [("muted", "panel"), ("limit", "page")]
    pairs += [(word, f"{word}-page") for word in ("warning", "best", "broken")]
    for k in (0, 1):
        for text, ground in pairs:
            assert contrast(TOKENS[text][k], TOKENS[ground][k]) >= 4.5, (text, ground, k)
        for pair in METHODS:  # also as text, beside dots
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

    expected = [i for i in finite if not any(dominates(j, i) for j in finite)]
    found = frontier(x, y, higher_x, higher_y)
    assert sorted(found) == expected
    assert [x[i] for i in found] == sorted(x[i] for i in found)


def test_a_sweep_shows_every_dot_and_its_winners(tmp_path):
    runs = [one(f"{m}@{i}", level=i / 50 + k / 90) for k, m in enumerate("AB") for i in range(9)]
    saved = {"rule": "the rule", "limited": False, "settings": [], "ranking": {}}
    sweep.write(tmp_path, saved | {"winners": {"A": "A@2", "B": "B@7"}})
    comparison = several(tmp_path, runs)
    assert list(chosen(comparison, by_method(comparison))) == ["A@2", "B@7"]
    page = html_of(comparison)
    assert list(cells(page, "Final figures")) == ["A@2", "B@7"]
    assert len(cells(page, "All figures")) == 18 and "its rule: the rule." in page
    assert "2 methods · 18 settings · 18 runs" in page
    drawing = tradeoff(by_method(comparison), PAGE.panels[0], styles("AB"), PAGE.metrics)
    assert drawing and not drawing.beaten
    assert drawing.svg.count('<g id="PathCollection_') == 18
    own = [
        re.findall(rf'd="([^"]*)"[^>]*fill: none;[^>]*{METHODS[k][0]}', drawing.svg) for k in (0, 1)
    ]
    assert [path[0].count("L") for path in own] == [8, 8] and own[0] != own[1]  # 9 corners each


@pytest.mark.parametrize("x", [(0.01, 0.02, 0.3), (-0.001, 0.01, 0.02, 9), (0.1, 0.1), (0, 0.2)])
def test_a_tradeoff_shows_far_values(tmp_path, x):
    runs = by_method(
        several(tmp_path, [one(f"m{k}", test_gap=v, test_auc=0.9 - k / 9) for k, v in enumerate(x)])
    )
    panel = replace(PAGE.panels[0], x_reference=None)
    drawing = tradeoff(runs, panel, styles(runs), PAGE.metrics)
    assert drawing
    heights = [float(v) for v in re.findall(r'<use xlink:href="[^"]*" x="([\d.]+)"', drawing.svg)]
    assert all(0 <= value <= 5.2 * 72 for value in heights)


def test_family_names_and_frames():
    assert family_of("A@3") == "A" and family_of("A@b") == "A@b" and family_of("@") == "@"
    assert bounds([]) is None and bounds([math.nan]) is None
    low, high = bounds([2.0, 2.0]) or (0, 0)
    assert low < 2.0 < high
    low, high = bounds([5.0, 0.0, 0.1], core=[0.0, 0.1]) or (0, 0)
    assert -0.1 < low < 0.0 and 0.1 < high < 0.2
    low, high = bounds([0.0, 0.1], 1.0) or (0, 0)
    assert high > 1.0


def test_curves_are_means_with_the_extent_over_seeds():
    runs = [one(seed=k) for k in (0, 1)]
    for k, run in enumerate(runs):
        for row in run.rows:
            row["train_auc"] = float(row["epoch"] + k)
    runs[1].rows.pop()
    runs[1].rows[2]["train_auc"] = math.nan
    found = curve(runs, "train_auc")
    assert found.epochs == [0, 1, 2, 3, 4, 5, 6]
    assert found.mean == [0.5, 1.5, 2.0, 3.5, 4.5, 5.5, 6.0]
    assert found.low == [0, 1, 2, 3, 4, 5, 6] and found.high == [1, 2, 2, 4, 5, 6, 6]


def test_the_frame_leaves_out_a_method_that_is_far_off(tmp_path):
    runs = by_method(several(tmp_path, [one(n, epochs=20) for n in "abcd"]))
    for row in runs["d"][0].rows:
        row["train_violation"] = 50.0
    drawing = plots.curves(runs, PAGE.panels[2], styles(runs))
    family = plots.families(runs, PAGE.panels[3], NAMES, styles(runs))
    assert drawing and drawing.cut and ">50<" not in drawing.svg
    assert family.kinds == {"TPR": "solid", "FPR": "dashed"} and set(family.drawings) == set("abcd")
    top = int(np.argmax(runs["a"][0].rows[-1]["constraints"]))
    assert family.worst["a"] == (NAMES[top], runs["a"][0].rows[-1]["constraints"][top])


def test_machines_that_differ_are_all_named():
    first, second = one(seed=0), one(seed=1)
    second.environment["torch"] = "2.14"
    facts = dict(machine_facts([first, second]))
    assert facts["PyTorch"] == "2.13; 2.14" and facts["Python"] == "3.12" and "Command" not in facts


def test_files_of_a_run_and_of_the_page(tmp_path):
    run = one(folder=tmp_path)
    plots.save_run(run, PAGE)
    plots.save_run(run, PAGE)
    written = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert written == ["constraints.svg", "train_auc.svg", "train_violation.svg"]
    svg = (tmp_path / "plots" / "train_auc.svg").read_text(encoding="utf-8")
    assert svg.startswith("<svg") and "background" in svg
    comparison = several(tmp_path, [run])
    path = report.write(comparison, TASK, None)
    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf-8") == report.render(comparison, TASK, None)


# Plots with a row per entry, logarithmic axes, names from the runs, warnings about the data.

CHANGE = Panel("change", "losses", "Before and after", "loss by group")
DOTS = Panel("dots", "losses", "At the end", "loss by group")


def with_lists(values: dict[str, list[list[list[float]]]]) -> dict[str, list[SavedRun]]:
    """Runs whose list `losses` is given: by method, seed, evaluation and entry."""
    runs = {n: [one(n, s, len(v) - 1) for s, v in enumerate(own)] for n, own in values.items()}
    for name, own in values.items():
        for run, lists in zip(runs[name], own, strict=True):
            for row, each in zip(run.rows, lists, strict=True):
                row["losses"] = each
    return runs


def dots_of(svg: str, colour: str) -> list[tuple[float, float]]:
    found = re.findall(rf'<use [^>]*x="([\d.]+)" y="([\d.]+)" style="fill: {colour}; stroke:', svg)
    return [(float(x), float(y)) for x, y in found]


def ways_of(svg: str, colour: str) -> list[tuple[float, float]]:
    pattern = rf'd="M ([\d.]+) [\d.]+ L ([\d.]+) [\d.]+" [^>]*stroke: {colour}; stroke-opacity'
    return [(float(a), float(b)) for a, b in re.findall(pattern, svg)]


def names_of(svg: str) -> list[str]:
    """Names of the rows from top to bottom."""
    found = re.findall(r'text-anchor: end[^>]* y="([\d.]+)"[^>]*>([^<]*)<', svg)
    return [name for _, name in sorted((float(y), name) for y, name in found)][:-1]  # the axis last


LISTS = {
    "A": [[[1.0, 4.0, 2.0], [1.0, 2.0, 2.0]], [[1.0, 4.0, 2.0], [1.0, 1.0, 4.0]]],  # 1, 1.5, 3
    "B": [[[1.0, 4.0, 2.0], [0.5, 0.5, 0.5]]],
}


def test_a_change_goes_from_the_common_start_to_each_method():
    runs = with_lists(LISTS)
    found = rows(runs, CHANGE, ("one", "four", "two"), styles(runs))
    assert found and not found.cut
    assert names_of(found.svg) == ["four", "two", "one"]  # by their start
    ours, theirs = dots_of(found.svg, METHODS[0][0]), dots_of(found.svg, METHODS[1][0])
    assert len(ours) == len(theirs) == 3

    def place(value: float) -> float:  # one straight axis: 0.5 of B, and the 3 of A
        (low, _), (high, _) = theirs[0], ours[2]
        return low + (high - low) * (value - 0.5) / 2.5

    assert [x for x, _ in ours] == pytest.approx([place(1.0), place(1.5), place(3.0)], abs=0.01)
    starts = [place(1.0), place(4.0), place(2.0)]
    for colour, ends in ((METHODS[0][0], ours), (METHODS[1][0], theirs)):
        for (left, right), start, (end, _) in zip(
            ways_of(found.svg, colour), starts, ends, strict=True
        ):
            assert (left, right) == pytest.approx((start, end), abs=0.01)
    # In a row the methods have lanes of their own, in the same order.
    assert all(1 < other[1] - own[1] < 10 for own, other in zip(ours, theirs, strict=True))
    assert found.worst == {"A": ("two", 3.0), "B": ("one", 0.5)}


def test_dots_have_whiskers_and_the_order_of_the_list():
    runs = with_lists(LISTS)
    found = rows(runs, DOTS, (), styles(runs))
    assert found and names_of(found.svg) == ["entry 1", "entry 2", "entry 3"]
    (one_, _), (middle, _), (three, _) = dots_of(found.svg, METHODS[0][0])
    unit = (three - one_) / 2
    assert middle == pytest.approx(one_ + unit / 2, abs=0.01)
    expected = [(0, 0), (0, unit), (unit, 3 * unit)]  # 1..1, 1..2, 2..4
    for whisker, (low, high) in zip(ways_of(found.svg, METHODS[0][0]), expected, strict=True):
        assert whisker == pytest.approx((one_ + low, one_ + high), abs=0.01)
    assert found.worst == {"A": ("entry 1", 1.0), "B": ("entry 1", 0.5)}


def test_rows_grow_with_entries_and_methods_and_may_be_missing():
    few, many = (
        rows(with_lists({"A": [[[1.0] * n, [0.5] * n]]}), CHANGE, (), styles("A")) for n in (2, 30)
    )
    assert few and many and many.size[1] > 9 * few.size[1] / 2 and many.size[0] == few.size[0]
    assert rows({"A": [one("A")]}, CHANGE, (), styles("A")) is None
    assert rows({}, CHANGE, (), {}) is None
    long = rows(with_lists(LISTS), CHANGE, ("word " * 30, "b", "c"), styles("AB"))
    assert long and "…" in long.svg


def test_a_method_far_off_leaves_the_frame_of_the_rows():
    values = {name: [[[1.0, 2.0], [0.5, 0.6]]] for name in "ABC"} | {
        "D": [[[1.0, 2.0], [9e3, 1.0]]]
    }
    found = rows(with_lists(values), CHANGE, (), styles("ABCD"))
    assert found and found.cut and ">9" not in found.svg


def test_logarithmic_axes_where_they_show_more():
    assert spans_decades([0.1, 0.81]) and not spans_decades([0.1, 0.8])
    assert not spans_decades([0.0, 1.0]) and not spans_decades([-1.0, 100.0])
    assert not spans_decades([]) and not spans_decades([math.nan])
    values = [[[10.0**-k, 10.0**-k] for k in range(4)]]
    for kind in ("curve", "change", "family"):
        runs = with_lists({"A": values, "B": values})
        for row in (row for own in runs.values() for run in own for row in run.rows):
            row["cvar"] = row["losses"][0]
        panel = Panel(kind, "cvar" if kind == "curve" else "losses", "t", log=True)
        svg, plain = drawn(runs, panel), drawn(runs, replace(panel, log=False))
        assert all(mark in svg for mark in (">0.001<", ">0.01<", ">0.1<")), kind
        assert ">0.01<" not in plain
        for run in (run for own in runs.values() for run in own):
            run.rows[0] |= {"cvar": 0.0, "losses": [0.0, 0.0]}  # has no place on such an axis
        assert drawn(runs, panel) == drawn(runs, replace(panel, log=False)), kind
    ends = with_lists({"A": [[[1.0, 1.0], [0.01, 1.0]]]})
    assert ">0.05<" in drawn(ends, replace(DOTS, log=True)) and ">0.05<" not in drawn(ends, DOTS)


def drawn(runs: dict[str, list[SavedRun]], panel: Panel) -> str:
    if panel.kind == "family":
        return plots.families(runs, panel, (), styles(runs)).drawings["A"]
    found = plots.curves(runs, panel, styles(runs)) if panel.kind == "curve" else None
    found = found or rows(runs, panel, (), styles(runs))
    assert found
    return found.svg


def test_equal_steps_on_a_logarithmic_axis():
    runs = with_lists({"A": [[[100.0], [10.0], [1.0]]]})
    for row, value in zip(runs["A"][0].rows, (100.0, 10.0, 1.0), strict=True):
        row["cvar"] = value
    drawing = plots.curves(runs, Panel("curve", "cvar", "t", log=True), styles(runs))
    assert drawing
    first, second, third = (y for _, y in dots_of(drawing.svg, METHODS[0][0]))
    assert second - first == pytest.approx(third - second, abs=0.01) and second > first + 10


class Grouped(Fair):
    """A page with rows; a warning that is about the data."""

    def page(self, config):
        panels = (CHANGE, replace(DOTS, y="shares", label="share right"))
        entries = {"losses": (), "shares": ("x", "y"), "constraints": ("c",) * 14}
        return replace(PAGE, panels=panels, entries=entries, references=("A", "B"))

    def warnings(self, config, row):
        return (f"Small groups: {row['size']} samples.", *super().warnings(config, row))


def grouped_page(tmp_path, **changes) -> str:
    runs = with_lists(LISTS)
    every = [run for own in runs.values() for run in own]
    for number, run in enumerate(every):
        run.rows[-1] |= {"size": 10 + number, "shares": [0.5, 0.25]}
        assert run.result
        run.result["end"] |= changes.get(run.name, {})
    page = report.render(several(tmp_path, every), cast(Task, Grouped()), None)
    checked = Checked()
    checked.feed(page)
    assert not checked.open
    return page


def test_rows_are_on_the_page_with_words_for_who_cannot_see_them(tmp_path):
    page = grouped_page(tmp_path)
    assert 'id="entries"' in page and "Before and after" in page and "At the end" in page
    assert "Largest after: A 3.000 (entry 3), B 0.500 (entry 1)." in page
    assert "Smallest: A 0.250 (y), B 0.250 (y)." in page
    assert "whiskers go from the smallest" in page
    assert len(drawings(page)) == 4  # two plots, light and dark
    for light, night in (drawings(page)[:2], drawings(page)[2:]):
        for day, dark in (*TOKENS.values(), *METHODS):
            assert day not in night and dark.upper() not in light
    assert list(cells(page, "Loss by group at the end")) == ["Losses 1", "Losses 2", "Losses 3"]
    assert list(cells(page, "Share right at the end")) == ["x", "y"]
    assert "A and B are there for reference and get none." in page


def test_a_run_may_name_the_entries_of_its_lists(tmp_path):
    page = grouped_page(tmp_path, B={"losses_names": ["p", "q", "r"], "shares_names": ["s", "t"]})
    assert list(cells(page, "Loss by group at the end")) == ["p", "q", "r"]
    assert list(cells(page, "Share right at the end")) == ["s", "t"]  # before those of the page
    assert "Largest after: A 3.000 (r)" in page and "entry 3" not in page
    runs = with_lists(LISTS)
    assert entry_names(runs, "losses", ("a", "b", "c")) == ("a", "b", "c")
    assert entry_names(runs, "losses", ("a", "b")) == ()  # names of something else
    assert entry_names({}, "losses", ("a", "b")) == ("a", "b")


def test_what_all_runs_are_told_is_told_once(tmp_path):
    page = grouped_page(tmp_path, A={"train_inside": 0.05})
    said = re.findall(r"<li><b>(.*?)</b> (.*?)</li>", page)
    assert said[-2:] == [
        ("A, all 2 seeds", "Vacuous: 0.050 inside."),
        ("All methods", "Small groups: 10 samples. (Numbers of A, seed 0.)"),
    ]
    assert page.count("Small groups") == 1


def test_rows_of_one_run_have_files_of_their_own(tmp_path):
    run = replace(with_lists(LISTS)["A"][0], folder=tmp_path)
    panels = (CHANGE, DOTS, replace(CHANGE, kind="family"))
    plots.save_run(run, replace(PAGE, panels=panels, entries={}))
    written = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert written == ["losses-change.svg", "losses-dots.svg", "losses.svg"]


def test_kinds_of_entries_end_at_a_comma():
    names = ("not blond, man", "not blond, woman", "blond, man")
    found = plots.families(with_lists(LISTS), replace(CHANGE, kind="family"), names, styles("AB"))
    assert found.kinds == {"not blond": "solid", "blond": "dashed"}
