"""A chart as a plain SVG, for readers without JavaScript: polylines, axes with a few numbers, resumes and skipped updates.

Must not know: the sources of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fabricate.cli.recorded.curves import Chart, Curve, Mark, representative
from fabricate.cli.recorded.markup import Html, element, joined

__all__ = ["drawing"]

_WIDTH, _HEIGHT = 640.0, 220.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 8.0, 8.0, 24.0
_MOST = 600
"""The maximum number of points of a polyline: about one per pixel."""


def drawing(chart: Chart, marks: Sequence[Mark], colours: int) -> Html:
    """The SVG of `chart` with its legend. Curves have the classes c0, c1, ... for `colours` colours."""
    curves = _stacked(chart.curves) if chart.stacked else chart.curves
    values = [y for curve in curves for y in curve.y if y is not None]
    steps = [step for curve in curves for step in curve.steps]
    if not values:
        return element("p", "no finite value")
    low, high = min(values), max(values)
    low, high = (0.0 if chart.stacked else low), (high if high > low else low + (abs(low) or 1.0))
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [*_axes((first, last), (low, high)), *_signs(marks, x, first, last)]
    for number, curve in enumerate(curves):
        for points in _pieces(curve):
            line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
            parts.append(element("polyline", class_=f"c{number % colours}", points=line))
    figure = element("svg", *parts, viewBox=f"0 0 {_WIDTH:g} {_HEIGHT:g}", role="img", aria_label=chart.title)
    legend = [element("li", curve.name, class_=f"c{number % colours}") for number, curve in enumerate(curves)]
    return joined(figure, element("ul", *legend, class_="legend"))


def _signs(marks: Sequence[Mark], x: Callable[[float], float], first: int, last: int) -> Iterator[Html]:
    """A line for each resume, and a short line for each skipped update."""
    for mark in marks:
        if mark.kind in ("resumed", "skipped") and first <= mark.step <= last:
            top = _TOP if mark.kind == "resumed" else _HEIGHT - _BOTTOM - 8
            at, ends = round(x(mark.step), 1), {"y1": top, "y2": _HEIGHT - _BOTTOM}
            yield element("line", element("title", mark.text), class_=mark.kind, x1=at, x2=at, **ends)


def _axes(steps: tuple[int, int], values: tuple[float, float]) -> Iterator[Html]:
    bottom = _HEIGHT - _BOTTOM
    yield element("line", class_="axis", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=bottom, y2=bottom)
    yield element("line", class_="axis", x1=_LEFT, x2=_LEFT, y1=_TOP, y2=bottom)
    yield element("text", f"{values[0]:.4g}", x=_LEFT - 4, y=bottom, text_anchor="end")
    yield element("text", f"{values[1]:.4g}", x=_LEFT - 4, y=_TOP + 10, text_anchor="end")
    yield element("text", f"step {steps[0]}", x=_LEFT, y=_HEIGHT - 6)
    yield element("text", f"{steps[1]:,}", x=_WIDTH - _RIGHT, y=_HEIGHT - 6, text_anchor="end")


def _stacked(curves: Sequence[Curve]) -> list[Curve]:
    """The curves, each with the sum of the previous ones added."""
    sums = [0.0] * len(curves[0].y)
    stacked = []
    for curve in curves:
        sums = [total + (value or 0.0) for total, value in zip(sums, curve.y, strict=True)]
        stacked.append(Curve(curve.run, curve.name, curve.steps, curve.seconds, list(sums), curve.points))
    return stacked


def _pieces(curve: Curve) -> Iterator[list[tuple[int, float]]]:
    """The sequences of points between values that are not finite."""
    piece: list[tuple[int, float]] = []
    for place in representative(curve.y, _MOST):
        value = curve.y[place]
        if value is not None:
            piece.append((curve.steps[place], value))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece
