"""Compatibility: names of tensor parallelism and of Horovod that scripts call in any case.

Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions;
smd_model_parallel_pytorch_tensor_parallel.rst.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.api.slot import slot
from smdistributed.modelparallel.torch.compat.later import later_function


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **tensor_parallel_config: Any) -> Iterator[None]:
    """Marks modules created inside for distribution over the tensor-parallel ranks.

    Usable as a decorator too. Without effect while there is one tensor-parallel rank, as anywhere.

    Args:
        enabled: False excludes the modules.
        tensor_parallel_config: for the distributed modules; without effect.

    Raises:
        UnsupportedError: asked for with ``tensor_parallel_degree`` above 1.
    """
    _refuse_tensor_parallelism(enabled)
    yield


def set_tensor_parallelism(
    module: nn.Module, enabled: bool = True, **tensor_parallel_config: Any
) -> None:
    """Marks modules of a finished model; see ``tensor_parallelism``.

    Raises:
        UnsupportedError: asked for with ``tensor_parallel_degree`` above 1.
    """
    _refuse_tensor_parallelism(enabled)


tp_register = later_function("smp.tp_register")
tp_register_with_module = later_function("smp.tp_register_with_module")


def hvd_average_grads() -> None:
    """Compatibility: nothing is left to do, a step function returns averaged gradients."""
    slot.get()


def _refuse_tensor_parallelism(enabled: bool) -> None:
    degree = slot.get().topology.tp_size
    if enabled and degree > 1:
        raise UnsupportedError(
            f"tensor parallelism is not supported yet; tensor_parallel_degree is {degree}: set it "
            "to 1 (modules are then whole on their partition)."
        )
