"""From a source to a store: scan, plan, write shards in parallel, prove, commit."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, Executor
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from shardstore import formats, order
from shardstore.converting import ledger
from shardstore.converting.options import ConvertOptions, Options
from shardstore.converting.plan import Plan, Shapes, make_plan, needs_shapes, picture_field
from shardstore.converting.resizing import estimate, resize_all
from shardstore.converting.summary import Summary
from shardstore.converting.target import Target, container_of
from shardstore.converting.write import ShardResult, Task, write_shard
from shardstore.errors import Problem, ShardstoreError, SourceError, system_problem
from shardstore.pictures import images
from shardstore.pool import Pool, Progress
from shardstore.sources import Numbers, Source, open_source
from shardstore.store import prove
from shardstore.store.files import checksum_file, sync_file, write_file
from shardstore.store.index import JSON_NAME, Index, load, write_index
from shardstore.store.schema import REJECTS, Schema, Table, fingerprint, shard_dtype, shard_files, to_json

_PROBE_SAMPLES = 1024  # headers read in one task
_SHUFFLE = 3  # what a derived key is for
_MAKERS = ("shardstore", "pillow", "simplejpeg", "numcodecs", "h5py", "hdf5plugin")  # that shape the bytes of shards


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
    number of workers. Interrupted, by whatever, it goes on where it was when it is called again in the same way: what
    was finished lies in ``target.partial``. Python sequences start again. docs/reliability.md has the promises in full.

    Args:
        source: a folder with one sub-folder a class, a store, or samples (``(image, label)`` tuples or dicts of
            arrays, a torchvision data set).
        target: the store's path; its ending chooses the format.
        executor: any ``concurrent.futures`` executor instead of local processes.
        progress: called with (samples done, samples in all); with ``resize_short`` up to the end once for resizing and
            once, faster, for writing.
        options: see :class:`shardstore.converting.options.ConvertOptions`.

    Returns:
        What was done; ``print`` shows it in three lines.

    Raises:
        OptionError: options that do not go together, or a target that may not be written, or that another process is
            writing right now.
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
        job = _Job(place, pool, chosen, progress or (lambda done, total: None))
        try:
            if place.begin(_signature(plan, chosen.resize_short, _makers()), samples.identity(), chosen.overwrite):
                job.reused = load(place.path).schema.shards
            else:
                ready, plan = job.resize(samples, plan) if chosen.resize_short else (samples, plan)
                place.commit(job.run(ready, plan, shapes).fingerprint)
        except BaseException as error:
            pool.close(at_once=True)  # nobody may write into the folder any more
            shown = job.given_up(error)
            raise shown from (None if shown is error else error)
    made, seconds = load(place.path), time.monotonic() - started
    bad, reused = [Problem(**line) for line in made.rejects()], (job.reused, job.reused_pictures)
    return Summary(
        os.fspath(target), made.schema, made.nbytes, plan.reason, bad, samples.notes, seconds, False, *reused
    )


def _makers() -> list[str]:
    """The versions of what makes the bytes: another version's shards are not mixed with this one's."""
    versions = []
    for name in _MAKERS:
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return versions


def _signature(plan: Plan, *further: Any) -> str:
    """A checksum of what is made: the plan, and whatever else it depends on."""
    schema = to_json(replace(plan.schema, samples=0)).decode()
    recipe = replace(plan.recipe, check=None)  # what was looked at is no other for it
    return hashlib.sha256(repr((schema, recipe, further)).encode()).hexdigest()


def _read_shapes(source: Source, options: ConvertOptions, pool: Pool) -> Shapes:
    """The headers of all pictures; for store="auto" the first ones may already settle it."""
    ranges = [np.arange(a, min(a + _PROBE_SAMPLES, len(source))) for a in range(0, len(source), _PROBE_SAMPLES)]
    if options.store == "auto":
        start = _probe((0, source.take(ranges[0][:64]), options.max_pixels))[1]
        good = start.shapes[start.shapes[:, 0] > 0]
        if len(start.dtypes) > 1 or len(np.unique(good, axis=0)) > 1:
            return start
    shapes = np.zeros((len(source), 3), np.int64)
    dtypes: set[str] = set()
    for number, found in pool.run(_probe, ((i, source.take(r), options.max_pixels) for i, r in enumerate(ranges))):
        shapes[ranges[number]] = found.shapes
        dtypes |= set(found.dtypes)
    return Shapes(shapes, tuple(sorted(dtypes)))


def _probe(task: tuple[int, Source, int]) -> tuple[int, Shapes]:
    number, source, max_pixels = task
    field = picture_field(source)
    assert field is not None
    column = source.fields.index(field)
    shapes, dtypes = np.zeros((len(source), 3), np.int64), set()
    for i in range(len(source)):
        try:
            header = images.probe(source.read(i)[column], max_pixels)
        except SourceError:
            continue  # writing the shard will say what is wrong with it
        shapes[i] = header.shape
        dtypes.add(header.dtype)
    return number, Shapes(shapes, tuple(sorted(dtypes)))


class _Job:
    """Writes all shards of a plan; where files prove bad, plans again without them and keeps the shards that stay."""

    def __init__(self, place: Target, pool: Pool, options: ConvertOptions, progress: Progress) -> None:
        self.place, self.pool, self.options, self.progress = place, pool, options, progress
        self.done: dict[int, tuple[Task, ShardResult]] = {}  # by shard
        self.rejects: dict[int, Problem] = {}  # by number in the user's source
        self.numbers: Numbers | None = None  # of the samples that resizing has left, in the user's source
        self.reused = self.reused_pictures = 0

    def resize(self, source: Source, plan: Plan) -> tuple[Source, Plan]:
        """Make the pictures to store first, since only then their lengths are known; and the plan for them."""
        made = resize_all(source, self.options, self.pool, self.place, self.progress)
        self.rejects |= made.rejects
        self.reused_pictures = made.reused
        self.numbers = np.delete(np.arange(len(source)), sorted(made.rejects))
        if made.rejects and (self.options.on_error == "stop" or not len(made.source)):
            raise self._bad_source(len(made.rejects) == len(source))
        plan = make_plan(made.source, plan.schema.container, self.options, None)
        kept = len(made.source) - made.resized
        reason = f"{made.resized:,} resized to a shorter side of {self.options.resize_short}, {kept:,} kept"
        return made.source, replace(plan, recipe=replace(plan.recipe, check=None), reason=reason)

    def run(self, source: Source, plan: Plan, shapes: Shapes | None) -> Schema:
        """Write everything; the schema of the finished store."""
        good, options = np.arange(len(source)), self.options
        if picture_field(source) is not None:  # what "auto" chose stays, whatever is left out
            pixels = plan.schema.options["store"] == "pixels"
            options, shapes = replace(options, store="pixels" if pixels else "encoded"), shapes if pixels else None
        bad = self._known_bad(source)
        while True:
            looked = not len(bad)  # at every picture, in this pass
            if looked:
                bad = self._write(source, good, plan)
            if not len(bad):
                return self._finish(plan)
            if self.options.on_error == "stop" or len(bad) == len(good):
                raise self._bad_source(len(bad) == len(good))
            kept = np.delete(np.arange(len(good)), bad)
            good = good[kept]
            if shapes is not None:
                shapes = replace(shapes, shapes=shapes.shapes[kept])
            again = make_plan(source.take(good), plan.schema.container, options, shapes)
            recipe = replace(again.recipe, check=None) if looked else again.recipe
            plan, bad = replace(again, recipe=recipe, reason=plan.reason), bad[:0]

    def _known_bad(self, source: Source) -> Numbers:
        """The bad samples that an interrupted run has found, if they are as they were."""
        if self.options.on_error == "stop" or self.options.resize_short:  # resizing has looked at every picture
            return np.array([], np.int64)
        for number, identity, problem in ledger.known_bad(self.place.ledger):
            if number < len(source) and identity and source.take(np.array([number])).identity() == identity:
                self.rejects[number] = problem
        return np.array(sorted(self.rejects), np.int64)

    def _write(self, source: Source, good: Numbers, plan: Plan) -> Numbers:
        """Write the shards of these samples that are not done; returns which of them (places in ``good``) are bad."""
        some = source.take(good) if len(good) < len(source) else source
        tasks = [self._task(some, plan, shard) for shard in range(plan.schema.shards)]
        # Of an earlier pass of this run, those shards stay that are the same in this plan.
        same = {t.shard for t in tasks if t.shard in self.done and t.signature == self.done[t.shard][0].signature != ""}
        self.done = {shard: self.done[shard] for shard in same}
        count = sum(result.samples for _, result in self.done.values())
        self.progress(count, plan.schema.samples)
        bad: list[int] = []
        for result in self.pool.run(write_shard, (task for task in tasks if task.shard not in same)):
            count += result.samples
            self.progress(count, plan.schema.samples)
            first = result.shard * plan.schema.shard_samples
            for inside, problem, lasting in result.rejects:
                number = int(good[first + inside])
                self.rejects[number if self.numbers is None else int(self.numbers[number])] = problem
                bad.append(first + inside)
                if lasting and self.options.on_error == "skip":
                    ledger.note_bad(self.place.ledger, number, source.take(np.array([number])).identity(), problem)
            if not result.rejects:
                self.done[result.shard] = tasks[result.shard], result
            if self.options.on_error == "stop" and len(bad) >= self.options.max_errors:
                break
        return np.array(sorted(bad), np.int64)

    def _task(self, source: Source, plan: Plan, shard: int) -> Task:
        items = {name: int(counts[shard]) for name, counts in plan.items.items()}
        part = source.take(plan.numbers(shard))
        limit = self.options.max_errors if self.options.on_error == "stop" else len(part)
        identity = part.identity()
        signature = identity and _signature(plan, shard, items, identity)
        return Task(self.place.root, plan.schema, plan.recipe, part, shard, items, limit, self.place.ledger, signature)

    def given_up(self, error: BaseException) -> BaseException:
        """The error as people should see it, after what was begun is removed, or kept where a later run can go on."""
        kept = False
        with suppress(OSError):  # of a disk that fails; what cannot be removed stays for the next run
            kept = self.place.give_up(keep=ledger.any_in(self.place.ledger))
        if isinstance(error, OSError) and not isinstance(error, ShardstoreError):
            error = ShardstoreError(system_problem("the store cannot be written", error, self.place.path))
        if isinstance(error, ShardstoreError) and isinstance(error.__cause__, BrokenExecutor):
            error.problem = replace(error.problem, path=self.place.path)
        hint = f"What is finished is kept in {self.place.partial}: the same command goes on with it."
        if kept and isinstance(error, ShardstoreError):
            error.problem = replace(error.problem, hint=f"{error.problem.hint} {hint}" if error.problem.hint else hint)
        elif kept:
            error.add_note(hint)  # the command line shows it
        return error

    def _bad_source(self, all_bad: bool) -> SourceError:
        shown = [self.rejects[n] for n in sorted(self.rejects)][: self.options.max_errors]
        count = f"{len(self.rejects)} bad file{'s' if len(self.rejects) != 1 else ''}"
        if len(self.rejects) >= self.options.max_errors:
            count = f"at least {count}"
        hint = "Mend or remove them, or leave them out with --on-error skip (on_error='skip')."
        if all_bad:
            count, hint = f"no good file at all, {count}", "See what is said of each."
        return SourceError(Problem(f"{count} in the source", hint=hint), shown)

    def _finish(self, plan: Plan) -> Schema:
        """Write index and metadata, and prove that they agree."""
        root, results = self.place.root, [self.done[shard][1] for shard in range(plan.schema.shards)]
        self.reused = sum(result.reused for result in results)
        self.place.keep_only(path for result in results for path in shard_files(plan.schema, result.shard))
        shards, tables = _tables(plan.schema, results)
        name = os.path.basename(self.place.path) if plan.schema.container == "hdf5" else ""
        schema = replace(plan.schema, name=name, fingerprint=fingerprint(plan.schema, shards))
        items = {name: counts.tolist() for name, counts in plan.items.items()}
        formats.load(schema.container).finish(root, schema, items, self.place.main)
        if self.rejects:
            lines = [json.dumps(self.rejects[n].to_dict()) + "\n" for n in sorted(self.rejects)]
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
    found = {".h5": checksum_file(main)} if schema.container == "hdf5" else {}  # durable already
    described = [field.name for field in schema.fields] + [array.name.replace(".", "/") for array in schema.arrays]
    for name in (REJECTS, "zarr.json", *(f"{path}/zarr.json" for path in described)):
        if os.path.isfile(f"{root}/{name}"):
            sync_file(f"{root}/{name}")  # zarr-python does not
            found[name] = checksum_file(f"{root}/{name}")
    return found
