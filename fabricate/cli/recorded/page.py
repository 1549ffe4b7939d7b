"""The page of `fabricate report --html`: one file about runs that needs no network.

Owns the sections of the page and their order, and the policy that only its own scripts run. Must not know: how a run is read (`files`),
which values share a chart (`curves`).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files as resources
from typing import Any

from fabricate import __version__
from fabricate.cli.recorded.curves import MOST_POINTS, Chart, charts, marks
from fabricate.cli.recorded.drawing import drawing
from fabricate.cli.recorded.files import RunFiles
from fabricate.cli.recorded.goodput import KINDS, goodput
from fabricate.cli.recorded.markup import Html, element, joined, json_block
from fabricate.errors import size_text

__all__ = ["COLOURS", "duration", "moment", "page", "state_of"]

COLOURS = 8
"""The number of colours in page.css."""
_MOST_EVENTS = 300
_MOST_SAMPLES = 50
"""The maximum number of steps whose generated texts are shown."""
_MARKS = {
    "resumed": "resumed",
    "skipped": "skipped update",
    "not finite": "not finite",
    "best": "best checkpoint",
    "saved": "checkpoints",
}
_COMPLETE = ("max_steps", "max_epochs")


def page(runs: Sequence[RunFiles]) -> str:
    """The HTML page about `runs`. The curves of several runs share their charts."""
    names, drawn, marked = _names(runs), charts(runs), marks(runs)
    data = {
        "runs": names,
        "colours": COLOURS,
        "charts": [
            {"title": chart.title, "stacked": chart.stacked, "curves": [vars(curve) for curve in chart.curves]}
            for chart in drawn
        ],
        "marks": [vars(mark) for mark in marked],
    }
    scripts = [_asset("uPlot-LICENSE.txt", "uPlot.iife.min.js"), _asset("page.js")]
    figures = [_figure(number, chart, marked) for number, chart in enumerate(drawn)]
    cards = [
        _summary(run, name, n if len(runs) > 1 else None) for n, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    footer = f"Made by fabricate {__version__} at {moment(datetime.now(UTC).timestamp())}."
    body = joined(
        element("header", element("h1", " and ".join(names)), element("p", _subtitle(runs), class_="faint")),
        element(
            "main",
            element("div", *cards, class_="cards"),
            element("h2", "Curves"),
            _controls({mark.kind for mark in marked}),
            element("div", *figures, class_="charts") if figures else element("p", "No metrics are recorded yet."),
            *_sections(runs, names),
        ),
        element("footer", f"{footer} Charts: uPlot 1.6.32, MIT licence."),
        json_block("data", data),
        *(Html(f"<script>{script}</script>") for script in scripts),
    )
    style = element("style", Html(_asset("uPlot.min.css", "page.css")))
    head = element("head", *_head(f"{' and '.join(names)} - fabricate report", scripts), style)
    return f"<!DOCTYPE html>\n{element('html', head, element('body', body), lang='en')}\n"


def _head(title: str, scripts: Sequence[str]) -> Iterator[Html]:
    """The elements of the head, with a policy that allows no network access and no scripts except `scripts`."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    yield element("meta", charset="utf-8")
    yield element("meta", http_equiv="Content-Security-Policy", content=policy)
    yield element("meta", name="viewport", content="width=device-width, initial-scale=1")
    yield element("meta", name="referrer", content="no-referrer")
    yield element("title", title)


