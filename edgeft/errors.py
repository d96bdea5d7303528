"""Errors for users: a message, a hint and an exit code.

A user's mistake is always an EdgeftError; anything else is a bug and keeps its traceback.
"""


class EdgeftError(Exception):
    """Message: what happened, with the value. Hint: what to do next."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(EdgeftError):
    exit_code = 2  # unknown recipe, device, key, option or value


class ConfigWarning(UserWarning):
    """A key that is accepted for this version, and ignored."""


class DoesNotFitError(EdgeftError):
    exit_code = 3  # the job needs more memory than its limit


class DataError(EdgeftError):
    exit_code = 4  # the rows cannot be read or used


class ModelError(EdgeftError):
    exit_code = 5  # the model cannot be read, or its architecture is not supported


class RunError(EdgeftError):
    exit_code = 6  # the run folder cannot be used: locked, made with another recipe, no space, no permission


class DamagedError(RunError):
    """A file of the run is corrupted."""


class ExportError(EdgeftError):
    exit_code = 7  # the tuned model could not be written, or failed its check in llama.cpp


class KilledError(EdgeftError):
    """A stage's process was killed by a signal; the exit code is 128 + its number, as in a shell."""

    def __init__(self, message: str, hint: str, number: int) -> None:
        super().__init__(message, hint)
        self.exit_code = 128 + number


class StoppedError(EdgeftError):
    exit_code = 130  # Ctrl-C or SIGTERM, after a checkpoint was written
