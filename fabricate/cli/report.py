"""`fabricate report`: a summary of a run from the files of its directory, as text, as JSON, or as a page for a browser.

Owns the contents of the text. Must not know: how the files are read (`recorded.files`), the page (`recorded.page`). Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from fabricate.cli.recorded.arguments import run_directories
from fabricate.cli.recorded.files import RunFiles, read_run
from fabricate.cli.recorded.goodput import goodput
from fabricate.cli.recorded.page import duration, page
from fabricate.cli.tables import print_table
from fabricate.errors import ConfigurationError, size_text

_SHOWN_SETTINGS = ("strategy", "world_size", "precision", "global_batch_size", "total_steps")
_ORDINARY = ("saved", "loss_weight", "observed", "started", "exported", "ended")  # of every run; others get a line
_TIMES = ("in_fit", "saving", "wall", "training", "evaluating", "starting", "lost", "down", "other")


@click.command()
@run_directories
@click.option("--html", "file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Write a page.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def report(run_dirs: Sequence[Path], file: Path | None, as_json: bool) -> None:
    """Sum up the run in RUN_DIR: steps, time, rates, where the time went, metrics with their best, checkpoints, incidents.

    Reads plan.json, metrics.jsonl, events.jsonl and the manifests of the checkpoints, also while the run is running. With --html
    writes one file for a browser that loads nothing: curves, goodput, plan, checkpoints, events; several runs over each other.

    \b
    Examples:
      fabricate report runs/first
      fabricate report runs/first --json
      fabricate report runs/first --html first.html
      fabricate report runs/first runs/second --html both.html
    """
    if file is not None and as_json:
        raise ConfigurationError("--html and --json are both given. Give only one of them")
    runs = [read_run(run_dir) for run_dir in run_dirs]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page(runs), encoding="utf-8")
        click.echo(f"wrote {file} ({size_text(file.stat().st_size)})")
    elif as_json:
        sums = [summary(run) for run in runs]
        click.echo(json.dumps(sums[0] if len(sums) == 1 else sums, indent=1))
    else:
        for run in runs:
            _print(summary(run))


def _print(sums: Mapping[str, Any]) -> None:
    click.echo(sums["run_dir"])
    for topic in ("plan", "progress", "time", "goodput", "rates", "shares", "checkpoints"):
        if sums[topic]:
            parts = [f"{name.replace('_', ' ')} {_text(name, value)}" for name, value in sums[topic].items()]
            click.echo(f"  {topic:<11} {', '.join(parts)}")
    for incident in sums["incidents"]:
        details = ", ".join(f"{name} {value}" for name, value in incident.items() if name not in ("event", "count"))
        times = f" x {incident['count']}" if incident["count"] > 1 else ""
        click.echo(f"  {incident['event']:<11} {details}{times}")
    rows = []
    for name, metric in sums["metrics"].items():
        ends = (metric["lowest"], metric["highest"])
        shown = (f"{end['value']:.6g} at step {end['step']}" if end else "none is finite" for end in ends)
        rows.append((name, f"{float(metric['last']['value']):.6g}", *shown))
    if rows:
        print_table(("metric", "last", "lowest", "highest"), rows)


def summary(run: RunFiles) -> dict[str, Any]:
    """The summary of a run, as JSON values."""
    counters = run.checkpoints[-1].progress if run.checkpoints else {}
    plan = {name: setting["value"] for name, setting in run.plan.items()}
    return {
        "run_dir": str(run.run_dir),
        "plan": {name: plan[name] for name in _SHOWN_SETTINGS if plan.get(name) is not None},
        "progress": _progress(run.lines, counters),
        "time": _time(run.lines, run.events, counters),
        "goodput": goodput(run),
        **_rates(run.train()),
        "checkpoints": _checkpoints(run),
        "metrics": _metrics(run.lines),
        "incidents": _incidents(run.events),
    }


def _progress(lines: list[dict[str, Any]], counters: Mapping[str, Any]) -> dict[str, Any]:
    """The progress of the run: the last step that was logged or saved, and the counters of the newest checkpoint."""
    logged = int(lines[-1].get("step", 0)) if lines else 0
    weighs_rows = counters.get("tokens") == counters.get("samples")  # then tokens are not shown
    names = ("epoch", "samples", *(() if weighs_rows else ("tokens",)), "skipped")
    shown = {name: counters[name] for name in names if name in counters}
    return {"steps": max(logged, int(counters.get("step", 0))), **shown}


def _time(lines: list[dict[str, Any]], events: list[dict[str, Any]], counters: Mapping[str, Any]) -> dict[str, Any]:
    """The seconds in `fit` and in saves, and the times of the first and the last record."""
    time: dict[str, Any] = {}
    logged = lines[-1].get("clock", {}).get("seconds") if lines else None
    in_fit = [seconds for seconds in (logged, counters.get("seconds")) if seconds is not None]
    if in_fit:
        time["in_fit"] = max(in_fit)
    saving = [event["seconds"] for event in events if event["event"] == "saved" and "seconds" in event]
    if saving:
        time["saving"] = sum(saving)
    moments = [each["time"] for each in (*events, *(line["clock"] for line in lines))]
    if moments:
        time |= {"from": _moment(min(moments)), "to": _moment(max(moments))}
    return time


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")


def _rates(trained: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Rates and shares over all logged training, each interval weighted by its duration."""
    seconds, steps, samples, step = 0.0, 0, 0.0, 0
    shares: Counter[str] = Counter()
    covered: Counter[str] = Counter()
    for line in trained:
        clock, done, step = line["clock"], line["step"] - step, line["step"]
        if "seconds_per_step" not in clock:
            continue
        lap = clock["seconds_per_step"] * done
        seconds, steps, samples = seconds + lap, steps + done, samples + clock["samples_per_second"] * lap
        for name, share in (("waiting_for_data", "data_share"), ("communication", "communication_share")):
            if share in clock:
                shares[name] += clock[share] * lap
                covered[name] += lap
    if not seconds:
        return {"rates": {}, "shares": {}}
    rates = {
        "steps_per_second": steps / seconds,
        "samples_per_second": samples / seconds,
        "seconds_per_step": seconds / steps,
    }
    return {"rates": rates, "shares": {name: shares[name] / covered[name] for name in covered}}


