"""How well an epoch is mixed: classes in a batch, and batch mates that meet again in the next epoch.

    python benchmarks/shuffle_quality.py [--samples 100000] [--classes 100] [--batch-size 64] [--epochs 4]

Arithmetic only, no files. Rows: a store converted as it lies, sorted by class; the same converted with ``--shuffle``;
the same two compressed, with chunks and windows of 8 samples; a full permutation; and MosaicML's py1e with blocks of
16,384 samples, over both, if ``streaming`` is installed.

- classes: distinct classes in a batch, mean
- mates: of the samples that share a batch with a sample, how many shared one in the epoch before, in percent
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import numpy as np

from shardstore.order import Order, Share

SHARD_SAMPLES = 256

Epoch = Callable[[int], np.ndarray]  # epoch -> sample numbers in order


def ours(samples: int, m: int, chunk: int = 0) -> Epoch:
    def epoch(number: int) -> np.ndarray:
        order = Order(samples, SHARD_SAMPLES, 1, number, chunk, chunk or 1)
        return np.concatenate(list(order.steps(range(order.step_count(m, Share())), m, Share())))

    return epoch


def permutation(samples: int) -> Epoch:
    return lambda number: np.random.default_rng(number).permutation(samples)


def py1e(samples: int) -> Epoch:
    from streaming.base.shuffle import get_shuffle

    sizes = np.diff(np.append(np.arange(0, samples, SHARD_SAMPLES), samples))
    return lambda number: get_shuffle("py1e", sizes, 1, 9176, number, 1 << 14)


def batches(numbers: np.ndarray, m: int) -> Iterator[np.ndarray]:
    return (numbers[i : i + m] for i in range(0, len(numbers) - m + 1, m))


def measure(epoch: Epoch, labels: np.ndarray, m: int, epochs: int) -> tuple[float, float]:
    classes, again, before = [], [], np.full(len(labels), -1)
    for number in range(epochs):
        here = np.full(len(labels), -1)
        for q, batch in enumerate(batches(epoch(number), m)):
            classes.append(len(np.unique(labels[batch])))
            here[batch] = q
            if number:
                old = before[batch]
                _, counts = np.unique(old[old >= 0], return_counts=True)
                again.append((counts * (counts - 1)).sum() / (m * (m - 1)))
        before = here
    return float(np.mean(classes)), 100 * float(np.mean(again))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    given = parser.parse_args()
    n, m = given.samples, given.batch_size
    as_they_lie = np.arange(n) * given.classes // n
    mixed = np.random.default_rng(0).permutation(as_they_lie)
    rows = [
        ("sorted store", ours(n, m), as_they_lie),
        ("store converted with --shuffle", ours(n, m), mixed),
        ("sorted store, zstd", ours(n, m, 8), as_they_lie),
        ("store converted with --shuffle, zstd", ours(n, m, 8), mixed),
        ("full permutation", permutation(n), as_they_lie),
    ]
    try:
        rows += [("MDS py1e, sorted", py1e(n), as_they_lie), ("MDS py1e, shuffled before", py1e(n), mixed)]
        rows[-1][1](0)
    except ImportError:
        rows = rows[:5]
    print(f"{'':38} classes   mates %")
    for name, epoch, labels in rows:
        classes, again = measure(epoch, labels, m, given.epochs)
        print(f"{name:38} {classes:7.1f} {again:9.2f}")


if __name__ == "__main__":
    main()
