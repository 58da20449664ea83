"""Configs: layers, overrides, every mistake named with its key, its place and what is allowed."""

from __future__ import annotations

from dataclasses import dataclass
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
    return [each.replace(f"{folder}/", "") for each in caught.value.args]


# --- reading -----------------------------------------------------------------------------------


def test_layers_are_merged_key_by_key():
    read = config.load(TASK, "quadratic")
    assert list(read.methods) == ["sonex", "sox", "alexr2"]  # extended file first
    assert read.epochs == 6 and read.steps == 4 and read.seeds == (0, 1)
    assert read.shape == Shape(5, 0.2, "plain")
    assert read.methods["sonex"] == Method(
        "sonex", 0.02, "momentum", settings={"penalty": 8, "smoothing": 0.01, "gamma": 0.3}
    )
    quick = config.load(TASK, "quadratic", quick=True)
    assert (quick.epochs, quick.steps) == (2, 3)  # of the extended file, of the file itself
    assert list(quick.methods) == ["sonex", "alexr2"]  # null removes a method


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-3", 0.001), ("1E5", 1e5), ("+.5", 0.5), ("-2e+1", -20.0), ("3.", 3.0), ("1_000", 1000),
        ("no", "no"), ("on", "on"), ("010", 10), ("0x10", 16), ("2020-01-01", "2020-01-01"),
        ("true", True), ("~", None),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text, value):
    """YAML 1.1 reads 1e-3 as text, and `no` as false."""
    read = config.parse(f"x: {text}", "f").values["x"]
    assert read == value and type(read) is type(value)


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
    assert set(problems(text, tmp_path)) == {
        "mine.yaml, line 2: unknown key `epocs`; did you mean `epochs`? Allowed: "
        f"{', '.join(config.fields_of(ToyConfig))}.",
        "mine.yaml, line 3: unknown key `shape.dimensions`; did you mean `shape.dimension`? "
        "Allowed: dimension, noise, kind.",
        "mine.yaml, line 8: unknown key `methods.sonex.updat`; did you mean "
        "`methods.sonex.update`? Allowed: method, lr, update, beta, weight_decay, independent, "
        "settings.",
    }


def test_what_a_task_checks_itself_is_placed_too(tmp_path):
    text = "data: a\nmethods:\n  other:\n    method: sox\n    lr: 0.1\n    settings:\n      z: 3"
    assert problems(text, tmp_path) == ["mine.yaml, line 7: `other` has no setting `z`."]


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
    found = problems(text, tmp_path)
    assert [
        (each.partition(": ")[0], each.split("`")[1], each.partition(" is: ")[2]) for each in found
    ] == [
        ("mine.yaml, line 1", "data", "5"),
        ("mine.yaml, line 2", "epochs", "'ten'"),
        ("mine.yaml, line 3", "seeds", "3"),
        ("mine.yaml, line 7", "methods.sonex.lr", "'fast'"),
        ("mine.yaml, line 7", "methods.sonex.settings.penalty", "[[1]]"),
        ("mine.yaml, line 8", "methods.sox", "3"),
        ("mine.yaml, line 5", "shape.noise", "[1]"),
        ("mine.yaml, line 5", "shape.kind", "'stee'"),
        ("mine.yaml, line 4", "slow", "True"),
    ]
    assert "`epochs` must be a valid integer but" in found[1] and "'plain' or 'steep'" in found[7]


def test_missing_keys_and_ranges(tmp_path):
    assert problems("epochs: 3\nmethods: {sonex: {method: sonex}}", tmp_path) == [
        "mine.yaml: the key `data` is missing.",
        "mine.yaml, line 2: the key `methods.sonex.lr` is missing.",
    ]
    assert problems("data: a\nepochs: 0", tmp_path) == [
        "mine.yaml, line 2: `epochs` must be at least 1 but is: 0."
    ]


@dataclass(frozen=True, kw_only=True)
class Warm(ToyConfig):
    warmup: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup >= self.epochs:
            raise ValueError(f"`warmup` must be below epochs = {self.epochs}: {self.warmup}.")


@pytest.mark.parametrize(
    "text, overrides, place",
    [
        ("epochs: 9\nwarmup: 20", (), "mine.yaml, line 4"),
        ("epochs: 9\nwarmup: 3", ("epochs=1",), "command line"),
        ("warmup: 8", ("steps=2",), "mine.yaml, line 3"),
        ("warmup: 3\nquick:\n  epochs: 2", ("steps=2",), "mine.yaml, line 5"),
    ],
)
def test_values_that_contradict_each_other_are_mended_where_the_last_was_written(
    text, overrides, place, tmp_path, monkeypatch
):
    monkeypatch.setattr(type(TASK), "config", Warm)
    with pytest.raises(ConfigError) as caught:
        load(f"extends: base\ndata: a\n{text}", tmp_path, *overrides, quick="quick" in text)
    (found,) = (each.replace(f"{tmp_path}/", "") for each in caught.value.args)
    assert found.startswith(f"{place}: `warmup` must be below")


