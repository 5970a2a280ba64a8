"""Which of how many training processes this is, and what Hugging Face Accelerate makes of their batches."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import distributed

from shardstore.errors import OptionError, Problem
from shardstore.options import ReadOptions


def process_group() -> tuple[int, int] | None:
    """Rank and number of ranks of ``torch.distributed``; None where it is not initialised."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None


def _accelerate_processes() -> int:
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is None or not accelerate.PartialState._shared_state:
        return 1
    return int(accelerate.PartialState().num_processes)


def refuse_accelerate(options: ReadOptions) -> None:
    """Raise OptionError where Accelerate runs several processes and no rank is given: its ``prepare`` shares out what a
    loader gives, which holds only this rank's part already."""
    if options.rank is None and _accelerate_processes() > 1:
        raise OptionError(
            Problem(
                "under Accelerate, both it and ShardDataset would share out the samples, and each process would get a "
                "part of a part",
                hint="Say who does. With a loader that is not given to prepare(), the faster way: "
                "ReadOptions(rank=accelerator.process_index, world_size=accelerator.num_processes). With a loader that "
                "is: ReadOptions(rank=0, world_size=1), DataLoaderConfiguration(dispatch_batches=False), and a "
                "DataLoader that makes the batches.",
            )
        )


def is_dispatched(options: ReadOptions) -> bool:
    """Whether Accelerate may send what is read here to other processes: it broadcasts the memory of tensors, whatever
    their strides, so that channels_last pictures would arrive scrambled."""
    return options.world_size == 1 and _accelerate_processes() > 1


def contiguous(sample: Any) -> Any:
    """The sample or batch with all of its tensors in contiguous memory."""
    values = (value.contiguous() if isinstance(value, torch.Tensor) else value for value in sample)
    return type(sample)(*values)
