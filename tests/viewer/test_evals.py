"""The viewer's API for evaluations: their numbers, and their answers in pages; nothing outside is read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from urllib.parse import urlencode

import pytest
from view_runs import make_branched, make_evaluation, straight

from arpo.errors import ArpoError
from arpo.evaluation import samples
from arpo.runs.trees import tree_to_json
from arpo.types import ScoredTree, Task
from arpo.viewer import api, evals
from arpo.viewer.export import collect
from arpo.viewer.folder import Folder, NotFound
from arpo.viewer.server import answer

WEIGHTS = "checkpoints/step_000005/model"


def trees(count: int) -> list[ScoredTree]:
    """Answers to as many questions, the even ones right, of two kinds."""
    tasks = [Task(f"q{n}", f"What is {n}?", (str(n),), kind="odd" if n % 2 else "even") for n in range(count)]
    return [straight(task, right=n % 2 == 0, count=1) for n, task in enumerate(tasks)]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A run, and beside its folder evaluations of it and of a model that is not in the folder."""
    make_branched(tmp_path / "runs/mine")
    make_evaluation(tmp_path / "evals/mine-test", trees(6), tmp_path / "runs/mine" / WEIGHTS)
    make_evaluation(tmp_path / "evals/other", trees(2), "Qwen/Qwen3-8B")
    return Folder(tmp_path / "runs", tmp_path / "evals")


def test_evaluations_are_listed_with_their_numbers(folder: Folder) -> None:
    (found,) = api.runs(folder)["evals"]
    (numbers,) = found.pop("sets")
    assert found.pop("agent").endswith(WEIGHTS)
    assert found == {
        "id": "../mine-test",
        "name": "mine-test",
        "run": "mine",
        "step": 5,
        "live": False,
        "problem": None,
    }
    assert (numbers["title"], numbers["questions"], numbers["answers"]) == ("held-out questions", 6, 6)
    written = json.loads((folder.root.parent / "evals/mine-test/results.json").read_text())["benchmarks"]["test"]
    assert numbers["accuracy"] == {name: written["accuracy"][name] for name in ("value", "low", "high")}
    (detail,) = evals.evaluation(folder, "../mine-test")["sets"]
    shown = {kind: (one["questions"], one["accuracy"]["value"]) for kind, one in detail["levels"].items()}
    assert shown == {"even": (3, 1.0), "odd": (3, 0.0)}


def test_evaluations_in_the_folder_itself(folder: Folder) -> None:
    """In a folder of their own, whatever model they are of, and inside a run."""
    alone = api.runs(Folder(folder.root.parent / "evals"))["evals"]
    assert [(one["id"], one["run"], one["agent"]) for one in alone][1:] == [("other", None, "Qwen/Qwen3-8B")]
    make_evaluation(folder.root / "mine/final", trees(1), folder.root / "mine" / WEIGHTS)
    assert [one["id"] for one in api.runs(folder)["evals"]] == ["mine/final", "../mine-test"]