@pytest.mark.parametrize(
    "text, said",
    [
        ("a: &x [1]\nb: *x", "line 2: this is not valid YAML: aliases"),
        ("a: &x {b: *x}", "aliases"),
        ("[" * 5000, "maximum depth"),
        ("a: !!python/object:os.system x", "the tag"),
        ("epochs: 3\nepochs: 3", "line 2: this is not valid YAML: found duplicate key"),
        ("data: a\nshape: {noise: 1\nepochs: 3\n", "line 3: this is not valid YAML"),
        ("- 1", "mine.yaml: must be a mapping of keys to values."),
        ("? [1]\n: 2", "a key must be a word"),
        ("data: a\nnote: !!binary aGFsbG8=", "mine.yaml, line 2: this is not valid YAML: the tag"),
        ("data: a\nseeds: !!set {1, 2}", "mine.yaml, line 2: this is not valid YAML: the tag"),
        ("data: a\nseeds: !!omap [a: 1]", "mine.yaml, line 2: this is not valid YAML: the tag"),
        ("data: a\nslow: 1e999", "mine.yaml, line 2: `slow` must be a finite number"),
        ("data: a\nshape:\n  noise: .nan", "mine.yaml, line 3: `shape.noise` must be a finite"),
        (
            "data: a\nmethods:\n  sonex: {method: sonex, lr: -1e400}",
            "mine.yaml, line 3: `methods.sonex.lr` must be a finite number",
        ),
        (
            "data: a\nmethods:\n  a: {method: a, lr: 1, settings: {penalty: .inf}}",
            "mine.yaml, line 3: `methods.a.settings.penalty` must be",
        ),
        ("settings: 3", "`settings` must be a mapping"),
        ("data: a\nquick: 3", "`quick` must be a mapping"),
        ("data: a\nmethods: [sonex]", "`methods` must be a mapping"),
        (
            "data: a\nmethods: {'../x': {method: sonex, lr: 1}}",
            "line 2: the name of the method `../x`",
        ),
    ],
)
def test_odd_files_are_refused(text, said, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(TASK, tmp_path / "mine.yaml", quick=True)
    assert said in str(caught.value) and "mine.yaml" in str(caught.value)


def test_methods_with_lists_are_several_methods(tmp_path):
    text = "data: a\nmethods:\n  a: {method: s, lr: [0.1, 1], settings: {gamma: {low: 0, high: 1}}}"
    read = load(text, tmp_path, "methods.a-0.1-low.beta=0.5", "methods.a-1-high=null")
    assert {name: (m.lr, m.settings["gamma"], m.beta) for name, m in read.methods.items()} == {
        "a-0.1-low": (0.1, 0, 0.5), "a-0.1-high": (0.1, 1, 0.1), "a-1-low": (1, 0, 0.1),
    }  # fmt: skip


def test_settings_are_put_on_top_and_extend_each_other(tmp_path):
    (tmp_path / "own.yaml").write_text(
        "extends: base\ndata: own\nepochs: 4\nquick: {steps: 1}\nsettings:\n"
        "  default: {epochs: 5}\n"
        "  long: {epochs: 7, steps: 9, quick: {steps: 2}}\n"
        "  longer: {extends: own-long, epochs: 8}\n"
        "  bare: {extends: other}\n"
    )
    (tmp_path / "other.yaml").write_text("data: x\nsteps: 6")
    task = type(TASK)()
    task.configs = tmp_path  # type: ignore[misc]
    (tmp_path / "base.yaml").write_text("note: base")
    found = {}
    for name in config.names(task):
        for quick in (False, True):
            read = config.load(task, name, quick=quick)
            found[name, quick] = (read.data, read.epochs, read.steps, read.note)
    assert found == {
        ("own", False): ("own", 5, 4, "base"), ("own", True): ("own", 5, 1, "base"),
        ("own-long", False): ("own", 7, 9, "base"), ("own-long", True): ("own", 7, 2, "base"),
        ("own-longer", False): ("own", 8, 9, "base"), ("own-longer", True): ("own", 8, 2, "base"),
        ("own-bare", False): ("own", 4, 6, ""), ("own-bare", True): ("own", 4, 1, ""),
    }  # fmt: skip


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
        "command line: `epochs` must be a valid integer but is: 'ten'",
    ]


def test_unknown_configs_and_circles(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean `quadratic`\? There are: quadratic\."):
        config.load(TASK, "quadratik")
    with pytest.raises(ConfigError, match=r"There is no config file no/such\.yaml"):
        config.load(TASK, "no/such.yaml")
    (found,) = problems("extends: nothing", tmp_path)
    assert found.startswith("mine.yaml, line 1: `extends`: The task toy has no config `nothing`")
    (tmp_path / "other.yaml").write_text("extends: mine")
    (found,) = problems("extends: other", tmp_path)
    assert "the files extend each other" in found


def test_tasks_by_name_and_by_place():
    assert tasks.get("toy_task:TASK") is TASK
    with pytest.raises(ConfigError, match=r"did you mean `fairness`\? Tasks: fairness"):
        tasks.get("fairnes")
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
    read = config.from_plain(ToyConfig, node.values, "dumped")
    assert read == made and repr(read) == repr(made)  # 1, 1.0 and True are equal, but not the same
