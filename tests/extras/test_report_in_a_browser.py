"""The page of `fabricate report --html` in headless Chromium: it is drawn, it reacts to input, and it sends no request to any host."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fabricate.cli.main import main
from tests.support.recorded import record

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: tests/extras/requirements.txt has it"
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
LINES = 100_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def html_file(*run_dirs: Path) -> Path:
    file = run_dirs[0].parent / f"{run_dirs[0].name}-{len(run_dirs)}.html"
    result = CliRunner().invoke(main, ["report", *map(str, run_dirs), "--html", str(file)])
    assert result.exit_code == 0, result.output
    return file


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("browser")
    record(root / "first")
    record(root / "second", learning_rate=0.03, fails=False)
    return root / "first", root / "second"


@pytest.fixture(scope="module")
def long_run(runs: tuple[Path, Path]) -> Path:
    """A run with a line for each of `LINES` steps."""
    copy = shutil.copytree(runs[0], runs[0].parent / "long")
    line = json.loads((copy / "metrics.jsonl").read_text().splitlines()[0])
    with (copy / "metrics.jsonl").open("w") as file:
        for step in range(1, LINES + 1):
            line["step"], line["clock"]["seconds"] = step, step / 100
            line["metrics"] |= {"loss": 1 + 1 / step + (step * 7919 % 1000) / 1e4, "grad_norm": step % 17 + 0.5}
            file.write(json.dumps(line) + "\n")
    return copy


class Opened:
    """A page in the browser, and what it did that it must not."""

    def __init__(
        self, browser: Any, file: Path, *, scheme: str = "light", viewport: Any = None, **options: Any
    ) -> None:
        self.context = browser.new_context(color_scheme=scheme, viewport=viewport or WIDE, offline=True, **options)
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.faults.append(message.text))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.faults.append("dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.file = file

    def evaluate(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def data(self, name: str) -> str:
        """What the page's script notes about itself."""
        value: str = self.evaluate(f"document.documentElement.dataset[{name!r}] ?? ''")
        return value

    def colours(self) -> list[int]:
        """Of every chart, how many colours its canvas has."""
        counts: list[int] = self.evaluate(
            """[...document.querySelectorAll('canvas')].map((canvas) => {
                const pixels = new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer);
                return new Set(pixels).size;
            })"""
        )
        return counts

    def shot(self, name: str) -> bytes:
        """A picture of all of it, kept in the folder $SCREENSHOTS if that is set."""
        picture: bytes = self.page.screenshot(full_page=True)
        if folder := os.environ.get("SCREENSHOTS"):
            Path(folder, f"{name}.png").write_bytes(picture)
        return picture


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    pages: list[Opened] = []

    def open_page(file: Path, **options: Any) -> Opened:
        pages.append(Opened(browser, file, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.context.close()
        assert page.faults == []
        assert page.requests == [page.file.as_uri()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", ["wide", "narrow"])
@pytest.mark.parametrize("number", [1, 2])
def test_every_chart_is_drawn_and_nothing_is_wider_than_the_screen(
    runs: tuple[Path, Path], opened: Any, width: str, scheme: str, number: int
) -> None:
    page = opened(html_file(*runs[:number]), scheme=scheme, viewport=WIDE if width == "wide" else NARROW)
    charts = page.evaluate("document.querySelectorAll('[data-chart]').length")
    assert int(page.data("drawn")) == charts > 5
    assert all(colours > 10 for colours in page.colours())
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert dark is (scheme == "dark")
    assert len(page.shot(f"{number}-{width}-{scheme}")) > 20_000


def drag(page: Any, start: float, end: float) -> None:
    """Over the first chart, from one share of its width to another."""
    box = page.page.locator(".u-over").first.bounding_box()
    page.page.mouse.move(box["x"] + start * box["width"], box["y"] + 50)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + end * box["width"], box["y"] + 60, steps=5)
    page.page.mouse.up()


def test_a_drag_zooms_every_chart_and_a_double_click_zooms_out(runs: tuple[Path, Path], opened: Any) -> None:
    page = opened(html_file(runs[0]))
    before = page.shot("before")
    drag(page, 0.25, 0.5)
    low, high = map(float, page.data("zoomed").split())
    assert (low, high) == (pytest.approx(1 + 9 / 4, abs=0.1), pytest.approx(1 + 9 / 2, abs=0.1))
    assert page.shot("zoomed") != before
    assert page.page.locator("#reset").is_enabled()
    page.page.locator(".u-over").nth(2).dblclick()
    assert page.data("zoomed") == ""
    drag(page, 0.5, 0.9)
    page.page.locator("#reset").click()
    assert page.data("zoomed") == ""


def test_what_the_reader_sets_changes_the_charts(runs: tuple[Path, Path], opened: Any) -> None:
    page = opened(html_file(runs[0]))
    shots = [page.shot("start")]
    for number, act in enumerate(
        (
            lambda: page.page.locator("[data-mark=resumed]").uncheck(),
            lambda: page.page.locator("[data-mark=saved]").check(),
            lambda: page.page.locator("#log").check(),
            lambda: page.page.locator("#axis").select_option("seconds"),
            lambda: page.page.locator(".u-legend .u-label").nth(1).click(),
            lambda: page.page.locator("#theme").click(),
        )
    ):
        act()
        page.page.mouse.move(0, 0)
        page.page.wait_for_timeout(100)
        shots.append(page.shot(f"set-{number}"))
        assert shots[-1] != shots[-2], number
    assert page.data("theme") == "dark"
    assert page.page.locator(".u-series.u-off").count() == 1, "the curve stays hidden when all is drawn anew"


def test_only_what_differs_between_plans_is_shown_on_request(runs: tuple[Path, Path], opened: Any) -> None:
    page = opened(html_file(*runs))
    rows = page.page.locator("#plan tbody tr")
    shown = [rows.nth(n).is_visible() for n in range(rows.count())]
    assert all(shown)
    page.page.locator("#differences").check()
    visible = [rows.nth(n).inner_text() for n in range(rows.count()) if rows.nth(n).is_visible()]
    assert [text.split("\t")[0] for text in visible] == ["learning rate", "run dir"]


def test_a_hundred_thousand_points_are_open_in_two_seconds(long_run: Path, opened: Any) -> None:
    file = html_file(long_run)
    assert file.stat().st_size < 3e6
    page = opened(file)
    assert int(page.data("milliseconds")) < 2000
    assert all(colours > 10 for colours in page.colours())
    assert "100,000 points; shown are" in page.page.locator("figcaption").first.inner_text()
    page.shot("long")


def test_without_javascript_every_chart_is_a_drawing(runs: tuple[Path, Path], opened: Any) -> None:
    page = opened(html_file(runs[0]), java_script_enabled=False)
    drawings = page.page.locator("figure svg")
    assert drawings.count() > 5
    assert all(drawings.nth(n).is_visible() for n in range(drawings.count()))
    assert not page.page.locator(".bar").is_visible(), "buttons that would do nothing"
    page.shot("no-javascript")
