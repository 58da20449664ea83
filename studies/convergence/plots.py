"""Log-log plots of samples against accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fcco_experiments.report.style import colour

from .results import BATCHES

_WORDS = {
    "SONEX": ("sonex", "o-"),
    "SONEX+STORM": ("sonex", "x--"),
    "SONX": ("sonx", "s-"),
    "SONX+momentum": ("sonx", "+--"),
    "ALEXR2": ("alexr2", "^-"),
    "ALEXR": ("alexr", "v--"),
    "OOA-KL": ("ooa", "d-"),
    "OOA-Euclidean": ("ooa", "D--"),
    "SOX": ("sox", "P-"),
    "MSVR-v1": ("msvr", "<-"),
    "MSVR-v2": ("msvr", ">--"),
    "SSG": ("ssg", "h-"),
    "Liu-Xu": ("liu-xu", "H-"),
    "OSS": ("oss", "1-"),
    "ICPPAC": ("icppac", "2-"),
}
_STYLE = {name: (colour(word), style) for name, (word, style) in _WORDS.items()}


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """One picture per problem, one of the scaling with the batch sizes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    written = []
    for name, problem in results["problems"].items():
        figure, axes = plt.subplots(1, 2, figsize=(9.5, 4.2), sharey=True, layout="constrained")
        titles = {"last": "last iterate", "average": "averaged iterate"}
        for axis, (output, title) in zip(axes, titles.items(), strict=True):
            for method, row in problem["methods"].items():
                pairs = [
                    (level, samples)
                    for level, samples in zip(
                        problem["accuracies"], row[output]["samples"], strict=True
                    )
                    if samples is not None
                ]
                if pairs:
                    shade, style = _STYLE[method]
                    x, y = zip(*pairs, strict=True)
                    axis.loglog(x, y, style, color=shade, label=row["label"], ms=4, lw=1.2)
            axis.invert_xaxis()
            axis.set(title=f"{name}: {title}", xlabel="accuracy")
            axis.grid(alpha=0.3, which="both")
        axes[0].set_ylabel("samples")
        figure.legend(*_entries(axes), loc="outside right upper", fontsize=7)
        written.append(_save(figure, folder / f"convergence-{name}.png"))
        plt.close(figure)
    if results.get("scaling"):
        written.append(_scaling(results["scaling"], folder, plt))
    return written


def _scaling(scaling: dict[str, Any], folder: Path, plt: Any) -> Path:
    names = list(scaling)
    figure, axes = plt.subplots(
        len(names), 2, figsize=(8, 3.4 * len(names)), squeeze=False, layout="constrained"
    )
    for row, name in enumerate(names):
        for column, batch in enumerate(("B1", "B2")):
            axis = axes[row][column]
            for method, fits in scaling[name].items():
                found = fits[batch]
                if not found["rows"]:
                    continue
                hardest = found["rows"][-1]
                shade, style = _STYLE[method]
                label = f"{method}: {hardest['exponent']} at {hardest['accuracy']:.2g}"
                axis.loglog(found["sizes"], hardest["steps"], style, color=shade, label=label)
            axis.set(title=f"{name}: steps against {batch}", xlabel=batch, ylabel="steps")
            sizes = [pair[column] for pair in BATCHES[batch]]
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.minorticks_off()
            axis.grid(alpha=0.3, which="both")
            axis.legend(fontsize=7)
    path = _save(figure, folder / "convergence-scaling.png")
    plt.close(figure)
    return path


def _entries(axes: Any) -> tuple[list[Any], list[str]]:
    known: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            known.setdefault(label, handle)
    return list(known.values()), list(known)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=90, metadata={"Software": None})
    return path
