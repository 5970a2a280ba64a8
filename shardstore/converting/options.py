"""The options of a conversion, checked by themselves; :mod:`shardstore.converting.plan` checks them by the source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

from shardstore.errors import OptionError
from shardstore.pictures.images import FITS, Fit
from shardstore.pictures.opening import MAX_PIXELS
from shardstore.store.codecs import CODECS, Codec
from shardstore.store.schema import CONTAINERS, Container

Store = Literal["auto", "encoded", "pixels"]
Check = Literal["full", "header"]
OnError = Literal["stop", "skip"]

# Shards: large enough for sequential disks and object stores, small enough to be many.
SHARD_BYTES = 128 << 20
# Chunks: at 1-2 MiB the cost of a request is small beside the bytes, and a few fit a core's cache.
CHUNK_BYTES = 2 << 20


@dataclass(frozen=True)
class ConvertOptions:
    """The options of a conversion; the command's options have the same names.

    Attributes:
        format: ``zarr``, ``hdf5`` or ``npy``; None goes by the target's ending (.zarr; .h5, .hdf5; else npy).
        store: ``encoded`` keeps the files' bytes, ``pixels`` stores decoded arrays; ``auto`` takes pixels where all
            pictures have one size and mode and take at most twice the bytes.
        size: (height, width), or one number for both, that pixels are brought to.
        fit: how: ``crop`` the centre, ``pad`` with 0, or ``stretch``.
        resize_short: store encoded pictures whose shorter side has at most so many pixels: larger ones are resized and
            encoded again, JPEGs as JPEG of quality 90, others as PNG; the rest are kept as they are.
        codec: ``none`` or ``zstd``, for pixels.
        shard_size: bytes that a shard should have, about.
        samples_per_shard: the exact number instead.
        chunk_size: the most bytes of a chunk of pixels, uncompressed.
        shuffle: store the samples in an order mixed by ``seed``.
        seed: any integer.
        check: ``full`` decodes every picture once, strictly; ``header`` only looks at its first bytes.
        max_pixels: a picture that has more, by its header, is a bad file and is not decoded.
        on_error: ``stop`` ends with a list of all bad files, ``skip`` leaves them out.
        max_errors: stop looking for more bad files after so many.
        workers: processes; None for one a core, 1 for the calling process alone.
        overwrite: replace a store that is there.
        dry_run: plan only.
    """

    format: Container | None = None
    store: Store = "auto"
    size: int | tuple[int, int] | None = None
    fit: Fit = "crop"
    resize_short: int | None = None
    codec: Codec = "none"
    shard_size: int = SHARD_BYTES
    samples_per_shard: int | None = None
    chunk_size: int = CHUNK_BYTES
    shuffle: bool = False
    seed: int = 0
    check: Check = "full"
    max_pixels: int = MAX_PIXELS
    on_error: OnError = "stop"
    max_errors: int = 1000
    workers: int | None = None
    overwrite: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Raise OptionError for values that are impossible by themselves or together."""
        choices: dict[str, Iterable[str]] = {
            "store": get_args(Store),
            "fit": FITS,
            "codec": CODECS,
            "check": get_args(Check),
            "on_error": get_args(OnError),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise OptionError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        if self.format not in (None, *CONTAINERS):
            raise OptionError(f"format must be one of {', '.join(CONTAINERS)}; got {self.format!r}")
        for name in (
            "shard_size",
            "chunk_size",
            "max_pixels",
            "max_errors",
            "samples_per_shard",
            "workers",
            "resize_short",
        ):
            value = getattr(self, name)
            optional = name in ("samples_per_shard", "workers", "resize_short") and value is None
            if not optional and (not isinstance(value, int) or value < 1):
                raise OptionError(f"{name} must be a whole number, at least 1; got {value!r}")
        if self.size is not None and self.store == "encoded":
            raise OptionError("size brings pictures to one size, and store='encoded' keeps files as they are: drop one")
        numbers = (1, 1) if self.size is None else self.height_width
        if not isinstance(numbers, tuple) or len(numbers) != 2 or not all(map(_is_positive, numbers)):
            raise OptionError(f"size must be one positive number, or height and width; got {self.size!r}")
        if self.codec != "none" and (self.store == "encoded" or self.resize_short):
            raise OptionError(f"codec={self.codec!r} is for pixels: encoded pictures are compressed already")
        if self.resize_short and (self.size is not None or self.store == "pixels"):
            other = "store='pixels'" if self.size is None else f"size={self.size!r}"
            raise OptionError(f"resize_short stores pictures encoded, and {other} stores pixels: drop one of the two")

    @property
    def height_width(self) -> tuple[int, int] | None:
        """``size`` as two numbers."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and value > 0


class Options(TypedDict, total=False):
    """The keyword arguments of :func:`shardstore.convert`: see :class:`ConvertOptions`."""

    format: Container | None
    store: Store
    size: int | tuple[int, int] | None
    fit: Fit
    resize_short: int | None
    codec: Codec
    shard_size: int
    samples_per_shard: int | None
    chunk_size: int
    shuffle: bool
    seed: int
    check: Check
    max_pixels: int
    on_error: OnError
    max_errors: int
    workers: int | None
    overwrite: bool
    dry_run: bool
