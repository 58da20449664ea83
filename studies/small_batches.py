"""Contrastive fine-tuning in batches of 32: with a memory of pairs, without, and batch 1,024.

    python -m studies.small_batches --json --workers 4 --out build/small.jsonl    # one GPU
    python -m studies.small_batches --json --quick                                # a CPU, minutes

Pairs of the first paragraph of a docstring and the source of its function without docstrings, from
all packages of the environment. What occurs twice, as docstring or as source, is left out with all
its copies. Whole packages are for training, for validation or for the test. MiniLM is fine-tuned on
them for four epochs (bf16 on a GPU, temperature 0.05).

Every loss has four learning rates, chosen by recall@1 on the validation pairs with one seed; fresh
seeds follow with the chosen one. Reported is recall@1 on the test pairs, docstring to source among
all of them. `--quick` has few pairs and one epoch: it shows that all runs, not what is better.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import random
import sysconfig
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fcco_experiments import backbones
from fcco_experiments.backbones.huggingface import trimmed
from torch import Tensor, nn
from torch.nn.functional import normalize

from studies import publish
from studies.runner import Job, Runner, command, parse, published_runs, tuned

LENGTHS = (48, 96)  # tokens of a docstring and of a source
SHARES = {"test": 0.1, "validation": 0.07}
TEMPERATURE = 0.05
PLAIN = "`MultipleNegativesRankingLoss`"
METHODS: dict[tuple[str, int], tuple[dict[str, Any], tuple[float, ...]]] = {
    (PLAIN, 1024): ({"gamma": None}, (5e-5, 1e-4, 2e-4, 5e-4)),
    (PLAIN, 32): ({"gamma": None}, (1e-5, 2e-5, 5e-5, 1e-4)),
    # A step has more negatives than that of a small batch, and there are as many steps.
    ("`GlobalContrastiveLoss`, `gamma=1`", 32): (
        {"gamma": 1.0, "stored_pairs": 1024, "negatives": 1023}, (5e-6, 1e-5, 2e-5, 5e-5)
    ),
    ("with `stored_pairs=0, negatives=None`", 32): ({"gamma": 0.8}, (1e-5, 2e-5, 5e-5, 1e-4)),
}  # fmt: skip
"""Loss and batch: its settings (no gamma: the loss of sentence-transformers), learning rates."""


# Pairs of docstrings and sources.


class Pair(NamedTuple):
    """A function: its package, the first paragraph of its docstring, its source without any."""

    package: str
    text: str
    source: str


def functions(code: str) -> Iterator[tuple[str, str]]:
    """Docstring and source of the functions of a file that have both."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    documented = [
        (node, text)
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    ]
    for node, _ in documented:
        node.body = node.body[1:]
    for node, docstring in documented:
        if isinstance(node, ast.ClassDef) or not node.body:
            continue
        for inner in ast.walk(node):  # a class or function of docstrings alone
            if isinstance(inner, kinds) and not inner.body:
                inner.body = [ast.Pass()]
        text = " ".join(docstring.strip().split("\n\n")[0].split())
        source = ast.unparse(node)
        if len(text) >= 25 and text.isascii() and len(source) >= 60:
            yield text, source


def collect(site: Path, every: int = 1) -> list[Pair]:
    """All pairs of the packages in a folder, or those of every n-th file."""
    found = []
    for file in sorted(site.rglob("*.py"))[::every]:
        package, *inner = file.relative_to(site).parts
        others = {"tests", "test", "testing", "vendor", "vendored", "externals"}
        if others & {part.strip("_") for part in inner} or file.name.startswith("test_"):
            continue
        code = file.read_text(encoding="utf-8", errors="replace")
        found += [Pair(package, text, source) for text, source in functions(code)]
    texts, sources = Counter(p.text.lower() for p in found), Counter(p.source for p in found)
    return [p for p in found if texts[p.text.lower()] == sources[p.source] == 1]