def _asset(*names: str) -> str:
    """The text of files in `assets/`: a licence as a comment, and a script without its first comment, which contains an address."""
    parts = []
    for name in names:
        text = (resources("fabricate.cli.recorded") / "assets" / name).read_text(encoding="utf-8")
        if name.endswith("LICENSE.txt"):
            text = f"/* uPlot:\n{text}*/\n"
        elif text.startswith("/*!"):
            text = text.partition("*/")[2].lstrip()
        parts.append(text)
    return "".join(parts)


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """A unique name for each run: the name of its directory, or else its path."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.run_dir) for run, name in zip(runs, names, strict=True)]


def _subtitle(runs: Sequence[RunFiles]) -> str:
    """The main settings that are the same in all runs."""
    facts = []
    for name in ("strategy", "world_size", "precision", "global_batch_size", "device"):
        values = {str(run.plan[name]["value"]) for run in runs if name in run.plan}
        facts += [f"{name.replace('_', ' ')} {value}" for value in values if len(values) == 1]
    return ", ".join(facts)


# -- one run in a few numbers ------------------------------------------------------------------------------------------


def state_of(run: RunFiles) -> tuple[str, str]:
    """The state of the run as text, and "good", "bad" or "open"."""
    fits = run.of_kind("started", "ended", "failed")
    if not fits:
        return "no fit has begun", "open"
    last = fits[-1]
    if last["event"] == "failed":
        return f"failed: {last.get('reason', '')}", "bad"
    if last["event"] == "ended":
        reason = last.get("reason", "")
        return (f"complete ({reason})", "good") if reason in _COMPLETE else (f"ended: {reason}", "open")
    return "at work, or killed", "open"


def _summary(run: RunFiles, name: str, number: int | None) -> Html:
    state, mood = state_of(run)
    title = [] if number is None else [element("span", class_=f"swatch c{number % COLOURS}"), Html("&nbsp;"), name]
    facts = [element("div", element("dt", term), element("dd", text)) for term, text in _facts(run)]
    return element(
        "section",
        *([element("h3", *title)] if title else []),
        element("span", state, class_=f"state {mood}"),
        element("dl", *facts, class_="facts"),
        class_="card",
    )


def _facts(run: RunFiles) -> Iterator[tuple[str, str]]:
    total = run.plan.get("total_steps", {}).get("value")
    yield "steps", f"{run.last_step:,}" + (f" of {total:,}" if isinstance(total, int) else "")
    latest: dict[str, Any] = {}
    for line in run.lines:
        latest |= line["metrics"]
    keep = run.keep()
    for name in dict.fromkeys(("loss", keep["metric"])):
        if name in latest:
            yield name, _value(latest[name])
    if best := run.best():
        yield f"best {keep['metric']}", f"{_value(best.metrics[keep['metric']])} at step {best.step:,}"
    times = goodput(run)
    if times:
        yield "wall time", duration(times["wall"])
        yield "goodput", f"{100 * times['training'] / times['wall']:.1f} %" if times["wall"] else ""
        yield "fits", str(len(run.of_kind("started")))
    rate = next(
        (
            line["clock"]["samples_per_second"]
            for line in reversed(run.train())
            if "samples_per_second" in line["clock"]
        ),
        None,
    )
    if rate is not None:
        yield "samples per second", _value(rate)
    if moments := [line["clock"]["time"] for line in run.lines] + [event["time"] for event in run.events]:
        yield "last sign of life", moment(max(moments))


# -- charts --------------------------------------------------------------------------------------------------------------


def _controls(kinds: set[str]) -> Html:
    boxes = [
        element(
            "label",
            element("input", type="checkbox", data_mark=kind, **({} if kind == "saved" else {"checked": "checked"})),
            element("span", class_=f"swatch {kind.replace(' ', '-')}"),
            text,
        )
        for kind, text in _MARKS.items()
        if kind in kinds
    ]
    axis = element(
        "select", element("option", "step", value="steps"), element("option", "time in fit", value="seconds"), id="axis"
    )
    return element(
        "div",
        element("label", "over", axis),
        element("label", element("input", type="checkbox", id="log"), "log scale"),
        *boxes,
        element("button", "reset zoom", id="reset", type="button", disabled="disabled"),
        element("button", "light / dark", id="theme", type="button"),
        element("span", "drag to zoom, double-click to zoom out, click a name to hide its curve", class_="faint"),
        class_="bar",
    )


def _figure(number: int, chart: Chart, marked: Sequence[Any]) -> Html:
    points = max(curve.points for curve in chart.curves)
    remarks = [chart.unit] if chart.unit else []
    if points > MOST_POINTS:
        each = -(-points // (MOST_POINTS // 2))
        remarks.append(f"{points:,} points; shown are the smallest and the largest of every {each:,}")
    return element(
        "figure",
        element("figcaption", chart.title.capitalize(), element("span", "; ".join(remarks))),
        element("div", data_chart=number),
        element("noscript", drawing(chart, marked, COLOURS)),
    )


# -- sections ------------------------------------------------------------------------------------------------------------


def _sections(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[Html]:
    for title, parts in (
        ("Where the time went", _goodput(runs, names)),
        ("Memory in the plan", _memory(runs, names)),
        ("Plan", _plan(runs, names)),
        ("Checkpoints", _each(runs, names, _checkpoints)),
        ("Events", _each(runs, names, _events)),
        ("Samples", _each(runs, names, _samples)),
    ):
        if content := list(parts):
            yield element("h2", title)
            yield element("div", *content, class_="card")


def _each(runs: Sequence[RunFiles], names: Sequence[str], section: Any) -> Iterator[Html]:
    """The section of each run, under the run's name if there are several."""
    for run, name in zip(runs, names, strict=True):
        if content := list(section(run)):
            yield from [element("h3", name)] if len(runs) > 1 else []
            yield from content


