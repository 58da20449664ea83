"""A byte-level GPT from scratch on twelve domains: which mixture is best for the worst of them?

    python -m studies.mixtures --quick --json                            # a tiny one, two minutes
    python -m studies.mixtures --device cuda --workers 3 --publish       # 32 million weights

The domains are languages, code, law, LaTeX and speeches (`studies.no_regressions`). All runs have
the same model, bytes, AdamW and schedule; they differ in what they draw and how they weigh it:

* natural: shares that fall from 10 to 1, about those of the languages of MDN; uniform;
* softmax(loss / T): shares by the present losses;
* DoReMi (Xie et al. 2023), three runs: a reference with uniform shares; group DRO on the losses
  minus those of the reference; then a run with the average of its weights as shares;
* fcco: uniform batches under `fcco.CVaRGroupDRO`, one run; its average weights are logged.

Printed are bits per byte of test text: of the worst domain, of the mean, and seconds of all runs
that a method needs.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import fcco
from studies import publish
from studies.no_regressions import domains, schedule
from studies.runner import Job, Runner, command, parse

METHODS = ("natural", "uniform", "softmax(loss / T)", "DoReMi", "fcco")
NATURAL_RANGE, TEMPERATURE, DOREMI_STEP, SMOOTHING, RATIO = 10.0, 1.0, 0.1, 1e-3, 0.25


class Size(NamedTuple):
    """Of a run: the GPT, steps, rows of a domain a step, bytes a row, the largest rate."""

    layers: int
    width: int
    steps: int
    rows: int
    length: int
    rate: float
    test: int  # rows of a domain


FULL, SMALL = Size(10, 512, 600, 4, 512, 1e-3, 150), Size(2, 64, 60, 1, 64, 3e-3, 8)


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The logits of the next byte."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, size.width)
        self.places = nn.Embedding(size.length, size.width)
        heads = max(1, size.width // 64)
        self.blocks = nn.ModuleList(Block(size.width, heads) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, 256)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bytes(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@functools.cache
def texts(length: int, split: str) -> tuple[tuple[str, ...], list[Tensor]]:
    """The names of the domains; rows of bytes of each, (N, length + 1)."""
    found = domains()
    names = tuple(sorted(name for own, name in found if own == split))
    rows = []
    for name in names:
        joined = "\n\n".join(found[split, name]).encode()
        whole = len(joined) // (length + 1) * (length + 1)
        flat = torch.frombuffer(bytearray(joined[:whole]), dtype=torch.uint8)
        rows.append(flat.view(-1, length + 1))
    return names, rows


def losses(model: nn.Module, rows: Tensor, device: str) -> Tensor:
    """Bits per byte of each row."""
    ids = rows.to(device).long()
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(ids[:, :-1])
    each = cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")
    return each.mean(1) / math.log(2)


def natural(number: int) -> Tensor:
    """Shares in a geometric series, the last a tenth of the first."""
    return (-math.log(NATURAL_RANGE) * torch.linspace(0, 1, number)).softmax(0)


def train(
    size: Size,
    device: str,
    seed: int,
    method: str,
    shares: Tensor | None = None,
    reference: nn.Module | None = None,
) -> tuple[nn.Module, Tensor, float]:
    """A trained model, the average weights of the domains, and seconds.

    The method `"fixed"` draws by `shares`; `"softmax"` by the present losses; `"excess"` weighs the
    losses minus those of `reference`, as DoReMi does; `"fcco"` is ours.
    """
    names, rows = texts(size.length, "train")
    number = len(names)
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    model = GPT(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate, betas=(0.9, 0.95))
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: schedule(k, size.steps))
    equal = torch.full((number,), 1 / number)
    weights, running, total = equal.clone(), torch.full((number,), 8.0), torch.zeros(number)
    objective = mixture = None
    if method == "fcco":
        objective = fcco.CVaRGroupDRO(model, optimizer, ratio=RATIO, names=list(names))
        mixture = fcco.groups.Mixture(objective)
    start = time.perf_counter()
    for _ in range(size.steps):
        if method in ("fixed", "softmax"):
            chances = (running / TEMPERATURE).softmax(0) if shares is None else shares
            domain = torch.multinomial(chances, number * size.rows, True, generator=draw)
        else:
            domain = torch.arange(number).repeat_interleave(size.rows)
        places = [int(torch.randint(len(rows[k]), (), generator=draw)) for k in domain]
        batch = torch.stack([rows[k][place] for k, place in zip(domain, places, strict=True)])
        if objective is not None:
            loss = objective(functools.partial(losses, model, batch, device), domain.to(device))
        else:
            each = losses(model, batch, device)
            loss = each.mean()
            if method == "excess":
                assert reference is not None
                with torch.no_grad():
                    excess = (each - losses(reference, batch, device)).clamp(min=0).cpu()
                weights *= (DOREMI_STEP * excess.view(number, -1).mean(1)).exp()
                weights = (1 - SMOOTHING) * weights / weights.sum() + SMOOTHING * equal
                loss = (each.view(number, -1).mean(1) * weights.to(device)).sum()
                total += weights / size.steps
            elif method == "softmax":
                for k in domain.unique():
                    running[k] += 0.1 * (each.detach().cpu()[domain == k].mean() - running[k])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        if mixture is not None:
            mixture.update()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return model, total if mixture is None else mixture.mean, seconds


def run(job: Job) -> dict[str, Any]:
    """Bits per byte of the test text of each domain."""
    device, small = job.problem.split(" / ")[1:]
    size = SMALL if small == "small" else FULL
    names, rows = texts(size.length, "test")
    equal, spent, weights = torch.full((len(names),), 1 / len(names)), 0.0, None
    with_size = functools.partial(train, size, device, job.seed)
    if job.method == "DoReMi":
        reference, _, first = with_size("fixed", shares=equal)
        _, weights, second = with_size("excess", reference=reference)
        model, _, third = with_size("fixed", shares=weights)
        spent = first + second + third
    elif job.method == "fcco":
        model, weights, spent = with_size("fcco")
    elif job.method.startswith("softmax"):
        model, _, spent = with_size("softmax")
    else:
        shares = natural(len(names)) if job.method == "natural" else equal
        model, _, spent = with_size("fixed", shares=shares)
    model.eval()
    bits = []
    with torch.no_grad():
        for own in rows:
            parts = own[: size.test].split(50)
            bits.append(float(torch.cat([losses(model, part, device) for part in parts]).mean()))
    return {
        "bits": bits,
        "seconds": spent,
        "weights": None if weights is None else [round(float(w), 4) for w in weights],
    }


def rows_of(found: dict[str, Any]) -> list[list[str]]:
    """A table: of each method the means over seeds."""
    rows = [["bits per byte", "worst domain", "mean", "runs", "seconds"]]
    for name, own in found.items():
        worst = [max(each) for each in own["bits"]]
        mean = [sum(each) / len(each) for each in own["bits"]]
        runs = "3" if name == "DoReMi" else "1"
        seconds = f"{sum(own['seconds']) / len(own['seconds']):.0f}"
        rows.append([name, publish.mean_std(worst), publish.mean_std(mean), runs, seconds])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("mixtures", __doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parse(parser, arguments, (1, 3))
    problem = f"domains / {options.device} / {'small' if options.quick else 'full'}"
    runner = Runner(run, dict, options.workers, options.out)
    jobs = {name: [Job(problem, name, {}, s) for s in range(options.seeds)] for name in METHODS}
    names, found = texts((SMALL if options.quick else FULL).length, "test")[0], {}
    for name, runs in runner.each(jobs).items():
        found[name] = {key: [each[key] for each in runs] for key in ("bits", "seconds", "weights")}
    print(publish.plain(rows_of(found)))
    result = {"domains": list(names), "methods": found}
    publish.conclude(options, "mixtures", result, device=options.device)


if __name__ == "__main__":
    main()
