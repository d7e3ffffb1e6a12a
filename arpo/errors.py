"""Errors that are told to the user without a traceback."""

from __future__ import annotations


class ArpoError(Exception):
    """A mistake in what the user gave us; its text says what to do. The CLI prints it and exits with code 2."""


class Diverged(ArpoError):
    """Training came to a number that is not finite."""


class Collapsed(ArpoError):
    """A run that collapsed and was rolled back to a healthy checkpoint; the CLI exits with code 3."""
