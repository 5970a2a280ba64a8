"""The options of reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shardstore.errors import OptionError
from shardstore.pictures.opening import MAX_PIXELS

Verify = Literal["always", "chunk", "never"]

WINDOW_BYTES = 64 << 20  # decoded chunks a reader keeps: some 50 chunks, or the rows of 3 million encoded samples


@dataclass(frozen=True)
class ReadOptions:
    """What few users need to set.

    Attributes:
        verify: which checksums are checked. ``chunk``: of encoded, ragged and compressed samples, and of uncompressed
            ones where whole chunks are read; ``always``: also where they are read singly, by reading the whole chunk
            for them; ``never``: none.
        window_bytes: bound, in bytes, of the decoded chunks that one reader keeps, and among which the samples of a
            compressed store are shuffled.
        max_pixels: a stored picture that has more, by its header, is an error and is not decoded.
        follow_links: open files of the store that are links leading out of it, as download caches make them.
        rank, world_size: which part of an epoch this process reads; None asks ``torch.distributed`` where that is
            initialised, else there is one rank.
        exact: for evaluation: repeat and drop nothing, so that ranks may make different numbers of steps.
        on_error: what a stream does about a sample that cannot be read: ``raise``, or ``skip``: leave it out, warn, and
            count it (``ShardDataset.skipped``).
        ring: whole batches go from workers to the trainer in memory that is used again (Linux); False: torch's way.
    """

    verify: Verify = "chunk"
    window_bytes: int = WINDOW_BYTES
    max_pixels: int = MAX_PIXELS
    follow_links: bool = False
    rank: int | None = None
    world_size: int | None = None
    exact: bool = False
    on_error: Literal["raise", "skip"] = "raise"
    ring: bool = True

    def __post_init__(self) -> None:
        """Raise OptionError for values that are impossible by themselves or together."""
        if (self.rank is None) != (self.world_size is None):
            raise OptionError("rank and world_size belong together: give both or neither")
        if self.rank is not None and self.world_size is not None and not 0 <= self.rank < self.world_size:
            raise OptionError(f"rank must be in 0 .. world_size - 1; got {self.rank} of {self.world_size}")
        if self.window_bytes < 1:
            raise OptionError(f"window_bytes must be at least 1; got {self.window_bytes}")
        if not isinstance(self.max_pixels, int) or self.max_pixels < 1:
            raise OptionError(f"max_pixels must be a whole number, at least 1; got {self.max_pixels!r}")
        if self.on_error not in ("raise", "skip"):
            raise OptionError(f"on_error must be 'raise' or 'skip'; got {self.on_error!r}")
        if self.verify not in get_args(Verify):
            raise OptionError(f"verify must be one of {', '.join(get_args(Verify))}; got {self.verify!r}")
