"""Saving and resuming: the model, the optimizer and the user's content, together and crash-safe.

A partial checkpoint has one file a rank and is the one to continue training from; a full one is the
whole model in one file, for use elsewhere. Nothing is ever half there: see
``common.checkpoint.store``.

A partial checkpoint is named after the partition that wrote it, but its parts go by the names of
parameters. A job with the same degrees takes over the partition, and each rank reads its own part;
any other job reads all parts, and each rank keeps what belongs there.

Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

import torch

from smdistributed.modelparallel.common.checkpoint.directory import CheckpointDirectory
from smdistributed.modelparallel.common.checkpoint.durable_files import Writer
from smdistributed.modelparallel.common.checkpoint.store import Checkpoint
from smdistributed.modelparallel.common.errors import CheckpointError, SMPError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.checkpoint import generators as random_state
from smdistributed.modelparallel.torch.model.distributed import DistributedModel, models_of
from smdistributed.modelparallel.torch.model.state import PARTIAL_KEY
from smdistributed.modelparallel.torch.optimizer import state as optimizer_state
from smdistributed.modelparallel.torch.optimizer.distributed import (
    DistributedOptimizer,
    optimizers_of,
)
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

logger = logging.getLogger(__name__)

_LAYOUT = "layout.json"
_USER_CONTENT = "user_content.pt"

_Wrapper = TypeVar("_Wrapper", DistributedModel, DistributedOptimizer)


@dataclass
class _Content:
    """What this rank takes from a checkpoint.

    Attributes:
        model: the whole state, or with ``partition`` this rank's part.
        optimizer: its state, as ``model``.
        partition: the partition to take over, by module name; None to keep the job's own.
        random: the state of the random generators.
        user: the user's content.
    """

    model: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    partition: dict[str, int] | None = None
    random: dict[str, Any] | None = None
    user: Any = None


def save_checkpoint(
    runtime: TorchRuntime,
    path: str | os.PathLike[str],
    tag: str | int,
    *,
    partial: bool,
    model: DistributedModel | None,
    optimizer: DistributedOptimizer | None,
    user_content: Any,
    num_kept_partial_checkpoints: int | None,
) -> None:
    """See ``smp.save_checkpoint``."""
    _expect(model, DistributedModel, "save_checkpoint(model=...)")
    _expect(optimizer, DistributedOptimizer, "save_checkpoint(optimizer=...)")
    directory = _directory(runtime, path)
    files: dict[str, Writer] = {}
    # What a writer computes may fail on one rank; the directory tells it to the others.
    if not partial:
        whole = {
            "model": model and model.state_dict(gather_to_rank0=True),
            "optimizer": optimizer and optimizer.state_dict(gather_to_rank0=True),
            "user_content": user_content,
        }
        if runtime.rank == 0:
            for name, value in whole.items():
                if name == "model" or value is not None:
                    files[name] = _writer(lambda value=value: value)  # type: ignore[misc]
        directory.write_full(tag, files)
        return
    place = runtime.coordinates
    part = _part(place.pp_rank, place.tp_rank)
    if place.rdp_rank == 0:
        if model is not None:
            files[f"model_{part}.pt"] = _writer(model.local_state_dict)
        if optimizer is not None:
            files[f"optimizer_{part}.pt"] = _writer(optimizer.local_state_dict)
    files[f"random_{part}_{place.rdp_rank}.pt"] = _writer(
        lambda: random_state.capture(runtime.device)
    )
    if runtime.rank == 0:
        layout = json.dumps(_layout(runtime, model), indent=1).encode()
        files[_LAYOUT] = lambda stream: _write_bytes(stream, layout)
        if user_content is not None:
            files[_USER_CONTENT] = _writer(lambda: user_content)
    directory.write_partial(tag, files, keep=num_kept_partial_checkpoints)


def resume_from_checkpoint(
    runtime: TorchRuntime,
    path: str | os.PathLike[str],
    tag: str | int | None,
    *,
    partial: bool,
    model: DistributedModel | None,
    optimizer: DistributedOptimizer | None,
    strict: bool,
    load_optimizer: bool,
    trust_pickle: bool,
) -> Any:
    """See ``smp.resume_from_checkpoint``."""
    model = _given_or_last(model, DistributedModel, models_of(runtime), "model")
    optimizer = _given_or_last(optimizer, DistributedOptimizer, optimizers_of(runtime), "optimizer")
    if model is None:
        raise SMPError("make the DistributedModel before smp.resume_from_checkpoint.")
    directory = _directory(runtime, path)
    checkpoint = directory.resolve(tag, partial=partial)
    reader = _Reader(runtime, checkpoint, trust_pickle)
    contents: list[_Content] = []

    def read() -> None:
        content = reader.partial(model, load_optimizer) if partial else reader.full(load_optimizer)
        # Full checkpoints are also for scripts that do not train.
        if partial and content.optimizer is not None and optimizer is None:
            raise CheckpointError(
                "the checkpoint holds optimizer state: make the DistributedOptimizer before "
                "smp.resume_from_checkpoint, or pass load_optimizer=False."
            )
        contents.append(content)

    directory.everywhere(f"Resuming checkpoint '{checkpoint.tag}' in {directory.path}", read)
    (content,) = contents
    if content.partition is not None:
        model.holder.fix_partition(content.partition)
    if content.model is not None:
        is_own = content.partition is not None
        model.load_state_dict(content.model, strict=strict, same_partition_load=is_own)
    if content.optimizer is not None and optimizer is not None:
        optimizer.load_state_dict(content.optimizer)
    if content.random is not None:
        random_state.restore(content.random, runtime.device)
    return content.user


class _Reader:
    """Reads the files of one checkpoint that this rank needs. Local.

    Args:
        runtime: the state of the library in this process.
        checkpoint: where the files are.
        trust_pickle: load objects of any class.
    """

    def __init__(self, runtime: TorchRuntime, checkpoint: Checkpoint, trust_pickle: bool) -> None:
        self._runtime = runtime
        self._checkpoint = checkpoint
        self._trust_pickle = trust_pickle

    def full(self, load_optimizer: bool) -> _Content:
        """Returns the content of a full checkpoint."""
        return _Content(
            model=self._read("model"),
            optimizer=self._read_if_there("optimizer") if load_optimizer else None,
            user=self._user_content("user_content"),
        )

    def partial(self, model: DistributedModel, load_optimizer: bool) -> _Content:
        """Returns the content of a partial checkpoint that belongs to this rank."""
        with self._checkpoint.open(_LAYOUT) as stream:
            layout = json.load(stream)
        own = _layout(self._runtime, model)
        degree = "tensor_parallel_degree"
        if layout[degree] != own[degree]:
            raise CheckpointError(
                f"it was saved with {degree} {layout[degree]}, this job has {own[degree]}: resume "
                "with the same degree, or from a full checkpoint."
            )
        degree = "pipeline_parallel_degree"
        same_degree = layout[degree] == own[degree]
        adopts = same_degree and (not own["partition"] or own["partition"] == layout["partition"])
        place = self._runtime.coordinates
        if not adopts:
            logger.info(
                "%s was saved with pipeline_parallel_degree %d under another partition; "
                "every rank takes its share of all parts.",
                self._checkpoint.tag,
                layout[degree],
            )
        ranks = [place.pp_rank] if adopts else range(layout[degree])
        parts = [_part(pp_rank, place.tp_rank) for pp_rank in ranks]
        models = self._read_all(f"model_{part}.pt" for part in parts)
        optimizers = (
            self._read_all(f"optimizer_{part}.pt" for part in parts) if load_optimizer else []
        )
        if not adopts and models:
            whole = {name: value for each in models for name, value in each.items()}
            models = [{**whole, PARTIAL_KEY: False}]
        if not adopts and optimizers:
            optimizers = [optimizer_state.merge(optimizers)]
        return _Content(
            model=models[0] if models else None,
            optimizer=optimizers[0] if optimizers else None,
            partition=layout["partition"] if adopts else None,
            random=self._random_state(same_degree),
            user=self._user_content(_USER_CONTENT),
        )

    def _user_content(self, name: str) -> Any:
        path = self._checkpoint.paths.get(name)
        # Programs mark a folder as a checkpoint without user content by an empty file.
        return None if path is None or not path.stat().st_size else self._read(name)

    def _random_state(self, same_degree: bool) -> Any:
        place = self._runtime.coordinates
        # With other partitions, that of the first one: the numbers of a step follow from it.
        part = _part(place.pp_rank if same_degree else 0, place.tp_rank)
        name = f"random_{part}_{place.rdp_rank}.pt"
        if name not in self._checkpoint.paths:
            logger.warning(
                "%s has no random state of replica %d: the job that saved it had fewer. The "
                "random generators of this rank stay as the script seeded them.",
                self._checkpoint.tag,
                place.rdp_rank,
            )
        return self._read_if_there(name)

    def _read_all(self, names: Any) -> list[dict[str, Any]]:
        return [self._read(name) for name in names if name in self._checkpoint.paths]

    def _read_if_there(self, name: str) -> Any:
        return self._read(name) if name in self._checkpoint.paths else None

    def _read(self, name: str) -> Any:
        self._checkpoint.open(name).close()  # which verifies it
        path = self._checkpoint.paths[name]
        try:
            return torch.load(
                path,
                map_location="cpu",
                weights_only=not self._trust_pickle,
                # Tensors of other ranks are then never read, only their names.
                mmap=zipfile.is_zipfile(path),
            )
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path} holds more than tensors and plain values, which only a full unpickling "
                "can load, and that can run code: if you trust the file, pass trust_pickle=True."
            ) from error


def _directory(runtime: TorchRuntime, path: str | os.PathLike[str]) -> CheckpointDirectory:
    return CheckpointDirectory(
        path,
        rank=runtime.rank,
        gather=lambda obj: runtime.communicator.allgather(obj, CommGroup.WORLD),
    )


def _part(pp_rank: int, tp_rank: int) -> str:
    return f"{pp_rank}_{tp_rank}"


def _layout(runtime: TorchRuntime, model: DistributedModel | None) -> dict[str, Any]:
    topology = runtime.topology
    return {
        "pipeline_parallel_degree": topology.pp_size,
        "tensor_parallel_degree": topology.tp_size,
        "partition": {} if model is None else model.holder.partition_by_name(),
    }


def _expect(value: object, kind: type, argument: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(
            f"{argument} takes a smp.{kind.__name__}; received {type(value).__name__}: wrap it "
            "first."
        )


def _given_or_last(
    given: _Wrapper | None, kind: type[_Wrapper], alive: list[_Wrapper], name: str
) -> _Wrapper | None:
    _expect(given, kind, f"resume_from_checkpoint({name}=...)")
    return given or (alive[-1] if alive else None)


def _writer(make: Callable[[], Any]) -> Writer:
    return lambda stream: torch.save(make(), stream)


def _write_bytes(stream: BinaryIO, data: bytes) -> None:
    stream.write(data)
