"""A picture as SVG text: a card of its own colours, light or dark as the reader's screen is."""

from xml.sax.saxutils import escape

STYLE = """
.card{fill:#fff}text{fill:#24292f;font:12px sans-serif}.t{font-weight:bold}.s{font-size:10px}
.m{font:12px monospace}.e{text-anchor:end}.c{text-anchor:middle}.in{fill:#fff}
.line{fill:none;stroke:#8c959f;stroke-width:1.5}.dim{stroke:#d0d7de;stroke-dasharray:3 3}
.way{stroke:#0969da;stroke-width:2}.free{fill:#eaeef2}.box{fill:#f6f8fa;stroke:#8c959f}
.shared{fill:#8c959f}.b0{fill:#0969da}.b1{fill:#bc4c00}.b2{fill:#1a7f37}.b3{fill:#8250df}
.gap{fill:none;stroke:#fff}.fresh{fill-opacity:.45}.yes{fill:#1a7f37}.no{fill:#cf222e}.bonus{fill:#8250df}
@media (prefers-color-scheme:dark){.card{fill:#0d1117}text{fill:#e6edf3}.in{fill:#0d1117}
.line{stroke:#6e7681}.dim{stroke:#30363d}.way{stroke:#58a6ff}.free{fill:#21262d}
.gap{stroke:#0d1117}.box{fill:#161b22;stroke:#6e7681}.shared{fill:#6e7681}.b0{fill:#58a6ff}.b1{fill:#f0883e}
.b2{fill:#3fb950}.b3{fill:#bc8cff}.yes{fill:#3fb950}.no{fill:#f85149}.bonus{fill:#bc8cff}}
"""


class Picture:
    """Shapes one above another; its size is that of what was drawn, and a margin."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.width = self.height = 0.0
        self.parts: list[str] = []
        self.text(16, 26, title, "t")

    def _reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """kind: classes; `e` ends at x, `c` is centred there."""
        words = kind.split()
        size = (0 if "e" in words else 0.5 if "c" in words else 1) * 6.6 * len(text)
        self._reach(x + size, y)
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, r: float = 0) -> None:
        self._reach(x + width, y + height)
        corner = f' rx="{r:g}"' if r else ""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect {place}{corner} class="{kind}"/>')

    def path(self, route: str, kind: str = "line", arrow: bool = False) -> None:
        """route: as SVG writes it; somebody else sees to the size."""
        end = ' marker-end="url(#tip)"' if arrow else ""
        self.parts.append(f'<path d="{route}" class="{kind}"{end}/>')

    def __str__(self) -> str:
        width, height = round(self.width + 16), round(self.height + 16)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}"><title>{escape(self.title)}</title>'
            f"<style>{STYLE}</style>"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" '
            'markerHeight="5" orient="auto"><path d="M0 0L8 4L0 8z" class="b0"/></marker></defs>'
            f'<rect class="card" width="{width}" height="{height}" rx="6"/>'
        )
        return "\n".join([head, *self.parts, "</svg>", ""])
