"""A rollout tree with its rewards, as a caller in Python sees it: readable in a terminal and in a notebook."""

from __future__ import annotations

from html import escape

from arpo.figures.tree import tree_svg
from arpo.figures.tree_text import tree_text
from arpo.types import Leaf, Node, ScoredTree, Task, Trajectory


class Tree(ScoredTree):
    """A sampled tree: its nodes, trajectories and, if it could be scored, `rewards` and `credits` (advantages).

    `print(tree)` shows it as text, a notebook as a picture.
    """

    __slots__ = ()

    @staticmethod
    def of(scored: ScoredTree) -> Tree:
        """The same tree."""
        return Tree(scored.tree, scored.rewards, scored.credits, scored.mask)

    @property
    def task(self) -> Task:
        """The task that the tree was sampled for."""
        return self.tree.task

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The prompt, model turns and tool results; a node's `parent` is an index into these."""
        return self.tree.nodes

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The ends of the trajectories."""
        return self.tree.leaves

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The walks from the prompt to the leaves, in the order of `rewards`."""
        return self.tree.trajectories

    def show(self) -> str:
        """The tree as text: what was said, which calls were made, where it branched, what was earned."""
        return tree_text(self)

    def __str__(self) -> str:
        return self.show()

    def __repr__(self) -> str:
        rewards = f", rewards {[round(reward.total, 3) for reward in self.rewards]}" if self.rewards else ""
        return (
            f"<Tree of {self.task.id!r}: {len(self.nodes)} nodes, {len(self.leaves)} trajectories, "
            f"{self.tree.branch_points} branch points, {self.tree.tool_calls} tool calls{rewards}>"
        )

    def _repr_html_(self) -> str:
        return f"{tree_svg(self)}<details><summary>text</summary><pre>{escape(self.show())}</pre></details>"
