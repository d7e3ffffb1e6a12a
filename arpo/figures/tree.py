"""The rollout tree of one task as a picture: SVG text, or PNG bytes with matplotlib.

From left to right, one row per trajectory: the prompt (grey), model turns (blue), tool results (orange, red if they
failed), as wide as their number of tokens. A branch point shows its dH, a trajectory's end its reward and advantage.

Guarantees: the same tree gives the same bytes. Untrusted text is cut and shown as text, never as markup.
"""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import NamedTuple

from arpo.figures.style import BLACK, BLUE, ORANGE, RED, figure_style, new_figure, render
from arpo.figures.text import printable
from arpo.types import Kind, Node, RolloutTree, ScoredTree

GREY = "#8A8A8A"
# Pixels.
WIDTH, ROW_HEIGHT, TOP, LEFT, RIGHT = 640, 34, 44, 12, 330  # of the longest trajectory, a row, and the margins
PROMPT_WIDTH, MIN_WIDTH, BOX_HEIGHT, GAP = 26, 5, 14, 7  # of the prompt, any box, all boxes, and between boxes
MAX_TITLE = 300  # characters of a node in the SVG's tooltips


class Box(NamedTuple):
    """A node, or a piece of a line between two nodes; in pixels from the top left."""

    x: float
    y: float
    width: float
    height: float
    color: str
    title: str = ""


class Label(NamedTuple):
    """One line of text; (x, y) is the start of its baseline."""

    x: float
    y: float
    text: str
    color: str = BLACK
    size: int = 11


class Sketch(NamedTuple):
    """Everything in a picture."""

    width: int
    height: int
    boxes: list[Box]
    labels: list[Label]


def tree_svg(scored: ScoredTree) -> str:
    """The picture as an SVG document; nodes have tooltips."""
    width, height, boxes, labels = sketch(scored)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f"<title>{escape(_shorten(scored.tree.task.question, MAX_TITLE))}</title>",
        f'<rect width="{width}" height="{height}" fill="#FFFFFF"/>',
    ]
    for x, y, w, h, color, title in boxes:
        tooltip = f"<title>{escape(title)}</title>" if title else ""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
        parts.append(f'<rect {place} fill="{color}">{tooltip}</rect>')
    for x, y, text, color, size in labels:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def tree_png(scored: ScoredTree) -> bytes:
    """The picture as a PNG file; ArpoError without matplotlib."""
    made = sketch(scored)
    with figure_style({"font.size": 8}):
        figure = new_figure(made.width / 100, made.height / 100)
        figure.set_layout_engine("none")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, made.width), ylim=(made.height, 0))
        axes.axis("off")
        for box in made.boxes:
            axes.broken_barh([(box.x, box.width)], (box.y, box.height), facecolors=box.color)
        for label in made.labels:
            axes.text(label.x, label.y, label.text, color=label.color, fontsize=label.size * 0.7)
        return render(figure)["png"]


def sketch(scored: ScoredTree) -> Sketch:
    """Lay out the tree. A node is in the row of the first trajectory through it."""
    tree, task = scored.tree, scored.tree.task
    height = TOP + ROW_HEIGHT * max(1, len(tree.leaves)) + 24
    rows, edges, widths = _rows(tree), *_columns(tree)
    boxes: list[Box] = []
    answers = " or ".join(task.answers)
    labels = [
        Label(LEFT, 17, _shorten(f"{task.id}: {task.question}", 130), size=12),
        *([Label(LEFT, 33, _shorten(f"right answer: {answers}", 140), GREY, 10)] if task.answers else []),
    ]
    for node, row, x, width in zip(tree.nodes, rows, edges, widths, strict=True):
        y = TOP + ROW_HEIGHT * (row + 1) - BOX_HEIGHT
        if node.parent is not None:
            above = ROW_HEIGHT * (row - rows[node.parent])
            corner = x - GAP / 2
            boxes.append(Box(corner if above else x - GAP, y + BOX_HEIGHT / 2 - 0.5, GAP, 1, GREY))
            if above:
                boxes.append(Box(corner, y - above + BOX_HEIGHT / 2, 1, above, GREY))
        boxes.append(Box(x, y, width, BOX_HEIGHT, _color(node), _title(node)))
        if node.decision is not None and node.decision.branches:
            labels.append(Label(x, y - 4, f"dH {node.decision.delta:+.3f}, +{node.decision.branches}", size=9))
    end = max(x + width for x, width in zip(edges, widths, strict=True))
    ended: Counter[int] = Counter()  # several trajectories may end at one node; each has its own row
    for number, leaf in enumerate(tree.leaves):
        row = rows[leaf.node] + ended[leaf.node]
        ended[leaf.node] += 1
        text = f"trajectory {number + 1}: {leaf.stop_reason}"
        text += f", reward {scored.rewards[number].total:.2f}" if scored.rewards else ""
        text += f", advantage {scored.credits[number].advantage:+.2f}" if scored.credits else ""
        text += "" if scored.mask[number] else ", masked"
        labels.append(Label(end + 10, TOP + ROW_HEIGHT * (row + 1) - 3, text))
    for number, (name, color) in enumerate((("prompt", GREY), ("model", BLUE), ("tool", ORANGE), ("failed tool", RED))):
        boxes.append(Box(LEFT + 90 * number, height - 16, 10, 10, color))
        labels.append(Label(LEFT + 14 + 90 * number, height - 7, name, size=10))
    return Sketch(round(end + RIGHT), height, boxes, labels)


def _rows(tree: RolloutTree) -> list[int]:
    """The row of each node: that of its first trajectory, in depth-first order."""
    children: dict[int, list[int]] = {}
    for index, node in enumerate(tree.nodes):
        if node.parent is not None:
            children.setdefault(node.parent, []).append(index)
    ends = Counter(leaf.node for leaf in tree.leaves)
    rows, free, waiting = [0] * len(tree.nodes), 0, [0]
    while waiting:
        index = waiting.pop()
        rows[index] = free
        free += ends[index]
        waiting += reversed(children.get(index, []))
    return rows


def _columns(tree: RolloutTree) -> tuple[list[float], list[float]]:
    """The left edge and the width of every node."""
    tokens = [0] * len(tree.nodes)  # from the prompt to the end of the node
    for index, node in enumerate(tree.nodes[1:], 1):
        tokens[index] = tokens[node.parent or 0] + len(node.tokens)
    scale = WIDTH / max(1, *tokens)
    widths = [PROMPT_WIDTH, *(max(MIN_WIDTH, len(node.tokens) * scale) for node in tree.nodes[1:])]
    edges = [float(LEFT)] * len(tree.nodes)
    for index, node in enumerate(tree.nodes[1:], 1):
        edges[index] = edges[node.parent or 0] + widths[node.parent or 0] + GAP
    return edges, widths


def _color(node: Node) -> str:
    if node.result is not None:
        return RED if node.result.fault is not None else ORANGE
    return BLUE if node.kind is Kind.MODEL else GREY


def _title(node: Node) -> str:
    tool = f"{node.call.name}, " if node.call is not None else ""
    return _shorten(f"{node.kind}, {tool}{len(node.tokens)} tokens: {node.text}", MAX_TITLE)


def _shorten(text: str, length: int) -> str:
    """Untrusted text as one line of at most this length."""
    line = printable(" ".join(text[: 4 * length].split()))
    return line if len(line) <= length else line[: length - 4] + " ..."
