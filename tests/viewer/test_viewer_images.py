"""Images of trees: what the viewer serves of them, and what an exported page holds."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from http import HTTPStatus
from pathlib import Path

import pytest
from image_runs import images_in, make_zoomed, zoomed

from arpo.viewer.export import api_path, collect, escaped
from arpo.viewer.folder import Folder
from arpo.viewer.server import answer, dump

WHOLE, CROP, TURNED = images_in(zoomed())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with one run."""
    make_zoomed(tmp_path / "runs" / "zoomed")
    return tmp_path / "runs"


def ask(root: Path, sha256: str, run: str = "zoomed") -> tuple[HTTPStatus, bytes]:
    """What the server answers to a request for an image."""
    return answer(Folder(root), "image", api_path("image", run=run, sha256=sha256).partition("?")[2])


def test_an_image_is_served_by_its_hash(root: Path) -> None:
    for image in (WHOLE, CROP, TURNED):
        assert ask(root, image.sha256) == (HTTPStatus.OK, image.data)


@pytest.mark.parametrize("name", ["", "0" * 64, WHOLE.sha256[:-1], WHOLE.sha256.upper(), f"../images/{WHOLE.sha256}"])
def test_other_names_are_not_found(root: Path, name: str) -> None:
    status, content = ask(root, name)
    assert status == HTTPStatus.NOT_FOUND and "error" in json.loads(content)


def test_only_stored_images_are_served(root: Path, tmp_path: Path) -> None:
    folder = root / "zoomed" / "images"
    page = b"<script>alert(1)</script>"
    named = hashlib.sha256(page).hexdigest()
    (folder / f"{named}.png").write_bytes(page)
    assert ask(root, named)[0] == HTTPStatus.UNPROCESSABLE_ENTITY  # no PNG
    (folder / f"{WHOLE.sha256}.png").write_bytes(CROP.data)
    assert ask(root, WHOLE.sha256)[0] == HTTPStatus.UNPROCESSABLE_ENTITY  # not what its name says
    (tmp_path / "elsewhere.png").write_bytes(WHOLE.data)
    (folder / f"{WHOLE.sha256}.png").unlink()
    os.symlink(tmp_path / "elsewhere.png", folder / f"{WHOLE.sha256}.png")
    assert ask(root, WHOLE.sha256)[0] == HTTPStatus.NOT_FOUND


def test_an_export_holds_the_images_that_fit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [api_path("image", run="zoomed", sha256=image.sha256) for image in (WHOLE, CROP, TURNED)]
    everything = collect(Folder(root), 10_000_000)
    assert [base64.b64decode(everything[path]) for path in paths] == [WHOLE.data, CROP.data, TURNED.data]
    assert "note" not in everything["/api/runs"]
    step = {path: value for path, value in everything.items() if "step=1" in path}
    rest = {path: value for path, value in everything.items() if path not in (*step, *paths)}
    room = sum(len(path) + len(escaped(value)) for path, value in step.items())
    two = sum(len(path) + len(everything[path]) for path in paths[:2])
    for spare, kept in ((two, 2), (two // 2, 1)):
        monkeypatch.setattr("arpo.viewer.export._fitting_trees", lambda *given: (step, [1]))
        page = collect(Folder(root), len(dump(rest)) + 2 * spare)
        assert len([path for path in paths if path in page]) == kept and spare < room
        assert f"zoomed: {kept} of the 3 images of these trees" in page["/api/runs"]["note"]


def test_an_export_says_how_many_images_are_lost(root: Path) -> None:
    (root / "zoomed" / "images" / f"{CROP.sha256}.png").unlink()
    assert "2 of the 3 images" in collect(Folder(root), 10_000_000)["/api/runs"]["note"]
