"""A task for several processes, and checks that run inside of them.

The environment variable RANKS_TROUBLE, which this task alone understands, is such as
`nan:first:1:7`: rank 1 diverges at step 7 of the method `first`. `break` raises an error there,
`term` is SIGTERM; `odd` stands for figures of rank 1 that are not finite.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from fcco_experiments import compare, distributed, strategy, task
from fcco_experiments.run import engine, workers
from fcco_experiments.store import Event, RunSpec
from fcco_experiments.task import Experiment, Method, Metric, Page, Panel, Row
from fcco_experiments.tasks.group_dro.training import GroupDRO
from fcco_experiments.tasks.x_risk.training import XRisk
from torch import Tensor, nn
from torch.nn.functional import softplus

import fcco

GROUPS, SAMPLES = 6, 240
_draw = torch.Generator().manual_seed(5)
X = torch.randn(SAMPLES, 4, generator=_draw, dtype=torch.float64)
GROUP = torch.arange(SAMPLES) % GROUPS
Y = torch.sign(X[:, 0] + 0.3 * X[:, 1] * GROUP + 0.2 * torch.randn(SAMPLES, generator=_draw))


@dataclass(frozen=True, kw_only=True)
class Config(Experiment):
    incidental = ("checkpoint_every", "note")

    note: str = ""


def build() -> Config:
    first = Method("cvar", 0.05, settings={"smoothing": 0.1, "gamma": 0.3, "correction": 0.6})
    methods = {"first": first, "second": replace(first, lr=0.02)}
    return Config(data="grouped", epochs=4, seeds=(0,), methods=methods, checkpoint_every=1)


class Training(task.Training):
    samples_per_step: Any = 12
    steps_per_epoch: Any = 5

    def __init__(self, method: Method, seed: int) -> None:
        settings: dict[str, Any] = dict(method.settings)
        self.lr = method.lr
        network = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))
        self.model = strategy.wrap(network.double(), "cpu")
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=method.lr)
        self.objective: Any = fcco.CVaRGroupDRO(self.model, self.optimizer, GROUPS, 0.4, **settings)
        self.sampler = fcco.GroupBatchSampler(GROUP, 3, 4, seed=seed)
        self.done = 0
        torch.rand(distributed.rank())  # from here on, each rank has a random stream of its own

    def _losses(self, places: Tensor) -> Tensor:
        return softplus(-Y[places] * self.model(X[places]).squeeze(1))

    def step(self) -> None:
        places = torch.tensor(self.sampler.draw())
        self.objective(lambda: self._losses(places), GROUP[places]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.rand(())
        trouble("first" if self.lr == 0.05 else "second", self.done)
        self.done += 1

    @torch.no_grad()
    def evaluate(self) -> Row:
        loss = self._losses(torch.arange(SAMPLES))
        groups = [loss[GROUP.eq(k)].mean().item() for k in range(GROUPS)]
        mine = math.nan if os.environ.get("RANKS_TROUBLE") == "odd" and distributed.rank() else 0.0
        return {"loss": loss.mean().item(), "groups": groups, "mine": mine}

    def finish(self) -> Row:
        whole = [value.detach() for value in strategy.unwrapped(self.model).state_dict().values()]
        return {
            "weights": torch.cat([value.flatten() for value in whole]),
            "draws": distributed.all_gather(torch.rand(()).item()),
        }

    def state_dict(self) -> dict[str, Any]:
        own = {"done": self.done, "sampler": self.sampler.state_dict()}
        return own | strategy.state(self.model, self.optimizer, self.objective)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done = state["done"]
        self.sampler.load_state_dict(dict(state["sampler"]))
        strategy.load(self.model, self.optimizer, self.objective, state)


def trouble(word: str, step: int) -> None:
    kind, _, place = os.environ.get("RANKS_TROUBLE", "").partition(":")
    if place != f"{word}:{distributed.rank()}:{step}":
        return
    if kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "nan":
        raise FloatingPointError("the loss is NaN")
    else:
        raise RuntimeError(f"broken at {place}")


class Problem(task.Problem):
    def __init__(self, config: Config) -> None:
        if config.data == "nowhere" and distributed.rank() == 1:
            raise FileNotFoundError("rank 1 has no file")
        self.config = config

    def start(self, method: Method, seed: int) -> Training:
        return Training(method, seed)

    def fingerprint(self) -> str:
        return f"data {distributed.rank()}" if self.config.data == "different" else "the same"


class RanksTask(task.Task):
    name = "ranks"
    config: type[Experiment] = Config

    def config_name(self, data: str, setting: str | None) -> str:
        return data

    def load(self, config: Any) -> Problem:
        return Problem(config)

    def page(self, config: Any) -> Page:
        metrics = (Metric("loss", "loss", "lower", headline=True),)
        return Page("Ranks", ("?",), metrics, (Panel("curve", y="loss", title="Loss"),))

    def verdict(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        return ()

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        return ()


TASK = RanksTask()


def spec(name: str = "first", seed: int = 0, **changes: Any) -> RunSpec:
    base = build()
    return RunSpec("ranks_cases:TASK", name, base.methods[name], seed, replace(base, **changes))


def build_group_dro() -> GroupDRO:
    """A double loop: anchors, moments, previous weights and a tracker to be saved.

    Two ranks cut its batches of 2 x 27 samples in the middle of a group, at an odd place.
    """
    settings = {"smoothing": 0.1, "nu": 0.1, "eta": 0.05, "inner_steps": 5}
    alexr2 = Method("alexr2", 0.01, independent=True, settings=settings)
    return GroupDRO(
        data="grouped-synthetic", train="all", hidden=(8,), epochs=3, seeds=(0,),
        methods={"erm": Method("erm", 0.01), "alexr2": alexr2}, checkpoint_every=1,
        batch=27, groups_per_batch=3, device="cpu",
    )  # fmt: skip


def spec_group_dro(name: str) -> RunSpec:
    base = build_group_dro()
    return RunSpec("group-dro", name, base.methods[name], 0, base)


def spec_x_risk(name: str) -> RunSpec:
    """A method on few positives, or on lists for NDCG; batches of which each rank has a share."""
    lists = name == "ndcg"
    base = XRisk(
        data="lists-synthetic" if lists else "rare-synthetic", risk="ndcg" if lists else "ap",
        epochs=2, seeds=(0,), methods={name: Method(name, 0.01)}, batch=50, positives=15,
        device="cpu",
    )  # fmt: skip
    return RunSpec("x-risk", name, base.methods[name], 0, base)


# --- checks inside of two processes ------------------------------------------------------------


def raised(call: Any) -> dict[str, Any]:
    try:
        call()
    except Exception as error:
        shared = distributed.raised_on_all(error)
        return {"kind": type(error).__name__, "text": str(error), "shared": shared}
    return {"kind": "nothing"}


def refusals(out: Path) -> dict[str, Any]:
    """What one rank finds wrong, all say."""
    if distributed.rank() == 0:
        (out / "full").mkdir(parents=True)
        (out / "full/config.yaml").write_text("x")
    distributed.any_rank(False)
    full = raised(lambda: engine.train(spec(), out / "full"))
    nowhere = raised(lambda: workers.run([spec(data="nowhere")], out / "nowhere"))
    events: list[Event] = []
    ended = workers.run(
        [spec(data="different"), spec("second", epochs=1)], out / "different", workers=2,
        on_event=events.append,
    )  # fmt: skip
    other = replace(build(), epochs=4 + distributed.rank())
    plan = compare.plan("ranks_cases:TASK", "config", other)
    return {
        "full": full,
        "nowhere": nowhere,
        "ended": list(map(asdict, ended)),
        "kinds": [event.kind for event in events],
        "plan": raised(lambda: compare.execute(plan, out / "plan")),
    }


def endings(out: Path) -> dict[str, Any]:
    """Whole runs, runs that rank 1 stops in the middle, and one that diverges there."""
    found: dict[str, Any] = {}
    for name in build().methods:
        engine.train(spec(name), out / "whole" / name)
        found[name] = []
        for questions in (1, 2):
            made = iter([False] * questions)
            stop = lambda made=made: distributed.rank() == 1 and next(made, True)  # noqa: E731
            at = out / "cut" / name
            found[name].append(engine.train(spec(name), at, resume=questions == 2, stop=stop).kind)
        torch.manual_seed(98)
        found[name].append(engine.train(spec(name, note="other"), at, resume=True).kind)
    for name in build_group_dro().methods:
        engine.train(spec_group_dro(name), out / "whole" / name)
    for name in ("ap", "tpauc", "ndcg"):
        engine.train(spec_x_risk(name), out / "whole" / name)
    with_trouble("nan:first:1:7")
    ended = engine.train(spec(), out / "nan")
    found["nan"] = [ended.kind, ended.text]
    with_trouble("odd")
    found["odd"] = engine.train(spec(epochs=1), out / "odd").kind
    with_trouble("term:first:1:7")
    signalled = workers.run([spec(), spec("second")], out / "term")
    found["term"] = [each.kind for each in signalled]
    with_trouble("")
    return found


def with_trouble(text: str) -> None:
    os.environ["RANKS_TROUBLE"] = text


def command(out: Path, *more: str) -> dict[str, Any]:
    """A command line in this process."""
    from fcco_experiments.cli.app import app

    told, said = io.StringIO(), io.StringIO()
    line = ["run", "ranks_cases:TASK", "--config", str(out / "config.yaml"), "--method", "first"]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
        code: Any = None
        try:
            app([*line, "--out", str(out / "cli"), *more])
        except SystemExit as end:
            code = end.code
    return {"code": code, "stdout": said.getvalue(), "stderr": told.getvalue()}


def complain(event: Event) -> None:
    if event.kind == "failed":
        print(f"FAILED: {event.text}", file=sys.stderr)


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    with distributed.process_group():
        found: dict[str, Any] = {"refusals": refusals(out)}
        found["endings"] = endings(out)
        found["commands"] = [command(out), command(out), command(out, "--epochs", "many")]
        (out / f"{distributed.rank()}.json").write_text(json.dumps(found))
        distributed.any_rank(False)
        with_trouble("break:second:1:7")
        workers.run([spec("second"), spec()], out / "broken", on_event=complain)


if __name__ == "__main__":
    main()
