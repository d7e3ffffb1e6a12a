"""Images in rows: every form that data sets have, where paths may lead, what is refused, and what stays in memory."""

from __future__ import annotations

import base64
import io
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from image_runs import picture
from PIL import Image as pillow
from typer.testing import CliRunner

from arpo.cli.main import app
from arpo.config.schema import Data
from arpo.data import row_images
from arpo.data.images import encode_image, read_image
from arpo.data.row_images import given_images
from arpo.data.tasks import Columns, Reading, read_tasks, tasks_from_rows
from arpo.data.unread_images import UnreadImage, image_size, read_task_images
from arpo.errors import ArpoError
from arpo.types import Image, Task


def png(shown: Any = None, kind: str = "PNG", **options: Any) -> bytes:
    """A picture as the bytes of a file."""
    buffer = io.BytesIO()
    (shown or picture()).save(buffer, format=kind, **options)
    return buffer.getvalue()


PNG = png()
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
WHOLE, SMALL = encode_image(picture()), encode_image(picture(8, 8, "red"))
ROW = {"question": "Which colour?", "answer": "gold"}


def one(reading: Reading) -> Task:
    """The only task, with its images read."""
    assert reading.problems == ()
    (task,) = reading.tasks
    assert all(isinstance(image, UnreadImage) and not image.data for image in task.images)
    return read_task_images(task)


def problem(rows: list[Any], columns: Columns | None = None) -> str:
    """What is wrong with the only row."""
    reading = tasks_from_rows(rows, columns or Columns())
    assert reading.tasks == ()
    return reading.problems[0]


