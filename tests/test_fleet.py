"""A fleet of runs: frozen runs, checkpoints, data, settings, models, errors."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fleet_cases import BLOCKS, CASES, DOUBLE, RUNS, Case, every, network
from problems import Point, take_step
from torch import Tensor, nn

from fcco.fleet import Fleet, Member, Unsupported, group_members

ADAM, CVAR, SONEX, ROUNDS = "adam", "cvar-smooth-new", "sonex-momentum", "alexr2-momentum"


def normed(seed: int) -> nn.Module:
    """Statistics that each pass moves."""
    layers = network(seed)
    return nn.Sequential(layers[0], nn.BatchNorm1d(4), *layers[1:]).to(DOUBLE)  # type: ignore[index]


def case_of(name: str, build: Callable[[int], nn.Module] = network) -> Case:
    return dataclasses.replace(CASES[name], network=build)


def step_all(fleets: Sequence[Fleet], case: Case, steps: range) -> None:
    for step in steps:
        first, other, index = case.stacked(step)
        for fleet in fleets:
            fleet.step(first, other, index=index)


def spoiled(first: dict[str, Tensor], place: int, value: float = torch.inf) -> dict[str, Tensor]:
    """The batch of all runs with a value in one run's part."""
    x = first["x"].clone()
    x[place, 1, 1] = value
    return {**first, "x": x}


def same(first: dict[str, Tensor], second: dict[str, Tensor], rows: Sequence[int]) -> bool:
    """Whether some runs have the same bits in two states."""
    assert first.keys() == second.keys()
    return all(torch.equal(first[name][rows], second[name][rows]) for name in first)


def held(fleet: Fleet) -> dict[str, Tensor]:
    return fleet.state_dict()["state"]


def close_to_single(fleet: Fleet, singles: Sequence[Member], within: float = 1e-11) -> None:
    values = {**fleet.buffers(), **fleet.weights()}
    for place, run in enumerate(singles):
        for name, value in (*run.model.named_parameters(), *run.model.named_buffers()):
            difference = (values[name][place] - value).abs().max()
            assert difference <= within, (place, name, difference)


# --- a run that leaves the finite numbers ---------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "name", "place", "build"),
    [
        ("eager", ADAM, 0, network), ("eager", CVAR, 2, network), ("eager", ROUNDS, 2, normed),
        ("traced", SONEX, 1, normed),
    ],
)  # fmt: skip
def test_bad_data_freezes_one_run_and_no_other(
    mode: str, name: str, place: int, build: Callable[[int], nn.Module]
) -> None:
    case, bad_step = case_of(name, build), 3
    sick, sound = case.fleet(mode), case.fleet(mode)
    others = [r for r in range(RUNS) if r != place]
    last: dict[str, Tensor] = {}
    for step in range(9):
        first, other, index = case.stacked(step)
        if step == bad_step:
            last = held(sound)
        sick.step(spoiled(first, place) if step == bad_step else first, other, index=index)
        sound.step(first, other, index=index)
        assert same(sick.state, sound.state, others)
        if step >= bad_step:  # frozen where it was, and for good
            assert same(sick.state, last, [place])
    assert sick.died.tolist() == [bad_step if r == place else -1 for r in range(RUNS)]
    assert sick.alive.tolist() == [r != place for r in range(RUNS)]
    assert bool(sound.alive.all()) and not same(sound.state, last, [place])


