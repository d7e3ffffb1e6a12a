"""Keys of services, from the environment: never from settings, which are written down."""

from __future__ import annotations

import os

from arpo.errors import ArpoError


def key_from(variable: str, purpose: str) -> str:
    """The key in an environment variable; `purpose` is the setting that names the variable, or who wants the key."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ArpoError(f"{purpose}: the environment variable {variable} is not set; put the key there")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ArpoError(f"{purpose}: the environment variable {variable} holds characters that no key has")
    return key
