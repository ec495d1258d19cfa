"""Which modules of a model are to be distributed: ``smp.tensor_parallelism``.

Source: smd_model_parallel_pytorch_tensor_parallel.rst, Enabling Tensor Parallelism.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(eq=False)
class Mark:
    """What one context, or one call, asks for.

    Attributes:
        enabled: distribute; False: leave whole.
        config: keywords for the distributed modules.
        used: those of them that some distributed module had.
        has_told: the others were logged.
        is_noted: nothing is distributed for it here; a plan asks what would be.
    """

    enabled: bool
    config: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    has_told: bool = False
    is_noted: bool = False


class TensorMarks:
    """The modules that the user marked, of all models of this process.

    Args:
        is_used: False with one tensor-parallel rank: then modules are distributed only where that
            is asked for at any degree.
        notes: whether marks are noted then, for a plan.
    """

    def __init__(self, *, is_used: bool, notes: bool = False) -> None:
        self.is_used = is_used
        self._notes = notes
        self._of: weakref.WeakKeyDictionary[nn.Module, Mark] = weakref.WeakKeyDictionary()
        self._open: list[Mark] = []

    def of(self, module: nn.Module) -> Mark | None:
        """Returns what is asked of a module; None if nothing is."""
        mark = self._of.get(module)
        return None if mark is None or mark.is_noted else mark

    def noted(self, module: nn.Module) -> Mark | None:
        """Returns what would be asked of a module with several tensor-parallel ranks."""
        return self._of.get(module)

    def set(self, module: nn.Module, enabled: bool, config: dict[str, Any]) -> None:
        """Marks a module and all modules below it."""
        _check(config)
        is_noted = enabled and not self.is_used
        mark = Mark(enabled, config, is_noted=is_noted)
        for inner in module.modules() if self._notes or not is_noted else ():
            self._of[inner] = mark

    def has_any(self, model: nn.Module) -> bool:
        """Whether modules of a model are to be distributed."""
        return any(mark is not None and mark.enabled for mark in map(self.of, model.modules()))

    @contextlib.contextmanager
    def creating(
        self, enabled: bool, config: dict[str, Any], *, at_any_degree: bool = False
    ) -> Iterator[None]:
        """Marks the modules that are created inside, or copied; the innermost context wins.

        Args:
            enabled: distribute them; False: leave them whole.
            config: keywords for the distributed modules.
            at_any_degree: with one tensor-parallel rank, too.
        """
        _check(config)
        is_noted = enabled and not (self.is_used or at_any_degree)
        if is_noted and not self._notes:
            yield
            return
        self._open.append(Mark(enabled, config, is_noted=is_noted))
        init, restore = nn.Module.__init__, nn.Module.__setstate__

        def noting_init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            init(module, *args, **kwargs)
            self._of[module] = self._open[-1]

        def noting_restore(module: nn.Module, state: Any) -> None:
            restore(module, state)  # type: ignore[no-untyped-call]
            self._of[module] = self._open[-1]

        nn.Module.__init__ = noting_init  # type: ignore[method-assign,assignment]
        nn.Module.__setstate__ = noting_restore  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__init__ = init  # type: ignore[method-assign]
            nn.Module.__setstate__ = restore  # type: ignore[method-assign]
            self._open.pop()


def _check(config: dict[str, Any]) -> None:
    if not isinstance(config.get("auto", False), bool):
        raise TypeError(
            f"auto must be True or False; received {config['auto']!r}. What the model can be "
            "called with goes to sample_inputs."
        )
