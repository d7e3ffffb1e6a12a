"""One question's rollout tree as a picture: SVG text, or PNG bytes where matplotlib is installed.

Left to right, a path a row: the prompt (grey), what the model wrote (blue), tool results (orange, red if they failed),
as wide as they have tokens. A branch point has its change of entropy, a path's end its reward and advantage.

Promises: pure functions of the tree; text comes from models and tools, so it is cut, and shown as text, never as
markup; the same tree gives the same bytes.
Does not cover: what the nodes say beyond the first words, which an SVG shows where the pointer rests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from arpo.figures.style import BLACK, BLUE, ORANGE, RED, figure_style, new_figure, render
from arpo.figures.text import printable
from arpo.types import Kind, Node, RolloutTree, ScoredTree

GREY = "#8A8A8A"
WIDTH, ROW, HEAD, LEFT = 640, 34, 44, 12  # pixels: of the longest path, of a row, above the first, before it
PROMPT, GAP, LEAST, TALL = 26, 7, 5, 14  # of the prompt, between boxes, of the smallest box, of all boxes
ENDS = 330  # for what stands behind a path
CUT = 300  # characters of a node that an SVG tells


@dataclass(frozen=True, slots=True)
class Box:
    """A node, or a piece of a line between two, in pixels from the top left."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """One line of text whose baseline starts here."""

    x: float
    y: float
    text: str
    colour: str = BLACK
    size: int = 11


@dataclass(frozen=True, slots=True)
class Sketch:
    """All that is in a picture."""

    width: int
    height: int
    boxes: tuple[Box, ...]
    labels: tuple[Label, ...]


def tree_svg(scored: ScoredTree) -> str:
    """The picture as an SVG document."""
    made = sketch(scored)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{made.width}" height="{made.height}" '
        f'viewBox="0 0 {made.width} {made.height}" font-family="sans-serif">',
        f"<title>{escape(_line(scored.tree.task.question, CUT))}</title>",
        f'<rect width="{made.width}" height="{made.height}" fill="#FFFFFF"/>',
    ]
    for box in made.boxes:
        told = f"<title>{escape(box.title)}</title>" if box.title else ""
        parts.append(
            f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
            f'fill="{box.colour}">{told}</rect>'
        )
    for label in made.labels:
        parts.append(
            f'<text x="{label.x:.1f}" y="{label.y:.1f}" font-size="{label.size}" fill="{label.colour}">'
            f"{escape(label.text)}</text>"
        )
    return "\n".join([*parts, "</svg>\n"])


def tree_png(scored: ScoredTree) -> bytes:
    """The picture as a PNG file; ArpoError where matplotlib is missing."""
    made = sketch(scored)
    with figure_style({"font.size": 8}):
        picture = new_figure(made.width / 100, made.height / 100)
        picture.set_layout_engine("none")
        axes = picture.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, made.width), ylim=(made.height, 0))
        axes.axis("off")
        for box in made.boxes:
            axes.broken_barh([(box.x, box.width)], (box.y, box.height), facecolors=box.colour)
        for label in made.labels:
            axes.text(label.x, label.y, label.text, color=label.colour, fontsize=label.size * 0.7)
        return render(picture)["png"]


def sketch(scored: ScoredTree) -> Sketch:
    """Where everything is. A node stands in the first row of the paths through it."""
    tree = scored.tree
    rows, height = _rows(tree), HEAD + ROW * max(1, len(tree.leaves)) + 24
    x_of, width_of = _places(tree)
    boxes: list[Box] = []
    labels = [
        Label(LEFT, 17, _line(f"{tree.task.id}: {tree.task.question}", 130), size=12),
        Label(LEFT, 33, _line(f"right answer: {' or '.join(tree.task.answers)}", 140), GREY, 10),
    ]
    for index, node in enumerate(tree.nodes):
        x, y = x_of[index], HEAD + ROW * rows[index] + ROW - TALL
        if node.parent is not None:
            boxes += _line_from_parent(x, y, HEAD + ROW * rows[node.parent] + ROW - TALL)
        boxes.append(Box(x, y, width_of[index], TALL, _colour(node), _told(node)))
        if node.decision is not None and node.decision.branches:
            labels.append(Label(x, y - 4, f"dH {node.decision.delta:+.3f}, +{node.decision.branches}", size=9))
    ends = zip(tree.leaves, scored.rewards, scored.credits, scored.mask, strict=True)
    last = max(map(sum, zip(x_of, width_of, strict=True)))
    shown: dict[int, int] = {}  # two cut-off paths may end at one node: the second has a row below
    for number, (leaf, reward, credit, used) in enumerate(ends, 1):
        row = rows[leaf.node] + shown.get(leaf.node, 0)
        shown[leaf.node] = shown.get(leaf.node, 0) + 1
        left_out = "" if used else ", left out"
        said = f"trajectory {number}: {leaf.stop_reason}, reward {reward.total:.2f}, advantage {credit.advantage:+.2f}{left_out}"
        labels.append(Label(last + 10, HEAD + ROW * row + ROW - 3, said))
    key = [("prompt", GREY), ("model", BLUE), ("tool", ORANGE), ("failed tool", RED)]
    for place, (name, colour) in enumerate(key):
        boxes.append(Box(LEFT + 90 * place, height - 16, 10, 10, colour))
        labels.append(Label(LEFT + 14 + 90 * place, height - 7, name, size=10))
    return Sketch(round(last + ENDS), height, tuple(boxes), tuple(labels))


def _rows(tree: RolloutTree) -> list[int]:
    """Each node's row: that of its first path, where paths are in depth-first order."""
    children: dict[int, list[int]] = {}
    for index, node in enumerate(tree.nodes):
        if node.parent is not None:
            children.setdefault(node.parent, []).append(index)
    ends: dict[int, int] = {}
    for leaf in tree.leaves:
        ends[leaf.node] = ends.get(leaf.node, 0) + 1
    rows, free, waiting = [0] * len(tree.nodes), 0, [0]
    while waiting:
        index = waiting.pop()
        rows[index] = free
        free += ends.get(index, 0)
        waiting += reversed(children.get(index, []))
    return rows


