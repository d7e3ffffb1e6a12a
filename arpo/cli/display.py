"""The console: messages, progress bars on a terminal, tables, trees.

Text of models and tools is untrusted: it is printed through `printable`, never as markup.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Task as ProgressTask
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from arpo.data.rows import list_problems
from arpo.data.tasks import Reading
from arpo.figures.text import printable
from arpo.figures.tree_text import call_line, decision_line, image_lines, leaf_line
from arpo.runs import reporter as reporting
from arpo.types import Kind, Node, ScoredTree, Task

if TYPE_CHECKING:
    from arpo.tools.executor import ToolStats

console = Console(highlight=False, markup=False, emoji=False)
console.soft_wrap = not console.is_terminal  # a terminal gets lines that are wrapped between words
PLAIN_WIDTH = 200  # of tables where there is no terminal
SHORT_CELL = 30  # a cell of at most this many characters is not wrapped
SFT_HEADER = "step  epoch   loss  grad norm  traces  tokens: trained/all  seconds"
NOTE_SECONDS = 0.2  # between changes of what a bar says of a step
COLORS = {Kind.PROMPT: "bold", Kind.MODEL: "cyan", Kind.TOOL: "yellow"}


class _NoteColumn(ProgressColumn):
    """What a bar says last; where a line is too long, this is cut and nothing else."""

    def render(self, task: ProgressTask) -> Text:
        """The note of a task."""
        return Text(task.fields["note"], no_wrap=True, overflow="ellipsis")


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Progress]:
    """A progress bar with one task, the first of `task_ids`; shown on a terminal only, once it is made visible."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(40 if console.width >= 120 else 6),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        _NoteColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(what, total=total, note="", visible=False)
        yield bar


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with the first column left-aligned; 200 characters wide unless on a terminal.

    Where it is too wide, headings are wrapped, and it is printed in parts, each with the first column. No word is
    broken, and no short cell.
    """
    wide = console
    if not console.is_terminal:
        wide = Console(file=console.file, width=PLAIN_WIDTH, markup=False, emoji=False)
    columns, narrow = [0], _measure(wide, _table(head, rows, range(len(head)))).maximum > wide.width
    for column in range(1, len(head)):
        if len(columns) > 1 and _measure(wide, _table(head, rows, [*columns, column], narrow)).minimum > wide.width:
            wide.print(_table(head, rows, columns, narrow), soft_wrap=False)
            columns = [0]
        columns.append(column)
    wide.print(_table(head, rows, columns, narrow), soft_wrap=False)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[int], narrow: bool = False) -> Table:
    """The table of some columns; a `narrow` one has columns as wide as their cells, if these are short."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        longest = max((cell_len(row[column]) for row in rows), default=0)
        width = max(longest, *map(cell_len, head[column].split(" "))) if narrow and longest <= SHORT_CELL else None
        table.add_column(head[column], justify="right" if column else "left", width=width)
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    return table


def _measure(wide: Console, table: Table) -> Measurement:
    """The width of a table on one line per row, and that of one that breaks no word."""
    return Measurement.get(wide, wide.options.update(width=10 * PLAIN_WIDTH), table)


def print_hanging(line: str, indent: int | None = None, style: str = "") -> None:
    """Print a line; on a terminal what does not fit goes on below its text, or below column `indent`.

    `style` is that of the first word.
    """
    at = len(line) - len(line.lstrip(" ")) if indent is None else indent
    parts = [line]
    if console.is_terminal:
        parts = textwrap.wrap(line, console.width, subsequent_indent=" " * at, break_on_hyphens=False) or [""]
    for number, part in enumerate(parts):
        text = Text(part)
        if style and not number:
            text.stylize(style, 0, len(part.split(" ", 1)[0]))
        console.print(text)


