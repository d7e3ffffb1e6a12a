"""Reading images that come from outside: checked, bounded, and stored in one form.

    image = read_image(Path("map.png").read_bytes())
    task = read_task_images(task)        # reads those of a data set, which until then only have their size

Guarantees: the size is read from the header before any pixel is decoded, so memory is bounded by `MAX_PIXELS`. What is
returned is an RGB picture encoded as PNG by this process, turned as its metadata says: nothing of the metadata is left,
and equal pixels have the same hash. Whatever is wrong with a file is a ValueError that says what.
Not covered: mistakes in the decoders of Pillow, which run in this process.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from arpo.config.files import read_limited, require_regular_file
from arpo.errors import ArpoError
from arpo.types import Image, Task

MAX_BYTES = 20 << 20  # of a file
MAX_PIXELS = 16 << 20  # of a picture
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


_ORIENTATION = 0x0112  # in the metadata: how a camera was held
_SIDEWAYS = (5, 6, 7, 8)


@dataclass(frozen=True, slots=True)
class UnreadImage(Image):
    """An image of a data set: its size is known, hash and content only when it is read. Equal ones share `load`.

    So that a data set takes little memory, this happens when its task is sampled (`read_task_images`).
    """

    place: str = field(default="", compare=False)  # for messages: where it comes from
    load: Callable[[], Image] = field(kw_only=True, repr=False)

    def read(self) -> Image:
        """The image; ArpoError if it cannot be read."""
        try:
            return self.load()
        except ValueError as error:
            raise ArpoError(f"{self.place}: {error}") from None


def read_task_images(task: Task) -> Task:
    """The task with all of its images read; ArpoError if one cannot be."""
    if not any(isinstance(image, UnreadImage) for image in task.images):
        return task
    images = tuple(image.read() if isinstance(image, UnreadImage) else image for image in task.images)
    return replace(task, images=images)


def read_image(content: bytes) -> Image:
    """The image in a file's bytes; of an animation the first frame. ValueError if it is none, or too large."""
    _check_bytes(len(content))
    with _opened(io.BytesIO(content)) as picture:
        return encode_image(picture)


def read_image_file(path: Path) -> Image:
    """The image in a file; ValueError if it is none, too large, or cannot be opened."""
    with _file_errors(path):
        content = read_limited(path, MAX_BYTES)
    return read_image(content)


def image_size(source: bytes | Path) -> tuple[int, int]:
    """Width and height of the image in a file or its bytes, from its header; ValueError as in `read_image`."""
    if isinstance(source, bytes):
        _check_bytes(len(source))
        with _opened(io.BytesIO(source)) as picture:
            return _upright_size(picture)
    with _file_errors(source):
        file = require_regular_file(source).open("rb")
    with file:
        _check_bytes(os.fstat(file.fileno()).st_size)
        with _opened(file) as picture:
            return _upright_size(picture)


@contextmanager
def _opened(file: Any) -> Iterator[Any]:
    """A Pillow picture of allowed size, not decoded yet; what goes wrong in the block is a ValueError."""
    pillow = require_pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # size and metadata are dealt with here
            with pillow.open(file, formats=FORMATS) as picture:
                width, height = picture.size
                if width * height > MAX_PIXELS:
                    raise ValueError(f"the image has {width} x {height} pixels, more than {MAX_PIXELS:,}")
                yield picture
    except ValueError:
        raise
    except Exception as error:  # damaged files make the decoders raise anything
        raise ValueError(f"no readable image ({', '.join(FORMATS)}): {error}") from error


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Files that cannot be opened, or are too large, are a ValueError."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except ArpoError as error:
        raise ValueError(str(error)) from None


def _check_bytes(size: int) -> None:
    if size > MAX_BYTES:
        raise ValueError(f"the image has {size:,} bytes, more than {MAX_BYTES:,}")


def _upright_size(picture: Any) -> tuple[int, int]:
    width, height = picture.size
    return (height, width) if picture.getexif().get(_ORIENTATION) in _SIDEWAYS else (width, height)


def encode_image(picture: Any) -> Image:
    """The image of a Pillow picture, turned as its metadata says."""
    turn: Any = importlib.import_module("PIL.ImageOps").exif_transpose
    plain = turn(picture.convert("RGB"))
    plain.info = {}
    buffer = io.BytesIO()
    plain.save(buffer, format="PNG")
    data = buffer.getvalue()
    return Image(hashlib.sha256(data).hexdigest(), *plain.size, data)


def open_image(image: Image) -> Any:
    """The image as a Pillow picture."""
    return require_pillow().open(io.BytesIO(image.data), formats=("PNG",)).convert("RGB")


def require_pillow() -> Any:
    """The module `PIL.Image`; raises if Pillow is not installed."""
    try:
        from PIL import Image as pillow
    except ModuleNotFoundError as error:
        raise ArpoError("images need Pillow: pip install 'arpo[vision]'") from error
    return pillow
