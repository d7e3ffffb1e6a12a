"""The trees of a run in a browser: the picture, what is said of a node, filters, search, keys, hostile text."""

from __future__ import annotations

import re
from typing import Any

from serving import Open
from view_runs import BRANCHED_CREDITS, HOSTILE, branched_tree, hostile, words

TREE = "#tab=trees&at=branched&step=2"
MINUS = "\u2212"
TOP = 0.1 * 6  # of the 24 entropies in the branched tree 99 % are not above this


def chosen(page: Any, item: str) -> Any:
    """A node or an end in the picture, once it is there."""
    found = page.locator(f'[data-item="{item}"]')
    found.wait_for()
    return found


def open_item(page: Any, item: str) -> None:
    """Click it, and wait until it is the chosen one."""
    chosen(page, item).click()
    page.locator(f'[data-item="{item}"][aria-selected="true"]').wait_for()


def classes(page: Any) -> list[str]:
    """The shades of the tokens shown."""
    return [found.replace("token", "").strip() for found in _all(page.locator(".detail .token"), "class")]


def _all(locator: Any, attribute: str) -> list[str]:
    return [one.get_attribute(attribute) or "" for one in locator.all()]


def shade(value: float, top: float) -> str:
    """The class that a value must get: nine levels, and none for what is near nothing."""
    level = min(9, int(abs(value) / top * 9 + 0.5))
    return "" if level == 0 else f"{'low' if value < 0 else 'high'}{level}"


def test_a_tree_is_drawn(pages: Open, known: str) -> None:
    page, tree = pages(known + TREE), branched_tree()
    chosen(page, "n0")
    items = page.locator('[role="treeitem"]')
    assert items.count() == len(tree.nodes) + len(tree.leaves)
    for index, node in enumerate(tree.nodes):
        item = chosen(page, f"n{index}")
        assert str(node.kind) in (item.get_attribute("class") or "").split()
        assert item.get_attribute("aria-level") == str(len(tree.prefix(index)))
    at = {index: chosen(page, f"n{index}").locator(".shape").bounding_box() for index in range(len(tree.nodes))}
    for index, node in enumerate(tree.nodes[1:], 1):
        assert at[index]["x"] > at[node.parent]["x"] + at[node.parent]["width"]
    assert at[1]["width"] > at[7]["width"]  # six tokens, and two
    assert chosen(page, "n2").get_attribute("aria-label") == (
        "node 2, tool, search, 7 tokens, H 0.9, dH +0.12, P 0.62: 2 branches opened (P > tau)"
    )
    assert chosen(page, "n2").locator(".branch.opened").count() == 1
    assert chosen(page, "n5").locator(".branch:not(.opened)").count() == 1
    assert "failed (model)" in (chosen(page, "n8").get_attribute("aria-label") or "")
    assert chosen(page, "l0").get_attribute("aria-label") == (
        "trajectory 1: ended by answer, reward 1.1 (correct 1, format 1, accuracy 1, bonus 0.1), advantage +1.5"
    )
    assert (chosen(page, "l3").get_attribute("aria-label") or "").endswith(
        f"advantage {MINUS}0.9, left out of training"
    )
    note = "wrong format: no \\u202e box"  # escaped
    assert (chosen(page, "l2").get_attribute("aria-label") or "").endswith(f"; {note}")
    assert note in page.locator("table.trajectories").inner_text()
    assert [chosen(page, f"l{n}").locator("text").first.text_content() for n in range(4)] == ["✓", "✗", "✗", "✗"]


