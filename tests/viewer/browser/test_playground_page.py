"""The Playground in a browser: a tree that grows token by token, other settings, stopping, hostile text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import playgrounds
import pytest
from image_runs import picture
from playgrounds import ScriptedWorkers
from serving import Open, serving

from arpo.algorithm.rollout import sample_tree
from arpo.config.algorithm import Branching
from arpo.config.schema import Rollout
from arpo.runs.trees import tree_to_json
from arpo.types import RolloutTree, ScoredTree, Task
from arpo.viewer.worker import EventStream

TAB = "#tab=playground&at=asked"


@pytest.fixture
def workers(tokenizer: Any) -> ScriptedWorkers:
    """The scripted agent."""
    return ScriptedWorkers(tokenizer)


@pytest.fixture
def url(tmp_path: Path, workers: ScriptedWorkers) -> Iterator[str]:
    """A viewer of two runs: one to be asked, and one without a checkpoint."""
    playgrounds.make_run(tmp_path / "runs" / "asked")
    playgrounds.make_run(tmp_path / "runs" / "bare", checkpoint=None)
    with serving(tmp_path / "runs", workers) as address:
        yield address


def ask(page: Any, question: str | None = None, **settings: float) -> None:
    """Ask, with these settings changed."""
    for label, value in settings.items():
        page.get_by_label(label, exact=True).fill(str(value))
    if question is not None:
        page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Ask", exact=True).click()


def wait_until_done(page: Any, number: int) -> None:
    """Until the question with this number is answered."""
    page.locator(".playground > .one h2", has_text=f"{number}: ").wait_for()
    page.locator(".primary:enabled").wait_for()


def test_a_tree_grows_token_by_token(pages: Open, url: str, workers: ScriptedWorkers) -> None:
    workers.engine.stepped = True
    page = pages(url + TAB)
    ask(page, "Where was Mira Tolven born?", M=2, N=1, tau=0)
    page.locator(".task", has_text="sampling").wait_for()
    for count in (1, 2, 3):
        workers.engine.steps.put(None)
        page.locator(".node.growing .label", has_text=f"M {count}").wait_for()
        assert page.locator(".node.model").count() == 1
        page.locator(f".detail .token:nth-child({count})").wait_for()  # the turn that grows is shown
        assert page.locator(".detail .token").count() == count
    assert page.get_by_role("button", name="Ask", exact=True).is_disabled()
    workers.engine.stepped = False
    wait_until_done(page, 1)
    assert page.locator(".node.growing").count() == 0
    assert page.locator(".end").count() == 2 and page.locator(".branch.opened").count() == 1
    page.locator('[data-item="n1"]').click()
    page.locator(".detail h3", has_text="Node 1: model").wait_for()
    assert "".join(page.locator(".detail .token").all_text_contents()) == playgrounds.SEARCH
    page.locator(".detail .token").first.hover()
    assert "H 0." in (page.locator(".detail output").first.text_content() or "")
    page.locator('[data-item="n2"]').click()
    page.locator(".detail", has_text="1 branch opened").wait_for()


def test_other_settings_are_compared_with_what_was_asked_before(pages: Open, url: str) -> None:
    page = pages(url + TAB)
    page.get_by_role("button", name="One of the run's questions").click()
    page.locator(".asking .note", has_text="right answer: 5").wait_for()
    ask(page)
    wait_until_done(page, 1)
    page.locator(".end .reward", has_text="0").first.wait_for()  # scored
    ask(page, M=6, seed=7)
    wait_until_done(page, 2)
    assert page.locator(".playground > .one .end").count() == 6
    assert page.locator(".picture.other .end").count() == 4
    rows = page.locator(".history tbody tr")
    assert [row.locator("td").nth(1).inner_text() for row in rows.all()] == ["6", "4"]
    page.get_by_role("button", name="1: What is 2 plus 3?").click()
    page.locator(".playground > .one h2", has_text="1: ").wait_for()
    assert page.locator(".playground > .one .end").count() == 4
    page.set_viewport_size({"width": 400, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_a_recorded_question_is_asked_again(pages: Open, url: str) -> None:
    page = pages(url + "#tab=trees&at=asked&step=2&n=0")
    page.get_by_role("button", name="ask again").click()
    page.locator(".asking .note", has_text="right answer: Upper Kelso").wait_for()
    assert page.get_by_label("Question").input_value() == "Where was Mira Tolven born?"
    page.get_by_label("Question").fill("Where?")
    page.locator(".asking .note", has_text="no reward").wait_for()


def test_stop_frees_the_agent(pages: Open, url: str, workers: ScriptedWorkers) -> None:
    workers.engine.stepped = True
    workers.engine.steps.put(None)
    page = pages(url + TAB)
    ask(page, "Where was Mira Tolven born?", N=1)
    page.locator(".node.growing").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.locator(".task", has_text="stopped").wait_for()
    assert page.locator(".node.growing").count() == 0 and page.locator(".node.model").count() == 1
    playgrounds.until(lambda: workers.engine.cancelled == 1)
    workers.engine.stepped = False
    ask(page)
    wait_until_done(page, 2)
    assert workers.engine.cancelled == 1 and len(workers.started) == 1


def test_hostile_text_stays_text_and_a_run_without_checkpoint_says_so(pages: Open, url: str) -> None:
    page = pages(url + TAB)
    ask(page, "<img src=x onerror=window.hacked=1>\u202e", M=4)
    wait_until_done(page, 1)
    assert "1: <img src=x onerror=window.hacked=1>\\u202e" in page.locator(".playground h2").first.inner_text()
    assert "<b> Lower</b> Kelso" in page.locator(".answers").inner_text()
    assert page.locator(".playground b, .playground img").count() == 0
    page.goto(url + "#tab=playground&at=bare")
    page.locator(".empty", has_text="no checkpoint").wait_for()
    assert page.locator(".asking").is_hidden()


def test_the_page_makes_the_tree_of_the_events(pages: Open, url: str, workers: ScriptedWorkers) -> None:
    """Node by node, wherever it places them."""
    sent: list[dict[str, Any]] = []
    agent = workers.context.agent

    async def score(tree: RolloutTree, states: object) -> ScoredTree:
        return ScoredTree(tree, tuple(map(playgrounds.is_right, tree.trajectories)))

    task, how = Task("q", "Where?", ("Upper Kelso",)), Rollout(num_trajectories=12, num_initial=4)
    stream = EventStream(agent.tokenizer, sent.append)
    settings = Branching(probe_tokens=2, tau=0.2)
    work = sample_tree(agent, task, how, settings, 1, score, observer=stream)
    with ThreadPoolExecutor(1) as thread:  # the browser has an event loop in this one
        scored = thread.submit(asyncio.run, work).result()
    tree = tree_to_json(scored)
    credits = [{"advantage": 0.5, "by_node": {str(index): 0.5 for index in range(1, 4)}, "weight": 1.0}]
    sent.append({"type": "done", "rewards": tree["rewards"], "mask": tree["mask"], "credits": credits})
    page = pages(url + TAB)
    folded = page.evaluate(
        """async (events) => {
          const live = await import("/static/live.js");
          const tree = live.emptyTree({});
          for (const event of events) live.addEvent(tree, event);
          return { ...tree, open: tree.open.size };
        }""",
        sent,
    )
    places = folded["places"]
    assert sorted(places) == list(range(len(tree["nodes"]))) != places
    for index, node in enumerate(tree["nodes"]):
        parent = None if node["parent"] is None else places[node["parent"]]
        assert folded["nodes"][places[index]] == {**page_json(node), "parent": parent}
    assert folded["leaves"] == [{**page_json(leaf), "node": places[leaf["node"]]} for leaf in tree["leaves"]]
    assert folded["rewards"] == page_json(tree["rewards"]) and folded["mask"] == tree["mask"] and folded["open"] == 0
    assert folded["credits"][0]["by_node"] == {str(places[index]): 0.5 for index in range(1, 4)}


def page_json(value: Any) -> Any:
    """As it arrives in a page: lists in place of tuples."""
    if isinstance(value, dict):
        return {key: page_json(inner) for key, inner in value.items()}
    return [page_json(inner) for inner in value] if isinstance(value, list | tuple) else value


def test_images_of_new_results_are_shown(pages: Open, tmp_path: Path, tokenizer: Any) -> None:
    playgrounds.make_seeing_run(tmp_path / "run")
    with serving(tmp_path / "run", playgrounds.seeing_workers(tokenizer, picture(30, 20, "teal"))) as address:
        page = pages(address + "#tab=playground")
        page.get_by_role("button", name="One of the run's questions").click()
        page.locator(".note", has_text="right answer: gold").wait_for()
        ask(page, M=1, N=1)
        wait_until_done(page, 1)
        page.locator(".images figcaption", has_text="image 2").wait_for()
        sizes = "() => [...document.querySelectorAll('.images img')].map(one => one.naturalWidth).join()"
        page.wait_for_function(f"({sizes})() === '120,30'")
        assert page.locator(".missing").count() == 0
