"""Contrastive fine-tuning in batches of 32: with a memory of all pairs, without, and batch 1,024.

    python -m studies.small_batches --json --workers 4 --out build/small.jsonl    # one GPU
    python -m studies.small_batches --json --quick                                # any CPU

To a machine without these packages and weights, carry what the first of these lines writes:

    python -m studies.small_batches --pack build/small
    python -m studies.small_batches --json --workers 4 --pairs build/small/pairs.pt \
        --weights build/small

Pairs of the first paragraph of a docstring and the source of its function without docstrings, from
all packages of the environment. What occurs twice, as docstring or as source, is left out with all
its copies. Whole packages are for training, for validation or for the test. MiniLM is fine-tuned on
them (bf16, temperature 0.05):

| method | loss | batch |
|---|---|---|
| `memory, batch 32` | `GlobalContrastiveLoss` | 32 |
| `in-batch, batch 32` | `MultipleNegativesRankingLoss` | 32 |
| `in-batch, batch 1024` | `MultipleNegativesRankingLoss` | 1,024 |
| `none stored, batch 32` | the same with `stored_pairs=0, negatives=None`; with `--ablation` | 32 |

All see the same number of pairs, as often. Each has four learning rates, chosen by recall@1 on the
validation pairs with one seed; then come fresh seeds with the chosen one. Reported is recall@1 on
the test pairs, docstring to source among all of them. `--quick` has few pairs, a tiny transformer
with random weights and tokens that are hashes of words: it shows that all runs, not what is better.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import re
import sysconfig
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fcco_experiments.stats import spread
from torch import Tensor, nn
from torch.nn.functional import normalize

from studies import publish
from studies.runner import Result, Runner, command, parse, tuned

LENGTHS = (48, 96)  # tokens of a docstring and of a source
SHARES = {"test": 0.1, "validation": 0.07}
SMALL, LARGE = 32, 1024
TEMPERATURE = 0.05


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
        (node, ast.get_docstring(node))
        for node in ast.walk(tree)
        if isinstance(node, kinds) and ast.get_docstring(node)
    ]
    for node, _ in documented:
        node.body = node.body[1:]
    for node, docstring in documented:
        if isinstance(node, ast.ClassDef) or not node.body or docstring is None:
            continue
        for inner in ast.walk(node):  # a class or function of docstrings alone
            if isinstance(inner, kinds) and not inner.body:
                inner.body = [ast.Pass()]
        text = " ".join(docstring.strip().split("\n\n")[0].split())
        source = ast.unparse(node)
        if len(text) >= 25 and text.isascii() and len(source) >= 60:
            yield text, source


def collect(site: Path, files: int | None = None) -> list[Pair]:
    """All pairs of the packages in a folder; from the first files of each with `files`."""
    found, used = [], Counter[str]()
    for file in sorted(site.rglob("*.py")):
        parts = file.relative_to(site).parts
        package = parts[0]
        inner = {part.strip("_") for part in parts[1:-1]}
        if inner & {"tests", "test", "testing", "vendor", "vendored", "externals"}:
            continue
        if file.name.startswith("test_") or (files is not None and used[package] >= files):
            continue
        used[package] += 1
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


# Tokens.


@dataclass
class Tokens:
    """Texts as token ids, one after the other, as int16, which fits MiniLM's vocabulary."""

    ids: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> Tokens:
        """From the ids of each text."""
        rows = [list(row) for row in rows]
        flat = torch.tensor([token for row in rows for token in row], dtype=torch.int16)
        return cls(flat, torch.tensor([len(row) for row in rows]))

    def dense(self, device: str) -> Tensor:
        """Shape (number, longest), padded with 0."""
        rows = self.ids.split(self.lengths.tolist())
        return nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device)


Encode = Callable[[str, int], Sequence[int]]
Parts = dict[str, tuple[Tokens, Tokens]]


