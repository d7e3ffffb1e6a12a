"""A run directory: exact round trips, one writer, and nothing lost or half-written in a crash."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from arpo.errors import ArpoError
from arpo.runs import manifest
from arpo.runs import run_dir as run_dir_module
from arpo.runs.locks import is_live
from arpo.runs.run_dir import RunDir, TrackerState, create_run_dir, open_run_dir
from arpo.runs.trees import pack_trees, tree_from_json, tree_to_json, unpack_tree
from arpo.types import (
    Credit,
    Decision,
    Fault,
    Kind,
    Leaf,
    Node,
    Reward,
    RolloutTree,
    ScoredTree,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
)


def _tree(name: str = "q1", text: str = "hm <search>x</search>") -> RolloutTree:
    task = Task(name, "Where?", ("Upper Kelso", "Kelso"), kind="hop1", meta={"hops": [1, 2], "note": None})
    nodes = (
        Node(None, Kind.PROMPT, (1, 2, 3), "Where?"),
        Node(
            0, Kind.MODEL, (4, 5), text, (-0.1, -1e-300), (0.3, 2 / 3), stop="</search>", policy_version=3, seconds=0.5
        ),
        Node(
            1,
            Kind.TOOL,
            (6,),
            "<result>\u2028\x00</result>",
            call=ToolCall("search", {"query": "x", "deep": {"k": [1.5, True]}}, error="odd"),
            result=ToolResult("gone", Fault.INFRA, 1.25, 2, cached=True),
            decision=Decision(0.1, 0.2, 0.05, 0.51, 1, "P > tau", 20),
        ),
        Node(2, Kind.MODEL, (7,), "a", (-0.0,), (0.0,)),
        Node(2, Kind.MODEL, (8,), "b", (-2.5,), (1.0,)),
    )
    return RolloutTree(task, nodes, (Leaf(3, StopReason.ANSWER), Leaf(4, StopReason.LENGTH)))


REWARDS = (Reward(1.1, {"accuracy": 1.0, "bonus": 0.1}), Reward(-1.0))
CREDITS = (Credit(0.7, {1: 0.1, 3: 0.7}, 0.25), Credit(0.0, {}))
MASK = (True, False)


def _scored(name: str = "q1") -> ScoredTree:
    return ScoredTree(_tree(name), REWARDS, CREDITS, MASK)


def _save(run_dir: RunDir, step: int, *names: str) -> None:
    run_dir.write_trees(step, [_scored(name) for name in names])


def _checkpoint(text: str) -> Any:
    def write(folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_text(text)

    return write


# --- trees


def test_tree_round_trip_is_exact() -> None:
    scored = _scored()
    back = tree_from_json(json.loads(json.dumps(tree_to_json(scored), allow_nan=False)))
    assert back == scored
    assert [type(node.kind) for node in back.tree.nodes] == [Kind] * 5
    assert type(back.tree.leaves[0].stop_reason) is StopReason
    assert back.tree.nodes[2].result is not None and type(back.tree.nodes[2].result.fault) is Fault
    assert math.copysign(1, back.tree.nodes[3].logprobs[0]) == -1
    hash(back.tree.nodes[1].tokens)  # tuples, not lists
    assert back.tree.branch_points == 1
    older = tree_to_json(scored)
    for credit in older["credits"]:
        del credit["weight"]
    assert [credit.weight for credit in tree_from_json(older).credits] == [1.0, 1.0]


@given(st.text(st.characters() | st.characters(categories=["Cs"], max_codepoint=0xDBFF)))
def test_any_text_survives(text: str) -> None:
    scored = ScoredTree(_tree(text=text), REWARDS, CREDITS, MASK)
    assert unpack_tree(pack_trees([scored])[0]) == scored


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_floats_survive_to_the_last_bit(values: list[float]) -> None:
    node = Node(0, Kind.MODEL, (1,) * len(values), "", tuple(values), tuple(values))
    tree = RolloutTree(_tree().task, (_tree().nodes[0], node), (Leaf(1, StopReason.EOS),))
    scored = ScoredTree(tree, (Reward(0.0),), (Credit(0.0, {}),), (False,))
    assert repr(unpack_tree(pack_trees([scored])[0]).tree.nodes[1]) == repr(node)


def test_a_frame_that_would_fill_the_memory_or_hides_its_size_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo.runs.trees.MAX_TREE_BYTES", 1999)
    text = json.dumps({"task": "x" * 2000}).encode()
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(b"{}")
    for frame in (zstandard.compress(text), hidden):
        with pytest.raises(ValueError, match="more than 1,999 bytes"):
            unpack_tree(frame)


def test_a_flipped_bit_never_gives_another_tree() -> None:
    frame, _ = pack_trees([_scored()])
    for place in range(len(frame)):
        for bit in (1, 8, 128):
            flipped = bytearray(frame)
            flipped[place] ^= bit
            with suppress(ValueError):
                assert unpack_tree(bytes(flipped)) == _scored()


def test_a_missing_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="2 leaves, 1 rewards"):
        ScoredTree(_tree(), REWARDS[:1], CREDITS)


def test_trees_are_read_one_by_one_or_together(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path / "run", {})
    _save(run_dir, 12, "a", "b", "\ud800")
    reader = open_run_dir(tmp_path / "run")
    assert reader.read_tree(12, 1) == _scored("b")
    assert reader.read_trees(12) == [_scored("a"), _scored("b"), _scored("\ud800")]
    assert [(e.task, e.mean_reward, e.num_trajectories, e.branch_points) for e in reader.tree_index(12)] == [
        (name, (1.1 - 1.0) / 2, 2, 1) for name in ("a", "b", "\ud800")
    ]
    assert reader.tree_steps() == [12]
    with pytest.raises(ArpoError, match="no tree 3 in step 12, which has 3 trees"):
        reader.read_tree(12, 3)
    with pytest.raises(ArpoError, match="no trees of step 1"):
        reader.read_trees(1)


def test_an_index_summarizes_each_tree() -> None:
    task = replace(_tree().task, question="x" * 1000)
    scored = ScoredTree(replace(_tree(), task=task), (REWARDS[0], Reward(1.1, {"correct": 1.0})), CREDITS)
    entry = pack_trees([scored])[1][0]
    assert (entry.question, entry.kind, entry.max_reward, entry.min_reward) == ("x" * 300, "hop1", 1.1, 1.1)
    assert (entry.tool_calls, entry.tool_errors, entry.informative, entry.accuracy) == (1, 1, False, 0.5)
    other = pack_trees([_scored()])[1][0]
    assert (other.max_reward, other.min_reward, other.informative, other.accuracy) == (1.1, -1.0, True, None)


@pytest.mark.parametrize("bad", ["{}", '{"trees": [{"offset": 1}]}', '{"trees": 5}', "[]", "[" * 100_000])
def test_a_damaged_index_is_reported(tmp_path: Path, bad: str) -> None:
    run_dir = create_run_dir(tmp_path / "run", {})
    _save(run_dir, 1, "a")
    run_dir.tree_files(1)[1].write_text(bad)
    with pytest.raises(ArpoError, match="damaged"):
        run_dir.read_tree(1, 0)


def test_a_node_with_char_offsets_has_one_for_every_token() -> None:
    with pytest.raises(ValueError, match="2 tokens, 1 character offsets"):
        Node(0, Kind.MODEL, (1, 2), "ab", (0.0, 0.0), (0.0, 0.0), char_offsets=(1,))


def test_reading_one_tree_does_not_read_others(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path / "run", {})
    _save(run_dir, 1, "a", "b")
    path = tmp_path / "run/trees/step_000001.jsonl.zst"
    length = run_dir.tree_index(1)[0].length
    path.write_bytes(b"\xff" * length + path.read_bytes()[length:])
    assert run_dir.read_tree(1, 1) == _scored("b")
    with pytest.raises(ArpoError, match=r"step_000001\.jsonl\.zst: damaged"):
        run_dir.read_tree(1, 0)


def test_tree_file_is_plain_json_lines_for_other_programs(tmp_path: Path) -> None:
    _save(create_run_dir(tmp_path / "run", {}), 1, "a", "b")
    path = tmp_path / "run/trees/step_000001.jsonl.zst"
    with path.open("rb") as file:
        text = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    assert [json.loads(line)["task"]["id"] for line in text.splitlines()] == ["a", "b"]
    if shutil.which("zstd"):
        assert subprocess.run(["zstd", "-dc", path], capture_output=True, check=True).stdout == text


def test_trees_without_an_index_do_not_exist_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = create_run_dir(tmp_path / "run", {})
    _save(run_dir, 1, "a", "b")
    write = run_dir_module.write_atomically

    def crash_at_index(path: Path, content: bytes) -> None:
        if path.name.endswith(".index.json"):
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(run_dir_module, "write_atomically", crash_at_index)
    for step in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            _save(run_dir, step, "c")
    assert run_dir.tree_steps() == []  # step 1's old index does not describe the new data
    run_dir.roll_back(1)
    assert [path.name for path in (tmp_path / "run/trees").iterdir()] == ["step_000001.jsonl.zst"]


# --- starting and locking


def test_create_writes_the_configuration(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "run"
    create_run_dir(directory, {"seed": 3, "model": {"path": "tiny"}})
    assert open_run_dir(directory).config() == {"seed": 3, "model": {"path": "tiny"}}
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "run.lock"]


def test_create_never_touches_a_used_directory(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    create_run_dir(directory, {"seed": 1}).close()
    with pytest.raises(ArpoError, match=r"already holds a run; continue it \(--resume, in Python resume=True\)"):
        create_run_dir(directory, {"seed": 2})
    assert open_run_dir(directory).config() == {"seed": 1}
    with pytest.raises(ArpoError, match="is not empty and holds no run"):
        create_run_dir(tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "file").touch()
    with pytest.raises(ArpoError, match="is a file"):
        create_run_dir(tmp_path / "file", {})
    with pytest.raises(ArpoError, match="cannot be created: Not a directory"):
        create_run_dir(tmp_path / "file" / "run", {})


def test_create_works_after_a_crash_in_create(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("1\n")
    (tmp_path / "config.json.tmp").write_text("{")
    create_run_dir(tmp_path, {"seed": 1})
    assert open_run_dir(tmp_path).config() == {"seed": 1}


def test_open_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ArpoError, match=r"not a run \(it has no config\.json\)"):
        open_run_dir(tmp_path / "nothing")


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    create_run_dir(tmp_path / "run", {}).close()
    code = (
        "import sys, pathlib; from arpo.runs.run_dir import open_run_dir\n"
        "log = open_run_dir(pathlib.Path(sys.argv[1]), write=True); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(ArpoError, match=rf"run\.lock: another process \(pid {other.pid}\) is writing this run"):
            open_run_dir(tmp_path / "run", write=True)
        assert open_run_dir(tmp_path / "run").read_metrics() == []  # looking on is allowed
        other.kill()
    with open_run_dir(tmp_path / "run", write=True) as run_dir:  # the lock died with its process
        run_dir.append_metrics(1, {})
    open_run_dir(tmp_path / "run", write=True)  # and is given back


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    create_run_dir(tmp_path / "run", {}).close()
    run_dir = open_run_dir(tmp_path / "run")
    attempts: list[Callable[[], None]] = [
        lambda: run_dir.append_metrics(1, {}),
        lambda: run_dir.roll_back(0),
        lambda: _save(run_dir, 1, "a"),
        lambda: run_dir.write_evaluation(1, {}),
        lambda: run_dir.commit_checkpoint(1, _checkpoint("x"), 1),
    ]
    for attempt in attempts:
        with pytest.raises(RuntimeError, match="opened read-only"):
            attempt()


# --- metrics


def test_metrics_are_valid_json_lines(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path / "run", {})
    run_dir.append_metrics(1, {"loss": 0.1 + 0.2, "tokens": 7, "note": "ä\n\ud800"})
    run_dir.append_metrics(2, {"loss": math.nan, "up": math.inf, "down": -math.inf})
    expected = [
        {"step": 1, "loss": 0.1 + 0.2, "tokens": 7, "note": "ä\n\ud800"},
        {"step": 2, "loss": None, "up": None, "down": None},
    ]
    assert open_run_dir(tmp_path / "run").read_metrics() == expected
    assert len((tmp_path / "run/metrics.jsonl").read_bytes().splitlines()) == 2
    with pytest.raises(ValueError, match="not a metric"):
        run_dir.append_metrics(3, {"step": 4})


@pytest.mark.parametrize("torn", [b"{", b'{"step": 3, "a": "\xc3', b'{"step": 3}'])
def test_a_truncated_last_line_is_skipped_and_removed(tmp_path: Path, torn: bytes) -> None:
    with create_run_dir(tmp_path / "run", {}) as run_dir:
        run_dir.append_metrics(1, {})
        run_dir.append_metrics(2, {})
    path = tmp_path / "run/metrics.jsonl"
    path.write_bytes(path.read_bytes() + torn)
    assert open_run_dir(tmp_path / "run").read_metrics() == [{"step": 1}, {"step": 2}]
    with open_run_dir(tmp_path / "run", write=True) as run_dir:
        run_dir.append_metrics(3, {"a": 1})
    assert open_run_dir(tmp_path / "run").read_metrics() == [{"step": 1}, {"step": 2}, {"step": 3, "a": 1}]


@pytest.mark.parametrize("damage", [b"{\n", b"[1]\n", b"\n", b"\xff\n"])
def test_any_other_damage_is_an_error(tmp_path: Path, damage: bytes) -> None:
    run_dir = create_run_dir(tmp_path / "run", {})
    (tmp_path / "run/metrics.jsonl").write_bytes(b'{"step": 1}\n' + damage)
    with pytest.raises(ArpoError, match=r"metrics\.jsonl: line 2 is damaged"):
        run_dir.read_metrics()


def test_roll_back_leaves_the_files_of_a_run_stopped_there(tmp_path: Path) -> None:
    logs = [create_run_dir(tmp_path / name, {}) for name in ("whole", "short")]
    for run_dir, steps in zip(logs, (5, 3), strict=True):
        for step in range(1, steps + 1):
            run_dir.append_metrics(step, {"loss": 1 / step, "bad": math.nan})
            _save(run_dir, step, f"q{step}")
            run_dir.write_evaluation(step, {"format": 1 / step})
            run_dir.commit_checkpoint(step, _checkpoint(str(step)), keep=9)
    logs[0].roll_back(3)

    def contents(run_dir: RunDir) -> dict[str, bytes]:
        files = [path for path in run_dir.directory.rglob("*") if path.is_file() and path.name != "run.lock"]
        return {str(path.relative_to(run_dir.directory)): path.read_bytes() for path in files}

    assert contents(logs[0]) == contents(logs[1])
    assert logs[0].latest_checkpoint() == (3, tmp_path / "whole/checkpoints/step_000003")


# --- evaluations


def test_evaluations_are_read_as_they_were_written(tmp_path: Path) -> None:
    of_hop1 = {"value": 0.1 + 0.2, "low": 0.0, "high": 1.0, "questions": 3}
    with create_run_dir(tmp_path / "run", {}) as run_dir:
        assert run_dir.evaluation_steps() == []
        run_dir.write_evaluation(30, {"by_kind": {}})
        run_dir.write_evaluation(0, {"by_kind": {"old": {}}})
        run_dir.write_evaluation(0, {"by_kind": {"hop1": of_hop1, "\u202e": of_hop1}})
    found = open_run_dir(tmp_path / "run")
    assert found.evaluation_steps() == [0, 30]
    assert found.read_evaluation(0) == {"step": 0, "by_kind": {"hop1": of_hop1, "\u202e": of_hop1}}
    assert found.read_evaluation(30) == {"step": 30, "by_kind": {}}
    with pytest.raises(ArpoError, match="holds no evaluation of step 7"):
        found.read_evaluation(7)
    (tmp_path / "run/evaluations/step_000030.json").write_text("[")
    with pytest.raises(ArpoError, match=r"step_000030\.json: line 1 is damaged"):
        found.read_evaluation(30)


# --- checkpoints


@pytest.mark.parametrize("bad", ["{}", '{"id": 1, "step": 2}', '{"id": "x", "step": "2"}', "[]", "", '{"id": "x", "st'])
def test_a_damaged_tracker_state_is_named(tmp_path: Path, bad: str) -> None:
    run_dir = create_run_dir(tmp_path / "run", {})
    run_dir.write_tracker_state("wandb", TrackerState("x", 2))
    assert run_dir.tracker_state("wandb") == TrackerState("x", 2)
    (tmp_path / "run" / "tracker_wandb.json").write_text(bad)
    with pytest.raises(ArpoError, match=r"tracker_wandb\.json: .*damaged"):
        run_dir.tracker_state("wandb")


def test_checkpoints_keep_the_newest(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path / "run", {})
    assert run_dir.latest_checkpoint() is None
    for step in (1, 2, 10, 1_000_000):
        run_dir.commit_checkpoint(step, _checkpoint(str(step)), keep=2)
    assert run_dir.checkpoint_steps() == [10, 1_000_000]
    latest = run_dir.latest_checkpoint()
    assert latest == (1_000_000, run_dir.checkpoint_path(1_000_000))
    assert (latest[1] / "inner/weights").read_text() == "1000000"
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step_000010", "step_1000000"]
    with pytest.raises(ValueError, match="never replaced"):
        run_dir.commit_checkpoint(10, _checkpoint("x"), keep=2)
    with pytest.raises(ValueError, match="keep is 0"):
        run_dir.commit_checkpoint(11, _checkpoint("x"), keep=0)


def test_a_crash_while_writing_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path / "run", {})
    run_dir.commit_checkpoint(1, _checkpoint("old"), keep=1)

    def crash(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_dir.commit_checkpoint(2, crash, keep=1)
    assert run_dir.latest_checkpoint() == (1, run_dir.checkpoint_path(1))
    run_dir.commit_checkpoint(3, _checkpoint("new"), keep=1)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_000003"]


@pytest.mark.parametrize("call", ["rename", "rmtree", "sync"])
def test_a_crash_at_any_later_point_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Stop at the first, second, ... such call of a commit; whatever has a checkpoint's name must be whole."""
    owner, name = {"rename": (Path, "rename"), "rmtree": (shutil, "rmtree"), "sync": (run_dir_module, "_sync")}[call]
    original = getattr(owner, name)
    for allowed in range(6):
        directory = tmp_path / f"{call}{allowed}"
        run_dir = create_run_dir(directory, {})
        run_dir.commit_checkpoint(1, _checkpoint("1"), keep=1)
        left = [allowed]

        def crashing(*args: Any, left: list[int] = left) -> Any:
            if not left[0]:
                if call == "rmtree":
                    next(path for path in args[0].rglob("*") if path.is_file()).unlink()  # half done
                raise KeyboardInterrupt
            left[0] -= 1
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, crashing)
            try:
                run_dir.commit_checkpoint(2, _checkpoint("2"), keep=1)
            except KeyboardInterrupt:
                assert left == [0]
        latest = run_dir.latest_checkpoint()
        assert latest is not None
        for step in run_dir.checkpoint_steps():
            assert (run_dir.checkpoint_path(step) / "inner/weights").read_text() == str(step)
        run_dir.commit_checkpoint(3, _checkpoint("3"), keep=1)
        assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step_000003"]


