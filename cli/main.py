"""The entry point: the group of commands, and how errors become exit codes.

Exit codes: 0 all is well, 1 problems were found (bad files, a damaged store), 2 misuse or failure, 130 interrupted,
143 terminated.
"""

from __future__ import annotations

import io
import sys

import click

from shardstore import ShardstoreError, SourceError
from shardstore.cli.convert import convert
from shardstore.cli.export import export
from shardstore.cli.info import info
from shardstore.cli.output import Terminated, fail, show_problems
from shardstore.cli.validate import validate

PROBLEMS, FAILURE, INTERRUPTED, TERMINATED = 1, 2, 130, 143


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="shardstore")
def group() -> None:
    """Turn image folders into sharded Zarr, HDF5 or NumPy files, and check them."""


for command in (convert, export, info, validate):
    group.add_command(command)


def main() -> None:
    """Run the command line; never ends in a traceback for bad input."""
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal or pipe cannot show gets a substitute
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        sys.exit(group.main(standalone_mode=False) or 0)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(FAILURE)
    except SourceError as error:
        show_problems(error.problems)
        fail(str(error))
        sys.exit(PROBLEMS if error.problems else FAILURE)
    except (click.Abort, KeyboardInterrupt) as error:
        cause = error.__cause__ or error
        fail(" ".join(["interrupted.", *getattr(cause, "__notes__", ["To go on, run the same command again."])]))
        sys.exit(TERMINATED if isinstance(cause, Terminated) else INTERRUPTED)
    except MemoryError as error:
        fail(" ".join(["not enough memory; try fewer --workers.", *getattr(error, "__notes__", [])]))
        sys.exit(FAILURE)
    except (ShardstoreError, OSError) as error:
        fail(str(error))
        sys.exit(FAILURE)
