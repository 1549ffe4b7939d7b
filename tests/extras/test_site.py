"""The site builds strictly, sends no request to another host, and can be read and searched in a wide and in a narrow window."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    return built(ROOT, target)


def built(root: Path, target: Path) -> Path:
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    process = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    return target


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(params=[(1400, 900), (400, 800)], ids=["wide", "narrow"])
def page(request: pytest.FixtureRequest, browser: object) -> Iterator[Page]:
    width, height = request.param
    page = browser.new_page(viewport={"width": width, "height": height})  # type: ignore[attr-defined]
    yield page
    page.close()


def test_pages_fit_their_window_and_ask_no_other_host(page: Page, address: str) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    for name in ("index", "api", "tutorial", "matrix", "examples/digits.py"):
        page.goto(f"{address}/{name}.html")
        assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"], name  # type: ignore[index]
    assert requests
    assert [url for url in requests if not url.startswith(address) and not url.startswith("data:")] == []


def test_the_search_finds_an_argument(page: Page, address: str) -> None:
    page.goto(f"{address}/index.html")
    if page.viewport_size["width"] < 1000:  # type: ignore[index]
        page.click("label[for=__search].md-header__button")
    page.fill("input.md-search__input", "gradient_accumulation_steps")
    page.wait_for_selector(".md-search-result__item", timeout=60_000)


def test_the_api_page_has_every_public_name(site: Path) -> None:
    import fabricate
    import fabricate.testing

    text = (site / "api.html").read_text(encoding="utf-8")
    names = [f"fabricate.{name}" for name in fabricate.__all__]
    names += [f"fabricate.testing.{name}" for name in fabricate.testing.__all__]
    assert [name for name in names if f'id="{name}"' not in text] == []


def test_a_broken_link_ends_the_build(tmp_path: Path) -> None:
    for name in ("docs", "examples", "plugins", "fabricate"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs" / "why.md").open("a") as file:
        file.write("\n[nowhere](nowhere.md)\n")
    with pytest.raises(AssertionError, match=r"nowhere\.md"):
        built(tmp_path, tmp_path / "site")