@pytest.mark.parametrize(
    "value",
    [
        PNG,
        bytearray(PNG),
        URL,
        [PNG],
        {"bytes": PNG, "path": "cat.png"},
        {"bytes": PNG, "path": None},
        picture(),
        np.array([{"bytes": PNG, "path": None}], dtype=object),
        png(kind="BMP"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("column", ["image", "images"])
def test_an_image_in_a_column(value: Any, column: str) -> None:
    task = one(tasks_from_rows([ROW | {column: value}], Columns()))
    assert task.images == (WHOLE,) and task.images[0].data == WHOLE.data
    assert task.meta == ROW | {column: ["(image)"] if isinstance(value, list | np.ndarray) else "(image)"}


def test_files_lie_beside_the_data(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(PNG)
    (tmp_path / "b.jpg").write_bytes(png(picture(8, 8, "red"), "PNG"))  # the content says what it is
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(ROW | {"images": ["pictures/a.png", "b.jpg", None]}))
    task = one(read_tasks(str(path), Columns()))
    assert task.images == (WHOLE, SMALL)
    assert task.meta["images"] == ["pictures/a.png", "b.jpg", None]


def test_parquet_with_the_structs_of_datasets(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [ROW | {"image": {"bytes": PNG, "path": None}}, ROW | {"image": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    with_image, without = read_tasks(str(tmp_path / "t.parquet"), Columns()).tasks
    assert read_task_images(with_image).images == (WHOLE,) and without.images == ()


@pytest.mark.parametrize(
    ("parts", "columns", "text"),
    [
        ([{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "Q?"}], {}, "<image>Q?"),
        ([{"type": "text", "text": "A "}, {"type": "image"}, {"text": " B"}], {"image": PNG}, "A <image> B"),
        ([{"type": "input_text", "text": "Q"}, {"type": "input_image", "image_url": URL}], {}, "Q<image>"),
        ([{"type": "image", "image": picture(), "text": None}, {"type": "text", "text": "Q"}], {}, "<image>Q"),
        ([{"text": "<image> no more"}], {"images": [PNG]}, "<image> no more"),
    ],
)  # fmt: skip
def test_images_in_the_parts_of_a_message(parts: list[Any], columns: dict[str, Any], text: str) -> None:
    row = {"prompt": [{"role": "system", "content": "Look."}, {"role": "user", "content": parts}], "answer": "gold"}
    task = one(tasks_from_rows([row | columns], Columns()))
    assert (task.question, task.system, task.images) == (text, "Look.", (WHOLE,))
    assert URL not in json.dumps(task.meta)


def test_images_of_columns_fill_the_places_between_those_of_parts() -> None:
    parts = [{"type": "image"}, {"type": "image", "image": SMALL}, {"type": "image"}, {"type": "text", "text": "Q"}]
    row = {"prompt": [{"role": "user", "content": parts}], "answer": "a", "images": [PNG, png(picture(9, 9))]}
    task = read_task_images(tasks_from_rows([row], Columns()).tasks[0])
    assert [image.width for image in task.images] == [120, 8, 9] and task.question == "<image><image><image>Q"


def test_the_number_of_marks_must_be_that_of_the_images() -> None:
    row = ROW | {"question": "<image> or <image>?", "image": PNG}
    assert "the question has 2 places <image>, but 1 images" in problem([row])
    assert tasks_from_rows([ROW | {"question": "What is <image> in SVG?"}], Columns()).problems == ()


def test_paths_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(PNG)
    inside = tmp_path / "data"
    inside.mkdir()
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    path = inside / "t.jsonl"
    for name in ("../secret.png", str(tmp_path / "secret.png"), "link.png", "a/../../secret.png"):
        path.write_text(json.dumps(ROW | {"image": name}))
        (found,) = read_tasks(str(path), Columns()).problems
        assert found.startswith(f"{path}, line 1: image: ") and "leads out of" in found and "data.image_dir=" in found
        allowed = Columns.named(Data(image_dir=str(tmp_path)))
        outside = name if name != "../secret.png" and name != "a/../../secret.png" else "secret.png"
        path.write_text(json.dumps(ROW | {"image": "data/link.png" if outside == "link.png" else outside}))
        assert one(read_tasks(str(path), allowed)).images == (WHOLE,)


def test_paths_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "leads out of" in problem([ROW | {"image": "../a.png"}])  # a text may come from anywhere
    assert one(tasks_from_rows([ROW | {"image": tmp_path / "a.png"}], Columns())).images == (WHOLE,)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("gone.png", "image: there is no file "),
        (b"\x89PNG\r\n\x1a\nbroken", "image: no readable image"),
        ("data:image/png;base64,%%%", "is not valid base64"),
        ([PNG, "gone.png"], "image 2: there is no file"),
        ({"bytes": b"nothing", "path": None}, "image: no readable image"),
        ("https://example.com/a.png", "is not read: download the images, or allow it with data.image_urls=true"),
    ],
)
def test_what_is_wrong_with_an_image_is_said_with_its_row(value: Any, said: str) -> None:
    reading = tasks_from_rows([ROW, ROW | {"image": value}], Columns(), "mine")
    assert len(reading.tasks) == 1 and reading.problems[0].startswith("mine, row 2: ") and said in reading.problems[0]


def test_a_column_that_holds_something_else_is_not_used() -> None:
    row = ROW | {"image": "python:3.11-slim", "images": [], "figure": PNG, "data": b"\x00\x01", "link": "https://a.b/c"}
    reading = tasks_from_rows([row], Columns())
    (task,) = reading.tasks
    assert task.images == () and reading.unused_images == {"figure": 1}
    assert task.meta["image"] == "python:3.11-slim" and task.meta["figure"] == base64.b64encode(PNG).decode()
    named = Columns.named(Data(images="image"))
    assert "there is no file" in problem([row], named)
    assert "expected an image (a path, bytes or a picture), got dict" in problem([ROW | {"image": {"a": 1}}], named)
    more = ROW | {"image": {"bytes": PNG, "path": None, "size": 3}}
    assert one(tasks_from_rows([more], named)).images == (WHOLE,)
    assert "no column 'picture'" in problem([row], Columns.named(Data(images="picture")))
    assert tasks_from_rows([ROW | {"image": PNG}], Columns.named(Data(images=False))).tasks[0].images == ()


def test_damage_behind_the_header_shows_when_the_task_is_sampled() -> None:
    (task,) = tasks_from_rows([ROW | {"image": PNG[: len(PNG) // 2]}], Columns(), "mine").tasks
    with pytest.raises(ArpoError, match="mine, row 1: image: no readable image"):
        read_task_images(task)


def test_images_inside_rows_are_limited_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_images, "MAX_HELD_BYTES", 2 * len(PNG))
    assert len(tasks_from_rows([ROW | {"image": PNG}] * 2, Columns()).tasks) == 2
    with pytest.raises(ArpoError, match="row 3: image: the images inside the rows up to here"):
        tasks_from_rows([ROW | {"image": PNG}] * 3, Columns())


def test_the_size_is_that_of_the_image_as_it_is_read() -> None:
    turned = pillow.Exif()
    turned[0x0112] = 6
    for content in (PNG, png(kind="JPEG"), png(kind="GIF"), png(picture(16, 9), "WEBP")):
        image = read_image(content)
        assert image_size(content) == (image.width, image.height)
    assert image_size(png(kind="JPEG", exif=turned)) == (80, 120)


def test_what_callers_give(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    given: list[Any] = [picture(), PNG, str(tmp_path / "a.png"), tmp_path / "a.png", URL, WHOLE]
    assert given_images(given) == (WHOLE,) * 6
    assert all(given_images(value) == (WHOLE,) for value in given) and given_images(()) == ()
    with pytest.raises(ArpoError, match=r"images: number 2: expected an image .* got int"):
        given_images([PNG, 3])


class _Pictures(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path == "/a.png?size=1"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(PNG if found else b"no")

    def log_message(self, *given: Any) -> None:
        """Print nothing."""


def test_urls_are_requested_only_if_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3")
    allowed = Columns.named(Data(image_urls=True))
    with HTTPServer(("127.0.0.1", 0), _Pictures) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        row = ROW | {"image": f"{base}/a.png?size=1"}
        assert "is not read" in problem([row])
        assert one(tasks_from_rows([row], allowed)).images == (WHOLE,)
        assert "HTTP status 404" in problem([ROW | {"image": f"{base}/gone.png"}], allowed)
        assert "is no address" in problem([ROW | {"image": base + "/${SECRET}.png"}], allowed)
        server.shutdown()


def test_data_sets_of_the_datasets_package_stay_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    from arpo.api.settings import rows_of

    features = {"question": datasets.Value("string"), "answer": datasets.Value("string"), "image": datasets.Image()}
    features["more"] = datasets.List(datasets.Image())
    row = ROW | {"image": {"bytes": PNG, "path": None}, "more": [{"bytes": PNG, "path": None}]}
    rows = rows_of("tasks", datasets.Dataset.from_list([row], features=datasets.Features(features)))
    assert rows[0]["image"]["bytes"] == PNG and rows[0]["more"][0]["bytes"] == PNG
    assert one(tasks_from_rows(rows, Columns())).images == (WHOLE,)


def check(*given: str) -> tuple[int, str]:
    """The exit code and the output of `arpo data check`."""
    done = CliRunner().invoke(app, ["data", "check", *given])
    return done.exit_code, " ".join(done.output.split())


def test_check_shows_images_and_reads_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.png").write_bytes(png(picture(8, 8)))
    rows = [ROW | {"images": ["a.png", "b.png"], "chart": URL}, ROW | {"images": ["a.png"]}, ROW]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, said = check("t.jsonl")
    assert code == 0 and "images: 3 in 2 questions, 8 x 8 to 120 x 80 pixels" in said
    assert "images images" in said and "not used: column 'chart' seems to hold images (1 rows)" in said
    (tmp_path / "b.png").write_bytes(PNG[:200])
    code, said = check("t.jsonl")
    assert code == 1 and "t.jsonl, line 1: image 2: no readable image" in said and "2 questions" in said


def test_images_are_compared_by_content() -> None:
    assert Image(WHOLE.sha256, 120, 80) == WHOLE
