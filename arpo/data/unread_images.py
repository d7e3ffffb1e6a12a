"""Images that are read when they are needed, so that a large data set takes little memory.

    image = UnreadImage("", *image_size(path), place="row 3", load=partial(read_image_file, path))
    task = read_task_images(task)        # when the task is sampled

Guarantees: `image_size` reads the header alone, and refuses what `read_image` refuses for its kind or size. Whatever is
wrong with a file is a ValueError that says what; in a task, where its row was read long ago, an `ArpoError`.
Not covered: damage behind the header, which shows when the image is read.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from arpo.config.files import read_limited, require_regular_file
from arpo.data.images import FORMATS, MAX_BYTES, MAX_PIXELS, read_image, require_pillow
from arpo.errors import ArpoError
from arpo.runs.trees import images_of
from arpo.types import Image, ScoredTree, Task

_ORIENTATION, _SIDEWAYS = 0x0112, (5, 6, 7, 8)  # in the metadata: how a camera was held


@dataclass(frozen=True, slots=True)
class UnreadImage(Image):
    """An image of a data set: its size is known, hash and content only when it is read."""

    place: str = field(default="", kw_only=True, compare=False)  # for messages: where it comes from
    load: Callable[[], Image] = field(kw_only=True, repr=False, compare=False)

    def read(self) -> Image:
        """The image; ArpoError if it cannot be read."""
        try:
            return self.load()
        except ValueError as error:
            raise ArpoError(f"{self.place}: {error}") from None


def has_unread_images(task: Task) -> bool:
    """Whether the content of some image of a task is not in memory."""
    return any(isinstance(image, UnreadImage) for image in task.images)


def read_task_images(task: Task) -> Task:
    """The task with all of its images read; ArpoError if one cannot be."""
    images = tuple(image.read() if isinstance(image, UnreadImage) else image for image in task.images)
    return replace(task, images=images)


def without_image_data(scored: ScoredTree) -> ScoredTree:
    """The tree with its images as hashes and sizes, without their content, as one that was read from a file."""
    tree = scored.tree
    if not images_of(tree):
        return scored
    nodes = tuple(
        replace(
            node,
            images=_hashes(node.images),
            result=node.result and replace(node.result, images=_hashes(node.result.images)),
        )
        for node in tree.nodes
    )
    task = replace(tree.task, images=_hashes(tree.task.images))
    return replace(scored, tree=replace(tree, task=task, nodes=nodes))


def _hashes(images: Sequence[Image]) -> tuple[Image, ...]:
    return tuple(Image(image.sha256, image.width, image.height) for image in images)


def read_image_file(path: Path) -> Image:
    """The image in a file; ValueError if it is none, too large, or cannot be opened."""
    with _file_errors(path):
        content = read_limited(path, MAX_BYTES)
    return read_image(content)


def image_size(source: bytes | Path) -> tuple[int, int]:
    """Width and height of the image in a file or its bytes, from its header; ValueError as in `read_image`."""
    if isinstance(source, bytes):
        return _size(io.BytesIO(source), len(source))
    with _file_errors(source):
        file = require_regular_file(source).open("rb")
    with file:
        return _size(file, os.fstat(file.fileno()).st_size)


def check_size(width: int, height: int) -> tuple[int, int]:
    """Width and height, if a picture may have them."""
    if not 0 < width * height <= MAX_PIXELS:
        raise ValueError(f"the image has {width} x {height} pixels, expected 1 to {MAX_PIXELS:,} in all")
    return width, height


def _size(file: Any, num_bytes: int) -> tuple[int, int]:
    pillow = require_pillow()
    if num_bytes > MAX_BYTES:
        raise ValueError(f"the image has {num_bytes:,} bytes, more than {MAX_BYTES:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pillow.open(file, formats=FORMATS) as picture:
                width, height = picture.size
                # Without this entry, `getexif` would decode a whole PNG to find it.
                turned = "exif" in picture.info and picture.getexif().get(_ORIENTATION) in _SIDEWAYS
    except Exception as error:  # damaged files make the decoders raise anything
        unknown = isinstance(error, pillow.UnidentifiedImageError)  # its message names an object, not the reason
        reason = "the file is something else, or its beginning is damaged" if unknown else error
        raise ValueError(f"no readable image ({', '.join(FORMATS)}): {reason}") from None
    return check_size(height, width) if turned else check_size(width, height)


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
