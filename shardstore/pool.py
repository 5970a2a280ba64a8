"""Tasks on any ``concurrent.futures`` executor, a bounded number at a time. We own no queue and no adapter."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TypeVar

from shardstore.errors import Problem, ShardstoreError

Progress = Callable[[int, int], None]  # called with (samples done, samples in all)
_LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM)
_T = TypeVar("_T")
_R = TypeVar("_R")


class Pool:
    """Runs tasks on an executor, a bounded number at a time; with one worker, here."""

    def __init__(self, workers: int | None, executor: Executor | None) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = workers or cores
        self._given = executor
        self._own: Executor | None = None
        self._end: Connection | None = None

    def __enter__(self) -> Pool:
        if self._given is None and self.workers > 1:
            try:
                ended, self._end = multiprocessing.Pipe(duplex=False)
                self._own = ProcessPoolExecutor(self.workers, initializer=_begin_worker, initargs=(ended,))
            except (OSError, ImportError) as error:  # ImportError: a system without semaphores
                raise _no_worker(error) from error
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(at_once=kind is not None)

    def close(self, at_once: bool = False) -> None:
        """End the processes that are this pool's own: with their tasks done, or in the middle of them."""
        if self._own is not None:
            if at_once and self._end is not None:
                self._end.send_bytes(b"end")  # nobody reads it: all see that there is something to read
                self._end = None
            self._own.shutdown(cancel_futures=True)

    def run(self, function: Callable[[_T], _R], tasks: Iterable[_T]) -> Iterator[_R]:
        """Results as they come, in any order."""
        executor = self._given or self._own
        if executor is None:
            yield from map(function, tasks)
            return
        waiting: set[Future[_R]] = set()
        try:
            for task in tasks:
                waiting.add(self._submit(executor, function, task))
                if len(waiting) >= 2 * self.workers:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        except BrokenExecutor as error:
            hint = "It may have run out of memory: try fewer --workers, then run the command again."
            raise ShardstoreError(Problem("a worker process died", hint=hint)) from error
        finally:
            running = [future for future in waiting if not future.cancel()]
            if self._own is None:  # it cannot be ended, and nobody may write into a folder that is given up
                wait(running)

    def _submit(self, executor: Executor, function: Callable[[_T], _R], task: _T) -> Future[_R]:
        if executor is not self._own:
            return executor.submit(function, task)
        # It may start processes. Signals wait until these know that they leave them to the parent.
        try:
            with _signals_held():
                return executor.submit(function, task)
        except BrokenExecutor:
            raise
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread could be started
            raise _no_worker(error) from error


@contextmanager
def _signals_held() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _no_worker(error: Exception) -> ShardstoreError:
    hint = "--workers 1 needs none. Otherwise see to memory, /dev/shm, and the limits on processes and open files."
    return ShardstoreError(Problem(f"no worker process could be started: {error}", hint=hint))


def ahead(function: Callable[[_T], _R], tasks: Iterable[_T], threads: int) -> Iterator[_R]:
    """Results in the order of the tasks, worked out by threads of this process, two tasks ahead for each. A failed task
    raises at its turn; when the iterator is closed, the threads end with the tasks that they are at."""
    executor = ThreadPoolExecutor(threads, "shardstore")
    waiting: deque[Future[_R]] = deque()
    try:
        for task in tasks:
            waiting.append(executor.submit(function, task))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)


def _begin_worker(ended: Connection) -> None:
    """Leave signals, which may go to all processes of a terminal or job, to the parent; and end when the parent is
    gone, or says so."""
    for number in _LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_PARENT)
    threading.Thread(target=_end_with_parent, args=(ended,), daemon=True).start()


def _end_with_parent(ended: Connection) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel, ended])
        os._exit(1)  # what is half written lies in the .partial folder, for the next run to write anew
