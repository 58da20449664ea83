"""Trajectories of everything, to prove that a rewrite changed nothing.

    python -m studies.trajectories record FILE     # at the commit before the first move
    python -m studies.trajectories compare FILE    # after the last: differences above 1e-12

A trajectory is 50 steps of one method on a small problem in double precision: the loss of every
step, the weights after it, and at the end what the objective says of itself (tracked values,
violations, multipliers). Cases are written with public names; where these change, the case is
rewritten and keeps its name. `compare` exits with 1 if a case is missing or differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fcco
from fcco import methods, xrisk

STEPS, GROUPS, ROWS = 50, 6, 24
TOLERANCE = 1e-12
DOUBLE = torch.float64
NAMES = ("a", "b", "c", "d", "e", "f")
LIMITS: dict[str, Any] = dict(zip(NAMES, (0.9, 0.8, 0.7, 0.6, 0.5, 0.4), strict=True))

Case = Callable[[], Iterator[Any]]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    """Register a trajectory under a name that stays."""

    def register(function: Case) -> Case:
        assert name not in CASES, name
        CASES[name] = function
        return function

    return register


# ------------------------------------------------------------------------------------ the problem


def data(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, targets and groups; each group follows its own slope."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(240, 4, generator=draw, dtype=DOUBLE)
    group = torch.arange(240) % GROUPS
    y = x[:, 0] + 0.3 * group * x[:, 1] + 0.2 * torch.randn(240, generator=draw, dtype=DOUBLE)
    return x, y, group


X, Y, GROUP = data()


def network(seed: int = 1) -> nn.Module:
    """Two layers; no weight is without effect."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).to(DOUBLE)


def batches(number: int = STEPS, groups: int | None = 3, seed: int = 2) -> Iterator[Tensor]:
    """Row numbers: of some groups, or of all groups in order."""
    draw = np.random.default_rng(seed)
    for _ in range(number):
        chosen = np.arange(GROUPS) if groups is None else draw.choice(GROUPS, groups, replace=False)
        rows = [draw.choice(np.flatnonzero(GROUP.numpy() == g), 4, replace=False) for g in chosen]
        yield torch.as_tensor(np.concatenate(rows))


def losses(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(X[rows]).squeeze(1) - Y[rows]).square()


def adam(model: nn.Module, lr: float = 0.02) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5, dampening=0.5)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def said(objective: Any) -> list[Tensor]:
    """What an objective says of itself."""
    found = []
    for name in ("group_losses", "group_weights", "cvar", "violation", "multipliers"):
        if name in dir(objective):
            part = getattr(objective, name)()
            if isinstance(part, dict):
                part = torch.tensor(list(part.values()), dtype=DOUBLE)
            found.append(part.detach().to(DOUBLE).flatten())
    return found


def train(
    model: nn.Module, objective: Any, call: Callable[[Tensor], Tensor], steps: Iterator[Tensor]
) -> Iterator[Any]:
    for rows in steps:
        loss = call(rows)
        loss.backward()
        objective.optimizer.step()
        objective.optimizer.zero_grad()
        yield loss.detach().to(DOUBLE), weights(model)
    yield from said(objective)


# ------------------------------------------------------------------------------------ group DRO


def group_dro(make: Callable[[nn.Module], Any], groups: int | None = 3) -> Case:
    def run() -> Iterator[Any]:
        model = network()
        objective = make(model)
        call = lambda rows: objective(lambda: losses(model, rows), GROUP[rows])  # noqa: E731
        yield from train(model, objective, call, batches(groups=groups))

    return run


def _cvar(**settings: Any) -> Callable[[nn.Module], Any]:
    return lambda model: fcco.CVaRGroupDRO(model, adam(model), GROUPS, 0.4, **settings)


for _name, _settings in {
    "defaults": {},
    "sonex": {"smoothing": 0.1, "gamma": 0.3, "correction": "auto", "read": "old"},
    "sonx": {"smoothing": 0.0, "gamma": 0.3, "correction": "theory", "read": "old"},
    "width": {"smoothing": fcco.Width(0.3)},
    "skip": {"on_nonfinite": "skip"},
    "annealed": {"smoothing": fcco.Annealed(0.5, 0.05, 30), "gamma": 0.3},
}.items():
    case(f"cvar/{_name}")(group_dro(_cvar(**_settings)))
    case(f"cvar/{_name}, all groups")(group_dro(_cvar(**_settings), groups=None))
