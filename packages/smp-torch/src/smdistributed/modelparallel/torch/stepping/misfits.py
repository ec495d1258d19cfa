"""Arguments that were cut and may be no batch, when a step fails.

A mask over as many positions as there are examples has the length of the batch, and so has an order
of the examples: by place and length both are a batch. Where they are none, the pieces do not fit
what they are used with. Torch then tells of shapes or an index that the script never had.
"""

from __future__ import annotations

import contextlib
import dis
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from smdistributed.modelparallel.common.microbatch import (
    SplitRules,
    argument_of,
    split_sizes,
    tensors_to_cut,
)
from smdistributed.modelparallel.torch.collectives.shapes import is_fake
from smdistributed.modelparallel.torch.execute.bodies import Call
from smdistributed.modelparallel.torch.runtime.tensors import TENSORS

#: As what torch says that tensors do not fit.
_OF_SHAPES = (RuntimeError, ValueError)
#: With the end of its name: other packages begin with it.
_TORCH = str(Path(torch.__file__).parent) + os.sep


@contextlib.contextmanager
def misfits_named(rules: SplitRules, count: int, call: Callable[[], Call]) -> Iterator[None]:
    """Inside, microbatches run; an error of torch is noted which arguments may be the reason.

    It stays the error that it is: it may have another reason.

    Args:
        rules: which arguments are split.
        count: of microbatches.
        call: gives the arguments of the step, with the shapes of the first rank.
    """
    try:
        yield
    except (*_OF_SHAPES, IndexError) as error:
        is_theirs = type(error) in (*_OF_SHAPES, IndexError) and _is_of_torch(error)
        if count > 1 and is_theirs and (why := _why(error, rules, count, call())):
            error.add_note(why)
        raise


def _is_of_torch(error: Exception) -> bool:
    """Whether torch has raised an error: what a script raises means what it says."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    # A function in C has no frame, and its caller was at the call.
    is_raised_here = "RAISE" in dis.opname[code.co_code[trace.tb_lasti]]
    return not is_raised_here or code.co_filename.startswith(_TORCH)


def _why(error: Exception, rules: SplitRules, count: int, call: Call) -> str:
    """Returns which arguments may be no batch, and what to do; empty without any."""
    is_index = isinstance(error, IndexError)
    found = {
        label: tensor
        for label, (tensor, axis) in tensors_to_cut(TENSORS, rules, *call).items()
        if (
            _may_index(tensor, split_sizes(tensor.shape[axis], count)[0])
            if is_index
            else list(tensor.shape).count(tensor.shape[axis]) > 1
        )
    }
    if not found:
        return ""
    listed = " and ".join(f"{label} of shape {tuple(each.shape)}" for label, each in found.items())
    names = " or ".join(dict.fromkeys(map(argument_of, found)))
    if is_index:
        return (
            f"The step's argument {listed} was cut into {count} microbatches, and so was what it "
            "indexes, if its numbers index the whole batch (an order of the examples, say): index "
            "before the step, and give it the result; or, if what it indexes stays whole, name "
            f"{names}, too, in non_split_inputs."
        )
    return (
        f"The step's argument {listed} was cut into {count} microbatches, and has another axis as "
        "long as the batch: if it has no entry for each example (a mask of positions by "
        f"positions, say), name {names} in non_split_inputs, so that every microbatch gets it "
        "whole."
    )


def _may_index(tensor: torch.Tensor, size: int) -> bool:
    """Whether a tensor has numbers that may index the batch, and not each microbatch."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        return False
    # Numbers of a device are not asked for: it may have failed.
    if is_fake(tensor) or tensor.device.type != "cpu" or not tensor.numel():
        return True
    return bool((tensor >= size).any())
