"""The place being written: what may be replaced, the ``.partial`` folder, and the rename that makes a store exist.

The ``.partial`` folder holds the store to be, records of what is finished (:mod:`shardstore.converting.ledger`), a
lock that one living process has, and a note with two lines: for people, and what the folder is for. From the moment
that the note says ``committed``, all is there and only names have to change: each step of that may be done again by a
later run. At the end the note gets another name and goes last, so that a run which is interrupted there is known to be
done.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardstore.converting.locking import Lock
from shardstore.errors import NoStoreError, OptionError, Problem
from shardstore.store.files import exchange, sync_folder, write_file
from shardstore.store.index import JSON_NAME, PARTIAL, locate
from shardstore.store.schema import HDF5_FOLDER, Container

_NOTE, _DONE = "UNFINISHED.txt", "FINISHED.txt"
_TEXT = "An unfinished shardstore conversion. The same command goes on with it; this folder may be deleted.\n"
_COMMITTED_TEXT = (
    "A finished shardstore store that has not got its name yet: run the same command again. Delete nothing here: "
    "a store that is being replaced may lie here too.\n"
)
_LOCK = "LOCK"
_LOCK_SECONDS = 2  # a killed process's workers may take a moment to end
_SUFFIXES: dict[str, Container] = {".zarr": "zarr", ".h5": "hdf5", ".hdf5": "hdf5"}


def container_of(target: str, chosen: Container | None) -> Container:
    """The container that an option or the target's ending asks for."""
    return chosen or _SUFFIXES.get(os.path.splitext(target)[1].lower(), "npy")


