"""Training on trees with images: gradients against transformers' whole model, one trajectory at a time; whole runs."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from pathlib import Path
from typing import Any

import fruit
import pytest
import torch
from forests import TEMPERATURE, gradients
from plain import plain_loss
from trees import tree, with_credits
from vision_models import PlainSeeing, picture, save_seeing_model

import arpo
from arpo.agent.agent import build_agent
from arpo.agent.formats import TagFormat
from arpo.algorithm.batch import build_batch
from arpo.builtin.model import build_tokenizer
from arpo.config.algorithm import Loss
from arpo.config.loading import load_config
from arpo.config.schema import Config, Model, Train
from arpo.data.tasks import Trace
from arpo.engine.scripted import ScriptedEngine
from arpo.errors import ArpoError
from arpo.models.load import load_model
from arpo.models.vision import VisionTower, vision_tower
from arpo.runs.run_dir import open_run_dir
from arpo.tools.base import tool
from arpo.trainer.forward_backward import forward_backward
from arpo.trainer.trainer import Trainer
from arpo.training.sft_examples import encode_trace
from arpo.types import Image, Kind, Node, ScoredTree, Task, ToolCall, ToolResult

MAX_TOKENS = 64


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = build_tokenizer(["What is in the picture? A cat and a dog.", *(row["question"] for row in fruit.ROWS)])
    return save_seeing_model(tmp_path_factory.mktemp("model"), tokenizer, split=True)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, VisionTower]:
    model, tokenizer = load_model(Model(path=str(directory), device="cpu"))
    tower = vision_tower(model)
    assert tower is not None
    tower.to(dtype)
    return model.to(dtype), tokenizer, tower


def node(parent: int | None, tokens: list[int], images: tuple[Image, ...] = ()) -> Node:
    if parent is None:
        return Node(None, Kind.PROMPT, tuple(tokens), "", images=images)
    call = ToolCall("look", {})
    return Node(parent, Kind.TOOL, tuple(tokens), "", call=call, result=ToolResult("", images=images), images=images)


def turn(parent: int, tokens: list[int]) -> Node:
    return Node(parent, Kind.MODEL, tuple(tokens), "", (-1.0,) * len(tokens), (0.5,) * len(tokens))


def branched(tokenizer: Any, tower: VisionTower) -> ScoredTree:
    """Four trajectories that share a picture in the prompt; three share a result with a picture, and one has another.

    The model also writes the image token itself, which is no image.
    """

    def shown(*images: Image) -> list[int]:
        return [token for image in images for token in tower.expand(tokenizer, image)]

    question, seen, other = picture(1, 9, 5), picture(2), picture(3, 5, 9)
    nodes = [
        node(None, [5, 6, *shown(question), 7], (question,)),
        turn(0, [8, tower.image_token_id, 9]),
        node(1, [10, *shown(seen, question), 11], (seen, question)),
        turn(2, [12, 13]),
        turn(2, [14]),
        node(4, [15, *shown(other)], (other,)),
        turn(5, [16, 17]),
        turn(0, [18]),
        node(7, [19, *shown(other)], (other,)),
        turn(8, [20, 21, 22]),
    ]
    return with_credits(tree(nodes, leaves=[3, 6, 9]), [1.0, -0.5, 0.7])


@pytest.mark.parametrize("budget", [10**6, 30])
@pytest.mark.parametrize("shared", [True, False])
def test_gradients_are_those_of_trajectories_one_by_one(directory: Path, budget: int, shared: bool) -> None:
    model, tokenizer, tower = load(directory, torch.float64)
    scored = branched(tokenizer, tower)
    loss = Loss(entropy_coef=0.1)
    batch = build_batch(
        [scored], loss, MAX_TOKENS, shared, embed_ids=lambda node: tower.embed_ids(node.tokens, node.images)
    )
    sums = forward_backward(model, batch, loss, TEMPERATURE, budget)
    found = gradients(model)
    plain = PlainSeeing(directory, torch.float64)
    for trajectory in scored.tree.trajectories:
        plain.show(trajectory.nodes)
    total = plain_loss(plain, [scored], loss, TEMPERATURE, MAX_TOKENS)
    total.backward()  # type: ignore[no-untyped-call]
    assert sums["loss"] == pytest.approx(total.item(), abs=1e-6)
    whole = gradients(plain.full)
    expected = {name.replace("model.text_model.", "model."): value for name, value in whole.items()}
    assert found.keys() <= expected.keys() and len(found) == 21
    for name, value in found.items():
        assert torch.allclose(value, expected[name], atol=1e-6 * (1 + expected[name].abs().max().item())), name
        assert expected[name].abs().max() > 0, name


def test_a_batch_without_images_is_as_ever(directory: Path) -> None:
    _, _, tower = load(directory)
    nodes = [node(None, [5, 6]), turn(0, [7, tower.image_token_id]), turn(0, [9])]
    scored = with_credits(tree(nodes, leaves=[1, 2]), [1.0, -1.0])
    with_tower = build_batch([scored], Loss(), 9, embed_ids=lambda one: tower.embed_ids(one.tokens, one.images))
    without = build_batch([scored], Loss(), 9)
    assert torch.equal(with_tower.tokens_N, without.tokens_N) and tower.num_ids == tower.vocab_size


def test_a_reference_sees_the_same_ids(directory: Path) -> None:
    """With a KL term, the model before training gets the batch of the trained one."""
    model, tokenizer, tower = load(directory)
    reference, _, _ = load(directory)
    config = Config(loss=Loss(kl_coef=0.1), train=Train(lr=1e-2, epochs=2))
    trainer = Trainer(model, tokenizer, config, reference)
    metrics = trainer.update([branched(tokenizer, tower)])
    assert metrics["reference_kl"] > 0 and metrics["computed_tokens"] > 0
    blind = Trainer(build_blind(directory), tokenizer, Config())
    with pytest.raises(ArpoError, match="a tree has images, and this model cannot see"):
        blind.update([branched(tokenizer, tower)])


def build_blind(directory: Path) -> Any:
    model, _, _ = load(directory)
    model._arpo_vision_tower = None
    return model


def test_traces_with_images_train_like_rollouts(directory: Path) -> None:
    model, tokenizer, tower = load(directory)
    fmt, seen = TagFormat(()), picture(2)
    task = Task("q", "A <image> or a dog?", ("cat",), images=(picture(1),))
    trace = Trace(task, ((Kind.MODEL, "<think>"), (Kind.TOOL, "found"), (Kind.MODEL, "cat")), ((), (seen,), ()))
    example = encode_trace(trace, tokenizer, fmt, 100, vision=tower)
    prompt, _, result, _ = (ids for _, ids in example.segments)
    assert array("i", tower.expand(tokenizer, seen)).tobytes() in result.tobytes()
    assert array("i", tower.expand(tokenizer, picture(1))).tobytes() in prompt.tobytes()
    scored = example.scored_tree()
    assert [one.images for one in scored.tree.nodes] == [task.images, (), (seen,), ()]
    trainer = Trainer(model, tokenizer, Config(train=Train(lr=1e-2), loss=Loss(kind="cispo")))
    losses = [trainer.update([scored])["loss"] for _ in range(3)]
    assert losses[2] < losses[0]
    with pytest.raises(ArpoError, match="trace 'q' has images, and this model cannot see"):
        encode_trace(trace, tokenizer, fmt, 100)


# --- whole runs ---


def tasks() -> list[Task]:
    return [Task(f"q{i}", "What is in the picture?", ("cat",), images=(picture(i, 9, 5),)) for i in range(2)]


SMALL: dict[str, Any] = {
    "rollout": {"num_trajectories": 4, "max_tokens": 80, "max_tool_calls": 2},
    "train": {"batch_size": 2, "lr": 1e-3},
}


@pytest.mark.slow
def test_a_run_with_images_in_questions(directory: Path, tmp_path: Path) -> None:
    """The engine samples from what is trained, and the run can be resumed, loaded and asked."""
    given: dict[str, Any] = {"tasks": tasks(), "reward": fruit.even_tokens, "progress": False, **SMALL}
    with arpo.Trainer(str(directory), output_dir=str(tmp_path / "run"), **given) as trainer:
        records = trainer.train(steps=2)
    assert all(record["engine_mismatch"] < 1e-4 for record in records)
    with arpo.Trainer(str(directory), output_dir=str(tmp_path / "run"), resume=True, **given) as trainer:
        [third] = trainer.train(steps=1)
    assert third["step"] == 3 and third["engine_mismatch"] < 1e-4
    run = open_run_dir(tmp_path / "run")
    [first, _] = run.read_trees(2)
    image = first.tree.nodes[0].images[0]
    assert first.tree.task.images == (image,) and image in {one.images[0] for one in tasks()} and image.data == b""
    assert hashlib.sha256(run.read_image(image.sha256)).hexdigest() == image.sha256
    assert "picture?" in first.tree.nodes[0].text and first.tree.nodes[0].text.count("<image>") == 1
    assert len(list((tmp_path / "run" / "images").iterdir())) == 2
    plain = PlainSeeing(tmp_path / "run" / "checkpoints" / "step_000003" / "model")  # transformers load it
    assert plain.full.config.model_type == "idefics3"


@pytest.mark.parametrize("max_tokens", [80, 30])
def test_a_run_with_images_from_a_tool(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """Also if there is no room for a result: then the model does not see its image."""
    monkeypatch.setattr(
        "arpo.engine.build.build_engine", lambda settings, model, tokenizer, *_: ScriptedEngine(tokenizer, fruit.solve)
    )
    seen = picture(7, 5, 9)

    async def look(tools: Any, call: ToolCall, *_: Any) -> ToolResult:
        await asyncio.sleep(0)
        return ToolResult("here", images=(seen,))

    monkeypatch.setattr("arpo.algorithm.rollout.call_tool", look)
    given: dict[str, Any] = {"tasks": fruit.ROWS, "tools": [fruit.price], "progress": False, **SMALL}
    given["rollout"] = {**SMALL["rollout"], "max_tokens": max_tokens}
    with arpo.Trainer(str(directory), output_dir=str(tmp_path), **given) as trainer:
        assert len(trainer.train(steps=2)) == 2
    run = open_run_dir(tmp_path)
    results = [one for one in run.read_trees(1)[0].tree.nodes if one.kind is Kind.TOOL]
    assert results and all(one.result and one.result.images == (seen,) for one in results)
    assert all(one.images == ((seen,) if one.tokens else ()) for one in results)
    assert all(bool(one.tokens) == (max_tokens == 80) for one in results)
    assert all(one.text == "<result>here<image></result>\n" for one in results)
    assert run.read_image(seen.sha256) == seen.data


def test_a_model_that_cannot_see_refuses_before_anything_is_sampled(model_dir: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ArpoError, match=r"task 'q0' has images, and this model or engine cannot see: use a SmolVLM"),
        arpo.Trainer(str(model_dir), tasks=tasks(), reward=fruit.even_tokens, progress=False, **SMALL),
    ):
        pass


def test_figures_for_a_model_that_cannot_see_are_refused_at_once(model_dir: Path) -> None:
    @tool(quick=True)
    def python(code: str) -> str:
        """Run code."""
        return code

    config = load_config(None, ["tools.python_figures=true"])
    model, tokenizer = load_model(Model(path=str(model_dir), device="cpu"))
    with pytest.raises(ArpoError, match=r"tools.python_figures: this model or engine cannot see figures"):
        build_agent(config, {"python": python}, model, tokenizer)
