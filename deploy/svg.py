"""Pictures as SVG, for deploy/plot_loss.py and tests/bench/plot.py. Nothing beyond the standard library."""

import html
import math

INK, MUTED, GRID = "#1f2933", "#66717d", "#e6e9ed"
FONT = "'Inter', 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"


class Picture:
    """SVG elements on white, in the order in which they are added."""

    def __init__(self, width: int, height: int):
        self.width, self.height = width, height
        self.parts: list[str] = []

    def text(self, x, y, content, size=13, fill=INK, anchor="start", weight="400", extra=""):
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
            f'font-weight="{weight}"{extra}>{html.escape(content)}</text>')

    def text_upwards(self, x, y, content, size=13, fill=INK):
        """Its middle is at (x, y)."""
        self.text(x, y, content, size, fill, "middle", extra=f' transform="rotate(-90 {x:.1f} {y:.1f})"')

    def line(self, x1, y1, x2, y2, stroke, width=1.0, dash=""):
        dashes = f' stroke-dasharray="{dash}" stroke-linecap="round"' if dash else ""
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
                          f'stroke="{stroke}" stroke-width="{width}"{dashes}/>')

    def curve(self, points, stroke, width, dash=""):
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" '
                          f'stroke-width="{width}" stroke-linejoin="round" stroke-linecap="round"{dashes}/>')

    def dot(self, x, y, fill, radius):
        self.parts.append(f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius}" fill="{fill}" '
                          'stroke="#ffffff" stroke-width="1.5"/>')

    def rectangle(self, x, y, width, height, fill):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                          f'height="{max(0, height):.1f}" fill="{fill}"/>')

    def svg(self) -> str:
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="{FONT}">',
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>', *self.parts,
            "</svg>", ""])


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that cover [low, high] with about `count` gaps."""
    if high - low < 1e-6:  # A single value.
        low, high = low - 0.5, high + 0.5
    span = high - low
    magnitude = 10.0 ** math.floor(math.log10(span / count))
    gap = next(m * magnitude for m in (1, 2, 5, 10) if span / (m * magnitude) <= count)
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    return [i * gap for i in range(first, last + 1)]


class Axes:
    """A rectangle of a picture with a scale in each direction. With `log_x` equal ratios are equally wide;
    the data keep `inset` from the sides."""

    def __init__(self, picture: Picture, left, top, right, bottom, x_range, y_ticks, log_x=False, inset=0):
        self.picture, self.x_range, self.y_ticks, self.log_x = picture, x_range, y_ticks, log_x
        self.left, self.top, self.right, self.bottom = left, top, right, bottom
        self.inset = inset

    def x(self, value: float) -> float:
        low, high = self.x_range
        if low == high:
            return (self.left + self.right) / 2
        if self.log_x:
            low, high, value = math.log(low), math.log(high), math.log(value)
        width = self.right - self.left - 2 * self.inset
        return self.left + self.inset + (value - low) / (high - low) * width

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def points(self, data):
        return [(self.x(x), self.y(y)) for x, y in data]

    def grid(self, size, distance, unit=""):
        """A line and a number at each tick of y, and the line below all."""
        digits = max(0, -math.floor(math.log10(self.y_ticks[1] - self.y_ticks[0]) + 1e-9))
        for tick in self.y_ticks:
            self.picture.line(self.left, self.y(tick), self.right, self.y(tick), GRID)
            self.picture.text(self.left - distance, self.y(tick) + 4, f"{tick:.{digits}f}{unit}", size,
                              MUTED, "end")
        self.picture.line(self.left, self.bottom, self.right, self.bottom, MUTED, 1.2)

    def names(self, x_label: str, y_label: str, size, below, beside):
        self.picture.text((self.left + self.right) / 2, self.bottom + below, x_label, size, MUTED, "middle")
        self.picture.text_upwards(self.left - beside, (self.top + self.bottom) / 2, y_label, size, MUTED)
