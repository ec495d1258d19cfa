"""Whether the form of what a function gives depends on values, as that of ``nonzero`` does."""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.modes import (
    DATA_DEPENDENT,
    FakeTensorMode,
    past_subclass_functions,
    pytree,
    quiet_fakes,
)
from smdistributed.modelparallel.torch.tensors.functions import DIFFERENTIATING

_MOST_KNOWN = 4096


class Forms:
    """Tries functions on fakes, as the ranks do that lack the values: once for each form.

    Args:
        fake_mode: of all fakes.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._fake_mode = fake_mode
        self._known: dict[Any, bool] = {}

    def depend_on_values(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Tells whether ranks that lack the values in some arguments ask for them in a call."""
        if func in DIFFERENTIATING:
            return False
        with past_subclass_functions():
            key = func, tuple(kwargs), *map(_form, pytree.tree_leaves((args, kwargs)))
            if key not in self._known:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = self._tried(func, args, kwargs)
        return self._known[key]

    def _tried(self, func: Any, args: Any, kwargs: Any) -> bool:
        given = pytree.tree_map(self._fake, (tuple(args), dict(kwargs)))
        try:
            with quiet_fakes(), self._fake_mode:
                func(*given[0], **given[1])
        except DATA_DEPENDENT:
            return True
        except Exception:  # it says so where there are values
            return False
        return False

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with self._fake_mode:
            fake = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
        return fake.requires_grad_(value.requires_grad)


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad
    return type(leaf)
