"""Names beside dots, where they hide neither a dot nor each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..task import Panel
from .palette import Style, family_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

__all__ = ["place"]

Point = tuple[float, float]
_SIDES = (
    ((9, 0), "left", "center"),
    ((-9, 0), "right", "center"),
    ((0, 8), "center", "bottom"),
    ((0, -8), "center", "top"),
    ((9, 9), "left", "bottom"),
    ((9, -9), "left", "top"),
    ((-9, 9), "right", "bottom"),
    ((-9, -9), "right", "top"),
)


def place(
    figure: Figure,
    axes: Axes,
    points: Mapping[str, Point],
    look: Mapping[str, Style],
    dots: Sequence[Point],
    panel: Panel,
) -> None:
    """Write each name on the best side of its point; a name without room is left out.

    It never hides another name or another method's point, and hides dots of runs and reference
    lines only where no side is free. The legend names every method, so a missing label costs
    nothing; one on top of another would.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    renderer = FigureCanvasAgg(figure).get_renderer()
    around = axes.get_window_extent(renderer)

    def box_of(point: Point, reach: float) -> Bbox:
        x, y = axes.transData.transform(point)
        reach *= figure.dpi / 72
        return Bbox.from_extents(x - reach, y - reach, x + reach, y + reach)

    own = {name: box_of(point, 4) for name, point in points.items()}
    names: list[Bbox] = []
    soft = [box_of(dot, 2) for dot in dots]
    if panel.x_reference is not None:
        x = axes.transData.transform((panel.x_reference, 0.0))[0]
        soft += [Bbox.from_extents(x - 1, around.y0, x + 1, around.y1)] * 3
    if panel.reference is not None:
        y = axes.transData.transform((points[next(iter(points))][0], panel.reference))[1]
        soft += [Bbox.from_extents(around.x0, y - 1, around.x1, y + 1)] * 3
    for name, point in points.items():
        hard = [*names, *(box for other, box in own.items() if other != name)]
        free: list[tuple[int, int, Annotation, Bbox]] = []
        for k, (offset, horizontal, vertical) in enumerate(_SIDES):
            text = axes.annotate(
                name,
                point,
                offset,
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                fontsize=8.5,
                color=look[family_of(name)].colour,
                zorder=5,
            )
            box = text.get_window_extent(renderer)
            inside = around.x0 <= box.x0 and box.x1 <= around.x1
            inside = inside and around.y0 <= box.y0 and box.y1 <= around.y1
            if inside and not any(box.overlaps(other) for other in hard):
                free.append((sum(box.overlaps(other) for other in soft), k, text, box))
            else:
                text.remove()
        free.sort(key=lambda side: side[:2])
        for _, _, text, _ in free[1:]:
            text.remove()
        names += [side[3] for side in free[:1]]
