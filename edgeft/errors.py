"""Errors for users: a message, a hint and an exit code.

A user's mistake is always an EdgeftError; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations


class EdgeftError(Exception):
    """Message: what happened, with the value. Hint: what to do next."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(EdgeftError):
    """Unknown recipe, device, key, option or value."""

    exit_code = 2


class ConfigWarning(UserWarning):
    """A key that is accepted for this version, and ignored."""


class DoesNotFitError(EdgeftError):
    """The job needs more memory than its limit."""

    exit_code = 3


class DataError(EdgeftError):
    """The rows cannot be read or used."""

    exit_code = 4


class ModelError(EdgeftError):
    """The model cannot be read, or its architecture is not supported."""

    exit_code = 5


class RunError(EdgeftError):
    """The run folder cannot be used: locked, made with another recipe, no space, no permission."""

    exit_code = 6


class DamagedError(RunError):
    """A file of the run is corrupted."""


class ExportError(EdgeftError):
    """The tuned model could not be written, or failed its check in llama.cpp."""

    exit_code = 7


class KilledError(EdgeftError):
    """A stage's process was killed by a signal; the exit code is 128 + its number, as in a shell."""

    def __init__(self, message: str, hint: str, number: int) -> None:
        super().__init__(message, hint)
        self.exit_code = 128 + number


class StoppedError(EdgeftError):
    """Ctrl-C or SIGTERM, after a checkpoint was written."""

    exit_code = 130
