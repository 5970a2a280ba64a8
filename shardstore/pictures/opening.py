"""Opening a picture with Pillow, which reads its header alone: quietly, whatever the file, and within a bound of pixels
that is checked before memory is taken for them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardstore.errors import ImageError, Problem

if TYPE_CHECKING:
    from PIL import Image as PilImage

# Pixels that a picture may have: Pillow's own bound, 537 MB as RGB. A file of some kB may promise billions.
MAX_PIXELS = 178_956_970

_LFS = b"version https://git-lfs.github.com/spec"
_quiet = threading.Lock()
_lifting = threading.Lock()
_lifted: list[int] = []  # what is allowed now beyond Pillow's bound, and before it that bound


def _after_fork() -> None:
    global _quiet, _lifting
    _quiet, _lifting = threading.Lock(), threading.Lock()  # another thread may have held them
    if _lifted:
        from PIL import Image

        Image.MAX_IMAGE_PIXELS = _lifted[0]
        _lifted.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def opened(data: bytes, max_pixels: int) -> PilImage.Image:
    """The picture, its pixels not yet decoded.

    Raises:
        ImageError: it is none, or has more than ``max_pixels``.
    """
    from PIL import Image

    if not data:
        raise ImageError("the file is empty")
    if data.startswith(_LFS):
        raise ImageError("a Git LFS pointer, not the picture itself (fetch it with `git lfs pull`)")
    try:
        with _quiet, warnings.catch_warnings(), allowing(max_pixels // 2):  # it refuses twice its bound
            warnings.simplefilter("ignore")  # broken metadata beside good pixels is no news to a loader
            image = Image.open(io.BytesIO(data))
    except Image.DecompressionBombError as error:
        pixels = re.search(r"\d+", str(error))
        raise _too_large(f"{int(pixels[0]):,}" if pixels else str(error), max_pixels) from None
    except MemoryError:
        raise  # no fault of the picture
    except Exception as error:
        raise ImageError(reason(error)) from error
    check_size(image.height, image.width, max_pixels)
    return image


def check_size(height: int, width: int, max_pixels: int) -> None:
    """Raise ImageError for more than ``max_pixels``."""
    if height * width > max_pixels:
        raise _too_large(f"{width:,} x {height:,}", max_pixels)


def _too_large(got: str, max_pixels: int) -> ImageError:
    hint = "If it is to be trusted, allow more: --max-pixels, max_pixels=, or ReadOptions(max_pixels=) in training."
    return ImageError(Problem("too many pixels", expected=f"at most {max_pixels:,}", got=got, hint=hint))


@contextlib.contextmanager
def allowing(pixels: int) -> Iterator[None]:
    """Let Pillow read a picture of so many pixels, without a warning: its own bound is one for the whole process."""
    from PIL import Image

    with _lifting:
        bound = _lifted[0] if _lifted else Image.MAX_IMAGE_PIXELS
        lift = bound is not None and pixels > bound
        if bound is not None and lift:
            _lifted.extend([pixels] if _lifted else [bound, pixels])
            Image.MAX_IMAGE_PIXELS = max(_lifted)
    try:
        yield
    finally:
        if lift:
            with _lifting:
                _lifted.remove(pixels)
                Image.MAX_IMAGE_PIXELS = max(_lifted)
                if len(_lifted) == 1:
                    _lifted.clear()


def reason(error: Exception) -> str:
    """Why Pillow will not have a picture, for people."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "not a picture in any format that Pillow knows"
    return str(error) or type(error).__name__
