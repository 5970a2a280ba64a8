"""Samples become a batch: each value goes to its place as soon as it is there, so that no batch is held twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import default_collate

from shardstore.errors import Problem, StackError
from shardstore.loading.memory import Block


class Stack:
    """The values of one field of a batch: tensors of one shape as one tensor (pictures in channels_last memory), all
    else as torch's ``default_collate`` has it.

    Args:
        name: of the field.
        count: how many values will come.
        block: memory for the tensor.
    """

    def __init__(self, name: str, count: int, block: Block) -> None:
        self._name, self._count, self._block = name, count, block
        self._out: torch.Tensor | None = None  # filled up to ``self._filled``
        self._filled = 0
        self._others: list[Any] = []  # values that no tensor of ours can hold, and all that came after one of these

    def add(self, value: Any, key: str | None) -> None:
        """Put the next value to its place.

        Raises:
            StackError: it is a tensor of another shape than the first; ``key`` says of which sample.
        """
        if isinstance(value, torch.Tensor):
            first = self._out[0] if self._out is not None else self._others[0] if self._others else value
            if isinstance(first, torch.Tensor) and value.shape != first.shape:
                raise cannot_stack(self._name, (first.shape, value.shape), key)
        if self._others or not self._holds(value):
            self._others.append(value)
            return
        assert self._out is not None
        self._out[self._filled].copy_(value)
        self._filled += 1

    def _holds(self, value: Any) -> bool:
        if type(value) is not torch.Tensor or value.requires_grad or value.device.type != "cpu":
            return False
        if self._out is None:
            self._out = self._empty(value)
        return self._out is not None and value.dtype == self._out.dtype

    def _empty(self, like: torch.Tensor) -> torch.Tensor | None:
        try:
            dtype = torch.empty(0, dtype=like.dtype).numpy().dtype
        except TypeError:  # bfloat16 and its like
            return None
        is_picture = like.ndim == 3 and not like.is_contiguous() and like.permute(1, 2, 0).is_contiguous()
        shape = like.permute(1, 2, 0).shape if is_picture else like.shape
        out = torch.from_numpy(self._block.empty((self._count, *shape), dtype))
        return out.permute(0, 3, 1, 2) if is_picture else out

    def result(self) -> Any:
        """All values as one."""
        if self._out is not None and not self._others:
            return self._out
        placed = list(self._out[: self._filled]) if self._out is not None else []
        return default_collate(placed + self._others)


def cannot_stack(field: str, shapes: tuple[Any, Any], key: str | None) -> StackError:
    """The error for samples of different shapes."""
    what = Problem("samples of different shapes cannot be stacked into a batch", field=field, key=key)
    hint = "Give a transform that brings pictures to one size, or convert with --size."
    return StackError(replace(what, expected=f"{tuple(shapes[0])}", got=f"{tuple(shapes[1])}", hint=hint))