class Target:
    """A store to be.

    Attributes:
        path: its absolute path.
        root: the folder to fill, inside the ``.partial`` one.
        main: where the file of an HDF5 store is to be written.
        spool: a folder for what is needed only until the store exists.
        ledger: a folder for records of what is finished.
    """

    def __init__(self, path: str | Path, container: Container) -> None:
        if not os.fspath(path):
            raise OptionError("the target is an empty path")
        self.path = os.path.abspath(path)
        self._container = container
        self.partial = self.path + PARTIAL
        self.root = f"{self.partial}/store"
        self.main = f"{self.partial}/main/{os.path.basename(self.path)}"
        self.spool = f"{self.partial}/spool"
        self.ledger = f"{self.partial}/ledger"
        self._lock = Lock(f"{self.partial}/{_LOCK}")
        self.is_ours = False  # whether this process has the folder
        self._overwrite = False

    def check(self, source: str | None, overwrite: bool) -> None:
        """Raise OptionError unless the target may be written; nothing is touched."""
        if source:
            self._check_source(f"{os.path.realpath(source)}/")
        if os.path.exists(self.partial) and not self._partial_is_ours():
            raise OptionError(Problem("this folder is in the way, and no conversion made it", self.partial))
        if not self._exists() or self._placed(self._note()):
            return
        if not overwrite:
            with suppress(OSError):
                os.rmdir(self.partial)  # all that is left of a run that ended with its last step; or not empty
            raise OptionError(Problem("already exists", self.path, hint="To replace it: --overwrite (overwrite=True)."))
        if not self._replaceable():
            hint = "--overwrite replaces stores and empty folders only."
            raise OptionError(Problem("is no shardstore store and will not be replaced", self.path, hint=hint))

    def _check_source(self, source: str) -> None:
        here = f"{os.path.realpath(self.path)}/"
        if here.startswith(source) or source.startswith(here):
            what = "the target is the source, or one lies inside the other"
            raise OptionError(Problem(what, self.path, hint="Choose another target."))

    def _exists(self) -> bool:
        if os.path.lexists(self.path):
            return True
        # Without its file, a folder of shards is somebody's, or what an interrupted commit left.
        return (
            self._container == "hdf5" and os.path.lexists(self.path + HDF5_FOLDER) and "committed" not in self._note()
        )

    def _replaceable(self) -> bool:
        if os.path.isdir(self.path) and not os.listdir(self.path):
            return True
        try:
            locate(self.path)
        except NoStoreError:
            return False
        return True

    def _partial_is_ours(self) -> bool:
        if self._note():
            return True
        # What is there before the first note is, and after the last.
        return os.path.isdir(self.partial) and set(os.listdir(self.partial)) <= {_LOCK, f"{_NOTE}.tmp"}

    def _note(self) -> dict[str, Any]:
        for name in (_NOTE, _DONE):
            try:
                with open(f"{self.partial}/{name}", encoding="utf-8") as f:
                    text, note = f.readline(), json.loads(f.readline())
            except (OSError, ValueError):
                continue
            if text in (_TEXT, _COMMITTED_TEXT) and isinstance(note, dict) and note:
                return note
        return {}

    def _write_note(self, note: Mapping[str, Any]) -> None:
        text = _COMMITTED_TEXT if "committed" in note else _TEXT
        write_file(f"{self.partial}/{_NOTE}", f"{text}{json.dumps(note)}\n".encode())
        sync_folder(self.partial)

    # -- the work of one process --------------------------------------------------------------------------------------

    def begin(self, plan: str, source: str, overwrite: bool) -> bool:
        """Take the ``.partial`` folder: a new one, or what an interrupted run of the same plan has left.

        Args:
            plan: a checksum of what is to be made.
            source: a checksum of what it is made from; empty where that cannot be known.
            overwrite: as for :meth:`check`.

        Returns:
            Whether all is done: a run of this plan had ended but for the renaming, which was finished now.

        Raises:
            OptionError: another process is at work here, or :meth:`check` forbids it by now.
        """
        self._overwrite = overwrite
        self._take()
        self.check(None, overwrite)
        note = self._note()
        if "committed" in note and not self._placed(note) and not self._can_place(note):
            self._empty()  # what was made has been removed since
            note = {}
        if "committed" in note:
            self._finish_commit(note)
            self._remove()
            if source and (note["plan"], note["source"]) == (plan, source):
                return True
            self._take()
            self.check(None, overwrite)
        if note.get("plan") != plan:
            self._empty()
        self._write_note({"plan": plan, "source": source})
        for folder in (self.root, os.path.dirname(self.main), self.spool, self.ledger):
            os.makedirs(folder, exist_ok=True)
        return False

    def _take(self) -> None:
        while not self.is_ours:
            os.makedirs(self.partial, exist_ok=True)
            with suppress(FileNotFoundError):  # the folder went with the conversion that had it
                if not self._lock.take(_LOCK_SECONDS):
                    what = Problem(
                        "another conversion is writing this store", self.path, hint="Wait for it, or end it."
                    )
                    raise OptionError(what)
                self.is_ours = True

    def release(self) -> None:
        """Leave the ``.partial`` folder as it is, for a later run."""
        self._lock.release()
        self.is_ours = False

    def give_up(self, keep: bool) -> bool:
        """Remove the ``.partial`` folder that this process has, or leave it for a later run.

        Args:
            keep: leave it. That is done anyway where only names have to change: a replaced store may lie there.

        Returns:
            Whether it was left.
        """
        if not self.is_ours:
            return False
        if keep or "committed" in self._note():
            self.release()
            return True
        self._remove()
        return False

    def _empty(self) -> None:
        for entry in list(os.scandir(self.partial)):
            if entry.name not in (_NOTE, _LOCK):
                shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)

    def _remove(self) -> None:
        """Remove the ``.partial`` folder, so that a later run can go on with that too."""
        self._empty()
        with suppress(FileNotFoundError):
            os.replace(f"{self.partial}/{_NOTE}", f"{self.partial}/{_DONE}")
        self._lock.remove()
        self.is_ours = False
        with suppress(OSError):  # from here on another process may have taken the folder, and then it stays
            os.unlink(f"{self.partial}/{_DONE}")
        with suppress(OSError):
            os.rmdir(self.partial)

    def keep_only(self, paths: Iterable[str]) -> None:
        """Remove all below ``root`` but these files: an earlier plan's, and half-written ones."""
        wanted = set(paths)
        for folder, _, files in os.walk(self.root, topdown=False):
            for name in files:
                path = f"{folder}/{name}"
                if os.path.relpath(path, self.root).replace(os.sep, "/") not in wanted:
                    os.unlink(path)
            if folder != self.root:
                with suppress(OSError):  # not empty
                    os.rmdir(folder)

    # -- the end ------------------------------------------------------------------------------------------------------

    def commit(self, fingerprint: str) -> None:
        """Make the store exist under its own name, replacing the one that is there."""
        self.check(None, self._overwrite)  # much may have happened in the meantime
        for folder, _, _ in os.walk(self.partial):
            sync_folder(folder)
        # A folder beside a file that is a store holds its shards; beside none, it is somebody's.
        shards = self._container == "hdf5" or (os.path.isfile(self.path) and os.path.isdir(self.path + HDF5_FOLDER))
        note = {**self._note(), "container": self._container, "shards": shards}
        note |= {"committed": fingerprint, "folder": _number(self.root)}
        self._write_note(note)
        self._finish_commit(note)
        self._remove()

    def _placed(self, note: Mapping[str, Any]) -> bool:
        """Whether a store that is committed has its name already."""
        if "committed" not in note:
            return False
        if note["container"] == "hdf5":  # its file moves last
            return os.path.isfile(self.path) and not os.path.isfile(self.main)
        return bool(_number(self.path) == note["folder"])

    def _can_place(self, note: Mapping[str, Any]) -> bool:
        """Whether all parts of a store that is committed are there."""
        if note["container"] == "hdf5":
            return os.path.isfile(self.main) and note["folder"] in (_number(self.root), _number(self._home(note)))
        return bool(_number(self.root) == note["folder"])

    def _home(self, note: Mapping[str, Any]) -> str:
        """Where the folder of a committed store belongs."""
        return f"{self.path}{HDF5_FOLDER}/{note['committed']}" if note["container"] == "hdf5" else self.path

    def _finish_commit(self, note: Mapping[str, Any]) -> None:
        if not self._placed(note):
            if note["container"] == "hdf5":
                self._place_hdf5(note)
            else:
                self._give_name(self.root, self.path)
            sync_folder(os.path.dirname(self.path))
            sync_folder(self.partial)
        if note["shards"]:
            self._remove_shards(keep=os.path.basename(self._home(note)) if note["container"] == "hdf5" else "")

    def _place_hdf5(self, note: Mapping[str, Any]) -> None:
        home = self._home(note)
        os.makedirs(os.path.dirname(home), exist_ok=True)
        if _number(home) != note["folder"]:
            self._give_name(self.root, home)
        for folder in (os.path.dirname(home), os.path.dirname(self.path)):
            sync_folder(folder)
        if os.path.isdir(self.path) and not os.path.islink(self.path):
            self._give_name(self.main, self.path)
        else:
            os.replace(self.main, self.path)  # the moment at which the old store ends and the new one begins

    def _give_name(self, new: str, path: str) -> None:
        """Rename; what has the name already goes into the ``.partial`` folder, in the same moment if that can be."""
        if os.path.lexists(path):
            if exchange(new, path):
                return
            os.rename(path, self._aside())
        os.rename(new, path)

    def _aside(self) -> str:
        """A free name in the ``.partial`` folder, which is removed at the end."""
        number = 0
        while os.path.lexists(path := f"{self.partial}/replaced{number}"):
            number += 1
        return path

    def _remove_shards(self, keep: str) -> None:
        """Of what lies beside an HDF5 file, remove what was a store's, in one moment each."""
        shards = self.path + HDF5_FOLDER
        for entry in list(os.scandir(shards)) if os.path.isdir(shards) else []:
            if entry.name != keep and os.path.isfile(f"{entry.path}/{JSON_NAME}"):
                os.rename(entry.path, self._aside())
        if not keep:
            with suppress(OSError):  # gone, or somebody's files are in it
                os.rmdir(shards)


def _number(path: str) -> int | None:
    """The number by which the file system knows a folder, whatever its name."""
    return os.stat(path).st_ino if os.path.isdir(path) else None