def test_a_node_shows_its_text_token_by_token(pages: Open, known: str) -> None:
    page, tree = pages(known + TREE), branched_tree()
    open_item(page, "n1")
    node = tree.nodes[1]
    assert page.locator(".detail .token").all_text_contents() == words(node.text)
    assert classes(page) == [shade(value, TOP) for value in node.entropies]
    page.locator(".detail .token").nth(2).hover()
    assert page.locator(".detail output").first.text_content() == f"token 3 of 6, id 12, H 0.3, log p {MINUS}0.15"
    page.locator(".detail select").select_option("logprob")
    page.locator(".shades", has_text=f"{MINUS}log p").wait_for()
    assert classes(page) == [shade(-value, 0.05 * 6) for value in node.logprobs]
    page.locator(".detail select").select_option("credit")
    page.locator(".shades", has_text="advantage").wait_for()
    assert classes(page) == [shade(0.2, 1.5)] * 6
    open_item(page, "n9")
    assert classes(page) == [shade(BRANCHED_CREDITS[2].by_node[9], 1.5)] * 4
    open_item(page, "n10")  # its only trajectory is left out of training
    assert classes(page) == []
    open_item(page, "n9")
    page.locator("summary", has_text="Tokens as a table").click()
    rows = page.locator(".more tbody tr")
    rows.nth(3).wait_for()
    assert rows.nth(1).locator("td").all_text_contents() == ["2", " do", "11", "0.2", f"{MINUS}0.1"]


def test_a_tool_call_is_explained(pages: Open, known: str) -> None:
    page = pages(known + TREE)
    open_item(page, "n5")
    said = page.locator(".detail").inner_text()
    for part in ("search\nquery: upper kelso", "Upper Kelso is a town.", "hit:", "250 ms", f"{MINUS}0.02", "P <= tau"):
        assert part in said
    open_item(page, "n8")
    said = page.locator(".detail").inner_text()
    assert "failed: the model's mistake" in said
    assert "ZeroDivisionError" in said
    page.goto(known + "#tab=trees&at=branched&step=2&n=3&node=2")
    page.locator(".detail", has_text="Not usable: Error: the call is empty.").wait_for()
    assert "0, nothing was run" in page.locator(".detail").inner_text()


def test_a_trajectory_reads_as_a_conversation(pages: Open, known: str) -> None:
    page, tree = pages(known + TREE), branched_tree()
    open_item(page, "l0")
    page.locator(".chat").wait_for()
    kinds = [found.split()[-1] for found in _all(page.locator(".chat article"), "class")]
    assert kinds == ["prompt", "model", "tool", "model", "tool", "model"]
    assert page.locator(".chat .tokens").all_text_contents() == [tree.nodes[n].text for n in (1, 3, 6)]
    on = [int((found or "n")[1:]) for found in _all(page.locator(".node.on"), "data-item")]
    assert on == [0, 1, 2, 3, 5, 6]
    page.locator(".chat button", has_text="node 3").click()
    page.locator("h3", has_text="Node 3: model").wait_for()
    page.go_back()
    page.locator("h3", has_text="Trajectory 1 as a conversation").wait_for()


def test_filters(pages: Open, known: str) -> None:
    page = pages(known + TREE)
    page.locator("[data-n]").first.wait_for()

    def check(filters: tuple[str, ...], wanted: list[str]) -> None:
        page.goto(known + TREE + "".join(f"&only={name}" for name in filters))
        page.wait_for_function(
            "wanted => [...document.querySelectorAll('[data-n]')].map((one) => one.dataset.n).join() === wanted",
            arg=",".join(wanted),
        )
        page.locator(".count", has_text=f"{len(wanted)} of 4 prompts").wait_for()
        assert page.locator(".filters input:checked").count() == len(filters)

    check((), ["0", "1", "2", "3"])
    check(("failed",), ["2", "3"])
    check(("informative",), ["0"])
    check(("errors",), ["0", "3"])
    check(("branched",), ["0"])
    check(("errors", "failed"), ["3"])
    check(("informative", "failed"), [])
    page.locator(".filters label", has_text="informative groups").click()
    page.locator(".count", has_text="2 of 4 prompts").wait_for()
    assert "only=failed" in page.url
    assert "only=informative" not in page.url


def test_search(pages: Open, known: str) -> None:
    page = pages(known + TREE)
    chosen(page, "n0").focus()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("ZERODIVISION")
    page.keyboard.press("Enter")
    page.locator(".hits mark", has_text="ZeroDivision").wait_for()
    page.locator(".hits button").first.click()
    page.locator("h3", has_text="Node 8: tool python").wait_for()
    page.locator("#search").fill("nowhere at all")
    page.keyboard.press("Enter")
    page.locator(".count", has_text="0 places with").wait_for()


