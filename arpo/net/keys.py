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


def expand_variables(text: str, purpose: str, *, only_keys: bool = True) -> str:
    """Return a text with every `${NAME}` replaced by the environment variable NAME, and `$${` by a literal `${`.

    With `only_keys` the variables must hold what a key may hold; without, any text.
    """

    def read(found: re.Match[str]) -> str:
        name = found[1]
        if name is None:
            return "${"
        value = os.environ.get(name, "").strip()
        if not value:
            raise ArpoError(
                f"{purpose}: the environment variable {name} is not set; set it, or write $${{{name}}} for a literal "
                f"${{{name}}}"
            )
        return read_api_key(name, purpose) if only_keys else value

    return re.sub(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)\}", read, text)
