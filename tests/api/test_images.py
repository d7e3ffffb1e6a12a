"""Images as users give and see them: in Python, `arpo rollout`, `arpo chat`, `arpo show`, evaluations, exports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_runs import call
from conversations import converse, says
from image_runs import images_in, make_zoomed, picture, zoomed
from vision_models import save_seeing_model

import arpo
from arpo.api.tree import Tree
from arpo.builtin.model import build_tokenizer
from arpo.cli import display
from arpo.cli.chat import Screen, chat
from arpo.data.images import encode_image, from_data_url
from arpo.data.unread_images import without_image_data
from arpo.errors import ArpoError
from arpo.evaluation import samples
from arpo.evaluation.samples import build_sample, open_samples
from arpo.integrations import trajectories
from arpo.integrations.trajectories import read_trajectories, trajectory_lines, write_trajectories
from arpo.types import Task

SHOWN = encode_image(picture(8, 8))
SHORT: dict[str, Any] = {"rollout": {"num_trajectories": 2, "num_initial": 2, "max_tokens": 12}, "progress": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that sees."""
    tokenizer = build_tokenizer(["Which colour is the square? gold"])
    return str(save_seeing_model(tmp_path_factory.mktemp("model"), tokenizer, context=2000))


def arpo_command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code, and what was printed in one line."""
    code = call(*arguments)
    printed = capsys.readouterr()
    return code, " ".join((printed.out + printed.err).split())


@pytest.mark.slow
def test_an_agent_is_asked_with_images(model: str, tmp_path: Path) -> None:
    picture(8, 8).save(tmp_path / "a.png")
    row = {"question": "Which colour?", "answer": "gold", "image": tmp_path / "a.png"}
    with arpo.Agent(model, tools=[], **SHORT) as agent:
        tree = agent.rollout("Which colour?", images=[picture(8, 8)])
        assert tree.task.images == tree.nodes[0].images == (SHOWN,) and tree.nodes[0].images[0].data == SHOWN.data
        assert "[image, 8 x 8 pixels]" in tree.show()
        scored = agent.rollout(row)
        assert scored.task.images == (SHOWN,) and len(scored.rewards) == 2
        same = {agent.ask("Which?", images=given, seed=1) for given in (tmp_path / "a.png", [SHOWN], SHOWN.data)}
        assert len(same) == 1
        talk = agent.chat(seed=1)
        assert isinstance(talk.ask("Which?", images=picture(8, 8)), str)
        (evaluated,) = agent.evaluate([row]).trees
        assert evaluated.tree.task.images == (SHOWN,) and evaluated.tree.nodes[0].images[0].data == b""
        for question in (row, Task("q", "Which?")):
            with pytest.raises(ArpoError, match="a row has them in its columns"):
                agent.rollout(question, images=[picture()])
        with pytest.raises(ArpoError, match="images: number 1: there is no file"):
            agent.ask("Which?", images="gone.png")


@pytest.mark.slow
def test_a_trainer_learns_from_rows_with_pictures(model: str, tmp_path: Path) -> None:
    rows = [{"question": "Which <image>?", "answer": "gold", "image": picture(8, 8)}]
    given: dict[str, Any] = {"tools": [], "output_dir": tmp_path / "run", "train": {"batch_size": 1}}
    with arpo.Trainer(model, tasks=rows, **given, **SHORT) as trainer:
        trainer.train(1)
    assert (tmp_path / "run" / "images" / f"{SHOWN.sha256}.png").read_bytes() == SHOWN.data


@pytest.mark.slow
def test_the_commands_take_image_files(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(8, 8).save(tmp_path / "a.png")
    monkeypatch.setattr(display.console, "_width", 400)
    asked = ("rollout", model, "rollout.max_tokens=8", "tools.enabled=[]", "--ask", "Which?", "--image")
    code, said = arpo_command(capsys, *asked, tmp_path / "a.png")
    assert code == 0 and "[image, 8 x 8 pixels]" in said
    assert "images: number 1: there is no file" in arpo_command(capsys, *asked, "gone.png")[1]
    assert "--image goes with --ask" in arpo_command(capsys, "rollout", model, "--image", "a.png")[1]

    row = json.dumps({"question": "Which?", "answer": "gold", "image": "a.png"})
    (tmp_path / "t.jsonl").write_text(row)
    out = tmp_path / "out"
    given = (f"data.test={tmp_path / 't.jsonl'}", "rollout.max_tokens=8", "tools.enabled=[]", "--out", out)
    for _ in range(2):  # the second time, the answers are there
        code, said = arpo_command(capsys, "eval", model, *given)
        assert code == 0, said
    assert (out / "images" / f"{SHOWN.sha256}.png").read_bytes() == SHOWN.data
    (line,) = (out / "samples" / "test.jsonl").read_text().splitlines()
    assert json.loads(line)["tree"]["nodes"][0]["images"] == [{"sha256": SHOWN.sha256, "width": 8, "height": 8}]


def chatted(conversation: Any, *lines: str) -> str:
    """What a person sees who types these lines."""
    shown: list[str] = []
    screen = Screen.__new__(Screen)
    screen.note = shown.append  # type: ignore[method-assign]
    waiting = iter(lines)

    def read() -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    chat(conversation, screen, read, True)
    return "\n".join(shown)


def test_chat_says_why_an_image_cannot_be_shown(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png")
    conversation = converse(says("Gold."))
    assert "error: name a file: /image picture.png" in chatted(conversation, "/image")
    assert "error: images: number 1: there is no file" in chatted(conversation, "/image gone.png")
    assert "this model or engine cannot see" in chatted(conversation, f"/image {tmp_path / 'a.png'}")


@pytest.mark.slow
def test_chat_shows_images_with_the_next_question_only(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(8, 8).save(tmp_path / "a.png")
    asked: list[tuple[str, int]] = []
    from arpo.agent.conversation import Conversation

    ask = Conversation.ask

    def noted(self: Conversation, question: str, images: Any = ()) -> bool:
        asked.append((question, len(images)))
        return ask(self, question, images)

    monkeypatch.setattr(Conversation, "ask", noted)
    lines = iter([f"/image {tmp_path / 'a.png'}", "Which?", "And now?"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or (_ for _ in ()).throw(EOFError))
    code, said = arpo_command(capsys, "chat", model, "--tools", "", "rollout.max_tokens=4")
    assert code == 0 and "The next question has this image of 8 x 8 pixels." in said
    assert asked == [("Which?", 1), ("And now?", 0)]


def test_show_says_where_images_lie(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display.console, "_width", 400)
    make_zoomed(tmp_path / "run")
    whole, crop, turned = images_in(zoomed())
    folder = tmp_path / "run" / "images"
    (folder / f"{turned.sha256}.png").unlink()
    for more in ((), ("--trajectory", 1)):
        code, said = arpo_command(capsys, "show", tmp_path / "run", *more)
        assert code == 0
        assert f"[image, 120 x 80 pixels: {folder / whole.sha256}.png]" in said
        assert f"[image, 60 x 40 pixels: {folder / crop.sha256}.png]" in said
        assert "[image, 40 x 60 pixels: not stored]" in said


def test_a_tree_in_a_notebook_names_its_images() -> None:
    assert Tree.of(zoomed()).show().count("[image, ") == 3


def test_samples_hold_each_image_once_and_no_more_than_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = zoomed()
    whole, crop, turned = images_in(scored)
    monkeypatch.setattr(samples, "MAX_IMAGES_BYTES", len(whole.data) + len(crop.data))
    with open_samples(tmp_path / "out", {}) as store:
        for number in range(2):
            store.append(build_sample("test", scored.tree.task, number, scored, None), scored)
        assert len(store.read("test", [scored.tree.task])) == 2
        other = replace(scored.tree.task, images=(SHOWN,))
        with pytest.raises(ArpoError, match="differs from the one in the data set"):
            store.read("test", [other])
    stored = {path.stem: path.read_bytes() for path in (tmp_path / "out" / "images").iterdir()}
    assert stored == {whole.sha256: whole.data, crop.sha256: crop.data} and turned.sha256 not in stored
    assert whole.data not in (tmp_path / "out" / "samples" / "test.jsonl").read_bytes()


def test_exported_lines_hold_each_image_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = zoomed()
    first, second = trajectory_lines([scored, scored])
    assert list(first["images"]) == [image.sha256 for image in images_in(scored)] and "images" not in second
    assert [from_data_url(url) for url in first["images"].values()] == images_in(scored)
    write_trajectories(tmp_path / "t.jsonl", [scored])
    assert read_trajectories(tmp_path / "t.jsonl") == [scored] == [without_image_data(scored)]
    whole, crop, _ = images_in(scored)
    monkeypatch.setattr(trajectories, "MAX_IMAGE_BYTES", len(whole.data) + len(crop.data))
    (line,) = trajectory_lines([scored])
    assert list(line["images"]) == [whole.sha256, crop.sha256] and line["images_left_out"] == 1
    assert next(trajectory_lines([without_image_data(scored)]))["images_left_out"] == 3
