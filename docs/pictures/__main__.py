"""Draw pictures: `python -m docs.pictures [NAME ...]`, all of them unless named."""

from __future__ import annotations

import argparse
import importlib
import sys

NAMES = (
    "idea", "adult", "groups", "tree", "races", "rivals", "worst_groups", "results_fairness",
    "results_continual", "no_regressions", "paper_figures",
)  # fmt: skip


def main() -> None:
    """Draw what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    for name in parser.parse_args().names or NAMES:
        for path in importlib.import_module(f".{name}", __package__).draw():
            sys.stdout.write(f"{path}  {path.stat().st_size / 1000:.0f} kB\n")


if __name__ == "__main__":
    main()
