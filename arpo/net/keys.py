"""API keys from the environment, never from settings, which are saved with a run."""

from __future__ import annotations

import os

from arpo.errors import ArpoError


def read_api_key(variable: str, purpose: str) -> str:
    """Return the key in an environment variable; `purpose` (a setting or a service) begins the error messages."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ArpoError(f"{purpose}: the environment variable {variable} is not set; put the key there")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ArpoError(f"{purpose}: the environment variable {variable} holds characters that no key has")
    return key
