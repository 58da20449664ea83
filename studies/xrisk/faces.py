"""Two-way partial AUC of a rare attribute of faces, a network trained end to end, on a GPU.

    python -m studies.xrisk.faces --archive celeba.tar.gz --weights lite0.pth --json

EfficientNet-lite0 with ImageNet weights is trained on CelebA by cross-entropy, and by
`TwoWayPartialAUC(min_tpr=0.5, max_fpr=0.5)` after a third of the steps of cross-entropy: the same
number of steps, AdamW, mixed precision, mirrored images, a learning rate that falls to 0. Learning
rates are chosen on validation data with one seed; then come `--seeds` fresh ones. Faces are split
60/20/20 % within each class anew for each seed; of each run counts the checkpoint that is best on
validation data. The archive holds `list_attr_celeba.txt` and `img_align_celeba/*.jpg`.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import statistics
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from fcco import xrisk
from fcco.groups import PositiveBatchSampler

from .problems import METRICS, Part, split
from .training import shuffled

RATES = {"bce": (3e-4, 1e-3), "ours": (1e-4, 3e-4)}
BATCH, POSITIVES, CHECKS = 128, 32, 10


def read_archive(path: Path, label: str) -> tuple[Tensor, Tensor]:
    """Images, (N, 3, height, width) of bytes, and labels 0 and 1."""
    from PIL import Image

    images, rows = {}, {}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is None:
                continue
            name = Path(member.name).name
            if name.endswith(".jpg"):
                images[name] = np.asarray(Image.open(io.BytesIO(file.read())).convert("RGB"))
            elif name == "list_attr_celeba.txt":
                lines = file.read().decode().splitlines()
                column = 1 + lines[1].split().index(label)
                rows = {(cells := line.split())[0]: cells[column] == "1" for line in lines[2:]}
    names = sorted(images)
    pictures = torch.from_numpy(np.stack([images[name] for name in names])).permute(0, 3, 1, 2)
    return pictures.contiguous(), torch.tensor([float(rows[name]) for name in names])


def network(weights: Path | None, size: int) -> nn.Module:
    """EfficientNet-lite0 with one score; from random weights without a file."""
    from fcco_experiments.backbones import build

    given = {"pretrained": weights is not None, "weights": str(weights or "")}
    backbone = build("efficientnet-lite0", size=(size, size), **given)
    return nn.Sequential(backbone, nn.Dropout(0.2), nn.Linear(backbone.width, 1))


def run(
    data: tuple[Tensor, Tensor],
    method: str,
    rate: float,
    seed: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Validation and test figures of the best checkpoint."""
    start, device = time.perf_counter(), options.device
    everything = {"train_x": np.arange(len(data[1])), "train_y": data[1].numpy()}
    empty = {f"{part}_{k}": everything[f"train_{k}"][:0] for part in ("val", "test") for k in "xy"}
    parts = split({**everything, **empty}, 0, seed)
    torch.manual_seed(seed)
    model = network(options.weights, options.size).to(device)
    images = {part: data[0][parts[f"{part}_x"]].to(device) for part in ("train", "val", "test")}
    labels = {part: torch.from_numpy(parts[f"{part}_y"]) for part in images}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=1e-2)
    steps, warm = options.steps, 0 if method == "bce" else options.steps // 3
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: 0.5 * (1 + math.cos(math.pi * min(t / steps, 1)))
    )
    on_gpu = device == "cuda"

    def scores(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            return model(x).squeeze(1).float()

    @torch.no_grad()
    def figure(part: str) -> float:
        model.eval()
        found = torch.cat([scores(x) for x in images[part].split(512)]).cpu()
        model.train()
        return METRICS["tpAUC"](Part(found, labels[part]), found)

    def positives() -> Iterator[Tensor]:
        sampler = PositiveBatchSampler(labels["train"], BATCH, POSITIVES, seed=seed)
        while True:
            yield from map(torch.tensor, sampler)

    draw, risk, best = shuffled(len(labels["train"]), BATCH, seed), None, (-1.0, 0.0)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        if method == "ours" and step == warm:
            draw = positives()
            risk = xrisk.TwoWayPartialAUC(
                model, optimizer, labels["train"], min_tpr=0.5, max_fpr=0.5
            )
        rows = next(draw)
        x, y = images["train"][rows.to(device)], labels["train"][rows]
        mirrored = (torch.rand(len(x), generator=generator) < 0.5).to(device)
        x = torch.where(mirrored.view(-1, 1, 1, 1), x.flip(3), x)
        if risk is None:
            loss = bce(scores(x), y.to(device))
        else:
            loss = risk(lambda x=x: scores(x), y, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % max(1, steps // CHECKS) == 0 and step >= warm:
            ahead = figure("val")
            if ahead > best[0]:
                best = ahead, figure("test")
    seconds = round(time.perf_counter() - start, 1)
    row = {"method": method, "lr": rate, "seed": seed, "val": best[0], "test": best[1]}
    return row | {"seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--archive", type=Path, required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--label", default="Bald")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--size", type=int, default=128, help="pixels")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a JSONL file that takes every run")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    data, rows = read_archive(options.archive, options.label), []

    def note(row: dict[str, Any]) -> dict[str, Any]:
        rows.append(row)
        print(row, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return row

    chosen = {}
    for method, rates in RATES.items():
        tried = [note(run(data, method, rate, 0, options)) for rate in rates]
        chosen[method] = max(tried, key=lambda row: row["val"])["lr"]
    found: dict[str, list[float]] = {method: [] for method in RATES}
    for seed in range(10, 10 + options.seeds):
        for method, rate in chosen.items():
            found[method].append(note(run(data, method, rate, seed, options))["test"])
    result = {m: {"mean": statistics.mean(v), "std": statistics.stdev(v)} for m, v in found.items()}
    gaps = [a - b for a, b in zip(found["ours"], found["bce"], strict=True)]
    print(f"ours - bce: {statistics.mean(gaps):+.4f}, of each seed {[round(g, 4) for g in gaps]}")
    if options.json:
        print(json.dumps({options.label.lower(): {"tpAUC": result}}))


if __name__ == "__main__":
    main()
