"""Values of data sets as JSON can hold them, so that the columns of a row survive files, messages and the viewer."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any
from uuid import UUID

MAX_DIGITS = 4000  # of a whole number: Python writes no number of more than 4300 digits


def json_value(value: Any) -> Any:
    """The value as plain lists, tables, texts and numbers; ValueError if it is of a kind that JSON cannot hold.

    Dates become ISO text, bytes base64 text, tuples and arrays lists, keys text; NaN and infinity become None.
    """
    try:
        return _convert(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def shorten_columns(row: Mapping[str, Any], max_chars: int) -> dict[str, Any]:
    """The row with a note in place of each value that is longer than `max_chars` as JSON, or has no JSON form."""
    return {str(column): _or_note(value, max_chars) for column, value in row.items()}


def _or_note(value: Any, max_chars: int) -> Any:
    try:
        plain = json_value(value)
    except ValueError as error:
        return f"(left out: {error})"
    size = len(json.dumps(plain))
    return plain if size <= max_chars else f"(left out: {size:,} characters)"


def _convert(value: Any) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, int):
        if abs(value) >= 10**MAX_DIGITS:
            raise ValueError("a whole number of thousands of digits")
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _convert(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_convert(inner) for inner in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal | UUID | PurePath):
        return str(value)
    if callable(plain := getattr(value, "tolist", None)):  # arrays, tensors, and their scalars
        return _convert(plain())
    raise ValueError(f"a value of type {type(value).__name__} is neither text, number, list nor dict")
