"""The grid of settings that every algorithm is tuned over, on seeds of its own.

    grid = parse_grid("M=4,8;lr", config)    # {"M": (4, 8), "lr": (2.5e-4, 5e-4, 1e-3)}
    choices(grid)                            # ((("M", 4), ("lr", 2.5e-4)), (("M", 4), ("lr", 5e-4)), ...)

A name without values gets a small grid around the configuration's value. All algorithms get the same grid, the same
budget and the same tuning seeds, and each goes on with its best: the highest mean accuracy over the budget, which is
the area under accuracy against cost (`stats.mean_accuracy`).

Guarantees: pure functions. N (`rollout.num_initial`) keeps its share of M, rounded down, at least 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod

from arpo.config.loading import is_derived
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.studies.compare.results import Choice

FIRST_TUNING_SEED = 1000
MAX_GRID = 64  # settings
NAMES = {"M": "rollout.num_trajectories", "lr": "train.lr", "batch": "train.batch_size"}
FACTORS = {"M": (0.5, 1), "lr": (0.5, 1, 2), "batch": (0.5, 1)}  # of the configuration's value, if no values are given
EXAMPLE = '--tune M,lr or --tune "M=4,8;lr=2e-4,5e-4"'
Grid = Mapping[str, tuple[int | float, ...]]


def parse_grid(text: str, config: Config) -> Grid:
    """The grid that `--tune` asks for; `config` has the values that a name without values is tried around."""
    grid: dict[str, tuple[int | float, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        listed, equals, values = part.partition("=")
        for name in (name.strip() for name in listed.split(",")):
            if name not in NAMES or name in grid:
                why = "is given twice" if name in grid else f"is not one of {', '.join(NAMES)}"
                raise ArpoError(f"--tune: {name or part!r} {why}; write {EXAMPLE}")
            if equals and "," in listed:
                raise ArpoError(f"--tune: {part!r} gives one list of values to several names; write {EXAMPLE}")
            grid[name] = _values(name, values) if equals else _around(name, config)
    if not grid:
        raise ArpoError(f"--tune: names no setting; write {EXAMPLE}")
    if (size := prod(map(len, grid.values()))) > MAX_GRID:
        raise ArpoError(f"--tune: {size} settings for every algorithm are more than {MAX_GRID}; give fewer values")
    return grid


def choices(grid: Grid) -> tuple[Choice, ...]:
    """Every combination of the grid's values."""
    return tuple(tuple(zip(grid, values, strict=True)) for values in product(*grid.values()))


def choice_overrides(choice: Choice, config: Config) -> list[str]:
    """The overrides that make `config` use these settings."""
    overrides = [f"{NAMES[name]}={value}" for name, value in choice]
    if (trajectories := dict(choice).get("M")) is not None:
        rollout = config.rollout
        if not is_derived(config, "rollout", "num_initial"):
            initial = max(1, int(trajectories) * rollout.num_initial // rollout.num_trajectories)
            overrides.append(f"rollout.num_initial={initial}")
    return overrides


def _values(name: str, text: str) -> tuple[int | float, ...]:
    kind = float if name == "lr" else int
    try:
        values = tuple(kind(value) for value in text.split(","))
    except ValueError:
        raise ArpoError(f"--tune: {name}: got {text!r}, expected numbers, like {EXAMPLE}") from None
    if len(set(values)) < len(values):
        raise ArpoError(f"--tune: {name}: got {text!r}, where a value is given twice")
    return values


def _around(name: str, config: Config) -> tuple[int | float, ...]:
    section, _, key = NAMES[name].partition(".")
    value = getattr(getattr(config, section), key)
    if name == "lr":
        return tuple(float(f"{factor * value:.6g}") for factor in FACTORS[name])
    return tuple(dict.fromkeys(max(1, int(factor * value)) for factor in FACTORS[name]))
