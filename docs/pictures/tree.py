"""Which objective: a tree from what is not an average to what to write."""

from __future__ import annotations

from html import escape
from pathlib import Path

from .card import IMAGES, MONO, svg

QUESTION = "What in your problem is not an average?"
TREE: list[tuple[str, list[tuple[str, list[str]]]]] = [
    ("Some groups are bad", [("lower the worst losses", ["fcco.CVaRGroupDRO"])]),
    (
        "A limit must be kept",
        [
            ("values stay below it", ["fcco.constrained"]),
            ("no class gets worse", ["fcco.ReferenceLosses", "+ fcco.constrained"]),
            (
                "fairness: rates are close",
                ["fcco.constrained", "or, for scikit-learn,", "ConstrainedClassifier"],
            ),
        ],
    ),
    (
        "Few positives, or a ranking",
        [
            ("the top of the list", ["fcco.xrisk.AveragePrecision"]),
            ("few false alarms", ["fcco.xrisk.PartialAUC"]),
            ("the order within lists", ["fcco.xrisk.NDCG"]),
        ],
    ),
    ("Two views of each sample", [("with small batches", ["fcco.GlobalContrastive"])]),
    (
        "Another function of expectations",
        [("f(E[…]), with kinks or not", ["fcco.Compositional", "+ an outer function f"])],
    ),
    ("Nothing", [("the mean loss is the aim", ["plain PyTorch"])]),
]

WIDTH, LEFT, INDENT, CODE, LINE, SPACE = 510, 18, 32, 262, 21, 12


def draw() -> list[Path]:
    """The tree."""
    parts, y = [], 70
    stops = []  # where the trunk has a branch
    for title, leaves in TREE:
        stops.append(y)
        parts.append(
            f'<path d="M{LEFT + 8} {y}H{LEFT + 18}" class="way"/>'
            f'<circle cx="{LEFT + 21}" cy="{y}" r="5" class="knot"/>'
            f'<text x="{LEFT + INDENT}" y="{y + 5}" class="branch">{escape(title)}</text>'
        )
        y += 14
        for words, code in leaves:
            high = LINE * max(len(code), 1) + SPACE
            middle = y + high / 2
            parts.append(
                f'<text x="{LEFT + INDENT}" y="{middle + 5:g}" class="leaf">{escape(words)}</text>'
                f'<rect x="{CODE - 10}" y="{y + 3}" width="{WIDTH - CODE - 6}" height="{high - 6}" '
                'rx="7" class="box"/>'
            )
            for number, line in enumerate(code):
                at = middle + LINE * (number - (len(code) - 1) / 2) + 5
                own = "code" if line.startswith(("fcco", "+ fcco", "Constr")) else "plain"
                parts.append(f'<text x="{CODE}" y="{at:g}" class="{own}">{escape(line)}</text>')
            y += high
        y += 26
    trunk = f'<path d="M{LEFT + 8} 44V{stops[-1]}" class="way"/>'
    question = f'<text x="{LEFT}" y="34" class="question">{QUESTION}</text>'
    style = (
        "text{fill:var(--ink);font-size:15px}"
        ".question{font-size:18px;font-weight:700}.branch{font-size:16px;font-weight:700}"
        ".leaf,.plain{fill:var(--muted)}.way{stroke:var(--muted);stroke-width:1.5;fill:none}"
        ".knot{fill:var(--method-0)}.box{fill:var(--panel)}"
        f".code{{fill:var(--method-0);font-family:{MONO};font-size:14px;font-weight:600}}"
    )
    alt = QUESTION + " " + " ".join(
        f"{title}: " + "; ".join(f"{words}: {' '.join(code)}" for words, code in leaves) + "."
        for title, leaves in TREE
    )  # fmt: skip
    path = IMAGES / "which-objective.svg"
    path.write_text(svg(WIDTH, y - 6, trunk + question + "".join(parts), alt, style))
    return [path]
