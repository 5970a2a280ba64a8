"""Training as users do it: process groups with DistributedDataParallel, killed and resumed; Accelerate; Lightning."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import shardstore
from shardstore import OptionError, ReadOptions, ShardDataset

Batches = list[list[str]]

SAMPLES, BATCH, EPOCHS, WAIT = 97, 4, 2, 300

# The ranks then need no seconds for importing torch.
multiprocessing.set_forkserver_preload(["torch", "torchvision.transforms"])


@pytest.fixture(scope="module")
def store(make_store: Callable[..., Path], make_images: Callable[..., Path]) -> Path:
    """97 pictures of 8 x 8 pixels in 10 shards, mixed."""
    source = make_images(SAMPLES, classes=SAMPLES, sizes=((9, 8),))  # so that a label names a picture
    return make_store("npy", source=source, size=8, samples_per_shard=10, shuffle=True)


@pytest.fixture(scope="module")
def alone(store: Path) -> list[Batches]:
    """The batches that one rank takes, for each epoch."""
    found = []
    for epoch in range(EPOCHS):
        data = ShardDataset(store, fields=["key"], batch_size=BATCH, shuffle=True)
        data.set_epoch(epoch)
        found.append([batch.key for batch in DataLoader(data, batch_size=None)])
    assert [len(set(flat(batches))) for batches in found] == [SAMPLES] * EPOCHS
    assert found[0] != found[1]
    return found


def flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def check_each_once(seen: Iterable[str], expected: Iterable[str], repeats: int = 0) -> None:
    """Each of ``expected`` and nothing else was seen, once but for so many repeats."""
    counts = Counter(seen)
    assert counts.keys() == set(expected)
    assert counts.total() - len(counts) <= repeats


# -- processes --------------------------------------------------------------------------------------------------------


def launch(
    function: Callable[..., None], ranks: int, folder: Path, *arguments: Any, killed: bool = False, **options: Any
) -> None:
    """Run ``function(rank, ranks, folder, ...)`` in as many processes; they must end, all in the same way."""
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=run, args=(function, rank, ranks, folder, *arguments), kwargs=options)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + WAIT
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process, code in zip(processes, codes, strict=True):
        if code is None:
            os.killpg(process.pid or 0, signal.SIGKILL)  # with its workers
        process.join()
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("*.error")))
    assert codes == [-signal.SIGKILL if killed else 0] * ranks, f"exit codes (None: it did not end): {codes}\n{errors}"


def run(function: Callable[..., None], rank: int, ranks: int, folder: Path, *arguments: Any, **options: Any) -> None:
    os.setsid()
    torch.set_num_threads(1)
    try:
        function(rank, ranks, folder, *arguments, **options)
    except BaseException:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
        raise


def join_group(rank: int, ranks: int, folder: Path) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=timedelta(seconds=WAIT / 2)
    )


def settle() -> None:
    """Wait, before workers are forked, until gloo's threads have let go of the tensors of the last collective.

    They take the GIL for that, and the lock of CPython's thread states before it, which nobody would release in a
    worker that is forked meanwhile: it hangs before it gets to any code (CPython 3.11, torch 2.14).
    """
    time.sleep(0.3)


def plain_loader(data: ShardDataset, workers: int, context: Any = "fork") -> DataLoader[Any]:
    """In either use; the default context would be the one that the rank itself was started by."""
    return DataLoader(
        data,
        batch_size=None if data.batch_size else BATCH,
        num_workers=workers,
        multiprocessing_context=context if workers else None,
    )


class Log:
    """What one rank was given, readable also after it was killed: lines of epoch, step and keys."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = Path(folder, f"{rank}.jsonl")

    def write(self, epoch: int, step: int, keys: list[str]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([epoch, step, keys]) + "\n")


def logged(folder: Path, ranks: int) -> list[list[tuple[int, int, list[str]]]]:
    """For each rank, all (epoch, step, keys)."""
    lines = [Path(folder, f"{rank}.jsonl").read_text().splitlines() for rank in range(ranks)]
    return [[tuple(json.loads(line)) for line in part] for part in lines]


