"""Where a pass over a store stands: a few integers, enough to go on from there. Knows no torch.

A position names the store, what the order depends on, the epoch, and the batch that the pass began at; and, for the
worker that saved it, how much it has taken since. With ``taken`` 0 it holds for any number of ranks and workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from shardstore.errors import OptionError, Problem
from shardstore.order import derive

# What the order depends on; seed is None without shuffle.
_SAME = ("fingerprint", "seed", "batch_size", "window", "block")
_LIMIT = 1 << 62
_NO_STATE = "this is no state of a ShardDataset"


@dataclass(frozen=True)
class Position:
    """A place in a pass.

    Attributes:
        fingerprint: of the store's content.
        seed: None without shuffle.
        batch_size: None where the DataLoader makes the batches.
        window, block: samples that are mixed together, and that are read together; see
            :class:`shardstore.order.Order`.
        epoch: from 0.
        batch: of the epoch, where the pass began.
        taken: batches since then, by the worker that this is the position of; without ``batch_size``, samples.
        workers, ranks: among how many the pass was shared; of no account while nothing is taken.
    """

    fingerprint: str
    seed: int | None
    batch_size: int | None
    window: int
    block: int
    epoch: int
    batch: int
    taken: int = 0
    workers: int = 1
    ranks: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(state: Mapping[str, Any]) -> Position:
        """Raise OptionError for what is no state."""
        try:
            position = Position(**state)
        except TypeError as error:
            raise OptionError(f"{_NO_STATE}: {state!r:.200}") from error
        for field in fields(position):
            value = getattr(position, field.name)
            right = str if field.name == "fingerprint" else int
            if not (isinstance(value, right) or (value is None and field.name in ("seed", "batch_size"))):
                raise OptionError(Problem(_NO_STATE, expected=f"{right.__name__} as {field.name}", got=repr(value)))
            if isinstance(value, int) and field.name != "seed" and not 0 <= value < _LIMIT:
                raise OptionError(Problem(_NO_STATE, expected=f"{field.name} in 0 .. 2**62", got=repr(value)))
        return position

    def check_same_order(self, here: Position) -> None:
        """Raise OptionError unless ``here`` is of a pass in the same order."""
        differ = [name for name in _SAME if getattr(self, name) != getattr(here, name)]
        if differ:
            raise OptionError(
                Problem(
                    f"the state belongs to another order: {', '.join(differ)} differ",
                    expected=", ".join(f"{name} {getattr(self, name)}" for name in differ),
                    got=", ".join(f"{name} {getattr(here, name)}" for name in differ),
                    hint="Make the data set as it was when the state was saved; seed is None without shuffle, "
                    "window and block follow from the fields and window_bytes. Or begin anew without the state.",
                )
            )

    def check_same_share(self, workers: int, ranks: int) -> None:
        """Raise OptionError where this worker's position does not say where another number of them stands."""
        if self.taken and (self.workers, self.ranks) != (workers, ranks):
            way = "Rewrite it first, rank 0's for all: shardstore.change_workers(state, num_workers)."
            if self.batch_size is None:
                way = (
                    "Where the DataLoader makes the batches, a state holds for these numbers alone: "
                    "keep them, or give ShardDataset a batch_size."
                )
            raise OptionError(
                Problem(
                    "the state was saved with other numbers of workers or ranks",
                    expected=f"{self.workers} workers, {self.ranks} ranks",
                    got=f"{workers} workers, {ranks} ranks",
                    hint=way,
                )
            )

    def moved(self, taken: int) -> Position:
        """The same place for any number of ranks and workers, after ``taken`` batches of all workers of this rank."""
        return replace(self, batch=self.batch + taken * self.ranks, taken=0, workers=1, ranks=1)


def change_workers(state: Mapping[str, Any], num_workers: int) -> dict[str, Any]:
    """Rewrite the state of a torchdata StatefulDataLoader over a :class:`ShardDataset` for another number of workers.

    torchdata refuses a state that was saved with another number of workers before it asks the data set. The rewritten
    state also holds for another number of ranks: give the one of rank 0 to all of them.

    Args:
        state: what ``StatefulDataLoader.state_dict()`` returned (torchdata 0.11; it must have ``batch_size=None``,
            and the data set a ``batch_size``, unless the epoch was at its end).
        num_workers: of the loader that will load it; 0 for none.

    Returns:
        A new state for ``StatefulDataLoader.load_state_dict``. A state at the end of an epoch starts the next.

    Raises:
        OptionError: it is no such state, or one of a pass whose batches the DataLoader makes.
    """
    if num_workers < 0:
        raise OptionError(f"num_workers must be 0 or more; got {num_workers}")
    try:
        position, yielded, finished = _parse(state)
    except (KeyError, TypeError, AttributeError, IndexError, OptionError) as error:
        raise OptionError(f"this is no state of a StatefulDataLoader over a ShardDataset: {state!r:.200}") from error
    if finished:
        position, yielded = replace(position.moved(0), epoch=position.epoch + 1, batch=0), 0
    elif position.taken and position.batch_size is None:
        position.check_same_share(-1, position.ranks)
    else:
        position = position.moved(position.taken)
    return _build(position, yielded, num_workers)


def _parse(state: Mapping[str, Any]) -> tuple[Position, int, bool]:
    """The position with all that the workers took together, how many batches the loader gave, whether it had ended."""
    finished = bool(state["_iterator_finished"])
    if "_snapshot" not in state:
        return Position.from_dict(state["dataset_state"]), int(state["_num_yielded"]), finished
    snapshot, since = state["_snapshot"], int(state["_steps_since_snapshot"])
    workers = [Position.from_dict(w["dataset_state"]) for w in snapshot["_worker_snapshots"].values()]
    together = replace(workers[0], taken=sum(w.taken for w in workers) + since)
    return together, int(snapshot["_snapshot_step"]) + since, finished


def _build(position: Position, yielded: int, num_workers: int) -> dict[str, Any]:
    main: dict[str, Any] = {
        "_sampler_iter_state": None,
        "_index_sampler_state": None,
        "_sampler_iter_yielded": yielded,
        "_IterableDataset_len_called": None,
        "_shared_seed": None,
    }
    fetcher = {"dataset_iter_state": None, "fetcher_ended": False}
    if num_workers == 0:
        single = {"_num_yielded": yielded, "dataset_state": position.to_dict(), "fetcher_state": fetcher}
        return {**main, **single, "_iterator_finished": False}
    # Of the workers' random numbers, which a transform may use: any will do that differ from place to place.
    main |= {"_num_workers": num_workers, "_base_seed": derive(position.epoch, position.batch) >> 2}
    worker = {"dataset_state": position.to_dict(), "fetcher_state": fetcher}
    snapshot = {
        "_snapshot_step": yielded,
        "_last_yielded_worker_id": num_workers - 1,
        "_main_snapshot": main,
        "_worker_snapshots": {f"worker_{i}": {"worker_id": i, **worker} for i in range(num_workers)},
    }
    return {"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": False}
