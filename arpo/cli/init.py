"""`arpo init`: a commented file of settings to start from, which runs as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from arpo.cli.display import console
from arpo.config.files import expand_user, no_such_file
from arpo.errors import ArpoError

SETTINGS, QUESTIONS, CODE = "arpo.toml", "questions.jsonl", "task.py"
QUESTION_ROWS = """\
{"question": "Two apples and a pear: how much is that, in cents?", "answer": "135"}
{"question": "Three plums: how much is that, in cents?", "answer": "75"}
{"question": "A melon and an apple: how much is that, in cents?", "answer": "350"}
"""
TEMPLATE = """\
# arpo data check {settings}     what is read of the questions
# arpo train {settings}          trains; `arpo view` shows the run in a browser
# Relative paths start in the folder of this file. All settings: docs/settings.md.
[model]
path = "tiny"                  # built in, to try everything out; it can learn little. Then: "Qwen/Qwen3-0.6B"

[data]
train = "{questions}"
{answer_after}# test = "test.jsonl"           # held-out questions, for `arpo eval` and eval.every
# question = "..."              # columns of the file, if they are not named question and answer
# answer = "..."

[tools]
{tools}
[reward]
{reward}
[rollout]
num_trajectories = 8           # per question; half of them branch off after tool results
max_tool_calls = 3
max_tokens = 512

[train]
steps = 10
batch_size = {batch_size}                 # questions per step
lr = 1e-6

[run]
dir = "{run}"           # starts in the current directory
"""
ANSWER_AFTER = 'answer_after = "{mark}"          # the answer is what follows the last of these\n'
TOOLS = """\
enabled = ["python"]           # also: "search" with search = "documents.jsonl", or "my_tools.py:name"
"""
REWARD = """\
accuracy = "f1"                # how answers are compared: also "em", "number", "math", "choice", "judge"
"""
CUSTOM_TOOLS = """\
enabled = ["{code}:price"]   # a function of yours; built in are "python" and "search"
"""
CUSTOM_REWARD = """\
function = "{code}:reward"   # a function of yours; without it answers are compared (reward.accuracy)
"""
SOURCE = '''\
"""A tool, and a reward. Change both."""

from arpo import Reward, ToolError, Trajectory, tool

PRICES = {"apple": 40, "pear": 55, "plum": 25, "melon": 310}


@tool(quick=True)
def price(item: str) -> str:
    """Price of one piece of fruit, in cents."""
    if item.strip().lower() not in PRICES:
        raise ToolError(f"there is no {item!r}; there are: {', '.join(PRICES)}")
    return f"{PRICES[item.strip().lower()]} cents"


def reward(trajectory: Trajectory) -> Reward:
    """1 for the right answer, and 0.1 more if the tool was called."""
    right = trajectory.answer is not None and trajectory.answer.strip() in trajectory.task.answers
    called = any(call.name == "price" for call, result in trajectory.tool_calls)
    return Reward(right + 0.1 * called, {"correct": float(right), "format": float(trajectory.answer is not None)})
'''


def init(
    questions: Annotated[
        Path | None, typer.Argument(help=f"your file of questions; without it, an example is written: {QUESTIONS}")
    ] = None,
    custom: Annotated[bool, typer.Option("--custom", help=f"also write {CODE}, with a tool and a reward")] = False,
    out: Annotated[Path, typer.Option("--output", "-o", help="the file of settings to write")] = Path(SETTINGS),
) -> None:
    """Write a commented file of settings to start from, which runs as it is. Nothing is overwritten."""
    out = expand_user(out)
    folder = out.parent
    rows, mark = (QUESTIONS, None) if questions is None else _own_questions(expand_user(questions), folder)
    files = {out: _settings(out.name, rows, mark, custom)}
    if questions is None:
        files[folder / QUESTIONS] = QUESTION_ROWS
    if custom:
        files[folder / CODE] = SOURCE
    for path in files:
        if path.exists():
            raise ArpoError(f"{path}: exists already; remove it, or name another file with --output")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    console.print(f"written: {', '.join(map(str, files))}")
    console.print(f"next: arpo data check {out}, then arpo train {out}")


def _own_questions(questions: Path, folder: Path) -> tuple[str, str | None]:
    """The user's file as the settings name it, and the text after which its answers stand."""
    from arpo.data.tasks import Columns, read_tasks

    if not questions.is_file():
        raise ArpoError(no_such_file(questions))
    reading = read_tasks(str(questions), Columns())
    absolute, start = questions.absolute(), folder.absolute()
    named = absolute.relative_to(start) if absolute.is_relative_to(start) else absolute
    return str(named), reading.answer_mark


def _settings(name: str, rows: str, mark: str | None, custom: bool) -> str:
    tools, reward = (CUSTOM_TOOLS, CUSTOM_REWARD) if custom else (TOOLS, REWARD)
    return TEMPLATE.format(
        settings=name,
        questions=rows.replace("\\", "\\\\").replace('"', '\\"'),
        answer_after=ANSWER_AFTER.format(mark=mark) if mark else "",
        tools=tools.format(code=CODE),
        reward=reward.format(code=CODE),
        batch_size=2,
        run=f"runs/{Path(name).stem}",
    )
