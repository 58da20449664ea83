"""The commands as a user types them: help, overrides, refusals, kill -9, Ctrl-C, JSON."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fcco_experiments import config, data, environment, report, store, sweep, tasks
from fcco_experiments.cli import app, main
from fcco_experiments.cli.display import Display
from fcco_experiments.run import engine
from fcco_experiments.store import Event
from test_experiments_engine import equal, result, rows, spec, weights
from toy_task import TASK

import fcco as library

TESTS = Path(__file__).parent
TOY = "toy_task:TASK"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # a task may put the current folder there


@pytest.fixture
def fast(monkeypatch):
    """Without the page and the plots, which have tests of their own."""
    monkeypatch.setattr(report, "render", lambda *arguments: "<!doctype html>")


def fcco(*arguments: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, (done.output, done.exception)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_a_process_of_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="without torchrun"):
        main()


def process(*arguments: str, slow: float) -> subprocess.Popen[str]:
    """A command whose steps last `slow` seconds, which changes nothing else."""
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    return subprocess.Popen(
        # As the console script, which does not put the current folder on the path.
        [sys.executable, "-P", "-m", "fcco_experiments", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": path, "TOY_SLOW": str(slow)},
    )


def wait_for(*files: Path, lines: int, running: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not all(each.exists() and len(each.read_text().splitlines()) >= lines for each in files):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


# --- folders that somebody has changed ----------------------------------------------------------

ODD = (None, "", [], {}, -1, 1e999, "x\x1b[31m", True, 10**30, [[]], {"a": None}, 0.5, "nan")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested mappings, and in the first three entries of lists."""
    keys = value if isinstance(value, dict) else range(min(3, len(value)))
    inside = [places(value[k], (*path, k)) for k in keys if isinstance(value[k], (dict, list))]
    return [path, *((*path, key) for key in keys), *(each for some in inside for each in some)]


def tampered(value: Any, dice: random.Random) -> Any:
    """With one entry deleted or replaced."""
    *path, last = dice.choice(places([value])[1:])
    whole = inner = json.loads(json.dumps([value]))
    for key in path:
        inner = inner[key]
    if path and dice.random() < 0.4:
        del inner[last]
    else:
        inner[last] = dice.choice(ODD)
    return whole[0]


def tamper(file: Path, dice: random.Random) -> None:
    """Change a value, a few bytes or the length of a file."""
    content = file.read_bytes()
    if file.suffix == ".pt" or dice.random() < 0.2:
        changed = bytearray(content)
        for _ in range(3):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        file.write_bytes(changed[: dice.choice([len(changed), dice.randrange(len(changed))])])
        return
    text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
    if ".jsonl" in file.name:
        lines = [json.loads(line) for line in text.splitlines()]
        place = dice.randrange(len(lines))
        lines[place] = tampered(lines[place], dice)
        text = "".join(json.dumps(line) + "\n" for line in lines)
    else:
        text = json.dumps(tampered(config.parse(text, "file").values, dice))
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())


@pytest.mark.parametrize(
    "kind, task, words",
    [
        ("compare", "toy_task:TASK", ["--data", "quadratic", "--methods", "sonex,sox"]),
        ("compare", "fairness", ["--data", "synthetic", "--methods", "sonex,erm", "--hidden=[2]"]),
        ("sweep", "fleet_toy:TASK", ["--data", "quadratic", "--grid.sox.lr", "[0.02, 0.3]"]),
        ("publish", "fairness", ["--data", "synthetic", "--methods", "sonex,erm", "--hidden=[2]"]),
    ],
    ids=["toy", "fairness", "sweep", "published"],
)
def test_a_folder_that_was_tampered_with_gives_one_line_and_no_traceback(
    kind, task, words, monkeypatch
):
    from fcco_experiments.report import plots

    for name in ("scatter", "curves"):  # the drawings take the time
        monkeypatch.setattr(plots, name, lambda *arguments: None)
    command = "sweep" if kind == "sweep" else "compare"
    make = [command, task, *words, "--seeds", "0", "--epochs", "1", "--workers", "1", "--out"]
    fcco(*make, "whole", "--quiet")
    if kind == "publish":
        fcco("report", "whole", "--publish", "small", "--quiet")
    origin = Path("small" if kind == "publish" else "whole")
    files = [p.relative_to(origin) for p in sorted(origin.rglob("*.*")) if p.suffix != ".html"]
    files = [file for file in files if file.name[0] != "." and file.suffix != ".md"]
    dice = random.Random(28)
    refused = 0
    for number in range(40):
        folder = Path(f"copy-{number}")
        shutil.copytree(origin, folder)
        tamper(folder / files[number % len(files)], dice)
        attempts = [["report", str(folder), *(["--task", task] if ":" in task else [])]]
        if kind != "publish":
            attempts.append([*make, str(folder), "--resume"])
        for attempt in attempts:
            done = CliRunner().invoke(app, [*attempt, "--quiet"])
            assert isinstance(done.exception, SystemExit | None), (attempt, files, done.exception)
            assert "Traceback" not in done.output and "\x1b" not in done.output
            if done.exit_code == 2:
                refused += 1
                last = done.stderr.splitlines()[-1]
                assert last.startswith(("Error: ", "  ")) and len(last) < 1000, done.stderr
        shutil.rmtree(folder)
    assert refused > 8


