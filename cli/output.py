"""What commands print: a progress bar on a terminal, tables for people, JSON for programs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from shardstore import Problem
from shardstore.errors import printable


def fail(message: str) -> None:
    """One line on standard error."""
    click.echo(f"shardstore: {printable(message)}", err=True)


def show_json(value: Any) -> None:
    """A value on standard output."""
    click.echo(json.dumps(value, indent=1))


def show_problems(problems: Sequence[Problem], limit: int | None = None) -> None:
    """A list on standard error: where, what, and what to do."""
    for problem in problems[:limit]:
        if problem.key and not problem.path:
            click.echo(f"  {printable(problem.key)}: {dataclasses.replace(problem, key=None)}", err=True)
        else:
            click.echo(f"  {problem}", err=True)
    if limit is not None and len(problems) > limit:
        click.echo(f"  … and {len(problems) - limit} more (--json shows all)", err=True)


def show_table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> None:
    """Columns that line up, on standard output."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*head, box=None, show_header=bool(head), pad_edge=False, show_edge=False)
    for _ in range(0 if head else len(rows[0])):
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # Text: names may hold what looks like markup
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(table)


class Terminated(KeyboardInterrupt):
    """The system or a scheduler asks the process to end (SIGTERM)."""


@contextlib.contextmanager
def progress_bar(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar with images/s and the time left, on a terminal only; and an end for a run whose Ctrl-C got lost.

    Python drops a KeyboardInterrupt that strikes while a C extension frees an object (h5py does); each report of
    progress raises it again.
    """
    asked: list[KeyboardInterrupt] = []

    def note_and_raise(number: int, frame: object) -> None:
        asked.append(Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
        raise asked[0]

    def ignore_lost(lost: Any) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(lost)

    before = {number: signal.signal(number, note_and_raise) for number in (signal.SIGINT, signal.SIGTERM)}
    sys.unraisablehook = ignore_lost
    try:
        with _bar(what, quiet) as show:

            def report(done: int, total: int) -> None:
                if asked:
                    raise asked[0]
                show(done, total)

            yield report
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = sys.__unraisablehook__


@contextlib.contextmanager
def _bar(what: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Speed(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed or 0:,.0f} images/s")

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}/{task.total:,.0f}"))
    with Progress(*columns, Speed(), TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=1)
        yield lambda done, total: bar.update(task, completed=done, total=total)