def minilm_tokens() -> Encode:
    from fcco_experiments.backbones.base import VOCABULARY
    from fcco_experiments.data.sources import contents
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(contents("minilm", [VOCABULARY])[0].decode())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    separator: Any = tokenizer.token_to_id("[SEP]")

    def encode(text: str, length: int) -> list[int]:
        ids = tokenizer.encode(text[: 20 * length]).ids
        return ids if len(ids) <= length else [*ids[: length - 1], separator]

    return encode


def hashed_tokens(text: str, length: int) -> list[int]:
    words = re.findall(r"[a-z]+", text.lower())[:length]
    return [1 + zlib.crc32(word.encode()) % 999 for word in words] or [1]


def prepare(parts: dict[str, list[Pair]], encode: Encode) -> Parts:
    return {
        part: (
            Tokens.of(encode(pair.text, LENGTHS[0]) for pair in pairs),
            Tokens.of(encode(pair.source, LENGTHS[1]) for pair in pairs),
        )
        for part, pairs in parts.items()
    }


# The model.


class Encoder(nn.Module):
    """BERT with the mean of its last states; called like a SentenceTransformer."""

    def __init__(self, network: nn.Module, device: str) -> None:
        super().__init__()
        self.network = network.to(device)
        self.device = device

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """The embedding of rows of token ids."""
        ids = features["input_ids"]
        mask = ids != 0
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
            states = self.network(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        weight = mask.unsqueeze(2).float()
        mean = (states.float() * weight).sum(1) / weight.sum(1).clamp(min=1)
        return {"sentence_embedding": mean}


def build(weights: str, tiny: bool, device: str) -> Encoder:
    """MiniLM, a model of Hugging Face from a folder, or a tiny one with random weights."""
    from transformers import BertConfig, BertModel

    if tiny:
        config = BertConfig(
            vocab_size=1000, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=LENGTHS[1],
        )  # fmt: skip
        return Encoder(BertModel(config, add_pooling_layer=False), device)
    if weights and (Path(weights) / "config.json").exists():
        return Encoder(BertModel.from_pretrained(weights, add_pooling_layer=False).float(), device)
    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    network = BertModel(config, add_pooling_layer=False)
    state = {name: value.float() for name, value in minilm_weights(weights).items()}
    missing, _ = network.load_state_dict(state, strict=False)
    if missing:
        raise ValueError(f"The weights of MiniLM lack: {', '.join(missing[:5])}.")
    return Encoder(network, device)


def minilm_weights(folder: str) -> dict[str, Tensor]:
    from safetensors.torch import load, load_file

    if folder:
        return load_file(Path(folder) / "model.safetensors")
    from fcco_experiments.backbones.base import MINILM
    from fcco_experiments.data.sources import contents

    return load(contents("minilm", [MINILM])[0])


class Batches:
    """The pairs of a part on the device; which rows are drawn is decided on the host."""

    def __init__(self, part: tuple[Tokens, Tokens], device: str) -> None:
        self.columns = [tokens.dense(device) for tokens in part]
        self.lengths = [tokens.lengths for tokens in part]
        self.device = device

    def __len__(self) -> int:
        return len(self.lengths[0])

    def take(self, rows: Tensor) -> list[dict[str, Tensor]]:
        """Both columns of some rows, as short as possible."""
        there = rows.to(self.device, non_blocking=True)
        return [
            {"input_ids": column[there, : int(lengths[rows].max())].long()}
            for column, lengths in zip(self.columns, self.lengths, strict=True)
        ]

    @torch.no_grad()
    def recall(self, model: Encoder) -> float:
        """The share of docstrings, in percent, whose own source is nearest."""
        model.eval()
        embedded: list[list[Tensor]] = [[], []]
        for rows in torch.arange(len(self)).split(512):
            for out, column in zip(embedded, self.take(rows), strict=True):
                out.append(normalize(model(column)["sentence_embedding"], dim=1))
        queries, keys = (torch.cat(each) for each in embedded)
        matching = torch.arange(len(self), device=self.device)
        hits = [
            ((part @ keys.T).argmax(1) == own).sum()
            for part, own in zip(queries.split(4096), matching.split(4096), strict=True)
        ]
        return 100 * float(torch.stack(hits).sum()) / len(self)


# Training.


@dataclass(frozen=True)
class Method:
    """A loss and its batch; the learning rates to choose from.

    Attributes:
        name: for the table.
        gamma: of `GlobalContrastiveLoss`; None is `MultipleNegativesRankingLoss`.
        batch: pairs in a step.
        rates: learning rates.
        stored_pairs: of `GlobalContrastiveLoss`.
        negatives: likewise.
    """

    name: str
    gamma: float | None
    batch: int
    rates: tuple[float, ...]
    stored_pairs: int = 0
    negatives: int | None = None


def methods(large: int = LARGE, ablation: bool = False) -> tuple[Method, ...]:
    small, many = (1e-5, 2e-5, 5e-5, 1e-4), (5e-5, 1e-4, 2e-4, 5e-4)
    without = Method(f"none stored, batch {SMALL}", 0.8, SMALL, small)
    return (
        # A step has more negatives than that of a small batch, and there are as many steps.
        Method(f"memory, batch {SMALL}", 0.8, SMALL, (5e-6, 1e-5, 2e-5, 5e-5), LARGE, LARGE - 1),
        Method(f"in-batch, batch {SMALL}", None, SMALL, small),
        Method(f"in-batch, batch {large}", None, large, many),
        *([without] if ablation else []),
    )


@dataclass(frozen=True)
class Job:
    """One training run."""

    method: Method
    rate: float
    seed: int
    epochs: int
    pairs: str
    weights: str
    tiny: bool
    device: str

    @property
    def key(self) -> str:
        """What tells this run from others, for the file of results."""
        told = asdict(self) | {"pairs": Path(self.pairs).name, "weights": "", "device": ""}
        return json.dumps(told, sort_keys=True)


@cache
def loaded(file: str) -> Parts:
    content = torch.load(file)
    return {part: (Tokens(*one), Tokens(*two)) for part, (one, two) in content.items()}


def make_loss(model: Encoder, method: Method, pairs: int) -> nn.Module:
    try:
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    except ImportError:  # before 6.0
        from sentence_transformers.losses import MultipleNegativesRankingLoss

    from fcco.integrations.sentence_transformers import GlobalContrastiveLoss

    encoder: Any = model
    if method.gamma is None:
        return MultipleNegativesRankingLoss(encoder, scale=1 / TEMPERATURE)
    loss = GlobalContrastiveLoss(
        encoder, pairs, TEMPERATURE, method.gamma, stored_pairs=method.stored_pairs,
        negatives=method.negatives, in_trainer=False,
    )  # fmt: skip
    return loss.to(model.device)


def adam(model: nn.Module, rate: float, device: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=device == "cuda")


@dataclass(frozen=True)
class Recall(Result):
    """Recall@1 after training, in percent.

    Attributes:
        validation: on validation pairs.
        test: on test pairs.
    """

    validation: float
    test: float


def train(job: Job) -> Recall:
    """One run."""
    parts = loaded(job.pairs)
    data = {part: Batches(parts[part], job.device) for part in parts}
    train = data["train"]
    torch.manual_seed(job.seed)
    model = build(job.weights, job.tiny, job.device).train()
    loss = make_loss(model, job.method, len(train))
    optimizer = adam(model, job.rate, job.device)
    batch = min(job.method.batch, len(train))
    steps = job.epochs * (len(train) // batch)
    # A tenth of the steps up, the others down to 0.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / max(0.1 * steps, 1), (steps - t) / (0.9 * steps))
    )
    draw = torch.Generator().manual_seed(job.seed)
    for _ in range(job.epochs):
        order = torch.randperm(len(train), generator=draw)
        for rows in order[: len(order) // batch * batch].split(batch):
            loss(train.take(rows), rows).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return Recall(data["validation"].recall(model), data["test"].recall(model))


# The benchmark.


def compare(
    runner: Runner, jobs: Callable[[Method, float, int], Any], chosen: Sequence[Method], seeds: int
) -> dict[str, dict[str, Any]]:
    """Choose the learning rate of every method on validation pairs, then try it on fresh seeds."""
    tried: dict[Method, list[float]] = {}

    def choose(runs: dict[Method, list[list[Recall]]]) -> dict[Method, int]:
        tried.update({name: [own[0].validation for own in some] for name, some in runs.items()})
        return {name: values.index(max(values)) for name, values in tried.items()}

    grids = {method: method.rates for method in chosen}
    found = tuned(runner, grids, jobs, (0,), range(1, seeds + 1), choose)
    table = {}
    for method, (rate, runs) in found.items():
        mean, std = (round(value, 3) for value in spread(each.test for each in runs))
        values = zip(method.rates, tried[method], strict=True)
        table[method.name] = {
            "recall@1": {"mean": mean, "std": std if seeds > 1 else None},
            "learning rate": rate,
            "validation": {f"{rate:g}": round(value, 2) for rate, value in values},
        }
    return table


def write_pairs(file: Path, options: argparse.Namespace) -> None:
    """Collect the pairs of this environment and write their tokens."""
    parts = split(collect(Path(sysconfig.get_paths()["purelib"]), 4 if options.quick else None))
    limit = options.limit or (640 if options.quick else None)
    tokens = prepare(
        {part: pairs[:limit] for part, pairs in parts.items()},
        hashed_tokens if options.quick else minilm_tokens(),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {part: [(each.ids, each.lengths) for each in both] for part, both in tokens.items()}
    torch.save(content, file)


def pack(folder: Path) -> None:
    """MiniLM in half precision, beside the pairs: small enough to carry."""
    from safetensors.torch import save_file

    state = minilm_weights("")
    kept = {n: v.half() if v.is_floating_point() else v for n, v in state.items()}
    save_file(kept, folder / "model.safetensors")


def main(words: Sequence[str] | None = None) -> None:
    parser = command("small_batches", __doc__)
    add = parser.add_argument
    add("--pairs", default="", help="file of tokens; made if it is not there")
    add("--weights", default="", help="folder with model.safetensors of MiniLM")
    add("--pack", default="", help="write pairs and weights to this folder and end")
    add("--limit", type=int, default=0, help="pairs of each part")
    add("--epochs", type=int, help="4; 2 with --quick")
    add("--ablation", action="store_true", help="also without memory: gamma 1")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parse(parser, words, (2, 3))
    if options.pack:
        write_pairs(Path(options.pack) / "pairs.pt", options)
        pack(Path(options.pack))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(options.pairs or f"{folder}/pairs.pt")
        if not file.exists():
            write_pairs(file, options)
        benchmark(str(file), options)


def benchmark(file: str, options: argparse.Namespace) -> None:
    """Run all methods, print the figures."""
    quick = options.quick
    chosen = methods(256 if quick else LARGE, options.ablation)
    epochs = options.epochs or (2 if quick else 4)

    def jobs(method: Method, rate: float, seed: int) -> Job:
        return Job(method, rate, seed, epochs, file, options.weights, quick, options.device)

    start = build(options.weights, quick, options.device)
    before = Batches(loaded(file)["test"], options.device).recall(start)
    # The runs of small batches, which take longest, come first.
    runner = Runner(train, Recall, options.workers, options.out)
    found = compare(runner, jobs, chosen, options.seeds)
    for name, row in found.items():
        print(f"{name}: {row}")
    number = {part: len(both[0].lengths) for part, both in loaded(file).items()}
    print(f"{number}, {epochs} epochs, recall@1 before training {before:.2f}")
    if options.publish:
        publish.write(
            publish.RESULTS / "small-batches", {"methods": found}, runner.entries(),
            device=options.device, commit=options.commit,
        )  # fmt: skip
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
