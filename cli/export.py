"""``shardstore export``."""

from __future__ import annotations

import click

import shardstore
from shardstore.cli.output import progress_bar


@click.command(short_help="Write a store's pictures back into a folder.")
@click.argument("store", type=click.Path())
@click.argument("folder", type=click.Path())
def export(store: str, folder: str) -> None:
    """Write the pictures of STORE as files into FOLDER (new or empty), named as they were.

    Encoded stores give their files byte for byte; pixels become PNG files (TIFF for 32 bits).
    """
    with progress_bar("exporting") as progress:
        count = shardstore.export(store, folder, progress=progress)
    click.echo(f"{folder}: {count:,} files")