for _geometry in ("kl", "euclidean"):
    for _scaling in ("unbiased", "batch"):
        case(f"ooa/{_geometry}, {_scaling}")(
            group_dro(
                lambda model, geometry=_geometry, scaling=_scaling: methods.ooa(
                    model, adam(model), GROUPS, step=0.1, ratio=0.4, geometry=geometry,
                    scaling=scaling,
                )
            )
        )  # fmt: skip


@case("cvar/alexr2")
def _() -> Iterator[Any]:
    model = network()
    proximal = fcco.optim.ProximalPoint(sgd(model), nu=0.5, eta=0.05, inner_steps=4)
    settings = {"smoothing": 0.1, "gamma": 0.5, "correction": 0.05, "read": "new"}
    objective = fcco.CVaRGroupDRO(model, proximal, GROUPS, 0.4, **settings)
    call = lambda rows: objective(lambda: losses(model, rows), GROUP[rows])  # noqa: E731
    yield from train(model, objective, call, batches())


# ------------------------------------------------------------------------------------ constraints


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02)


def constraints(method: str, groups: int | None, **settings: Any) -> Case:
    def run() -> Iterator[Any]:
        model = network()
        optimizer = plain_sgd(model) if method in ("ssg", "squared-hinge") else sgd(model)
        objective = fcco.constrained(model, optimizer, LIMITS, method, **settings)

        def call(rows: Tensor) -> Tensor:
            both = lambda: (losses(model, rows), losses(model, rows))  # noqa: E731
            return objective(both, GROUP[rows])

        yield from train(model, objective, call, batches(groups=groups))

    return run


NUMBERS: dict[str, Any] = {"penalty": 20.0, "gamma": 0.4}
for _name, _method, _groups, _settings in (
    ("defaults", "multipliers", 3, {}),
    ("defaults, all", "multipliers", None, {}),
    ("sonex", "sonex", 3, {**NUMBERS, "smoothing": 0.05, "correction": "auto"}),
    ("sonex, new", "sonex", 3, {**NUMBERS, "smoothing": 0.05, "read": "new", "correction": 0.1}),
    ("sonex, margin", "sonex", 3, {**NUMBERS, "smoothing": 0.05, "margin": 0.02}),
    ("alexr2", "alexr2", 3, {**NUMBERS, "smoothing": 0.05, "nu": 0.5, "eta": 0.05}),
    ("alexr", "alexr", 3, {"penalty": 20.0, "dual_step": 5.0, "theta": 0.1}),
    ("hinge", "hinge", 3, NUMBERS),
    ("squared hinge", "squared-hinge", 3, {"penalty": 5.0, "gamma": 0.4}),
    ("recursive hinge", "recursive-hinge", None,
     {"penalty": 20.0, "smoothing": 0.05, "refresh_every": 7}),
    ("ssg", "ssg", None, {}),
    ("ssg, threshold", "ssg", None, {"threshold": 0.02}),
    ("oss", "oss", None, {"proximal": 1.0, "inner_steps": 5}),
    ("icppac", "icppac", None, {"proximal": 1.0, "inner_steps": 5}),
):  # fmt: skip
    case(f"constrained/{_name}")(constraints(_method, _groups, **_settings))


@case("constrained/mixed limits")
def _() -> Iterator[Any]:
    model = network()
    limits = {"mean": (-0.1, 0.1), "a": 0.9, "b": fcco.AtLeast(0.2), "slope": fcco.Equal(0.5)}
    objective = fcco.constrained(model, sgd(model), limits)

    def call(rows: Tensor) -> Tensor:
        def both() -> Any:
            out, each = model(X[rows]).squeeze(1), losses(model, rows)
            values = {"mean": out.mean(), "a": each[:8].mean(), "b": each[8:].mean()}
            return each, {**values, "slope": (out * X[rows, 0]).mean()}

        return objective(both)

    yield from train(model, objective, call, batches())


