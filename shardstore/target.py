"""The place being written: what may be replaced, the ``.partial`` folder, and the rename that makes a store exist."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from shardstore.errors import NoStoreError, OptionError, Problem
from shardstore.files import sync_folder
from shardstore.index import JSON_NAME, PARTIAL, locate
from shardstore.schema import HDF5_FOLDER, Container

_MARKER = "UNFINISHED.txt"
_MARKER_TEXT = "An unfinished shardstore conversion. The same command starts it again; this folder may be deleted.\n"
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
    """

    def __init__(self, path: str | Path, container: Container) -> None:
        if not os.fspath(path):
            raise OptionError("the target is an empty path")
        self.path = os.path.abspath(path)
        self._container = container
        self._partial = self.path + PARTIAL
        self.root = f"{self._partial}/store"
        self.main = f"{self._partial}/main/{os.path.basename(self.path)}"
        self.spool = f"{self._partial}/spool"

    def check(self, source: str | None, overwrite: bool) -> None:
        """Raise OptionError unless the target may be written; nothing is touched."""
        if source:
            self._check_source(f"{os.path.realpath(source)}/")
        if os.path.exists(self._partial) and not self._partial_is_ours():
            raise OptionError(Problem("this folder is in the way, and no conversion made it", self._partial))
        if not self._exists():
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
            return os.path.isdir(f"{self._partial}/replaced")  # an interrupted commit had set the old shards aside
        return True

    def _partial_is_ours(self) -> bool:
        return os.path.isfile(f"{self._partial}/{_MARKER}") or self._partial_is_empty()

    def _partial_is_empty(self) -> bool:
        return os.path.isdir(self._partial) and not os.listdir(self._partial)

    def begin(self) -> None:
        """Make the empty ``.partial`` folder."""
        self.discard()
        os.makedirs(self.root)
        os.makedirs(os.path.dirname(self.main))
        with open(f"{self._partial}/{_MARKER}", "w") as f:
            f.write(_MARKER_TEXT)

    def discard(self) -> None:
        """Remove the ``.partial`` folder, if it is one of ours."""
        if os.path.isdir(self._partial) and self._partial_is_ours():
            # The marker goes last: a removal that is interrupted must be able to go on.
            for entry in list(os.scandir(self._partial)):
                if entry.name != _MARKER:
                    shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
            shutil.rmtree(self._partial)

    def commit(self, fingerprint: str) -> None:
        """Make the store exist under its own name, replacing the one that is there."""
        for folder, _, _ in os.walk(self.root):
            sync_folder(folder)
        if self._container == "hdf5":
            self._commit_hdf5(fingerprint)
        else:
            self._set_aside(self.path)
            os.rename(self.root, self.path)
        sync_folder(os.path.dirname(self.path))
        self.discard()

    def _commit_hdf5(self, fingerprint: str) -> None:
        shards = self.path + HDF5_FOLDER
        if os.path.isdir(self.path):
            self._set_aside(self.path)
        os.makedirs(shards, exist_ok=True)
        self._set_aside(f"{shards}/{fingerprint}")
        os.rename(self.root, f"{shards}/{fingerprint}")
        sync_folder(shards)
        os.replace(self.main, self.path)  # the moment at which the old store ends and the new one begins
        for entry in list(os.scandir(shards)):
            if entry.name != fingerprint and os.path.isfile(f"{entry.path}/{JSON_NAME}"):
                shutil.rmtree(entry.path)

    def _set_aside(self, path: str) -> None:
        """Move what is replaced into the ``.partial`` folder, which is removed at the end."""
        if os.path.isdir(path) and not os.path.islink(path):
            os.rename(path, f"{self._partial}/replaced")
        elif os.path.lexists(path):
            os.unlink(path)
        if self._container != "hdf5" and os.path.isdir(path + HDF5_FOLDER):
            os.rename(path + HDF5_FOLDER, f"{self._partial}/replaced{HDF5_FOLDER}")
