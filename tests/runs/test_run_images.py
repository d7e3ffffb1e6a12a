"""Images in a run directory: each once, bounded, checked when read; trees without images as they ever were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from trees import prompt, two_branches
from vision_models import picture

from arpo.errors import ArpoError
from arpo.runs import run_dir
from arpo.runs.run_dir import RunDir, create_run_dir, open_run_dir
from arpo.runs.trees import images_of, tree_from_json, tree_to_json
from arpo.types import Image, Kind, RolloutTree, ScoredTree, Task, ToolResult

CONFIG = {"rollout": {}}


def seen(*images: Image) -> ScoredTree:
    """A tree whose question has the first image, and whose tool results have the others."""
    tree = two_branches()
    nodes = [replace(tree.nodes[0], images=images[:1])]
    for node in tree.nodes[1:]:
        own = images[1:] if node.kind is Kind.TOOL else ()
        result = replace(node.result, images=own) if isinstance(node.result, ToolResult) else None
        nodes.append(replace(node, images=own, result=result))
    return ScoredTree(replace(tree, task=replace(tree.task, images=images[:1]), nodes=tuple(nodes)))


def test_trees_with_images_come_back_and_others_have_no_word_of_them() -> None:
    one, other, third = picture(1), picture(2, 3, 4), picture(3)
    scored = seen(one, other, third)
    text = json.dumps(tree_to_json(scored))
    assert tree_from_json(json.loads(text)) == scored and tree_to_json(scored)["nodes"][2]["images"] == [
        {"sha256": other.sha256, "width": 3, "height": 4},
        {"sha256": third.sha256, "width": 6, "height": 6},
    ]
    assert images_of(scored.tree) == [one, other, third]
    assert "images" not in json.dumps(tree_to_json(ScoredTree(two_branches())))
    evil = json.loads(text)
    evil["nodes"][0]["images"][0]["sha256"] = "../../etc/passwd"
    with pytest.raises(ValueError, match="no SHA-256"):
        tree_from_json(evil)


def test_each_image_is_stored_once_and_checked_when_read(tmp_path: Path) -> None:
    one, other = picture(1), picture(2)
    with create_run_dir(tmp_path / "run", CONFIG) as run:
        assert run.write_trees(1, [seen(one, other), seen(one)]) is None
        path = tmp_path / "run" / "images" / f"{one.sha256}.png"
        written = path.stat().st_mtime_ns
        run.write_trees(2, [seen(one)])
        assert path.stat().st_mtime_ns == written and len(list(path.parent.iterdir())) == 2
        collapsed = run.archive_after(1)
    reading = open_run_dir(tmp_path / "run")
    assert reading.read_image(one.sha256) == one.data == open_run_dir(collapsed).read_image(one.sha256)
    assert reading.read_trees(1)[0].tree.nodes[0].images[0].data == b""
    for name in ("../config", "A" * 64, ""):
        with pytest.raises(ArpoError, match="named by its SHA-256"):
            reading.read_image(name)
    with pytest.raises(ArpoError, match="is not stored"):
        reading.read_image("0" * 64)
    path.write_bytes(b"other")
    with pytest.raises(ArpoError, match="is damaged"):
        reading.read_image(one.sha256)


def test_a_full_store_warns_once_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "MAX_IMAGES", 2)
    with create_run_dir(tmp_path / "run", CONFIG) as run:
        warning = run.write_trees(1, [seen(picture(1)), seen(picture(2)), seen(picture(3))])
        assert warning is not None and "holds 2 images" in warning
        assert run.write_trees(2, [seen(picture(4))]) is None
        assert run.tree_steps() == [1, 2] and stored(run) == 2
    with open_run_dir(tmp_path / "run", write=True) as run:  # what is there counts when the run is resumed
        assert "holds 2 images" in str(run.write_trees(3, [seen(picture(5))]))


def stored(run: RunDir) -> int:
    return len(list((run.directory / "images").iterdir()))


def test_a_tree_without_images_makes_no_folder(tmp_path: Path) -> None:
    with create_run_dir(tmp_path / "run", CONFIG) as run:
        run.write_trees(1, [ScoredTree(RolloutTree(Task("q", "What?"), (prompt(),), ()))])
        assert not (tmp_path / "run" / "images").exists()