@case("constrained/measured")
def _() -> Iterator[Any]:
    model = network()
    objective = fcco.constrained(model, adam(model), {"rate": 0.4})

    def call(rows: Tensor) -> Tensor:
        def both() -> Any:
            out = model(X[rows]).squeeze(1)
            rate = fcco.Measured((out > 0).double().mean(), out.sigmoid().mean())
            return (out - Y[rows]).square(), {"rate": rate}

        return objective(both)

    yield from train(model, objective, call, batches())


@case("constrained/independent batch")
def _() -> Iterator[Any]:
    model = network()
    settings = {**NUMBERS, "smoothing": 0.05, "correction": 0.1, "read": "new"}
    objective = fcco.constrained(model, sgd(model), LIMITS, "sonex", **settings)

    def call(rows: Tensor) -> Tensor:
        other = rows.view(3, 4).flip(1).flatten()
        both = lambda r: (losses(model, r), losses(model, r))  # noqa: E731
        second = {"gradient": lambda: both(other), "gradient_index": GROUP[other]}
        return objective(lambda: both(rows), GROUP[rows], **second)

    yield from train(model, objective, call, batches())


@case("constrained/coupled objective")
def _() -> Iterator[Any]:
    model = network()
    tracker = fcco.tracker.InnerTracker(GROUPS, gamma=0.4, correction=0.0, read="new", dtype=DOUBLE)
    coupled = fcco.terms.CoupledTerm(fcco.outer.SquaredHinge(), tracker)
    objective = fcco.constrained(
        model, sgd(model), LIMITS, "sonex", objective=coupled, **NUMBERS, smoothing=0.05
    )

    def call(rows: Tensor) -> Tensor:
        index = {"objective": GROUP[rows], "constraints": GROUP[rows]}
        both = lambda: {"objective": losses(model, rows), "constraints": losses(model, rows)}  # noqa: E731
        return objective(both, index)

    yield from train(model, objective, call, batches())


# ------------------------------------------------------------------------------------ any outer f


class Pinball(fcco.outer.AbstractOuter):
    """max(0.3 u, -0.7 u): an outer function of a user."""

    convex = True

    def __call__(self, u: torch.Tensor) -> torch.Tensor:
        """The value f(u)."""
        return torch.maximum(0.3 * u, -0.7 * u)

    def prox(self, u: torch.Tensor, step: float | torch.Tensor) -> torch.Tensor:
        """argmin_v f(v) + (u - v)^2 / (2 step)."""
        return u - u.clamp(min=-0.7 * step).clamp(max=0.3 * step)


@case("compositional/outer functions")
def _() -> Iterator[Any]:
    outers = (
        fcco.outer.Hinge(2.0),
        fcco.outer.SquaredHinge(),
        fcco.outer.Absolute(),
        Pinball(),
    )
    for outer in outers:
        for smoothing in (0.0, 0.1):
            if smoothing and isinstance(outer, fcco.outer.SquaredHinge):
                continue
            model = network()
            tracker = fcco.tracker.InnerTracker(GROUPS, gamma=0.4, correction=0.1, dtype=DOUBLE)
            term = fcco.terms.CoupledTerm(outer, tracker, smoothing=smoothing, tolerance=0.5)
            objective = fcco.Compositional(model, sgd(model), term)
            call = lambda rows, o=objective, m=model: o(lambda: losses(m, rows), GROUP[rows])  # noqa: E731
            yield from train(model, objective, call, batches(20))


@case("compositional/two terms, overlapping groups, accumulation")
def _() -> Iterator[Any]:
    model = network()
    terms = {
        name: fcco.terms.CoupledTerm(
            fcco.outer.Hinge(),
            fcco.tracker.InnerTracker(GROUPS, gamma=0.4, correction=0.1, dtype=DOUBLE),
            smoothing=0.1, tolerance=0.5,
        )
        for name in ("one", "two")
    }  # fmt: skip
    objective = fcco.Compositional(model, sgd(model), terms)
    member = torch.stack([(GROUP + k) % GROUPS < 2 for k in range(GROUPS)], dim=1)

    def call(rows: Tensor) -> Tensor:
        total: Any = 0
        for part in rows.view(2, -1):
            both = lambda r=part: {"one": losses(model, r), "two": losses(model, r) * 2}  # noqa: E731
            total = total + objective(both, {"one": GROUP[part], "two": member[part]})
        return total

    yield from train(model, objective, call, batches(groups=4))


