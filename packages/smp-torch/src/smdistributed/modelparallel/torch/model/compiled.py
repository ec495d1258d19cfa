"""Modules that the user had compiled, by ``module.compile()`` or ``torch.compile(module)``.

A compiled module that lies on one partition runs compiled. One that is split cannot run as a whole:
each of its parts that lies on one partition is compiled alone, in the same way. So is what ranks
compute between the exchanges of a module that ``tensor_parallelism(auto=True)`` has split.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.compat.private.compiled import (
    compile_like,
    compiled_call,
    forget_compiled,
)
from smdistributed.modelparallel.torch.model.holder import Holder
from smdistributed.modelparallel.torch.tensor_parallel.auto.group import ClosedGroup

logger = logging.getLogger(__name__)


class CompiledModules:
    """The modules of one model that run as compiled code; a container of the outermost ones.

    Args:
        holder: of the model.
    """

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._asked: tuple[object, ...] = ()
        self._root_of: dict[nn.Module, nn.Module] = {}
        #: Parts of compiled modules that are split, with the calls that were made for them.
        self._parts: dict[nn.Module, Any] = {}
        self.refresh()

    def __contains__(self, module: object) -> bool:
        return isinstance(module, nn.Module) and self._root_of.get(module) is module

    @property
    def roots(self) -> Iterator[nn.Module]:
        """The outermost ones that run compiled."""
        return (module for module, root in self._root_of.items() if root is module)

    def root_of(self, module: nn.Module) -> nn.Module:
        """Returns the outermost compiled module that a module is in; of others themselves."""
        return self._root_of.get(module, module)

    def refresh(self) -> bool:
        """Takes what is compiled now.

        Returns:
            whether that is something else than before.
        """
        holder = self._holder
        calls = {}
        for module in holder.fakes.names:
            call = compiled_call(module)
            if call is not None and call is not self._parts.get(module):
                calls[module] = call
        asked = (holder.version, holder.is_partial, *calls.items()) if calls else ()
        if asked == self._asked:
            return False
        for module, call in self._parts.items():
            if compiled_call(module) is call:
                forget_compiled(module)
        self._asked, self._root_of, self._parts = asked, {}, {}
        if holder.partitioned:
            self._take(holder.fakes.model, calls, None, is_whole=not holder.is_partial)
        for module in calls:
            if module not in self._root_of and holder.is_partial:
                name = holder.fakes.names[module] or "the model"
                logger.info("%s is split over partitions: its parts are compiled, each alone", name)
        for module in holder.fakes.names:
            if isinstance(module, ClosedGroup):
                root = self._root_of.get(module)
                module.compile_lanes(None if root is None else compiled_call(root))
        return True

    def _take(
        self, module: nn.Module, calls: dict[nn.Module, Any], outer: Any, *, is_whole: bool
    ) -> None:
        """Finds what runs compiled in a module.

        Args:
            module: to look into.
            calls: what the user had compiled.
            outer: how a module was compiled that this one is a part of; None if none was.
            is_whole: the module lies on one partition.
        """
        call = calls.get(module, outer)
        is_whole = is_whole or module in self._holder.placement.leaves
        if call is None or not is_whole:
            for child in module.children():
                self._take(child, calls, call, is_whole=is_whole)
        elif module not in self._root_of:
            if module not in calls:
                self._parts[module] = compile_like(call, module)
            for each in module.modules():
                self._root_of.setdefault(each, module)
