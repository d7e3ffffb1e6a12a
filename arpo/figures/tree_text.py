"""The rollout tree of one task as text.

Guarantees: untrusted text is shown as text; what could control a terminal is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from arpo.figures.text import printable
from arpo.types import Decision, Fault, Image, Kind, Node, ScoredTree, ToolCall, ToolResult


def tree_text(scored: ScoredTree) -> str:
    """The question, then every node below its parent, with calls, branching decisions and the ends of trajectories."""
    tree = scored.tree
    below: dict[int, list[tuple[int, list[str]]]] = {}  # of each node: what is shown below it, -1 for a leaf
    for number, leaf in enumerate(tree.leaves):
        below.setdefault(leaf.node, []).append((-1, [leaf_line(scored, number)]))
    for index, node in enumerate(tree.nodes[1:], 1):
        below.setdefault(node.parent or 0, []).append((index, node_lines(node)))
    asked = [printable(tree.task.question), *image_lines(tree.task.images)]
    shown, waiting = asked, [("", 0, 0)]  # (indent, node, place among what is below it)
    while waiting:
        indent, parent, place = waiting.pop()
        if place == len(below.get(parent, ())):
            continue
        index, label = below[parent][place]
        last = place + 1 == len(below[parent])
        deeper = indent + ("   " if last else "│  ")
        shown.append(f"{indent}{'└─ ' if last else '├─ '}{label[0]}")
        shown += [f"{deeper}{'│  ' if index in below else '   '}{line}" for line in label[1:]]
        waiting += [(indent, parent, place + 1), (deeper, index, 0)]
    answers = [f"right answer: {printable(' or '.join(tree.task.answers))}"] if tree.task.answers else []
    return "\n".join([*shown, *answers])


def node_lines(node: Node) -> list[str]:
    """A model turn or tool result: its text, how the call went, and the branching decision."""
    lines = printable(node.text.strip()).split("\n")
    if node.result is not None:
        lines += [call_line(node.call, node.result), *image_lines(node.images)]
    elif node.kind is Kind.MODEL and node.entropies:
        lines.append(f"[{len(node.tokens)} tokens, mean entropy {sum(node.entropies) / len(node.entropies):.3f}]")
    return lines if node.decision is None else [*lines, decision_line(node.decision)]


def image_lines(images: Sequence[Image], folder: Path | None = None) -> list[str]:
    """A line for each image: its size and, if they are stored in a folder, its file."""
    lines = []
    for image in images:
        file = None if folder is None else folder / f"{image.sha256}.png"
        where = "" if file is None else f": {file}" if file.is_file() else ": not stored"
        lines.append(printable(f"[image, {image.width} x {image.height} pixels{where}]"))
    return lines


def leaf_line(scored: ScoredTree, number: int) -> str:
    """The stop reason of trajectory `number`, its reward and the note; with credits also parts and advantage."""
    line = f"trajectory {number + 1}: {scored.tree.leaves[number].stop_reason}"
    if not scored.rewards:
        return line
    reward = scored.rewards[number]
    line += f", reward {reward.total:.2f}"
    note = f"; {printable(' '.join(reward.note.split()))}" if reward.note else ""
    if not scored.credits:
        return line + note
    parts = ", ".join(f"{printable(name)} {value:g}" for name, value in reward.parts.items())
    masked = "" if scored.mask[number] else ", left out of training"
    advantage = f", advantage {scored.credits[number].advantage:+.3f}"
    return line + (f" ({parts})" if parts else "") + advantage + masked + note


def decision_line(decision: Decision) -> str:
    """A branching decision in a line."""
    return (
        f"[H {decision.entropy:.3f}, at the start {decision.initial_entropy:.3f}, dH {decision.delta:+.4f}, "
        f"P {decision.probability:.4f}: {decision.reason}]"
    )


def call_line(call: ToolCall | None, result: ToolResult) -> str:
    """How a tool call went, in a line."""
    name = printable(call.name) if call is not None and call.name else "no tool"
    if result.fault is not None:
        why = {Fault.MODEL: "the model's mistake", Fault.TIMEOUT: "timeout", Fault.INFRA: "tool unavailable"}
        return f"[{name}: failed, {why[result.fault]}; {result.seconds:.3f} s, {result.attempts} attempts]"
    return f"[{name}: {'cached' if result.cached else f'{result.seconds:.3f} s'}]"
