"""The most recently used objects."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any


class Cache:
    """Objects with an ``nbytes``, up to a number of bytes (always at least one). Threads may share it."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._lock = threading.Lock()
        self._items: OrderedDict[tuple[str | int, ...], Any] = OrderedDict()

    def get(self, key: tuple[str | int, ...]) -> Any:
        """The object of this key, or None."""
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
            return self._items.get(key)

    def put(self, key: tuple[str | int, ...], item: Any) -> None:
        """Keep an object, and let go of those that were not asked for longest."""
        with self._lock:
            if key not in self._items:
                self._items[key] = item
                self.used += item.nbytes
            while self.used > self.limit and len(self._items) > 1:
                self.used -= self._items.popitem(last=False)[1].nbytes
