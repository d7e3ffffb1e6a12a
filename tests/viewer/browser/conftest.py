"""A browser, and a server on known runs; skipped unless asked for (`make test-browser`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Open, serving
from view_runs import make_folder

NO_BROWSER = (
    "No browser could be started, so no page was tested. Install one and repeat `make test-browser`:\n"
    "  Debian:     apt-get install chromium\n"
    "  elsewhere:  .venv/bin/playwright install --with-deps chromium   (a download; asks for the root password)"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Browsers are not everywhere."""
    if not os.environ.get("ARPO_TEST_BROWSER"):
        for item in items:
            if "browser" in Path(item.fspath).parts:
                item.add_marker(pytest.mark.skip(reason="needs a browser: make test-browser"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One browser for all tests: the system's chromium, or Playwright's own."""
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        try:
            made = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        except Error as error:
            pytest.exit(f"{error.message}\n\n{NO_BROWSER}", returncode=1)
        yield made
        made.close()


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a viewer on all known runs, which no test changes."""
    with serving(make_folder(tmp_path_factory.mktemp("known") / "runs")) as url:
        yield url


@pytest.fixture
def pages(browser: Any) -> Iterator[Open]:
    """Opens addresses, each in a new page; a page that complains, or asks another host, fails the test."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_page(url: str, width: int = 1280, scheme: str = "light", complain: bool = True) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(60_000)  # only what hangs gets there
        contexts.append(context)
        page = context.new_page()
        if complain:
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        home = url.split("#")[0].rpartition("/")[0]
        page.on("request", lambda asked: _at_home(asked.url, home, complaints))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def _at_home(url: str, home: str, complaints: list[str]) -> None:
    if not url.startswith((home, "data:")):
        complaints.append(f"asked {url}")
