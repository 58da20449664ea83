"""A fleet of runs: frozen runs, checkpoints, data, settings, models, errors."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from problems import Point
from torch import Tensor, nn

import fcco
from fcco.fleet import Fleet, Member, Unsupported, group_members

DOUBLE = torch.float64
GOOD = 0.05


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def member(
    method: str = "sonex",
    seed: int = 0,
    lr: float = GOOD,
    *,
    build: Callable[[], nn.Module] = network,
    inner_steps: Any = 4,
    dtype: torch.dtype = DOUBLE,
    **settings: Any,
) -> Member:
    """A run on four constraints."""
    torch.manual_seed(seed)
    model = build().to(dtype)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    if method == "plain":
        return Member(model, optimizer)
    if method == "cvar":
        rule: dict[str, Any] = {"smoothing": 0.05, "gamma": 0.5} | settings
        return Member(model, optimizer, fcco.CVaRGroupDRO(model, optimizer, 4, 0.4, **rule))
    own = {"penalty": 2.0, "smoothing": 0.05, "gamma": 0.5}
    own |= {
        "sonex": {"correction": 0.3},
        "alexr2": {"theta": 0.2, "nu": 0.5, "eta": 0.1, "inner_steps": inner_steps},
    }[method]
    objective = fcco.constrained(model, optimizer, 4, method, **(own | settings))
    stepped: Any = objective.optimizer
    return Member(model, stepped, objective)


def inner(model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    inputs, target = batch
    scores = model(inputs).squeeze(-1)
    return (scores - target).square().mean(), scores.view(4, -1).mean(1) - 0.1


def plain_inner(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return inner(model, batch)[0]


def function(method: str) -> Callable[[Any, Any], Any]:
    return plain_inner if method == "plain" else inner


def batches(rows: int, number: int, dtype: torch.dtype = DOUBLE) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(7)
    shape = {"generator": draw, "dtype": DOUBLE}
    return [
        (torch.randn(rows, 8, 3, **shape).to(dtype), torch.randn(rows, 8, **shape).to(dtype))
        for _ in range(number)
    ]


def row(batch: tuple[Tensor, Tensor], place: int) -> tuple[Tensor, Tensor]:
    return batch[0][place], batch[1][place]


def alone(run: Member, own: Sequence[tuple[Tensor, Tensor]], values: Any = inner) -> nn.Module:
    """The same run in the user's own loop."""
    for batch in own:
        if run.objective is None:
            loss = plain_inner(run.model, batch)
        else:
            loss = run.objective(lambda batch=batch: values(run.model, batch))
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run.model


def same(first: dict[str, Tensor], second: dict[str, Tensor], rows: Sequence[int]) -> bool:
    """Whether some runs have the same bits in two states."""
    assert first.keys() == second.keys()
    return all(torch.equal(first[name][rows], second[name][rows]) for name in first)


def held(fleet: Fleet) -> dict[str, Tensor]:
    return fleet.state_dict()["state"]


def close_to_single(fleet: Fleet, singles: Sequence[nn.Module], within: float = 1e-11) -> None:
    values = {**fleet.buffers(), **fleet.weights()}
    for place, model in enumerate(singles):
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            difference = (values[name][place] - value).abs().max()
            assert difference <= within, (place, name, difference)


# --- a run that leaves the finite numbers ---------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "method", "place", "build"),
    [
        ("eager", "plain", 0, network), ("eager", "cvar", 4, network),
        ("eager", "alexr2", 2, normed), ("traced", "sonex", 2, normed),
    ],
)  # fmt: skip
def test_bad_data_freezes_one_run_and_no_other(
    mode: str, method: str, place: int, build: Callable[[], nn.Module]
) -> None:
    runs, bad_step = 5, 3
    sick, sound = (
        Fleet([member(method, s, build=build) for s in range(runs)], function(method), mode=mode)
        for _ in range(2)
    )
    others = [r for r in range(runs) if r != place]
    last: dict[str, Tensor] = {}
    for step, batch in enumerate(batches(runs, 9)):
        if step == bad_step:
            last = held(sound)
            inputs = batch[0].clone()
            inputs[place, 1, 1] = torch.inf
            sick.step((inputs, batch[1]))
        else:
            sick.step(batch)
        sound.step(batch)
        assert same(sick.state, sound.state, others)
        if step >= bad_step:  # frozen where it was, and for good
            assert same(sick.state, last, [place])
    assert sick.died.tolist() == [bad_step if r == place else -1 for r in range(runs)]
    assert sick.alive.tolist() == [r != place for r in range(runs)]
    assert bool(sound.alive.all()) and not same(sound.state, last, [place])


