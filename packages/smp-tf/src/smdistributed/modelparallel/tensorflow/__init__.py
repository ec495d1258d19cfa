"""Model parallelism for TensorFlow: the place of the engine, which this version does not have.

Use it as ``import smdistributed.modelparallel.tensorflow as smp``. Only ``init`` is here, and it
says so; no other name of the documented API is given before it works.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version
from typing import NoReturn

from smdistributed.modelparallel.common.errors import UnsupportedError

__all__ = ["init"]


def init(config: Mapping[str, object] | str | os.PathLike[str] | None = None) -> NoReturn:
    """Raises: there is no TensorFlow engine to start yet.

    Args:
        config: parameters by name, or the path of a YAML or JSON file with them; not read.

    Raises:
        UnsupportedError: always.

    Source: smd_model_parallel_common_api.rst, The Library's Core APIs.
    """
    raise UnsupportedError(
        "smp.init starts the engine of the framework package; the TensorFlow engine is not in "
        f"smp-tf {version('smp-tf')} yet: train a PyTorch model with smp-torch "
        "(import smdistributed.modelparallel.torch as smp)."
    )
