"""Images in the rows of a data set: which values are images, where they may come from, and how they are read.

A row holds an image as a path, as bytes, as a `data:` URL, as a dict {"bytes": ..., "path": ...} (the image feature of
Hugging Face's `datasets`), or, in Python, as a Pillow picture or a `pathlib.Path`. http(s) URLs are read only where a
setting allows it.

Guarantees: only the header of an image is read here (`UnreadImage`). A path that is text leads to a file inside
`RowImages.folder`, links followed. Images inside rows stay compressed as they are, and all those of a source together
have at most `MAX_HELD_BYTES`; files take no memory.
Not covered: what is behind the header (`arpo data check` reads all of it); files that are changed after they were seen.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from arpo.data.images import MAX_BYTES, encode_image, read_image
from arpo.data.unread_images import UnreadImage, check_size, image_size, read_image_file
from arpo.errors import ArpoError
from arpo.net.http import HttpClient, HttpError, retry
from arpo.types import Image

MAX_HELD_BYTES = 4 << 30  # of images inside the rows of one source
URL_SECONDS, URL_RETRIES = 60.0, 2
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
_SIGNATURES = re.compile(rb"\x89PNG\r\n|\xff\xd8\xff|GIF8|RIFF....WEBP|BM", re.DOTALL)
_DATA_URL = re.compile(r"data:image/[\w.+-]+(?:;[\w=.+-]+)*;base64,", re.IGNORECASE)
_URL = re.compile(r"https?://", re.IGNORECASE)
_NAME = "(image)"


class HeldImage(str):
    """What stands in a row for an image that JSON cannot hold, or only as very long text: a note, with the image."""

    __slots__ = ("value",)
    value: Any

    def __new__(cls, value: Any) -> HeldImage:
        """The note for an image."""
        note = super().__new__(cls, _NAME)
        note.value = value
        return note


def hold_images(value: Any) -> Any:
    """The value of a column with a `HeldImage` in place of every image that is no plain text."""
    if isinstance(value, Mapping):
        if value.keys() == {"bytes", "path"}:
            return None if value["bytes"] is None and value["path"] is None else HeldImage(value)
        return {key: hold_images(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [hold_images(inner) for inner in value]
    if str(getattr(value, "dtype", "")) == "object":  # an array of a data frame: a list
        return hold_images(value.tolist())
    return HeldImage(value) if _is_held(value) else value


def release_images(value: Any, used: set[int]) -> Any:
    """The inverse of `hold_images`, except that the used ones, by `id`, stay notes."""
    if isinstance(value, HeldImage):
        return _NAME if id(value) in used else value.value
    if isinstance(value, Mapping):
        return {key: release_images(inner, used) for key, inner in value.items()}
    return [release_images(inner, used) for inner in value] if isinstance(value, list) else value


def looks_like_image(value: Any, any_url: bool = False) -> bool:
    """Whether a value of a row, with its images held, seems to be an image or a list of some.

    A URL does if it ends like the name of an image, or if `any_url` does.
    """
    if isinstance(value, HeldImage):
        return True
    if isinstance(value, str):
        if any_url and _URL.match(value):
            return True
        return len(value) < 1000 and "\n" not in value and value.partition("?")[0].lower().endswith(SUFFIXES)
    return isinstance(value, list) and bool(value) and all(looks_like_image(one, any_url) for one in value)


def _is_held(value: Any) -> bool:
    if isinstance(value, bytes | bytearray | memoryview):
        return bool(_SIGNATURES.match(bytes(value[:16])))
    if isinstance(value, str):
        return bool(_DATA_URL.match(value))
    return isinstance(value, Image | os.PathLike) or _is_picture(value)


def _is_picture(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")  # if it was never imported, there are no pictures
    return pillow is not None and isinstance(value, pillow.Image)


@dataclass(slots=True)
class RowImages:
    """The images of one source: where paths may lead, whether URLs are read, and how much the rows hold."""

    folder: Callable[[], Path]
    urls: bool = False
    setting: str = "data."
    held_bytes: int = 0
    _clients: dict[str, HttpClient] = field(default_factory=dict)

    def open(self, value: Any, place: str) -> Image:
        """The image that a value of a row stands for; `place` names it in messages. ValueError if there is none."""
        value = value.value if isinstance(value, HeldImage) else value
        if isinstance(value, Mapping):
            value = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), value)
            value = value.value if isinstance(value, HeldImage) else value
        if isinstance(value, Image):
            return value
        if isinstance(value, str):
            if value[:5].lower() == "data:":
                return self._held(_decode_url(value), place)
            if _URL.match(value):
                return self._held(self._fetch(value), place)
            return _of_file(file_inside(self.folder(), value, self.setting), place)
        if isinstance(value, os.PathLike):
            return _of_file(Path(os.path.expanduser(value)), place)
        if isinstance(value, bytes | bytearray | memoryview):
            return self._held(bytes(value), place)
        if _is_picture(value):
            return UnreadImage("", *check_size(*value.size), place=place, load=partial(encode_image, value))
        raise ValueError(f"expected an image (a path, bytes or a picture), got {type(value).__name__}")

    def _held(self, content: bytes, place: str) -> Image:
        size = image_size(content)
        self.held_bytes += len(content)
        if self.held_bytes > MAX_HELD_BYTES:
            raise ArpoError(
                f"{place}: the images inside the rows up to here have more than {MAX_HELD_BYTES >> 30} GB, and all of "
                "them are held in memory; store them as files, and their paths in the column"
            )
        return UnreadImage("", *size, place=place, load=partial(read_image, content))

    def _fetch(self, url: str) -> bytes:
        if not self.urls:
            raise ValueError(
                f"{url[:200]!r} is not read: download the images, or allow it with {self.setting}image_urls=true, "
                "which makes this machine request every address that the rows name; "
                f"{self.setting}images=false reads the text alone"
            )
        if "${" in url:  # a client reads variables of the environment there
            raise ValueError(f"{url[:200]!r} is no address")
        parts = urlsplit(url)
        origin = f"{parts.scheme}://{parts.netloc}"
        try:
            if origin not in self._clients:
                named = f"{self.setting}image_urls"
                self._clients[origin] = HttpClient(
                    origin, setting=named, timeout=URL_SECONDS, max_bytes=MAX_BYTES, trust_env=True
                )
            client, path = self._clients[origin], url[len(origin) :] or "/"
            ask = partial(client.request, "GET", path, headers={"Accept": "image/*"})
            with ThreadPoolExecutor(1) as pool:  # the caller may be inside an event loop
                return pool.submit(asyncio.run, retry(ask, URL_RETRIES)).result()
        except (HttpError, ArpoError) as error:
            raise ValueError(str(error)) from None


def file_inside(folder: Path, text: str, setting: str) -> Path:
    """The file that a path in a row leads to; ValueError if it leads out of the folder, links followed."""
    try:
        folder = folder.resolve()
        path = (folder / text).resolve()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{text[:200]!r} is no path: {error}") from None
    if not path.is_relative_to(folder):
        raise ValueError(
            f"{text[:200]!r} leads out of {folder}; if the images lie elsewhere, name their folder with "
            f"{setting}image_dir=..."
        )
    return path


def given_images(images: Any) -> tuple[Image, ...]:
    """The images that a caller gives, read: one or several pictures, bytes or files. ArpoError if one is none."""
    single = isinstance(images, str | os.PathLike | Image) or _is_picture(images) or isinstance(images, bytes)
    opened, found = RowImages(Path), list[Image]()
    for number, value in enumerate([images] if single else images, 1):
        own = Path(value) if isinstance(value, str) and not value.startswith("data:") else value
        try:
            image = opened.open(own, "images")
            found.append(image.load() if isinstance(image, UnreadImage) else image)
        except ValueError as error:
            raise ArpoError(f"images: number {number}: {error}") from None
    return tuple(found)


def _of_file(path: Path, place: str) -> Image:
    return UnreadImage("", *image_size(path), place=place, load=partial(read_image_file, path))


def _decode_url(url: str) -> bytes:
    found = _DATA_URL.match(url)
    if found is None:
        raise ValueError(f"{url[:60]!r} is not a data: URL of an image in base64")
    try:
        return base64.b64decode("".join(url[found.end() :].split()), validate=True)
    except binascii.Error as error:
        raise ValueError(f"{url[:60]!r} is not valid base64: {error}") from None