@pytest.mark.parametrize(("mode", "name"), [("eager", ROUNDS), ("traced", SONEX)])
def test_a_huge_learning_rate_freezes_one_run(mode: str, name: str) -> None:
    place, case = 1, case_of(name)
    sick = case.fleet(mode)
    sick.set_hyperparameters(lr=[0.02, 1e200, 0.02])
    states = [held(sick)]
    for step in range(12):
        step_all([sick], case, range(step, step + 1))
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
    ("mode", "name", "build"),
    [
        ("eager", SONEX, normed), ("eager", CVAR, network), ("eager", ROUNDS, normed),
        pytest.param("traced", ROUNDS, normed, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_resumed_fleet_goes_on_bitwise(
    mode: str, name: str, build: Callable[[int], nn.Module]
) -> None:
    case = case_of(name, build)
    fleet = case.fleet(mode)
    for step in range(6):  # in the middle of a round of 4
        first, other, index = case.stacked(step)
        if step == 2:  # a frozen run is part of a checkpoint
            first = spoiled(first, 1, torch.nan)
        fleet.step(first, other, index=index)
    fleet.set_hyperparameters(lr=[0.02, 0.03, 0.04])
    saved = through_a_file(fleet.state_dict())
    untouched = {name: value.clone() for name, value in saved["state"].items()}
    again = case.fleet(mode)
    again.load_state_dict(saved)
    for step in range(6, 13):
        step_all([fleet, again], case, range(step, step + 1))
        assert same(fleet.state, again.state, range(3))
        assert all(torch.equal(v, again.weights()[n]) for n, v in fleet.weights().items())
    assert again.died.tolist() == fleet.died.tolist() == [-1, 2, -1]
    assert again.steps == fleet.steps == 13
    assert same(untouched, saved["state"], range(3))  # a checkpoint is a copy
    # Back, from the first step of a round, where the state holds one tensor under two names.
    fleet.load_state_dict(saved)
    step_all([fleet], case, range(6, 13))
    assert same(fleet.state, again.state, range(3)) and fleet.steps == 13


def test_a_checkpoint_of_another_fleet_is_refused() -> None:
    case = case_of(SONEX)
    small, large = (Fleet([case.member(s) for s in range(n)], case.inner) for n in (2, 3))
    with pytest.raises(ValueError, match=r"load_state_dict.*number of runs"):
        large.load_state_dict(small.state_dict())
    plain = case_of(ADAM).fleet("eager")
    for fleet, other in ((plain, large), (large, plain)):
        before = held(fleet)
        with pytest.raises(ValueError, match=r"load_state_dict.*another method"):
            fleet.load_state_dict(other.state_dict())
        assert same(before, fleet.state, range(2))


def test_a_run_frozen_inside_a_round_stays_at_its_start() -> None:
    case, place = case_of(ROUNDS), 1
    fleet = case.fleet("eager")
    start = {name: value[place].clone() for name, value in fleet.weights().items()}
    for step in range(9):
        first, other, index = case.stacked(step)
        if step == 2:  # in the middle of its first round
            first = spoiled(first, place, torch.nan)
        fleet.step(first, other, index=index)
        now = fleet.weights()
        assert all(torch.equal(now[name][place], value) for name, value in start.items())
    assert fleet.died.tolist() == [-1, 2, -1]


# --- settings and data ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [ADAM, ROUNDS])
def test_streams_share_rows(name: str) -> None:
    streams, case = [1, 0, 1], case_of(name)
    members = [[case.member(run) for run in (0, 1, 0)] for _ in range(2)]
    shared = Fleet(members[0], case.inner, streams=streams, mode="eager")
    own = Fleet(members[1], case.inner, mode="eager")
    for step in range(4):
        batches = [each for each in case.stacked(step)[:2] if each is not None]
        shared.step(*({key: part[:2] for key, part in batch.items()} for batch in batches))
        own.step(*({key: part[streams] for key, part in batch.items()} for batch in batches))
    assert same(shared.state, own.state, range(3))
    assert not torch.equal(shared.state["weights"][0], shared.state["weights"][1])


@pytest.mark.parametrize(("mode", "name"), [("traced", ADAM), ("eager", CVAR), ("eager", ROUNDS)])
def test_set_hyperparameters_of_each_run(mode: str, name: str) -> None:
    case, rates = case_of(name), [0.01, 0.1, 0.3]
    fleet, singles = case.fleet(mode), [case.member(run) for run in range(RUNS)]
    later = [0.02] * RUNS
    for lr, given, steps in (
        (rates, torch.tensor(rates, dtype=DOUBLE), range(4)), (later, 0.02, range(4, 8)),
    ):  # fmt: skip
        fleet.set_hyperparameters(lr=given)
        step_all([fleet], case, steps)
        for run, single in enumerate(singles):
            optimizer: Any = getattr(single.optimizer, "outer", single.optimizer)
            optimizer.param_groups[0]["lr"] = lr[run]
            for step in steps:
                case.step_alone(single, run, step)
    close_to_single(fleet, singles)


# --- models ---------------------------------------------------------------------------------------


class Twice(nn.Module):
    """One layer in two places."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        first = nn.Linear(3, 3)
        self.body, self.again, self.head = first, first, nn.Linear(3, 1)
        self.to(DOUBLE)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.again(torch.tanh(self.body(inputs))))


def half_frozen(seed: int = 0) -> nn.Module:
    model = network(seed)
    for parameter in model[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("mode", "name", "build"),
    [
        ("eager", ROUNDS, normed), ("traced", CVAR, normed), ("eager", ADAM, Twice),
        ("eager", SONEX, half_frozen),
    ],
)  # fmt: skip
def test_each_run_is_the_single_run(
    mode: str, name: str, build: Callable[[int], nn.Module]
) -> None:
    """With running statistics, shared layers and layers that do not move.

    The rounds have a second batch for the gradient: both passes move the statistics.
    """
    case = dataclasses.replace(case_of(name, build), steps=8)
    fleet, singles = case.fleet(mode), case.alone()
    step_all([fleet], case, range(8))
    close_to_single(fleet, singles)
    assert fleet.mode == mode
    loaded = build(7)
    fleet.load_into(1, loaded)
    for key, value in singles[1].model.state_dict().items():
        assert torch.allclose(loaded.state_dict()[key], value, atol=1e-11), key


@pytest.mark.parametrize("mode", ["eager", "traced"])
def test_dropout_is_refused(mode: str) -> None:
    fleet = case_of(SONEX, lambda seed: network(seed).append(nn.Dropout(0.5))).fleet(mode)  # type: ignore
    before = held(fleet)
    with pytest.raises(Unsupported, match="without random numbers"):
        step_all([fleet], CASES[SONEX], range(1))
    assert same(before, fleet.state, range(2)) and fleet.steps == 0


# --- the program ----------------------------------------------------------------------------------


def test_programs_do_not_merge_tensors_that_are_one_by_chance() -> None:
    """In the second step of a round w_{t-1} is the anchor; in the third it is not."""
    case = dataclasses.replace(case_of(ROUNDS), steps=10)
    fleet = case.fleet("traced")
    step_all([fleet], case, range(1))
    assert fleet.state["previous"] is fleet.state["anchor"]
    step_all([fleet], case, range(1, 10))
    alone = torch.stack([case.held(member)["weights"] for member in case.alone()])
    torch.testing.assert_close(fleet.state["weights"], alone, rtol=0, atol=1e-11)


def test_batches_of_another_size_get_a_program_of_their_own() -> None:
    case = case_of(SONEX)
    fleet, singles = case.fleet("traced"), [case.member(run) for run in range(RUNS)]
    for step, size in enumerate((12, 8, 12, 8)):
        batch = {key: part[:, :size] for key, part in case.stacked(step)[0].items()}
        fleet.step(batch)
        for run, single in enumerate(singles):
            row = {key: part[run] for key, part in batch.items()}
            take_step(single.objective, lambda row=row, m=single.model: every(m, row))
    close_to_single(fleet, singles)


# --- errors ---------------------------------------------------------------------------------------


def sgd(model: nn.Module, parameters: Any = None) -> Member:
    return Member(model, torch.optim.SGD(model.parameters() if parameters is None else parameters))


def leaky(slope: float = 0.1, width: int = 4) -> Member:
    return sgd(nn.Sequential(nn.Linear(3, width), nn.LeakyReLU(slope), nn.Linear(width, 1)))


def mixed() -> nn.Module:
    model = network(0).float()
    model[2].double()  # type: ignore[index]
    return model


def hooked(name: str) -> Member:
    model = network(0)
    getattr(model[0].weight, name)(lambda value: None)  # type: ignore[index]
    return sgd(model)


def last_layer(own: nn.Module | None = None) -> Member:
    """A run that trains one of its layers."""
    model = network(0)
    run = sgd(model, model[2].parameters())  # type: ignore[index]
    return run if own is None else Member(own, run.optimizer)


REFUSED: list[tuple[Callable[[], list[Member]], str]] = [
    (lambda: [sgd(network(0)), last_layer()], "2.bias"),
    (lambda: [sgd(network(0)), sgd(half_frozen())], "2.bias"),
    (lambda: [leaky(), leaky(width=5)], "5, 3.*4, 3"),
    (lambda: [leaky(), leaky(0.2)], "0.2.*0.1"),
    (lambda: [sgd(normed(0)), sgd(normed(0).eval())], "False.*True"),
    (lambda: [sgd(mixed())], "float32, torch.float64"),
    (lambda: [sgd(network(0).bfloat16())], "bfloat16"),
    (lambda: [hooked("register_hook")], r"hooks.*0\.weight"),
    (lambda: [hooked("register_post_accumulate_grad_hook")], r"hooks.*0\.weight"),
    (lambda: [Member(Point([1.0, 2.0]), sgd(network(0)).optimizer)], "another model"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_runs_that_make_no_fleet(make: Callable[[], list[Member]], message: str) -> None:
    with pytest.raises(Unsupported, match=f"(?s){message}"):
        Fleet(make(), every)


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
        Fleet([CASES[SONEX].member(run) for run in range(number)], every, **options)


@pytest.mark.parametrize("streams, rows, found", [(None, 2, "(2, 12"), ([0, 5, 0], 3, "(3, 12")])
def test_a_batch_with_other_rows(streams: Any, rows: int, found: str) -> None:
    fleet = Fleet([CASES[SONEX].member(0)] * 3, every, streams=streams, mode="eager")
    batch = {key: part[:rows] for key, part in CASES[SONEX].stacked(0)[0].items()}
    with pytest.raises(ValueError, match=re.escape(found)):
        fleet.step(batch)
    assert fleet.steps == 0


def test_hyperparameters_that_cannot_be_set() -> None:
    case = CASES["sonex-named"]
    members = [case.member(1) for _ in range(2)]  # whose smoothing falls
    fleet = Fleet(members, case.inner, mode="eager")
    lr = fleet.hyperparameters["lr"].tolist()
    for wrong in ({"rate": 1.0}, {"lr": [0.1, 0.2, 0.3]}, {"lr": 9.0, "rate": 1.0}):
        with pytest.raises((ValueError, RuntimeError)):
            fleet.set_hyperparameters(**wrong)
    with pytest.raises(ValueError, match="follows a schedule"):
        fleet.set_hyperparameters(lr=9.0, smoothing=0.5)
    assert fleet.hyperparameters["lr"].tolist() == lr  # all or nothing


def test_a_number_for_each_limit() -> None:
    case = CASES["ssg"]  # run 1 has four limits
    fleet = Fleet([case.member(1) for _ in range(2)], case.inner)
    assert fleet.hyperparameters["tolerance"].tolist() == [[0.1, 0.2, 0.05, 0.15]] * 2
    fleet.set_hyperparameters(tolerance=[0.5, 0.6])
    assert fleet.hyperparameters["tolerance"].tolist() == [[0.5] * BLOCKS, [0.6] * BLOCKS]


def test_names_in_another_order_are_another_signature() -> None:
    members = [CASES[SONEX].member(0) for _ in range(3)]
    for names, member in zip(("abcd", "dcba", "abcd"), members, strict=True):
        member.objective.term.names = tuple(names)  # type: ignore[union-attr]
    assert list(group_members(members).values()) == [[0, 2], [1]]
