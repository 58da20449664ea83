"""Command line of the study."""

from __future__ import annotations

import argparse
from pathlib import Path

from fcco_experiments import distributed
from fcco_experiments.config import ConfigError
from fcco_experiments.data import MissingData

from studies.runner import short

from . import heads, networks
from .data import prepare


def main() -> None:
    """Run one part of the study."""
    parser = argparse.ArgumentParser(prog="python -m studies.group_dro", description=__doc__)
    parser.add_argument("part", choices=["heads", "networks"])
    parser.add_argument("--data", required=True, choices=["celeba", "sentiment", "amazon"])
    parser.add_argument("--setting", default="finetune", help="of `networks`")
    parser.add_argument("--weights", default="", help="of the backbone")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", default="auto", help="the GPU where there is one")
    parser.add_argument("--methods", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=1e9, help="no run begins after so many")
    parser.add_argument("--epochs", type=int, default=4, help="of `networks`")
    parser.add_argument("--fresh", type=int, default=5, help="fresh seeds of `networks`")
    parser.add_argument("--work", type=Path, default=Path("build"), help="folder of the tensors")
    args = parser.parse_args()
    try:
        args.device = str(distributed.device(args.device))
        run(args)
    except ConfigError as reason:
        parser.exit(1, f"{reason}\n")
    except MissingData as reason:
        parser.exit(1, f"{short(reason)}\n")


def run(args: argparse.Namespace) -> None:
    """The data as tensors, and the part of the study that was asked for."""
    args.work.mkdir(parents=True, exist_ok=True)
    overrides = [f"weights={args.weights}"] if args.weights else []
    overrides.append(f"device={args.device}")
    if args.part == "heads":
        file = args.work / f"{args.data}-heads.pt"
        if not file.exists():
            prepare(args.data, (heads.TUNING, *heads.FRESH), overrides, file)
        heads.study(file, args.output, args.device)
    else:
        file = args.work / f"{args.data}-{args.setting}.pt"
        if not file.exists():
            seeds = (*networks.TUNING, *networks.FRESH)
            prepare(f"{args.data}-{args.setting}", seeds, overrides, file)
        networks.study(
            file,
            args.output,
            args.workers,
            args.device,
            args.methods,
            args.seconds,
            args.epochs,
            args.fresh,
        )


if __name__ == "__main__":
    main()
