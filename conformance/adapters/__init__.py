"""What cases need of a framework, and nothing more."""

from __future__ import annotations

import functools
import importlib

from conformance.adapters.base import Adapter

_MODULES = {
    framework: f"smdistributed.modelparallel.{framework}" for framework in ("torch", "tensorflow")
}


def missing(framework: str) -> str:
    """Returns why nothing of a framework's package can be tried; empty if it can."""
    try:
        package = importlib.import_module(_MODULES[framework])
    except ModuleNotFoundError as error:
        raise SystemExit(f"the package for {framework} is not installed here ({error}).") from None
    if hasattr(package, "step"):
        return ""
    return f"{_MODULES[framework]} has no engine yet"


@functools.cache
def adapter_of(framework: str) -> Adapter:
    """Returns the adapter of a framework, the same one at each call."""
    module = importlib.import_module(f"conformance.adapters.{framework}")
    adapter: Adapter = module.make()
    return adapter