def split(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Whole packages to the parts, in an order that does not depend on their names or sizes."""
    packages: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        packages[pair.package].append(pair)
    parts: dict[str, list[Pair]] = {"train": [], "validation": [], "test": []}
    for name in sorted(packages, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        part = "train"
        for other, share in SHARES.items():
            # The largest packages would be all of a part, or most of it.
            if len(parts[other]) < share * len(pairs) and len(packages[name]) < 0.1 * len(pairs):
                part = other
                break
        parts[part] += packages[name]
    for part in parts.values():
        random.Random(0).shuffle(part)
    return parts


def tokens(pairs: Sequence[Pair]) -> list[Tensor]:
    """Ids of the docstrings and of the sources, padded with 0."""
    found = []
    for column, longest in zip(("text", "source"), LENGTHS, strict=True):
        texts = tuple(getattr(pair, column)[: 20 * longest] for pair in pairs)
        ids: Any = backbones.encode("minilm", texts, tokens=longest)
        found.append(ids.values)
    return found


# One run.


class Encoder(nn.Module):
    """MiniLM with its usual dropout, in bfloat16 on a GPU; called like a SentenceTransformer."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.backbone = backbones.build("minilm").to(device)
        for part in self.backbone.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.1

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The embedding of rows of token ids."""
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
            return {"sentence_embedding": self.backbone(features["input_ids"])}


def take(columns: Sequence[Tensor], rows: Tensor) -> list[dict[str, Tensor]]:
    """Both columns of some rows, as short as possible."""
    return [{"input_ids": trimmed(column[rows.to(column.device)])} for column in columns]


@torch.no_grad()
def recall(model: nn.Module, columns: Sequence[Tensor]) -> float:
    """The share of docstrings, in percent, whose own source is nearest."""
    model.eval()
    embedded: list[list[Tensor]] = [[], []]
    for rows in torch.arange(len(columns[0])).split(512):
        for out, column in zip(embedded, take(columns, rows), strict=True):
            out.append(normalize(model(column)["sentence_embedding"], dim=1))
    queries, keys = (torch.cat(each) for each in embedded)
    own = torch.arange(len(queries), device=queries.device)
    return 100 * float(((queries @ keys.T).argmax(1) == own).float().mean())


def make_loss(model: Encoder, setting: Mapping[str, Any], pairs: int) -> nn.Module:
    try:
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    except ImportError:  # before 6.0
        from sentence_transformers.losses import MultipleNegativesRankingLoss

    from fcco.integrations.sentence_transformers import GlobalContrastiveLoss

    encoder: Any = model
    if setting["gamma"] is None:
        return MultipleNegativesRankingLoss(encoder, scale=1 / TEMPERATURE)
    loss = GlobalContrastiveLoss(
        encoder, pairs, TEMPERATURE, setting["gamma"], stored_pairs=setting["stored_pairs"],
        negatives=setting["negatives"], in_trainer=False,
    )  # fmt: skip
    return loss.to(model.device)


load = cache(torch.load)


def run(job: Job, file: Path, device: str) -> dict[str, float]:
    """Recall@1 on validation and test pairs; the `evaluations` of a job are epochs."""
    data = {part: [c.to(device) for c in columns] for part, columns in load(file).items()}
    train, number = data["train"], len(data["train"][0])
    torch.manual_seed(job.seed)
    model = Encoder(device).train()
    loss = make_loss(model, job.setting, number)
    optimizer = torch.optim.AdamW(model.parameters(), job.setting["rate"], fused=device == "cuda")
    batch, epochs = min(job.setting["batch"], number), job.evaluations or 0
    steps = epochs * (number // batch)
    # A tenth of the steps up, the others down to 0.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / max(0.1 * steps, 1), (steps - t) / (0.9 * steps))
    )
    draw = torch.Generator().manual_seed(job.seed)
    for _ in range(epochs):
        order = torch.randperm(number, generator=draw)
        for rows in order[: number // batch * batch].split(batch):
            loss(take(train, rows), rows).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return {part: recall(model, data[part]) for part in ("validation", "test")}


# The study.


def grid(method: tuple[str, int]) -> list[dict[str, Any]]:
    own, rates = METHODS[method]
    setting = {"stored_pairs": 0, "negatives": None, **own, "batch": method[1]}
    return [setting | {"rate": rate} for rate in rates]


def choose(tried: Mapping[Any, Sequence[Sequence[Mapping[str, float]]]]) -> dict[Any, int]:
    """The place of the learning rate with the best validation figure of each loss."""
    return {
        method: max(range(len(own)), key=lambda k: own[k][0]["validation"])
        for method, own in tried.items()
    }


def table(runner: Runner) -> list[list[str]]:
    """Of each loss the rate with the best validation figure of seed 0, and means over its seeds."""
    jobs = {key: json.loads(key) for key in runner.known}
    rows = [["loss", "batch", "learning rate", "validation", "test", "seeds"]]
    for name, batch in METHODS:
        runs: dict[float, dict[int, Any]] = defaultdict(dict)  # by rate and seed
        setting = {k: v for k, v in grid((name, batch))[0].items() if k != "rate"}
        for key, job in jobs.items():
            if setting.items() <= job["setting"].items():
                runs[job["setting"]["rate"]][job["seed"]] = runner.known[key]
        rate = max(runs, key=lambda rate: runs[rate][0]["validation"])
        chosen = runs[rate].values()
        # In hundredths, so that a mean between two of them is rounded as on paper.
        means = (
            sum(round(100 * run[k]) for run in chosen) / len(chosen) for k in ("validation", "test")
        )
        cells = (f"{math.floor(mean + 0.5) / 100:.2f}" for mean in means)
        shown = f"{rate:.0e}".replace("e-0", "e-")
        rows.append([name, f"{batch:,}", shown, *cells, str(len(chosen))])
    return rows


def published() -> list[list[str]]:
    """The table of the published runs."""
    return table(published_runs("small-batches"))


def main(words: Sequence[str] | None = None) -> None:
    parser = command("small_batches", __doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parse(parser, words, (1, 3))
    problem, limit = ("32 pairs", 32) if options.quick else ("all pairs", None)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pairs.pt"
        site = Path(sysconfig.get_paths()["purelib"])
        parts = split(collect(site, 30 if options.quick else 1))
        torch.save({part: tokens(pairs[:limit]) for part, pairs in parts.items()}, file)
        do = partial(run, file=file, device=options.device)
        runner = Runner(do, dict, options.workers, options.out)

        def job(method: tuple[str, int], setting: dict[str, Any], seed: int) -> Job:
            return Job(problem, method[0], setting, seed, evaluations=1 if options.quick else 4)

        grids = {method: grid(method)[: 1 if options.quick else None] for method in METHODS}
        tuned(runner, grids, job, (0,), range(1, options.seeds + 1), choose)
    rows = table(runner)
    print(publish.plain(rows))
    told = {"rows": rows}
    publish.conclude(options, "small-batches", told, runner.entries(), options.device)


if __name__ == "__main__":
    main()
