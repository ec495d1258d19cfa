"""Runs when a Python starts that finds this folder on its path: programs below the interface.

The service's SDK asks one address past every setting: who the caller is, at a host of the cloud.
Here the question goes where ``AWS_ENDPOINT_URL`` says, as botocore's own do. No file of the SDK is
changed, and nothing but that function. Needs the standard library alone: any Python may find it.
"""

import importlib.machinery
import importlib.util
import os
import sys

_MODULE = "sagemaker.utils"
_FUNCTION = "sts_regional_endpoint"
_HERE = os.path.dirname(os.path.abspath(__file__))


class _Finder:
    """Finds the one module, and changes its function as soon as there is one."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                run(module)
                asked = getattr(module, _FUNCTION, None)
                if asked is not None:
                    setattr(module, _FUNCTION, lambda region: _endpoint() or asked(region))

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _endpoint() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_STS") or os.environ.get("AWS_ENDPOINT_URL")


sys.meta_path.insert(0, _Finder)

# One that this one stands before.
_others = [place for place in sys.path if os.path.abspath(place) != _HERE]
_next = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
