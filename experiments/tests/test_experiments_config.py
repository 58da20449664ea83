"""Configs: layers, overrides, every mistake named with its key, its place and what is allowed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from fcco_experiments import config, tasks
from fcco_experiments.config import ConfigError
from fcco_experiments.task import Method
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_task import TASK, Shape, ToyConfig


def load(text: str, folder: Path, *overrides: str, quick: bool = False) -> ToyConfig:
    file = folder / "mine.yaml"
    file.write_text(text)
    return config.load(TASK, file, quick=quick, overrides=overrides)


def problems(text: str, folder: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text, folder, *overrides)
    return [each.replace(f"{folder}/", "") for each in caught.value.problems]


# --- reading -----------------------------------------------------------------------------------


def test_layers_are_merged_key_by_key():
    read = config.load(TASK, "quadratic")
    assert list(read.methods) == ["sonex", "sox", "alexr2"]  # extended file first
    assert read.epochs == 6 and read.steps == 4 and read.seeds == (0, 1)
    assert read.shape == Shape(5, 0.2, "plain")
    assert read.methods["sonex"] == Method(
        "sonex", 0.02, "momentum", settings={"penalty": 8, "smoothing": 0.01, "gamma": 0.3}
    )


def test_quick_is_put_on_top_and_null_removes_a_method():
    read = config.load(TASK, "quadratic", quick=True)
    assert (read.epochs, read.steps) == (2, 3)  # of the extended file, of the file itself
    assert list(read.methods) == ["sonex", "alexr2"]


@pytest.mark.parametrize(
    "text, value",
    [("1e-3", 0.001), ("1E5", 1e5), ("+.5", 0.5), ("-2e+1", -20.0), ("3.", 3.0), ("1_0", "1_0")],
)
def test_numbers_are_numbers(text, value, tmp_path):
    """YAML 1.1 reads 1e-3 as text."""
    read = config.parse(f"x: {text}", "f").plain()["x"]
    assert read == value and type(read) is type(value)
    if isinstance(value, float):
        assert load("data: a", tmp_path, f"slow={text}").slow == value


def test_words_are_words():
    node = config.parse("{a: no, b: on, c: 010, d: 2020-01-01, e: true, f: ~, g: 0x10}", "f")
    assert node.plain() == {
        "a": "no", "b": "on", "c": 10, "d": "2020-01-01", "e": True, "f": None, "g": 16,
    }  # fmt: skip


def test_overrides_win_and_reach_into_methods():
    read = config.load(
        TASK, "quadratic", quick=True,
        overrides=["epochs=9", "methods.sonex.lr=1e-4", "methods.sonex.settings.gamma=1",
                   "shape.kind=steep", "checkpoint-every=7", "methods.alexr2=null", "seeds=[3]"],
    )  # fmt: skip
    assert read.epochs == 9 and read.checkpoint_every == 7 and read.seeds == (3,)
    assert read.methods == {
        "sonex": Method(
            "sonex", 1e-4, "momentum", settings={"penalty": 8, "smoothing": 0.01, "gamma": 1}
        )
    }
    assert read.shape == Shape(5, 0.2, "steep")


def test_a_name_with_dots_can_be_overridden(tmp_path):
    text = "data: a\nmethods: {sonex-0.1: {method: sonex, lr: 1}}"
    read = load(text, tmp_path, "methods.sonex-0.1.lr=2", "methods.sonex-0.1.beta=0.5")
    assert list(read.methods) == ["sonex-0.1"]
    assert read.methods["sonex-0.1"].lr == 2 and read.methods["sonex-0.1"].beta == 0.5


def test_a_users_file_may_extend_one_of_the_package(tmp_path):
    assert load("extends: base\nepochs: 3", tmp_path).methods.keys() == {"sonex", "sox"}


# --- mistakes ----------------------------------------------------------------------------------


def test_unknown_keys_at_every_depth_all_at_once(tmp_path):
    text = """data: a
epocs: 3
shape: {dimensions: 5}
methods:
  sonex:
    method: sonex
    lr: 1
    updat: adam
  other: {method: sox, lr: 0.1, settings: {penalti: 3}}
