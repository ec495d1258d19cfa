"""PyTorch: rows whose feature is not there yet, each with the call that asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.registry import Body, Case, add, later
from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.testing import run_ranks

Probe = Callable[[Any], object]


def _started(**parameters: Any) -> Probe:
    def probe(adapter: Any) -> object:
        return adapter.smp.init({"pipeline_parallel_degree": 1, **parameters})

    return probe


def _made(path: str, *args: Any) -> Probe:
    """Calls what a name stands for."""

    def probe(adapter: Any) -> object:
        import importlib

        adapter.smp.init({"pipeline_parallel_degree": 1})
        module, _, name = f"{adapter.smp.__name__}.{path}".rpartition(".")
        return getattr(importlib.import_module(module), name)(*args)

    return probe


def _clipped(adapter: Any) -> object:
    import torch

    adapter.smp.init({"pipeline_parallel_degree": 1})
    optimizer = torch.optim.SGD(adapter.net().parameters(), lr=0.1)
    return adapter.smp.DistributedOptimizer(optimizer).clip_master_grads(1.0)


def _two_copies(body: Callable[[], str]) -> str:
    """Returns what a body says in the first of two copies of one process, which imports once."""
    preload = ("smdistributed.modelparallel.torch",)
    said: str = run_ranks(2, body, launcher="fork", timeout=60, preload=preload).results[0]
    return said


_PROBES: dict[str, Probe] = {
    "config.fp16": _started(fp16=True),
    "config.fp16_params": _started(fp16_params=True),
    "config.bf16": _started(bf16=True),
    "config.shard_optimizer_state": _started(ddp=True, shard_optimizer_state=True),
    "config.offload_activations": _started(offload_activations=True),
    "config.C09": _started(offload_activations=True),
    "torch.state_sharding": _started(ddp=True, shard_optimizer_state=True),
    "FP16_Module": _started(fp16=True),
    "FP16_Optimizer": _started(fp16=True),
    "compat.clip_master_grads_and_overflow": _started(fp16=True),
    "smp.DistributedOptimizer.clip_master_grads": _clipped,
    "torch.in_use.get_full_state_dict_from_sharded_data_parallel_checkpoint": _made(
        "sharded_data_parallel_checkpoint."
        "get_full_state_dict_from_sharded_data_parallel_checkpoint",
        "folder",
    ),
}


def _asked(probe: Probe) -> Body:
    def body(adapter: Any) -> None:
        probe(adapter)

    return body


def make_shards() -> str:
    """Asks for sharded data parallelism, on two ranks; returns what was said against it."""
    import smdistributed.modelparallel.torch as smp

    try:
        smp.init({"ddp": True, "sharded_data_parallel_degree": 2})
    except UnsupportedError as error:
        return str(error)
    return ""


def _shards(adapter: Any) -> None:
    if said := _two_copies(make_shards):
        raise UnsupportedError(said)


later(
    "torch.sharded_data_parallel",
    "ranks.sharding_groups",
    "compat.sharded_parameter_attributes",
)(_shards)
for _row, _probe in _PROBES.items():
    add(Case(f"later_{_row}", (_row,), ("new",), ("torch",), _asked(_probe), is_built=False))
