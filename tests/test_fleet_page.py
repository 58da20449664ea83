"""The figures of docs/recipes/fleets.md are those of docs/results/fleet-speed."""

import json
import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_the_figures_of_the_page() -> None:
    page = " ".join((DOCS / "recipes/fleets.md").read_text().split())
    cpu, gpu = (
        json.loads((DOCS / f"results/fleet-speed/{name}.json").read_text())
        for name in ("cpu", "h200")
    )
    for result in (r for r in cpu["results"] if r["device"] == "cpu"):
        rows = result["rows"]
        times = [rows[name]["over_sequential"] for name in ("processes", "traced")]
        line = rf"\| {result['method']} \| {result['runs']:,}[^|]*\|[^|]*\| {times[0]:.2f} \|[^|]*"
        line += rf"\| {times[1]:.2f} \| {rows['products']['share_of_best']:.2f} \|"
        assert re.search(line, page), line
    for result in (r for r in gpu["results"] if r["method"] == "alexr2"):
        speed, runs = result["runs_per_second"], f"{result['runs']:,}"
        cells = [runs, *(f"{speed[k]:.4g}" for k in speed)]
        cells += [f"{result['over_sequential']['graph']:,.0f}"]
        assert f"| {' | '.join(cells)} | {result['floor']['products']:.2f} |" in page, runs
    assert f"{cpu['target']['reached']:.2f} times as fast" in page and cpu["target"]["met"]
    assert f"took {gpu['grid']['wall_s']:.0f} s from the command" in page
