"""A folder of images, one sub-folder a class, read as torchvision's ImageFolder reads it.

Classes are the folders of the root, sorted by name. Samples are ordered by class, then folder, then name. A folder
without sub-folders is a set of images without labels. The key is the path below the root, with forward slashes.
Hidden files and folders are skipped. A file counts as a picture by its ending or else by its first bytes; what is
left out is noted. Links are followed, but not into a folder that contains them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardstore.errors import Problem, ShardstoreError, SourceError
from shardstore.pictures import images
from shardstore.sources import Numbers
from shardstore.sources.strings import Strings
from shardstore.store.schema import Field

_File = tuple[str, int, int]  # name, bytes, time of the last change in ns

# Not the file's own faults: leaving it out (--on-error skip) would lose a good picture.
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT)

_SNIFF_BYTES = 64
_LITTER = {"__MACOSX", "Thumbs.db", "desktop.ini", "@eaDir"}  # what macOS, Windows and NAS boxes leave in folders
_IMAGE = Field("image", "bytes", "|u1", (-1,), "image")
_LABEL = Field("label", "array", "<i8", (), "label")
_KEY = Field("key", "bytes", "|u1", (-1,), "text")


@dataclass(frozen=True, eq=False)
class FolderSource:
    """Image files below a root; see :class:`shardstore.sources.Source`."""

    root: str
    keys: Strings
    labels: Numbers
    sizes: Numbers
    times: Numbers  # of the last change, in ns
    classes: tuple[str, ...] | None
    notes: list[str]
    in_process: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def scan(cls, root: str) -> FolderSource:
        """List a folder.

        Raises:
            SourceError: no picture is in it.
        """
        root = os.path.abspath(root)
        if not os.path.isdir(root):
            raise SourceError(Problem("no such folder", root))
        found = _Found(root)
        folders, loose = found.listing(root, "")
        if folders:
            names = sorted(folders)
            for label, name in enumerate(names):
                found.add_class(label, name)
            pictures = [name for name, *_ in loose if found.is_picture(f"{root}/{name}")]
            if pictures:
                found.note("files loose in the root have no class and were left out", pictures)
        else:
            names = []
            found.add(0, "", loose)
        if not found.keys:
            hint = "Expected: ROOT/CLASS/picture.jpg, or pictures in the folder itself."
            hint = ". ".join([*found.finish_notes(), hint])
            raise SourceError(Problem("no pictures in this folder", root, hint=hint))
        return cls(
            root,
            Strings.pack(found.keys),
            np.array(found.labels, np.int64),
            np.array(found.sizes, np.int64),
            np.array(found.times, np.int64),
            tuple(names) if names else None,
            found.finish_notes(),
        )

    @property
    def fields(self) -> tuple[Field, ...]:
        """Image, label (where there are classes), key."""
        return (_IMAGE, _KEY) if self.classes is None else (_IMAGE, _LABEL, _KEY)

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, numbers: Numbers) -> FolderSource:
        """These files, in this order."""
        rows = {name: getattr(self, name)[numbers] for name in ("labels", "sizes", "times")}
        return replace(self, keys=self.keys.take(numbers), notes=[], **rows)

    def lengths(self, name: str) -> Numbers:
        """Bytes of each file, or of each key."""
        return self.sizes if name == "image" else self.keys.lengths()

    def read(self, number: int, without: str = "") -> tuple[Any, ...]:
        """A file's bytes, its label and key."""
        data = b"" if without == "image" else self._data(number)
        key = self.keys.encoded(number)
        return (data, key) if self.classes is None else (data, self.labels[number], key)

    def _data(self, number: int) -> bytes:
        path = f"{self.root}/{self.keys[number]}"
        try:
            with open(path, "rb", opener=_open_file) as f:
                data = f.read()
        except OSError as error:
            if error.errno in _OURS:
                raise
            if not os.path.isdir(self.root):
                hint = "Bring it back, then run the same command again."
                raise ShardstoreError(Problem("the source has gone", self.root, hint=hint)) from error
            raise SourceError(error.strerror or str(error)) from error
        if len(data) != self.sizes[number]:
            what = Problem("the file changed during the conversion", expected=f"{self.sizes[number]} bytes")
            raise SourceError(replace(what, got=f"{len(data)}"))
        return data

    def identity(self) -> str:
        """Of names, sizes and times of change."""
        total = hashlib.sha256(self.root.encode("utf-8", "surrogateescape"))
        for array in (self.keys.ends, self.keys.data, self.labels, self.sizes, self.times):
            total.update(array.tobytes())
        return total.hexdigest()

    def key(self, number: int) -> str:
        """The path below the root."""
        return self.keys[number]


