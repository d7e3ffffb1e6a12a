"""API keys of the server: from the environment variable ARPO_API_KEYS, or from a file with a key on each line.

Guarantees: keys are in no message and no `repr`; only their hashes are kept, and all are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass, field
from pathlib import Path

from arpo.config.files import expand_user, read_limited
from arpo.errors import ArpoError

VARIABLE = "ARPO_API_KEYS"
MIN_LENGTH = 16
HOW_TO = f"put keys of at least {MIN_LENGTH} characters into the environment variable {VARIABLE} or a file (--keys)"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that are accepted; without any, everyone is."""

    hashes: tuple[bytes, ...] = field(default=(), repr=False)

    def __bool__(self) -> bool:
        return bool(self.hashes)

    def accept(self, authorization: str) -> bool:
        """Whether the value of an Authorization header holds one of the keys."""
        if not self.hashes:
            return True
        scheme, _, key = authorization.partition(" ")
        given = _hash(key.strip())
        found = [hmac.compare_digest(given, known) for known in self.hashes]  # always all of them
        return any(found) and scheme.lower() == "bearer"


def build_keys(keys: list[str], source: str) -> Keys:
    """These keys; `source` says in error messages where they come from."""
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_LENGTH or not (key.isascii() and key.isprintable()) or " " in key:
            raise ArpoError(
                f"{source}: key {number} cannot be used; a key has at least {MIN_LENGTH} letters, digits and signs"
            )
    return Keys(tuple(map(_hash, keys)))


def read_keys(file: Path | None) -> Keys:
    """The keys in a file, one a line (# begins a comment), or else those in the environment, with commas between."""
    if file is None:
        return build_keys([key.strip() for key in os.environ.get(VARIABLE, "").split(",") if key.strip()], VARIABLE)
    path = expand_user(file)
    try:
        lines = read_limited(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ArpoError(f"--keys: {path} cannot be read ({reason})") from None
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not keys:
        raise ArpoError(f"--keys: {path} has no key; write one on each line")
    return build_keys(keys, f"--keys: {path}")


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