def epoch_of(ranks: list[list[tuple[int, int, list[str]]]], epoch: int, first: int = 0) -> list[Batches]:
    """For each rank, the batches of an epoch, of which no step may be missing or doubled."""
    parts = [[(step, keys) for e, step, keys in rank if e == epoch] for rank in ranks]
    for part in parts:
        assert [step for step, _ in part] == [*range(first, first + len(part))]
    return [[keys for _, keys in part] for part in parts]


# -- DistributedDataParallel ------------------------------------------------------------------------------------------


def train(
    rank: int, ranks: int, folder: Path, store: Path, workers: int, drop_last: bool = False,
    stop: tuple[int, int] | None = None, accumulate: int = 1,
) -> None:  # fmt: skip
    """Train for all epochs, from the last checkpoint on where there is one; at ``stop``, die before it is saved."""
    join_group(rank, ranks, folder)
    data = ShardDataset(store, fields=["image", "label", "key"], batch_size=BATCH, shuffle=True, drop_last=drop_last)
    loader = plain_loader(data, workers)
    torch.manual_seed(0)
    plain = nn.Linear(8 * 8 * 3, SAMPLES)
    checkpoint, log = Path(folder, "checkpoint.json"), Log(folder, rank)
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        data.load_state_dict(saved["data"])
        plain.load_state_dict({name: torch.tensor(value) for name, value in saved["model"].items()})
        distributed.barrier()  # rank 0 will write another
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(data.epoch, EPOCHS):
        expected, count = len(data) if data.first_step == 0 else None, 0
        settle()
        for step, batch in enumerate(loader, data.first_step):
            assert batch.image.shape == (len(batch.key), 3, 8, 8)
            loss = nn.functional.cross_entropy(model(batch.image.flatten(1) / 255), batch.label)
            (loss / accumulate).backward()
            if (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            log.write(epoch, step, batch.key)
            if (epoch, step) == stop:
                Path(folder, f"{rank}.stop").touch()
                while len(list(folder.glob("*.stop"))) < ranks:  # all of them have made this step
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 0:
                state = {
                    "data": data.state_at(step + 1),
                    "model": {name: value.tolist() for name, value in plain.state_dict().items()},
                }
                checkpoint.with_suffix(".new").write_text(json.dumps(state))
                checkpoint.with_suffix(".new").replace(checkpoint)
            count += 1
        steps = torch.tensor([count, -count])
        distributed.all_reduce(steps, distributed.ReduceOp.MAX)
        assert steps.tolist() == [count, -count]
        assert count == (expected or count)
    torch.save(plain.state_dict(), Path(folder, f"{rank}.pt"))
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "workers", "drop_last"), [(2, 2, False), (3, 0, True), (3, 1, False), (4, 2, False), (4, 0, True)]
)
def test_ranks_train_in_equal_steps_and_epochs_of_their_own(
    store: Path, alone: list[Batches], tmp_path: Path, ranks: int, workers: int, drop_last: bool
) -> None:
    launch(train, ranks, tmp_path, store, workers, drop_last=drop_last)
    steps = SAMPLES // (BATCH * ranks) if drop_last else -(-SAMPLES // (BATCH * ranks))
    full = SAMPLES // (BATCH * ranks)
    for epoch, batches in enumerate(alone):
        parts = epoch_of(logged(tmp_path, ranks), epoch)
        assert [len(part) for part in parts] == [steps] * ranks
        # So the ranks agree about the order, which is another one each epoch.
        assert [part[step] for step in range(full) for part in parts] == batches[: full * ranks]
        if drop_last:
            check_each_once(flat(map(flat, parts)), flat(batches[: full * ranks]))
        else:
            check_each_once(flat(map(flat, parts)), flat(batches), ranks - 1)
    assert all(torch.equal(weights(tmp_path, rank), weights(tmp_path, 0)) for rank in range(ranks))


