"""Errors that bad input raises. All derive from `KvtideError`, which the CLI prints without a traceback.

KvtideError
  |-- UsageError        the command or setting is wrong (exit code 2)
  |-- InputError        a file or line is wrong: names file, line, reason and mend (exit code 2)
  `-- InvalidRecord     a stream record or row is wrong: carries reason and raw bytes for the dead-letter topic
"""

from __future__ import annotations


class KvtideError(Exception):
    """Base of every error that kvtide raises on purpose."""


class UsageError(KvtideError):
    """The command line or a setting cannot be carried out as given."""


class InputError(KvtideError):
    """A line of an input file cannot be read.

    `path` and `line` (1-based; 0 when the whole file is meant) say where, `reason` what is wrong and `mend` what to do about it.
    `raw` holds the offending bytes, shortened, for a dead-letter record.
    """

    def __init__(self, path: str, line: int, reason: str, mend: str, raw: bytes = b"") -> None:
        where = f"{path}:{line}" if line else path
        super().__init__(f"{where}: {reason}; {mend}")
        self.path, self.line, self.reason, self.mend, self.raw = path, line, reason, mend, raw


class InvalidRecord(KvtideError):
    """A record of the event stream, or one row of it, breaks the contract; `raw` is its bytes, `reason` a short token."""

    def __init__(self, reason: str, detail: str, raw: bytes) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.raw = reason, detail, raw
