"""Saving: the model, the optimizer and the user's content, together and crash-safe.

A partial checkpoint has one file a rank and is the one to continue training from; a full one is the
whole model in one file, for use elsewhere. Nothing is ever half there: see
``common.checkpoint.store``.

Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import torch

from smdistributed.modelparallel.common.checkpoint.background import BackgroundSave
from smdistributed.modelparallel.common.checkpoint.directory import (
    CheckpointDirectory,
    Rest,
    Taking,
    made_now,
)
from smdistributed.modelparallel.common.checkpoint.durable_files import Writer
from smdistributed.modelparallel.torch.checkpoint import generators, layout
from smdistributed.modelparallel.torch.checkpoint.dcp_folder import DcpWriter
from smdistributed.modelparallel.torch.checkpoint.dcp_states import HeldStates
from smdistributed.modelparallel.torch.checkpoint.folder import (
    USER_CONTENT,
    directory_at,
    expect_wrapped,
    finish_pending,
)
from smdistributed.modelparallel.torch.checkpoint.held_copies import HeldCopy
from smdistributed.modelparallel.torch.checkpoint.layout import Layout, own_part_name, part_name
from smdistributed.modelparallel.torch.checkpoint.plain_classes import refused_in
from smdistributed.modelparallel.torch.checkpoint.safetensors_folder import SafetensorsFolder
from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.optimizer import state as optimizer_state
from smdistributed.modelparallel.torch.optimizer.distributed import (
    DistributedOptimizer,
)
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime


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
    translate_if_full: bool,
    asynchronous: bool,
    format: str,
    max_shard_size_bytes: int,
) -> BackgroundSave | None:
    """See ``smp.save_checkpoint``."""
    if format == "safetensors":
        _expect_model_alone(partial, model, optimizer, user_content)
    elif format == "dcp":
        _expect_partial(partial, model)
    elif format != "torch":
        raise ValueError(f"format must be 'torch', 'safetensors' or 'dcp'; received {format!r}.")
    finish_pending(runtime)
    expect_wrapped(model, DistributedModel, "save_checkpoint(model=...)")
    expect_wrapped(optimizer, DistributedOptimizer, "save_checkpoint(optimizer=...)")
    if model is not None:
        model.follow_changes()
    directory = directory_at(runtime, path)
    if format == "safetensors":
        assert model is not None
        folder = _folder_of(runtime, model, max_shard_size_bytes, translate_if_full)
        return _write_folder(runtime, directory, tag, folder, asynchronous)
    files: dict[str, _File] = {}
    # What a writer computes may fail on one rank; the directory tells it to the others.
    if not partial:
        whole = {
            "model": model and model.state_dict(gather_to_rank0=True),
            "optimizer": optimizer and optimizer.state_dict(gather_to_rank0=True),
            "user_content": user_content,
        }
        if runtime.rank == 0:
            if model is not None and translate_if_full and model.translation:
                whole["model"] = model.translation.to_theirs(whole["model"])
            for name, value in whole.items():
                if name == "user_content" and value is not None:
                    files[name] = _File.small(_user_content_writer(value))
                elif name == "model" or value is not None:
                    files[name] = _File.of(lambda value=value: value)  # type: ignore[misc]
        return _written(runtime, directory, tag, files, asynchronous, partial=False)
    place = runtime.coordinates
    part = part_name(place.pp_rank, place.tp_rank)
    own = own_part_name(runtime, runtime.rank)
    dcp: DcpWriter | None = None
    index = Layout.of(runtime, model)
    if format == "dcp":
        assert model is not None
        held = HeldStates(runtime, model, optimizer).held
        dcp = DcpWriter(runtime.rank, held, behind=asynchronous)
        index = dataclasses.replace(index, tensors={})  # DCP has an index of its own
    # Of ranks with the same shards the first one writes.
    speaks = not dcp and place.rdp_cp_rank < runtime.config.sharded_data_parallel_degree
    if speaks and model is not None:
        files[f"model_{own}.pt"] = _File.of(model.local_state_dict)
    has_owners = not dcp and runtime.config.shard_optimizer_state
    if optimizer is not None and (speaks or has_owners):
        shard = f"{part}_{place.rdp_cp_rank}" if has_owners else own
        files[f"optimizer_{shard}.pt"] = _File.of(lambda: _halves(optimizer)[0])
        if optimizer.fp16_optimizer is not None:
            files[f"fp16_states_{shard}.pt"] = _File.of(lambda: _halves(optimizer)[1])
    files[f"random_{part}_{place.rdp_cp_rank}.pt"] = _File.of(
        lambda: generators.capture(runtime.device)
    )
    if runtime.rank == 0:
        text = index.text().encode()
        files[layout.FILE] = _File.small(lambda stream: _write_bytes(stream, text))
        if user_content is not None:
            files[USER_CONTENT] = _File.small(_user_content_writer(user_content))
    keep = num_kept_partial_checkpoints
    return _written(runtime, directory, tag, files, asynchronous, partial=True, keep=keep, dcp=dcp)


class _File(NamedTuple):
    """A file that is written now, or of which a copy is taken now and written later."""

    write: Writer
    take: Taking

    @classmethod
    def of(cls, make: Callable[[], Any]) -> _File:
        """Returns the file of a state."""

        def take() -> Writer:
            held = HeldCopy(make())
            return lambda stream: torch.save(held.to_host(), stream)

        return cls(lambda stream: torch.save(make(), stream), take)

    @classmethod
    def small(cls, writer: Writer) -> _File:
        """Returns the file of something small."""
        return cls(writer, made_now(writer))


def _expect_model_alone(
    partial: bool, model: object, optimizer: object, user_content: object
) -> None:
    """Raises where more is to be saved than a folder of safetensors has.

    Raises:
        ValueError: names the argument.
    """
    received = {
        "partial=True": partial,
        "model=None": model is None,
        "an optimizer": optimizer is not None,
        "user_content": user_content is not None,
    }
    wrong = [name for name, is_given in received.items() if is_given]
    if wrong:
        raise ValueError(
            "format='safetensors' writes a whole model and nothing else: pass partial=False and "
            f"the model alone; received {', '.join(wrong)}. A checkpoint to continue from is one "
            "of format='torch'."
        )


def _expect_partial(partial: bool, model: object) -> None:
    """Raises where a folder of DCP does not fit what is asked for.

    Raises:
        ValueError: names the argument.
    """
    received = {
        "partial=False": not partial,
        "model=None": model is None,
    }
    wrong = [name for name, is_given in received.items() if is_given]
    if wrong:
        raise ValueError(
            "format='dcp' writes a checkpoint to continue from, a model with or without its "
            f"optimizer: pass partial=True and the model; received {', '.join(wrong)}."
        )


def _folder_of(
    runtime: TorchRuntime, model: DistributedModel, max_shard_size_bytes: int, translate: bool
) -> SafetensorsFolder:
    whole = None
    if translate and model.translation:
        whole = model.state_dict(gather_to_rank0=True)
        whole = model.translation.to_theirs(whole) if runtime.rank == 0 else {}
    return SafetensorsFolder(runtime, model, max_shard_size_bytes, whole)


def _write_folder(
    runtime: TorchRuntime,
    directory: CheckpointDirectory,
    tag: str | int,
    folder: SafetensorsFolder,
    asynchronous: bool,
) -> BackgroundSave | None:
    files = folder.small_files() if runtime.rank == 0 else {}
    if not asynchronous:
        directory.write_folder(tag, files, steps=[folder.check, folder.write])
        return None
    runtime.pending_save = directory.write_behind(
        tag,
        {name: made_now(writer) for name, writer in files.items()},
        partial=False,
        is_folder=True,
        steps=[folder.check, folder.take],
        rest=Rest(folder.write_taken),
        timeout_seconds=runtime.config.communication_timeout,
    )
    return runtime.pending_save


def _written(
    runtime: TorchRuntime,
    directory: CheckpointDirectory,
    tag: str | int,
    files: dict[str, _File],
    asynchronous: bool,
    *,
    partial: bool,
    keep: int | None = None,
    dcp: DcpWriter | None = None,
) -> BackgroundSave | None:
    """Writes files, now or while the job goes on; then it returns what can be waited for."""
    steps = dcp.steps if dcp else ()
    if asynchronous:
        runtime.pending_save = directory.write_behind(
            tag,
            {name: file.take for name, file in files.items()},
            partial=partial,
            keep=keep,
            steps=steps,
            rest=dcp.rest if dcp else None,
            timeout_seconds=runtime.config.communication_timeout,
        )
        return runtime.pending_save
    writers = {name: file.write for name, file in files.items()}
    if partial:
        directory.write_partial(tag, writers, keep=keep, steps=steps)
    else:
        directory.write_full(tag, writers)
    return None


def _halves(optimizer: DistributedOptimizer) -> tuple[Any, Any]:
    """Returns the state of this rank: what the optimizer keeps, and what half precision adds."""
    return optimizer_state.without_half(optimizer.local_state_dict(gather_if_shard=False))


def _user_content_writer(value: Any) -> Writer:
    def write(stream: BinaryIO) -> None:
        torch.save(value, stream)
        stream.seek(0)
        if refused := refused_in(stream):
            warnings.warn(
                f"user_content holds objects of {', '.join(refused)}, which a resume does not make "
                "by itself, since that can run code from the file: it will need "
                "trust_pickle=True. Tensors, plain values, dataclasses, enumerations and "
                "configurations with to_dict need nothing.",
                stacklevel=2,
            )

    return write


def _write_bytes(stream: BinaryIO, data: bytes) -> None:
    stream.write(data)
