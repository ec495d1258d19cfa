"""Running models of Transformers on fakes as they run for real."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def transformers_as_in_a_real_run() -> Iterator[None]:
    """Makes Transformers do on fakes what it does for real, and nothing that outlives a recording.

    It takes fake tensors for an export and chooses other attention masks then; it keeps tensors in
    caches of functions; its version 4 makes masks by ``torch.vmap``, whose tensors have no storage.
    The hooks that it installs in the first call of a model stay, as they do where the model runs:
    every rank has to see the same.
    """
    replaced = []
    capturing = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(capturing, "maybe_install_capturing_hooks", None)
    noted = None if install is None else _noting(install)
    for module_name, name, replacement in (
        ("transformers.utils.import_utils", "is_fake_tensor", _never),
        ("transformers.pytorch_utils", "is_torchdynamo_compiling", _always),
        ("transformers.masking_utils", "_vmap_for_bhqkv", _broadcast_mask_function),
        ("transformers.utils.output_capturing", "maybe_install_capturing_hooks", noted),
    ):
        module = sys.modules.get(module_name)
        former = getattr(module, name, None)
        if former is not None:
            replaced.append((module, name, former))
            setattr(module, name, replacement)
    try:
        yield
    finally:
        for module, name, former in replaced:
            setattr(module, name, former)
        if noted is not None:
            noted.install_all()


class _Noting:
    """Installs hooks in models, and remembers in which."""

    def __init__(self, install: Callable[[Any], None]) -> None:
        self._install = install
        self._models: list[Any] = []

    def __call__(self, model: Any) -> None:
        self._models.append(model)
        self._install(model)

    def install_all(self) -> None:
        """Installs them where they have been taken away since."""
        for model in self._models:
            self._install(model)
        self._models.clear()


_noting = functools.cache(_Noting)


# The same functions in every run, so that code that sees them sees no change.
def _never(tensor: object) -> bool:
    return False


def _always() -> bool:
    return True


def _broadcast_mask_function(
    mask_function: Callable[..., torch.Tensor], bh_indices: bool = True
) -> Callable[..., torch.Tensor]:
    """Returns a function of index vectors that evaluates a mask function at all combinations.

    Args:
        mask_function: of indices of batch, head, query and key.
        bh_indices: whether batch and head are vectors too; else they are passed on as they are.
    """

    def evaluate(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        shape = [len(query), len(key)]
        if bh_indices:
            shape = [len(batch), len(head), *shape]
            batch, head = batch[:, None, None, None], head[:, None, None]
        return mask_function(batch, head, query[:, None], key).expand(shape)

    return evaluate
