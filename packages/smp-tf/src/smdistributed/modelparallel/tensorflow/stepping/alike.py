"""Whether the processes of a pipeline are given the same batches.

The first process has the examples and the last one their labels, so a batch that differs trains
on examples with the labels of others. Looking at all of a batch would take time, and what a batch
was computed from may differ by rounding; a sample at fixed places tells other examples.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed.modelparallel.common.errors import PartitionError
from smdistributed.modelparallel.common.microbatch import SplitRules
from smdistributed.modelparallel.tensorflow.compat import graphs
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted
from smdistributed.modelparallel.tensorflow.parameters.owners import owner_of
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime

#: Numbers of all tensors together. Of one length in all processes, whatever they are given.
_NUM_SAMPLED = 256
#: Of the largest number of a sample, by which floating-point numbers may differ.
_TOLERANCE = 1e-2
#: Spread evenly over all lengths, and no multiple of a row.
_GOLDEN = (5**0.5 - 1) / 2
_BUCKETS = 1 << 31
_RULE = "all processes of a pipeline must have the same batches, in one order"
_REMEDY = (
    "shuffle with a seed, and let data depend on smp.dp_rank() alone, which is the same on all "
    "ranks of a pipeline."
)
_DIFFERENT = re.compile(f"{_RULE}.*{re.escape(_REMEDY)}")


def alike(
    runtime: TFRuntime, name: str, rules: SplitRules, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Adds a comparison of the batch with that of the first process to the present graph.

    Collective: every process of a pipeline.

    Args:
        runtime: of this process.
        name: of the step function.
        rules: that know the names of its arguments.
        args: by place.
        kwargs: by name.

    Returns:
        operations that fail where the batches differ. What waits for other processes is to wait
        for them, see ``Links.begin_after``.
    """
    ranks, links = runtime.pipeline_ranks, runtime.links
    named = _named(rules.signature.bind(*args, **kwargs).arguments)[:_NUM_SAMPLED]
    if len(ranks) == 1 or not named:
        return []
    share = _NUM_SAMPLED // len(named)
    with unnoted(), tf.name_scope("batch"):
        samples = [_sampled(tensor, share) for _, tensor in named]
        flat = tf.pad(tf.concat(samples, 0), [[0, _NUM_SAMPLED - share * len(named)]])
        # As integers, which stay in the memory of the host.
        carried = tf.bitcast(flat, tf.int64)
        keys = {rank: (links.new_key(carried), links.new_key(carried)) for rank in ranks[1:]}
        others, transfers = {}, []
        for rank in ranks[1:] if runtime.rank == ranks[0] else ranks[:1]:
            there, back = keys[max(rank, runtime.rank)][:: 1 if rank > runtime.rank else -1]
            transfers += links.send(carried, rank, there)
            received, operation = links.receive(carried, rank, back)
            transfers.append(operation)
            others[rank] = tf.bitcast(received, tf.float64)[: share * len(named)]
        graphs.keep(tf.compat.v1.get_default_graph(), transfers)
        # A check that fails ends what is under way, also what others need to see it themselves.
        with tf.control_dependencies(transfers):
            return [
                tf.debugging.Assert(
                    _is_close(own, other, 0.0 if _is_exact(tensor) else _TOLERANCE),
                    [_message(name, argument, sorted((rank, runtime.rank)))],
                )
                for rank, every in others.items()
                for (argument, tensor), own, other in zip(
                    named, samples, tf.split(every, len(named)), strict=True
                )
            ]


def explained(error: BaseException) -> PartitionError | None:
    """Returns what an error of TensorFlow says of batches that differ; None if it says nothing."""
    found = isinstance(error, tf.errors.InvalidArgumentError) and _DIFFERENT.search(str(error))
    return PartitionError(found[0]) if found else None


def _message(name: str, argument: str, ranks: Sequence[int]) -> str:
    first, other = ranks
    return (
        f"{_RULE}; {argument} of {name} has other numbers on rank {other} than on rank {first}: "
        f"{_REMEDY}"
    )


def _named(arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns the tensors among arguments that all processes have, with the names of these."""
    return [
        (name, tf.convert_to_tensor(leaf))
        for name, value in arguments.items()
        for leaf in tf.nest.flatten(value, expand_composites=True)
        if (tf.is_tensor(leaf) or isinstance(leaf, np.ndarray))
        and not isinstance(leaf, tf.Variable)
        and owner_of(leaf) is None
        and _has_numbers(tf.as_dtype(leaf.dtype))
    ]


def _has_numbers(dtype: Any) -> bool:
    return bool(
        dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype in (tf.bool, tf.string)
    )


def _is_exact(tensor: Any) -> bool:
    return not (tensor.dtype.is_floating or tensor.dtype.is_complex)


def _sampled(tensor: Any, count: int) -> Any:
    """Returns numbers at fixed places of a tensor.

    Shape: (count,), float64. What is empty gives zeros.
    """
    flat = tf.reshape(tensor, [-1])
    size = tf.size(flat, tf.int64)
    parts = np.arange(1, count + 1) * _GOLDEN % 1
    places = tf.cast(parts * tf.cast(size, tf.float64), tf.int64)[: size * count]
    sample = tf.gather(flat, places)
    if sample.dtype == tf.string:
        sample = tf.strings.to_hash_bucket_fast(sample, _BUCKETS)
    elif sample.dtype.is_complex:
        sample = tf.math.real(sample)
    sample = tf.cast(sample, tf.float64)
    return tf.reshape(tf.pad(sample, [[0, count - tf.size(sample)]]), [count])


def _is_close(own: Any, other: Any, tolerance: float) -> Any:
    # Alike in both processes, so that both fail or neither does.
    sizes = tf.abs(tf.stack([own, other]))
    most = tolerance * tf.reduce_max(tf.where(tf.math.is_finite(sizes), sizes, 0.0))
    is_close = (own == other) | (tf.abs(own - other) <= most)
    return tf.reduce_all(is_close | (tf.math.is_nan(own) & tf.math.is_nan(other)))
