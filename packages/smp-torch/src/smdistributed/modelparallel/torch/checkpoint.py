"""Saving and resuming: the model, the optimizer and the user's content, together and crash-safe.

A partial checkpoint has one file a rank and is the one to continue training from; a full one is the
whole model in one file, for use elsewhere. Nothing is ever half there: see
``common.checkpoint.store``.

Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading.
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from smdistributed.modelparallel.common.checkpoint.directory import CheckpointDirectory
from smdistributed.modelparallel.common.checkpoint.durable_files import Writer, write_file
from smdistributed.modelparallel.common.checkpoint.store import Checkpoint
from smdistributed.modelparallel.common.errors import CheckpointError, SMPError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.model import DistributedModel
from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer
from smdistributed.modelparallel.torch.runtime import TorchRuntime

_LAYOUT = "layout.json"
_USER_CONTENT = "user_content.pt"


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
    _expect(model, DistributedModel, "model")
    _expect(optimizer, DistributedOptimizer, "optimizer")
    directory = _directory(runtime, path)
    if not partial:
        if optimizer is not None:
            warnings.warn(
                "a full checkpoint holds no optimizer state; save a partial one to continue from.",
                stacklevel=3,
            )
        state = model.state_dict() if model is not None else None
        files: dict[str, Writer] = {}
        if runtime.rank == 0:
            files["model"] = _writer(state)
            if user_content is not None:
                files["user_content"] = _writer(user_content)
        directory.write_full(tag, files)
        return
    files = {}
    place = runtime.coordinates
    if place.rdp_rank == 0:
        suffix = f"{place.pp_rank}_{place.tp_rank}.pt"
        if model is not None:
            files[f"model_{suffix}"] = _writer(model.local_state_dict())
        if optimizer is not None:
            files[f"optimizer_{suffix}"] = _writer(optimizer.local_state_dict())
    if runtime.rank == 0:
        layout = json.dumps(_layout(runtime, model), indent=1).encode()
        files[_LAYOUT] = lambda stream: _write_bytes(stream, layout)
        if user_content is not None:
            files[_USER_CONTENT] = _writer(user_content)
    directory.write_partial(tag, files, keep=num_kept_partial_checkpoints)


def resume_from_checkpoint(
    runtime: TorchRuntime,
    path: str | os.PathLike[str],
    tag: str | int | None,
    *,
    partial: bool,
    strict: bool,
    load_optimizer: bool,
    trust_pickle: bool,
) -> Any:
    """See ``smp.resume_from_checkpoint``."""
    models, optimizers = runtime.live_models(), runtime.live_optimizers()
    if not models:
        raise SMPError("make the DistributedModel before smp.resume_from_checkpoint.")
    model = models[-1]
    checkpoint = _directory(runtime, path).resolve(tag, partial=partial)
    if not partial:
        model.load_state_dict(_read(checkpoint, "model", trust_pickle), strict=strict)
        return _read_optional(checkpoint, "user_content", trust_pickle)
    with checkpoint.open(_LAYOUT) as stream:
        layout = json.load(stream)
    _check_degrees(runtime, checkpoint, layout)
    model.fix_partition(layout["partition"])
    place = runtime.coordinates
    suffix = f"{place.pp_rank}_{place.tp_rank}.pt"
    if f"model_{suffix}" in checkpoint.paths:
        state = _read(checkpoint, f"model_{suffix}", trust_pickle)
        model.load_state_dict(state, strict=strict, same_partition_load=True)
    if load_optimizer and f"optimizer_{suffix}" in checkpoint.paths:
        if not optimizers:
            raise SMPError(
                "the checkpoint holds optimizer state: make the DistributedOptimizer before "
                "smp.resume_from_checkpoint, or pass load_optimizer=False."
            )
        state = _read(checkpoint, f"optimizer_{suffix}", trust_pickle)
        model.when_partitioned(lambda: optimizers[-1].load_state_dict(state))
    return _read_optional(checkpoint, _USER_CONTENT, trust_pickle)


def save(runtime: TorchRuntime, obj: Any, path: str, *, partial: bool, v3: bool) -> None:
    """See ``smp.save``."""
    target = Path(_file_name(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"smp.save: the folder {target.parent} does not exist; make it.")
    if partial:
        target = target.with_name(f"{target.name}_{_part(runtime, three=v3)}")
    write_file(target, _writer(obj))


def load(
    runtime: TorchRuntime, path: str, *, partial: bool, map_location: Any, trust_pickle: bool
) -> Any:
    """See ``smp.load``."""
    target = Path(_file_name(path))
    if partial:
        names = [
            target.with_name(f"{target.name}_{_part(runtime, three=three)}")
            for three in (True, False)
        ]
        found = [name for name in names if name.exists()]
        if not found:
            written = sorted(each.name for each in target.parent.glob(f"{target.name}_*"))
            raise CheckpointError(
                f"no partial file {names[1].name} (or {names[0].name}) in {target.parent}; found "
                f"{written or 'none'}. Load with the degrees that it was saved with, or with "
                "partial=False."
            )
        target = found[0]
    return torch.load(target, map_location=map_location, weights_only=not trust_pickle)


def _file_name(path: object) -> str:
    if not isinstance(path, str):
        raise TypeError(f"the file must be given by name, as a str; received {path!r}.")
    return path


def _part(runtime: TorchRuntime, *, three: bool) -> str:
    place = runtime.coordinates
    if three:
        return f"{place.pp_rank}_{place.tp_rank}_{place.rdp_rank}"
    if runtime.topology.tp_size > 1:
        return f"{place.pp_rank}_{place.tp_rank}"
    return str(place.mp_rank)


def _directory(runtime: TorchRuntime, path: str | os.PathLike[str]) -> CheckpointDirectory:
    return CheckpointDirectory(
        path,
        rank=runtime.rank,
        gather=lambda obj: runtime.communicator.allgather(obj, CommGroup.WORLD),
    )


def _layout(runtime: TorchRuntime, model: DistributedModel | None) -> dict[str, Any]:
    topology = runtime.topology
    return {
        "pipeline_parallel_degree": topology.pp_size,
        "tensor_parallel_degree": topology.tp_size,
        "partition": {} if model is None else model.partition_by_name(),
    }


def _check_degrees(
    runtime: TorchRuntime, checkpoint: Checkpoint, layout: Mapping[str, Any]
) -> None:
    own = _layout(runtime, None)
    for name in ("pipeline_parallel_degree", "tensor_parallel_degree"):
        if layout[name] != own[name]:
            raise CheckpointError(
                f"checkpoint {checkpoint.tag} was saved with {name} {layout[name]}, this job has "
                f"{own[name]}: resume with the same degrees, or from a full checkpoint."
            )


def _expect(value: object, kind: type, name: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(
            f"save_checkpoint({name}=...) takes a smp.{kind.__name__}; received "
            f"{type(value).__name__}: wrap it first."
        )


def _writer(obj: Any) -> Writer:
    return lambda stream: torch.save(obj, stream)


def _write_bytes(stream: BinaryIO, data: bytes) -> None:
    stream.write(data)


def _read(checkpoint: Checkpoint, name: str, trust_pickle: bool) -> Any:
    with checkpoint.open(name) as stream:
        try:
            return torch.load(stream, map_location="cpu", weights_only=not trust_pickle)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{checkpoint.paths[name]} holds more than tensors and plain values, which only a "
                "full unpickling can load, and that can run code: if you trust the file, pass "
                "trust_pickle=True."
            ) from error


def _read_optional(checkpoint: Checkpoint, name: str, trust_pickle: bool) -> Any:
    return _read(checkpoint, name, trust_pickle) if name in checkpoint.paths else None