# ------------------------------------------------------------------------------------ risks

LABEL = (Y > 1.0).to(DOUBLE)


def positive_batches() -> Iterator[Tensor]:
    draw = np.random.default_rng(5)
    positive, negative = (np.flatnonzero(LABEL.numpy() == k) for k in (1, 0))
    for _ in range(STEPS):
        rows = [draw.choice(positive, 6, replace=False), draw.choice(negative, 14, replace=False)]
        yield torch.as_tensor(np.concatenate(rows))


def risk(make: Callable[[nn.Module], Any]) -> Case:
    def run() -> Iterator[Any]:
        model = network()
        objective = make(model)
        call = lambda rows: objective(lambda: model(X[rows]).squeeze(1), LABEL[rows], rows)  # noqa: E731
        yield from train(model, objective, call, positive_batches())

    return run


for _name, _make in {
    "auc": lambda m: xrisk.AUC(m, adam(m), LABEL),
    "ap": lambda m: xrisk.AveragePrecision(m, adam(m), LABEL),
    "partial": lambda m: xrisk.PartialAUC(m, adam(m), LABEL, max_fpr=0.3),
    "two-way": lambda m: xrisk.TwoWayPartialAUC(m, adam(m), LABEL, min_tpr=0.5, max_fpr=0.3),
    "two-way, sigmoid": lambda m: xrisk.TwoWayPartialAUC(
        m, adam(m), LABEL, min_tpr=0.5, max_fpr=0.3, activation="sigmoid"
    ),
}.items():
    case(f"risk/{_name}")(risk(_make))


@case("risk/two labels")
def _() -> Iterator[Any]:
    labels = torch.stack([LABEL, (Y > 0).to(DOUBLE)], dim=1)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Linear(4, 2).to(DOUBLE)
    objective = xrisk.AveragePrecision(model, adam(model), labels)
    call = lambda rows: objective(lambda: model(X[rows]), labels[rows], rows)  # noqa: E731
    yield from train(model, objective, call, positive_batches())


def ranking(make: Callable[[nn.Module, Tensor, Tensor], Any]) -> Case:
    def run() -> Iterator[Any]:
        model, relevance, query = network(), (Y.clamp(0, 3)).round(), torch.arange(240) // 20
        objective = make(model, relevance, query)
        draw = np.random.default_rng(6)

        def rows_of_lists() -> Iterator[Tensor]:
            for _ in range(STEPS):
                lists = draw.choice(12, 3, replace=False)
                yield torch.as_tensor(
                    np.concatenate([q * 20 + draw.choice(20, 8, replace=False) for q in lists])
                )

        call = lambda rows: objective(lambda: model(X[rows]).squeeze(1), rows)  # noqa: E731
        yield from train(model, objective, call, rows_of_lists())

    return run


case("risk/ndcg")(ranking(lambda m, r, q: xrisk.NDCG(m, adam(m), r, q)))
case("risk/listwise")(ranking(lambda m, r, q: xrisk.ListwiseCrossEntropy(m, adam(m), r, q)))


# ------------------------------------------------------------------------------------ contrastive


def contrastive(**settings: Any) -> Case:
    def run() -> Iterator[Any]:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]).to(DOUBLE)
        objective = fcco.GlobalContrastive(model, adam(model), 240, **settings)
        draw = np.random.default_rng(8)
        noise = 0.1 * torch.as_tensor(draw.normal(size=(240, 4)))

        def features(rows: Tensor) -> Any:
            towers = (model[0](X[rows]), model[1](X[rows] + noise[rows]))
            return tuple(nn.functional.normalize(each, dim=1) for each in towers)

        call = lambda rows: objective(lambda: features(rows), rows)  # noqa: E731
        rows = (torch.as_tensor(draw.choice(240, 12, replace=False)) for _ in range(STEPS))
        yield from train(model, objective, call, rows)

    return run


