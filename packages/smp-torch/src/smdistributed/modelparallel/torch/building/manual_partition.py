"""Partitions that the user fixes: ``smp.partition`` and ``smp.set_partition``.

Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from smdistributed.modelparallel.common.errors import PartitionError


class ManualPartitions:
    """The modules whose partition the user fixed, of all models of this process.

    Args:
        num_partitions: how many there are.
        is_used: False when auto_partition is on, which ignores every fixed partition.
    """

    def __init__(self, num_partitions: int, *, is_used: bool) -> None:
        self._num_partitions = num_partitions
        self._is_used = is_used
        self._of: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._open: list[int] = []

    def of(self, model: nn.Module) -> dict[nn.Module, int]:
        """Returns the fixed partitions of the modules of a model."""
        return {module: self._of[module] for module in model.modules() if module in self._of}

    def set(self, module: nn.Module, index: int) -> None:
        """Fixes the partition of a module and all modules below it.

        Raises:
            TypeError: ``module`` is no module, or ``index`` no int.
            PartitionError: ``index`` is no partition.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"set_partition takes a torch.nn.Module; received {type(module).__name__}."
            )
        self._check(index)
        if not self._is_used:
            return
        for inner in module.modules():
            self._of[inner] = index

    @contextlib.contextmanager
    def creating(self, index: int) -> Iterator[None]:
        """Fixes the partition of all modules created inside; the innermost context wins."""
        self._check(index)
        if not self._is_used:
            yield
            return
        self._open.append(index)
        init = nn.Module.__init__

        def noting_init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            init(module, *args, **kwargs)
            self._of[module] = self._open[-1]

        nn.Module.__init__ = noting_init  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.__init__ = init  # type: ignore[method-assign]
            self._open.pop()

    def _check(self, index: int) -> None:
        if not isinstance(index, int) or isinstance(index, bool):
            raise TypeError(
                f"a partition index must be an int in 0 .. {self._num_partitions - 1}; received "
                f"{index!r}."
            )
        if self._is_used and not 0 <= index < self._num_partitions:
            raise PartitionError(
                f"a partition index must be in 0 .. {self._num_partitions - 1} "
                f"(pipeline_parallel_degree is {self._num_partitions}); received {index}."
            )
