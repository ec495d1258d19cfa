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


def _two_copies(body: Callable[[], str]) -> str:
    """Returns what a body says in the first of two copies of one process, which imports once."""
    preload = ("smdistributed.modelparallel.torch",)
    said: str = run_ranks(2, body, launcher="fork", timeout=60, preload=preload).results[0]
    return said


_PROBES: dict[str, Probe] = {
    "config.offload_activations": _started(offload_activations=True),
    "config.C09": _started(offload_activations=True),
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