def weights(folder: Path, rank: int) -> torch.Tensor:
    return torch.cat([value.flatten() for value in torch.load(folder / f"{rank}.pt").values()])


@pytest.mark.parametrize(("workers", "others"), [(2, 0), (1, 3)])
def test_a_killed_training_goes_on_to_the_same_end(store: Path, tmp_path: Path, workers: int, others: int) -> None:
    ranks, (whole, broken) = 2, (tmp_path / name for name in ("whole", "broken"))
    whole.mkdir()
    broken.mkdir()
    launch(train, ranks, whole, store, workers)
    launch(train, ranks, broken, store, workers, stop=(1, 5), killed=True)
    before = logged(broken, ranks)
    assert [part[-1][:2] for part in before] == [(1, 5)] * ranks
    for file in broken.iterdir():
        if file.name != "checkpoint.json":
            file.unlink()
    launch(train, ranks, broken, store, others)
    after = logged(broken, ranks)
    assert [part[0][:2] for part in after] == [(1, 5)] * ranks  # made, but not saved
    assert [[*part[:-1], *rest] for part, rest in zip(before, after, strict=True)] == logged(whole, ranks)
    assert [part[-1] for part in before] == [part[0] for part in after]
    for rank in range(ranks):
        assert torch.equal(weights(broken, rank), weights(whole, rank))


