"""What the scripts of this folder share: runs in turn, each in a process of its own; medians, ratios, a Markdown table.

A script's ``main`` calls ``in_turn``, which starts the script again with ``--run ROW`` for each row of its table; that
process does one run and ends with ``result(...)``, one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

Result = dict[str, float]
Results = dict[str, list[Result]]

WORKERS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
STARTED = "SHARDSTORE_BENCH_STARTED"  # in a run's environment: when it was started
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}  # no run asks a server


def parser_of(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """The arguments that all scripts have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="a folder of class folders")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/shardstore-bench"), help="what is made stays there")
    parser.add_argument("--only", nargs="+", metavar="ROW")
    parser.add_argument("--base", nargs="+", metavar="ROW", help="rows that the ratios are to")
    parser.add_argument("--python", nargs="+", default=[], metavar="ROW[,ROW]=PATH", help="a row's own interpreter")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--warm-up", action="store_true", help=argparse.SUPPRESS)
    return parser


def in_turn(rows: Iterable[str], given: argparse.Namespace, before: Callable[[], None] = lambda: None) -> Results:
    """Every row once a round, each in a new process; a round before these makes the files and does not count.

    So a machine whose speed drifts treats all rows alike, and the runs of one round can be compared in pairs. A row
    that fails, mostly because something is not installed, is left out. A result gets ``seconds``, the whole process.
    """
    results: Results = {row: [] for row in given.only or rows}
    others: dict[str, str] = {}
    for names, _, path in (pair.partition("=") for pair in given.python):
        others |= dict.fromkeys([names] if names in results else names.split(","), path)
    for turn in range(given.rounds + 1):
        for row in list(results):
            before()
            done = _run(others.get(row, sys.executable), row, warm_up=turn == 0)
            if isinstance(done, str):
                print(f"{row} is left out: {done}", file=sys.stderr)
                del results[row]
            elif turn:
                results[row].append(done)
    return results


def _run(python: str, row: str, warm_up: bool) -> Result | str:
    """The result of one run, or what went wrong."""
    command = [python, *sys.argv, "--run", row, *(["--warm-up"] if warm_up else [])]
    started = time.time()
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **OFFLINE, STARTED: repr(started)}
    )
    seconds = time.time() - started
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or ["it ended without a result"])[-1]
    return {"seconds": seconds, **json.loads(lines[-1])}


def result(**numbers: float) -> None:
    """Ends a run. Loaders' own threads and processes are not waited for."""
    print(f"\n{json.dumps(numbers)}", flush=True)


def since_start() -> float:
    """Seconds since this run's process was started."""
    return time.time() - float(os.environ[STARTED])


# -- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """``spread`` adds the least and the greatest; ``ratios`` adds a column for each base row."""

    key: str
    title: str
    form: str = ",.0f"
    spread: bool = False
    ratios: bool = False


def table(results: Results, columns: Iterable[Column], bases: Iterable[str]) -> str:
    """Medians over the rounds as a Markdown table; a ratio is the median of the rounds' ratios."""
    bases = [base for base in bases if base in results]
    head, lines = ["row"], [[row] for row in results]
    for column in columns:
        head.append(column.title)
        for line, runs in zip(lines, results.values(), strict=True):
            line.append(_cell([run[column.key] for run in runs if column.key in run], column))
        for base in bases if column.ratios else []:
            head.append(f"ratio to {base}")
            for line, runs in zip(lines, results.values(), strict=True):
                pairs = zip(runs, results[base], strict=True)
                line.append(f"{statistics.median(a[column.key] / b[column.key] for a, b in pairs):.2f}")
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *lines])


def _cell(values: list[float], column: Column) -> str:
    if not values:
        return ""
    cell = f"{statistics.median(values):{column.form}}"
    return f"{cell} ({min(values):{column.form}}-{max(values):{column.form}})" if column.spread else cell


def machine() -> str:
    """What the figures depend on, in a line."""
    return f"{WORKERS} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


# -- memory, by Linux's /proc -----------------------------------------------------------------------------------------


def memory_kb(process: str | int, kind: str) -> int:
    """Of one process: the sum of the kinds of memory that begin with ``kind``, such as ``Private_`` or ``Pss:``."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(kind))


def children() -> list[str]:
    """The processes that this one has started, Python's resource tracker left out."""
    found = []
    for tasks in Path("/proc/self/task").glob("*/children"):
        for child in tasks.read_text().split():
            with contextlib.suppress(OSError):
                if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
    return found


def largest_worker_mb() -> float:
    """Private memory of the largest child process; 0 without any."""
    return max((memory_kb(child, "Private_") for child in children()), default=0) / 1e3