@pytest.mark.parametrize(("mode", "method"), [("eager", "alexr2"), ("traced", "sonex")])
def test_a_huge_learning_rate_freezes_one_run(mode: str, method: str) -> None:
    place, rates = 1, (GOOD, 1e30, GOOD)
    runs = [member(method, s, lr, dtype=torch.float32) for s, lr in enumerate(rates)]
    sick = Fleet(runs, inner, mode=mode)
    states = [held(sick)]
    for batch in batches(3, 12, torch.float32):
        sick.step(batch)
        states.append(held(sick))
    assert sick.alive.tolist() == [True, False, True]
    died = int(sick.died[place])
    assert 0 < died < 11
    assert not same(states[died], states[died - 1], [place])  # its last good step
    assert all(same(state, states[died], [place]) for state in states[died:])
    assert all(bool(torch.isfinite(value[place]).all()) for value in sick.state.values())


# --- checkpoints ----------------------------------------------------------------------------------


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("mode", "build", "method", "lengths"),
    [
        ("eager", normed, "sonex", [1] * 3), ("eager", network, "cvar", [1] * 3),
        ("eager", normed, "alexr2", [2, 4, 4]),
        pytest.param("traced", normed, "alexr2", [2, 4, 4], marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_resumed_fleet_goes_on_bitwise(
    mode: str, build: Callable[[], nn.Module], method: str, lengths: list[int]
) -> None:
    def fresh() -> Fleet:
        runs = [member(method, s, build=build, inner_steps=k) for s, k in enumerate(lengths)]
        return Fleet(runs, inner, mode=mode)

    data = batches(3, 13)
    data[2][0][1] = torch.nan  # a frozen run is part of a checkpoint
    fleet = fresh()
    for batch in data[:6]:  # in the middle of a round of 4
        fleet.step(batch)
    fleet.set_hyperparameters(lr=[0.02, 0.03, 0.04])
    saved = through_a_file(fleet.state_dict())
    untouched = {name: value.clone() for name, value in saved["state"].items()}
    again = fresh()
    again.load_state_dict(saved)
    for batch in data[6:]:
        losses = [each.step(batch) for each in (fleet, again)]
        torch.testing.assert_close(*losses, rtol=0, atol=0, equal_nan=True)
        assert same(fleet.state, again.state, range(3))
        assert all(torch.equal(v, again.weights()[n]) for n, v in fleet.weights().items())
    assert again.died.tolist() == fleet.died.tolist() == [-1, 2, -1]
    assert again.steps == fleet.steps == 13
    assert same(untouched, saved["state"], range(3))  # a checkpoint is a copy
    # Back, from the first step of a round, where the state holds one tensor under two names.
    fleet.load_state_dict(saved)
    for batch in data[6:]:
        fleet.step(batch)
    assert same(fleet.state, again.state, range(3)) and fleet.steps == 13


def test_a_checkpoint_of_another_fleet_is_refused() -> None:
    small, large = (Fleet([member(seed=s) for s in range(n)], inner) for n in (2, 3))
    with pytest.raises(ValueError, match=r"load_state_dict.*number of runs"):
        large.load_state_dict(small.state_dict())
    plain = Fleet([member("plain", s) for s in range(2)], plain_inner)
    for fleet, other in ((plain, small), (small, plain)):
        before = held(fleet)
        with pytest.raises(ValueError, match=r"load_state_dict.*another method"):
            fleet.load_state_dict(other.state_dict())
        assert same(before, fleet.state, range(2))


def test_a_run_frozen_inside_a_round_stays_at_its_start() -> None:
    fleet = Fleet([member("alexr2", s, inner_steps=4) for s in range(2)], inner, mode="eager")
    data = batches(2, 9)
    data[2][0][0].fill_(torch.inf)  # run 0 dies in the middle of its first round
    start = {name: value[0].clone() for name, value in fleet.weights().items()}
    for batch in data:
        fleet.step(batch)
        assert all(torch.equal(fleet.weights()[name][0], value) for name, value in start.items())
    assert fleet.died.tolist() == [2, -1]


# --- settings and data ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["plain", "alexr2"])
def test_streams_share_rows(method: str) -> None:
    streams = [1, 0, 1]
    shared, own = (
        Fleet([member(method, s) for s in range(3)], function(method), streams=given, mode="eager")
        for given in (streams, None)
    )
    for batch in batches(2, 4):
        shared.step(batch)
        own.step(tuple(part[streams] for part in batch))
    assert same(shared.state, own.state, range(3))
    assert not torch.equal(shared.state["weights"][0], shared.state["weights"][2])


@pytest.mark.parametrize(
    ("mode", "method"), [("traced", "plain"), ("eager", "cvar"), ("eager", "alexr2")]
)
def test_set_hyperparameters_of_each_run(mode: str, method: str) -> None:
    rates = [0.01, 0.1, 0.3]
    fleet = Fleet([member(method, s) for s in range(3)], function(method), mode=mode)
    fleet.set_hyperparameters(lr=torch.tensor(rates, dtype=DOUBLE))
    singles = [member(method, s, lr) for s, lr in enumerate(rates)]
    data = batches(3, 8)
    for batch in data[:4]:
        fleet.step(batch)
    models = [alone(run, [row(b, r) for b in data[:4]]) for r, run in enumerate(singles)]
    fleet.set_hyperparameters(lr=0.02)
    for batch in data[4:]:
        fleet.step(batch)
    for place, run in enumerate(singles):
        optimizer: Any = getattr(run.optimizer, "outer", run.optimizer)
        optimizer.param_groups[0]["lr"] = 0.02
        alone(run, [row(b, place) for b in data[4:]])
    close_to_single(fleet, models)


# --- models ---------------------------------------------------------------------------------------


class Twice(nn.Module):
    """One layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(3, 3)
        self.body, self.again, self.head = first, first, nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.again(torch.tanh(self.body(inputs))))


def half_frozen() -> nn.Module:
    model = network()
    for parameter in model[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("mode", "method", "build"),
    [
        ("eager", "alexr2", normed), ("traced", "cvar", normed), ("eager", "plain", Twice),
        ("eager", "sonex", half_frozen),
    ],
)  # fmt: skip
def test_each_run_is_the_single_run(mode: str, method: str, build: Callable[[], nn.Module]) -> None:
    """With running statistics, shared layers and layers that do not move; rounds of four steps."""
    runs, data = 3, batches(3, 10)
    fleet = Fleet(
        [member(method, s, 0.03 + 0.01 * s, build=build) for s in range(runs)],
        function(method),
        mode=mode,
    )
    singles = [member(method, s, 0.03 + 0.01 * s, build=build) for s in range(runs)]
    for batch in data[:8]:
        fleet.step(batch)
    models = [alone(run, [row(b, r) for b in data[:8]]) for r, run in enumerate(singles)]
    close_to_single(fleet, models)
    assert fleet.mode == mode
    loaded = build().to(DOUBLE)
    fleet.load_into(1, loaded)
    for name, value in models[1].state_dict().items():
        assert torch.allclose(loaded.state_dict()[name], value, atol=1e-11), name


def test_both_passes_of_a_step_move_the_statistics() -> None:
    """That of the values, and that of an independent batch for the gradient."""

    fleet, single = Fleet([member(build=normed)], inner, mode="eager"), member(build=normed)
    data = batches(1, 8)
    for batch, other in zip(data[:4], data[4:], strict=True):
        fleet.step(batch, other)
        rows = [row(each, 0) for each in (batch, other)]
        calls = [lambda own=own: inner(single.model, own) for own in rows]
        single.objective(calls[0], gradient=calls[1]).backward()
        single.optimizer.step()
        single.optimizer.zero_grad()
    close_to_single(fleet, [single.model])


@pytest.mark.parametrize("mode", ["eager", "traced"])
def test_dropout_is_refused(mode: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    fleet = Fleet([member(seed=s, build=build) for s in range(2)], inner, mode=mode)
    before = held(fleet)
    with pytest.raises(Unsupported, match="without random numbers"):
        fleet.step(batches(2, 1)[0])
    assert same(before, fleet.state, range(2)) and fleet.steps == 0


# --- the program ----------------------------------------------------------------------------------


def test_programs_do_not_merge_tensors_that_are_one_by_chance() -> None:
    """In the second step of a round w_{t-1} is the anchor; in the third it is not."""
    fleet = Fleet([member("alexr2", s, inner_steps=5) for s in range(2)], inner, mode="traced")
    singles = [member("alexr2", s, inner_steps=5) for s in range(2)]
    data = batches(2, 10)
    for batch in data[:1]:
        fleet.step(batch)
    assert fleet.state["previous"] is fleet.state["anchor"]
    for batch in data[1:]:
        fleet.step(batch)
    close_to_single(fleet, [alone(run, [row(b, r) for b in data]) for r, run in enumerate(singles)])


def test_batches_of_another_size_get_a_program_of_their_own() -> None:
    fleet = Fleet([member(seed=s) for s in range(2)], inner, mode="traced")
    singles = [member(seed=s) for s in range(2)]
    data = [(x[:, :k], y[:, :k]) for k, (x, y) in zip((8, 4, 8, 4), batches(2, 4), strict=True)]
    for batch in data:
        fleet.step(batch)
    close_to_single(fleet, [alone(run, [row(b, r) for b in data]) for r, run in enumerate(singles)])


# --- errors ---------------------------------------------------------------------------------------


def sgd(model: nn.Module, parameters: Any = None) -> Member:
    return Member(model, torch.optim.SGD(model.parameters() if parameters is None else parameters))


def leaky(slope: float = 0.1, width: int = 4) -> Member:
    return sgd(nn.Sequential(nn.Linear(3, width), nn.LeakyReLU(slope), nn.Linear(width, 1)))


def mixed() -> nn.Module:
    model = network()
    model[2].double()  # type: ignore[index]
    return model


def hooked(name: str) -> Member:
    model = network()
    getattr(model[0].weight, name)(lambda value: None)  # type: ignore[index]
    return sgd(model)


def last_layer(own: nn.Module | None = None) -> Member:
    """A run that trains one of its layers."""
    model = network()
    run = sgd(model, model[2].parameters())  # type: ignore[index]
    return run if own is None else Member(own, run.optimizer)


REFUSED: list[tuple[Callable[[], list[Member]], str]] = [
    (lambda: [sgd(network()), last_layer()], "2.bias"),
    (lambda: [sgd(network()), sgd(half_frozen())], "2.bias"),
    (lambda: [leaky(), leaky(width=5)], "5, 3.*4, 3"),
    (lambda: [leaky(), leaky(0.2)], "0.2.*0.1"),
    (lambda: [sgd(normed()), sgd(normed().eval())], "False.*True"),
    (lambda: [sgd(mixed())], "float32, torch.float64"),
    (lambda: [sgd(network().bfloat16())], "bfloat16"),
    (lambda: [hooked("register_hook")], r"hooks.*0\.weight"),
    (lambda: [hooked("register_post_accumulate_grad_hook")], r"hooks.*0\.weight"),
    (lambda: [Member(Point([1.0, 2.0]), sgd(network()).optimizer)], "another model"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_runs_that_make_no_fleet(make: Callable[[], list[Member]], message: str) -> None:
    with pytest.raises(Unsupported, match=f"(?s){message}"):
        Fleet(make(), plain_inner)


@pytest.mark.parametrize(
    ("number", "options", "message"),
    [
        (0, {}, "at least one run"),
        (1, {"mode": "quick"}, "mode"),
        (2, {"streams": [0]}, "streams"),
        (2, {"streams": [0, -1]}, "streams"),
    ],
)
def test_wrong_settings(number: int, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fleet([member(seed=s) for s in range(number)], inner, **options)


@pytest.mark.parametrize("streams, rows, found", [(None, 3, "(3, 8, 3)"), ([0, 5], 2, "(2, 8, 3)")])
def test_a_batch_with_other_rows(streams: Any, rows: int, found: str) -> None:
    fleet = Fleet([member(seed=s) for s in range(2)], inner, streams=streams, mode="eager")
    with pytest.raises(ValueError, match=re.escape(found)):
        fleet.step(batches(rows, 1)[0])
    assert fleet.steps == 0


def test_hyperparameters_that_cannot_be_set() -> None:
    runs = [member(seed=s, smoothing=lambda step: 0.1 / (step + 1)) for s in range(2)]
    fleet = Fleet(runs, inner, mode="eager")
    for wrong in ({"rate": 1.0}, {"lr": [0.1, 0.2, 0.3]}, {"lr": 9.0, "rate": 1.0}):
        with pytest.raises((ValueError, RuntimeError)):
            fleet.set_hyperparameters(**wrong)
    with pytest.raises(ValueError, match="follows a schedule"):
        fleet.set_hyperparameters(lr=9.0, smoothing=0.5)
    assert fleet.hyperparameters["lr"].tolist() == [GOOD, GOOD]  # all or nothing


def test_a_number_for_each_limit() -> None:
    model = network().to(DOUBLE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objective = fcco.constrained(model, optimizer, 4, "ssg", tolerance=[1.0, 2.0, 3.0, 4.0])
    own: Any = objective.optimizer
    fleet = Fleet([Member(model, own, objective)] * 2, inner)
    assert fleet.hyperparameters["tolerance"].tolist() == [[1.0, 2.0, 3.0, 4.0]] * 2
    fleet.set_hyperparameters(tolerance=[0.5, 0.6])
    assert fleet.hyperparameters["tolerance"].tolist() == [[0.5] * 4, [0.6] * 4]


def test_names_in_another_order_are_another_signature() -> None:
    members = []
    for names in ("abcd", "dcba", "abcd"):
        model = network().to(DOUBLE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        objective = fcco.methods.sonex(model, optimizer, fcco.outer.Hinge(), 4, smoothing=0.1)
        objective.term.names = tuple(names)
        members.append(Member(model, optimizer, objective))
    assert list(group_members(members).values()) == [[0, 2], [1]]
