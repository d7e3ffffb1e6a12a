"""No finished step is lost, and damage is noticed: a closed terminal, a full disk, a flipped bit, a lost record."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import warm_process
from training_runs import SMALL, assert_same, config_for, run_to_the_end, with_reward

from arpo.errors import ArpoError
from arpo.models.resolve import load_policy
from arpo.runs import manifest
from arpo.runs.manifest import write_manifest
from arpo.runs.reporter import Reporter
from arpo.runs.run_dir import RunDir, create_run_dir, open_run_dir
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.runs.storage import StorageError
from arpo.trainer.trainer import Trainer
from arpo.training.checkpoints import find_start
from arpo.training.export import export_model
from arpo.training.loop import RESUMABLE_KEYS, RUN_KIND_METRIC, open_training, train

HANGUP = "import signal; signal.signal(signal.SIGHUP, signal.{}); " + warm_process.CLI
ENDLESS = ("train.steps=100000", "run.checkpoint_every=100000")


def command(model: Path, directory: Path, *more: str) -> list[str]:
    config = directory.parent / "config.toml"
    config.write_text("")
    return ["train", str(config), *SMALL, f"model.path={model}", f"run.dir={directory}", *more]


def wait_for_steps(process: BaseProcess, directory: Path, count: int = 1) -> None:
    metrics = directory / "metrics.jsonl"
    while process.is_alive() and not (metrics.exists() and metrics.read_text().count("\n") >= count):
        time.sleep(0.02)


def assert_saved(directory: Path) -> None:
    log = read_run(directory)
    assert (log.latest_checkpoint() or (0,))[0] == log.read_metrics()[-1]["step"] >= 1


@pytest.mark.slow
def test_a_closed_terminal_saves_the_run(model_path: Path, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    terminal = Path(os.ttyname(theirs))  # a session that opens it is controlled by it
    given = command(model_path, tmp_path / "run", *ENDLESS)
    process = warm_process.start(HANGUP.format("SIG_DFL"), *given, output=terminal)
    try:
        os.read(ours, 1)  # it has opened the terminal
        os.close(theirs)
        wait_for_steps(process, tmp_path / "run")
        os.close(ours)  # the kernel sends SIGHUP, and printing raises from now on
        process.join()
    finally:
        process.kill()
    assert process.exitcode in (130, 1)  # 1 if it was just printing
    assert_saved(tmp_path / "run")


@pytest.mark.slow
def test_hangups_save_once_and_are_ignored_under_nohup(model_path: Path, tmp_path: Path) -> None:
    for ignored in (False, True):
        directory = tmp_path / f"run-{ignored}"
        given, output = command(model_path, directory, *ENDLESS), tmp_path / "output.txt"
        code = HANGUP.format("SIG_IGN" if ignored else "SIG_DFL")
        process = warm_process.start(code, *given, output=output)
        try:
            wait_for_steps(process, directory)
            for _ in range(3):  # a shell and the kernel both send it
                os.kill(process.pid or 0, signal.SIGHUP)
            if ignored:
                wait_for_steps(process, directory, (directory / "metrics.jsonl").read_text().count("\n") + 2)
                assert process.is_alive() and read_run(directory).checkpoint_steps() == []
                os.kill(process.pid or 0, signal.SIGTERM)
            process.join()
        finally:
            process.kill()
        assert process.exitcode == 130, output.read_text()
        assert "--resume" in output.read_text() and "Traceback" not in output.read_text()
        assert_saved(directory)


@pytest.mark.slow
def test_a_reader_of_the_output_that_ends_costs_no_step(model_path: Path, tmp_path: Path) -> None:
    """As in `arpo train my.toml | head -1`."""
    os.mkfifo(tmp_path / "pipe")
    given = command(model_path, tmp_path / "run", *ENDLESS)
    process = warm_process.start(warm_process.CLI, *given, output=tmp_path / "pipe")
    try:
        with (tmp_path / "pipe").open() as pipe:
            wait_for_steps(process, tmp_path / "run")
            pipe.readline()
        process.join()
    finally:
        process.kill()
    assert process.exitcode == 1
    assert_saved(tmp_path / "run")


FULL_DISK = """
mount -t tmpfs -o size=$1 none "$2" || exit 77
shift 2
"$@" && exit 78
code=$?
echo "code $code"
mount -o remount,size=100m "$MOUNTED" && "$@" --resume
"""


@pytest.mark.slow
def test_a_full_disk_stops_a_run_that_continues_when_there_is_room(model_path: Path, tmp_path: Path) -> None:
    if not shutil.which("unshare") or subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("a small file system of one's own needs user namespaces, which are not allowed here")
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(file.stat().st_size for file in model_path.iterdir())
    given = command(model_path, tmp_path / "run", "train.steps=6", "run.checkpoint_every=1", f"run.dir={disk / 'run'}")
    arpo = [sys.executable, "-m", "arpo", *given]
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", FULL_DISK, "sh", str(6 * size), str(disk), *arpo],
        capture_output=True,
        text=True,
        env={**os.environ, "MOUNTED": str(disk)},
    )
    if done.returncode == 77:
        pytest.skip("a tmpfs cannot be mounted here")
    assert done.returncode == 0, done.stderr
    assert "code 2" in done.stdout and "done: 6 steps" in done.stdout
    assert f"The file system {disk} has " in done.stderr and "--resume" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


class Warnings(Reporter):
    """Remembers what it is warned of."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def warning(self, text: str) -> None:
        self.heard.append(text)


