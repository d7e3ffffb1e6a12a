"""The views of whole runs in a browser: curves, a run that grows, entropy, comparisons, settings, what is broken."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from comparisons import noisy
from serving import Open, serving
from view_runs import HOSTILE, branched, make_branched, make_hostile, make_sft, straight, write_step

from arpo.viewer.export import write_page
from arpo.viewer.folder import Folder

TABS = ("Overview", "Trees", "Entropy", "Compare", "Evaluations", "Config")


def plot(page: Any, title: str) -> Any:
    """The picture in the chart of that title."""
    return page.locator("figure.chart", has_text=title).locator("svg.plot").first


def said(page: Any, title: str) -> str:
    """What a screen reader is told of a chart, once it has something to say."""
    page.locator(f'svg[aria-label^="{title}: "]').first.wait_for()
    return str(plot(page, title).get_attribute("aria-label"))


def test_curves(pages: Open, known: str) -> None:
    page = pages(known + "#run=branched")
    assert said(page, "Reward") == "Reward: branched from 0.1 to 0.5. Arrow keys read single points."
    assert said(page, "Held-out accuracy").startswith("Held-out accuracy: branched from 52 % to 54 %")
    assert "branched at the start from 0.49 to 0.45; branched after a tool from 0.79 to 0.75" in said(
        page, "Entropy (nats)"
    )
    assert page.locator("figure.chart").count() == 8
    cells = page.locator("table.summary tbody tr").first.locator("th, td").all_text_contents()
    assert cells == ["branched", "arpo", "tiny", "5", "0.5", "25 %", "90 %", "54.0 %", "15 s"]
    assert page.locator("p.formats").all_text_contents() == [
        "branched, step 5: wrong formats, of 32 trajectories: no answer tag (2), no box (1)"
    ]
    plot(page, "Reward").focus()
    readout = page.locator("figure.chart", has_text="Reward").locator("output")
    for key, text in (("End", "step 5: 0.5"), ("ArrowLeft", "step 4: 0.4"), ("Home", "step 1: 0.1")):
        page.keyboard.press(key)
        assert readout.text_content() == text
    page.locator("label", has_text="x:").locator("select").select_option("calls")
    page.locator("figure.chart svg text", has_text="tool calls").first.wait_for()
    plot(page, "Reward").focus()
    page.keyboard.press("End")
    assert readout.text_content() == "tool calls 500: 0.5"
    page.goto(known + "#run=branched&x=time&smooth=1")
    page.locator("figure.chart svg text", has_text="seconds").first.wait_for()
    assert page.locator("figure.chart", has_text="Reward").locator("path.line.faint").count() == 1
    page.locator("label", has_text="add a curve").locator("select").select_option("grad_norm")
    assert said(page, "grad_norm").startswith("grad_norm: branched from 0.2 to 0.2")
    page.goto(known + "#run=branched")  # of what only some records have, all points are joined
    page.locator("label", has_text="add a curve").locator("select").select_option("test_format")
    assert said(page, "test_format").startswith("test_format: branched from 0.9 to 0.9")
    assert plot(page, "test_format").locator("path.line").get_attribute("d").count("L") == 1


def test_held_out_questions_by_kind(pages: Open, known: str, tmp_path: Path) -> None:
    page = pages(known + "#run=branched")
    page.locator("h2", has_text="branched: held-out questions").wait_for()
    rows = page.locator("table.heldout tr").all()
    assert [row.locator("th, td").all_text_contents() for row in rows] == [
        ["kind of question", "questions", "before training", "after step 5", "change, points"],
        ["hop1", "50", "75.0 % (65.0 % to 85.0 %)", "70.0 % (60.0 % to 80.0 %)", "\u22125"],
        ["sum", "50", "0.0 % (0.0 % to 10.0 %)", "100.0 % (90.0 % to 100.0 %)", "+100"],
        ["all", "100", "37.5 % (27.5 % to 47.5 %)", "85.0 % (75.0 % to 95.0 %)", "+47.5"],
    ]
    page.goto(known + "#run=hostile")  # one evaluation only, of a kind with a hostile name
    page.locator("h2", has_text="hostile: held-out questions").wait_for()
    heads = page.locator("table.heldout thead th").all_text_contents()
    assert heads == ["kind of question", "questions", "after step 1"]
    name = page.locator("table.heldout tbody th").first.text_content()
    assert name == "<img src=x onerror=window.hacked=5>\\u202e"
    assert page.locator("main img").count() == 0 and page.evaluate("window.hacked") is None
    page.goto(known + "#run=sft")
    page.locator("h2", has_text="held-out").wait_for(state="detached")
    with serving(tmp_path / "runs") as url:
        make_branched(tmp_path / "runs" / "torn")
        (tmp_path / "runs/torn/evaluations/step_000005.json").write_bytes(b"[")
        page = pages(url)
        page.locator("p.note", has_text="torn: 1 damaged evaluation left out").wait_for()
        assert "after step 2" in page.locator("table.heldout thead th").all_text_contents()


def test_runs_are_overlaid(pages: Open, known: str) -> None:
    page = pages(known + "#run=branched")
    said(page, "Reward")
    page.locator(".runs li", has_text="hostile").locator("input").check()
    page.locator('svg[aria-label*="hostile"]').first.wait_for()
    assert "branched from 0.1 to 0.5; hostile from 0.1 to 0.1" in said(page, "Reward")
    assert "run=branched&run=hostile" in page.url
    page.go_back()
    page.locator("table.summary tbody tr").nth(1).wait_for(state="detached")
    page.goto(known + "#run=sft")
    assert said(page, "Loss").startswith("Loss: sft from 1 to 0.333")


def test_a_run_that_grows(pages: Open, tmp_path: Path) -> None:
    """New numbers and steps come by themselves, into the same elements."""
    with make_branched(tmp_path / "runs" / "grows", close=False) as run_dir, serving(tmp_path / "runs") as url:
        page, trees = pages(url), pages(url + "#tab=trees")
        page.locator(".live").wait_for()
        assert "to 0.5" in said(page, "Reward")
        page.evaluate("window.before = [...document.querySelectorAll('.charts, figure.chart')]")
        trees.locator(".steps", has_text="3 steps").wait_for()
        pinned = pages(url + "#tab=trees&step=2&node=1")
        pinned.locator("h3", has_text="Node 1: model").wait_for()
        pinned.evaluate("window.before = document.querySelector('.detail')")
        write_step(run_dir, 6, [branched(), straight()])
        page.locator('svg[aria-label*="to 0.6"]').wait_for()
        assert page.evaluate("window.before.every((one) => one.isConnected)")
        page.locator(".runs", has_text="step 6").wait_for()
        trees.locator(".steps", has_text="4 steps").wait_for()
        trees.locator(".count", has_text="2 of 2 prompts").wait_for()
        pinned.locator(".steps", has_text="4 steps").wait_for()
        assert pinned.evaluate("window.before === document.querySelector('.detail')")
        run_dir.roll_back(5)
        write_step(run_dir, 6, [branched(), straight()], reward=0.9)  # as many bytes as before, in a new file
        page.locator('svg[aria-label*="to 0.9"]').wait_for()
        run_dir.roll_back(3)
        page.locator('svg[aria-label*="to 0.3"]').wait_for()
        trees.locator(".steps", has_text="1 step with").wait_for()
        write_step(run_dir, 6, [straight()])
        trees.locator(".count", has_text="1 of 1 prompt").wait_for()


def test_entropy(pages: Open, known: str) -> None:
    page = pages(known + "#tab=entropy&at=branched")
    page.locator("h2", has_text="Entropy by start of the turn").wait_for()
    heads = page.locator("main table").first.locator("tbody th").all_text_contents()
    assert heads == ["start of the reasoning", "after search", "after a failed call"]
    assert page.locator('svg[aria-label="dH after search: 4 decisions, 2 branched"]').count() == 1
    page.locator("main input").fill("5")
    page.keyboard.press("Enter")
    page.locator("main p", has_text="1 trees of 1 questions").wait_for()


def test_comparison(pages: Open, known: str) -> None:
    page = pages(known + "#tab=compare")
    page.locator("h2", has_text="two <b>algorithms</b>").wait_for()
    names = page.locator("main tbody th").all_text_contents()
    assert [name.strip() for name in names] == ["grpo (baseline)", "arpo"]
    assert "grpo from 40 %" in said(page, "Held-out accuracy")
    heads = page.locator("main thead th").all_text_contents()
    columns = [place for place, head in enumerate(heads) if head.startswith("calls to ")]
    cells = page.locator("main tbody tr", has_text="arpo").last.locator("th, td").all_text_contents()
    assert len(columns) == 3 and all(re.match(r"[\d.]+ \(|reached in ", cells[place]) for place in columns), cells
    assert page.locator("main p.note", has_text="Holm's p").count() == 1
    page.locator("label", has_text="x:").locator("select").select_option("seconds")
    page.locator("svg text", has_text="minutes").wait_for()
    plot(page, "Held-out accuracy").focus()
    page.keyboard.press("End")
    longest = max(trial.curve[-1].seconds for trial in noisy(("grpo", "arpo"), 2).trials) / 60
    read = re.match(r"minutes ([\d.]+): ", page.locator("figure.chart output").text_content())
    assert read is not None
    assert 0.8 * longest < float(read[1]) <= longest + 0.1


def test_settings_and_their_difference(pages: Open, known: str) -> None:
    page = pages(known + "#tab=config&at=sft")
    row = page.locator("table.settings tr", has_text="branching.tau")
    row.wait_for()
    assert row.locator("th, td").all_text_contents()[0] == "branching.tau"
    page.locator("main input[type=search]").fill("branching.")
    assert page.locator("table.settings tr:visible", has_text="train.").count() == 0
    page.locator("label", has_text="difference to").locator("select").select_option("branched")
    page.locator("table.settings tr", has_text="train.lr").wait_for()
    assert page.locator("table.settings tr", has_text="branching.tau").count() == 0


def test_damage_is_reported(pages: Open, tmp_path: Path) -> None:
    with serving(tmp_path / "runs") as url:
        make_branched(tmp_path / "runs" / "torn")
        (tmp_path / "runs" / "torn" / "trees" / "step_000005.jsonl.zst").write_bytes(b"nothing of the kind")
        page = pages(url + "#tab=trees&step=5", complain=False)
        page.locator(".picture .problem").wait_for()
        assert page.locator("[data-n]").count() == 1
        page.goto(url + "#tab=trees&step=2&n=99&node=99&leaf=99&chat=1&shade=odd&only=odd")
        page.locator('[data-item="n0"]').wait_for()
        page.goto(url + "#tab=odd&run=none&at=none")
        page.locator("main", has_text="Choose a run").wait_for()
        page.route("**/api/**", lambda route: route.abort())
        page.locator("#banner", has_text="does not answer").wait_for()
        assert page.locator("#tabs button").count() == len(TABS) + 1  # and the Playground
        page.unroute("**/api/**")
        page.locator("#banner").wait_for(state="hidden")


def test_an_empty_folder(pages: Open, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with serving(tmp_path / "runs") as url:
        page = pages(url)
        page.locator("main", has_text="No runs here yet").wait_for()


def test_an_exported_file_needs_no_server(pages: Open, tmp_path: Path) -> None:
    """From disk: the same views, searching too, and hostile text that cannot leave the data."""
    make_branched(tmp_path / "runs" / "branched")
    make_hostile(tmp_path / "runs" / "hostile", long=50_000)
    make_sft(tmp_path / "runs" / "sft")
    file = tmp_path / "page.html"
    assert write_page(Folder(tmp_path / "runs"), file, megabytes=50) == ""
    page = pages(file.as_uri() + "#run=branched")
    assert said(page, "Reward") == "Reward: branched from 0.1 to 0.5. Arrow keys read single points."
    page.goto(file.as_uri() + "#tab=trees&at=branched&step=2&node=1")
    page.locator("h3", has_text="Node 1: model").wait_for()
    assert page.locator(".detail .token").count() == 6
    page.locator("#search").fill("zerodivision")
    page.keyboard.press("Enter")
    page.locator(".hits button").first.click()
    page.locator("h3", has_text="Node 8: tool python").wait_for()
    page.goto(file.as_uri() + "#tab=entropy&at=branched")
    page.locator("h2", has_text="Entropy by start of the turn").wait_for()
    page.goto(file.as_uri() + "#tab=config&at=sft&other=branched")
    page.locator("table.settings tr", has_text="train.lr").wait_for()
    page.goto(file.as_uri() + "#tab=trees&at=hostile&node=1")
    page.locator("h3", has_text="Node 1: model").wait_for()
    assert page.locator(".detail pre.tokens").text_content() == HOSTILE[0]
    assert page.evaluate("window.hacked") is None
    assert page.locator("script").count() == 2
    assert write_page(Folder(tmp_path / "runs"), file, megabytes=0.01) != ""
    page = pages(file.as_uri())
    page.locator("#note", has_text="This page holds what fits").wait_for()


def test_search_in_an_exported_file_equals_the_servers(pages: Open, tmp_path: Path) -> None:
    make_branched(tmp_path / "runs" / "branched")
    path = tmp_path / "runs/branched/trees/step_000002.index.json"
    entries = json.loads(path.read_text())["trees"]
    entries[1]["length"] = 5  # damaged, so not exported
    path.write_text(json.dumps({"trees": entries}))
    write_page(Folder(tmp_path / "runs"), tmp_path / "page.html", megabytes=50)
    shown = []
    with serving(tmp_path / "runs") as url:
        for address in (url, (tmp_path / "page.html").as_uri()):
            page = pages(address + "#tab=trees&at=branched&step=2&q=UPPER+KELSO")
            page.locator(".count", has_text="with “UPPER KELSO”; not searched: 1 damaged tree").wait_for()
            shown.append([page.locator(".count").all_text_contents(), page.locator(".hits li").all_text_contents()])
    assert shown[0] == shown[1] and len(shown[0][1]) > 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_pages_do_not_scroll_sideways(pages: Open, known: str, scheme: str) -> None:
    page = pages(known, width=400, scheme=scheme)
    for tab in TABS:
        page.goto(f"{known}#tab={tab.lower()}&at=branched&step=2&leaf=0&chat=1")
        page.locator(f"#tab-{tab}[aria-selected='true']").wait_for()
        page.locator("main svg, main table, main .evaluations .empty").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, tab


def test_names_for_screen_readers(pages: Open, known: str) -> None:
    page = pages(known + "#tab=trees&at=branched&step=2&node=1")
    page.locator("h3", has_text="Node 1").wait_for()
    assert page.get_by_role("tab", selected=True).all_text_contents() == ["Trees"]
    assert page.get_by_role("tabpanel", name="Trees").count() == 1
    assert page.get_by_role("tree", name="Rollout tree: 11 nodes, 4 trajectories").count() == 1
    assert page.get_by_role("treeitem", selected=True).count() == 1
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, input, select")].filter((one) =>
            !(one.textContent.trim() || one.getAttribute("aria-label") || one.labels?.length)).length"""
    )
    assert unnamed == 0
