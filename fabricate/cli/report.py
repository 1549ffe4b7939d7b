"""`fabricate report`: what the files of a run directory say about the run, in a page of text or as JSON.

Owns how plan.json, metrics.jsonl, events.jsonl and the checkpoints are read and summed up. What a run did not record is left
out. Must not know how they are written; imports no torch.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from fabricate.cli.tables import print_table
from fabricate.errors import CheckpointError, FabricateError, size_text

_SHOWN_SETTINGS = ("strategy", "world_size", "precision", "global_batch_size", "total_steps")
_ORDINARY = ("saved", "loss_weight", "observed", "started", "ended")  # what every run records; the rest is worth a line


@click.command()
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def report(run_dir: Path, as_json: bool) -> None:
    """Sum up the run in RUN_DIR: steps, time, rates, where the time went, metrics with their best, checkpoints, incidents.

    Reads plan.json, metrics.jsonl, events.jsonl and the manifests of the checkpoints, also while the run is at work.

    \b
    Examples:
      fabricate report runs/first
      fabricate report runs/first --json
    """
    sums = summary(run_dir)
    if as_json:
        click.echo(json.dumps(sums, indent=1))
        return
    click.echo(str(run_dir))
    for topic in ("plan", "progress", "time", "rates", "shares", "checkpoints"):
        if sums[topic]:
            parts = [f"{name.replace('_', ' ')} {_text(name, value)}" for name, value in sums[topic].items()]
            click.echo(f"  {topic:<11} {', '.join(parts)}")
    for incident in sums["incidents"]:
        details = ", ".join(f"{name} {value}" for name, value in incident.items() if name not in ("event", "count"))
        times = f" x {incident['count']}" if incident["count"] > 1 else ""
        click.echo(f"  {incident['event']:<11} {details}{times}")
    rows = []
    for name, metric in sums["metrics"].items():
        lowest, highest = (f"{metric[end]['value']:.6g} at step {metric[end]['step']}" for end in ("lowest", "highest"))
        rows.append((name, f"{metric['last']['value']:.6g}", lowest, highest))
    if rows:
        print_table(("metric", "last", "lowest", "highest"), rows)


def summary(run_dir: Path) -> dict[str, Any]:
    """What the files in `run_dir` hold, as JSON values. Raises FabricateError where it is not a run, or a file is damaged."""
    plan = _plan(run_dir / "plan.json")
    lines, events = (_lines(run_dir / name) for name in ("metrics.jsonl", "events.jsonl"))
    checkpoints = _checkpoints(run_dir)
    if not (plan or lines or events or checkpoints):
        raise FabricateError(
            f"{str(run_dir)!r} holds no run: no plan.json, metrics.jsonl, events.jsonl or checkpoints; give a run_dir"
        )
    counters = checkpoints.pop("progress", {})
    return {
        "run_dir": str(run_dir),
        "plan": {name: plan[name] for name in _SHOWN_SETTINGS if plan.get(name) is not None},
        "progress": _progress(lines, counters),
        "time": _time(lines, events, counters),
        **_rates([line for line in lines if line["stage"] == "train"]),
        "checkpoints": checkpoints,
        "metrics": _metrics(lines),
        "incidents": _incidents(events),
    }


def _progress(lines: list[dict[str, Any]], counters: Mapping[str, Any]) -> dict[str, Any]:
    """How far the run came: the last step that was logged or saved, and the counters of the newest checkpoint."""
    logged = int(lines[-1].get("step", 0)) if lines else 0
    shown = {name: counters[name] for name in ("epoch", "samples", "tokens", "skipped") if name in counters}
    return {"steps": max(logged, int(counters.get("step", 0))), **shown}


def _time(lines: list[dict[str, Any]], events: list[dict[str, Any]], counters: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds in `fit` and in saves, and the moments of the first and the last record."""
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


def _plan(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        return {name: setting["value"] for name, setting in json.loads(file.read_text())["settings"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise FabricateError(f"{file} is not a plan that fabricate wrote ({type(exc).__name__}: {exc})") from exc


def _lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a .jsonl; one without an end was being written when the run was killed, or is just now."""
    if not file.exists():
        return []
    lines = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if line.endswith("\n"):
            try:
                value = json.loads(line)
                if file.name == "metrics.jsonl":
                    value["step"], value["stage"], value["metrics"], value["clock"]["time"]
                else:
                    value["event"], value["time"]
            except (ValueError, KeyError, TypeError) as exc:
                raise FabricateError(
                    f"{file}, line {number} is not what fabricate writes: {line.strip()[:80]!r}"
                ) from exc
            lines.append(value)
    return lines


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")


def _rates(trained: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Rates and shares over all training that was logged, each interval weighted by how long it took."""
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


def _checkpoints(run_dir: Path) -> dict[str, Any]:
    """Their number, sizes and newest; "progress": the counters of the newest good one. Only manifests are read."""
    from fabricate.checkpoint.format.directory import Reader, committed

    root = run_dir / "checkpoints"
    steps, size, damaged, progress = [], 0, 0, {}
    for path in committed(root):
        try:
            with Reader(path) as reader:
                manifest = reader.manifest
        except CheckpointError:
            damaged += 1
            continue
        steps.append(manifest.step)
        size += sum(file.size for file in manifest.files)
        progress = dict(manifest.progress)
    aside = len(list(root.glob(".bad-*")))
    if not steps and not damaged and not aside:
        return {}
    return {
        "count": len(steps),
        **({"newest": f"step {steps[-1]}", "size": size} if steps else {}),
        **({"damaged": damaged} if damaged else {}),
        **({"set_aside": aside} if aside else {}),
        "progress": progress,
    }


def _metrics(lines: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Of every metric the last, the lowest and the highest value with its step. Values that are not finite are left out."""
    metrics: dict[str, dict[str, dict[str, float]]] = {}
    for line in lines:
        for name, value in line["metrics"].items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            at = {"value": value, "step": line["step"]}
            ends = metrics.setdefault(name, {"last": at, "lowest": at, "highest": at})
            ends["last"] = at
            ends["lowest"] = at if value < ends["lowest"]["value"] else ends["lowest"]
            ends["highest"] = at if value > ends["highest"]["value"] else ends["highest"]
    return metrics


def _incidents(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was out of the ordinary: resumed, rejected, skipped, ...; alike ones once, with the steps of the first and last."""
    incidents: dict[tuple[str, str], dict[str, Any]] = {}
    for event in events:
        if event["event"] in _ORDINARY:
            continue
        reason = str(event.get("reason", event.get("text", "")))
        which: dict[str, Any] = {name: event[name] for name in ("reason", "text", "path") if name in event}
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
    if name in ("in_fit", "saving"):
        return f"{value:.1f} s" if value < 60 else f"{value / 60:.1f} min" if value < 3600 else f"{value / 3600:.2f} h"
    if name in ("waiting_for_data", "communication"):
        return f"{100 * value:.1f} %"
    if isinstance(value, Mapping | list):
        return json.dumps(value)
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