@pytest.mark.parametrize("event", ["training_step", "warning"])
def test_a_step_is_saved_although_nothing_can_be_printed(
    event: str, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model has no right format, of which the first step warns."""

    def gone(*_: object) -> None:
        raise BrokenPipeError

    reporter = Warnings()
    monkeypatch.setattr(reporter, event, gone)
    config = config_for(model_path, tmp_path / "run", "run.checkpoint_every=100")
    with pytest.raises(BrokenPipeError), open_training(config, reporter=reporter) as training:
        asyncio.run(train(training))
    assert_saved(tmp_path / "run")


@pytest.fixture(scope="session")
def four_steps(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4; tests must not change it."""
    directory = tmp_path_factory.mktemp("four") / "run"
    run_to_the_end(config_for(model_path, directory))
    return directory


@pytest.fixture(scope="session")
def six_steps(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, undisturbed for two steps more."""
    directory = tmp_path_factory.mktemp("six") / "run"
    run_to_the_end(config_for(model_path, directory, "train.steps=6"))
    return directory


def start_of(model: Path, directory: Path, *more: str) -> tuple[str, list[str]]:
    """The checkpoint that a resumed run starts from, and what was said."""
    reporter = Warnings()
    config = config_for(model, directory, "train.steps=6", *more)
    with find_start(config, True, RESUMABLE_KEYS, RUN_KIND_METRIC, reporter) as start:
        return start.checkpoint.name if start.checkpoint else "", reporter.heard


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


FILES = ["model/model.safetensors", "model/config.json", "model/tokenizer.json", "optimizer.safetensors", "state.json"]
FILES += ["run/config.json", "run/metrics.jsonl", "run/trees.json", "manifest.json"]
SPOIL = [flip_a_bit, cut, lambda path: os.truncate(path, 0), Path.unlink, replace_by_a_folder, replace_by_a_pipe]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    model_path: Path, four_steps: Path, tmp_path: Path
) -> None:
    assert start_of(model_path, four_steps) == ("step_000004", [])
    cases = [case for case in itertools.product(FILES, SPOIL) if case != ("manifest.json", Path.unlink)]
    for number, (name, spoil) in enumerate(cases):
        directory = shutil.copytree(four_steps, tmp_path / str(number))
        spoil(directory / "checkpoints" / "step_000004" / name)
        checkpoint, (said,) = start_of(model_path, directory)
        assert checkpoint == "step_000002", (name, spoil)
        assert f"the checkpoint of step 4 is damaged: {name}" in said or name == "manifest.json", said
        assert "step_000004.damaged" in said and "continues from step 2" in said
        assert start_of(model_path, directory) == ("step_000002", [])


def set_step(directory: Path) -> None:
    path = directory / "checkpoints/step_000004/state.json"
    path.write_text(path.read_text().replace('"step": 4', '"step": 3'))


def swap_weights(directory: Path) -> None:
    old, new = (directory / f"checkpoints/step_00000{step}/model/model.safetensors" for step in (2, 4))
    shutil.copyfile(old, new)


def swap_all(directory: Path) -> None:
    shutil.rmtree(directory / "checkpoints/step_000004")
    shutil.copytree(directory / "checkpoints/step_000002", directory / "checkpoints/step_000004")


def of_another_run(directory: Path) -> None:
    """With a manifest that is right: only the settings tell."""
    checkpoint = directory / "checkpoints/step_000004"
    path = checkpoint / "run/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "seed": 7}))
    write_manifest(checkpoint, 4)


def add_an_adapter(directory: Path) -> None:
    (directory / "checkpoints/step_000004/model/adapter_config.json").write_text("{}")


def add_weights(directory: Path) -> None:
    (directory / "checkpoints/step_000004/model/model.safetensors.index.json").write_text("{}")


def odd_manifest(directory: Path) -> None:
    content = '{"step": NaN, "files": {"state.json": {"bytes": NaN, "sha256": ""}}}'
    (directory / "checkpoints/step_000004/manifest.json").write_text(content)


def nested_manifest(directory: Path) -> None:
    (directory / "checkpoints/step_000004/manifest.json").write_text("[" * 100_000)


def huge_manifest(directory: Path) -> None:
    os.truncate(directory / "checkpoints/step_000004/manifest.json", 1 << 40)  # with a hole


def dangling_link(directory: Path) -> None:
    shutil.rmtree(directory / "checkpoints/step_000004")
    (directory / "checkpoints/step_000004").symlink_to("nowhere")


def a_file_instead(directory: Path) -> None:
    shutil.rmtree(directory / "checkpoints/step_000004")
    (directory / "checkpoints/step_000004").write_text("")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (set_step, "state.json was changed"),
        (swap_weights, "model/model.safetensors was changed"),
        (swap_all, "it is the checkpoint of step 2"),
        (of_another_run, "it is of another run, with seed"),
        (add_an_adapter, "model/adapter_config.json is not part of it"),
        (add_weights, "model/model.safetensors.index.json is not part of it"),
        (odd_manifest, "manifest.json is damaged"),
        (nested_manifest, "manifest.json is damaged"),
        (huge_manifest, "manifest.json is damaged"),
        (dangling_link, "it is not a directory"),
        (a_file_instead, "it is not a directory"),
    ],
)
def test_a_checkpoint_must_be_this_runs_of_this_step(
    model_path: Path, four_steps: Path, tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    directory = shutil.copytree(four_steps, tmp_path / "run")
    spoil(directory)
    checkpoint, (said,) = start_of(model_path, directory)
    assert checkpoint == "step_000002" and f"the checkpoint of step 4 is damaged: {says}" in said


@pytest.mark.slow
def test_files_that_the_manifest_does_not_name_are_no_damage(
    model_path: Path, four_steps: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(four_steps, tmp_path / "run")
    for name in ("NOTES.md", "model/model-q8.gguf", "model/NOTES.md", "run/NOTES.md"):
        (directory / "checkpoints/step_000004" / name).write_text("mine")
    assert start_of(model_path, directory) == ("step_000004", [])
    assert export_model(directory, tmp_path / "out") == 4


@pytest.mark.slow
def test_a_run_of_a_version_without_manifests_is_used_with_one_warning(
    model_path: Path, four_steps: Path, six_steps: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(four_steps, tmp_path / "run")
    for step in (2, 4):
        (directory / f"checkpoints/step_00000{step}/manifest.json").unlink()
        shutil.rmtree(directory / f"checkpoints/step_00000{step}/run")
    checkpoint = directory / "checkpoints/step_000004"
    says = [f"{checkpoint} has no manifest.json (older version?), so it was not verified"]
    config = config_for(model_path, directory, "train.steps=6")
    for path in (directory, checkpoint / "model"):
        reporter = Warnings()
        load_policy(config_for(path, tmp_path / "new"), reporter)
        assert reporter.heard == says
        with open_training(config_for(path, tmp_path / path.name / "new"), reporter=reporter):
            assert [said for said in reporter.heard if "manifest" in said] == says * 2
    reporter = Warnings()
    assert export_model(directory, tmp_path / "out", reporter=reporter) == 4 and reporter.heard == says
    reporter = Warnings()
    with pytest.raises(ArpoError, match=r"begun with other settings.*\nseed"):
        start_of(model_path, directory, "seed=7")
    with open_training(config, resume=True, reporter=reporter) as training:
        asyncio.run(train(with_reward(training)))
    assert [said for said in reporter.heard if "manifest" in said] == says
    assert_same(directory, six_steps)
    assert start_of(model_path, directory) == ("step_000006", [])


@pytest.mark.slow
def test_settings_are_compared_before_files_are_hashed(
    model_path: Path, four_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "_hash", lambda *_: pytest.fail("a file was hashed"))
    with pytest.raises(ArpoError, match=r"begun with other settings.*\nseed"):
        start_of(model_path, four_steps, "seed=7")
    directory = shutil.copytree(four_steps, tmp_path / "run")
    (directory / "config.json").write_text("{")
    with pytest.raises(ArpoError, match=r"begun with other settings.*\nseed"):
        start_of(model_path, directory, "seed=7")


@pytest.mark.slow
def test_a_resumed_checkpoint_is_hashed_once(
    model_path: Path, four_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = shutil.copytree(four_steps, tmp_path / "run")
    hashed, original = [], manifest._hash

    def counted(path: Path, start: int) -> bytes:
        hashed.append(path.name)
        return original(path, start)

    monkeypatch.setattr(manifest, "_hash", counted)
    config = config_for(model_path, directory, "train.steps=6")
    with open_training(config, resume=True):
        assert hashed.count("model.safetensors") == 1
    hashed.clear()
    with open_training(config_for(directory, tmp_path / "new", "loss.kl_coef=0.1")):  # also loaded as the reference
        assert hashed.count("model.safetensors") == 1


@pytest.mark.slow
def test_a_checkpoint_elsewhere_is_used_through_its_link_and_only_the_link_is_deleted(
    model_path: Path, four_steps: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(four_steps, tmp_path / "run")
    elsewhere = (directory / "checkpoints/step_000004").rename(tmp_path / "elsewhere")
    (directory / "checkpoints/step_000004").symlink_to(elsewhere)
    assert start_of(model_path, directory) == ("step_000004", [])
    with open_run_dir(directory, write=True) as run:
        run.delete_checkpoints()
    assert (elsewhere / "state.json").is_file() and list((directory / "checkpoints").iterdir()) == []


@pytest.mark.slow
def test_without_a_good_checkpoint_nothing_is_changed_and_the_message_says_what_to_do(
    model_path: Path, four_steps: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(four_steps, tmp_path / "run")
    for step in (2, 4):
        cut(directory / f"checkpoints/step_00000{step}/optimizer.safetensors")
    before = sorted(directory.rglob("*"))
    with pytest.raises(ArpoError, match=r"only damaged checkpoints:\n  step 4: opt.*\n  step 2: opt.*\n.* another run"):
        start_of(model_path, directory)
    assert sorted(directory.rglob("*")) == before
    shutil.rmtree(directory / "checkpoints")
    with pytest.raises(ArpoError, match="4 steps are recorded, but the checkpoints are gone"):
        start_of(model_path, directory)
    assert (directory / "metrics.jsonl").read_bytes() == (four_steps / "metrics.jsonl").read_bytes()


def lose_a_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1] + lines[2:]))


def edit_a_number(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"reward": 0.', b'"reward": 1.', 1))


def fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [*SPOIL[:4], lose_a_line, edit_a_number, fill_with_zeros])
def test_lost_and_changed_records_are_restored(
    model_path: Path, four_steps: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    directory = shutil.copytree(four_steps, tmp_path / "run")
    spoil(directory / "metrics.jsonl")
    checkpoint, (said,) = start_of(model_path, directory)
    assert checkpoint == "step_000004" and "metrics.jsonl had lost or changed records; it was restored" in said
    assert (directory / "metrics.jsonl").read_bytes() == (four_steps / "metrics.jsonl").read_bytes()
    spoil(directory / "config.json")
    checkpoint, notes = start_of(model_path, directory)
    assert checkpoint == "step_000004" and len(notes) == (spoil not in (lose_a_line, edit_a_number))
    if notes:
        assert "config.json was missing or damaged; it was restored" in notes[0]
        assert (directory / "config.json").read_bytes() == (four_steps / "config.json").read_bytes()


@pytest.mark.slow
def test_damaged_records_after_the_last_checkpoint_are_dropped_with_the_others(
    model_path: Path, four_steps: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(four_steps, tmp_path / "run")
    shutil.rmtree(directory / "checkpoints/step_000004")
    lines = (directory / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_bytes(b"".join([*lines[:2], b"\0{ damaged\n", lines[3], b'{"half']))
    assert start_of(model_path, directory) == ("step_000002", [])
    with open_run_dir(directory, write=True) as run:
        run.roll_back(2)
    assert (directory / "metrics.jsonl").read_bytes() == b"".join(lines[:2])


@pytest.mark.slow
def test_values_added_after_the_checkpoint_are_no_damage(model_path: Path, four_steps: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(four_steps, tmp_path / "run")
    with open_run_dir(directory, write=True) as run:
        run.update_metrics(4, {"test_accuracy": 0.5})
    assert start_of(model_path, directory) == ("step_000004", [])
    assert read_run(directory).read_metrics()[-1]["test_accuracy"] == 0.5


@pytest.mark.slow
def test_lost_trees_are_noticed_and_damaged_ones_are_not_read(
    model_path: Path, four_steps: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(four_steps, tmp_path / "run")
    flip_a_bit(directory / "trees/step_000002.jsonl.zst")
    with pytest.raises(ArpoError, match=r"step_000002\.jsonl\.zst: damaged"):
        read_run(directory).read_trees(2)
    (directory / "trees/step_000003.index.json").unlink()
    (directory / "trees/step_of_mine.txt").write_text("a note")
    checkpoint, (said,) = start_of(model_path, directory)
    assert checkpoint == "step_000004"
    assert "step_000002.jsonl.zst and 1 more: saved trees are missing or damaged" in said


@pytest.mark.slow
def test_a_run_resumed_after_damage_equals_an_undisturbed_one(
    model_path: Path, four_steps: Path, six_steps: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(four_steps, tmp_path / "run")
    flip_a_bit(directory / "checkpoints/step_000004/model/model.safetensors")
    (directory / "metrics.jsonl").unlink()
    cut(directory / "config.json")
    run_to_the_end(config_for(model_path, directory, "train.steps=6"), resume=True)
    assert_same(directory, six_steps)


@pytest.mark.slow
def test_weights_of_a_damaged_checkpoint_are_not_used(model_path: Path, four_steps: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(four_steps, tmp_path / "run")
    checkpoint = directory / "checkpoints/step_000004"
    flip_a_bit(checkpoint / "model/model.safetensors")
    for path in (directory, checkpoint / "model"):
        with pytest.raises(ArpoError, match=r"step_000004 is damaged: model/model\.safetensors was changed"):
            load_policy(config_for(path, tmp_path / "new"))
    with pytest.raises(ArpoError, match=r"step_000004 is damaged: model/model\.safetensors was changed"):
        export_model(directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert export_model(directory, tmp_path / "out", 2) == 2
    assert load_policy(config_for(directory / "checkpoints/step_000002/model", tmp_path / "new"))
    shutil.rmtree(checkpoint)
    (directory / "checkpoints/step_000002").rename(checkpoint)
    with pytest.raises(ArpoError, match="step_000004 is damaged: it is the checkpoint of step 2"):
        load_policy(config_for(directory, tmp_path / "new"))


@pytest.mark.slow
def test_a_model_is_used_though_the_rest_of_its_checkpoint_is_damaged(four_steps: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(four_steps, tmp_path / "run")
    (directory / "checkpoints/step_000004/optimizer.safetensors").unlink()
    flip_a_bit(directory / "checkpoints/step_000004/state.json")
    assert export_model(directory, tmp_path / "out") == 4
    assert load_policy(config_for(directory, tmp_path / "new"))


@pytest.mark.slow
def test_an_export_to_a_full_disk_leaves_nothing(
    four_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, copy: Path) -> None:
        copy.mkdir()
        raise shutil.Error([(str(source), str(copy), "[Errno 28] No space left on device: 'x'")])

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(StorageError, match=r"out: cannot be written: No space left on device\. The file system /"):
        export_model(four_steps, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_records_that_another_program_removes_are_written_again(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, reporter = tmp_path / "run", Warnings()
    append = RunDir.append_metrics

    def spoilt(self: RunDir, step: int, values: Any) -> bool:
        if step == 3:
            (directory / "metrics.jsonl").unlink()
        return append(self, step, values)

    monkeypatch.setattr(RunDir, "append_metrics", spoilt)
    with open_training(config_for(model_path, directory), reporter=reporter) as training:
        asyncio.run(train(with_reward(training)))
    assert [record["step"] for record in read_run(directory).read_metrics()] == [1, 2, 3, 4]
    assert [said for said in reporter.heard if "another program changed the records" in said]


@pytest.mark.slow
def test_a_deleted_lock_does_not_end_the_run(
    model_path: Path, four_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, update = tmp_path / "run", Trainer.update

    def spoilt(self: Trainer, trees: Any) -> Any:
        (directory / "run.lock").unlink()
        return update(self, trees)

    monkeypatch.setattr(Trainer, "update", spoilt)
    run_to_the_end(config_for(model_path, directory))
    assert_same(directory, four_steps)


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_a_run_directory_that_vanishes_ends_the_run_with_one_message(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """And never writes into a new run of the same name."""
    directory, config = tmp_path / "run", config_for(model_path, tmp_path / "run")
    update = Trainer.update

    def spoilt(self: Trainer, trees: Any) -> Any:
        shutil.rmtree(directory)
        if again:
            create_run_dir(directory, config.resolved()).close()
        return update(self, trees)

    with open_training(config) as training:
        monkeypatch.setattr(Trainer, "update", spoilt)
        with pytest.raises(ArpoError, match=r"run: was deleted, moved or replaced while this run was writing to it"):
            asyncio.run(train(with_reward(training)))
    left = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    assert left == (["config.json", "run.lock"] if again else [])
