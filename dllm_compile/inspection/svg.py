# SPDX-License-Identifier: Apache-2.0
"""Draws boxes and arrows in layers, from top to bottom, as SVG. Needs nothing and gives the same every time.

The steps of Sugiyama's method: every box goes one layer below the lowest it reads; long arrows get a bend in each layer
they cross; layers are ordered by the mean place of neighbours, back and forth; then boxes move towards their neighbours
as far as the order lets them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from .blocks import Box, Drawing

_LETTER, _PADDING, _GAP, _ROW, _LINE = 6.7, 14, 14, 58, 14
_FILL = {
    "product": "#cfe3ff",
    "attention": "#ffd9c7",
    "dllm": "#d6f2d3",
    "view": "#f2f2f2",
    "pointwise": "#fff3c4",
    "input": "#ffffff",
    "output": "#ffffff",
}


def svg(drawing: Drawing, title: str) -> str:
    """The picture of a drawing."""
    if not drawing.boxes:
        return ""
    layers, arrows = _layered(drawing)
    layers = _ordered(layers, arrows)
    widths = {name: _width(drawing.boxes.get(name)) for layer in layers for name in layer}
    centers = _placed(layers, arrows, widths)
    rows = {name: 30 + number * _ROW for number, layer in enumerate(layers) for name in layer}
    left = min(centers[name] - widths[name] / 2 for name in centers) - 8
    width = max(centers[name] + widths[name] / 2 for name in centers) - left + 8
    height = 30 + len(layers) * _ROW - 14
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" font-family="monospace" font-size="11">'
    )
    parts = [head, f"<title>{escape(title)}</title>"]
    heights = {name: _height(drawing.boxes.get(name)) for name in rows}
    parts += [
        _arrow(centers[a] - left, rows[a] + heights[a] / 2, centers[b] - left, rows[b] - heights[b] / 2)
        for a, b in arrows
    ]
    parts += [
        _rectangle(box, centers[name] - left, rows[name], widths[name], heights[name])
        for name, box in drawing.boxes.items()
    ]
    return "\n".join([*parts, "</svg>"])


def beside(pictures: Sequence[tuple[str, str]]) -> str:
    """One picture on white of several (caption, SVG of `svg`), from left to right."""
    parts, left, tallest = [], float(_GAP), 0.0
    for caption, picture in pictures:
        size = re.search(r'viewBox="0 0 (\d+) (\d+)"', picture)
        assert size is not None
        width, height = map(float, size.groups())
        width = max(width, len(caption) * 2 * _LETTER)
        parts.append(f'<text x="{left:.0f}" y="26" font-size="20" font-weight="bold">{escape(caption)}</text>')
        parts.append(picture.replace("<svg ", f'<svg x="{left:.0f}" y="40" ', 1))
        left, tallest = left + width + 3 * _GAP, max(tallest, height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left:.0f} {tallest + 54:.0f}" role="img" '
        f'font-family="monospace"><rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>"])


def _lines(box: Box) -> list[str]:
    return [line for line in (box.title, box.detail) if line]


def _width(box: Box | None) -> float:
    return 4 if box is None else _PADDING + _LETTER * max(map(len, _lines(box)))


def _height(box: Box | None) -> float:
    return 0 if box is None else 8 + _LINE * len(_lines(box))


def _rectangle(box: Box, x: float, y: float, width: float, height: float) -> str:
    outside = box.kind in ("input", "output")
    dashes = ' stroke-dasharray="3 2"' if outside else ""
    shape = (
        f'<rect x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" '
        f'fill="{_FILL[box.kind]}" stroke="#667"{dashes}/>'
    )
    first = y - height / 2 + 15
    texts = [
        f'<text x="{x:.1f}" y="{first + _LINE * number:.1f}" text-anchor="middle"'
        f"{'' if number == 0 else ' fill=' + chr(34) + '#555' + chr(34)}>{escape(line)}</text>"
        for number, line in enumerate(_lines(box))
    ]
    return f"<g><title>{escape(box.hint)}</title>{shape}{''.join(texts)}</g>"


def _arrow(x0: float, y0: float, x1: float, y1: float) -> str:
    middle = (y0 + y1) / 2
    path = f"M{x0:.1f} {y0:.1f} C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
    return f'<path d="{path}" fill="none" stroke="#99a" stroke-width="1.2"/>'


def _layered(drawing: Drawing) -> tuple[list[list[str]], list[tuple[str, str]]]:
    """Names by layer, with bends where an arrow crosses one, and arrows between neighbouring layers."""
    above: dict[str, list[str]] = defaultdict(list)
    below: dict[str, list[str]] = defaultdict(list)
    for source, target in drawing.arrows:
        above[target].append(source)
        below[source].append(target)
    depth: dict[str, int] = {}
    for name in _sorted(drawing, above):
        depth[name] = max((depth[source] + 1 for source in above[name]), default=0)
    for name in drawing.boxes:  # what comes from outside stands right above its first reader
        if not above[name] and below[name]:
            depth[name] = min(depth[target] for target in below[name]) - 1
    lowest = min(depth.values())
    layers: list[list[str]] = [[] for _ in range(max(depth.values()) - lowest + 1)]
    for name in drawing.boxes:
        layers[depth[name] - lowest].append(name)
    arrows = []
    for source, target in drawing.arrows:
        last = source
        for between in range(depth[source] + 1, depth[target]):
            bend = f"{source} {target} {between}"
            layers[between - lowest].append(bend)
            arrows.append((last, bend))
            last = bend
        arrows.append((last, target))
    return layers, arrows


def _sorted(drawing: Drawing, above: Mapping[str, Sequence[str]]) -> list[str]:
    """Names so that every box stands behind what it reads; a written graph is nearly in that order already."""
    done: dict[str, None] = {}
    waiting = list(drawing.boxes)
    while waiting:
        ready = [name for name in waiting if all(source in done for source in above[name])]
        done.update(dict.fromkeys(ready))
        waiting = [name for name in waiting if name not in done]
    return list(done)


def _neighbours(arrows: Sequence[tuple[str, str]]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    above: dict[str, list[str]] = defaultdict(list)
    below: dict[str, list[str]] = defaultdict(list)
    for source, target in arrows:
        above[target].append(source)
        below[source].append(target)
    return above, below


def _ordered(layers: list[list[str]], arrows: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Layers ordered so that few arrows cross."""
    above, below = _neighbours(arrows)
    for sweep in range(16):
        place = {name: number / len(layer) for layer in layers for number, name in enumerate(layer)}
        near = above if sweep % 2 == 0 else below
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            means = {
                name: sum(place[one] for one in near[name]) / len(near[name]) if near[name] else place[name]
                for name in layer
            }
            layer.sort(key=lambda name: (means[name], place[name]))
            place |= {name: number / len(layer) for number, name in enumerate(layer)}
    return layers


