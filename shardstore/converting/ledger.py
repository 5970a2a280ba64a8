"""What an interrupted conversion had done, for the next run of the same command: beside the shards, a record of each.

A record has the name of a checksum of all that went into a shard (see ``conversion.py``), so that a run only finds what
it would make again. Records are arrays in ``.npz`` files (no pickle), written when what they tell of is durable; bad
samples stand in a file of JSON lines, if their bytes are what is wrong (what could not be read may be read another
time). What is cut or strange counts as not there.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from shardstore.errors import Problem
from shardstore.store.files import write_file

_BAD = "bad.jsonl"


def save(folder: str, signature: str, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Keep a record."""
    out = io.BytesIO()
    np.savez(out, **arrays)  # type: ignore[arg-type]
    write_file(f"{folder}/{signature}.npz", out.getvalue())


def load(folder: str, signature: str) -> dict[str, np.ndarray[Any, Any]] | None:
    """The record of this name, if there is one."""
    try:
        with np.load(f"{folder}/{signature}.npz", allow_pickle=False) as found:
            return dict(found)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None


def any_in(folder: str) -> bool:
    """Whether there are records."""
    return os.path.isdir(folder) and any(name.endswith(".npz") for name in os.listdir(folder))


def note_bad(folder: str, sample: int, signature: str, problem: Problem) -> None:
    """Remember a bad sample of the source; ``signature`` changes when it does."""
    with open(f"{folder}/{_BAD}", "a", encoding="utf-8") as f:
        f.write(json.dumps([sample, signature, problem.to_dict()]) + "\n")


def known_bad(folder: str) -> Iterator[tuple[int, str, Problem]]:
    """The bad samples that were remembered: number, signature, what is wrong."""
    if not os.path.exists(f"{folder}/{_BAD}"):
        return
    with open(f"{folder}/{_BAD}", encoding="utf-8", errors="replace") as f:
        for line in f:
            try:
                sample, signature, problem = json.loads(line)
                yield int(sample), str(signature), Problem(**problem)
            except (ValueError, TypeError):
                continue  # the line that was being written