def _checkpoints(run: RunFiles) -> dict[str, Any]:
    """The number of checkpoints, their total size, and the newest one."""
    good = run.checkpoints
    if not (good or run.damaged or run.set_aside):
        return {}
    return {
        "count": len(good),
        **({"newest": f"step {good[-1].step}", "size": sum(each.size for each in good)} if good else {}),
        **({"damaged": len(run.damaged)} if run.damaged else {}),
        **({"set_aside": run.set_aside} if run.set_aside else {}),
    }


def _metrics(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The last, the lowest and the highest value of every metric, with their steps. The last one may be "nan", "inf" or "-inf", as in
    metrics.jsonl; the other two are finite, or None if no value is."""
    metrics: dict[str, dict[str, Any]] = {}
    for line in lines:
        for name, value in line["metrics"].items():
            if not isinstance(value, int | float) and value not in ("nan", "inf", "-inf"):
                continue
            at = {"value": value, "step": line["step"]}
            ends = metrics.setdefault(name, {"last": at, "lowest": None, "highest": None})
            ends["last"] = at
            if math.isfinite(float(value)):
                ends["lowest"] = min(ends["lowest"] or at, at, key=itemgetter("value"))
                ends["highest"] = max(ends["highest"] or at, at, key=itemgetter("value"))
    return metrics


def _incidents(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The unusual events (resumed, rejected, skipped, ...). Equal ones are combined, with their number and the steps of the first and the
    last."""
    incidents: dict[tuple[str, str], dict[str, Any]] = {}
    for event in events:
        if event["event"] in _ORDINARY:
            continue
        reason = str(event.get("reason", event.get("text", "")))
        which: dict[str, Any] = {name: event[name] for name in ("reason", "text", "path", "through") if name in event}
        place = (event["event"], reason)
        incident = incidents.setdefault(
            place, {"event": event["event"], "step": event.get("step")} | which | {"count": 0}
        )
        incident["count"] += 1
        if incident["count"] > 1:
            incident["last_step"] = event.get("step")
    return list(incidents.values())


def _text(name: str, value: Any) -> str:
    if name == "size":
        return size_text(value)
    if name in _TIMES:
        return duration(value)
    if name in ("waiting_for_data", "communication"):
        return f"{100 * value:.1f} %"
    if isinstance(value, Mapping | list):
        return json.dumps(value)
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
