"""The states in the files of ranks, read in the parts that a rank of another job has of them.

They are presented as a folder of ``torch.distributed.checkpoint`` is, by the same keys, so that
``StoredStates`` reads both. The files are mapped into memory: what nobody asks for is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from smdistributed.modelparallel.common.pieces import Part
from smdistributed.modelparallel.torch.checkpoint.dcp_states import (
    LOSS_SCALE_PATH,
    MODEL,
    OPTIMIZER,
)
from smdistributed.modelparallel.torch.checkpoint.layout import Layout
from smdistributed.modelparallel.torch.model.state import PARTIAL_KEY
from smdistributed.modelparallel.torch.optimizer import state as optimizer_state
from smdistributed.modelparallel.torch.optimizer.state import LOSS_SCALE
from smdistributed.modelparallel.torch.parts.blocks import taken

_Take = Callable[[Part], torch.Tensor]


class PartsOfFiles:
    """The tensors of a checkpoint of one file a rank. Local.

    Args:
        stored: says where they lie.
        models: the states of the model, by file name.
        optimizers: those of the optimizer.

    Attributes:
        tensors: the shapes of the whole tensors, by key.
        others: the keys of what is no tensor.
    """

    def __init__(
        self,
        stored: Layout,
        models: Mapping[str, Mapping[str, Any]],
        optimizers: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._stored = stored
        self.tensors: dict[str, tuple[int, ...]] = {}
        self._takes: dict[str, _Take] = {}
        self._values: dict[str, Any] = {}
        for path, value in _of_models(stored, models):
            self._add(path, value)
        for name in stored.tensors:
            self._add_in_pieces((MODEL, name), name, models)
        if optimizers:
            merged = optimizer_state.merge(list(optimizers.values()))
            for path, value in _of_optimizer(merged):
                self._add(path, value)
            for name, key, held in stored.in_pieces(merged, optimizers):
                self._add_in_pieces((OPTIMIZER, "state", name, key), name, held)

    @property
    def others(self) -> Collection[str]:
        """The keys of what is no tensor."""
        return self._values.keys()

    def read(self, parts: Mapping[str, Part], others: Iterable[str]) -> dict[str, Any]:
        """Returns parts of tensors, and values that are no tensors, by key.

        Raises:
            CheckpointError: some of a part is in no file.
        """
        return {
            **{key: self._takes[key](part) for key, part in parts.items()},
            **{key: self._values[key] for key in others},
        }

    def _add(self, path: tuple[str, ...], value: Any) -> None:
        key = ".".join(path)
        if isinstance(value, torch.Tensor):
            self.tensors[key] = tuple(value.shape)
            self._takes[key] = lambda part: taken(value, part)
        else:
            self._values[key] = value

    def _add_in_pieces(
        self, path: tuple[str, ...], name: str, files: Mapping[str, Mapping[str, Any]]
    ) -> None:
        key, stored = ".".join(path), self._stored.tensors[name]
        self.tensors[key] = stored.shape
        self._takes[key] = lambda part: stored.part(name, files, part)


def _of_models(
    stored: Layout, models: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for state in models.values():
        for name, value in state.items():
            if name != PARTIAL_KEY and name not in stored.tensors:
                yield (MODEL, name), value


def _of_optimizer(merged: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, values in merged["state"].items():
        for key, value in values.items():
            yield (OPTIMIZER, "state", name, key), value
    for number, group in enumerate(merged["param_groups"]):
        for key, value in group.items():
            yield (OPTIMIZER, "param_groups", str(number), key), value
    if LOSS_SCALE in merged:
        yield LOSS_SCALE_PATH, merged[LOSS_SCALE]
