"""What operations write to, by their schemas: versions do not count every write.

Kernels of many tensors leave versions as they are: ``_fused_adamw_``, on GPUs ``_foreach_lerp_``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.modes import TorchDispatchMode, pytree
from smdistributed.modelparallel.torch.compat.private.tensors import version_of


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors that an operation may change in place."""
    given = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [each for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor)]


class WritesCounted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """When it ends, versions have changed of all tensors that operations inside have written to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before: dict[int, tuple[torch.Tensor, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and keeps the versions before it."""
        kwargs = kwargs or {}
        for each in written_by(func, args, kwargs):
            self._before.setdefault(id(each), (each, version_of(each)))
        return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        """Counts the writes that kernels have not counted."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.autograd.graph.increment_version(
            [
                each
                for each, version in self._before.values()
                if not each.is_inference() and version_of(each) == version
            ]
        )
