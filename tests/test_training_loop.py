"""Everything that a training loop may contain, against SONEX written out by hand.

`ByHand` keeps a second model for w_{t-1} and a dictionary for u, and shares no code with fcco. The
smoothing is wide, so that each slope depends on u and a wrong u cannot hide behind a saturated
hinge.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

import fcco

GROUPS, RHO, SMOOTHING, GAMMA, CORRECTION = 5, 1.5, 2.0, 0.3, 0.6
Batch = tuple[Tensor, Tensor, Tensor]
Values = Callable[[nn.Module], Tensor]


class Net(nn.Module):
    """A small network; `checkpointed` recomputes its first half in the backward pass."""

    def __init__(self, dropout: float = 0.0, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout))
        self.last = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.reentrant = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            hidden = self.first(x)
        else:
            hidden = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return self.last(hidden).squeeze(1)


def make(dtype: torch.dtype = torch.float64, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).to(dtype)


def batches(steps: int, size: int = 12, dtype: torch.dtype = torch.float64) -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    result = []
    for _ in range(steps):
        x = torch.randn(size, 4, generator=draw, dtype=torch.float64)
        group = torch.randint(GROUPS, (size,), generator=draw)
        y = torch.sign(x[:, 0] + 0.4 * x[:, 1] * group)
        result.append((x.to(dtype), y.to(dtype), group))
    return result


def values(batch: Batch) -> Values:
    x, y, _ = batch
    return lambda model: softplus(-y * model(x))


class ByHand:
    """SONEX, `read="old"`, f = rho [.]_+ smoothed; samples since the last step are pooled."""

    def __init__(self, model: nn.Module, correction: float = CORRECTION) -> None:
        self.model, self.before = model, copy.deepcopy(model)
        self.correction = correction
        self.u: dict[int, Tensor] = {}
        self.old: dict[int, Tensor] = {}
        self.pending: list[tuple[Tensor, Tensor, Tensor]] = []

    def loss(self, function: Values, group: Tensor) -> Tensor:
        random = torch.get_rng_state()
        with torch.no_grad():
            past = function(self.before).double()
        torch.set_rng_state(random)
        fresh = function(self.model).double()
        if not self.pending:
            self.old = dict(self.u)
        self.pending.append((group, fresh.detach(), past))
        groups, now, then = (torch.cat(list(part)) for part in zip(*self.pending, strict=True))
        for block in groups.unique().tolist():
            mean, before = now[groups == block].mean(), then[groups == block].mean()
            u = self.old.get(block)
            if u is None:
                self.u[block] = mean
            else:
                change = GAMMA * (mean - u) + self.correction * (mean - before)
                self.u[block] = u + change
        total = fresh.new_zeros(())
        present = group.unique().tolist()
        for block in present:
            own = fresh[group == block].mean()
            u = self.old.get(block, now[groups == block].mean())
            slope = (u / SMOOTHING).clamp(0, RHO)
            envelope = slope * (u - slope * SMOOTHING / 2)
            total = total + (envelope + slope * (own - own.detach())) / len(present)
        return total

    def about_to_step(self) -> None:
        self.before.load_state_dict(self.model.state_dict())
        self.pending.clear()


class Fcco:
    """The library, with the same interface."""

    def __init__(
        self, model: nn.Module, optimizer: Any, correction: float = CORRECTION, **options: Any
    ) -> None:
        self.model = model
        self.objective = fcco.methods.sonex(
            model, optimizer, fcco.outer.Hinge(RHO), GROUPS, smoothing=SMOOTHING, gamma=GAMMA,
            correction=correction, **options,
        )  # fmt: skip

    def loss(self, function: Values, group: Tensor) -> Tensor:
        return self.objective(lambda: function(self.model), group)

    def about_to_step(self) -> None:
        """The hooks do it."""

    @property
    def u(self) -> dict[int, Tensor]:
        tracker = self.objective.term.tracker
        return {k: v[0] for k, v in enumerate(tracker.value) if tracker.seen[k]}


Method = ByHand | Fcco


def step(method: Method, optimizers: list[Any], batch: Batch) -> float:
    loss = method.loss(values(batch), batch[2])
    loss.backward()
    method.about_to_step()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def run(
    method: Method, optimizers: list[Any], steps: int = 15, dtype: torch.dtype = torch.float64
) -> list[float]:
    return [step(method, optimizers, batch) for batch in batches(steps, dtype=dtype)]


def distance(one: nn.Module, two: nn.Module) -> float:
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def assert_same(ours: Fcco, hand: ByHand, tolerance: float = 1e-12) -> None:
    assert distance(hand.model, make(next(hand.model.parameters()).dtype)) > 1e-3, "must move"
    assert distance(ours.model, hand.model) <= tolerance
    assert ours.u.keys() == hand.u.keys()
    for block, u in hand.u.items():
        assert abs(float(ours.u[block] - u)) <= tolerance


def pair(
    make_optimizer: Callable[[Any], Any], make_model: Callable[[], nn.Module] = make
) -> tuple[Fcco, Any, ByHand, Any]:
    """The library and the hand-written loop, each with a model and an optimizer of its own."""
    model, twin = make_model(), make_model()
    optimizer, other = make_optimizer(model.parameters()), make_optimizer(twin.parameters())
    return Fcco(model, optimizer), optimizer, ByHand(twin), other


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3, momentum=0.7)


# --- optimizers -------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.7, foreach=False),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.02, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, foreach=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    ours, optimizer, hand, other = pair(OPTIMIZERS[name])
    assert run(ours, [optimizer]) == pytest.approx(run(hand, [other]), abs=1e-12)
    assert_same(ours, hand)


def test_two_optimizers_of_one_model():
    def split(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        vectors = [p for p in model.parameters() if p.ndim != 2]
        return [torch.optim.SGD(matrices, lr=0.2), torch.optim.AdamW(vectors, lr=0.02)]

    model, twin = make(), make()
    optimizers, others = split(model), split(twin)
    ours, hand = Fcco(model, optimizers), ByHand(twin)
    run(ours, optimizers)
    run(hand, others)
    assert_same(ours, hand)
    assert ours.objective.term.step == 15, "one step, although two optimizers step"


@pytest.mark.parametrize("keyword", [False, True])
def test_a_step_with_a_closure(keyword):
    """The point before the step is copied when the closure has run, which needs the last one."""
    ours, optimizer, hand, other = pair(sgd)
    for batch in batches(15):

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            loss = ours.loss(values(batch), batch[2])
            loss.backward()
            return loss

        loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        assert loss.item() == pytest.approx(step(hand, [other], batch), abs=1e-12)
    assert_same(ours, hand)


# --- accumulation -----------------------------------------------------------------------------


def cut(batch: Batch, how: str) -> tuple[Batch, Batch]:
    """Two micro-batches: of the same blocks, or of different ones."""
    x, y, group = batch
    if how == "shared":
        x, y, group = (torch.cat([part, part.flip(0)]) for part in batch)
        half = len(x) // 2
        return (x[:half], y[:half], group[:half]), (x[half:], y[half:], group[half:])
    first = group < 2
    return (x[first], y[first], group[first]), (x[~first], y[~first], group[~first])


@pytest.mark.parametrize("how", ["shared", "distinct"])
def test_accumulation_equals_one_batch(how):
    """Weighting each part by its share of the blocks gives the gradient on the whole batch."""
    ours, optimizer, hand, other = pair(sgd)
    first = batches(1, size=60)[0]  # every block, so that u exists from here on
    step(ours, [optimizer], first)
    step(hand, [other], first)
    for batch in batches(15)[1:]:
        parts = cut(batch, how)
        whole: Any = tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))
        number = [len(part[2].unique()) for part in parts]
        for part, blocks in zip(parts, number, strict=True):
            if blocks:
                (ours.loss(values(part), part[2]) * blocks / sum(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        step(hand, [other], whole)
    assert_same(ours, hand)


# --- mixed precision --------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_skips_a_step(fused):
    """An overflow leaves w_t in place.

    A plain optimizer is not called at all: the samples of the skipped batch and of the next are
    both of g(w_t), and are pooled. A fused one is called and does nothing: a step of length zero.
    """
    ours, optimizer, hand, other = pair(lambda p: torch.optim.Adam(p, lr=0.02, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, batch in enumerate(batches(15)):
        overflow = number in (0, 4, 9, 10)
        scaler.scale(ours.loss(values(batch), batch[2])).backward()
        hand.loss(values(batch), batch[2]).backward()
        if overflow:
            weight = next(ours.model.parameters())
            assert weight.grad is not None
            weight.grad.view(-1)[3] = torch.inf
            before = [p.detach().clone() for p in ours.model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if overflow:
            assert all(map(torch.equal, before, ours.model.parameters()))
            if fused:
                hand.about_to_step()
        else:
            hand.about_to_step()
            other.step()
        other.zero_grad()
    assert_same(ours, hand)


@pytest.mark.parametrize("outside", [False, True])
def test_autocast(outside):
    """bf16 forward passes, float32 u; also when the region is open around the objective.

    An open region keeps casts of the weights: a cast of w_{t-1} must not serve for w_t.
    """
    model, twin = make(torch.float32), make(torch.float32)
    optimizer, other = sgd(model.parameters()), sgd(twin.parameters())
    ours, hand = Fcco(model, optimizer), ByHand(twin)

    def region(enter: bool) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if enter else contextlib.nullcontext()

    for x, y, group in batches(15, dtype=torch.float32):

        def function(model: nn.Module, x: Tensor = x, y: Tensor = y) -> Tensor:
            with region(not outside):
                output = model(x)
            assert output.dtype == torch.bfloat16
            return softplus(-y * output.float())

        for method, stepper in ((ours, optimizer), (hand, other)):
            with region(outside):
                loss = method.loss(function, group)
            loss.backward()
            method.about_to_step()
            stepper.step()
            stepper.zero_grad()
    assert ours.objective.term.tracker.value.dtype == torch.float32
    # Rounding to 8 bits can turn a difference of 1e-7 into one of 1e-2 in a single logit.
    assert_same(ours, hand, tolerance=2e-3)
    plain = ByHand(make(torch.float32), correction=0.0)
    run(plain, [sgd(plain.model.parameters())], dtype=torch.float32)
    assert distance(plain.model, hand.model) > 5e-3


# --- models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointed", [None, False, True])
def test_dropout_and_gradient_checkpointing(checkpointed):
    """One mask at both points, also when the first half is computed again; `True`: reentrant."""
    model, plain = make(dropout=0.4, checkpointed=checkpointed), make(dropout=0.4)
    optimizer, other = sgd(model.parameters()), sgd(plain.parameters())
    ours, hand = Fcco(model, optimizer), ByHand(plain)
    after = []
    for method, stepper in ((ours, optimizer), (hand, other)):
        torch.manual_seed(7)
        for x, y, group in batches(15):
            x.requires_grad_(bool(checkpointed))  # the reentrant form needs it
            step(method, [stepper], (x, y, group))
        after.append(torch.rand(()))
    assert after[0] == after[1], "the random stream goes on as it would"
    assert_same(ours, hand)


def test_frozen_layers_and_a_group_added_later():
    def part(model: Any) -> torch.optim.Optimizer:
        model.first.requires_grad_(False)
        return sgd(model.last.parameters())

    model, twin = make(), make()
    optimizer, other = part(model), part(twin)
    ours, hand = Fcco(model, optimizer), ByHand(twin)
    for number, batch in enumerate(batches(15)):
        if number == 7:
            for net, stepper in ((model, optimizer), (twin, other)):
                net.first.requires_grad_(True)
                stepper.add_param_group({"params": list(net.first.parameters())})
        step(ours, [optimizer], batch)
        step(hand, [other], batch)
    assert_same(ours, hand)


def test_steps_on_another_loss_come_first():
    """Pre-training with the same optimizer leaves the objective untouched."""
    ours, optimizer, hand, other = pair(sgd)
    for batch in batches(5):
        for method, stepper in ((ours, optimizer), (hand, other)):
            values(batch)(method.model).mean().backward()
            method.about_to_step()
            stepper.step()
            stepper.zero_grad()
    assert ours.objective.term.step == 0 and not ours.u
    run(ours, [optimizer])
    run(hand, [other])
    assert_same(ours, hand)


# --- torch.compile ----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("what", ["objective", pytest.param("step", marks=pytest.mark.slow)])
def test_compiled_loop(what):
    """Graph breaks are allowed, another result is not."""
    ours, optimizer, hand, other = pair(sgd)
    objective: Any = ours.objective
    if what == "objective":
        objective = torch.compile(objective, backend="aot_eager")

    def train(batch: Batch) -> Tensor:
        x, y, group = batch
        loss = objective(lambda: softplus(-y * ours.model(x)), group)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    loop: Any = torch.compile(train, backend="aot_eager") if what == "step" else train
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's remarks about what it cannot trace
        ours_losses = [loop(batch).item() for batch in batches(10)]
    losses = [step(hand, [other], batch) for batch in batches(10)]
    assert ours_losses == pytest.approx(losses, abs=1e-12)
    assert_same(ours, hand)
