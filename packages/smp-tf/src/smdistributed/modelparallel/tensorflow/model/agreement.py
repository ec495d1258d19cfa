"""What the processes of a pipeline must have alike: what a model is given, and its operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smdistributed.modelparallel.common.errors import CommError, PartitionError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime


def agree(runtime: TFRuntime, name: str, tensors: Sequence[Any], digest: str) -> None:
    """Raises unless all processes make the same graph of a call of a model. Collective: pipeline.

    Args:
        runtime: of this process.
        name: of the model.
        tensors: that it is given, of one microbatch.
        digest: of the operations and their partitions.

    Raises:
        PartitionError: they differ in what the model is given, or in its operations.
        CommError: another process does not make a graph.
    """
    own = ", ".join(f"{each.shape} {each.dtype.name}" for each in tensors) or "nothing"
    try:
        every = runtime.communicator.allgather((own, digest), CommGroup.PP_GROUP)
    except CommError as error:
        raise CommError(
            f"{error} This one makes the graph of {name} for microbatches of {own}; a rank whose "
            "batch has another shape, of which it has a graph, does not: give all ranks of a "
            "pipeline the same batches, in one order.",
            rank=error.rank,
            missing_ranks=error.missing_ranks,
        ) from error
    if len(set(every)) == 1:
        return
    ranks = runtime.pipeline_ranks
    place, (given, _) = next((n, each) for n, each in enumerate(every) if each != every[0])
    first, other = ranks[0], ranks[place]
    if given != every[0][0]:
        raise PartitionError(
            f"all processes of a pipeline must have the same batches; {name} is given microbatches "
            f"of {every[0][0]} on rank {first}, of {given} on rank {other}: let data depend on "
            "smp.dp_rank() alone, which is the same on all ranks of a pipeline."
        )
    differ = [rank for rank, each in zip(ranks, every, strict=True) if each != every[0]]
    raise PartitionError(
        "all processes of a pipeline must build the same model; the operations of "
        f"{name} differ between rank {first} and rank {', '.join(map(str, differ))}: make the "
        "model independent of the rank."
    )