def test_escape_sequences_of_files_and_folders_never_reach_the_terminal(fast, capsys):
    hostile = "a\x1b]0;title\x07\x9b31m\u202eb"
    words = ["compare", TOY, "--data", "quadratic", "--seeds", "0", "--workers", "1", "--out"]
    cells = "\n".join(f"{hostile}{k % 3},f,1" for k in range(9))
    Path(f"{hostile}.csv").write_text(f"y,g,x\n{cells}\n")
    table = ["compare", "fairness", "--data", f"{hostile}.csv", "--label", "y", "--group", "g"]
    said = [
        fcco(*words, f"out {hostile}").output,
        fcco(*words, "other", "--note", hostile, code=2).output,
        fcco(*words, f"out {hostile}", code=2).output,
        fcco(*table, code=2).output,
        fcco("report", hostile, code=2).output,
    ]
    display = Display(2, 2)
    for kind in ("loading", "started", "note", "diverged", "failed"):
        display(Event(kind, f"{hostile}[bold]", text=f"why {hostile}", details=hostile))
    said.append(capsys.readouterr().err)
    assert "[bold]" in said[-1]
    for text in said:
        assert "title" in text and not re.search("\x1b]|[\x07\x9b\u202e]", text), text


# --- interruptions -----------------------------------------------------------------------------


def test_kill_9_in_the_middle_then_resume_gives_the_same_weights(fast):
    words = ["run", TOY, "--data", "quadratic", "--out", "r", "--epochs=8"]
    running = process(*words, slow=0.1)
    folder = Path("r/sonex/seed-0")
    wait_for(folder / "metrics.jsonl", lines=4, running=running)
    running.kill()
    running.communicate()
    assert running.returncode == -signal.SIGKILL
    step = torch.load(folder / "checkpoint.pt", weights_only=True)["step"]
    assert 0 < step < 32 and not (folder / "result.json").exists()
    assert "has runs already" in fcco(*words, code=2).stderr
    fcco(*words, "--resume")
    engine.train(spec(epochs=8), Path("whole"))
    assert equal(weights(folder), weights(Path("whole")))
    assert rows(folder) == rows(Path("whole"))
    assert f"at step {step}" in store.load_run(folder).environment["resumed"][0]


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(fast):
    """Two worker processes, which import a task of the current folder.

    The signal goes to the whole group, as from a terminal.
    """
    Path("mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from toy_task import ToyConfig, ToyTask\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Mine(ToyConfig):\n"
        "    colour: str = 'red'\n"
        "class Task(ToyTask):\n"
        "    config = Mine\n"
        "TASK = Task()\n"
    )
    words = [
        "compare", "mine:TASK", "--data", "quadratic", "--methods", "sonex,alexr2",
        "--seeds", "0,1", "--colour", "blue", "--workers", "2", "--out", "c",
    ]  # fmt: skip
    running = process(*words, slow=0.4)
    begun = [Path(f"c/{name}/seed-0") for name in ("sonex", "alexr2")]
    wait_for(*(each / "metrics.jsonl" for each in begun), lines=2, running=running)
    os.killpg(running.pid, signal.SIGINT)
    told = running.communicate(timeout=60)[1]
    assert running.returncode == 130
    expected = f"  python -m fcco_experiments {shlex.join(words)} --resume"
    assert told.splitlines()[-2:] == ["Stopped, and saved. Continue with:", expected], told
    for each in begun:
        assert 0 < torch.load(each / "checkpoint.pt", weights_only=True)["step"] < 24
        assert not (each / "result.json").exists()
    again = shlex.split(expected)[3:]
    again[again.index("2")] = "1"  # any number of workers
    done = fcco(*again, "--json")
    table = json.loads(done.stdout.splitlines()[-1])["methods"]
    assert list(table) == ["sonex", "alexr2"]
    assert store.read_meta(Path("c"))["config"]["colour"] == "blue"
    for one in (spec(name, seed) for name in table for seed in (0, 1)):
        engine.train(one, Path("whole") / one.label)
        assert equal(weights(Path("c") / one.label), weights(Path("whole") / one.label))
        assert result(Path("c") / one.label) == result(Path("whole") / one.label)


