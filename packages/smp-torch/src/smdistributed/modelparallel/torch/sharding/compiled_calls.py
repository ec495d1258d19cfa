"""Compiled modules whose parameters are in shards.

Compiled code reads parameters past ``__torch_function__``. So around each call of such a module its
parameters are whole, and for as long they are parameters as any others: what is compiled is what
would be without shards. What autograd keeps of them is kept by place, as elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.compiled import around_compiled
from smdistributed.modelparallel.torch.compat.private.modes import past_subclass_functions
from smdistributed.modelparallel.torch.sharding.parameter import ShardedParameter

#: Parameters with their classes, and the number of writes to each.
_Given = list[tuple[ShardedParameter, Any, int]]


class CompiledCalls:
    """Makes sharded parameters whole around the calls of compiled modules."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._given: list[tuple[nn.Module, _Given]] = []

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """Takes the modules that run compiled now, in place of former ones."""
        for handle in self._handles:
            handle.remove()
        self._handles = [
            handle
            for module in modules
            for handle in around_compiled(module, self._enter, self._leave)
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        given: _Given = []
        # First of all: ``_leave`` is called also when the rest raises.
        self._given.append((module, given))
        for parameter in module.parameters():
            if isinstance(parameter, ShardedParameter):
                shard = parameter.shard
                shard.home.check_use(shard.name, type(module).__name__)
                shard.home.enter([shard.unit])
                kind: Any = type(parameter)
                with past_subclass_functions():
                    given.append((parameter, kind, parameter._version))
                parameter.__class__ = kind.gathered

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if not self._given or self._given[-1][0] is not module:
            return  # something else raised before ``_enter`` was called
        written = []
        for parameter, kind, version in self._given.pop()[1]:
            if parameter._version != version:
                written.append(parameter.shard.name)
            parameter.__class__ = kind
            parameter.shard.home.leave([parameter.shard.unit])
        if written:
            raise UnsupportedError(
                f"the compiled {type(module).__name__} wrote to {', '.join(written)}, and what is "
                "gathered is only a copy of the ranks' shards: change parameters by the optimizer, "
                "or between steps by DistributedModel.load_state_dict."
            )
