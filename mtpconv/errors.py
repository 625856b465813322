"""The closed set of errors mtpconv raises, each with its exit code.

Every message is one line: subject first, then what is wrong, then what to do.
"""

from __future__ import annotations


class MtpconvError(Exception):
    """Base of all errors that a user can cause; never raised itself."""

    exit_code: int = 70


class UsageError(MtpconvError):
    """The command asks for something it cannot mean: bad option, existing target, bad table."""

    exit_code = 2


class RefusedError(MtpconvError):
    """The input was read and is wrong: a tensor would be lost, config and tensors disagree."""

    exit_code = 1


class UnreadableError(MtpconvError):
    """A file is missing, truncated, corrupt or not what it says; nothing could be checked."""

    exit_code = 3


class WriteError(MtpconvError):
    """The output could not be written (disk full, permission); the target was left as it was."""

    exit_code = 3


class UnsupportedError(MtpconvError):
    """The input is understood but this version cannot do what was asked with it."""

    exit_code = 3
