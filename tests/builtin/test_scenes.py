"""The scenes: what is asked is in the picture, cannot be seen in the small one, and can in a crop."""

from __future__ import annotations

import functools
import random
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image as pillow

from arpo.builtin.scenes import (
    CELL,
    GROUND,
    SMALL,
    THINGS,
    Tasks,
    Thing,
    build_scenes,
    digit_tiles,
    draw_scene,
    sample_scene,
)
from arpo.config.schema import Scenes
from arpo.data.images import open_image
from arpo.errors import ArpoError

FEW = Scenes(seed=3, train_tasks=60, test_tasks=30)


@functools.cache
def few() -> tuple[Tasks, Tasks]:
    return build_scenes(FEW)


def shrunk(things: tuple[Thing, ...]) -> npt.NDArray[np.int64]:
    """What the built-in model sees of a scene."""
    small = draw_scene(things).resize((SMALL, SMALL), pillow.Resampling.LANCZOS)
    return np.asarray(small, dtype=np.int64)


def test_digits_vanish_when_the_picture_is_shrunk_and_shapes_do_not() -> None:
    rng = random.Random(0)
    for _ in range(20):
        things = sample_scene(rng)
        others = tuple(replace(thing, digit=(thing.digit + rng.randint(1, 9)) % 10) for thing in things)
        assert np.abs(shrunk(things) - shrunk(others)).max() <= 1
        for thing in things:
            rest = tuple(one for one in things if one is not thing)
            for look in ({"colour": "red" if thing.colour != "red" else "blue"}, {"column": (thing.column + 1) % 4}):
                assert np.abs(shrunk(things) - shrunk((*rest, replace(thing, **look)))).max() > 60  # type: ignore[arg-type]
            for shape in {"square", "disc", "triangle"} - {thing.shape}:
                assert np.abs(shrunk(things) - shrunk((*rest, replace(thing, shape=shape)))).max() > 30


def test_digits_alone_leave_no_trace_at_all() -> None:
    """Without shapes, whose edges make rounding differ, the small picture is plain background."""
    for digit in range(10):
        for column, row, x, y in ((0, 0, 4, 4), (1, 2, 8, 36), (3, 3, 12, 36), (2, 0, 4, 20)):
            picture = pillow.new("L", (256, 256), GROUND)
            picture.paste(pillow.fromarray(digit_tiles()[digit]), (column * CELL + x + 28, row * CELL + y))
            assert set(picture.resize((SMALL, SMALL), pillow.Resampling.LANCZOS).tobytes()) == {GROUND}


def test_a_crop_shows_the_digit() -> None:
    """The crop of a thing's cell is far from that of the same cell with any other digit, compared to rounding."""
    rng = random.Random(1)
    for thing in sample_scene(rng):
        cells = []
        for digit in range(10):
            picture = draw_scene((replace(thing, digit=digit),))
            box = [int(side * 256) for side in thing.box]
            cells.append(np.asarray(picture.crop(box), dtype=np.int64))
        distances = [np.abs(a - b).max() for n, a in enumerate(cells) for b in cells[:n]]
        assert min(distances) > 80


def test_things_are_different_and_lie_in_cells_of_their_own() -> None:
    rng = random.Random(2)
    for _ in range(100):
        things = sample_scene(rng)
        assert len({thing.name for thing in things}) == len({(thing.column, thing.row) for thing in things}) == THINGS
        for thing in things:
            assert 1 <= thing.x <= CELL - 52 and 1 <= thing.y <= CELL - 24


def test_the_answer_follows_from_the_digits() -> None:
    kinds = Counter[str]()
    for task in (*few()[0], *few()[1]):
        digits, (answer,) = task.meta["digits"], task.answers
        kinds[task.kind] += 1
        if task.kind == "compare":
            first, second = task.question.removesuffix("?").partition(", the ")[2].split(" or the ")
            assert digits[0] != digits[1] and answer == (first if digits[0] > digits[1] else second)
        else:
            assert answer == str(sum(digits)) and len(digits) == {"read": 1, "sum": 2}[task.kind]
    assert set(kinds) == {"read", "sum", "compare"} and min(kinds.values()) > 15


def test_a_box_is_where_the_thing_is() -> None:
    """In the crop there is the colour that is asked for, and elsewhere no such thing."""
    for task in few()[0][:20]:
        if task.kind == "read":
            colour = task.question.split()[5]
            x0, y0, x1, y1 = (int(side * 256) for side in task.meta["boxes"][0])
            part = np.asarray(open_image(task.images[0]).crop((x0, y0, x1, y1)), dtype=np.int64)
            channel = {"red": 0, "green": 1, "blue": 2}.get(colour)
            if channel is not None:
                others = np.delete(part, channel, axis=2).max(axis=2)
                assert (part[..., channel] - others > 80).sum() > 200


def test_the_same_settings_give_the_same_scenes_and_training_shares_none_with_the_test() -> None:
    assert build_scenes(FEW) == few()
    hashes = [{task.images[0].sha256 for task in tasks} for tasks in few()]
    assert [len(some) for some in hashes] == [60, 30] and hashes[0].isdisjoint(hashes[1])
    other = build_scenes(FEW.model_copy(update={"seed": 4}))[0]
    assert hashes[0].isdisjoint(task.images[0].sha256 for task in other)


def test_a_known_scene_is_the_same_on_every_machine() -> None:
    """A change here makes every number that was measured on the scenes another one."""
    task = few()[1][0]
    assert (task.id, task.kind, task.answers) == ("scenes-3-test-0", "compare", ("blue triangle",))
    assert task.question == "Which has the larger digit, the blue triangle or the yellow disc?"
    assert task.meta == {"boxes": [[0.5, 0.5, 0.75, 0.75], [0.25, 0.25, 0.5, 0.5]], "digits": [7, 1]}
    pixels = open_image(task.images[0]).resize((4, 4), pillow.Resampling.BOX)
    found = [pixels.getpixel(cell) for cell in ((0, 0), (1, 2), (3, 3))]
    assert found == [(146, 159, 148), (165, 164, 151), (160, 160, 160)]


def test_without_pillow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ArpoError, match="images need Pillow: pip install pillow"):
        build_scenes(Scenes(train_tasks=1, test_tasks=1))
