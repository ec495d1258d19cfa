"""The little of SVG that the reports draw with: standalone, no script, light and dark pages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

# Wide enough for the letters of any sans-serif font, in units of the font size.
_LETTER_WIDTH = 0.6
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# Boxes keep their colours on light and dark pages; what lies on the page itself changes.
_STYLE = """
text { font-family: system-ui, "Segoe UI", "Liberation Sans", Arial, sans-serif; fill: #1f2328; }
.page { fill: #ffffff; }
.track { fill: #eef0f2; }
.rule { stroke: #8b949e; stroke-width: 1; }
.even { stroke: #59636e; stroke-width: 1; stroke-dasharray: 4 3; }
.minor { fill: #59636e; }
.forward { fill: #6cb0f5; }
.backward { fill: #f0a35e; }
.weights { fill: #c9b458; }
.again { fill-opacity: 0.55; }
.compute { fill: #f0a35e; }
.memory { fill: #6fbf8b; }
.box { stroke: #ffffff; stroke-width: 0.5; }
text.inside { fill: #10171f; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .page { fill: #0d1117; }
  .track { fill: #1c2128; }
  .rule { stroke: #59636e; }
  .even { stroke: #9198a1; }
  .minor { fill: #9198a1; }
  .box { stroke: #0d1117; }
  text.inside { fill: #10171f; }
  .again { fill-opacity: 0.75; }
}
""".strip()


def number(value: float) -> str:
    """A coordinate with two decimals at most."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def text_width(text: str, size: float) -> float:
    """A generous estimate of the width of a text."""
    return _LETTER_WIDTH * size * len(text)


def clip(text: str, size: float, width: float) -> str:
    """The text, or its end behind an ellipsis, or nothing, whatever fits the width."""
    if text_width(text, size) <= width:
        return text
    letters = int(width / (_LETTER_WIDTH * size)) - 1
    return f"\u2026{text[-letters:]}" if letters >= 2 else ""


def ticks(end: float, most: int) -> Iterator[float]:
    """Round numbers from 0 to ``end``, no more than ``most`` steps apart."""
    if end <= 0:
        yield 0.0
        return
    rough = end / most
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * (1 - 1e-9))
    for index in range(int(end / step * (1 + 1e-9)) + 1):
        yield index * step


class Drawing:
    """Collects elements and writes them as one document."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._elements: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, names: str, hint: str = ""
    ) -> None:
        """A box; the hint shows when the pointer rests on it."""
        position = (
            f'<rect class="{names}" x="{number(x)}" y="{number(y)}" '
            f'width="{number(width)}" height="{number(height)}"'
        )
        inside = f"><title>{_text(hint)}</title></rect>" if hint else "/>"
        self._elements.append(position + inside)

    def line(self, x1: float, y1: float, x2: float, y2: float, names: str) -> None:
        """A straight line."""
        self._elements.append(
            f'<line class="{names}" x1="{number(x1)}" y1="{number(y1)}" '
            f'x2="{number(x2)}" y2="{number(y2)}"/>'
        )

    def text(
        self, x: float, y: float, text: str, size: float, names: str = "", anchor: str = "start"
    ) -> None:
        """A line of text; ``anchor`` says which end of it, or ``middle``, is at x."""
        self._elements.append(
            f'<text class="{names}" x="{number(x)}" y="{number(y)}" '
            f'font-size="{number(size)}" text-anchor="{anchor}">{_text(text)}</text>'
        )

    def document(self, width: float, height: float) -> str:
        """The whole file."""
        size = f"{number(width)} {number(height)}"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
                f'width="{number(width)}" height="{number(height)}" role="img" '
                f"aria-label={quoteattr(_clean(self._title))}>",
                f"<style>\n{_STYLE}\n</style>",
                f'<rect class="page" width="{number(width)}" height="{number(height)}"/>',
                *self._elements,
                "</svg>\n",
            ]
        )


def _clean(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)


def _text(text: str) -> str:
    return escape(_clean(text))