def _places(tree: RolloutTree) -> tuple[list[float], list[float]]:
    """Left edge and width of every node."""
    before = [0] * len(tree.nodes)
    for index, node in enumerate(tree.nodes[1:], 1):
        before[index] = before[node.parent or 0] + len(node.tokens)
    scale = WIDTH / max(1, *before)
    widths = [max(LEAST, len(node.tokens) * scale) if node.kind is not Kind.PROMPT else PROMPT for node in tree.nodes]
    edges = [float(LEFT)] * len(tree.nodes)
    for index, node in enumerate(tree.nodes[1:], 1):
        edges[index] = edges[node.parent or 0] + widths[node.parent or 0] + GAP
    return edges, widths


def _line_from_parent(x: float, y: float, parent_y: float) -> Iterator[Box]:
    middle = x - GAP / 2
    yield Box(middle - (GAP / 2 if y == parent_y else 0), y + TALL / 2 - 0.5, x - middle + GAP / 2, 1, GREY)
    if y != parent_y:
        yield Box(middle, parent_y + TALL / 2, 1, y - parent_y, GREY)


def _colour(node: Node) -> str:
    if node.result is not None:
        return RED if node.result.fault is not None else ORANGE
    return BLUE if node.kind is Kind.MODEL else GREY


def _told(node: Node) -> str:
    tool = f"{node.call.name}, " if node.call is not None else ""
    return _line(f"{node.kind}, {tool}{len(node.tokens)} tokens: {node.text}", CUT)


def _line(text: str, most: int) -> str:
    """Hostile text as one line that is not too long."""
    line = printable(" ".join(text[: 4 * most].split()))
    return line if len(line) <= most else line[: most - 4] + " ..."
