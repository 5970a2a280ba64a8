"""``shardstore convert``."""

from __future__ import annotations

import re
from typing import Any

import click

import shardstore
from shardstore.cli.output import progress_bar, show_json
from shardstore.converting.options import CHUNK_BYTES, SHARD_BYTES
from shardstore.pictures.opening import MAX_PIXELS

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


class Bytes(click.ParamType[int]):
    """A number of bytes: 1000000, 64MB, 128MiB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse it."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", str(value).strip().lower())
        if not found or found[2] not in _UNITS:
            self.fail(f"{value!r} is no number of bytes; write 1000000, 64MB or 128MiB", param, ctx)
        return int(float(found[1]) * _UNITS[found[2]])


class Size(click.ParamType["tuple[int, int]"]):
    """One number, or height and width: 224 or 224,160."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Parse it."""
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d+)(?:,(\d+))?", str(value))
        if not found:
            self.fail(f"{value!r} is no size; write 224, or height,width as in 224,160", param, ctx)
        return int(found[1]), int(found[2] or found[1])


@click.command(short_help="Make a store from a folder of images, or from another store.")
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@click.option("--format", type=click.Choice(["zarr", "hdf5", "npy"]), help="Default: by TARGET's ending, else npy.")
@click.option(
    "--store",
    type=click.Choice(["auto", "encoded", "pixels"]),
    default="auto",
    show_default=True,
    help="Keep the files' bytes, or decode; auto: pixels where all have one size and stay small.",
)
@click.option("--size", type=Size(), metavar="N|H,W", help="Bring pixels to this size.")
@click.option(
    "--fit",
    type=click.Choice(["crop", "pad", "stretch"]),
    default="crop",
    show_default=True,
    help="How --size treats another aspect ratio.",
)
@click.option(
    "--resize-short",
    type=click.IntRange(1),
    metavar="N",
    help="Keep pictures encoded, larger ones resized to a shorter side of N.",
)
@click.option(
    "--codec",
    type=click.Choice(["none", "zstd"]),
    default="none",
    show_default=True,
    help="Compression of pixels (zarr, hdf5): for masks, drawings, medical images.",
)
@click.option("--shard-size", type=Bytes(), default=SHARD_BYTES, show_default="128MiB", help="Bytes of a shard, about.")
@click.option("--samples-per-shard", type=click.IntRange(1), help="The exact number instead.")
@click.option("--chunk-size", type=Bytes(), default=CHUNK_BYTES, show_default="2MiB", help="Most bytes of a chunk.")
@click.option("--shuffle", is_flag=True, help="Store the samples in a mixed order.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of --shuffle.")
@click.option(
    "--check",
    type=click.Choice(["full", "header"]),
    default="full",
    show_default=True,
    help="Decode every picture once, or look at its header only.",
)
@click.option(
    "--max-pixels",
    type=click.IntRange(1),
    default=MAX_PIXELS,
    show_default=True,
    help="A picture that has more is a bad file, and not decoded.",
)
@click.option(
    "--on-error",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="End with a list of all bad files, or leave them out.",
)
@click.option(
    "--max-errors", type=click.IntRange(1), default=1000, show_default=True, help="List no more than so many."
)
@click.option("--workers", type=click.IntRange(1), help="Processes; default: one a core.")
@click.option("--overwrite", is_flag=True, help="Replace a store that is there.")
@click.option("--dry-run", is_flag=True, help="Show the plan with sizes; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def convert(source: str, target: str, as_json: bool, **options: Any) -> None:
    """Make the store TARGET from SOURCE: a folder with one sub-folder a class, or another store.

    TARGET's ending chooses the format: .zarr, .h5, or anything else for NumPy files. Nothing is there until all is.
    """
    try:
        with progress_bar("converting", quiet=as_json) as progress:
            summary = shardstore.convert(source, target, progress=progress, **options)
    except shardstore.SourceError as error:
        if as_json:
            show_json({"error": error.problem.to_dict(), "problems": [p.to_dict() for p in error.problems]})
        raise
    if as_json:
        show_json(summary.to_dict())
    else:
        click.echo(str(summary))
