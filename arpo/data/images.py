"""Reading images that come from outside: checked, bounded, and stored in one form.

Guarantees: the size is read from the header before any pixel is decoded, so memory is bounded by `MAX_PIXELS`. What is
returned is an RGB picture encoded as PNG by this process: nothing of the file's metadata is left, and equal pixels have
the same hash. Whatever is wrong with a file is a ValueError that says what.
Not covered: mistakes in the decoders of Pillow, which run in this process.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from arpo.errors import ArpoError
from arpo.types import Image

IMAGE_PLACE = "<image>"
"""Stands in a question where an image belongs, and in the shown text of a message for an image."""
MAX_BYTES = 20 << 20  # of a file
MAX_PNG_BYTES = 64 << 20  # of an image as it is stored: no picture of MAX_PIXELS takes so many
MAX_PIXELS = 16 << 20  # of a picture
_DATA_URL = "data:image/png;base64,"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def read_image(content: bytes, max_bytes: int = MAX_BYTES) -> Image:
    """The image in a file's bytes; of an animation the first frame. ValueError if it is none, or too large.

    It is turned as its EXIF data say. What is transparent becomes white.
    """
    pillow = require_pillow()
    if len(content) > max_bytes:
        raise ValueError(f"the image has {len(content):,} bytes, more than {max_bytes:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # size and metadata are dealt with here
            with pillow.open(io.BytesIO(content), formats=FORMATS) as picture:
                size = picture.size
                plain = _plain_picture(picture) if _fits(*size) else None
    except Exception as error:  # damaged files make the decoders raise anything
        unknown = isinstance(error, pillow.UnidentifiedImageError)  # its message names an object, not the reason
        reason = "the file is something else, or its beginning is damaged" if unknown else error
        raise ValueError(f"no readable image ({', '.join(FORMATS)}): {reason}") from error
    return encode_image(plain) if plain is not None else _refuse_size(*size)


def _plain_picture(picture: Any) -> Any:
    """The pixels of an opened picture as RGB, upright and on white."""
    from PIL import ImageOps

    if picture.mode.startswith("I;16"):  # `convert` would cut off at 255
        picture = picture.point(lambda level: level / 257).convert("L")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        ground = require_pillow().new("RGBA", picture.size, "white")
        ground.alpha_composite(picture)
        ground.info, picture = picture.info, ground
    plain = ImageOps.exif_transpose(picture.convert("RGB"))
    plain.info = {}
    return plain


def _fits(width: int, height: int) -> bool:
    return min(width, height) > 0 and width * height <= MAX_PIXELS


def _refuse_size(width: int, height: int) -> NoReturn:
    raise ValueError(f"the image has {width} x {height} pixels, expected 1 to {MAX_PIXELS:,} in all")


def encode_image(picture: Any) -> Image:
    """The image of a Pillow picture, read as in `read_image`; ValueError if it is too large or damaged."""
    if not _fits(*picture.size):
        _refuse_size(*picture.size)
    try:
        plain = _plain_picture(picture)
    except Exception as error:  # a file that was opened is decoded only now
        raise ValueError(f"no readable picture: {error}") from error
    buffer = io.BytesIO()
    plain.save(buffer, format="PNG")
    data = buffer.getvalue()
    width, height = plain.size
    return Image(hashlib.sha256(data).hexdigest(), width, height, data)


def open_image(image: Image) -> Any:
    """The image as a Pillow picture."""
    return require_pillow().open(io.BytesIO(image.data), formats=("PNG",)).convert("RGB")


def to_data_url(image: Image) -> str:
    """The image as text, which JSON can hold."""
    return _DATA_URL + base64.b64encode(image.data).decode("ascii")


def from_data_url(text: Any) -> Image:
    """The image in a text as `to_data_url` writes it; ValueError if there is none."""
    head, found, content = text.partition(";base64,") if isinstance(text, str) else ("", "", "")
    if not found or not head.startswith("data:image/"):
        raise ValueError("an image should be a text that starts with data:image/png;base64,")
    if len(content) > 4 * MAX_PNG_BYTES // 3 + 4:
        raise ValueError(f"the image has more than {MAX_PNG_BYTES:,} bytes")
    try:
        return read_image(base64.b64decode(content, validate=True), MAX_PNG_BYTES)
    except binascii.Error as error:
        raise ValueError(f"an image is no base64: {error}") from None


def refuse_images(images: Sequence[Image], what: str, reason: str) -> None:
    """Raise ArpoError if there are images: `what` has them, and for this reason they cannot be seen."""
    if images:
        raise ArpoError(
            f"{what} has images, and {reason}: use a SmolVLM or Idefics3 model with rollout.engine=local in one "
            "process, or leave the images out (those of questions with data.images=false)"
        )


def require_pillow() -> Any:
    """The module `PIL.Image`; raises if Pillow is not installed."""
    try:
        from PIL import Image as pillow
    except ModuleNotFoundError as error:
        raise ArpoError("images need Pillow: pip install pillow") from error
    return pillow