def test_everything_in_a_checkpoint_is_on_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = create_run_dir(tmp_path / "run", {})
    run_dir.append_metrics(1, {})
    synced: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        run_dir_module, "_sync", lambda path: synced.append((path.name, run_dir.checkpoint_path(1).exists()))
    )
    run_dir.commit_checkpoint(1, _checkpoint("x"), keep=1)
    *before, last, parent, top = synced
    written = ["weights", "inner", "config.json", "metrics.jsonl", "trees.json", "run", "manifest.json"]
    assert sorted(before) == sorted((name, False) for name in [*written, "step_000001.tmp"])
    assert before.index(("inner", False)) < before.index(("step_000001.tmp", False))
    assert [last, parent, top] == [("metrics.jsonl", False), ("checkpoints", True), ("run", True)]


def test_a_lock_that_was_deleted_is_acquired_again_but_not_in_another_directory(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with create_run_dir(directory, {}) as run:
        (directory / "run.lock").unlink()
        assert not is_live(directory)
        run.append_metrics(1, {"reward": 0.5})
        assert is_live(directory)
        run.append_metrics(2, {"reward": 0.5})
        (directory / "run.lock").unlink()
        with open_run_dir(directory, write=True), pytest.raises(ArpoError, match="was deleted, moved or replaced"):
            run.append_metrics(3, {})
    with open_run_dir(directory, write=True) as run:
        shutil.rmtree(directory)
        directory.mkdir()
        with pytest.raises(ArpoError, match="was deleted, moved or replaced"):
            run.append_metrics(3, {})
    assert list(directory.iterdir()) == []


def test_appending_a_record_copies_no_others(tmp_path: Path) -> None:
    with create_run_dir(tmp_path / "run", {}) as run:
        run.append_metrics(1, {"text": "x" * 4_000_000})
        run.append_metrics(2, {"reward": 0.5})  # makes room for more
        tracemalloc.start()
        try:
            run.append_metrics(3, {"reward": 0.5})
            assert tracemalloc.get_traced_memory()[1] < 2_000_000
        finally:
            tracemalloc.stop()
    assert [record["step"] for record in run.read_metrics()] == [1, 2, 3]


def test_large_files_are_hashed_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 10)
    monkeypatch.setattr(manifest, "READ_BYTES", 4)
    contents = {"empty": b"", "small": b"0123456789", "large": b"0123456789abcdefghijABC"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    blocks = b"".join(hashlib.sha256(block).digest() for block in (b"0123456789", b"abcdefghij", b"ABC"))
    expected = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    expected["large"] = hashlib.sha256(blocks).hexdigest()
    assert manifest.sha256_of(tmp_path, list(contents)) == expected
    manifest.write_manifest(tmp_path, 1)
    (tmp_path / "large").write_bytes(b"0123456789abcdefghijABD")
    assert manifest.find_damage(tmp_path, 1) == "large was changed: its SHA-256 is another"
