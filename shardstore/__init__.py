"""Image folders into sharded Zarr, HDF5 or NumPy files, streamed into PyTorch with memory that stays flat.

``convert`` makes a store, ``open`` reads it by number or key, ``ShardDataset`` streams it through a DataLoader,
``validate`` finds what is broken. Heavy packages load on use: importing this one loads none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardstore.checking.validation import validate
    from shardstore.converting.conversion import convert
    from shardstore.errors import (
        DamagedStoreError,
        ImageError,
        NoStoreError,
        OptionError,
        Problem,
        ShardstoreError,
        SourceError,
        StackError,
    )
    from shardstore.exporting import export
    from shardstore.loading.dataset import Dataset, open
    from shardstore.loading.loader import ShardDataset
    from shardstore.loading.position import change_workers
    from shardstore.options import ReadOptions

__all__ = [
    "DamagedStoreError",
    "Dataset",
    "ImageError",
    "NoStoreError",
    "OptionError",
    "Problem",
    "ReadOptions",
    "ShardDataset",
    "ShardstoreError",
    "SourceError",
    "StackError",
    "change_workers",
    "convert",
    "export",
    "open",
    "validate",
]

_HOMES = {
    "Dataset": "loading.dataset",
    "ReadOptions": "options",
    "ShardDataset": "loading.loader",
    "change_workers": "loading.position",
    "convert": "converting.conversion",
    "export": "exporting",
    "open": "loading.dataset",
    "validate": "checking.validation",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shardstore' has no attribute {name!r}")
    return getattr(importlib.import_module(f"shardstore.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
