"""The published run of `make demo`: `examples.adult` with its seeds, 0 to 4.

    python -m studies.demo --publish     # a minute
    python -m studies.demo --quick       # two other seeds, two epochs

The limit, the network, the learning rate and the number of epochs were chosen on validation rows
with seeds 100 to 103.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from examples import adult
from studies import publish
from studies.runner import command, parse


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(command("demo", __doc__), arguments, (2, 5))
    first, epochs = (100, 2) if options.quick else (0, adult.EPOCHS)
    with tempfile.TemporaryDirectory() as folder:
        runs = adult.main(folder, range(first, first + options.seeds), epochs)
    publish.conclude(options, "demo", {"methods": runs})


def published() -> adult.Runs:
    """The figures of pages."""
    return publish.table("demo")["methods"]


def table(number: str) -> list[list[str]]:
    """Of the limit or of the worst groups; our row is bold."""
    return [
        [f"**{cell}**" for cell in row] if row[0].startswith("fcco") else row
        for row in adult.tables(published())[("limit", "groups").index(number)]
    ]


if __name__ == "__main__":
    main()