"""
    assert problems(text, tmp_path) == [
        "mine.yaml, line 2: unknown key `epocs`; did you mean `epochs`? Allowed: data, epochs, "
        "seeds, methods, checkpoint_every, evaluate_every, steps, shape, slow, kill, break_at, "
        "note.",
        "mine.yaml, line 3: unknown key `shape.dimensions`; did you mean `shape.dimension`? "
        "Allowed: dimension, noise, kind.",
        "mine.yaml, line 8: unknown key `methods.sonex.updat`; did you mean "
        "`methods.sonex.update`? Allowed: method, lr, update, beta, weight_decay, independent, "
        "settings.",
    ]


def test_what_a_task_checks_itself_is_placed_too(tmp_path):
    text = "data: a\nmethods:\n  other:\n    method: sox\n    lr: 0.1\n    settings:\n      z: 3"
    assert problems(text, tmp_path) == ["mine.yaml, line 7: `other` has no setting `z`."]
    text = text.replace("z:", "gamma:")
    assert problems(text, tmp_path, "methods.other.settings.z=1") == [
        "command line: `other` has no setting `z`."
    ]


def test_a_mistake_in_a_method_is_placed_where_it_was_changed(tmp_path, monkeypatch):
    """Not where the file that is extended has the method."""
    check = lambda self, config: [(("methods", "sonex"), "does not fit.")]  # noqa: E731
    monkeypatch.setattr(type(TASK), "check", check)
    text = "extends: base\nepochs: 3\nmethods:\n  sonex:\n    lr: 9\n"
    assert problems(text, tmp_path) == ["mine.yaml, line 4: does not fit."]
    assert problems("extends: base", tmp_path)[0].startswith("base.yaml, line ")
    assert problems("extends: base", tmp_path, "methods.sonex.lr=9") == [
        "command line: does not fit."
    ]


def test_a_file_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"note: caf\xe9")
    with pytest.raises(ConfigError, match=r"latin\.yaml: this is not a text file in UTF-8"):
        config.load(TASK, tmp_path / "latin.yaml")


def test_wrong_types_and_values(tmp_path):
    text = """data: 5
epochs: ten
seeds: 3
slow: true
shape: {kind: stee, noise: [1]}
methods:
  sonex: {method: sonex, lr: fast, settings: {penalty: [[1]]}}
  sox: 3