@pytest.mark.parametrize(("ranks", "workers", "others", "other_workers"), [(2, 2, 4, 0), (4, 0, 2, 2)])
def test_a_killed_training_goes_on_with_other_ranks(
    store: Path, alone: list[Batches], tmp_path: Path, ranks: int, workers: int, others: int, other_workers: int
) -> None:
    stop = 4
    launch(train, ranks, tmp_path, store, workers, stop=(1, stop), killed=True)
    before = [part[:stop] for part in epoch_of(logged(tmp_path, ranks), 1)]
    for file in tmp_path.iterdir():
        if file.name != "checkpoint.json":
            file.unlink()
    launch(train, others, tmp_path, store, other_workers)
    after = epoch_of(logged(tmp_path, others), 1, stop * ranks // others)
    taken, left = alone[1][: stop * ranks], alone[1][stop * ranks :]
    assert [part[step] for step in range(stop) for part in before] == taken
    full = (SAMPLES - stop * ranks * BATCH) // (others * BATCH)
    assert [len(part) for part in after] == [-(-len(left) // others)] * others
    assert [part[step] for step in range(full) for part in after] == left[: full * others]
    check_each_once(flat(map(flat, after)), flat(left), others - 1)
    check_each_once(flat(taken) + flat(map(flat, after)), flat(alone[1]), others - 1)


def test_accumulated_gradients_are_those_of_more_ranks(store: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    launch(train, 1, one, store, 2, drop_last=True, accumulate=2)
    launch(train, 2, two, store, 0, drop_last=True)
    for epoch in range(EPOCHS):
        (batches,), (even, odd) = epoch_of(logged(one, 1), epoch), epoch_of(logged(two, 2), epoch)
        assert len(batches) == 2 * len(even) == 2 * (SAMPLES // (2 * BATCH))
        assert [batches[::2], batches[1::2]] == [even, odd]
    torch.testing.assert_close(weights(one, 0), weights(two, 0))


# -- Accelerate -------------------------------------------------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[int]:
    """Where ranks meet: a store in this process, as torchrun gives them, so that nobody else can take the port."""
    meeting = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield meeting.port
    del meeting


def join_accelerate(rank: int, ranks: int, port: int, **options: Any) -> Any:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in variables.items() if ranks > 1})
    os.environ["OMP_NUM_THREADS"] = "1"
    import accelerate
    from accelerate.utils import DataLoaderConfiguration

    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    assert (accelerator.process_index, accelerator.num_processes) == (rank, ranks)
    return accelerator


WAYS = (
    "ReadOptions(rank=accelerator.process_index, world_size=accelerator.num_processes)",
    "ReadOptions(rank=0, world_size=1)",
)


def meet_refusals(rank: int, ranks: int, folder: Path, store: Path, port: int) -> None:
    early = [ShardDataset(store, fields=["label"], batch_size=m, shuffle=True) for m in (None, BATCH)]
    join_accelerate(rank, ranks, port)
    with pytest.raises(OptionError) as refused:
        ShardDataset(store, shuffle=True)
    assert all(way in str(refused.value) for way in WAYS)
    for data, (workers, context) in itertools.product(early, [(0, None), (2, "fork"), (2, "forkserver")]):
        loader = plain_loader(data, workers, context)
        with pytest.raises(OptionError) as refused:
            next(iter(loader))
        assert all(way in str(refused.value) for way in WAYS)


def test_accelerate_without_a_word_on_who_shares_is_refused(store: Path, tmp_path: Path, port: int) -> None:
    launch(meet_refusals, 2, tmp_path, store, port)


def train_accelerated(
    rank: int, ranks: int, folder: Path, store: Path, port: int, workers: int, batch_size: int | None,
    shared_by_us: bool, saved: dict[str, Any] | None = None, **options: Any,
) -> None:  # fmt: skip
    """Two epochs of a loader that knows its rank, or of one that is prepared; from a saved state on."""
    accelerator = join_accelerate(rank, ranks, port, **options)
    share = ReadOptions(rank=accelerator.process_index, world_size=accelerator.num_processes)
    data = ShardDataset(
        store,
        fields=["image", "label"],
        batch_size=batch_size,
        shuffle=True,
        options=share if shared_by_us else ReadOptions(rank=0, world_size=1),
    )
    if saved:
        data.load_state_dict(saved)
    loader = plain_loader(data, workers)
    torch.manual_seed(0)
    plain = nn.Linear(8 * 8 * 3, SAMPLES)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    if not shared_by_us:
        loader = accelerator.prepare(loader)
        if saved:
            loader.set_epoch(data.epoch)  # type: ignore[attr-defined]
    log = Log(folder, rank)
    for epoch in range(data.epoch, EPOCHS):
        settle()
        for step, (images, labels) in enumerate(loader):
            accelerator.backward(nn.functional.cross_entropy(model(images.flatten(1) / 255), labels))
            optimizer.step()
            optimizer.zero_grad()
            log.write(epoch, step, [str(label) for label in labels.tolist()])
        accelerator.wait_for_everyone()  # a rank with more steps than others would fail, or hang
    torch.save(plain.state_dict(), folder / f"{rank}.pt")
    accelerator.end_training()


def check_accelerated(folder: Path, ranks: int, repeats: int) -> list[list[Batches]]:
    epochs = [epoch_of(logged(folder, ranks), epoch) for epoch in range(EPOCHS)]
    for parts in epochs:
        assert len({len(part) for part in parts}) == 1
        check_each_once(flat(map(flat, parts)), map(str, range(SAMPLES)), repeats)
    assert epochs[0] != epochs[1]
    assert all(torch.equal(weights(folder, rank), weights(folder, 0)) for rank in range(ranks))
    return epochs


@pytest.mark.parametrize(("workers", "batch_size"), [(0, BATCH), (2, BATCH), (2, None)])
def test_accelerate_with_a_loader_that_is_not_prepared(
    store: Path, tmp_path: Path, port: int, workers: int, batch_size: int | None
) -> None:
    launch(train_accelerated, 2, tmp_path, store, port, workers, batch_size, True)
    epochs = check_accelerated(tmp_path, 2, repeats=1)
    if batch_size:
        assert [len(part) for part in epochs[0]] == [-(-SAMPLES // (2 * BATCH))] * 2


@pytest.mark.parametrize(
    ("workers", "batch_size", "options", "repeats"),
    [
        (0, BATCH, {}, 1),  # dispatching fills up the last step, where its size is odd
        (2, BATCH, {}, 1),
        (0, None, {}, 1),
        # Each worker's last batches are filled up. (Dispatching what several workers batched would lose samples.)
        (0, None, {"dispatch_batches": False}, 2 * BATCH - 1),
        (2, None, {"dispatch_batches": False}, 2 * (2 * BATCH - 1)),
    ],
)
def test_accelerate_with_a_loader_that_is_prepared(
    store: Path, tmp_path: Path, port: int, workers: int, batch_size: int | None, options: dict[str, Any],
    repeats: int,
) -> None:  # fmt: skip
    launch(train_accelerated, 2, tmp_path, store, port, workers, batch_size, False, **options)
    check_accelerated(tmp_path, 2, repeats)


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_goes_on_with_a_prepared_loader_that_is_told_the_epoch(
    store: Path, tmp_path: Path, port: int, ranks: int
) -> None:
    begin = 6
    data = ShardDataset(store, batch_size=BATCH, shuffle=True)
    saved = data.state_at(begin, epoch=1)
    data.set_epoch(1)
    left = [[str(label) for label in batch.label.tolist()] for batch in DataLoader(data, batch_size=None)][begin:]
    launch(train_accelerated, ranks, tmp_path, store, port, 2, BATCH, False, saved)
    parts = epoch_of(logged(tmp_path, ranks), 1)
    full = (SAMPLES - begin * BATCH) // (ranks * BATCH)
    assert [part[step] for step in range(full) for part in parts] == left[: full * ranks]
    check_each_once(flat(map(flat, parts)), flat(left), repeats=ranks - 1)


def train_alone(rank: int, ranks: int, folder: Path, store: Path, port: int) -> None:
    accelerator = join_accelerate(rank, ranks, port)
    for batch_size, workers in itertools.product((None, BATCH), (0, 2)):
        data, fresh = (ShardDataset(store, batch_size=batch_size, shuffle=True) for _ in range(2))
        expected = [labels.tolist() for _, labels in plain_loader(fresh, workers)]
        assert sorted(flat(expected)) == [*range(SAMPLES)]
        for loader in (plain_loader(data, workers), accelerator.prepare(plain_loader(data, workers))):
            data.set_epoch(0)
            assert [labels.tolist() for _, labels in loader] == expected
            following = [labels.tolist() for _, labels in loader]
            assert following != expected
            assert sorted(flat(following)) == [*range(SAMPLES)]
    Path(folder, "done").touch()


def test_one_process_of_accelerate_is_refused_nothing(store: Path, tmp_path: Path) -> None:
    launch(train_alone, 1, tmp_path, store, 0)
    assert (tmp_path / "done").exists()


def compare_dispatched(
    rank: int, ranks: int, folder: Path, store: Path, port: int, batch_size: int | None, contiguous: bool
) -> None:
    accelerator = join_accelerate(rank, ranks, port)
    data = ShardDataset(
        store,
        batch_size=batch_size,
        transform=torch.Tensor.contiguous if contiguous else None,
        image_type="tensor",
        options=ReadOptions(rank=0, world_size=1),
    )
    expected = {sample.label: sample.image for sample in shardstore.open(store)}
    pairs = [pair for images, labels in accelerator.prepare(plain_loader(data, 0)) for pair in zip(images, labels)]  # noqa: B905
    wrong = sum(not torch.equal(image, expected[int(label)]) for image, label in pairs)
    Path(folder, f"{rank}.json").write_text(json.dumps([len(pairs), wrong]))


@pytest.mark.parametrize("batch_size", [None, BATCH])
@pytest.mark.parametrize(
    "contiguous",
    [
        True,
        False,  # torch broadcasts the memory of tensors, whatever their strides
    ],
)
def test_accelerate_dispatches_the_pictures_of_the_store(
    store: Path, tmp_path: Path, port: int, contiguous: bool, batch_size: int | None
) -> None:
    launch(compare_dispatched, 2, tmp_path, store, port, batch_size, contiguous)
    counts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert counts == [[(SAMPLES + 1) // 2, 0]] * 2


# -- Lightning --------------------------------------------------------------------------------------------------------

LIGHTNING = """
    import json, sys, time
    from pathlib import Path

    import lightning.pytorch as lightning
    import torch
    from torch import nn
    from torch.utils.data import DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    from shardstore import ShardDataset

    store, folder, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)


    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8 * 8 * 3, 97)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch, step):
            with (folder / f"{self.global_rank}.jsonl").open("a") as log:
                log.write(json.dumps([self.current_epoch, step, batch.key]) + "\\n")
            return nn.functional.cross_entropy(self.layer(batch.image.flatten(1) / 255), batch.label)

        def on_save_checkpoint(self, checkpoint):
            if not settings["stateful"]:
                checkpoint["order"] = data.state_at(self.trainer.fit_loop.batch_idx + 1)

        def on_load_checkpoint(self, checkpoint):
            if not settings["stateful"]:
                data.load_state_dict(checkpoint["order"])

        def on_train_batch_end(self, outputs, batch, step):
            if [self.current_epoch, step] == settings.get("save_at"):
                self.trainer.save_checkpoint(folder / "saved.ckpt")


    if __name__ == "__main__":
        data = ShardDataset(store, fields=["image", "label", "key"], batch_size=4, shuffle=True)

        class Loader(StatefulDataLoader if settings["stateful"] else DataLoader):
            def __iter__(self):
                time.sleep(0.3)  # see settle()
                return super().__iter__()

        loader = Loader(data, batch_size=None, num_workers=settings["workers"])
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=settings["devices"],
            strategy=settings["strategy"],
            max_epochs=2,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(Model(), loader, ckpt_path=settings.get("load"))
"""


def fit(folder: Path, store: Path, **settings: Any) -> None:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(LIGHTNING))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    with subprocess.Popen(
        [sys.executable, str(script), str(store), str(folder), json.dumps(settings)],
        stderr=subprocess.PIPE, text=True, cwd=folder, env=environment | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            _, errors = process.communicate(timeout=WAIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the other ranks and all workers
            raise
    assert process.returncode == 0, errors


def check_fit(ranks: list[list[tuple[int, int, list[str]]]], alone: list[Batches]) -> None:
    full = SAMPLES // (BATCH * len(ranks))
    orders = []
    for epoch, expected in enumerate(alone):
        parts = epoch_of(ranks, epoch)
        assert [len(part) for part in parts] == [-(-SAMPLES // (BATCH * len(ranks)))] * len(ranks)
        check_each_once(flat(map(flat, parts)), flat(expected), len(ranks) - 1)
        orders.append([part[step] for step in range(full) for part in parts])
        assert orders[-1] == expected[: full * len(ranks)]
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    ("devices", "workers", "others", "place", "stateful"),
    [
        (1, 2, 3, (0, 24), False),  # an epoch's last step
        (2, 2, 0, (1, 5), False),
        (2, 1, 1, (1, 5), True),
    ],
)
def test_lightning_trains_on_each_sample_once_and_goes_on(
    store: Path, alone: list[Batches], tmp_path: Path, devices: int, workers: int, others: int, place: tuple[int, int],
    stateful: bool,
) -> None:  # fmt: skip
    settings = {"devices": devices, "strategy": "ddp" if devices > 1 else "auto", "stateful": stateful}
    fit(tmp_path, store, save_at=place, workers=workers, **settings)
    before = logged(tmp_path, devices)
    check_fit(before, alone)
    for rank in range(devices):
        (tmp_path / f"{rank}.jsonl").unlink()
    fit(tmp_path, store, load=str(tmp_path / "saved.ckpt"), workers=others, **settings)
    left = [[step for step in part if step[:2] > place] for part in before]
    assert logged(tmp_path, devices) == left
    assert all(left)
