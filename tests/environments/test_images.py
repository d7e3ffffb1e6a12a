"""The environment of pictures: what its tools show, that they refuse nonsense, and that forks are independent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as pillow

from arpo.config.loading import load_config
from arpo.data.images import encode_image, open_image
from arpo.environments.build import build_toolset
from arpo.environments.images import ImageEnvironment
from arpo.environments.states import EnvironmentTools, StatePool, open_state
from arpo.errors import ArpoError
from arpo.tools.base import ToolError
from arpo.tools.executor import MAX_IMAGES
from arpo.types import Fault, Image, Task, ToolCall, ToolResult

COLOURS = ((200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 0))


def quarters() -> Image:
    """A picture of 40 x 20 pixels: red and green above, blue and yellow below."""
    picture = pillow.new("RGB", (40, 20))
    for number, colour in enumerate(COLOURS):
        x, y = number % 2 * 20, number // 2 * 10
        picture.paste(colour, (x, y, x + 20, y + 10))
    return encode_image(picture)


TASK = Task("q", "What is there?", ("x",), images=(quarters(),))


def opened(task: Task = TASK, **settings: Any) -> ImageEnvironment:
    state = ImageEnvironment(blocking=True, **{"min_side": 1, **settings})
    state.reset(task)
    return state


def act(state: ImageEnvironment, name: str, *args: Any) -> tuple[str, list[Any]]:
    """The text of a call, and its pictures."""
    shown = asyncio.run(getattr(ImageEnvironment, name)(state, *args))
    texts = [part for part in shown if isinstance(part, str)]
    return " ".join(texts), [open_image(part) for part in shown if isinstance(part, Image)]


@pytest.mark.parametrize(
    ("coordinates", "box"),
    [("fraction", [0.5, 0, 1, 0.5]), ("thousandth", [500, 0, 1000, 500]), ("pixel", [20, 0, 40, 10])],
)
def test_a_crop_is_the_part_in_the_box(coordinates: Any, box: list[float]) -> None:
    state = opened(coordinates=coordinates)
    text, (picture,) = act(state, "crop", box)
    assert (text, picture.size) == ("Image 2:", (20, 10))
    assert picture.getcolors() == [(200, COLOURS[1])]
    assert [image.width for image in state.images] == [40, 20]


def test_the_model_is_told_how_a_box_is_written() -> None:
    for coordinates, unit in (("fraction", "from 0 to 1."), ("thousandth", "from 0 to 1000."), ("pixel", "pixels.")):
        told = opened(coordinates=coordinates).tools()[0].spec.description
        assert "[x0, y0, x1, y1]" in told and told.endswith(unit)


def test_a_box_between_pixels_covers_all_that_it_touches_and_at_least_one() -> None:
    assert act(opened(), "crop", [0.51, 0.49, 0.52, 0.51])[1][0].size == (1, 2)
    assert act(opened(), "crop", [0.9999999, 0, 1, 1e-9])[1][0].size == (1, 1)
    assert act(opened(coordinates="pixel"), "crop", [39.9999999, 19.5, 40, 20])[1][0].size == (1, 1)


def test_small_crops_are_enlarged_and_large_pictures_shrunk() -> None:
    assert act(opened(min_side=224), "crop", [0, 0, 0.5, 0.5])[1][0].size == (224, 112)
    assert act(opened(min_side=8, max_side=30), "crop", [0, 0, 1, 1])[1][0].size == (30, 15)
    assert act(opened(), "crop", [0, 0, 1, 0.01])[1][0].size == (40, 1)
    assert act(opened(min_side=224), "crop", [0, 0, 1, 0.01])[1][0].size == (224, 6)


def test_a_crop_of_a_crop_names_its_number() -> None:
    state = opened()
    act(state, "crop", [0, 0, 0.5, 1])
    text, (picture,) = act(state, "crop", [0, 0.5, 1, 1], 2)
    assert (text, picture.getcolors()) == ("Image 3:", [(200, COLOURS[2])])


def test_a_rotation_is_clockwise() -> None:
    corners = {90: (2, 0, 3, 1), 180: (3, 2, 1, 0), 270: (1, 3, 0, 2), -90: (1, 3, 0, 2), 360: (0, 1, 2, 3)}
    for degrees, expected in corners.items():
        picture = act(opened(), "rotate", degrees)[1][0]
        right, bottom = picture.width - 1, picture.height - 1
        found = [picture.getpixel(place) for place in ((0, 0), (right, 0), (0, bottom), (right, bottom))]
        assert found == [COLOURS[number] for number in expected], degrees
    slanted = act(opened(), "rotate", 45)[1][0]
    assert slanted.size == (44, 44)
    assert slanted.getpixel((18, 11)) == COLOURS[0] and slanted.getpixel((25, 32)) == COLOURS[3]


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("crop", ([0, 0, 1],), r"a box is \[x0, y0, x1, y1\], with x from 0 to 1 and y from 0 to 1"),
        ("crop", ([0.5, 0, 0.5, 1],), "not in the picture"),
        ("crop", ([0.5, 0, 0.4, 1],), "x0 < x1"),
        ("crop", ([-0.1, 0, 1, 1],), "not in the picture"),
        ("crop", ([0, 0, 20, 10],), "x from 0 to 1"),
        ("crop", ([0, 0, float("nan"), 1],), "too large"),
        ("crop", ([0, 0, 10**400, 1],), "too large"),
        ("crop", ([0, 0, 1, 1], 2), "there is no image 2; they are numbered from 1 to 1"),
        ("crop", ([0, 0, 1, 1], 0), "there is no image 0"),
        ("crop", ([0, 0, 1, 1], -1), "there is no image -1"),
        ("rotate", (1e300,), "too large"),
        ("rotate", (90, 7), "there is no image 7"),
    ],
)
def test_nonsense_is_an_error_that_the_model_can_read(name: str, args: tuple[Any, ...], reason: str) -> None:
    state = opened()
    with pytest.raises(ToolError, match=reason):
        act(state, name, *args)
    assert state.images == TASK.images


def test_the_number_of_pictures_is_bounded() -> None:
    state = opened(max_images=2)
    act(state, "crop", [0, 0, 1, 1])
    with pytest.raises(ToolError, match="you have seen 2 images, and may see 2 at most"):
        act(state, "crop", [0, 0, 1, 1])


def video(folder: Path, count: int) -> Task:
    """A task with frames of 8 x 8 pixels, each a bit lighter than the last."""
    places = []
    for number in range(count):
        places.append(str(folder / f"{number}.png"))
        pillow.new("L", (8, 8), 10 * number).save(places[-1])
    return Task("v", "What happens?", ("x",), meta={"video": places})


def test_frames_are_evenly_spaced(tmp_path: Path) -> None:
    task = video(tmp_path, 12)
    state = ImageEnvironment(blocking=True, frames_column="video", image_dir=str(tmp_path))
    assert state.reset(task) == "The video has 12 frames, numbered from 0 to 11."
    assert [one.spec.name for one in state.tools()] == ["crop", "rotate", "frames"]
    with pytest.raises(ToolError, match="you have seen no image yet"):
        act(state, "crop", [0, 0, 1, 1])
    assert [one.spec.name for one in opened().tools()] == ["crop", "rotate"]
    text, pictures = act(state, "frames", 1, 10, 4)
    assert text == "Frames 1, 4, 7, 10. Images 1, 2, 3, 4:"
    assert [picture.getpixel((0, 0))[0] for picture in pictures] == [10, 40, 70, 100]
    assert act(state, "frames", 3, 4, 8)[0] == "Frames 3, 4. Images 5, 6:"
    assert act(state, "frames", 11, 11, 1)[0] == "Frames 11. Image 7:"
    assert act(state, "frames", 0, 11, 4)[0].startswith("Frames 0, 4, 7, 11.")
    for wrong in ((-1, 3), (3, 2), (0, 12)):
        with pytest.raises(ToolError, match="numbered from 0 to 11"):
            act(state, "frames", *wrong, 2)
    for count in (0, MAX_IMAGES + 1):
        with pytest.raises(ToolError, match=f"from 1 to {MAX_IMAGES}"):
            act(state, "frames", 0, 11, count)


def test_a_frame_that_cannot_be_read_is_the_data_sets_fault(tmp_path: Path) -> None:
    task = video(tmp_path, 3)
    (tmp_path / "1.png").write_text("no picture")
    state = ImageEnvironment(frames_column="video", image_dir=str(tmp_path))
    results = run_calls(state, task, ToolCall("frames", {"start": 1, "end": 1}))
    assert results[0].fault is Fault.INFRA and "no readable image" in results[0].text


def test_frames_lie_in_the_named_folder(tmp_path: Path) -> None:
    frames = tmp_path / "frames"
    frames.mkdir()
    pillow.new("L", (8, 8)).save(tmp_path / "private.png")
    pillow.new("L", (8, 8)).save(frames / "own.png")
    (frames / "link.png").symlink_to(tmp_path / "private.png")
    state = ImageEnvironment(blocking=True, frames_column="video", image_dir=str(frames))
    places = ["own.png", "../private.png", str(tmp_path / "private.png"), "link.png"]
    state.reset(Task("v", "What happens?", ("x",), meta={"video": places}))
    assert act(state, "frames", 0, 0, 1)[0] == "Frames 0. Image 1:"
    for number in (1, 2, 3):
        with pytest.raises(ValueError, match=r"leads out of .*environment.settings.image_dir="):
            act(state, "frames", number, number, 1)


def test_settings_and_tasks_that_do_not_fit() -> None:
    with pytest.raises(ArpoError, match="task q has no images"):
        opened(Task("q", "What?", ("x",)))
    with pytest.raises(ArpoError, match="column 'video' must hold a list of files"):
        opened(frames_column="video")
    with pytest.raises(ArpoError, match="coordinates is fraction, thousandth or pixel"):
        ImageEnvironment(coordinates="inch")  # type: ignore[arg-type]
    with pytest.raises(ArpoError, match="min_side <= max_side"):
        ImageEnvironment(min_side=100, max_side=50)


def run_calls(state: ImageEnvironment, task: Task, *calls: ToolCall) -> list[ToolResult]:
    """Make calls one after the other, as a trajectory does."""

    def fresh() -> ImageEnvironment:
        return state.fork()

    async def run() -> list[ToolResult]:
        tools = EnvironmentTools(StatePool(fresh))
        async with open_state(tools, task) as root:
            assert root is not None
            return [await tools.call(call, task, root) for call in calls]

    return asyncio.run(run())


def test_calls_come_back_as_results_with_images() -> None:
    half = ToolCall("crop", {"box": [0, 0, 0.5, 1]})
    results = run_calls(
        ImageEnvironment(min_side=1),
        TASK,
        half,
        ToolCall("crop", {"box": [0, 0, 1, 2]}),
        ToolCall("crop", {"box": "[0, 0, 1, 1]"}),
        ToolCall("crop", {"box": [0, 0, 1, True]}),
        ToolCall("rotate", {"degrees": 90, "image": 2}),
    )
    assert [(result.text[:8], result.fault, len(result.images)) for result in results] == [
        ("Image 2:", None, 1),
        ("Error: t", Fault.MODEL, 0),
        ("Error: c", Fault.MODEL, 0),
        ("Error: c", Fault.MODEL, 0),
        ("Image 3:", None, 1),
    ]
    assert (results[-1].images[0].width, results[-1].images[0].height) == (20, 20)
    assert results[0].images[0] == encode_image(open_image(quarters()).crop((0, 0, 20, 20)))


def test_a_branch_has_its_own_pictures() -> None:
    async def run() -> list[ToolResult]:
        tools = EnvironmentTools(StatePool(lambda: ImageEnvironment(min_side=1)))
        left, right = ToolCall("crop", {"box": [0, 0, 0.5, 1]}), ToolCall("crop", {"box": [0.5, 0, 1, 0.5]})
        again = ToolCall("crop", {"box": [0, 0, 1, 1], "image": 3})
        async with open_state(tools, TASK) as root:
            assert root is not None
            await tools.call(left, TASK, root)
            branch = root.branch()
            results = [await tools.call(left, TASK, root), await tools.call(right, TASK, branch)]
            return [*results, *[await tools.call(again, TASK, one) for one in (root, branch)]]

    trunk, branch, trunk_again, branch_again = asyncio.run(run())
    assert trunk.text == branch.text == "Image 3:"
    assert trunk_again.images == trunk.images and branch_again.images == branch.images
    assert trunk.images != branch.images


def test_the_environment_has_a_name() -> None:
    with build_toolset(load_config(None, ["environment.name=images", "data.train=q.jsonl"])) as tools:
        assert list(tools) == ["crop", "rotate"]
