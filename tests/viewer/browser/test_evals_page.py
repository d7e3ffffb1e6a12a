"""Evaluations in a browser: their numbers, every answer with its tree; and charts that a rare kind does not flatten."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from serving import Open, serving
from view_runs import hostile, make_branched, make_evaluation, straight

from arpo.types import Task
from arpo.viewer import evals
from arpo.viewer.export import write_page
from arpo.viewer.folder import Folder


def make_runs(root: Path) -> Path:
    """A run and an evaluation of it, with six answers: a hostile one, and five to questions of two kinds."""
    run = root / "mine"
    make_branched(run)
    tasks = [Task(f"q{n}", f"What is {n}?", (str(n),), kind="odd" if n % 2 else "even") for n in range(5)]
    answers = [straight(task, right=n % 2 == 0, count=1) for n, task in enumerate(tasks)]
    make_evaluation(run / "final", [*answers, hostile()], run / "checkpoints/step_000005/model")
    return root


def cells(page: Any, row: int) -> list[str]:
    """The texts of a row of the table by kind."""
    return list(page.locator("table.evals").last.locator("tbody tr").nth(row).locator("th, td").all_text_contents())


def test_evaluations(pages: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evals, "PAGE_ANSWERS", 3)
    with serving(make_runs(tmp_path / "runs")) as url:
        page = pages(url)
        page.locator("table.heldout").wait_for()  # both are where a user looks first
        page.locator("h2", has_text="mine: held-out questions, before and after training").wait_for()
        page.locator("table.evals button", has_text="mine/final: held-out questions").click()
        page.locator("h3", has_text="mine/final: held-out questions, by kind").wait_for()
        assert page.locator("table.evals").first.locator("td").last.text_content() == "mine, step 5"
        assert cells(page, 1)[0:5] == ["even", "100.0 % (43.9 % to 100.0 %)", "3", "3", "1"]
        assert cells(page, 2)[0:5] == ["odd", "0.0 % (0.0 % to 65.8 %)", "2", "2", "0"]
        page.locator(".count", has_text="the first 3 answers").wait_for()
        page.locator("button", has_text="more answers").click()
        page.locator(".count", has_text="6 answers").wait_for()
        page.locator(".prompts button", has_text="What is 3?").click()
        page.locator(".task h2", has_text="What is 3?").wait_for()
        assert page.locator(".chat article").count() == 2 and "no idea" in page.locator(".chat").inner_text()
        page.locator('[data-item="n1"]').click()
        page.locator("h3", has_text="Node 1: model").wait_for()
        page.locator("label", has_text="not right").locator("input").check()
        page.locator(".count", has_text=re.compile("^3 answers$")).wait_for()
        page.locator("label", has_text="kind:").locator("select").select_option("odd")
        page.locator(".count", has_text="2 answers").wait_for()
        page.locator("label", has_text="kind:").locator("select").select_option("<i>")
        page.locator(".task h2", has_text="<b>bold?</b>").wait_for()
        assert page.evaluate("window.hacked") is None
        assert page.locator("main b, main u, main i:not([class]), main img").count() == 0
        narrow = pages(url + "#tab=evaluations", width=400)
        narrow.locator(".chat").wait_for()
        assert narrow.evaluate("document.documentElement.scrollWidth") <= 400
        page = pages(url + "#tab=evaluations&answer=1", complain=False)
        page.locator(".picture .problem", has_text="no answer begins at byte 1").wait_for()


def test_evaluations_alone_and_exported(pages: Open, tmp_path: Path) -> None:
    root = make_runs(tmp_path / "runs")
    with serving(root / "mine/final") as url:
        page = pages(url)
        page.locator('#tabs [aria-selected="true"]', has_text="Evaluations").wait_for()
        page.locator(".chat").wait_for()
    write_page(Folder(root), tmp_path / "page.html", megabytes=50)
    page = pages((tmp_path / "page.html").as_uri() + "#tab=evaluations")
    page.locator("main", has_text="This exported page holds no answers of evaluations.").wait_for()
    assert cells(page, 1)[0] == "even"


def test_a_rare_kind_does_not_stretch_the_axis(pages: Open, known: str) -> None:
    page = pages(known)

    def top(*series: tuple[list[float], int]) -> float:
        given = [
            {"points": [[x, y] for x, y in enumerate(ys)], "high": max(ys), "weight": weight} for ys, weight in series
        ]
        return float(
            page.evaluate("async (given) => (await import('/static/scale.js')).robustTop(given)", given),
        )

    usual, calm = ([0.2, 0.5, 0.8], 70), ([0.1, 0.4], 20)
    assert top(usual) == 0.8
    assert top(usual, calm, ([2.3, 6.0], 10)) == 2.3  # up to three times 0.8
    assert top(usual, calm, ([5.0, 6.0], 10)) == 0.8
    assert top(calm, ([0.01], 50), ([5.0, 6.0], 30)) == 6.0  # not rare
    assert top(([0.0, 0.0], 90), ([1.0], 10)) == 0.0


def test_values_beyond_the_axis_are_marked(pages: Open, known: str) -> None:
    def spiked(route: Any) -> None:
        study = route.fetch().json()
        rare = study["turn_starts"][-1]
        rare["turns"] = 1
        for mean in rare["positions"]:
            mean["value"] = 50.0
        route.fulfill(json=study)

    page = pages(known)
    page.route("**/api/entropy*", spiked)
    page.goto(known + "#tab=entropy&at=branched")
    chart = page.locator("figure.chart").first
    chart.locator(".legend", has_text="after a failed call (▲ beyond the axis, up to 50)").wait_for()
    assert chart.locator("path.beyond").count() > 0
    ticks = [float(text) for text in chart.locator('text.tick[text-anchor="end"]').all_text_contents()[:-1]]
    assert max(ticks) < 3
    chart.locator("svg.plot").focus()
    page.keyboard.press("Home")
    assert "after a failed call 50" in (chart.locator("output").text_content() or "")