case("contrastive/defaults")(contrastive())
case("contrastive/individual temperatures")(contrastive(temperature="individual", radius=0.5))


# ------------------------------------------------------------------------------------ resume, ranks


@case("resume")
def _() -> Iterator[Any]:
    for make in (_cvar(), _cvar(smoothing=0.1, gamma=0.3, correction="auto", read="old")):
        state: dict[str, Any] = {}
        for part in (0, 1):
            model = network()
            objective = make(model)
            if part:
                model.load_state_dict(state["model"])
                objective.load_state_dict(state["objective"])
                objective.optimizer.load_state_dict(state["optimizer"])
            rows = list(batches())[25 * part : 25 * part + 25]
            call = lambda r, o=objective, m=model: o(lambda: losses(m, r), GROUP[r])  # noqa: E731
            yield from train(model, objective, call, iter(rows))
            state = {
                "model": model.state_dict(), "objective": objective.state_dict(),
                "optimizer": objective.optimizer.state_dict(),
            }  # fmt: skip


RANK_CASES = ("cvar/defaults", "cvar/sonex", "constrained/defaults", "constrained/sonex")


def on_rank(rank: int, folder: str) -> None:
    """Two ranks, each with half of every batch; DDP averages the gradients."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2
    )
    results = []
    for name in RANK_CASES:
        model = network()
        ddp = nn.parallel.DistributedDataParallel(model)
        kind, _, how = name.partition("/")
        if kind == "cvar":
            settings = {"smoothing": 0.1, "gamma": 0.3, "correction": "auto", "read": "old"}
            objective = _cvar(**(settings if how == "sonex" else {}))(ddp)
        else:
            settings = {**NUMBERS, "smoothing": 0.05, "method": "sonex"} if how == "sonex" else {}
            objective = fcco.constrained(ddp, sgd(ddp), LIMITS, **settings)

        def call(rows: Tensor, kind: str = kind, ddp: nn.Module = ddp, o: Any = objective) -> Any:
            rows = rows[rank::2]
            if kind == "cvar":
                return o(lambda: losses(ddp, rows), GROUP[rows])

            # One pass: DDP allows one backward pass for each.
            def both() -> Any:
                each = losses(ddp, rows)
                return each, each

            return o(both, GROUP[rows])

        results += [flat(part) for part in train(model, objective, call, batches())]
    if rank == 0:
        np.save(f"{folder}/result.npy", np.concatenate(results))
    os._exit(0)  # threads of gloo would outlive the interpreter


@case("two ranks")
def _() -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "studies.trajectories", "rank"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen([*command, str(rank), folder], env=environment) for rank in range(2)
        ]
        for each in ranks:
            each.wait(timeout=300)
        yield torch.as_tensor(np.load(Path(folder) / "result.npy"))


# ------------------------------------------------------------------------------------ fleets


def fleet(make: Callable[[nn.Module, int], Any], values: Callable[[Any, Any], Any]) -> Case:
    def run() -> Iterator[Any]:
        from fcco.fleet import Fleet, Member

        members = []
        for number in range(3):
            model = network(number)
            objective = make(model, number)
            members.append(Member(model, objective.optimizer, objective))
        runs = Fleet(members, values)
        for rows in batches(groups=3):
            batch = {"x": X[rows], "y": Y[rows]}
            stacked = {name: torch.stack([part] * 3) for name, part in batch.items()}
            yield runs.step(stacked, index=GROUP[rows].expand(3, -1)).to(DOUBLE)
        yield torch.cat([part.flatten(1) for part in runs.weights().values()], 1)

    return run


def _fleet_losses(model: Any, batch: Any) -> Tensor:
    return (model(batch["x"]).squeeze(1) - batch["y"]).square()


def _fleet_both(model: Any, batch: Any) -> Any:
    each = _fleet_losses(model, batch)
    return each.mean(), each


case("fleet/cvar")(
    fleet(lambda m, k: fcco.CVaRGroupDRO(m, adam(m), GROUPS, 0.2 + 0.2 * k), _fleet_losses)
)
case("fleet/cvar, sonex")(
    fleet(
        lambda m, k: fcco.CVaRGroupDRO(
            m, adam(m), GROUPS, 0.4, smoothing=0.1 * (k + 1), gamma=0.3, correction=0.1, read="old"
        ),
        _fleet_losses,
    )
)
case("fleet/ooa")(
    fleet(lambda m, k: methods.ooa(m, adam(m), GROUPS, step=0.1 * (k + 1)), _fleet_losses)
)
case("fleet/constrained sonex")(
    fleet(
        lambda m, k: fcco.constrained(
            m, sgd(m), list(NAMES), "sonex", tolerance=0.5, **NUMBERS, smoothing=0.05 * (k + 1)
        ),
        _fleet_both,
    )
)
case("fleet/alexr2")(
    fleet(
        lambda m, k: fcco.constrained(
            m, sgd(m), list(NAMES), "alexr2", tolerance=0.5, **NUMBERS, smoothing=0.05, nu=0.5,
            eta=0.02 * (k + 1), inner_steps=3 + k,
        ),
        _fleet_both,
    )
)  # fmt: skip


# ------------------------------------------------------------------------------------ integrations


@case("integration/sklearn")
def _() -> Iterator[Any]:
    from fcco.integrations import sklearn as estimators

    x, y, group = X.numpy(), LABEL.numpy().astype(int), GROUP.numpy()
    for make in (
        lambda: estimators.ConstrainedClassifier(random_state=0, max_epochs=5),
        lambda: estimators.WorstGroupClassifier(random_state=0, max_epochs=5),
    ):
        model = make().fit(x, y, sensitive_features=group)
        yield torch.as_tensor(model.predict_proba(x)[:, 1])


@case("integration/sentence-transformers memory")
def _() -> Iterator[Any]:
    from fcco.integrations.open_clip import GlobalClipLoss

    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]).to(DOUBLE)
    loss, optimizer = GlobalClipLoss(240).to(DOUBLE), adam(model)
    draw = np.random.default_rng(8)
    for _ in range(STEPS):
        rows = torch.as_tensor(draw.choice(240, 12, replace=False))
        one, two = (nn.functional.normalize(tower(X[rows]), dim=1) for tower in model)
        value = loss(one, two, torch.tensor(10.0, dtype=DOUBLE), index=rows)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield value.detach(), weights(model)


# ------------------------------------------------------------------------------------ the tool


def flat(part: Any) -> np.ndarray[Any, Any]:
    parts = part if isinstance(part, tuple) else (part,)
    return np.concatenate([torch.as_tensor(each).to(DOUBLE).reshape(-1).numpy() for each in parts])


def trajectory(name: str) -> np.ndarray[Any, Any]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.concatenate([flat(part) for part in CASES[name]()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("action", choices=("record", "compare", "rank"))
    parser.add_argument("file")
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--only", default="", help="names that contain this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.action == "rank":
        on_rank(int(arguments.file), arguments.folder)
    found, worst = {}, 0
    before = np.load(arguments.file) if arguments.action == "compare" else {}
    for name in (n for n in CASES if arguments.only in n):
        try:
            found[name] = trajectory(name)
        except Exception as error:
            print(f"{name}: FAILED: {type(error).__name__}: {error}")
            worst = 1
            continue
        if name not in before:
            print(f"{name}: {len(found[name])} numbers" + (", new" if before else ""))
            continue
        old, new = before[name], found[name]
        if old.shape != new.shape:
            print(f"{name}: {old.shape} numbers before, {new.shape} now")
            worst = 1
            continue
        same = (old == new) | (np.isnan(old) & np.isnan(new))
        scale = np.maximum(np.abs(old), 1.0)
        difference = np.where(same, 0.0, np.abs(new - old) / scale)
        largest = np.nanmax(np.where(np.isnan(difference), np.inf, difference), initial=0.0)
        if largest > TOLERANCE:
            worst = 1
        print(f"{name}: {largest:.1e}{'' if largest <= TOLERANCE else '   <--'}")
    if arguments.action == "record":
        np.savez_compressed(arguments.file, **found)
    else:
        for name in (n for n in before if n not in found and arguments.only in n):
            print(f"{name}: gone")
            worst = 1
    return worst


if __name__ == "__main__":
    sys.exit(main())
