"""API keys from the environment, so that no file needs to hold them."""

from __future__ import annotations

import os
import re

from arpo.config.masking import is_variable_name
from arpo.errors import ArpoError


def read_api_key(variable: str, purpose: str) -> str:
    """Return the key in an environment variable; `purpose` (a setting or a service) begins the error messages."""
    key = os.environ.get(variable, "").strip()
    if not key and not is_variable_name(variable):
        raise ArpoError(f"{purpose}: expected the name of an environment variable that holds the key, not the key")
    if not key:
        raise ArpoError(f"{purpose}: the environment variable {variable} is not set; put the key there")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ArpoError(f"{purpose}: the environment variable {variable} holds characters that no key has")
    return key


def expand_variables(text: str, purpose: str) -> str:
    """Return a text with every `${NAME}` replaced by the key in the environment variable NAME."""
    return re.sub(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", lambda found: read_api_key(found[1], purpose), text)
