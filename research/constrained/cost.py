"""What a step costs, as a ratio to a hand-written hinge penalty on the same constraints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, relu

import fcco
from benchmarks.timing import interleave

from . import peers
from .fairness import network
from .problems import Batch, Builder, Form, Problem, Schedule, Score, adam, training_step

CASES = ((64, 14), (64, 1000), (256, 14), (256, 1000))
FEATURES, BATCH = 107, 128


@dataclass
class Gaps(Problem):
    """Gaps of rates at m/2 thresholds for both labels, on one fixed batch of random numbers."""

    width: int
    num_constraints: int
    schedule: Schedule = field(default_factory=lambda: Schedule(1, 1, lr=1e-4))
    name: str = "gaps"

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.thresholds = torch.linspace(-3, 3, self.num_constraints // 2)
        self.targets = torch.tensor([0.0, 1.0, 0.0, 1.0]).repeat_interleave(BATCH // 4)
        self.inputs = torch.randn(BATCH, FEATURES, generator=generator)

    def model(self) -> nn.Module:
        """Two hidden layers."""
        torch.manual_seed(0)
        return network(FEATURES, self.width)

    def batches(self, seed: int) -> Callable[[], Batch]:
        """The same batch for ever."""
        batch = Batch(self.inputs, self.targets)
        return lambda: batch

    def measure(
        self, model: nn.Module, batch: Batch, form: Form = "signed"
    ) -> tuple[Tensor, Tensor]:
        """Loss and gaps."""
        scores = model(batch.inputs)
        loss = binary_cross_entropy_with_logits(scores, batch.targets)
        rates = torch.sigmoid(scores.view(4, -1, 1) - self.thresholds).mean(1)
        return loss, (rates[:2] - rates[2:]).flatten() - 0.005

    @torch.no_grad()
    def score(self, model: nn.Module) -> Score:
        """Of the one batch that all steps use."""
        loss, values = self.measure(model, self.batches(0)())
        return Score(loss.item(), values.max().item())


def _plain(problem: Gaps, penalised: bool) -> Callable[[], None]:
    model, batch = problem.model(), problem.batches(0)()

    def loss(batch: Batch) -> Tensor:
        if not penalised:
            return binary_cross_entropy_with_logits(model(problem.inputs), problem.targets)
        loss, values = problem.measure(model, batch)
        return loss + relu(values).mean()

    step = training_step(adam(problem, model), loss)
    return lambda: step(batch)


def _sonex(problem: Gaps, correction: Any) -> Callable[[], None]:
    model, batch = problem.model(), problem.batches(0)()
    number, optimizer = problem.num_constraints, adam(problem, model)
    options: Any = {"smoothing": 1e-3, "gamma": 0.02, "correction": correction}
    options["penalty"] = float(number)
    objective = fcco.constrained(model, optimizer, number, "sonex", **options)
    step = training_step(optimizer, lambda batch: objective(lambda: problem.measure(model, batch)))
    return lambda: step(batch)


def _peer(problem: Gaps, builder: Builder, setting: dict[str, Any]) -> Callable[[], None]:
    stepper, batch = builder(problem, problem.model(), setting), problem.batches(0)()
    return lambda: stepper.step(batch)


def _one_object_each(problem: Gaps) -> Callable[[], None]:
    """Cooper with a `Constraint` for every constraint instead of one vector."""
    import cooper  # pyright: ignore[reportMissingImports]

    model = problem.model()
    constraints = [
        cooper.Constraint(
            constraint_type=cooper.ConstraintType.INEQUALITY,
            formulation_type=cooper.formulations.Lagrangian,
            multiplier=cooper.multipliers.DenseMultiplier(num_constraints=1),
        )
        for _ in range(problem.num_constraints)
    ]

    class Constrained(cooper.ConstrainedMinimizationProblem):
        def __init__(self) -> None:
            super().__init__()
            for number, constraint in enumerate(constraints):
                setattr(self, f"constraint_{number}", constraint)

        def compute_cmp_state(self, batch: Batch) -> Any:
            loss, values = problem.measure(model, batch)
            states = {
                constraint: cooper.ConstraintState(violation=value)
                for constraint, value in zip(constraints, values, strict=True)
            }
            return cooper.CMPState(loss=loss, observed_constraints=states)

    constrained = Constrained()
    dual = torch.optim.SGD(list(constrained.dual_parameters()), lr=0.01, maximize=True)
    optimizer = cooper.optim.SimultaneousOptimizer(constrained, adam(problem, model), dual)
    batch = problem.batches(0)()
    return lambda: optimizer.roll(compute_cmp_state_kwargs={"batch": batch})


_PEERS: dict[str, dict[str, Any]] = {
    "Cooper simultaneous": {"dual_lr": 0.01},
    "Cooper alternating": {"dual_lr": 0.01},
    "Cooper augmented": {"dual_lr": 0.01, "penalty": 1.0},
    "Cooper nuPI": {"dual_lr": 0.01, "kp": 1.0, "nu": 0.9},
    "Cooper extrapolation": {"dual_lr": 0.01},
    "HCT ALM": {"lr": 0.01, "penalty": 1.0},
    "HCT nuPI": {"ki": 0.01, "kp": 0.1, "nu": 0.9},
    "HCT PBM": {"gamma": 0.9, "epochs": 1},
    "HCT SSG": {},
    "HCT Moreau": {"lr": 0.01, "penalty": 1.0, "moreau": {"mu": 1.0}},
}


def measure(width: int, constraints: int, rounds: int, show: bool) -> dict[str, float]:
    """Ratios to the hand-written penalty for one network and number of constraints."""
    problem = Gaps(width, constraints)
    candidates = {
        "objective alone": _plain(problem, penalised=False),
        "by hand": _plain(problem, penalised=True),
        "SONEX, moving average": _sonex(problem, 0.0),
        "SONEX, MSVR": _sonex(problem, "auto"),
    }
    slow: dict[str, Callable[[], None]] = {}
    for name, builder in peers.methods().items():
        if name in _PEERS:
            candidates[name] = _peer(problem, builder, _PEERS[name])
    if peers.installed("Cooper"):
        slow = {
            "by hand": candidates["by hand"],
            "Cooper, one object each": _one_object_each(problem),
        }

    def tick(done: int, total: int) -> None:
        if show:
            end = "\n" if done == total else ""
            print(
                f"\rstep cost {width}, m = {constraints}: {done}/{total} ", end=end, file=sys.stderr
            )

    timings = interleave(candidates, rounds, 10, warm_up=20, tick=tick)
    found = {"by hand, ms": round(1000 * timings.median("by hand"), 4)}
    found |= {name: round(timings.ratio(name, "by hand"), 3) for name in candidates}
    if slow:
        few = interleave(slow, max(2, rounds // 5), 2, warm_up=1)
        name = "Cooper, one object each"
        found[name] = round(few.ratio(name, "by hand"), 2)
    return found


def table(rows: dict[str, dict[str, float]]) -> str:
    """Markdown: candidates by case."""
    cases = list(rows)
    lines = [f"| | {' | '.join(cases)} |", "|---" * (len(cases) + 1) + "|"]
    names = dict.fromkeys(name for row in rows.values() for name in row)
    for name in names:
        cells = [f"{rows[case].get(name, float('nan')):.2f}" for case in cases]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
