"""`fabricate report --html`: one file with what the run recorded, that loads nothing and runs no text of a user's."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fabricate.cli.main import main
from fabricate.cli.recorded.curves import MOST_POINTS, charts, marks, representative
from fabricate.cli.recorded.files import RunFiles, read_run
from fabricate.cli.recorded.goodput import KINDS, goodput
from fabricate.errors import size_text
from tests.support.recorded import FAILED, HOSTILE, SAVED, SKIPPED, STEPS, record


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that failed and went on, whose names are markup."""
    run_dir = tmp_path_factory.mktemp("page") / "<b>one & only"
    record(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def other(run: Path) -> Path:
    """The same with another learning rate in its plan and its lines."""
    copy = shutil.copytree(run, run.parent / "other")
    plan = json.loads((copy / "plan.json").read_text())
    plan["settings"]["learning_rate"]["value"] = [0.5]
    (copy / "plan.json").write_text(json.dumps(plan))
    return copy


class Page(HTMLParser):
    """What a browser would make of a page: elements, and texts by the element they are in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    @property
    def data(self) -> dict[str, Any]:
        """What the script draws."""
        (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', self.text)
        data: dict[str, Any] = json.loads(text)
        return data

    def chart(self, title: str) -> dict[str, Any]:
        (chart,) = [chart for chart in self.data["charts"] if chart["title"] == title]
        return chart


def report(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def page_of(*run_dirs: Path) -> Page:
    file = run_dirs[0].parent / f"{len(run_dirs)}.html"
    invocation = report(*run_dirs, "--html", file)
    assert invocation.exit_code == 0, invocation.stderr
    return Page(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return page_of(run)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_curves_are_the_lines_of_the_log(page: Page, run: Path) -> None:
    recorded = lines(run)
    curves = {curve["name"]: curve for curve in page.chart("loss")["curves"]}
    assert set(curves) == {"loss", "val_loss", "epoch_loss"}
    loss, validated = curves["loss"], curves["val_loss"]
    assert page.chart("loss")["curves"][0] == loss
    trained = [line for line in recorded if line["stage"] == "train"]
    assert loss["steps"] == [line["step"] for line in trained] == list(range(1, STEPS + 1))
    assert loss["y"] == pytest.approx([line["metrics"]["loss"] for line in trained], rel=1e-5)
    assert validated["steps"] == [line["step"] for line in recorded if line["stage"] == "validate"]
    titles = [chart["title"] for chart in page.data["charts"]]
    assert titles[:5] == ["loss", "learning rate", "gradient norm", "time of a step", "throughput"]
    assert HOSTILE in titles


def test_the_time_of_a_step_adds_up(page: Page, run: Path) -> None:
    parts = page.chart("time of a step")["curves"]
    assert [part["name"] for part in parts] == ["data", "compute"]  # one rank communicates with nobody
    trained = [line["clock"]["seconds_per_step"] for line in lines(run) if line["stage"] == "train"]
    assert [1e-3 * sum(ys) for ys in zip(*(part["y"] for part in parts), strict=True)] == pytest.approx(trained, 1e-4)


def test_resumes_skipped_updates_and_checkpoints_are_marked(page: Page) -> None:
    marks = [(mark["kind"], mark["step"]) for mark in page.data["marks"]]
    assert ("resumed", SAVED) in marks
    assert ("skipped", SKIPPED) in marks
    assert sorted(step for kind, step in marks if kind in ("saved", "best")) == [4, 8, 10]
    assert [kind for kind, _ in marks].count("best") == 1
    kinds = {element["data-mark"] for _, element in page.elements if "data-mark" in element}
    assert kinds == {"resumed", "skipped", "saved", "best"}


def test_the_page_shows_plan_checkpoints_events_and_goodput(page: Page) -> None:
    cells = page.texts["td"]
    for text in (
        "learning rate",
        "0.01",
        "SGD, never scaled",
        "step-00000004",
        "started",
        "repeated",
        "resumed",
        *KINDS,
    ):
        assert text in " ".join(cells), text
    assert f"through {FAILED - 1}" in " ".join(cells)
    assert "complete (max_steps)" in page.texts["span"]
    assert page.texts["summary"] == [f"{len(page_events(page))} events"]


def page_events(page: Page) -> list[str]:
    """Of the line that counts the events, one entry for each."""
    counts = next(text for text in page.texts["p"] if text.startswith("started "))
    return [
        kind for part in counts.split(", ") for kind, _, number in [part.partition(" ")] for _ in range(int(number))
    ]


def test_goodput_accounts_for_all_the_time(run: Path) -> None:
    times = goodput(read_run(run))
    assert set(times) == {*KINDS, "wall"}
    assert sum(times[kind] for kind in KINDS) == pytest.approx(times["wall"])
    assert all(times[kind] > 0 for kind in ("training", "evaluating", "saving", "starting", "lost", "down"))
    events = read_run(run).events
    started = [event for event in events if event["event"] == "started"]
    failed = next(event["time"] for event in events if event["event"] == "failed")
    assert times["down"] == pytest.approx(started[1]["time"] - started[1]["seconds"] - failed, abs=0.01)
    assert times["lost"] == next(event["seconds"] for event in events if event["event"] == "repeated")


def test_no_text_of_a_user_becomes_markup(page: Page, run: Path) -> None:
    assert [element for element, _ in page.elements if element in ("img", "b")] == []
    assert "<b>one & only" in page.texts["h1"]
    assert HOSTILE in page.texts["figcaption"][-1] or HOSTILE.capitalize() in page.texts["figcaption"]
    scripts = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    assert len(scripts) == 2
    policy = next(element["content"] for _, element in page.elements if element.get("http-equiv"))
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in str(policy)
    assert "unsafe-inline" not in str(policy).partition("script-src")[2].partition(";")[0]
    assert all(not name.startswith("on") for _, attributes in page.elements for name in attributes)


def test_the_page_loads_nothing(page: Page) -> None:
    assert re.findall(r"https?:|//[a-z]+\.[a-z]|@import|url\(", page.text) == []
    assert [attributes for _, attributes in page.elements if {"src", "href", "srcset"} & attributes.keys()] == []
    assert "Permission is hereby granted, free of charge" in page.text  # uPlot's licence goes where uPlot goes


def test_without_javascript_the_charts_are_drawn(page: Page) -> None:
    assert [tag for tag, _ in page.elements].count("svg") == len(page.data["charts"])
    points = [attributes["points"] for tag, attributes in page.elements if tag == "polyline"]
    assert len(str(points[0]).split()) == STEPS
    classes = [attributes.get("class") for tag, attributes in page.elements if tag == "line"]
    assert {"resumed", "skipped"} <= set(classes)


def test_several_runs_are_drawn_over_each_other_and_their_plans_compared(run: Path, other: Path) -> None:
    page = page_of(run, other)
    assert page.data["runs"] == ["<b>one & only", "other"]
    drawn = [(curve["run"], curve["name"]) for curve in page.chart("loss")["curves"]]
    assert sorted(drawn) == [(run, name) for run in range(2) for name in ("epoch_loss", "loss", "val_loss")]
    differing = re.findall(r'<tr class="differs"><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td>', page.text)
    assert differing == [("learning rate", "0.01", "0.5")]


def test_runs_of_one_name_are_told_apart_by_their_paths(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / run.name)
    assert page_of(copy, run).data["runs"] == [str(copy), str(run)]


def many(number: int) -> RunFiles:
    lines = [
        {
            "step": step,
            "epoch": 0,
            "stage": "train",
            "metrics": {"loss": float(step % 7)},
            "clock": {"time": 1.0, "seconds": step / 10},
        }
        for step in range(1, number + 1)
    ]
    lines[number // 3]["metrics"]["loss"] = 1e6
    lines[number // 2]["metrics"]["loss"] = "nan"
    return RunFiles(Path("many"), {}, [], [], lines, [])


def test_a_long_run_is_thinned_and_keeps_its_extremes() -> None:
    (chart,) = charts([many(100_000)])
    (curve,) = chart.curves
    assert curve.points == 100_000
    assert MOST_POINTS / 2 < len(curve.y) <= MOST_POINTS + 3
    assert max(y for y in curve.y if y is not None) == 1e6
    assert curve.y.count(None) == 1
    assert curve.steps == sorted(set(curve.steps))


def test_a_run_that_is_never_finite_has_no_more_marks_than_there_is_room_for() -> None:
    run = many(5000)
    for line in run.lines:
        line["metrics"]["loss"] = "nan"
    assert len(marks([run])) == 1000


def test_the_page_says_that_a_curve_is_thinned(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "long")
    with (copy / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in many(5000).lines)
    assert "5,000 points; shown are the smallest and the largest of every 3" in " ".join(page_of(copy).texts["span"])


def test_few_values_are_all_kept() -> None:
    assert representative([3.0, None, 1.0]) == [0, 1, 2]


def test_samples_of_generated_text_are_shown_the_newest_first(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "samples")
    with (copy / "samples.jsonl").open("w", encoding="utf-8") as file:
        for step, text in ((4, "the\u2028end"), (8, f"upon {HOSTILE}"), (8, "and")):
            line = {"step": step, "prompt": "Once", "text": text, "time": 1.0}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    page = page_of(copy)
    assert page.texts["pre"] == [f"prompt: Once\ntext: {text}" for text in (f"upon {HOSTILE}", "and", "the\u2028end")]
    assert page.texts["summary"][-2:] == ["step 8", "step 4"]


def clocked(run: Path, copy: Path, **figures: float) -> Page:
    """The page of a copy of `run` whose training lines have `figures` too."""
    shutil.copytree(run, copy)
    changed = lines(run)
    for number, line in enumerate(line for line in changed if line["stage"] == "train"):
        line["clock"] |= {name: value * (1 + number % 2) for name, value in figures.items()}
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    return page_of(copy)


def test_memory_is_shown_against_the_plan_of_a_device_and_of_a_process(run: Path, tmp_path: Path) -> None:
    planned = read_run(run).plan["memory_per_rank"]["value"]["total"] / 2**30
    on_device = {"peak_memory_bytes": 2.0**30, "planned_memory_bytes": 2.0**29, "process_memory_bytes": 2.0**33}
    for name, figures, held, plan in (
        ("device", on_device, [1.0, 2.0], [0.5, 1.0]),
        ("process", {"process_memory_bytes": 2.0**31}, [2.0, 4.0], [planned, planned]),
    ):
        page = clocked(run, tmp_path / name, **figures)
        curves = [curve["y"][:2] for curve in page.chart("memory")["curves"]]
        assert curves == [held, pytest.approx(plan, rel=1e-5)]
        cells = page.texts["td"]
        assert cells[cells.index("held at most") + 1] == size_text(int(held[1] * 2**30))
    assert "memory" not in [chart["title"] for chart in page_of(run).data["charts"]]


def test_tokens_and_utilisation_are_drawn_where_a_run_measured_them(run: Path, tmp_path: Path) -> None:
    page = clocked(run, tmp_path / "measured", tokens_per_second=100.0, mfu=0.25)
    assert page.chart("tokens")["curves"][0]["y"][:2] == [100.0, 200.0]
    assert page.chart("utilisation")["curves"][0]["y"][:2] == [25.0, 50.0]


def test_a_run_of_which_little_is_recorded_has_a_page(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bare"
    copy.mkdir()
    shutil.copy(run / "metrics.jsonl", copy)
    page = page_of(copy)
    assert page.chart("loss")["curves"][0]["steps"] == list(range(1, STEPS + 1))
    assert page.data["marks"] == []


def test_html_and_json_at_once_are_refused(run: Path, tmp_path: Path) -> None:
    refused = report(run, "--html", tmp_path / "page.html", "--json")
    assert (refused.exit_code, "Give only one of them" in refused.stderr) == (2, True)
