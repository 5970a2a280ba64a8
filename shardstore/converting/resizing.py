"""Pictures that are resized and encoded again. They are made before the plan, which needs their lengths, and wait in
files beside the store to be; after that they are copied like those of any source."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace

import numpy as np

from shardstore.converting import ledger
from shardstore.converting.options import ConvertOptions
from shardstore.converting.plan import picture_field
from shardstore.converting.target import Target
from shardstore.converting.write import check_picture
from shardstore.errors import ImageError, Problem, SourceError
from shardstore.pictures import images
from shardstore.pool import Pool, Progress
from shardstore.sources import Numbers, Source
from shardstore.sources.resized import ResizedSource, spool_path
from shardstore.store.files import checksum_file

_PART = 128  # pictures made in one task: about a second's work
_ESTIMATED_FROM = 64  # pictures that a dry run resizes: their mean size is within some percent of that of all


@dataclass(frozen=True)
class Resized:
    """What came of resizing a source.

    Attributes:
        source: its good samples, with the pictures to store.
        resized: how many of these were resized; the others are as they were.
        rejects: what is wrong with the rest, by number in the source.
        reused: pictures that an interrupted run had made.
    """

    source: Source
    resized: int
    rejects: dict[int, Problem]
    reused: int


@dataclass(frozen=True)
class _Task:
    folder: str
    part: int
    source: Source
    options: ConvertOptions
    max_errors: int
    ledger: str


@dataclass(frozen=True)
class _Part:
    part: int
    sizes: Numbers  # of each picture; -1 for a bad one
    resized: int
    rejects: tuple[tuple[int, Problem], ...]
    lasting: bool = True  # nothing but the pictures' bytes is wrong with the bad ones
    reused: bool = False


def resize_all(source: Source, options: ConvertOptions, pool: Pool, place: Target, progress: Progress) -> Resized:
    """Make the pictures to store of all samples and put them into files in ``place.spool``."""
    folder = place.spool
    sizes, offsets = np.full(len(source), -1, np.int64), np.zeros(len(source), np.int64)
    parts = np.arange(len(source)) // _PART
    limit = options.max_errors if options.on_error == "stop" else len(source)
    ranges = [np.arange(a, min(a + _PART, len(source))) for a in range(0, len(source), _PART)]
    tasks = (_Task(folder, part, source.take(r), options, limit, place.ledger) for part, r in enumerate(ranges))
    done, resized, reused = 0, 0, 0
    found: dict[int, Problem] = {}
    progress(0, len(source))
    for result in pool.run(_resize_part, tasks):
        here = ranges[result.part]
        sizes[here], used = result.sizes, result.sizes.clip(0)
        offsets[here] = np.cumsum(used) - used
        resized += result.resized
        reused += len(here) * result.reused
        found |= {int(here[0]) + number: problem for number, problem in result.rejects}
        done += len(here)
        progress(done, len(source))
        if len(found) >= limit:
            break
    good = np.flatnonzero(sizes >= 0)
    made = ResizedSource(source, _picture_name(source), folder, parts, offsets, sizes)
    return Resized(made.take(good) if len(good) < len(source) else made, resized, found, reused)


def estimate(source: Source, options: ConvertOptions) -> Source:
    """The source as resizing would make it, for a plan only: all sizes but those of some pictures are their mean."""
    some = np.unique(np.linspace(0, len(source) - 1, _ESTIMATED_FROM).astype(np.int64))
    known = np.full(len(some), -1, np.int64)
    for i, number in enumerate(some):
        try:
            known[i] = len(_make(source, int(number), options)[0])
        except SourceError:
            continue  # a real run will say what is wrong with it
    name, nothing = _picture_name(source), np.zeros(len(source), np.int64)
    good = known >= 0
    mean = known[good].mean() if good.any() else source.lengths(name).mean()
    sizes = np.full(len(source), round(mean), np.int64)
    sizes[some[good]] = known[good]
    return ResizedSource(source, name, "", nothing, nothing, sizes)


def _resize_part(task: _Task) -> _Part:
    """Make the pictures of a few samples, or find that an earlier run has. Runs in a worker process."""
    path, signature = spool_path(task.folder, task.part), _signature(task)
    found = ledger.load(task.ledger, signature) if signature else None
    if found is not None and os.path.exists(path) and checksum_file(path) == tuple(found["spool"].tolist()):
        rejects = tuple((number, Problem(**problem)) for number, problem in json.loads(bytes(found["rejects"])))
        return _Part(task.part, found["sizes"], int(found["resized"]), rejects, reused=True)
    part = _made_part(task)
    if signature and part.lasting and len(part.rejects) < task.max_errors:
        rejects_json = json.dumps([(number, problem.to_dict()) for number, problem in part.rejects]).encode()
        numbers = {"sizes": part.sizes, "resized": np.array(part.resized), "spool": np.array(checksum_file(path))}
        ledger.save(task.ledger, signature, {**numbers, "rejects": np.frombuffer(rejects_json, np.uint8)})
    return part


def _signature(task: _Task) -> str:
    identity = task.source.identity()
    options = task.options
    made = (images.pillow_version(), options.resize_short, options.check, options.max_pixels, task.part, identity)
    return identity and hashlib.sha256(repr(made).encode()).hexdigest()


def _made_part(task: _Task) -> _Part:
    """One file of all the pictures."""
    sizes, resized, lasting = np.full(len(task.source), -1, np.int64), 0, True
    rejects: list[tuple[int, Problem]] = []
    with open(spool_path(task.folder, task.part), "wb") as f:
        for number in range(len(task.source)):
            try:
                data, changed = _make(task.source, number, task.options)
            except SourceError as error:
                problem = error.problem
                rejects.append((number, replace(problem, key=problem.key or task.source.key(number))))
                lasting &= isinstance(error, ImageError)
                if len(rejects) >= task.max_errors:
                    break
                continue
            f.write(data)
            sizes[number] = len(data)
            resized += changed
    return _Part(task.part, sizes, resized, tuple(rejects), lasting)


def _make(source: Source, number: int, options: ConvertOptions) -> tuple[bytes, bool]:
    """The picture to store of one sample, and whether it is a resized one; further pictures are only checked."""
    picture, made = _picture_name(source), (b"", False)
    assert options.resize_short is not None
    for field, value in zip(source.fields, source.read(number), strict=True):
        if field.content != "image" or field.kind != "bytes":
            continue
        small = images.shrink(value, options.resize_short, options.max_pixels) if field.name == picture else None
        if small is None:
            check_picture(value, options.check, options.max_pixels)
        if field.name == picture:
            made = (value if small is None else small, small is not None)
    return made


def _picture_name(source: Source) -> str:
    field = picture_field(source)
    assert field is not None  # or there is no plan
    return field.name