class _Bar(reporting.Progress):
    """A rich progress bar; it becomes visible with the first update."""

    def __init__(self, bar: Progress) -> None:
        self._bar, self._task = bar, bar.task_ids[0]

    def update(self, completed: int, total: int | None = None, note: str = "") -> None:
        """Set how many units are done."""
        if total is not None:
            self._bar.update(self._task, total=total)
        self._bar.update(self._task, completed=completed, note=note, visible=True)

    def note(self, text: str) -> None:
        """Change the note alone."""
        self._bar.update(self._task, note=text)

    def advance(self) -> None:
        """Count one more unit as done."""
        self._bar.update(self._task, advance=1, visible=True)


class ConsoleReporter(reporting.Reporter):
    """Prints messages and training steps; shows progress bars on a terminal."""

    def __init__(self) -> None:
        self._bar: _Bar | None = None  # of the training
        self._sampled = _Sampled(0)

    @property
    def has_bars(self) -> bool:  # type: ignore[override]
        """Whether the output is a terminal."""
        return console.is_terminal

    def message(self, text: str) -> None:
        """Print a message; what is not printable is escaped."""
        console.print(printable(text))

    def warning(self, text: str) -> None:
        """Print a warning."""
        console.print(printable(f"warning: {text}"))

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[reporting.Progress]:
        """Show a progress bar on a terminal."""
        with progress_bar(what, total) as bar:
            shown = _Bar(bar)
            if what == "training":
                self._bar = shown
            yield shown

    def sampling_starts(self, trajectories: int) -> None:
        """Count what is sampled from now on."""
        self._sampled = _Sampled(trajectories)

    def sampled(self, tokens: int = 0, tool_calls: int = 0, trajectories: int = 0) -> None:
        """Say on the training bar how far the step is."""
        note = self._sampled.add(tokens, tool_calls, trajectories)
        if note and self._bar is not None:
            self._bar.note(note)

    def training_starts(self, kind: str) -> None:
        """Print the heading of the table of steps."""
        console.print(step_header(_line_width()) if kind == "train" else SFT_HEADER)

    def training_step(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Print one line per step."""
        console.print(step_line(step, metrics, _line_width()) if kind == "train" else sft_line(step, metrics))


class _Sampled:
    """What was sampled of a step, and how fast."""

    def __init__(self, expected: int) -> None:
        self._expected, self._tokens, self._tool_calls, self._trajectories = expected, 0, 0, 0
        self._started = self._shown = time.monotonic()

    def add(self, tokens: int, tool_calls: int, trajectories: int) -> str:
        """Count more, and say what there is; nothing if that was said just now."""
        self._tokens += tokens
        self._tool_calls += tool_calls
        self._trajectories += trajectories
        now = time.monotonic()
        if now - self._shown < NOTE_SECONDS:
            return ""
        self._shown = now
        return self.describe(now - self._started)

    def describe(self, seconds: float) -> str:
        """What was sampled in this time."""
        done = f"{self._trajectories}/{max(self._expected, self._trajectories)} trajectories"
        return f"{done}, {self._tool_calls} calls, {self._tokens / max(seconds, 1e-9):.0f} tokens/s"


class _Group(NamedTuple):
    """Neighbouring columns of the table of steps, which are shown together or not at all."""

    head: str
    rank: int  # the highest is left out first where the line is too long
    show: Callable[[int, Mapping[str, float]], str]


def _share(m: Mapping[str, float], name: str) -> str:
    return f"{m[name]:.0%}" if name in m else "-"


def _tokens(m: Mapping[str, float]) -> str:
    return f"{m['unique_tokens'] / 1000:.1f}k/{m['total_tokens'] / 1000:.1f}k"


STEP_GROUPS = (
    _Group("step", 0, lambda step, m: f"{step:>4}"),
    _Group(" reward", 0, lambda step, m: f" {m['reward']:>6.2f}"),
    _Group("   acc", 0, lambda step, m: f" {_share(m, 'accuracy'):>5}"),
    _Group(" format", 1, lambda step, m: f" {_share(m, 'format'):>6}"),
    _Group("  calls", 2, lambda step, m: f" {m['tool_calls']:>6.0f}"),
    _Group(" branches", 3, lambda step, m: f" {m['branches']:>8.0f}"),
    _Group(
        "  entropy: start tool",
        5,
        lambda step, m: f" {m['entropy_start']:>15.2f} {m['entropy_after_tool']:>4.2f}",
    ),
    _Group("  tokens: unique/total", 6, lambda step, m: f" {_tokens(m):>21}"),
    _Group(
        "  seconds: sample tools train",
        4,
        lambda step, m: f" {m['rollout_seconds']:>16.1f} {m['tool_seconds']:>5.1f} {m['train_seconds']:>5.1f}",
    ),
)


def _line_width() -> int:
    """How long a line may be: where there is no terminal, lines are not broken."""
    return console.width if console.is_terminal else PLAIN_WIDTH


def _groups(width: int) -> list[_Group]:
    """The columns of the table of steps that fit into lines of this width, the less important left out first."""
    shown = list(STEP_GROUPS)
    while sum(len(group.head) for group in shown) > width and len(shown) > 1:
        shown.remove(max(shown, key=lambda group: group.rank))
    return shown


def step_header(width: int = PLAIN_WIDTH) -> str:
    """The heading of the table of training steps."""
    return "".join(group.head for group in _groups(width))


def step_line(step: int, m: Mapping[str, float], width: int = PLAIN_WIDTH) -> str:
    """The metrics of a training step as a line under `step_header`; those of an evaluation may be on one more."""
    line = "".join(group.show(step, m) for group in _groups(width))
    tested = f"  held-out reward {m['test_reward']:.3f}" if "test_reward" in m else ""
    tested = f"  held-out accuracy {m['test_accuracy']:.1%}" if "test_accuracy" in m else tested
    return line + (tested if len(line) + len(tested) <= width else f"\n   {tested}")


def sft_line(step: int, m: Mapping[str, float]) -> str:
    """The metrics of an SFT step as a line under `SFT_HEADER`."""
    tokens = f"{m['trained_tokens'] / 1000:.1f}k/{m['computed_tokens'] / 1000:.1f}k"
    return (
        f"{step:>4} {m['epoch']:>6.2f} {m['loss']:>6.3f} {m['grad_norm']:>10.2f} {m['traces']:>7.0f} {tokens:>20}"
        f" {m['train_seconds']:>8.1f}"
    )


def print_reading(reading: Reading, skip: bool) -> None:
    """Print what is read of a source: columns, the first questions, and the rows that cannot be used."""
    console.print(f"{reading.source}: {reading.rows:,} rows, {len(reading.tasks):,} questions")
    for part, used in reading.columns.items():
        names = ", ".join(f"{name} ({count:,})" if len(used) > 1 else name for name, count in used.items())
        console.print(printable(f"  {part:<10} {names or ('file and line' if part == 'id' else 'none')}"))
    if reading.unused:
        names = ", ".join(reading.unused)
        console.print(printable(f"  {'not used':<10} {names} (task.meta has them, for rewards and tools of your own)"))
    for line in reading_image_lines(reading):
        console.print(printable(line))
    for task in reading.tasks[:3]:
        kind = f" [{task.kind}]" if task.kind else ""
        console.print(printable(f"{task.id}{kind}: {textwrap.shorten(task.question, 200)}"))
        console.print(printable(f"  answer: {textwrap.shorten(' | '.join(task.answers) or 'none', 200)}"))
    if mark := reading.answer_mark:
        console.print(
            f"Most answers have {mark} in them: if the answer is what follows it, as in GSM8K, set "
            f"'data.answer_after={mark}'. As it is, the whole text counts as the answer."
        )
    if reading.problems:
        fate = "are skipped" if skip else "are refused; data.bad_rows=skip skips them"
        console.print(f"rows that cannot be used and {fate}: {len(reading.problems):,}")
        console.print(printable(list_problems(reading.problems)))


def reading_image_lines(reading: Reading) -> list[str]:
    """How many images the questions have, of which sizes, and which columns seem to hold further ones."""
    images = [image for task in reading.tasks for image in task.images]
    lines = []
    if images:
        smallest, largest = (choose(images, key=lambda image: image.width * image.height) for choose in (min, max))
        sizes = " to ".join(dict.fromkeys(f"{image.width} x {image.height}" for image in (smallest, largest)))
        having = sum(bool(task.images) for task in reading.tasks)
        lines.append(f"images: {len(images):,} in {having:,} questions, {sizes} pixels")
    for column, count in reading.unused_images.items():
        lines.append(f"not used: column {column!r} seems to hold images ({count:,} rows); data.images={column} uses it")
    return lines


def tool_lines(stats: Mapping[str, ToolStats]) -> list[str]:
    """A table of calls per tool, one string per line; calls of unknown tools come last."""
    head = f"{'tool':<20} {'calls':>7} {'cached':>7} {'model':>6} {'timeout':>8} {'infra':>6}   p50 s   p95 s"
    rows = [
        f"{printable(name) or '(no such tool)':<20} {s.calls:>7} {s.cached:>7} {s.model:>6} {s.timeout:>8} {s.infra:>6}"
        f" {s.p50_seconds:>7.3f} {s.p95_seconds:>7.3f}"
        for name, s in stats.items()
        if s.calls
    ]
    return [head, *rows] if rows else []


def print_tree(scored: ScoredTree, images: Path | None = None) -> None:
    """Print a rollout tree: nodes, branching decisions, and each trajectory's stop reason and reward.

    A tree with credits is printed with call times, reward parts and advantages, too. `images` is where its images lie.
    """
    tree, full = scored.tree, bool(scored.credits)
    children: dict[int, list[int]] = {}
    for index, node in enumerate(tree.nodes):
        if node.parent is not None:
            children.setdefault(node.parent, []).append(index)
    leaves: dict[int, list[str]] = {}
    for number, leaf in enumerate(tree.leaves):
        leaves.setdefault(leaf.node, []).append(leaf_line(scored, number))
    root = Tree(_label(tree.nodes[0], full, images))
    stack = [(0, root)]
    while stack:
        index, branch = stack.pop()
        for line in leaves.get(index, []):
            branch.add(Text(line, style="green"))
        for child in children.get(index, []):
            stack.append((child, branch.add(_label(tree.nodes[child], full, images))))
    console.print(root, soft_wrap=False)
    _print_answers(tree.task)


def print_trajectory(scored: ScoredTree, number: int, images: Path | None = None) -> None:
    """Print trajectory `number`, counted from 0, as a conversation; `images` is where its images lie."""
    trajectory, credit = scored.tree.trajectories[number], scored.credits[number]
    for index, node in zip(trajectory.indices, trajectory.nodes, strict=True):
        facts = f"{len(node.tokens)} tokens"
        if node.kind is Kind.MODEL:
            entropy = sum(node.entropies) / max(1, len(node.entropies))
            facts += f", entropy {entropy:.3f}, advantage {credit.by_node.get(index, 0.0):+.3f}"
        console.print(Text(f"--- {node.kind}, {facts}", style="bold"))
        console.print(_label(node, True, images))
    console.print(Text(leaf_line(scored, number), style="green"))
    _print_answers(trajectory.task)


def _print_answers(task: Task) -> None:
    if task.answers:
        console.print(Text(f"right answer: {printable(' or '.join(task.answers))}"))


def _label(node: Node, full: bool, images: Path | None) -> Text:
    label = Text(printable(node.text.strip()), style=COLORS[node.kind])
    for line in image_lines(node.images, images):
        label.append("\n" + line, style="magenta")
    if full and node.result is not None:
        label.append("\n" + call_line(node.call, node.result), style="red" if node.result.fault else "magenta")
    if node.decision is not None:
        label.append("\n" + decision_line(node.decision), style="magenta")
    return label
