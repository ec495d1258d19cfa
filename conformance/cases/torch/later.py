"""PyTorch: rows whose feature is not there yet, each with the call that asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.registry import Body, Case, add

Probe = Callable[[Any], object]


def _started(**parameters: Any) -> Probe:
    def probe(adapter: Any) -> object:
        return adapter.smp.init({"pipeline_parallel_degree": 1, **parameters})

    return probe


_PROBES: dict[str, Probe] = {
    "config.offload_activations": _started(offload_activations=True),
    "config.C09": _started(offload_activations=True),
}


def _asked(probe: Probe) -> Body:
    def body(adapter: Any) -> None:
        probe(adapter)

    return body


for _row, _probe in _PROBES.items():
    add(Case(f"later_{_row}", (_row,), ("new",), ("torch",), _asked(_probe), is_built=False))
