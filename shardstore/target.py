"""The place being written: what may be replaced, the ``.partial`` folder, and the rename that makes a store exist.

The ``.partial`` folder holds the store to be, records of what is finished (:mod:`shardstore.ledger`), a lock that one
living process has, and a note with two lines: for people, and what the folder is for. From the moment that the note
says ``committed``, all is there and only names have to change: each step of that may be done again by a later run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import filelock

from shardstore.errors import NoStoreError, OptionError, Problem
from shardstore.files import exchange, sync_folder, write_file
from shardstore.index import JSON_NAME, PARTIAL, locate
from shardstore.schema import HDF5_FOLDER, Container

_NOTE = "UNFINISHED.txt"
_NOTE_TEXT = "An unfinished shardstore conversion. The same command goes on with it; this folder may be deleted.\n"
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
        self._lock: filelock.BaseFileLock | None = None

    def check(self, source: str | None, overwrite: bool) -> None:
        """Raise OptionError unless the target may be written; nothing is touched."""
        if source:
            self._check_source(f"{os.path.realpath(source)}/")
        if os.path.exists(self.partial) and not self._partial_is_ours():
            raise OptionError(Problem("this folder is in the way, and no conversion made it", self.partial))
        if not self._exists() or self._note().get("committed"):  # see begin
            return
        if not overwrite:
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
        return self._container == "hdf5" and os.path.lexists(self.path + HDF5_FOLDER) and not self._partial_is_ours()

    def _replaceable(self) -> bool:
        if os.path.isdir(self.path) and not os.listdir(self.path):
            return True
        try:
            locate(self.path)
        except NoStoreError:
            return False
        return True

    def _partial_is_ours(self) -> bool:
        if os.path.isfile(f"{self.partial}/{_NOTE}"):
            return True
        return os.path.isdir(self.partial) and set(os.listdir(self.partial)) <= {_LOCK}

    def _note(self) -> dict[str, Any]:
        try:
            with open(f"{self.partial}/{_NOTE}", encoding="utf-8") as f:
                note = json.loads(f.readlines()[1])
        except (OSError, ValueError, IndexError):
            return {}
        return note if isinstance(note, dict) else {}

    def _write_note(self, **note: str) -> None:
        write_file(f"{self.partial}/{_NOTE}", f"{_NOTE_TEXT}{json.dumps(note)}\n".encode())
        sync_folder(self.partial)

    # -- the work of one process --------------------------------------------------------------------------------------

    def begin(self, plan: str, source: str, overwrite: bool) -> bool:
        """Take the ``.partial`` folder: a new one, or what an interrupted run of the same plan has left.

        Args:
            plan: a checksum of how the store is to be made; what another one has left is removed.
            source: a checksum of what it is made of.
            overwrite: as for :meth:`check`.

        Returns:
            Whether all is done: a run of this plan and source had ended but for the renaming, which was finished now.

        Raises:
            OptionError: another process is at work here, or :meth:`check` forbids it by now.
        """
        self._take_lock()
        note = self._note()
        if note.get("committed"):
            self._finish_commit()
            self._remove_partial()
            if (note.get("plan"), note.get("source")) == (plan, source):
                return True
            self._take_lock()
        self.check(None, overwrite)
        if note.get("plan") != plan:
            self._empty()
        self._write_note(plan=plan, source=source)
        for folder in (self.root, os.path.dirname(self.main), self.spool, self.ledger):
            os.makedirs(folder, exist_ok=True)
        return False

    @property
    def is_ours(self) -> bool:
        """Whether this process has the ``.partial`` folder."""
        return self._lock is not None

    def _take_lock(self) -> None:
        while self._lock is None:
            os.makedirs(self.partial, exist_ok=True)
            lock = filelock.FileLock(f"{self.partial}/{_LOCK}")
            try:
                lock.acquire(timeout=_LOCK_SECONDS)
            except filelock.Timeout:
                hint = "Wait for it, or end it."
                raise OptionError(Problem("another conversion is writing this store", self.path, hint=hint)) from None
            except FileNotFoundError:  # the folder went with the conversion that had it
                continue
            if os.path.exists(f"{self.partial}/{_LOCK}"):
                self._lock = lock
            else:
                lock.release()

    def release(self) -> None:
        """Leave the ``.partial`` folder as it is, for a later run."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def discard(self) -> None:
        """Remove the ``.partial`` folder that this process has."""
        if self.is_ours:
            self._remove_partial()

    def _empty(self) -> None:
        for entry in list(os.scandir(self.partial)):
            if entry.name not in (_NOTE, _LOCK):
                shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)

    def _remove_partial(self) -> None:
        self._empty()  # the note goes after all else: a removal that is interrupted must be able to go on
        if os.path.exists(f"{self.partial}/{_NOTE}"):
            os.unlink(f"{self.partial}/{_NOTE}")
        self.release()
        shutil.rmtree(self.partial, ignore_errors=True)  # another process may have taken it by now

    def keep_only(self, paths: Iterable[str]) -> None:
        """Remove all files below ``root`` but these: an earlier plan's, and half-written ones."""
        wanted = set(paths)
        for folder, _, files in os.walk(self.root):
            for name in files:
                path = f"{folder}/{name}"
                if os.path.relpath(path, self.root).replace(os.sep, "/") not in wanted:
                    os.unlink(path)

    # -- the end ------------------------------------------------------------------------------------------------------

    def commit(self, fingerprint: str) -> None:
        """Make the store exist under its own name, replacing the one that is there."""
        for folder, _, _ in os.walk(self.partial):
            sync_folder(folder)
        self._write_note(**self._note(), committed=fingerprint, folder=str(os.stat(self.root).st_ino))
        self._finish_commit()
        self._remove_partial()

    def _finish_commit(self) -> None:
        note = self._note()
        if self._container == "hdf5":
            self._finish_hdf5(note["committed"])
        elif not os.path.isdir(self.path) or str(os.stat(self.path).st_ino) != note["folder"]:  # not yet exchanged
            if not os.path.isdir(self.path) or not exchange(self.root, self.path):
                self._set_aside(self.path)
                os.rename(self.root, self.path)
            if os.path.isdir(self.path + HDF5_FOLDER):  # of an HDF5 store that had this name
                os.rename(self.path + HDF5_FOLDER, f"{self.partial}/replaced{HDF5_FOLDER}")
        sync_folder(os.path.dirname(self.path))

    def _finish_hdf5(self, fingerprint: str) -> None:
        shards = self.path + HDF5_FOLDER
        if os.path.isdir(self.path):
            self._set_aside(self.path)
        os.makedirs(shards, exist_ok=True)
        if os.path.isdir(self.root):
            self._set_aside(f"{shards}/{fingerprint}")
            os.rename(self.root, f"{shards}/{fingerprint}")
            sync_folder(shards)
        if os.path.exists(self.main):
            os.replace(self.main, self.path)  # the moment at which the old store ends and the new one begins
        for entry in list(os.scandir(shards)):
            if entry.name != fingerprint and os.path.isfile(f"{entry.path}/{JSON_NAME}"):
                shutil.rmtree(entry.path)

    def _set_aside(self, path: str) -> None:
        """Move what is replaced into the ``.partial`` folder, which is removed at the end."""
        if os.path.isdir(path) and not os.path.islink(path):
            os.rename(path, f"{self.partial}/replaced")
        elif os.path.lexists(path):
            os.unlink(path)
