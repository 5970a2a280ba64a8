"""Everything that shardstore raises, and the one record that says what is wrong.

::

    ShardstoreError            catch this for all of them
    ├── OptionError            options that are unknown or do not go together (also a ValueError)
    ├── SourceError            the source cannot be converted; ``.problems`` lists each bad file
    │   └── ImageError         one picture cannot be decoded
    ├── NoStoreError           the path holds no finished store (also a FileNotFoundError)
    ├── DamagedStoreError      bytes of a store are not the bytes that were written
    └── StackError             samples of different shapes cannot become one batch

Each error carries a :class:`Problem` (``error.problem``): what, where, expected, got, and what to do next.
``validate`` returns the same records in a list instead of raising.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but tab and line feed


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, with its place.

    Attributes:
        what: the fault in a few words.
        path: the file on disk.
        field: the field's name.
        shard, chunk, sample: numbers from 0; ``chunk`` counts inside the shard, ``sample`` in the whole store.
        key: the sample's key.
        expected, got: the two values that differ, as text.
        hint: what to do next.
    """

    what: str
    path: str | None = None
    field: str | None = None
    shard: int | None = None
    chunk: int | None = None
    sample: int | None = None
    key: str | None = None
    expected: str | None = None
    got: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        places = [f"{f.name} {getattr(self, f.name)}" for f in fields(self)[2:7] if getattr(self, f.name) is not None]
        head = self.path + ": " if self.path else ""
        text = head + self.what + (f" ({', '.join(places)})" if places else "")
        if self.expected is not None or self.got is not None:
            text += f"; expected {self.expected}, got {self.got}"
        return printable(text + (f". {self.hint}" if self.hint else ""))

    def to_dict(self) -> dict[str, str | int]:
        """The parts that are known, for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


def printable(text: str) -> str:
    """``text`` with undecodable bytes of file names (lone surrogates), and control characters, which a terminal would
    obey, shown as ``\\xNN``."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


# What people can do about errors of the system.
_REMEDIES = {
    errno.ENOSPC: "Make room on that disk",
    errno.EDQUOT: "Make room: this user may not write more there",
    errno.EFBIG: "Raise the largest size of a file (`ulimit -f`), or make smaller shards (--shard-size)",
    errno.EMFILE: "Raise the number of files that a process may have open (`ulimit -n`)",
    errno.ENFILE: "End programs that have many files open",
    errno.EROFS: "Choose a target that can be written",
    errno.EACCES: "Choose a target that this user may write, or mend its permissions",
    errno.EPERM: "Choose a target that this user may write, or mend its permissions",
}


def system_problem(what: str, error: OSError, path: str) -> Problem:
    """An error of the system for people; ``path`` for where it names none."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    hint = _REMEDIES.get(error.errno or 0, "Mend that")
    return Problem(f"{what}: {reason}", error.filename or path, hint=f"{hint}, then run the same command again.")


class ShardstoreError(Exception):
    """The base of all errors of this library."""

    def __init__(self, problem: Problem | str) -> None:
        # A DataLoader worker's error is built anew in the trainer from its text alone.
        self.problem = problem if isinstance(problem, Problem) else Problem(problem)
        super().__init__(problem)

    def __str__(self) -> str:
        return str(self.problem)


class OptionError(ShardstoreError, ValueError):
    """An option is unknown, has an impossible value, or does not go with another one."""


class SourceError(ShardstoreError):
    """The source cannot be converted as it is."""

    def __init__(self, problem: Problem | str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(problem)
        self.problems = list(problems)


class ImageError(SourceError):
    """A picture cannot be decoded, or may not be stored as asked."""


class NoStoreError(ShardstoreError, FileNotFoundError):
    """There is no finished store at this path."""


class DamagedStoreError(ShardstoreError):
    """A file of the store is missing, cut, or holds other bytes than those written."""


class StackError(ShardstoreError, RuntimeError):
    """Samples of different shapes cannot be stacked into a batch."""
