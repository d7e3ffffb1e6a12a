"""Pictures to look at more closely: the model crops, rotates, or picks frames, and is shown what comes of it.

    [environment]
    name = "images"
    settings = {frames_column = "video"}         # optional: this column has the files of a video's frames

The state is the pictures that the trajectory has seen: those of the question first, then each that a tool has shown, in
this order. The model names them by their number, from 1 on. Pictures never change, so a fork shares them.

Guarantees: every picture is shown in `max_side` pixels a side or fewer, a trajectory sees `max_images` at most, and a
call whose numbers make no sense is an error that says what to write instead.
Not covered: videos as files; their frames must be pictures already.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Self

from arpo.config.files import expand_user
from arpo.data.images import encode_image, open_image, require_pillow
from arpo.data.row_images import file_inside
from arpo.data.unread_images import read_image_file
from arpo.environments.base import Environment
from arpo.errors import ArpoError
from arpo.tools.base import Tool, ToolError, tool
from arpo.tools.executor import MAX_IMAGES
from arpo.types import Image, Task

MAX_FRAMES = 10_000  # of a video
SCALES = {"fraction": 1.0, "thousandth": 1000.0}
UNITS = {
    "fraction": "fractions of its width and height, from 0 to 1",
    "thousandth": "thousandths of its width and height, from 0 to 1000",
    "pixel": "pixels",
}
"""What the model is told of the numbers in a box."""
Coordinates = Literal["fraction", "thousandth", "pixel"]
Shown = list[str | Image]


class ImageEnvironment(Environment):
    """The pictures of a trajectory, and the tools `crop`, `rotate` and, for a video, `frames`.

    `coordinates` says how boxes are written: in fractions of the picture (0 to 1), in thousandths, as several models
    were taught, or in pixels. A crop is enlarged until its longer side has `min_side` pixels. `frames_column` is the
    column of a task with the files of a video's frames, which must lie in `image_dir`. With `blocking`, a call blocks
    the event loop, so that the order of events is the same in every run.
    """

    def __init__(
        self,
        *,
        coordinates: Coordinates = "fraction",
        min_side: int = 224,
        max_side: int = 1024,
        max_images: int = 32,
        frames_column: str | None = None,
        image_dir: str = ".",
        blocking: bool = False,
    ) -> None:
        if coordinates not in UNITS:
            raise ArpoError(f"environment.settings: coordinates is fraction, thousandth or pixel, not {coordinates!r}")
        if not 1 <= min_side <= max_side <= 4096 or max_images < 1:
            raise ArpoError("environment.settings: 1 <= min_side <= max_side <= 4096 and max_images >= 1 must hold")
        require_pillow()
        self._unit, self._scale = UNITS[coordinates], SCALES.get(coordinates)
        self._sides, self._max_images = (min_side, max_side), max_images
        self._column, self._folder, self._blocking = frames_column, expand_user(image_dir), blocking
        self.images: tuple[Image, ...] = ()
        self._frames: tuple[str, ...] = ()

    def reset(self, task: Task) -> str | None:
        """Begin with the pictures of the task; returns how many frames its video has."""
        self.images = task.images
        if self._column is None:
            if not task.images:
                raise ArpoError(
                    f"environment.name: task {task.id} has no images to look at; name their column with data.images, "
                    "or that of a video's frames with environment.settings = {frames_column = ...}"
                )
            return None
        frames = task.meta.get(self._column)
        if not isinstance(frames, list) or not frames or not all(isinstance(one, str) and one for one in frames):
            raise ArpoError(f"task {task.id}: column {self._column!r} must hold a list of files, the video's frames")
        if len(frames) > MAX_FRAMES:
            raise ArpoError(f"task {task.id}: the video has {len(frames)} frames, more than {MAX_FRAMES}")
        self._frames = tuple(frames)
        return f"The video has {len(frames)} frames, numbered from 0 to {len(frames) - 1}."

    def fork(self) -> Self:
        """Another state with the same pictures."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def tools(self) -> list[Tool]:
        """The tools; `frames` only if there is a video."""
        found = {one.spec.name: one for one in super().tools()}
        told = f"{found['crop'].spec.description} The numbers of the box are {self._unit}."
        found["crop"] = replace(found["crop"], spec=replace(found["crop"].spec, description=told))
        return [one for name, one in found.items() if self._column is not None or name != "frames"]

    @tool
    async def crop(self, box: list[float], image: int = 1) -> Shown:
        """Zoom into a part of a picture: box is [x0, y0, x1, y1] from its upper left corner, image its number."""
        return await self._run(lambda: self._crop(box, image))

    @tool
    async def rotate(self, degrees: float, image: int = 1) -> Shown:
        """Turn a picture clockwise; image is its number."""
        return await self._run(lambda: self._rotate(degrees, image))

    @tool
    async def frames(self, start: int, end: int, count: int = 4) -> Shown:
        """Look at frames of the video: as many as count, evenly spaced from frame start to frame end."""
        return await self._run(lambda: self._pick(start, end, count))

    async def _run(self, work: Callable[[], Shown]) -> Shown:
        return work() if self._blocking else await asyncio.to_thread(work)

    def _crop(self, box: list[float], number: int) -> Shown:
        image = self._image(number)
        return self._show([_cut_out(open_image(image), self._pixels(box, image), self._sides[0])])

    def _rotate(self, degrees: float, number: int) -> Shown:
        pillow, picture = require_pillow(), open_image(self._image(number))
        turn = _number(degrees) % 360
        exact = {90: pillow.Transpose.ROTATE_270, 180: pillow.Transpose.ROTATE_180, 270: pillow.Transpose.ROTATE_90}
        if turn in exact:
            return self._show([picture.transpose(exact[int(turn)])])
        return self._show([picture.rotate(-turn, pillow.Resampling.BICUBIC, expand=True)])

    def _pick(self, start: int, end: int, count: int) -> Shown:
        last = len(self._frames) - 1
        if not 0 <= start <= end <= last:
            raise ToolError(f"the frames are numbered from 0 to {last}; write 0 <= start <= end <= {last}")
        if not 1 <= count <= MAX_IMAGES:
            raise ToolError(f"count must be from 1 to {MAX_IMAGES}")
        count = min(count, end - start + 1)
        step = (end - start) / (count - 1) if count > 1 else 0.0
        chosen = [start + round(step * number) for number in range(count)]
        shown = self._show([open_image(self._read_frame(number)) for number in chosen])
        return [f"Frames {', '.join(map(str, chosen))}.", *shown]

    def _read_frame(self, number: int) -> Image:
        return read_image_file(file_inside(self._folder, self._frames[number], "environment.settings."))

    def _image(self, number: int) -> Image:
        if not self.images:
            raise ToolError("you have seen no image yet; look at frames of the video first")
        if not 1 <= number <= len(self.images):
            raise ToolError(f"there is no image {number!r:.20}; they are numbered from 1 to {len(self.images)}")
        return self.images[number - 1]

    def _pixels(self, box: list[float], image: Image) -> tuple[int, int, int, int]:
        """The box in whole pixels, at least one a side."""
        sides = (image.width, image.height)
        limits = sides if self._scale is None else (self._scale, self._scale)
        upper = " and ".join(f"{axis} from 0 to {limit:g}" for axis, limit in zip("xy", limits, strict=True))
        if len(box) != 4:
            raise ToolError(f"a box is [x0, y0, x1, y1], with {upper}")
        x0, y0, x1, y1 = (_number(side) for side in box)
        if not (0 <= x0 < x1 <= limits[0] and 0 <= y0 < y1 <= limits[1]):
            raise ToolError(f"the box is not in the picture: write [x0, y0, x1, y1] with x0 < x1, y0 < y1, {upper}")
        across, down = sides[0] / limits[0], sides[1] / limits[1]
        left, top = min(math.floor(x0 * across), sides[0] - 1), min(math.floor(y0 * down), sides[1] - 1)
        return left, top, max(math.ceil(x1 * across), left + 1), max(math.ceil(y1 * down), top + 1)

    def _show(self, pictures: list[Any]) -> Shown:
        """Add pictures to the state; returns their numbers and images, as a tool does."""
        if len(self.images) + len(pictures) > self._max_images:
            raise ToolError(f"you have seen {len(self.images)} images, and may see {self._max_images} at most")
        first, limit = len(self.images) + 1, self._sides[1]
        for picture in pictures:
            picture.thumbnail((limit, limit))
        shown = [encode_image(picture) for picture in pictures]
        self.images = (*self.images, *shown)
        numbers = range(first, first + len(shown))
        return [f"Image{'s' if len(shown) > 1 else ''} {', '.join(map(str, numbers))}:", *shown]


def _cut_out(picture: Any, box: tuple[int, int, int, int], min_side: int) -> Any:
    """The part of a picture, enlarged until its longer side has `min_side` pixels."""
    part = picture.crop(box)
    factor = min_side / max(part.size)
    if factor <= 1:
        return part
    return part.resize([max(1, round(side * factor)) for side in part.size], require_pillow().Resampling.LANCZOS)


def _number(value: float) -> float:
    """The number, if it is one that a picture can have."""
    if not -1e6 < value < 1e6:  # integers of any length come from JSON
        raise ToolError("a number is too large")
    return float(value)
