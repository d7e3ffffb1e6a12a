"""Images from outside: whatever a file holds, there is a plain picture or a ValueError, in bounded memory."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image as pillow

from arpo.data import images
from arpo.data.images import (
    FORMATS,
    MAX_BYTES,
    MAX_PIXELS,
    encode_image,
    from_data_url,
    open_image,
    read_image,
    to_data_url,
)

RED, WHITE = (255, 0, 0), (255, 255, 255)


def saved(picture: Any, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format=kind, **options)
    return buffer.getvalue()


def pixels(content: bytes) -> list[Any]:
    """The pixels of an image as it is read, row by row."""
    picture = open_image(read_image(content))
    return [picture.getpixel((x, y)) for y in range(picture.height) for x in range(picture.width)]


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, *chunks: bytes, data: bytes = b"\0\xff\0\0") -> bytes:
    """A PNG file by hand: an RGB picture that may lie about its size, with further chunks before its pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_becomes_the_same_kind_of_picture(kind: str) -> None:
    image = read_image(saved(pillow.new("RGB", (4, 3), RED), kind))
    assert (image.width, image.height) == (4, 3)
    assert image.data.startswith(b"\x89PNG")
    assert all(abs(a - b) <= 2 for pixel in pixels(image.data) for a, b in zip(pixel, RED, strict=True))


def test_equal_pixels_have_the_same_hash_whatever_the_file_says_besides() -> None:
    plain = pillow.new("RGB", (2, 2), RED)
    noted = png(1, 1, chunk(b"tEXt", b"Comment\0a secret"))
    assert read_image(saved(plain, "PNG")) == read_image(saved(plain, "BMP")) == encode_image(plain)
    assert read_image(noted) == read_image(png(1, 1))
    assert b"secret" not in read_image(noted).data
    assert read_image(png(1, 1, data=b"\0\xfe\0\0")) != read_image(png(1, 1))


def test_transparent_pixels_become_white_and_half_transparent_ones_pale() -> None:
    picture = pillow.new("RGBA", (2, 1), (255, 0, 0, 0))
    picture.putpixel((1, 0), (255, 0, 0, 128))
    assert pixels(saved(picture, "PNG")) == [WHITE, (255, 127, 127)]
    palette = pillow.new("P", (2, 1), 0)
    palette.putpalette([9, 9, 9, 255, 0, 0])
    palette.putpixel((1, 0), 1)
    assert pixels(saved(palette, "PNG", transparency=0)) == [WHITE, RED]
    assert pixels(saved(palette, "GIF", transparency=0)) == [WHITE, RED]


def test_a_picture_of_pillow_is_read_like_its_file() -> None:
    clear, photo = pillow.new("RGBA", (2, 1), (255, 0, 0, 128)), pillow.new("RGB", (16, 8), RED)
    exif = pillow.Exif()
    exif[0x0112] = 6
    for content in (
        saved(clear, "PNG"),
        saved(photo, "JPEG", exif=exif),
        saved(pillow.new("I;16", (2, 2), 999), "PNG"),
    ):
        assert encode_image(pillow.open(io.BytesIO(content))) == read_image(content)
    with pytest.raises(ValueError, match="no readable picture"):
        encode_image(pillow.open(io.BytesIO(saved(photo, "BMP")[:200])))


def test_a_stored_image_may_be_larger_than_the_file_that_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    small = encode_image(pillow.new("RGB", (2, 2), RED))
    url = to_data_url(replace(small, data=small.data + bytes(MAX_BYTES)))
    assert from_data_url(url) == small
    monkeypatch.setattr(images, "MAX_PNG_BYTES", MAX_BYTES)
    with pytest.raises(ValueError, match="more than"):
        from_data_url(url)


def test_sixteen_bits_are_scaled_to_eight() -> None:
    grey = pillow.new("I;16", (3, 1))
    for x, level in enumerate((0, 128 * 257, 65535)):
        grey.putpixel((x, 0), level)
    assert pixels(saved(grey, "PNG")) == [(0,) * 3, (128,) * 3, (255,) * 3]


