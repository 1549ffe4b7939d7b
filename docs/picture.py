"""Writes docs/report.svg, a part of the page of `fabricate report --html`: `make demo`, then `python docs/picture.py runs/demo`.

The curves, marks and figures are those of the run, drawn by the functions that draw the page for readers without JavaScript.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from fabricate.cli.recorded.curves import Chart, Mark, charts, marks
from fabricate.cli.recorded.drawing import drawing
from fabricate.cli.recorded.files import RunFiles, read_run
from fabricate.cli.recorded.goodput import KINDS, goodput
from fabricate.cli.recorded.markup import Html, element, joined
from fabricate.cli.recorded.page import COLOURS, duration, state_of

WIDTH, MARGIN, GAP = 960, 20, 16
PANEL = (WIDTH - 2 * MARGIN - GAP) // 2
DRAWING = PANEL * 220 // 640  # the drawings are 640 x 220
TITLES = ("loss", "gradient norm", "learning rate", "time of a step")
KIND_COLOURS = (2, 0, 4, 6, 1, 5, 7)
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #59636e; }
svg svg text { font-size: 15px; }
.name { font-size: 20px; font-weight: 600; fill: #1c2128; } .title, .value { font-weight: 600; fill: #1c2128; }
.page { fill: #f6f7f9; } .card { fill: #fff; stroke: #d8dee4; } .good { fill: #1a7f37; } .axis { stroke: #d8dee4; }
polyline { fill: none; stroke-width: 2.2; stroke: currentColor; } .resumed { stroke: #8250df; stroke-width: 2; stroke-dasharray: 6 5; }
rect.key, .share { fill: currentColor; }
.c0 { color: #0b65c2; } .c1 { color: #c8501b; } .c2 { color: #1a7f37; } .c3 { color: #8250df; }
.c4 { color: #9a6700; } .c5 { color: #bf3989; } .c6 { color: #0a7c86; } .c7 { color: #57606a; }
"""


def words(content: str, x: float, y: float, kind: str | None = None, anchor: str | None = None) -> Html:
    """A line of text."""
    return element("text", content, x=x, y=y, class_=kind, text_anchor=anchor)


def card(x: float, y: float, width: float, height: float) -> Html:
    """A white rectangle with a border."""
    return element("rect", class_="card", x=x, y=y, width=width, height=height, rx=8)


def keys(names: list[tuple[str, int]], right: float, y: float) -> Iterator[Html]:
    """A legend of names with the numbers of their colours, which ends at `right`."""
    for name, colour in reversed(names):
        start = right - round(7.3 * len(name))  # about as wide as the text is
        yield words(name, start, y)
        yield element("rect", class_=f"key c{colour}", x=start - 15, y=y - 10, width=10, height=10, rx=2)
        right = start - 25


def panel(chart: Chart, marked: list[Mark], x: float, y: float) -> Iterator[Html]:
    """A chart as the page draws it without JavaScript, with its title and legend."""
    yield card(x, y, PANEL, DRAWING + 40)
    yield words(chart.title.capitalize() + (f", {chart.unit}" if chart.unit else ""), x + 12, y + 23, "title")
    yield from keys([(curve.name, number) for number, curve in enumerate(chart.curves)], x + PANEL - 12, y + 23)
    figure = drawing(chart, marked, COLOURS).partition("<ul")[0]
    yield Html(figure.replace("<svg ", f'<svg x="{x}" y="{y + 34}" width="{PANEL}" height="{DRAWING}" ', 1))


def spent(run: RunFiles, y: float) -> Iterator[Html]:
    """The bar of where the time went, with its legend."""
    times, x = goodput(run), float(MARGIN + 12)
    yield card(MARGIN, y, WIDTH - 2 * MARGIN, 74)
    yield words("Where the time went", x, y + 23, "title")
    whole = WIDTH - 2 * MARGIN - 24
    for kind, colour in zip(KINDS, KIND_COLOURS, strict=True):
        width = whole * times[kind] / times["wall"]
        yield element("rect", class_=f"share c{colour}", x=round(x, 1), y=y + 36, width=round(width, 1), height=24)
        x += width
    names = [(f"{k} {100 * times[k] / times['wall']:.1f} %", c) for k, c in zip(KINDS, KIND_COLOURS, strict=True)]
    yield from keys([name for name in names if not name[0].endswith(" 0.0 %")], WIDTH - MARGIN - 12, y + 23)


def picture(run: RunFiles) -> str:
    """The name, the state, a few figures, four charts and where the time went."""
    marked, drawn = marks([run]), {chart.title: chart for chart in charts([run])}
    settings = ("strategy", "world_size", "precision", "global_batch_size", "device")
    facts = ", ".join(f"{name.replace('_', ' ')} {run.plan[name]['value']}" for name in settings)
    resumes = len(run.of_kind("resumed"))
    state = f"{state_of(run)[0]}; {run.last_step:,} steps, {resumes} resume{'s' * (resumes != 1)} (dashed), "
    parts = [
        words(run.name, MARGIN, 36, "name"),
        words(facts, MARGIN, 58),
        words(state + f"wall time {duration(goodput(run)['wall'])}", WIDTH - MARGIN, 36, "good", "end"),
    ]
    for number, title in enumerate(TITLES):
        row, column = divmod(number, 2)
        parts += panel(drawn[title], marked, MARGIN + column * (PANEL + GAP), 76 + row * (DRAWING + 40 + GAP))
    bottom = 76 + 2 * (DRAWING + 40 + GAP)
    parts += spent(run, bottom)
    height = bottom + 74 + MARGIN
    page = element("rect", class_="page", width=WIDTH, height=height)
    svg = element(
        "svg",
        element("title", f"The page of fabricate report for {run.name}"),
        element("style", Html(STYLE)),
        joined(page, *parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height}",
    )
    return re.sub(r"(?=<(?:text|rect|polyline|line|svg x)\b)", "\n", svg) + "\n"


if __name__ == "__main__":
    target = Path(__file__).with_name("report.svg")
    target.write_text(picture(read_run(Path(sys.argv[1]))), encoding="utf-8")
