"""Reading the files of one checkpoint: single ones, the parts of a place, or all of a model."""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from smdistributed.modelparallel.common.checkpoint.store import Checkpoint
from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.torch.checkpoint import layout, safetensors_folder
from smdistributed.modelparallel.torch.checkpoint.layout import Layout, part_name
from smdistributed.modelparallel.torch.checkpoint.plain_classes import (
    TRUST_VARIABLE,
    is_trusted,
    plain_classes,
    refused_in,
)
from smdistributed.modelparallel.torch.checkpoint.safetensors_folder import INDEX, SINGLE
from smdistributed.modelparallel.torch.model.state import PARTIAL_KEY
from smdistributed.modelparallel.torch.optimizer import state as optimizer_state

_SHARD = re.compile(r"optimizer_\d+_\d+_\d+\.pt")


class CheckpointFiles:
    """The files of a checkpoint. Local.

    Args:
        checkpoint: where they are.
        trust_pickle: load objects of any class.

    Attributes:
        trusts_pickle: whether they are loaded, also because the environment says so.
    """

    def __init__(self, checkpoint: Checkpoint, trust_pickle: bool = False) -> None:
        self._checkpoint = checkpoint
        self.trusts_pickle = trust_pickle or is_trusted()

    @property
    def has_owners(self) -> bool:
        """Whether the optimizer's state was shared by the ranks that hold a parameter."""
        return any(_SHARD.fullmatch(name) for name in self._checkpoint.paths)

    @property
    def weights(self) -> str:
        """The name of the file by which the weights of a full checkpoint are found.

        Raises:
            CheckpointError: it is a folder without any.
        """
        found = [name for name in ("model", INDEX, SINGLE) if name in self._checkpoint.paths]
        if not found:
            raise CheckpointError(
                f"the folder of checkpoint '{self._checkpoint.tag}' must have {INDEX} or {SINGLE}, "
                f"as save_pretrained of Transformers writes them; it has "
                f"{', '.join(self._checkpoint.paths) or 'no file'}: give the tag of a folder that "
                "has one, or of a file of weights."
            )
        return found[0]

    @property
    def names_weights_once(self) -> bool:
        """Whether the weights of a full checkpoint have each tensor under one of its names."""
        return self._checkpoint.paths[self.weights].name.endswith((".safetensors", INDEX))

    def weights_of_full(self) -> dict[str, Any]:
        """Returns the state of the model of a full checkpoint.

        Raises:
            CheckpointError: some of it is missing or damaged.
        """
        name = self.weights
        if not self.names_weights_once:
            state: dict[str, Any] = self.read(name)
            return state
        return safetensors_folder.read(self._checkpoint.paths[name].name, self._beside)

    def _beside(self, file: str) -> Path:
        """Returns where a file of the weights is, verified if the checkpoint says what it is."""
        for name, path in self._checkpoint.paths.items():
            if path.name == file:
                self._checkpoint.open(name).close()
                return path
        return self._checkpoint.paths[self.weights].with_name(file)

    def layout(self) -> Layout:
        """Returns the index of a partial checkpoint."""
        with self._checkpoint.open(layout.FILE) as stream:
            return Layout.parse(stream.read().decode())

    def models(self, stored: Layout) -> dict[str, dict[str, Any]]:
        """Returns the states of the model, by file name."""
        return {
            name: self.read(name)
            for part in _parts_of(stored)
            if (name := f"model_{part}.pt") in self._checkpoint.paths
        }

    def optimizers(self, stored: Layout) -> dict[str, dict[str, Any]]:
        """Returns the states of the optimizer, by file name."""
        found = {f"optimizer_{part}.pt": self.optimizer_part(part) for part in _parts_of(stored)}
        return {name: each for name, each in found.items() if each is not None}

    def optimizer_part(self, part: str) -> dict[str, Any] | None:
        """Returns the optimizer's state of one place of a pipeline; None if there is none.

        Where it is sharded, several files hold it; what half precision adds is in others.
        """
        files = [
            self.read(name)
            for name in sorted(self._checkpoint.paths)
            if re.fullmatch(rf"(optimizer|fp16_states)_{part}(_\d+)?\.pt", name)
        ]
        if not files:
            return None
        return {**optimizer_state.merge(files), PARTIAL_KEY: files[0][PARTIAL_KEY]}

    def read_if_there(self, name: str) -> Any:
        """Returns what a file holds; None if there is none of this name."""
        return self.read(name) if name in self._checkpoint.paths else None

    def read(self, name: str) -> Any:
        """Returns what a file holds.

        Raises:
            CheckpointError: it is damaged, or holds what nobody said to trust.
        """
        self._checkpoint.open(name).close()  # which verifies it
        path = self._checkpoint.paths[name]
        try:
            with plain_classes(path):
                return torch.load(
                    path,
                    map_location="cpu",
                    weights_only=not self.trusts_pickle,
                    # Tensors of other ranks are then never read, only their names.
                    mmap=zipfile.is_zipfile(path),
                )
        except pickle.UnpicklingError as error:
            refused = ", ".join(refused_in(path))
            raise CheckpointError(
                f"{path} holds more than tensors, plain values and configurations"
                f"{refused and f' ({refused})'}, which only a full unpickling can load, and that "
                "can run code. Import the classes before you resume, if they are configurations; "
                "or, if you trust the file, pass trust_pickle=True or set "
                f"{TRUST_VARIABLE}=1."
            ) from error


def _parts_of(stored: Layout) -> list[str]:
    return [
        f"{part_name(pp_rank, tp_rank)}{shard}"
        for pp_rank in range(stored.pipeline_parallel_degree)
        for tp_rank in range(stored.tensor_parallel_degree)
        for shard in _shards_of(stored)
    ]


def _shards_of(stored: Layout) -> list[str]:
    degree = stored.sharded_data_parallel_degree
    return [""] if degree == 1 else [f"_{index}" for index in range(degree)]