"""
    assert problems(text, tmp_path) == [
        "mine.yaml, line 1: `data` must be text but is: 5.",
        "mine.yaml, line 2: `epochs` must be a whole number but is: 'ten'.",
        "mine.yaml, line 3: `seeds` must be a list such as [1, 2] but is: 3.",
        "mine.yaml, line 7: `methods.sonex.lr` must be a number but is: 'fast'.",
        "mine.yaml, line 7: `methods.sonex.settings.penalty` must be a number or a whole number "
        "or true or false or text but is: [[1]].",
        "mine.yaml, line 8: `methods.sox` must be a mapping of keys to values but is: 3.",
        "mine.yaml, line 5: `shape.noise` must be a number but is: [1].",
        "mine.yaml, line 5: `shape.kind` must be one of plain, steep but is: 'stee'; did you mean "
        "`steep`?",
        "mine.yaml, line 4: `slow` must be a number but is: True.",
    ]


def test_missing_keys_and_ranges(tmp_path):
    assert problems("epochs: 3\nmethods: {sonex: {method: sonex}}", tmp_path) == [
        "mine.yaml: the key `data` is missing.",
        "mine.yaml, line 2: the key `methods.sonex.lr` is missing.",
    ]
    assert problems("data: a\nepochs: 0", tmp_path) == [
        "mine.yaml, line 2: `epochs` must be at least 1 but is: 0."
    ]
    for key in ("checkpoint_every", "evaluate_every"):
        assert problems(f"data: a\n{key}: 0", tmp_path) == [
            f"mine.yaml, line 2: `{key}` must be at least 1 but is: 0."
        ]
    for seeds in ("[1, 2, 1]", "[-1]"):
        (found,) = problems(f"data: a\nseeds: {seeds}", tmp_path)
        assert found.startswith("mine.yaml, line 2: `seeds` must be") and seeds in found
    assert problems("data: a\nepochs: 3", tmp_path, "epochs=0") == [
        "command line: `epochs` must be at least 1 but is: 0."
    ]


def test_mistakes_on_the_command_line_are_placed_there(tmp_path):
    found = problems(
        "extends: base", tmp_path, "epochs=ten", "methods.sonexx.lr=1", "shape.kind=[1", "slow"
    )
    assert found[0] == (
        "command line: `methods.sonexx.lr`: there is no method `sonexx`; did you mean `sonex`? "
        "There are: sonex, sox."
    )
    assert found[1].startswith("command line: `shape.kind=[1`: command line: this is not valid")
    assert found[2:] == [
        "command line: `slow` is not of the form key=value.",
        "command line: `epochs` must be a whole number but is: 'ten'.",
    ]


def test_a_file_that_is_no_yaml_says_where(tmp_path):
    (found,) = problems("data: a\nshape: {noise: 1\nepochs: 3\n", tmp_path)
    assert re.match(r"mine\.yaml, line [34]: this is not valid YAML: ", found)
    assert problems("data: a\nepochs: 1\nepochs: 2", tmp_path) == [
        "mine.yaml, line 3: this is not valid YAML: the key `epochs` is there twice."
    ]
    assert problems("- 1", tmp_path) == ["mine.yaml: must be a mapping of keys to values."]


def test_names_of_methods_are_names_of_folders(tmp_path):
    text = "data: a\nmethods: {'../x': {method: sonex, lr: 1}, ok-1.5_+: {method: sonex, lr: 1}}"
    (found,) = problems(text, tmp_path)
    assert found.startswith("mine.yaml, line 2: the name of the method `../x` must begin")


def test_unknown_configs_and_circles(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean `base`\? There are: base, quadratic"):
        config.load(TASK, "bas")
    with pytest.raises(ConfigError, match=r"There is no config file no/such\.yaml"):
        config.load(TASK, "no/such.yaml")
    (found,) = problems("extends: nothing", tmp_path)
    assert found.startswith("mine.yaml, line 1: `extends`: The task toy has no config `nothing`")
    (tmp_path / "other.yaml").write_text("extends: mine")
    (found,) = problems("extends: other", tmp_path)
    assert "the files extend each other" in found


def test_tasks_by_name_and_by_place(monkeypatch):
    assert tasks.get("toy_task:TASK") is TASK
    monkeypatch.setattr(tasks, "_PLACES", {"fairness": "fcco_experiments.tasks.fairness:TASK"})
    with pytest.raises(ConfigError, match=r"did you mean `fairness`\? Tasks: fairness"):
        tasks.get("fairnes")
    tasks.register("toy", "toy_task:TASK")
    assert tasks.get("toy") is TASK and "toy" in tasks.names()
    with pytest.raises(ValueError, match="'module:attribute' but is: 'toy_task'"):
        tasks.register("toy", "toy_task")
    with pytest.raises(ConfigError, match="toy_task has no OTHER"):
        tasks.get("toy_task:OTHER")
    with pytest.raises(ConfigError, match="cannot be imported"):
        tasks.get("no_such_module:TASK")


# --- writing -----------------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers(-(2**60), 2**60)
odd = ["1e-3", "null", "yes", "<<", "0x1", "", " a", "1:2", "a\x85b", "\u2028", "\n a\n"]
words = st.text(max_size=12).filter(lambda text: "\0" not in text) | st.sampled_from(odd)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,6}", fullmatch=True)
methods = st.builds(
    Method,
    method=words,
    lr=finite,
    update=st.sampled_from(["adam", "momentum", "sgd"]),
    beta=finite,
    settings=st.dictionaries(words, finite | whole | st.booleans() | words, max_size=3),
)
configs = st.builds(
    ToyConfig,
    data=words,
    epochs=st.integers(1, 10**6),
    seeds=st.lists(st.integers(0, 2**60), max_size=3, unique=True).map(tuple),
    methods=st.dictionaries(names, methods, max_size=3),
    shape=st.builds(Shape, dimension=whole, noise=finite),
    kill=st.none() | st.tuples(whole, whole),
    note=words,
)


@settings(max_examples=60, deadline=None)
@given(configs)
def test_what_is_dumped_reads_back_equal(made: ToyConfig):
    node = config.parse(config.dump(made), "dumped")
    read = config.from_plain(ToyConfig, node.plain(), "dumped")
    assert read == made and repr(read) == repr(made)  # 1, 1.0 and True are equal, but not the same


def test_a_dumped_config_is_a_config_file(tmp_path):
    made = config.load(TASK, "quadratic")
    assert load(config.dump(made), tmp_path) == made
    assert dataclasses.asdict(made)["methods"]["sonex"]["lr"] == 0.02
