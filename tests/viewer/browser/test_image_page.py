"""Images of trees in a browser: small, in full size, with the box of a crop, and in an exported page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from image_runs import images_in, make_zoomed, zoomed
from serving import Open, serving

from arpo.viewer.export import write_page
from arpo.viewer.folder import Folder

TREE = "#tab=trees&step=1&node="
BY = "\u00d7"
LOADED = "one => one.complete && one.naturalWidth"


def captions(page: Any) -> list[str]:
    """What is said of the images shown."""
    page.locator(".detail .images figcaption").first.wait_for()
    return list(page.locator(".detail .images figcaption").all_inner_texts())


def check_page(open_page: Any, url: str) -> None:
    """The images of each node of the tree."""
    page = open_page(url + TREE + "0")
    assert captions(page) == [f"image 1 · 120 {BY} 80"]
    page.wait_for_function(f"({LOADED})(document.querySelector('.images img')) === 120")
    page.locator(".thumb").click()
    dialog = page.locator("dialog.full")
    dialog.locator("img").wait_for()
    assert dialog.locator("img").get_attribute("alt") == "image 1, 120 by 80 pixels"
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")

    page = open_page(url + TREE + "2")
    assert captions(page) == [f"where image 1 was cropped · 120 {BY} 80", f"image 2: cropped from image 1 · 60 {BY} 40"]
    box = page.locator(".images rect.crop")
    assert [box.get_attribute(name) for name in ("x", "y", "width", "height")] == ["60", "40", "60", "40"]

    page = open_page(url + TREE + "4")
    assert captions(page) == [f"image 3: image 2 turned by 90° · 40 {BY} 60"]

    page = open_page(url + "#tab=trees&step=1&leaf=0&chat=1")
    assert len(captions(page)) == 4  # of the question, the crop with its place, the turned one
    assert page.locator(".turn h4").first.inner_text() == "Prompt node 0"


def test_images_of_prompts_and_results(pages: Open, tmp_path: Path) -> None:
    make_zoomed(tmp_path / "run")
    with serving(tmp_path / "run") as url:
        check_page(pages, url)
    write_page(Folder(tmp_path / "run"), tmp_path / "page.html", 5)
    check_page(pages, (tmp_path / "page.html").as_uri())


def test_boxes_are_in_the_runs_coordinates_and_lost_images_are_said(pages: Open, tmp_path: Path) -> None:
    make_zoomed(tmp_path / "run", "environment.name=images", 'environment.settings={coordinates="pixel"}')
    os.remove(tmp_path / "run" / "images" / f"{images_in(zoomed())[1].sha256}.png")
    with serving(tmp_path / "run") as url:
        page = pages(url + TREE + "2", complain=False)
        assert len(captions(page)) == 2
        box = page.locator(".images rect.crop")
        assert [box.get_attribute(name) for name in ("x", "y", "width", "height")] == ["0.5", "0.5", "0.5", "0.5"]
        page.locator(".missing").wait_for()
        assert page.locator(".missing p").inner_text() == "not stored with this run"