def _goodput(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[Html]:
    sums = [goodput(run) for run in runs]
    for name, times in zip(names, sums, strict=True):
        if not times or not times["wall"]:
            yield from (
                [element("p", f"{name} did not record when its fits began.", class_="faint")] if any(sums) else []
            )
            continue
        yield from [element("h3", name)] if len(runs) > 1 else []
        parts = []
        for number, kind in enumerate(KINDS):
            share = 100 * times[kind] / times["wall"]
            parts.append(
                element(
                    "span",
                    class_=f"c{_KIND_COLOURS[number]}",
                    style=f"width:{share:.3f}%",
                    title=f"{kind} {share:.1f} %",
                )
            )
        yield element("div", *parts, class_="share")
    if any(sums):
        rows = []
        for number, (kind, text) in enumerate(KINDS.items()):
            swatch = element("span", class_=f"swatch c{_KIND_COLOURS[number]}")
            cells = [_spent(times, kind) for times in sums]
            rows.append((joined(swatch, Html("&nbsp;"), kind), *cells, text))
        yield _table(("", *(names if len(runs) > 1 else ("time",)), ""), rows)


_KIND_COLOURS = (2, 0, 4, 6, 1, 5, 7)


def _spent(times: Mapping[str, float], kind: str) -> str:
    return f"{duration(times[kind])}, {100 * times[kind] / times['wall']:.1f} %" if times and times["wall"] else ""


def _memory(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[Html]:
    planned: list[dict[str, int]] = [run.plan.get("memory_per_rank", {}).get("value") or {} for run in runs]
    kinds = list(dict.fromkeys(kind for each in planned for kind in each))
    if not kinds:
        return
    rows = [(kind, *(size_text(each[kind]) if kind in each else "" for each in planned)) for kind in kinds]
    peaks = [_peak(run) for run in runs]
    if any(peaks):
        rows.append(("held at most", *(size_text(peak) if peak else "not counted" for peak in peaks)))
    yield _table(("per rank", *(names if len(runs) > 1 else ("size",))), rows)
    remark = (
        ""
        if any(peaks)
        else " What was held at most is counted on devices; on a CPU the callback DeviceStats measures the process."
    )
    yield element("p", f"An estimate without activations.{remark}", class_="faint")


def _peak(run: RunFiles) -> int:
    """The peak memory of the device (on a CPU, of the process) in bytes; 0 if it was not measured."""
    clocks = [line["clock"] for line in run.lines]
    return int(
        max((clock.get("peak_memory_bytes", clock.get("process_memory_bytes", 0)) for clock in clocks), default=0)
    )


def _plan(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[Html]:
    settings = list(dict.fromkeys(setting for run in runs for setting in run.plan))
    if not settings:
        return
    if len(runs) == 1:
        plan = runs[0].plan
        rows = [
            (name.replace("_", " "), _setting(plan[name]["value"]), plan[name]["source"] or "") for name in settings
        ]
        yield _table(("setting", "value", "source"), rows)
        yield from (element("p", f"note: {note}", class_="faint") for note in runs[0].notes)
        return
    yield element("label", element("input", type="checkbox", id="differences"), " only what differs")
    body = []
    for setting in settings:
        values = [_setting(run.plan[setting]["value"]) if setting in run.plan else "" for run in runs]
        kind = "differs" if len(set(values)) > 1 else "same"
        body.append(
            element(
                "tr", element("td", setting.replace("_", " ")), *(element("td", value) for value in values), class_=kind
            )
        )
    yield _table(("setting", *names), [], body, id="plan")


def _setting(value: Any) -> str:
    """The value of a setting as text, as in `fabricate plan`."""
    if isinstance(value, dict):
        return ", ".join(f"{kind} {size_text(size) if isinstance(size, int) else size}" for kind, size in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return (
        "none"
        if value is None
        else f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else str(value)
    )


def _checkpoints(run: RunFiles) -> Iterator[Html]:
    best, metric = run.best(), run.keep()["metric"]
    rows = [
        (
            joined(each.path.name, Html("&nbsp;"), element("span", "★ best", class_="best"))
            if each is best
            else each.path.name,
            size_text(each.size),
            _value(each.metrics[metric]) if metric in each.metrics else "",
            each.created,
        )
        for each in run.checkpoints
    ]
    if rows:
        yield _table(("checkpoint", "size", metric, "created"), rows)
    elif run.damaged or run.set_aside:
        yield element("p", "None is good.")
    if run.damaged:
        yield element("p", f"damaged: {', '.join(run.damaged)}", class_="bad")
    if run.set_aside:
        yield element("p", f"set aside as damaged: {run.set_aside}", class_="bad")


def _events(run: RunFiles) -> Iterator[Html]:
    groups: list[list[dict[str, Any]]] = []
    for event in run.events:
        alike = groups and event["event"] == groups[-1][0]["event"] in ("saved", "skipped")
        groups[-1].append(event) if alike else groups.append([event])
    if not groups:
        return
    if len(groups) > _MOST_EVENTS:
        yield element("p", f"The last {_MOST_EVENTS} of {len(groups):,}.", class_="faint")
    counts = Counter(event["event"] for event in run.events)
    yield element("p", ", ".join(f"{kind} {count:,}" for kind, count in counts.items()), class_="faint")
    rows = []
    for group in groups[-_MOST_EVENTS:]:
        first, last = group[0], group[-1]
        steps = f"{first.get('step', '')}" + (f" to {last.get('step', '')}" if len(group) > 1 else "")
        what = f"{first['event']} x {len(group)}" if len(group) > 1 else str(first["event"])
        rows.append((moment(first["time"]), steps, what, _details(last)))
    table = _table(("time", "step", "event", "details"), rows)
    yield element(
        "details", element("summary", f"{len(run.events):,} events"), table, open="open" if len(rows) <= 25 else None
    )


def _details(event: Mapping[str, Any]) -> str:
    rest = {
        name: value
        for name, value in event.items()
        if name not in ("event", "step", "time", "data", "versions", "keep")
    }
    return ", ".join(f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in rest.items())


def _samples(run: RunFiles) -> Iterator[Html]:
    steps: dict[int, list[Html]] = {}
    for sample in run.samples:
        texts = _texts({name: value for name, value in sample.items() if name not in ("step", "time")})
        steps.setdefault(sample["step"], []).append(element("pre", "\n".join(texts)))
    newest = max(steps, default=0)
    if len(steps) > _MOST_SAMPLES:
        yield element("p", f"Of the last {_MOST_SAMPLES} of {len(steps):,} steps.", class_="faint")
    for step, samples in sorted(steps.items(), reverse=True)[:_MOST_SAMPLES]:
        yield element(
            "details", element("summary", f"step {step:,}"), *samples, open="open" if step == newest else None
        )


def _texts(value: Any) -> Iterator[str]:
    """The texts in a sample, with their names."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner) if isinstance(inner, dict | list) else [f"{name}: {inner}"]
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    else:
        yield str(value)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], body: Sequence[Html] = (), **attributes: str) -> Html:
    """A table that scrolls if it is wider than the screen."""
    body_rows = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    head = element("thead", element("tr", *(element("th", column) for column in columns)))
    table = element("table", head, element("tbody", *body_rows, *body), class_="rows", **attributes)
    return element("div", table, class_="scroll")


def _value(value: Any) -> str:
    return f"{value:,.6g}" if isinstance(value, int | float) else str(value)


def moment(time: float) -> str:
    """The date and time as text."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration(seconds: float) -> str:
    """A duration as text: 4.2 s, 3.1 min, 2.50 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.2f} h"