def test_cmyk_and_grey_become_rgb() -> None:
    (found,) = set(pixels(saved(pillow.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")))
    assert all(abs(a - b) <= 3 for a, b in zip(found, RED, strict=True))
    assert pixels(saved(pillow.new("1", (1, 1), 1), "PNG")) == [WHITE]
    assert pixels(saved(pillow.new("LA", (1, 1), (0, 255)), "PNG")) == [(0, 0, 0)]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_is_turned_as_its_exif_data_say(kind: str) -> None:
    picture = pillow.new("RGB", (16, 8), RED)
    picture.paste((0, 0, 255), (0, 0, 8, 8))  # the left half is blue
    exif = pillow.Exif()
    exif[0x0112] = 6  # to be turned clockwise by 90 degrees: left becomes top
    turned = open_image(read_image(saved(picture, kind, exif=exif)))
    assert turned.size == (8, 16)
    assert turned.getpixel((4, 3))[2] > 200 and turned.getpixel((4, 12))[0] > 200


def test_an_animation_is_its_first_frame() -> None:
    frames = [pillow.new("RGB", (3, 3), colour) for colour in (RED, (0, 0, 255))]
    assert set(pixels(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))) == {RED}


NO_IMAGES = {
    "nothing": b"",
    "text": b"This is no picture.",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
    "pdf": b"%PDF-1.7\n1 0 obj << /Type /Catalog >> endobj",
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "tiff": saved(pillow.new("RGB", (2, 2)), "TIFF"),
    "ppm": b"P6 2 2 255 " + bytes(12),
    "png header": png(4, 4)[:20],
    "png cut": saved(pillow.effect_noise((64, 64), 50), "PNG")[:600],
    "jpeg cut": saved(pillow.effect_noise((64, 64), 50), "JPEG")[:900],
    "webp cut": saved(pillow.effect_noise((64, 64), 50), "WEBP")[:200],
    "gif cut": saved(pillow.new("RGB", (64, 64)), "GIF")[:30],
    "bmp cut": saved(pillow.new("RGB", (64, 64)), "BMP")[:100],
    "zero": png(0, 0),
    "too few pixels": png(300, 300),
    "wrong checksum": png(1, 1).replace(b"IDAT", b"IDAX"),
    "huge size": png(0x7FFFFFFF, 0x7FFFFFFF),
    "100 megapixels": png(10_000, 10_000),
    "just too large": png(MAX_PIXELS + 1, 1),
    "too many bytes": png(1, 1) + bytes(MAX_BYTES),
    "ztxt bomb": png(1, 1, chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(64 << 20)))),
    "broken exif": saved(pillow.new("RGB", (2, 2)), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff"),
}


@pytest.mark.parametrize("name", NO_IMAGES)
def test_what_is_no_picture_is_refused_with_a_reason(name: str) -> None:
    try:
        image = read_image(NO_IMAGES[name])
    except ValueError as error:
        assert re.search(r"no readable image|pixels|bytes", str(error))
        assert "0x" not in str(error) and len(str(error)) < 300
    else:
        assert name in ("broken exif",) and image.width == 2  # the picture itself is fine


def test_what_follows_a_picture_is_dropped() -> None:
    """A polyglot: a picture for us, an archive or a page for others."""
    polyglot = png(1, 1) + b"PK\x03\x04<script>alert(1)</script>"
    assert read_image(polyglot).data == read_image(png(1, 1)).data


BOMBS = """
import resource, sys, zlib
sys.path.insert(0, "tests/data")
from test_images import chunk, png
from arpo.data.images import read_image

zeros = zlib.compress(bytes(200 << 20))
bombs = [
    png(20_000, 20_000, data=bytes(200 << 20)),
    png(1, 1, *[chunk(b"zTXt", b"k\\0\\0" + zeros)] * 20),
    png(1, 1, *[chunk(b"iTXt", b"k\\0\\1\\0\\0\\0" + zeros)] * 20),
    png(1, 1, chunk(b"iCCP", b"p\\0\\0" + zeros)),
    png(4, 4, data=bytes(200 << 20)),
]
del zeros
read_image(png(1, 1))  # with what is imported only then
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (160 << 20),) * 2)
for bomb in bombs:
    try:
        read_image(bomb)
    except ValueError as error:
        assert "memory" not in str(error).lower(), error
print("bounded")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory through /proc")
def test_bombs_are_refused_in_bounded_memory() -> None:
    """Each would take 200 MB or more; the process may take 160."""
    done = subprocess.run([sys.executable, "-c", BOMBS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "bounded\n"), done.stderr


def test_a_picture_that_is_too_large_is_not_encoded() -> None:
    with pytest.raises(ValueError, match="16777217 x 1 pixels"):
        encode_image(pillow.new("1", (MAX_PIXELS + 1, 1)))
