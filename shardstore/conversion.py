"""From a source to a store: scan, plan, write shards in parallel, prove, commit."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from shardstore import formats, images, order, prove
from shardstore.errors import Problem, ShardstoreError, SourceError, printable
from shardstore.files import checksum_file, write_file
from shardstore.index import JSON_NAME, REJECTS, Index, load, write_index
from shardstore.options import ConvertOptions, Options
from shardstore.plan import Plan, Shapes, human, make_plan, needs_shapes, picture_field
from shardstore.pool import Pool, Progress
from shardstore.resizing import estimate, resize_all
from shardstore.schema import Schema, Table, fingerprint, shard_dtype, shard_files, to_json
from shardstore.sources import Numbers, Source, open_source
from shardstore.target import Target, container_of
from shardstore.write import ShardResult, Task, write_shard

_PROBE_SAMPLES = 1024  # headers read in one task
_SHUFFLE = 3  # what a derived key is for


@dataclass(frozen=True)
class Summary:
    """What a conversion did (or, for a dry run, would do).

    Attributes:
        target: the store's path.
        schema: its description.
        nbytes: bytes of its files; for a dry run, of its values.
        reason: why pixels or encoded, where ``store="auto"`` decided, or how many pictures were resized.
        rejects: the bad files that were left out, with the reason.
        notes: what else was left out or is odd.
        seconds: it took.
        dry_run: nothing was written.
    """

    target: str
    schema: Schema
    nbytes: int
    reason: str
    rejects: list[Problem]
    notes: list[str]
    seconds: float
    dry_run: bool

    def __str__(self) -> str:
        """Three lines, and one for each note."""
        s, kind = self.schema, str(self.schema.options["store"])
        classes = f" in {len(s.classes)} classes" if s.classes else ""
        verb = "would hold" if self.dry_run else "holds"
        size = human(self.nbytes)
        speed = f"; {self.seconds:.1f} s, {s.samples / max(self.seconds, 1e-9):,.0f} images/s"
        where = f"{size} in {s.shards} shard{'s' if s.shards > 1 else ''}" + ("" if self.dry_run else speed)
        lines = [
            f"{printable(self.target)} {verb} {s.samples:,} images{classes}, {where}",
            f"stored as {kind}" + (f": {self.reason}" if self.reason else ""),
        ]
        if self.rejects:
            bad = f"{len(self.rejects)} bad file{'s' if len(self.rejects) > 1 else ''}"
            lines.append(f"left out: {bad}, listed in {REJECTS}; the first: {self.rejects[0]}")
        else:
            lines.append("left out: not known before the files are read" if self.dry_run else "left out: no bad files")
        return "\n".join(lines + [f"note: {printable(note)}" for note in self.notes])

    def to_dict(self) -> dict[str, Any]:
        """The summary for JSON."""
        return {
            "target": self.target,
            "samples": self.schema.samples,
            "classes": len(self.schema.classes or ()),
            "shards": self.schema.shards,
            "shard_samples": self.schema.shard_samples,
            "bytes": self.nbytes,
            "container": self.schema.container,
            "options": dict(self.schema.options),
            "reason": self.reason,
            "fingerprint": self.schema.fingerprint,
            "rejects": [p.to_dict() for p in self.rejects],
            "notes": self.notes,
            "seconds": round(self.seconds, 3),
            "dry_run": self.dry_run,
        }


def convert(
    source: str | Path | Sequence[Any],
    target: str | Path,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> Summary:
    """Turn a folder of images, another store, or a Python sequence of samples into a store.

    Nothing exists at ``target`` until all of it does. The same source and options give the same bytes, whatever the
    number of workers.

    Args:
        source: a folder with one sub-folder a class, a store, or samples (``(image, label)`` tuples or dicts of
            arrays, a torchvision data set).
        target: the store's path; its ending chooses the format.
        executor: any ``concurrent.futures`` executor instead of local processes.
        progress: called with (samples done, samples in all); with ``resize_short`` up to the end once for resizing and
            once, faster, for writing.
        options: see :class:`shardstore.options.ConvertOptions`.

    Returns:
        What was done; ``print`` shows it in three lines.

    Raises:
        OptionError: options that do not go together, or a target that may not be written.
        SourceError: the source cannot be converted; ``.problems`` lists every bad file.
    """
    started = time.monotonic()
    chosen = ConvertOptions(**options)
    container = container_of(os.path.normpath(target), chosen.format)
    place = Target(target, container)
    place.check(os.fspath(source) if isinstance(source, str | Path) else None, chosen.overwrite)
    samples = open_source(source)
    if chosen.shuffle:
        key = order.derive(chosen.seed, _SHUFFLE)
        samples = samples.take(order.permute(np.arange(len(samples)), len(samples), key))
    with Pool(1 if samples.in_process else chosen.workers, None if samples.in_process else executor) as pool:
        shapes = _read_shapes(samples, chosen, pool) if needs_shapes(samples, chosen) else None
        plan = make_plan(samples, container, chosen, shapes)
        if chosen.dry_run:
            if chosen.resize_short:
                plan = make_plan(estimate(samples, chosen), container, chosen, shapes)
            return Summary(os.fspath(target), plan.schema, plan.nbytes, plan.reason, [], samples.notes, 0.0, True)
        place.begin()
        job = _Job(place, pool, chosen, progress or (lambda done, total: None))
        try:
            ready, plan = job.resize(samples, plan) if chosen.resize_short else (samples, plan)
            schema, rejects = job.run(ready, plan, shapes)
        except ShardstoreError:
            pool.close()  # nobody may write into the folder that is removed
            place.discard()
            raise
    place.commit(schema.fingerprint)
    nbytes, seconds = load(place.path).nbytes, time.monotonic() - started
    return Summary(os.fspath(target), schema, nbytes, plan.reason, rejects, samples.notes, seconds, False)


def _read_shapes(source: Source, options: ConvertOptions, pool: Pool) -> Shapes:
    """The headers of all pictures; for store="auto" the first ones may already settle it."""
    ranges = [np.arange(a, min(a + _PROBE_SAMPLES, len(source))) for a in range(0, len(source), _PROBE_SAMPLES)]
    if options.store == "auto":
        start = _probe((0, source.take(ranges[0][:64])))[1]
        good = start.shapes[start.shapes[:, 0] > 0]
        if len(start.dtypes) > 1 or len(np.unique(good, axis=0)) > 1:
            return start
    shapes = np.zeros((len(source), 3), np.int64)
    dtypes: set[str] = set()
    for number, found in pool.run(_probe, ((i, source.take(r)) for i, r in enumerate(ranges))):
        shapes[ranges[number]] = found.shapes
        dtypes |= set(found.dtypes)
    return Shapes(shapes, tuple(sorted(dtypes)))


def _probe(task: tuple[int, Source]) -> tuple[int, Shapes]:
    number, source = task
    field = picture_field(source)
    assert field is not None
    column = source.fields.index(field)
    shapes, dtypes = np.zeros((len(source), 3), np.int64), set()
    for i in range(len(source)):
        try:
            header = images.probe(source.read(i)[column])
        except SourceError:
            continue  # writing the shard will say what is wrong with it
        shapes[i] = header.shape
        dtypes.add(header.dtype)
    return number, Shapes(shapes, tuple(sorted(dtypes)))


class _Job:
    """Writes all shards of a plan; where files prove bad, plans again without them and keeps the shards that stay."""

    def __init__(self, place: Target, pool: Pool, options: ConvertOptions, progress: Progress) -> None:
        self.place, self.pool, self.options, self.progress = place, pool, options, progress
        self.done: dict[int, ShardResult] = {}
        self.rejects: list[Problem] = []

    def resize(self, source: Source, plan: Plan) -> tuple[Source, Plan]:
        """Make the pictures to store first, since only then their lengths are known; and the plan for them."""
        made = resize_all(source, self.options, self.pool, self.place.spool, self.progress)
        self.rejects += made.rejects
        if made.rejects and (self.options.on_error == "stop" or not len(made.source)):
            raise self._bad_source(len(made.rejects) == len(source))
        plan = make_plan(made.source, plan.schema.container, self.options, None)
        kept = len(made.source) - made.resized
        reason = f"{made.resized:,} resized to a shorter side of {self.options.resize_short}, {kept:,} kept"
        return made.source, replace(plan, recipe=replace(plan.recipe, check=None), reason=reason)

    def run(self, source: Source, plan: Plan, shapes: Shapes | None) -> tuple[Schema, list[Problem]]:
        good = np.arange(len(source))
        options = self.options
        if picture_field(source) is not None:  # what "auto" chose stays, whatever is left out
            pixels = plan.schema.options["store"] == "pixels"
            options, shapes = replace(options, store="pixels" if pixels else "encoded"), shapes if pixels else None
        while True:
            bad = self._write(source.take(good) if len(good) < len(source) else source, plan)
            if not len(bad):
                return self._finish(plan), self.rejects
            if self.options.on_error == "stop" or len(bad) == len(good):
                raise self._bad_source(len(bad) == len(good))
            kept = np.delete(np.arange(len(good)), bad)
            good = good[kept]
            if shapes is not None:
                shapes = replace(shapes, shapes=shapes.shapes[kept])
            again = make_plan(source.take(good), plan.schema.container, options, shapes)
            self._keep(plan, again, int(bad[0]))
            plan = replace(again, recipe=replace(again.recipe, check=None), reason=plan.reason)

    def _keep(self, before: Plan, after: Plan, first_bad: int) -> None:
        """Forget and remove the shards that the new plan makes otherwise."""
        same = replace(before.schema, samples=0) == replace(after.schema, samples=0)
        whole = first_bad // before.schema.shard_samples if same else 0
        for shard in range(whole, before.schema.shards):
            for path in shard_files(before.schema, shard):
                if os.path.exists(f"{self.place.root}/{path}"):
                    os.unlink(f"{self.place.root}/{path}")
        self.done = {shard: result for shard, result in self.done.items() if shard < whole}

    def _write(self, source: Source, plan: Plan) -> Numbers:
        """Write the shards that are not done; returns the numbers of bad samples."""
        todo = [shard for shard in range(plan.schema.shards) if shard not in self.done]
        count = sum(len(plan.numbers(shard)) for shard in self.done)
        self.progress(count, plan.schema.samples)
        tasks = (self._task(source, plan, shard) for shard in todo)
        found: list[tuple[int, Problem]] = []
        for result in self.pool.run(write_shard, tasks):
            count += result.samples
            self.progress(count, plan.schema.samples)
            first = result.shard * plan.schema.shard_samples
            found += [(first + number, problem) for number, problem in result.rejects]
            if not result.rejects:
                self.done[result.shard] = result
            if self.options.on_error == "stop" and len(found) >= self.options.max_errors:
                break
        found.sort(key=lambda pair: pair[0])
        self.rejects += [problem for _, problem in found]
        return np.array([number for number, _ in found], np.int64)

    def _task(self, source: Source, plan: Plan, shard: int) -> Task:
        items = {name: int(counts[shard]) for name, counts in plan.items.items()}
        part = source.take(plan.numbers(shard))
        limit = self.options.max_errors if self.options.on_error == "stop" else len(part)
        return Task(self.place.root, plan.schema, plan.recipe, part, shard, items, limit)

    def _bad_source(self, all_bad: bool) -> SourceError:
        shown = self.rejects[: self.options.max_errors]
        count = f"{len(self.rejects)} bad file{'s' if len(self.rejects) != 1 else ''}"
        if len(self.rejects) >= self.options.max_errors:
            count = f"at least {count}"
        hint = "Mend or remove them, or leave them out with --on-error skip (on_error='skip'). Nothing was written."
        if all_bad:
            count, hint = f"no good file at all, {count}", "Nothing was written."
        return SourceError(Problem(f"{count} in the source", hint=hint), shown)

    def _finish(self, plan: Plan) -> Schema:
        """Write index and metadata, and prove that they agree."""
        root, results = self.place.root, [self.done[shard] for shard in range(plan.schema.shards)]
        shards, tables = _tables(plan.schema, results)
        name = os.path.basename(self.place.path) if plan.schema.container == "hdf5" else ""
        schema = replace(plan.schema, name=name, fingerprint=fingerprint(plan.schema, shards))
        items = {name: counts.tolist() for name, counts in plan.items.items()}
        formats.load(schema.container).finish(root, schema, items, self.place.main)
        if self.rejects:
            lines = [json.dumps(p.to_dict()) + "\n" for p in self.rejects]
            write_file(f"{root}/{REJECTS}", "".join(lines).encode())
        schema = replace(schema, files=_other_files(root, schema, self.place.main))
        schema = write_index(root, schema, shards, tables)
        problems = prove.prove(Index(self.place.path, root, schema, shards))
        if problems:
            raise ShardstoreError(replace(problems[0], hint="This is a fault of shardstore: please report it."))
        write_file(f"{root}/{JSON_NAME}", to_json(schema))
        return schema


def _tables(schema: Schema, results: list[ShardResult]) -> tuple[Table, list[Table]]:
    """The shard table and the chunk tables from what the workers sent back."""
    shards = np.zeros(len(results), shard_dtype(schema))
    for number, result in enumerate(results):
        shards[number]["first"] = number * schema.shard_samples
        shards[number]["count"] = result.samples
        shards[number]["size"], shards[number]["crc32c"] = result.size, result.crc32c
        shards[number]["content"] = result.content
    lengths = np.array([[len(table) for table in result.tables] for result in results])
    shards["rows"] = np.cumsum(lengths, axis=0) - lengths
    return shards, [np.concatenate([r.tables[i] for r in results]) for i in range(len(schema.arrays))]


def _other_files(root: str, schema: Schema, main: str) -> dict[str, tuple[int, int]]:
    """Size and checksum of what is neither shard nor index: container metadata, the list of rejects."""
    found = {".h5": checksum_file(main)} if schema.container == "hdf5" else {}
    described = [field.name for field in schema.fields] + [array.name.replace(".", "/") for array in schema.arrays]
    for name in (REJECTS, "zarr.json", *(f"{path}/zarr.json" for path in described)):
        if os.path.isfile(f"{root}/{name}"):
            found[name] = checksum_file(f"{root}/{name}")
    return found
