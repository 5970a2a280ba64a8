"""``shardstore validate``."""

from __future__ import annotations

import sys
from typing import Any

import click

import shardstore
from shardstore.checking.validation import LEVELS, Level
from shardstore.cli.output import progress_bar, show_json, show_problems
from shardstore.pictures.opening import MAX_PIXELS

_PROBLEMS_FOUND = 1
_SHOWN = 50


@click.command(short_help="Find what is broken in a store or an image folder.")
@click.argument("path", type=click.Path())
@click.option("--level", type=click.Choice(LEVELS), help="Default: checksum; source where --source is given.")
@click.option("--source", type=click.Path(), help="The folder the store was made from, to compare with.")
@click.option(
    "--max-pixels",
    type=click.IntRange(1),
    default=MAX_PIXELS,
    show_default=True,
    help="A picture that has more is a problem, and not decoded.",
)
@click.option("--workers", type=click.IntRange(1), help="Processes; default: one a core.")
@click.option("--json", "as_json", is_flag=True, help="Print all problems as JSON.")
def validate(path: str, level: Level | None, source: str | None, as_json: bool, **options: Any) -> None:
    """Check the store PATH, or say which files of the image folder PATH would not convert.

    Levels, each with those before: structure (files, sizes, ranges), checksum (every byte), decode (every picture),
    source (compare with the folder). Exit code 0: no problems, 1: problems found, 2: could not check.
    """
    depth: Level = level or ("source" if source else "checksum")
    with progress_bar("checking", quiet=as_json) as progress:
        problems = shardstore.validate(path, level=depth, source=source, progress=progress, **options)
    if as_json:
        show_json([problem.to_dict() for problem in problems])
    elif problems:
        show_problems(problems, _SHOWN)
        click.echo(f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in {path}", err=True)
    else:
        click.echo(f"{path}: no problems (level {depth})")
    if problems:
        sys.exit(_PROBLEMS_FOUND)