def test_trees_without_char_offsets(pages: Open, known: str) -> None:
    page = pages(known + "#tab=trees&at=branched&step=4&n=0&node=1")
    page.locator(".detail .note", has_text="has no character offsets").wait_for()
    assert page.locator(".detail .token").count() == 0
    assert page.locator(".detail pre.tokens").text_content() == branched_tree().nodes[1].text


def test_keys(pages: Open, known: str) -> None:
    page = pages(known + TREE)
    chosen(page, "n0").focus()

    def at() -> str:
        return str(page.evaluate("document.activeElement.dataset.item"))

    keys = {
        "ArrowRight": "n1",
        "ArrowDown": "n7",
        "ArrowUp": "n1",
        "ArrowRight ArrowRight": "n3",
        "ArrowDown ": "n4",
        "ArrowRight  ": "l1",
        "ArrowUp  ": "l0",
        "ArrowLeft": "n6",
    }
    for pressed, where in keys.items():
        for key in pressed.split():
            page.keyboard.press(key)
        assert at() == where, pressed
    page.keyboard.press("Enter")
    page.locator("h3", has_text="Node 6: model").wait_for()
    assert at() == "n6"
    page.keyboard.press("Home")
    assert at() == "n0"
    page.keyboard.press("j")
    page.locator('[data-n="1"][aria-current]').wait_for()
    page.keyboard.press("]")
    page.locator(".steps output", has_text="4").wait_for()
    page.keyboard.press("?")
    page.locator("dialog[open] h2", has_text="Keys").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("6")
    page.locator('#tabs [aria-selected="true"]', has_text="Config").wait_for()


def escaped(text: str) -> str:
    """As a terminal would show it."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def test_hostile_text_is_text(pages: Open, known: str) -> None:
    page = pages(known + "#tab=trees&at=hostile&step=1&n=0")
    tree = hostile(1_000_000).tree
    for place, text in enumerate(HOSTILE):
        open_item(page, f"n{2 * place + 1}")
        page.locator("h3", has_text=f"Node {2 * place + 1}: model").wait_for()
        assert page.locator(".detail pre.tokens").text_content() == escaped(text)
        open_item(page, f"n{2 * place + 2}")
        page.locator("h3", has_text=f"Node {2 * place + 2}: tool").wait_for()
        assert page.locator(".detail pre.result").text_content() == escaped(text)
        assert page.locator(".detail pre.call").text_content() == escaped(f"<u>tool</u>\n<k>: {text}")
    assert page.locator(".task h2").text_content() == escaped(tree.task.question)
    open_item(page, f"n{len(tree.nodes) - 1}")
    shown = page.locator(".detail pre.tokens")
    assert len(shown.text_content()) < 21_000
    shown.locator("button", has_text=re.compile("show all 1,000,02. characters")).click()
    assert shown.text_content() == tree.nodes[-1].text
    for tab in ("overview", "entropy", "config"):
        page.goto(known + f"#tab={tab}&at=hostile&run=hostile&more=tool.<b>x</b>.calls")
        page.locator(f"#tab-{tab.title()}[aria-selected='true']").wait_for()
        page.wait_for_load_state("networkidle")
    assert page.evaluate("window.hacked") is None
    assert page.locator("script").count() == 1
    assert page.locator("main b, main u, main i:not([class]), main img").count() == 0


def test_rewards_stay_in_sight_beside_a_wide_tree(pages: Open, known: str) -> None:
    page = pages(known + TREE, width=500)
    end, box = page.locator(".end").first, page.locator(".picture")
    end.wait_for()

    def right_edges() -> tuple[float, float]:
        inner, outer = end.bounding_box(), box.bounding_box()
        return inner["x"] + inner["width"], outer["x"] + outer["width"]

    assert page.evaluate("() => { const b = document.querySelector('.picture'); return b.scrollWidth > b.clientWidth }")
    for scrolled in (0, 60, 10_000):
        box.evaluate("(node, left) => { node.scrollLeft = left }", scrolled)
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        inner, outer = right_edges()
        assert inner <= outer + 1 and inner > outer - 60
