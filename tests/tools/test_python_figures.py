"""Figures of the Python tool: shown, bounded, and never trusted, since code can print what it wants in their place."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib
from collections.abc import Iterator

import pytest

import arpo.tools.build as build
from arpo.config.schema import Tools
from arpo.data.images import open_image
from arpo.errors import ArpoError
from arpo.tools.executor import Toolset
from arpo.tools.python.tool import build_python
from arpo.tools.sandbox.figures import MARK, MAX_FIGURE_BYTES, MAX_FIGURES, split_figures
from arpo.tools.sandbox.sandbox import FIGURES, Sandbox
from arpo.types import Fault, ToolCall, ToolResult

PLOT = "import matplotlib.pyplot as plt\n"


def line(content: bytes) -> str:
    return MARK + base64.b64encode(content).decode()


def png(width: int, height: int) -> bytes:
    """A PNG file of one red pixel that claims another size."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0\xff\0\0"))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("stdout", "text", "figures"),
    [
        ("", "", []),
        ("42\n", "42\n", []),
        ("42", "42\n", []),
        (f"42\n{line(b'a')}\n{line(b'b')}\n", "42\n", [b"a", b"b"]),
        (f"{line(b'a')}\n", "", [b"a"]),
        (f"{line(b'a')}\nlater\n", f"{line(b'a')}\nlater\n", []),  # only at the end
        (f"42\n{MARK}!\n{line(b'b')}\n", "42\n", [b"", b"b"]),
        (f"{MARK}é\n", "", [b""]),
        (f"42\n{line(b'a')[:-3]}", "42\n", [b""]),  # output that was cut
        ("42\n" + f"{line(b'a')}\n" * 9, "42\n", [b"a"] * MAX_FIGURES),
    ],
)
def test_figures_are_the_last_lines(stdout: str, text: str, figures: list[bytes]) -> None:
    assert split_figures(stdout) == (text, figures)


@pytest.fixture(scope="module")
def toolset() -> Iterator[Toolset]:
    with Sandbox(workers=2, **FIGURES) as sandbox:
        yield Toolset([build_python(sandbox, timeout=60.0, shows_figures=True)])


def ask(toolset: Toolset, code: str) -> ToolResult:
    return asyncio.run(toolset.call(ToolCall("python", {"code": code})))


@pytest.mark.slow
def test_open_figures_are_shown_after_the_text(toolset: Toolset) -> None:
    both = f"{PLOT}plt.figure(facecolor='red')\nplt.show()\nplt.figure(facecolor='blue')\nprint('two')\n6 * 7"
    result = ask(toolset, both)
    assert (result.text, result.fault) == ("two\n42", None)
    assert [open_image(image).getpixel((3, 3)) for image in result.images] == [(255, 0, 0), (0, 0, 255)]
    assert [(image.width, image.height) for image in result.images] == [(512, 384)] * 2
    assert ask(toolset, both).images == result.images  # the same code, the same pictures
    alone = ask(toolset, f"{PLOT}plt.plot([1, 2])\nNone")
    assert (alone.text, len(alone.images)) == ("", 1)
    closed = ask(toolset, f"{PLOT}plt.plot([1, 2])\nplt.close('all')\n1 + 1")
    assert (closed.text, closed.images) == ("2", ())
    assert "Figures of matplotlib" in toolset["python"].spec.description


@pytest.mark.slow
def test_code_without_figures_is_answered_as_ever(toolset: Toolset) -> None:
    assert ask(toolset, "6 * 7").text == "42"
    assert ask(toolset, "x = 1").text.startswith("(no output")
    failed = ask(toolset, f"{PLOT}plt.plot([1])\n1 / 0")
    assert (failed.fault, failed.images) == (Fault.MODEL, ())
    assert failed.text.startswith("Error: ZeroDivisionError") and MARK not in failed.text


ATTACKS = {
    "a bomb": f"print({line(png(10_000, 10_000))!r})",
    "no picture": f"print({line(b'<svg onload=alert(1)>')!r})",
    "no base64": f"print({MARK!r} + '%' * 99)",
    "many pixels": f"{PLOT}plt.figure(figsize=(60, 60))\nNone",
    "many bytes": f"{PLOT}import numpy\nplt.imshow(numpy.random.rand(999, 999, 3))\nplt.gcf().set_size_inches(14, 14)",
    "many figures": f"{PLOT}for _ in range(20): plt.figure(figsize=(1, 1))",
    "a figure that raises": f"{PLOT}f = plt.figure()\ndef fail(*_, **__): raise ValueError('no')\nf.savefig = fail",
    "a module of its own": (
        "import sys, types\nfake = types.ModuleType('matplotlib.pyplot')  # not matplotlib\n"
        "sys.modules['matplotlib.pyplot'] = fake\nprint('still here')"
    ),
    "output without end": f"{PLOT}plt.figure()\nprint('x' * (3 << 20))",
    "closed output": f"{PLOT}import os, sys\nplt.figure()\nsys.stdout.close()",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_through_figures(toolset: Toolset, name: str) -> None:
    """Whatever code prints or leaves open: text of the usual length, few pictures, and these of bounded size."""
    result = ask(toolset, ATTACKS[name])
    assert result.fault in (None, Fault.MODEL), result.text
    assert len(result.text) < 4 * 512 + 500 and MARK not in result.text
    assert len(result.images) <= MAX_FIGURES
    for image in result.images:
        assert max(image.width, image.height) <= 1024
        assert open_image(image).size == (image.width, image.height)
    expected = {
        "a bomb": "a figure cannot be shown: the image has 10000 x 10000 pixels",
        "no picture": "a figure cannot be shown: no readable image",
        "no base64": "a figure cannot be shown: no readable image",
        "many bytes": "figure 1 is too large to be shown",
        "many figures": "20 figures are open, and 4 are shown",
        "a figure that raises": "figure 1 cannot be drawn: ValueError: no",
    }
    assert expected.get(name, "") in result.text


def test_figures_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    with pytest.raises(ArpoError, match="there is no matplotlib; pip install matplotlib pillow"):
        build.python_tool(Tools(python_figures=True), blocking=False)


def test_a_figure_has_at_most_so_many_bytes_that_all_fit_into_the_output() -> None:
    line_bytes = 4 * MAX_FIGURE_BYTES // 3 + 100
    assert FIGURES["max_output"] > MAX_FIGURES * line_bytes + 65536
