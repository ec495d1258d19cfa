"""What version 2 of the library is configured by, as parameters of this one.

The service's SDK has them in its class ``SMP``. Version 2 knows no pipelines and no microbatches,
which come from beside it, and always has replicas.

Source: the public signature of the SDK's ``SMP``; model-parallel-sm-sdk.md, Configuration
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.common.config.schema import unknown_key
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError

#: Name there -> name here.
_SAME = {
    "tensor_parallel_degree": "tensor_parallel_degree",
    "context_parallel_degree": "context_parallel_degree",
    "expert_parallel_degree": "expert_parallel_degree",
    "hybrid_shard_degree": "sharded_data_parallel_degree",
    "sm_activation_offloading": "offload_activations",
    "activation_loading_horizon": "activation_loading_horizon",
}
#: Without a counterpart: the value that asks for nothing, and the way out of others.
_ABSENT: Mapping[str, tuple[Any, str]] = {
    "allow_empty_shards": (False, "parameters that do not divide are sharded as they are"),
    "fsdp_cache_flush_warnings": (False, "leave it out"),
    "random_seed": (None, "call torch.manual_seed in the script"),
}


def of_version_2(given: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of this library.

    Args:
        given: those of version 2; None is not set.
        beside: more of this library, by its own names.

    Raises:
        ConfigError: a name is unknown, or two of them say different things.
        UnsupportedError: one has no counterpart.
    """
    settled: dict[str, Any] = {"ddp": True, **beside}
    for name, value in given.items():
        if value is None:
            continue
        if name in _ABSENT:
            nothing, way_out = _ABSENT[name]
            if value != nothing:
                raise UnsupportedError(f"SMP.{name}={value!r} is not offered: {way_out}.")
        elif name in _SAME:
            own = _SAME[name]
            if settled.setdefault(own, value) != value:
                raise ConfigError(
                    f"SMP.{name} and {own} are one parameter; got {value!r} and "
                    f"{settled[own]!r}: keep one."
                )
        else:
            raise ConfigError(unknown_key(name, (*_SAME, *_ABSENT), "SMP."))
    return settled
