"""Who solved the problem best, what seeds can tell, what not to believe: by hand."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from fcco_experiments.task import Method, Row
from fcco_experiments.tasks.group_dro import judge
from fcco_experiments.tasks.group_dro.config import GroupDRO
from hypothesis import given
from hypothesis import strategies as st

WORDS = {"sonex": "sonex", "sonex-adam": "sonex", "sonx": "sonx", "ooa-cvar": "ooa"}
WORDS |= {"erm": "erm", "uniform": "uniform"}


def config(**changes: Any) -> GroupDRO:
    methods = {name: Method(word, 0.1) for name, word in WORDS.items()}
    usual: dict[str, Any] = {"data": "celeba", "seeds": (0, 1, 2), "methods": methods, "epochs": 5}
    usual["choose_by"] = "train_cvar"
    return GroupDRO(**(usual | changes))


def row(**changes: float) -> Row:
    usual: Row = {"epoch": 5, "test_smallest": 50}
    for part in ("train", "val", "test"):
        usual |= {f"{part}_cvar": 0.5, f"{part}_worst_accuracy": 0.7, f"{part}_accuracy": 0.9}
    return usual | changes


def rows(key: str, *values: float, **others: float) -> list[Row]:
    return [row(**{key: value}, **others) for value in values]


# The rule of a sweep.


def test_the_score_is_the_figure_that_was_asked_for() -> None:
    own = row(train_cvar=0.2, val_cvar=0.3, val_worst_accuracy=0.75)
    assert judge.score(config(choose_by="train_cvar"), own) == (0.2,)
    assert judge.score(config(choose_by="val_cvar"), own) == (0.3,)
    assert judge.score(config(choose_by="val_error"), own) == (0.25, 0.3)


def test_ties_of_the_error_are_broken_by_the_cvar() -> None:
    asked = config(choose_by="val_error")
    first, second, third = (
        row(val_worst_accuracy=a, val_cvar=c) for a, c in ((0.8, 0.9), (0.7, 0.1), (0.7, 0.2))
    )
    ranked = sorted([third, second, first], key=lambda each: judge.score(asked, each))
    assert ranked == [first, second, third]


@pytest.mark.parametrize("by", ["train_cvar", "val_cvar", "val_error"])
def test_test_figures_never_count(by: Any) -> None:
    asked = config(choose_by=by)
    kept = judge.score(asked, row())
    without = {key: value for key, value in row().items() if not key.startswith("test_")}
    assert judge.score(asked, without) == kept
    bare = {key: value for key, value in row().items() if not key.startswith(by[:3])}
    with pytest.raises(ValueError, match=f"choose_by: {by}` needs {by[:3]}"):
        judge.score(asked, bare)


def test_the_rule_in_words() -> None:
    assert "CVaR on training data" in judge.score_rule(config(choose_by="train_cvar"))
    assert "CVaR on validation data" in judge.score_rule(config(choose_by="val_cvar"))
    worst = judge.score_rule(config(choose_by="val_error"))
    assert "worst-group accuracy on validation data" in worst and "then the lowest CVaR" in worst
    assert "tenth-percentile" in judge.score_rule(config(choose_by="val_error", data="amazon"))


# Samples to reach a value.


def test_samples_by_hand() -> None:
    # Means: 0.9 at 0, 0.6 at 100, 0.7 at 200, 0.2 at 300.
    one = [(0, 1.0), (100, 0.7), (200, 0.8), (300, 0.2)]
    two = [(0, 0.8), (100, 0.5), (200, 0.6), (300, 0.2)]
    reach = judge.samples_to_reach
    assert reach([one, two], 0.9) == 0  # at the start
    assert reach([one, two], 0.75) == pytest.approx(50)
    assert reach([one, two], 0.6) == pytest.approx(100)  # the first time, not the last
    assert reach([one, two], 0.45) == pytest.approx(250)
    assert reach([one, two], 0.1) is None
    assert reach([one, two[:2]], 0.45) is None  # where a seed ends, so does the mean
    assert reach([], 0.5) is None


def test_seeds_with_other_grids_are_averaged_evaluation_by_evaluation() -> None:
    curves = [[(0, 1.0), (100, 0.0)], [(0, 1.0), (200, 0.0)]]
    assert judge.samples_to_reach(curves, 0.5) == pytest.approx(75)


def test_a_value_that_is_not_finite_reaches_nothing() -> None:
    curve = [(0, math.nan), (100, 0.4), (200, 0.2)]
    assert judge.samples_to_reach([curve], 0.5) == 100  # no line from a value that is not there
    assert judge.samples_to_reach([[(0, 1.0), (100, math.nan)]], 0.5) is None


points = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@given(points, st.floats(0, 1))
def test_the_curve_is_at_the_target_where_it_is_reached(values: list[float], target: float) -> None:
    curve = [(10.0 * k, value) for k, value in enumerate(values)]
    found = judge.samples_to_reach([curve], target)
    if found is None:
        assert min(values) > target
        return
    before = int(found // 10)
    left, right = values[before], values[min(before + 1, len(values) - 1)]
    height = left + (right - left) * (found / 10 - before)
    assert height <= target + 1e-9
    assert all(value > target for value in values[:before])


# The verdict.


def test_the_lowest_cvar_wins_and_is_compared_seed_by_seed() -> None:
    said = judge.verdict(
        config(),
        {
            "sonx": rows("train_cvar", 0.50, 0.60, 0.70),
            "sonex": rows("train_cvar", 0.39, 0.50, 0.61),  # behind by 0.11, 0.10, 0.09
        },
    )
    assert said[0].startswith("sonex has the lowest final training CVaR, 0.5000 ± 0.1100 over 3")
    assert "worst 15 % of groups" in said[0]
    assert "sonx, has 0.6000 ± 0.1000, 0.1000 ± 0.0100 more, seed by seed (3 of 3" in said[1]
    assert said[1].endswith("more than the spread over seeds.")


def test_a_difference_within_the_spread_is_called_so() -> None:
    said = judge.verdict(
        config(),
        {
            "sonex": rows("train_cvar", 0.5, 0.5, 0.5),
            "sonx": rows("train_cvar", 0.6, 0.4, 0.56),  # 0.02 more on average, deviation 0.106
        },
    )
    assert "2 of 3 seeds agree): within the spread" in said[1]


def test_the_next_setting_and_the_next_method_are_told() -> None:
    values = {"sonex": 0.1, "sonex-adam": 0.2, "ooa-cvar": 0.3, "sonx": 0.4}
    said = judge.verdict(
        config(), {name: rows("train_cvar", *[v] * 3) for name, v in values.items()}
    )
    assert said[1].startswith("sonex-adam follows with 0.2000")
    assert said[2].startswith("The best of the other methods, ooa-cvar, has 0.3000")
    assert not any("sonx" in line for line in said)


def test_one_seed_and_missing_seeds_say_little() -> None:
    one = config(seeds=(0,))
    said = judge.verdict(one, {"sonex": rows("train_cvar", 0.1), "sonx": rows("train_cvar", 0.3)})
    assert "seeds" not in said[0] and "±" not in said[0]
    assert "0.2000 more; without several seeds of both, that may be chance" in said[1]
    missing = {"sonex": rows("train_cvar", 0.1, 0.2), "sonx": rows("train_cvar", 0.3, 0.3, 0.6)}
    assert "0.2500 more; without several" in judge.verdict(config(), missing)[1]


def test_a_reference_does_not_win_but_is_told_when_it_is_lower() -> None:
    methods = {"erm": rows("train_cvar", *[0.1] * 3), "sonex": rows("train_cvar", *[0.2] * 3)}
    said = judge.verdict(config(), methods)
    assert said[0].startswith("sonex has the lowest")
    assert any("But erm" in line and "0.1000" in line for line in said)
    methods["erm"] = rows("train_cvar", *[0.3] * 3)
    assert not any("But" in line for line in judge.verdict(config(), methods))


def test_points_against_plain_training() -> None:
    key = "test_worst_accuracy"
    methods = {
        "sonex": rows(key, 0.80, 0.82, 0.84, train_cvar=0.1),
        "sonx": rows(key, 0.90, 0.80, 1.00, train_cvar=0.2),
        "uniform": rows(key, *[0.99] * 3),
        "erm": rows(key, 0.78, 0.76, 0.86),  # 2, 6 and -2 points
    }
    said = [line for line in judge.verdict(config(), methods) if "test data" in line]
    assert len(said) == 2
    assert (
        "sonex has a worst-group accuracy of 0.820 ± 0.020, 2.0 ± 4.0 points above erm" in said[0]
    )
    assert "(0.800 ± 0.053), which is within the spread" in said[0]
    assert "sonx has a worst-group accuracy of 0.900 ± 0.100, the highest, 10.0" in said[1]
    below = {"sonex": rows(key, *[0.5] * 3), "erm": rows(key, *[0.6] * 3)}
    assert any("10.0 ± 0.0 points below erm" in line for line in judge.verdict(config(), below))
    amazon = judge.verdict(config(data="amazon"), below)
    assert any("a tenth-percentile accuracy over users of 0.500" in line for line in amazon)
    alone = judge.verdict(config(), {"sonex": rows(key, *[0.5] * 3)})
    assert not any("points" in line or "highest" in line for line in alone)


def test_a_run_that_ended_early_is_no_candidate() -> None:
    cut = [*rows("train_cvar", 0.1, 0.1), row(train_cvar=0.1, epoch=2)]
    said = judge.verdict(config(), {"sonx": cut, "sonex": rows("train_cvar", *[0.2] * 3)})
    assert said[0].startswith("sonex has the lowest")
    assert "sonx has runs that ended early and is no candidate." in said
    broken = rows("train_cvar", 0.1, 0.1, math.nan)
    assert judge.verdict(config(), {"sonx": broken})[0].startswith("No method")


def test_nothing_but_references() -> None:
    said = judge.verdict(config(), {"erm": rows("train_cvar", *[0.2] * 3), "sonex": []})
    assert said[0] == "No method that minimises the CVaR has finished."
    assert judge.score_rule(config()) in said[-1]


def test_settings_of_a_sweep_and_unknown_names_have_their_method() -> None:
    assert judge.word_of(config(), "ooa-cvar@3") == "ooa" == judge.word_of(config(), "ooa-cvar")
    assert judge.word_of(config(), "new") == "new"
    assert judge.references(config()) == ("erm", "uniform")


# Warnings.


def test_nothing_to_warn_of() -> None:
    good = row(tracking_error=0.4, threshold=0.3, threshold_exact=0.5, test_smallest=20)
    assert judge.warnings(config(), good) == ()
    assert judge.warnings(config(), row()) == ()  # methods without a tracker


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tracking_error": 0.51}, "off by 0.51 .* the CVaR itself, 0.5"),
        ({"threshold": 0.9, "threshold_exact": 0.7}, None),  # 0.2, less than half of 0.5
        ({"threshold": 0.9, "threshold_exact": 0.64}, "threshold is off"),
        ({"threshold": 0.9, "threshold_exact": 0.4}, "threshold is off: 0.9 .* 0.4"),
        ({"threshold": -0.1, "threshold_exact": 0.4}, "threshold is off"),
        ({"test_smallest": 19}, "Small test groups.* 19 samples.* 5 points"),
        ({"test_smallest": 8}, "8 samples.* 12 points"),
        ({"test_worst_accuracy": 0.0, "test_accuracy": 0.85}, "One answer for all.* 85.0 %"),
        ({"test_worst_accuracy": 0.0, "test_accuracy": 0.4}, None),
        ({"test_worst_accuracy": 0.01, "test_accuracy": 0.85}, None),
    ],
)
def test_warnings(changes: dict[str, float], said: str | None) -> None:
    found = judge.warnings(config(), row(**changes))
    if said is None:
        assert not found
    else:
        assert len(found) == 1 and re.search(said, found[0])
    if "test_smallest" in changes:
        assert "Small test users" in judge.warnings(config(data="amazon"), row(**changes))[0]


def test_where_settings_must_generalise_the_test_data_come_first() -> None:
    own = {"sonex": rows("test_cvar", 0.4, 0.5, 0.6), "sonx": rows("test_cvar", 0.3, 0.4, 0.5)}
    said = judge.verdict(config(choose_by="val_cvar"), own)
    assert said[0] == "sonx has the lowest CVaR on test data, 0.4000 ± 0.1000."
    assert "lowest final training CVaR" in said[1]
    assert "on test data" not in judge.verdict(config(), own)[0]
