"""Generates scenes: pictures with coloured shapes and a digit beside each, which can be read only after zooming in.

A picture of 256 x 256 pixels is a grid of 4 x 4 cells, and six of these hold a shape and its digit. The built-in vision
model sees a picture in 64 x 64 pixels. Shapes and colours are still there then; the digits are not.

Guarantees: the same settings give the same scenes. Every question has exactly one answer. No two things of a scene have
the same colour and shape. Shrunk to 64 x 64 pixels, two pictures that differ in nothing but their digits are the same
up to rounding, by one of 255 levels at most: a digit is drawn without all that a small picture could show of it
(`digit_tiles`), as strokes with a pale rim.

    train, test = build_scenes(schema.Scenes(seed=1))
    train[0].images[0].data, train[0].question, train[0].answers
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from arpo.config.schema import Scenes
from arpo.data.images import encode_image, require_pillow
from arpo.types import Task

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SIZE, GRID, SMALL = 256, 4, 64  # pixels of a side, cells of a side, pixels of a side of what the model sees
CELL = SIZE // GRID
THINGS = 6  # of a scene
STEP = SIZE // SMALL  # all places are multiples of it, so that a digit looks the same everywhere
SHAPE, TILE = 24, 24  # pixels of a side
GROUND = 160  # the grey of the background
COLOURS = {"red": (205, 40, 40), "green": (30, 150, 50), "blue": (40, 70, 215), "yellow": (235, 210, 40)}
SHAPES = ("square", "disc", "triangle")
KINDS = ("read", "sum", "compare")
_FONT = """\
01110 00100 01110 01110 00010 11111 00110 11111 01110 01110
10001 01100 10001 10001 00110 10000 01000 00001 10001 10001
10011 00100 00001 00001 01010 11110 10000 00010 10001 10001
10101 00100 00110 00110 10010 00001 11110 00100 01110 01111
11001 00100 01000 00001 11111 00001 10001 01000 10001 00001
10001 00100 10000 10001 00010 10001 10001 01000 10001 00010
01110 01110 11111 01110 00010 01110 01110 01000 01110 01100"""
Tasks = tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Thing:
    """A coloured shape with a digit to its right. `column` and `row` are its cell, `x` and `y` where it is in there."""

    colour: str
    shape: str
    digit: int
    column: int
    row: int
    x: int
    y: int

    @property
    def name(self) -> str:
        """What a question calls it: `red square`."""
        return f"{self.colour} {self.shape}"

    @property
    def box(self) -> list[float]:
        """Its cell as x0, y0, x1, y1 in fractions of the picture, which is where to zoom in."""
        return [side / GRID for side in (self.column, self.row, self.column + 1, self.row + 1)]


def build_scenes(settings: Scenes) -> tuple[Tasks, Tasks]:
    """The training tasks and the test tasks of these settings."""
    return _tasks(settings, "train", settings.train_tasks), _tasks(settings, "test", settings.test_tasks)


def _tasks(settings: Scenes, split: str, count: int) -> Tasks:
    rng = random.Random(f"{settings.seed} scenes {split}")
    return tuple(sample_task(rng, f"scenes-{settings.seed}-{split}-{number}") for number in range(count))


def sample_task(rng: random.Random, task_id: str = "trace") -> Task:
    """A question of a random kind about a random scene."""
    things, kind = sample_scene(rng), rng.choice(KINDS)
    question, answer, asked = _ask(things, rng, kind)
    meta = {"boxes": [thing.box for thing in asked], "digits": [thing.digit for thing in asked]}
    return Task(task_id, question, (answer,), kind, meta, images=(encode_image(draw_scene(things)),))


def sample_scene(rng: random.Random, things: int = THINGS) -> tuple[Thing, ...]:
    """Different things in different cells."""
    cells = rng.sample([(column, row) for row in range(GRID) for column in range(GRID)], things)
    looks = rng.sample([(colour, shape) for colour in COLOURS for shape in SHAPES], things)
    across, down = range(0, CELL - SHAPE - TILE - 2 * STEP, STEP), range(STEP, CELL - SHAPE, STEP)
    return tuple(
        Thing(*look, rng.randrange(10), *cell, rng.choice(across) + STEP, rng.choice(down))
        for look, cell in zip(looks, cells, strict=True)
    )


def _ask(things: tuple[Thing, ...], rng: random.Random, kind: str) -> tuple[str, str, tuple[Thing, ...]]:
    """A question about a scene, its answer, and the things whose digits it needs."""
    a, b = rng.sample(things, 2)
    if kind == "read":
        return f"Which digit is beside the {a.name}?", str(a.digit), (a,)
    if kind == "sum":
        text = f"What is the sum of the digits beside the {a.name} and the {b.name}?"
        return text, str(a.digit + b.digit), (a, b)
    while a.digit == b.digit:
        if len({thing.digit for thing in things}) == 1:  # all are the same
            return _ask(things, rng, "read")
        a, b = rng.sample(things, 2)
    return f"Which has the larger digit, the {a.name} or the {b.name}?", max(a, b, key=_digit).name, (a, b)


def _digit(thing: Thing) -> int:
    return thing.digit


def draw_scene(things: tuple[Thing, ...]) -> Any:
    """The scene as a Pillow picture."""
    pillow = require_pillow()
    from PIL import ImageDraw

    picture = pillow.new("RGB", (SIZE, SIZE), (GROUND,) * 3)
    pen = ImageDraw.Draw(picture)
    for thing in things:
        x, y = thing.column * CELL + thing.x, thing.row * CELL + thing.y
        colour, last = COLOURS[thing.colour], SHAPE - 1
        if thing.shape == "square":
            pen.rectangle((x, y, x + last, y + last), colour)
        elif thing.shape == "disc":
            pen.ellipse((x, y, x + last, y + last), colour)
        else:
            pen.polygon([(x, y + last), (x + last, y + last), (x + last // 2, y)], colour)
        picture.paste(pillow.fromarray(digit_tiles()[thing.digit]).convert("RGB"), (x + SHAPE + STEP, y))
    return picture


@cache
def digit_tiles() -> tuple[npt.NDArray[np.uint8], ...]:
    """The ten digits as square grey tiles, each of which becomes plain background when the picture is shrunk.

    Shrinking is linear: rows and columns are multiplied by a matrix, of which a tile meets only a part. What the rows
    of this part span (`seen_TT` projects onto it) is all that is left of a tile; a digit is drawn without it.
    """
    import numpy as np

    pillow = require_pillow()
    shrunk_SN = pillow.fromarray(np.eye(SIZE, dtype=np.float32)).resize((SMALL, SIZE), pillow.Resampling.LANCZOS)
    start = CELL + STEP  # anywhere that is not near the rim
    part_ST = np.asarray(shrunk_SN, dtype=np.float64).T[:, start : start + TILE]
    seen_TT = np.linalg.pinv(part_ST) @ part_ST
    rows = [line.split() for line in _FONT.splitlines()]
    inks = []
    for digit in range(10):
        glyph = np.array([[float(bit) for bit in row[digit]] for row in rows]).repeat(2, 0).repeat(2, 1)
        above, left = ((TILE - side) // 2 for side in glyph.shape)
        ink_TT = np.zeros((TILE, TILE))
        ink_TT[above : above + glyph.shape[0], left : left + glyph.shape[1]] = glyph
        inks.append(ink_TT - seen_TT @ ink_TT @ seen_TT.T)
    darkest, palest = max(ink.max() for ink in inks), -min(ink.min() for ink in inks)
    contrast = min(GROUND / darkest, (255 - GROUND) / palest)
    return tuple(np.rint(GROUND - contrast * ink).astype(np.uint8) for ink in inks)
