"""Pictures, a tree that looks at one through crops and turns, and a run directory that holds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image as pillow
from view_runs import model_node, prompt_node, settings, tool_node, write_step

from arpo.data.images import encode_image
from arpo.runs.run_dir import create_run_dir
from arpo.types import Credit, Image, Leaf, Node, Reward, RolloutTree, ScoredTree, StopReason, Task


def picture(width: int = 120, height: int = 80, color: str = "navy") -> Any:
    """A picture with a gold square in its lower right quarter."""
    made = pillow.new("RGB", (width, height), color)
    made.paste("gold", (width * 5 // 8, height * 5 // 8, width * 7 // 8, height * 7 // 8))
    return made


def seen(parent: int, text: str, shown: Any, name: str, **args: Any) -> Node:
    """A call that shows an image."""
    node = tool_node(parent, text, name=name, args=args)
    assert node.result is not None
    images = (encode_image(shown),)
    return replace(node, images=images, result=replace(node.result, images=images))


def zoomed() -> ScoredTree:
    """One trajectory: the question's image is cropped (node 2), and the crop, image 2, turned (node 4)."""
    whole = picture()
    crop = whole.crop((60, 40, 120, 80))
    image = encode_image(whole)
    task = Task("q-see", "Which colour is the square?", ("gold",), kind="see", images=(image,))
    nodes = (
        replace(prompt_node(task.question), images=task.images),
        model_node(0, "I zoom in."),
        seen(1, "Image 2:", crop, "crop", box=[0.5, 0.5, 1, 1]),
        model_node(2, "I turn it."),
        seen(3, "Image 3:", crop.rotate(-90, expand=True), "rotate", degrees=90, image=2),
        model_node(4, "<answer>\\boxed{gold}</answer>", stop="</answer>"),
    )
    tree = RolloutTree(task, nodes, (Leaf(5, StopReason.ANSWER),))
    return ScoredTree(tree, (Reward(1.0, {"correct": 1.0, "format": 1.0}),), (Credit(0.5, {1: 0.5, 3: 0.5, 5: 0.5}),))


def images_in(scored: ScoredTree) -> list[Image]:
    """The images of `zoomed`: of the question, the crop, the turned one."""
    return [image for node in scored.tree.nodes for image in node.images]


def make_zoomed(directory: Path, *overrides: str) -> None:
    """A run of one step with this tree."""
    with create_run_dir(directory, settings(directory, *overrides)) as run_dir:
        write_step(run_dir, 1, [zoomed()])