def _open_file(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # what became a pipe is not waited for


class _Found:
    """What a scan has met so far."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.keys: list[str] = []
        self.labels: list[int] = []
        self.sizes: list[int] = []
        self.times: list[int] = []
        self._suffixes = images.suffixes()
        self._notes: dict[str, list[str]] = {}

    def listing(self, folder: str, prefix: str) -> tuple[list[str], list[_File]]:
        try:
            folders, files, others = _list(folder)
        except OSError as error:
            raise SourceError(Problem(f"the folder cannot be read: {error.strerror}", folder)) from error
        if others:
            self.note("pipes, sockets or devices were left out", [prefix + name for name in sorted(others)])
        return folders, files

    def note(self, what: str, names: Sequence[str]) -> None:
        self._notes.setdefault(what, []).extend(names)

    def finish_notes(self) -> list[str]:
        notes = []
        for what, names in self._notes.items():
            shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
            notes.append(f"{len(names)} {what}: {shown}")
        return notes

    def add_class(self, label: int, name: str) -> None:
        before = len(self.keys)
        for folder, files in sorted(_walk(f"{self.root}/{name}", self)):
            self.add(label, os.path.relpath(folder, self.root).replace(os.sep, "/") + "/", files)
        if len(self.keys) == before:
            self.note("class folders hold no picture", [name])

    def add(self, label: int, prefix: str, files: list[_File]) -> None:
        for name, size, changed in sorted(files):
            if self.is_picture(f"{self.root}/{prefix}{name}"):
                self.keys.append(prefix + name)
                self.labels.append(label)
                self.sizes.append(size)
                self.times.append(changed)
            else:
                self.note("files are no pictures and were left out", [prefix + name])

    def is_picture(self, path: str) -> bool:
        if os.path.splitext(path)[1].lower() in self._suffixes:
            return True
        try:
            with open(path, "rb") as f:
                return images.looks_like_picture(f.read(_SNIFF_BYTES))
        except OSError:
            return False


def _list(folder: str) -> tuple[list[str], list[_File], list[str]]:
    """Sub-folders, files (size and time 0 for what cannot be looked at: reading it will say why), and what is neither
    (pipes, sockets, devices)."""
    folders: list[str] = []
    files: list[_File] = []
    others: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _LITTER:
                continue
            try:
                info = entry.stat()
            except OSError:  # a link to nothing, or to itself
                files.append((entry.name, 0, 0))
                continue
            if stat.S_ISDIR(info.st_mode):
                folders.append(entry.name)
            elif stat.S_ISREG(info.st_mode):
                # On POSIX that of the file's description: no program sets it back, as copying ones do with mtime.
                changed = info.st_ctime_ns if os.name == "posix" else info.st_mtime_ns
                files.append((entry.name, info.st_size, changed))
            else:  # a pipe would be waited for without end
                others.append(entry.name)
    return folders, files, others


def _walk(folder: str, found: _Found, above: tuple[tuple[int, int], ...] = ()) -> Iterator[tuple[str, Any]]:
    """This folder and all below it, with their files."""
    info = os.stat(folder)
    if (info.st_dev, info.st_ino) in (*above, _identity(found.root)):
        found.note("links lead back to a folder that contains them and were not followed", [folder])
        return
    folders, files = found.listing(folder, os.path.relpath(folder, found.root).replace(os.sep, "/") + "/")
    yield folder, files
    for name in folders:
        yield from _walk(f"{folder}/{name}", found, (*above, (info.st_dev, info.st_ino)))


def _identity(path: str) -> tuple[int, int]:
    info = os.stat(path)
    return info.st_dev, info.st_ino
