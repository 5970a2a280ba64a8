"""Headers of ``.npy`` files (NEP 1, version 1.0), written and recognised but never parsed: a damaged or hostile header
differs from the one that we would have written, and that is all there is to know."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

_PREFIX = 10  # magic, version, length of the rest


def header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The begin of the file of such an array in C order."""
    out = io.BytesIO()
    fields = {"descr": npy_format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy_format.write_array_header_1_0(out, fields)
    return out.getvalue()


def measure(path: str, dtype: np.dtype[Any], item_shape: tuple[int, ...] = ()) -> tuple[int, int]:
    """Where the values begin in a file of items of this dtype and shape, and how many items there are.

    Raises:
        ValueError: it is no such file.
        OSError: it cannot be read.
    """
    item = dtype.itemsize * int(np.prod(item_shape, dtype=np.int64))
    with open(path, "rb") as f:
        start = f.read(_PREFIX)
        length = _PREFIX + int.from_bytes(start[8:], "little")
        if not item:
            raise ValueError("items of no bytes")
        items, rest = divmod(os.fstat(f.fileno()).st_size - length, item)
        if rest or items < 0 or start + f.read(length - _PREFIX) != header(dtype, (items, *item_shape)):
            raise ValueError(f"its header is not that of the array of {dtype} that should be here")
    return length, items
