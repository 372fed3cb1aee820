"""Line plots as SVG text: a card of its own colours, light or dark as the reader's screen is."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from xml.sax.saxutils import escape

PANEL, GAP, HEIGHT = 320, 20, 330  # pixels
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 62, 46  # of the axes inside a panel
STYLE = """
.card{fill:#fff}text{fill:#24292f;font:12px sans-serif}.t{font-weight:bold}
.g{stroke:#d0d7de;stroke-width:1}.l{fill:none;stroke-width:2}.d{stroke-dasharray:4 4}
.c0{stroke:#0969da;fill:#0969da}.c1{stroke:#bc4c00;fill:#bc4c00}
.c2{stroke:#1a7f37;fill:#1a7f37}.c3{stroke:#8250df;fill:#8250df}.l{fill:none}
@media (prefers-color-scheme:dark){.card{fill:#0d1117}text{fill:#e6edf3}.g{stroke:#30363d}
.c0{stroke:#58a6ff;fill:#58a6ff}.c1{stroke:#f0883e;fill:#f0883e}
.c2{stroke:#3fb950;fill:#3fb950}.c3{stroke:#bc8cff;fill:#bc8cff}.l{fill:none}}
"""
COLOURS = 4


@dataclass(frozen=True, slots=True)
class Series:
    """A line over the panel's places, perhaps with intervals; dashed ones have no dots."""

    name: str
    colour: int
    values: Sequence[float]
    intervals: Sequence[tuple[float, float]] = ()
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes: places from left to right, all equally far apart, and values from 0 up to `top` or, at
    the next line of the grid, a little above."""

    title: str
    caption: str
    places: Sequence[str]
    series: Sequence[Series]
    top: float
    percent: bool = False

    @property
    def limit(self) -> float:
        """The value of the uppermost line."""
        step = step_of(self.top)
        return ceil(self.top / step - 1e-9) * step


def picture(panels: Sequence[Panel], width: int = PANEL) -> str:
    """The SVG of panels side by side."""
    total = GAP + sum(width + GAP for _ in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {HEIGHT}" '
        f'width="{total}" height="{HEIGHT}"><style>{STYLE}</style>',
        f'<rect class="card" width="{total}" height="{HEIGHT}" rx="6"/>',
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({GAP + number * (width + GAP)} 0)">')
        parts += [*_axes(panel, width), *_legend(panel, width), *_lines(panel, width), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def step_of(top: float) -> float:
    """A round distance between three to six lines of a grid."""
    unit = 10.0 ** floor(log10(top / 3))
    return next(s * unit for s in (1, 2, 2.5, 5, 10) if top / (s * unit) <= 6)


def _x(panel: Panel, place: float, width: int) -> float:
    inner = (width - LEFT - RIGHT) / len(panel.places)
    return LEFT + inner * (place + 0.5)


def _y(panel: Panel, value: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / panel.limit)


def _text(x: float, y: float, text: str, anchor: str = "middle", kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _axes(panel: Panel, width: int) -> list[str]:
    found = [_text(0, 20, panel.title, "start", "t")]
    step = step_of(panel.top)
    for line in range(round(panel.limit / step) + 1):
        value = line * step
        y, label = _y(panel, value), f"{value:.0%}" if panel.percent else f"{value:.3g}"
        found.append(f'<path class="g" d="M{LEFT} {y:.1f}H{width - RIGHT}"/>')
        found.append(_text(LEFT - 6, y + 4, label, "end"))
    for place, name in enumerate(panel.places):
        found.append(_text(_x(panel, place, width), HEIGHT - BOTTOM + 18, name))
    return [*found, _text((LEFT + width - RIGHT) / 2, HEIGHT - 10, panel.caption)]


def _legend(panel: Panel, width: int) -> list[str]:
    names = [one for one in panel.series if not one.dashed or one is panel.series[-1]]
    found, share = list[str](), width / max(len(names), 1)
    for number, one in enumerate(names):
        x, dashes = number * share, " d" if one.dashed else ""
        found.append(f'<path class="l c{one.colour}{dashes}" d="M{x:.1f} 41h18"/>')
        found.append(_text(x + 22, 45, one.name, "start"))
    return found


def _lines(panel: Panel, width: int) -> list[str]:
    found, drawn = list[str](), [one for one in panel.series if not one.dashed]
    for one in panel.series:
        # Beside each other where they have intervals, which would hide one another.
        aside = 0.12 * (drawn.index(one) - (len(drawn) - 1) / 2) if one.intervals else 0.0
        xs = [_x(panel, place + aside, width) for place in range(len(one.values))]
        ys = [_y(panel, value) for value in one.values]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        dashes = " d" if one.dashed else ""
        found.append(f'<polyline class="l c{one.colour}{dashes}" points="{points}"/>')
        for x, (low, high) in zip(xs, one.intervals, strict=False):
            ends = f"M{x:.1f} {_y(panel, low):.1f}V{_y(panel, high):.1f}"
            found.append(f'<path class="l c{one.colour}" d="{ends}"/>')
        if not one.dashed:
            dots = zip(xs, ys, strict=True)
            found += [
                f'<circle class="c{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in dots
            ]
    return found