def test_answers_come_in_pages(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages together are all answers, and each opens its own tree."""
    monkeypatch.setattr(evals, "PAGE_ANSWERS", 3)
    wanted, after, pages = trees(6), 0, []
    while True:
        page = evals.answers(folder, "../mine-test", "test", after, None, wrong=False)
        pages.append(page["answers"])
        after = page["next"]
        if not page["more"]:
            break
    found = [one for page in pages for one in page]
    assert [len(page) for page in pages] == [3, 3]
    assert [(one["question"], one["kind"], one["correct"]) for one in found] == [
        (f"What is {n}?", "odd" if n % 2 else "even", float(n % 2 == 0)) for n in range(6)
    ]
    for one, scored in zip(found, wanted, strict=True):
        read = evals.answer(folder, "../mine-test", "test", one["at"])
        assert json.dumps(read) == json.dumps(tree_to_json(scored))
    monkeypatch.setattr(evals, "PAGE_ANSWERS", 6)
    for kind, wrong, count in (("even", False, 3), ("even", True, 0), (None, True, 3), ("none", False, 0)):
        page = evals.answers(folder, "../mine-test", "test", 0, kind, wrong)
        assert (len(page["answers"]), page["more"], page["damaged"]) == (count, False, 0)


def test_a_page_is_bounded(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """By bytes, too: what is read at once may hold fewer answers; heads longer than a piece are read all the same."""
    monkeypatch.setattr(samples, "PAGE_BYTES", 1)
    page = evals.answers(folder, "../mine-test", "test", 0, "odd", wrong=False)
    assert (page["answers"], page["more"]) == ([], True)
    page = evals.answers(folder, "../mine-test", "test", page["next"], "odd", wrong=False)
    assert [one["task"] for one in page["answers"]] == ["q1"]
    path = folder.root.parent / "evals/mine-test/samples/test.jsonl"
    head = path.read_bytes().index(samples.TREE_KEY) + len(samples.TREE_KEY)
    monkeypatch.setattr(samples, "HEAD_BYTES", head + 10)  # the numbers, and not the question
    page = evals.answers(folder, "../mine-test", "test", 0, None, wrong=False)
    assert [(one["task"], one["question"]) for one in page["answers"]] == [("q0", "")]
    page = evals.answers(folder, "../mine-test", "test", page["next"], None, wrong=False)
    assert [one["task"] for one in page["answers"]] == ["q1"]


def test_damaged_and_unfinished_files(folder: Folder) -> None:
    directory = folder.root.parent / "evals/mine-test"
    path = directory / "samples/test.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"nonsense\n", b'{"tree": 1}\n', lines[1], lines[2][:-9]]))
    page = evals.answers(folder, "../mine-test", "test", 0, None, wrong=False)
    assert ([one["task"] for one in page["answers"]], page["more"], page["damaged"]) == (["q0", "q1"], False, 2)
    assert page["next"] == path.stat().st_size - len(lines[2][:-9])
    refused = {1: "no answer begins at byte 1", len(lines[0]): "is damaged", 10**12: "no answer begins"}
    for at, message in refused.items():
        with pytest.raises(ArpoError, match=message):
            evals.answer(folder, "../mine-test", "test", at)
    hostile_numbers = {"task": 3, "level": None, "failed": [1], "correct": "1", "reward": {}, "calls": True}
    record = {**json.loads(lines[0]), **hostile_numbers}
    path.write_text(json.dumps(record) + "\n")
    (one,) = evals.answers(folder, "../mine-test", "test", 0, None, wrong=False)["answers"]
    assert (one["task"], one["kind"], one["failed"], one["correct"], one["reward"], one["calls"]) == (
        *("", "", ""),
        *(None, None, None),
    )
    (directory / "results.json").write_text('{"benchmarks": {"test": {"accuracy": 1, "levels": [], "title": 3}}}')
    (numbers,) = evals.evaluation(folder, "../mine-test")["sets"]
    assert (numbers["title"], numbers["accuracy"], numbers["levels"]) == ("test", None, {})
    (directory / "results.json").write_text("[")
    assert evals.evaluation(folder, "../mine-test")["problem"] == "its results are damaged"
    (directory / "results.json").unlink()
    assert "not finished" in evals.evaluation(folder, "../mine-test")["problem"]


def test_images_of_answers(folder: Folder) -> None:
    directory = folder.root.parent / "evals/mine-test"
    content = b"\x89PNG\r\n\x1a\n and so on"
    name = hashlib.sha256(content).hexdigest()
    (directory / "images").mkdir()
    (directory / f"images/{name}.png").write_bytes(content)
    assert answer(folder, "image", urlencode({"eval": "../mine-test", "sha256": name})) == (200, content)
    assert answer(folder, "image", urlencode({"eval": "../mine-test", "sha256": "../settings"}))[0] == 404
    assert answer(folder, "image", urlencode({"run": "mine", "sha256": name}))[0] == 404
    assert evals.evaluation(folder, "../mine-test")["coordinates"] is None
    given = json.loads((directory / "settings.json").read_text())
    for settings, shown in (({}, "fraction"), ({"coordinates": "pixel"}, "pixel")):
        environment = {"name": "images", "settings": settings}
        (directory / "settings.json").write_text(json.dumps({**given, "environment": environment}))
        assert evals.evaluation(folder, "../mine-test")["coordinates"] == shown


def test_an_adapter_names_its_run(folder: Folder) -> None:
    """Its model is that of the hub."""
    path = folder.root.parent / "evals/other/settings.json"
    adapter = str(folder.root / "mine/checkpoints/step_000012/adapter")
    path.write_text(json.dumps({"model": {"path": "Qwen/Qwen3-8B", "adapter": adapter}}))
    found = {one["id"]: (one["run"], one["step"]) for one in api.runs(folder)["evals"]}
    assert found == {"../mine-test": ("mine", 5), "../other": ("mine", 12)}
    for broken in ({"model": {"path": "\0"}}, {"model": 3}, {}):
        path.write_text(json.dumps(broken))
        assert [one["id"] for one in api.runs(folder)["evals"]] == ["../mine-test"]


@pytest.mark.parametrize(
    ("name", "of"),
    [("../other", "test"), ("../../secret", "test"), ("../mine-test", "../../other/samples/test"), ("mine", "test")],
)
def test_nothing_else_is_opened(folder: Folder, name: str, of: str) -> None:
    make_evaluation(folder.root.parent / "secret", trees(1))
    with pytest.raises(NotFound):
        evals.answers(folder, name, of, 0, None, wrong=False)
    query = urlencode({"id": name, "set": of, "at": 0})
    assert answer(folder, "answer", query)[0] == 404
    assert answer(folder, "image", urlencode({"eval": "../other", "sha256": "0" * 64}))[0] == 404


def test_links_that_lead_out_are_not_followed(folder: Folder, tmp_path: Path) -> None:
    secret = make_evaluation(tmp_path / "secret", trees(1), folder.root / "mine" / WEIGHTS)
    path = tmp_path / "evals/mine-test/samples/test.jsonl"
    path.unlink()
    path.symlink_to(secret / "samples/test.jsonl")
    (tmp_path / "evals/linked").symlink_to(secret)
    (tmp_path / "evals/half").mkdir()
    (tmp_path / "evals/half/settings.json").write_text((secret / "settings.json").read_text())
    (tmp_path / "evals/half/samples").symlink_to(secret / "samples")
    assert [one["id"] for one in api.runs(folder)["evals"]] == ["../mine-test"]
    with pytest.raises(NotFound, match="leads out"):
        evals.answers(folder, "../mine-test", "test", 0, None, wrong=False)
    results = tmp_path / "evals/mine-test/results.json"
    results.unlink()
    results.symlink_to(secret / "results.json")
    assert evals.evaluation(folder, "../mine-test")["sets"][0]["accuracy"] is None


def test_an_export_has_the_numbers(folder: Folder) -> None:
    data = collect(folder, 10**7)
    assert data["/api/eval?id=..%2Fmine-test"] == evals.evaluation(folder, "../mine-test")
    assert not [path for path in data if path.startswith("/api/answer")]