def _placed(
    layers: Sequence[Sequence[str]], arrows: Sequence[tuple[str, str]], widths: Mapping[str, float]
) -> dict[str, float]:
    """Middle of each box, near those of its neighbours."""
    above, below = _neighbours(arrows)
    centers: dict[str, float] = {}
    for layer in layers:
        x = 0.0
        for name in layer:
            centers[name] = x + widths[name] / 2
            x += widths[name] + _GAP
        for name in layer:
            centers[name] -= x / 2
    for sweep in range(24):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            wish = []
            for name in layer:
                near = (above if down else below)[name] or (below if down else above)[name]
                wish.append(sum(centers[one] for one in near) / len(near) if near else centers[name])
            centers.update(zip(layer, _apart(wish, [widths[name] for name in layer]), strict=True))
    return centers


def _apart(wish: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Places nearest to what is wished for (least squares) that keep the order and do not overlap."""
    offsets = [0.0]
    for left, right in pairwise(widths):
        offsets.append(offsets[-1] + (left + right) / 2 + _GAP)
    # Without the offsets it is: the nearest ascending sequence. Neighbours that would cross move together.
    groups: list[tuple[float, int]] = []
    for want, offset in zip(wish, offsets, strict=True):
        mean, count = want - offset, 1
        while groups and groups[-1][0] > mean:
            other, size = groups.pop()
            mean, count = (mean * count + other * size) / (count + size), count + size
        groups.append((mean, count))
    flat = [mean for mean, count in groups for _ in range(count)]
    return [mean + offset for mean, offset in zip(flat, offsets, strict=True)]