def test_a_command_is_told_without_what_is_meant_once(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/fcco", "run", "a b", "--overwrite", "--resume"])
    assert environment.command() == "fcco run 'a b'"
    assert environment.command("--resume") == "fcco run 'a b' --resume"
    monkeypatch.setattr(sys, "argv", ["/x/fcco/__main__.py", "run"])
    assert environment.command() == "python -m fcco_experiments run"


# --- output ------------------------------------------------------------------------------------


def test_help_and_version_need_no_torch():
    code = """
import sys
from fcco_experiments.cli import app
from click.testing import CliRunner
for words in (["--version"], ["-h"], ["compare", "--help"], ["sweep", "-h"], ["methods", "-h"]):
    print(CliRunner().invoke(app, words, terminal_width=80).stdout)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0.1.0\n") and done.stdout.count("Examples:") == 4
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "{" not in done.stdout, "every list is filled in"
    for words in (["run"], ["report"], ["config"], ["data"], ["data", "list"]):
        assert " ".join(words) in fcco(*words, "-h").stdout
    grids = [path.stem for path in config.CONFIGS.glob("*/grids/*.yaml") if path.stem != "refine"]
    assert len(grids) > 10 and {*data.names(), *grids} <= set(re.findall(r"[\w-]+", done.stdout))


def test_methods():
    rows = library.methods.ROWS
    assert json.loads(fcco("methods", "--json").stdout) == [row.facts() for row in rows]
    names = [line.split()[0] for line in fcco("methods", "--wide").stdout.splitlines()[3:] if line]
    assert names == [row.name for row in rows]
    shown = fcco("methods", "--for", "groups").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert all((row.name in shown.split()) == ("groups" in row.use) for row in rows)
    said = fcco("methods", "--for", "S9", code=2).stderr
    assert "'groups', 'limits', 'general'" in said and "S9" in said


def test_compare_leaves_table_and_report_and_prints_json_last():
    done = fcco("compare", TOY, "--data", "quadratic", "--workers", "1", "--json", "epochs=2")
    out = Path("runs/toy-quadratic")
    lines = done.stdout.splitlines()
    assert len(lines) == 1, "everything else goes to stderr"
    table = json.loads(lines[0], parse_constant=pytest.fail)
    assert table == store.read_json(out / "table.json")
    assert list(table["methods"]) == ["sonex", "sox", "alexr2"]
    finals = [store.load_run(out / f"sox/seed-{seed}").rows[-1]["loss"] for seed in (0, 1)]
    assert table["methods"]["sox"]["loss"] == {
        "mean": pytest.approx(sum(finals) / 2),
        "std": pytest.approx(abs(finals[0] - finals[1]) / 2**0.5),
        "runs": 2,
    }
    assert (out / "report.html").read_text().startswith("<!")
    told = done.stderr
    parts = ["Nobody won.", "\nmethod ", f"Report: {out / 'report.html'}"]
    assert sorted(parts, key=told.index) == parts, "the verdict comes first"
    before = (out / "table.json").read_bytes()
    (out / "table.json").unlink()
    (out / "report.html").unlink()
    shown = fcco("report", str(out)).stdout
    assert (out / "table.json").read_bytes() == before and (out / "report.html").exists()
    assert re.search(r"^sox +\d\.\d{4} ± \d", shown, re.MULTILINE)
    assert max(map(len, shown.splitlines())) <= 80


def test_failures_and_divergence_have_their_exit_codes(fast):
    words = ["compare", TOY, "--data", "quadratic", "--workers", "1", "--seeds", "0"]
    done = fcco(*words, "--methods.sox.lr", "1e80", "--out", "a", "--json")
    table = json.loads(done.stdout.splitlines()[-1])["methods"]
    assert table["sox"]["diverged"]["mean"] == 1 and "diverged" not in table["sonex"]
    assert "sox/seed-0: diverged" in done.stderr
    assert "±" not in done.stderr, "of one seed there is no spread"
    (warning,) = [line for line in done.stderr.splitlines() if line.startswith("Warning: sox")]
    assert "Diverged" in warning
    only = ["--methods", "sox", "--methods.sox.lr", "1e80", "--out", "all"]
    assert "All runs diverged" in fcco(*words, *only, code=1).stderr
    done = fcco(*words, "--methods", "sonex", "--break_at", "3", "--out", "b", code=1)
    assert "sonex/seed-0: FAILED: the shapes do not fit" in done.stderr
    assert done.stderr.count("the shapes do not fit") == 1
    assert "b/sonex/seed-0/failure.txt" in done.stderr
    Path("b/report.html").write_text("old")
    assert "no run is finished" in fcco("report", "b", code=2).stderr
    assert Path("b/report.html").read_text() == "old" and not Path("b/table.json").exists()


def test_a_foreign_folder_runs_code_only_if_the_user_names_it(fast, monkeypatch):
    Path("foreign.py").write_text(
        "from pathlib import Path\nfrom toy_task import TASK\nPath('ran').touch()\n"
    )
    fcco("run", "foreign:TASK", "--data", "quadratic", "--epochs", "1", "--out", "r", "--quiet")
    Path("ran").unlink()
    del sys.modules["foreign"]
    monkeypatch.setattr(tasks, "_USED", set())
    assert "fcco report FOLDER --task MODULE:ATTRIBUTE" in fcco("report", "r", code=2).stderr
    assert not Path("ran").exists()
    fcco("report", "r", "--task", "foreign:TASK")
    assert Path("ran").exists()


def test_an_interrupted_report_says_how_to_make_it(monkeypatch, fast):
    fcco("run", TOY, "--data", "quadratic", "--epochs", "1", "--out", "r", "--quiet")

    def stopped(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "render", stopped)
    monkeypatch.setattr(sys, "argv", ["fcco", "report", "r"])
    done = fcco("report", "r", code=130)
    assert done.stderr.splitlines()[-1] == "  fcco report r"


def test_a_sweep_chooses_and_its_winners_can_be_compared(fast):
    done = fcco("sweep", TOY, "--data", "quadratic", "--workers", "1", "--json", "--limit", "2")
    out = Path("runs/toy-quadratic-sweep")
    told = sweep.read(out) or {}
    saved = (out / "sweep.json.gz").read_bytes()
    assert len(told["settings"]) == 4
    table = json.loads(done.stdout.splitlines()[-1])["methods"]
    assert list(table) == ["sonex", "plain-sox"]
    whole = store.read_json(out / "table.json")["methods"]
    assert table == whole and set(whole) == set(told["winners"]), "by method, not by setting"
    assert "Chosen by: violation above 0.05 first" in done.stderr and "test" not in done.output
    again = fcco("report", str(out), "--json")
    assert again.stdout == done.stdout and again.stderr in done.stderr
    (out / "sweep.json.gz").write_bytes(gzip.compress(b"{}"))
    assert "is damaged: it has no task, rule" in fcco("report", str(out), code=2).stderr
    (out / "sweep.json.gz").write_bytes(saved)
    (line,) = re.findall(r"Compare the winners: (.*)", again.stderr)
    for _ in range(2):  # it goes on where it ended
        fcco(*shlex.split(line)[1:], "--workers", "1")
    meta = store.read_json(Path("runs/toy-quadratic-sweep-winners/comparison.json"))
    assert meta["methods"] == ["sonex", "plain-sox"] and meta["seeds"] == [0, 1]
    done = fcco(
        "sweep", TOY, "--data", "quadratic", "--workers", "1", "--out", "s", "--seeds", "3,4",
        "--grid.sox.lr", "[1e-3, 1e-2]",
    )  # fmt: skip
    runs = store.load_comparison(Path("s")).runs
    assert [(run.name, run.seed, run.method["lr"]) for run in runs] == [
        ("sox@0", 3, 1e-3), ("sox@0", 4, 1e-3), ("sox@1", 3, 1e-2), ("sox@1", 4, 1e-2),
    ]  # fmt: skip


def test_the_time_left_ignores_what_was_done_before(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    display = Display(4, 10, figures=["test_auc", "a"])
    now[0] = 100.0  # a download
    display(Event("finished", "a/seed-0", 10.0, 10, text="was finished"))
    display(Event("started", "a/seed-1", 6.0, 10))
    now[0] = 340.0
    display(Event("finished", "a/seed-1", 10.0, 10))  # 4 epochs in 4 minutes, 20 to go
    assert capsys.readouterr().err == "a/seed-1: finished (2/4, about 20.0 min left)\n"
    now[0] = 360.0
    display(Event("progress", "b/seed-0", 1.0, 10))
    assert not capsys.readouterr().err, "a line every half minute"
    now[0] = 400.0
    display(Event("progress", "b/seed-0", 1.0, 10, {"a": 0.5}))  # 5 epochs in 5 minutes
    assert capsys.readouterr().err == "2 of 4 runs, about 19.0 min left; b/seed-0 a 0.5\n"


# --- configs on the command line ---------------------------------------------------------------


def shown(*words: str) -> Any:
    text = fcco("config", TOY, *words).stdout
    Path("shown.yaml").write_text(text)
    return config.load(TASK, Path("shown.yaml"))


def test_any_key_is_an_option():
    base = config.load(TASK, "quadratic")
    assert shown("--data", "quadratic") == base
    read = shown(
        "--data", "quadratic", "--epochs", "3", "--shape.noise=0.5", "shape.kind=steep",
        "--methods.sonex.settings.gamma", "-1", "--checkpoint-every", "9", "--note", "a b",
        "--methods", "alexr2,sonex", "--seeds", "4,5",
    )  # fmt: skip
    assert (read.epochs, read.shape.noise, read.shape.kind) == (3, 0.5, "steep")
    assert read.checkpoint_every == 9 and read.note == "a b" and read.seeds == (4, 5)
    assert list(read.methods) == ["alexr2", "sonex"]
    assert read.methods["sonex"].settings["gamma"] == -1


def test_run_takes_the_keys_of_its_method(fast):
    done = fcco(
        "run", TOY, "--data", "quadratic", "--method", "alexr2", "--lr", "1e-3", "--quick",
        "--settings.penalty", "7", "--weight-decay=0.1", "--seed", "3", "--quiet",
    )  # fmt: skip
    assert done.output == ""
    run = store.load_run(Path("runs/toy-quadratic-quick-alexr2-seed-3/alexr2/seed-3"))
    assert run.method["lr"] == 1e-3 and run.method["settings"]["penalty"] == 7
    assert run.method["weight_decay"] == 0.1 and run.rows[-1]["epoch"] == 2 and run.seed == 3


@pytest.mark.parametrize(
    "words, said",
    [
        (["compare", "fairnes", "--data", "a"], "no task `fairnes`; did you mean `fairness`?"),
        (["compare", TOY], "Say which data: --data NAME (or --config FILE). There are: qua"),
        (["compare", TOY, "--config", "quadratic", "--setting", "x"], "leave out --setting"),
        (["compare", TOY, "--data", "quadratic", "--weight-decay=3"], "--methods.NAME.weight_deca"),
        (["compare", TOY, "--data", "quadratic", "--seeds", "1,1"], "line: `seeds` must be diff"),
        (["compare", TOY, "--data", "quadratic", "--data-folder", "no"], "there is no folder no"),
        (["run", TOY, "--data", "quadratic", "--method", "sox,sonex"], "trains one method"),
        (["run", TOY, "--config", "quadratic", "--data", "unreachable"], "the network is down"),
        (["sweep", TOY, "--data", "quadratic", "--seeds", "3,3"], "tuning seeds: `seeds` must be"),
        (["sweep", TOY, "--data", "quadratic", "--note", "nothing to choose by"], "toy cannot cho"),
        (
            ["sweep", TOY, "--data", "quadratic", "--grid.sox.settings.z", "[1, 2]"],
            "Error: grid: methods.sox.settings.z: `sox` has no setting `z`.\n",
        ),
        (["compare", TOY, "--data", "quadratix"], "did you mean `quadratic`? There are: quad"),
        (["compare", TOY, "--data", "quadratic", "--epocs", "3"], "did you mean `epochs`? Allowed"),
        (["compare", TOY, "--data", "quadratic", "--worker", "3"], "did you mean `--workers`?"),
        (["compare", TOY, "--data", "quadratic", "--lable", "x"], "did you mean `--label`?"),
        (["compare", TOY, "--data", "no.csv", "--label", "x"], "there is no file no.csv"),
        (["compare", TOY, "--data", "toy.tsv.gz"], "column is the label with --label"),
        (["compare", TOY, "--data", "quadratic", "--methods", "sonx"], "did you mean `sonex`?"),
        (["compare", TOY, "--data", "quadratic", "--seeds", "a"], "whole numbers such as 0,1,2"),
        (["compare", TOY, "--data", "quadratic", "stray"], "`stray` is not understood"),
        (["run", TOY, "--data", "quadratic", "--seeds", "1,2"], "give --seed NUMBER"),
        (["run", TOY, "--data", "quadratic", "--settings.z", "1"], "has no setting `z`"),
        (["sweep", TOY, "--data", "quadratic", "--grid", "x"], "no grid `x`"),
        (["report", "nowhere"], "nowhere holds no comparison.json"),
        (["run", "--epochs", "3", TOY], "Name the task first"),
        (["run", TOY, "--data", "quadratic", "--out", "file/a"], "Error: file/a cannot be made or"),
        (
            ["run", TOY, "--config", "latin.yaml"],
            "Error: latin.yaml: this is not a text file in UT",
        ),
        (["run", TOY, "--config", "quadratic", "--data", "nowhere"], "Error: no file nowhere.csv"),
        (
            ["config", TOY, "--data", "quadratic", "--epochs", "x", "--a.b", "1"],
            "'x'\n  command line: unknown key `a`",
        ),
    ],
)
def test_mistakes_get_a_clear_line_and_exit_code_2(words, said):
    Path("file").write_text("x")
    Path("latin.yaml").write_bytes("note: caf\u00e9".encode("latin-1"))
    done = fcco(*words, code=2)
    assert re.sub(r"^Loading .* \.\.\.\n", "", done.stderr).startswith("Error: ")
    assert said in done.stderr
    assert "Traceback" not in done.output and done.stdout == ""
    assert not Path("runs/toy-quadratic").exists()


def test_what_is_refused_leaves_no_folder():
    Path("t.csv").write_text("y,g,x\n1,a,3\n")
    Path("there").mkdir()
    words = ["compare", "fairness", "--data", "t.csv", "--label", "y", "--group", "g"]
    for out in ("runs/a", "deep/er/b", "there/c", "there"):
        assert "two values" in fcco(*words, "--out", out, code=2).stderr
    assert sorted(path.name for path in Path().rglob("*")) == ["t.csv", "there"]


def test_the_data_folder_reaches_the_task_and_downloads_are_told_once(fast, monkeypatch):
    monkeypatch.setenv("FCCO_DATA", "elsewhere")
    Path("mine").mkdir()
    words = ["compare", TOY, "--config", "quadratic", "--data", "far", "--epochs", "1"]
    done = fcco(*words, "--workers", "1", "--data-folder", "mine")
    assert done.stderr.splitlines()[0] == "Loading far ..."
    assert f"fetching far.csv for {Path('mine').resolve()} ..." in done.stderr
    spec_text = Path("runs/toy-quadratic/sonex/seed-0/config.yaml").read_text()
    assert "mine" not in spec_text, "where the data lie does not change a run"


def test_the_help_of_a_task_lists_its_own_keys_data_and_settings():
    told = " ".join(fcco("compare", "fairness", "--help").stdout.split())
    assert "--hidden LIST widths of the hidden layers" in told
    assert "--epochs N passes over the training data" in told
    assert "--feasible_by gap|violation" in told
    assert (
        "The data set (adult, compas, synthetic);" in told and "celeba" not in told.split("Ex")[0]
    )
    toy = " ".join(fcco("compare", "-h", TOY).stdout.split())
    assert "The data set (quadratic);" in toy and "--shape.noise X" in toy
    assert "--shape.kind plain|steep" in toy
    general = " ".join(fcco("compare", "--help").stdout.split())
    assert "--hidden" not in general and "group-dro: afrisenti" in general


def test_without_ray_its_option_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["compare", TOY, "--data", "quadratic", "--ray", "auto", "--out", "r"]
    assert fcco(*words, code=2).stderr == "Error: --ray needs ray: pip install ray\n"
    assert "leave it out, or --ray" in fcco(*words, "--workers", "2", code=2).stderr
