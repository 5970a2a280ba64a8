"""Compression of chunks: a name to a pair of functions. Only codecs whose bytes are the same inside Zarr and HDF5.

``none`` stores a chunk as it is. ``zstd`` is one Zstandard frame (RFC 8878) with the content size in its header and
no checksum of its own (chunks have a CRC-32C in the index): Zarr's ``zstd`` codec and HDF5's registered filter 32015
both read it.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

Codec = Literal["none", "zstd"]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
CODECS: tuple[Codec, ...] = get_args(Codec)

ZSTD_LEVEL = 3  # zstd's own default


def encode(codec: Codec, data: bytes) -> bytes:
    """The bytes to store for ``data``."""
    if codec == "none":
        return data
    import numcodecs.zstd

    return bytes(numcodecs.zstd.compress(data, ZSTD_LEVEL, checksum=False))


def decode(codec: Codec, stored: Bytes, out: Bytes) -> None:
    """Decompress ``stored`` into ``out``, which has exactly the decoded size.

    Raises:
        ValueError: the frame is broken, or holds another number of bytes.
    """
    if codec == "none":
        out[:] = stored
        return
    import numcodecs.zstd

    check_size(codec, stored, out.nbytes)  # zstd would leave the rest of a larger buffer as it was
    try:
        numcodecs.zstd.decompress(stored, out)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def check_size(codec: Codec, stored: Bytes, nbytes: int) -> None:
    """Raise ValueError unless ``stored`` says that it decompresses to ``nbytes``; before memory is taken for them."""
    size = _content_size(stored[:18].tobytes()) if codec != "none" else len(stored)
    if size != nbytes:
        raise ValueError(f"the zstd frame says {size} bytes, the index {nbytes}")


def _content_size(frame: bytes) -> int | None:
    """Frame_Content_Size of a Zstandard frame header (RFC 8878, 3.1.1.1), or None."""
    if len(frame) < 5 or frame[:4] != b"\x28\xb5\x2f\xfd":
        return None
    descriptor = frame[4]
    flag, single = descriptor >> 6, descriptor >> 5 & 1
    width = (single, 2, 4, 8)[flag]
    start = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3]
    size = int.from_bytes(frame[start : start + width], "little")
    return (size + 256 if flag == 1 else size) if width else None
