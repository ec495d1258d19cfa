"""Saving and resuming."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from smdistributed.modelparallel.common.checkpoint.background import BackgroundSave
from smdistributed.modelparallel.torch.api.slot import slot
from smdistributed.modelparallel.torch.checkpoint import rank_files
from smdistributed.modelparallel.torch.checkpoint import resume as resuming
from smdistributed.modelparallel.torch.checkpoint import save as saving
from smdistributed.modelparallel.torch.model.distributed import DistributedModel as BaseModel
from smdistributed.modelparallel.torch.optimizer.distributed import (
    DistributedOptimizer as BaseOptimizer,
)


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str | int,
    partial: bool = True,
    model: BaseModel | None = None,
    optimizer: BaseOptimizer | None = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    *,
    asynchronous: bool = False,
    format: str = "torch",
    max_shard_size_bytes: int = 5 * 10**9,
) -> BackgroundSave | None:
    """Saves a checkpoint that a later job can resume from; never leaves half of one.

    Collective: every process; the library picks the writers. On return everything is on disk.

    With ``asynchronous``, an addition of this library, everything has been copied on return, to
    host memory, and is written while training goes on; so each writer has what it writes once more
    in memory until that is on disk. The checkpoint is there, and the newest, when all ranks have
    written. The next save or resume waits for that, and so does a process that ends normally.

    Args:
        path: the folder; made if missing.
        tag: the same on all ranks, normally the step.
        partial: one file a rank, to continue from to the last bit: it also holds the partition
            and the state of the random generators of each rank. False: the whole model in the file
            ``tag``, and the whole optimizer state in ``optimizer_<tag>``, for torch alone to load.
        model: the DistributedModel.
        optimizer: the DistributedOptimizer.
        user_content: anything that ``torch.save`` takes; returned on resume. What will not come
            back without ``trust_pickle`` is warned of.
        translate_if_full: give the weights of a full checkpoint the names and shapes of the modules
            that were replaced: those of Transformers.
        num_kept_partial_checkpoints: remove older partial checkpoints beyond this number.
        asynchronous: return before everything is on disk.
        format: an addition of this library. ``torch``: files of ``torch.save``. ``safetensors``,
            with ``partial=False`` and a model alone: the folder ``tag``, which ``from_pretrained``
            of Transformers opens. The first rank of each partition writes its tensors, with no
            more than one file of them at a time where they are in slices or shards, or with
            ``asynchronous`` all of them. ``dcp``: a
            partial checkpoint whose model and optimizer ``torch.distributed.checkpoint`` reads, in
            the names of ``get_model_state_dict`` and ``get_optimizer_state_dict``. Each rank
            writes its own parts; fp32 masters are the model's weights there.
        max_shard_size_bytes: of files of safetensors.

    Returns:
        None; with ``asynchronous`` what can be waited for: its ``wait()``, called by every process,
        returns when the checkpoint is complete, or raises why it is not.

    Raises:
        TypeError: ``model`` or ``optimizer`` is not wrapped.
        ValueError: the format is unknown, or has no place for what is to be saved.
        NotPartitionedError: the format needs the partition, which is not decided yet.
        CheckpointError: some rank failed to write; nothing was committed. Or a former asynchronous
            save failed that nobody has waited for: nothing was saved by this call; save again.

    Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading.
    """
    return saving.save_checkpoint(
        slot.together("smp.save_checkpoint"),
        path,
        tag,
        partial=partial,
        model=model,
        optimizer=optimizer,
        user_content=user_content,
        num_kept_partial_checkpoints=num_kept_partial_checkpoints,
        translate_if_full=translate_if_full,
        asynchronous=asynchronous,
        format=format,
        max_shard_size_bytes=max_shard_size_bytes,
    )


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | int | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[Any], Any] | None = None,
    *,
    load_optimizer_states: bool | None = None,
    model: BaseModel | None = None,
    optimizer: BaseOptimizer | None = None,
    trust_pickle: bool = False,
) -> Any:
    """Restores the model and the optimizer of this script from a checkpoint.

    A partial checkpoint also restores the state of the random generators (torch's of the host and
    of the device, Python's, NumPy's if it is imported), so that training goes on as if it had not
    stopped. With the degrees that it was saved with, its partition is taken over, and a model that
    is not partitioned yet gets the weights in the first call of a step function. With another
    ``pipeline_parallel_degree``, or another partition already in place, every rank takes its share
    of all parts, and the random state of the first rank of its pipeline. So it is with another
    ``tensor_parallel_degree``, or with other shards. A replica that the saving
    job did not have keeps the random state that the script gave it. Collective: every process.

    Args:
        path: the folder.
        tag: which checkpoint; None takes the newest of its kind. A folder that
            ``torch.distributed.checkpoint`` wrote goes by its name, or without a tag by ``path``;
            each rank reads the parts that it keeps, and random states stay. With ``partial=False``
            it can be the name of a file that ``torch.save`` wrote from the state of the plain
            model, of a file of safetensors or of its index, or of a folder that
            ``save_pretrained`` of Transformers wrote; None then takes the model that ``path``
            itself holds so.
        partial: the kind of the checkpoint.
        strict: missing or unexpected names are errors.
        load_optimizer: restore the optimizer too, if the checkpoint holds its state.
        load_sharded_optimizer_state: False: with sharded data parallelism, restore of the optimizer
            its settings, fp32 masters and the loss scale, and no state of its own. Otherwise
            without effect: state fits any number of owners.
        translate_function: with ``partial=False``, gives the weights the names and shapes of the
            model; None does so for models of Transformers that the library knows.
        load_optimizer_states: the former name of ``load_optimizer``.
        model: which DistributedModel to restore; by default the one made last.
        optimizer: which DistributedOptimizer to restore; by default the one made last.
        trust_pickle: load user content of any class, which can run code from the file. Tensors,
            plain values and configurations (dataclasses, enumerations, namespaces, objects with
            ``to_dict``) of classes that the script has imported need it not.

    Returns:
        The user content of the checkpoint, or None.

    Raises:
        CheckpointError: missing, damaged, or with optimizer state for which there is no optimizer;
            on all ranks.
        ValueError: ``translate_function`` for a partial checkpoint.

    Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading.
    """
    if translate_function is not None and partial:
        raise ValueError(
            "translate_function is for full checkpoints: pass partial=False, or leave it out."
        )
    return resuming.resume_from_checkpoint(
        slot.together("smp.resume_from_checkpoint"),
        path,
        tag,
        partial=partial,
        model=model,
        optimizer=optimizer,
        strict=strict,
        load_optimizer=load_optimizer if load_optimizer_states is None else load_optimizer_states,
        load_sharded_optimizer_state=load_sharded_optimizer_state,
        trust_pickle=trust_pickle,
        translate=translate_function,
    )


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    *,
    v3: bool = False,
) -> None:
    """Saves an object as ``torch.save`` does, through a temporary file; one file a rank if partial.

    Local; call it with dp_rank 0 (partial) or rank 0 (not partial).

    Args:
        obj: what to save.
        f: file name; a partial file's gets ``_<mp_rank>``, or with ``v3``
            ``_<pp_rank>_<tp_rank>_<rdp_rank>``.
        partial: whether each caller writes a file of its own.
        pickle_module: as in ``torch.save``.
        pickle_protocol: as in ``torch.save``.
        v3: the longer name.

    Raises:
        TypeError: ``f`` is no str.
        FileNotFoundError: its folder does not exist.

    Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading.
    """
    rank_files.save(
        slot.get(),
        obj,
        f,
        partial=partial,
        v3=v3,
        pickle_module=pickle_module,
        pickle_protocol=pickle_protocol,
    )


def load(
    f: str,
    map_location: Any = None,
    pickle_module: Any = pickle,
    *,
    partial: bool = True,
    back_compat: bool = False,
    pickle_load_args: Mapping[str, Any] | None = None,
    **more_pickle_load_args: Any,
) -> Any:
    """Loads what ``smp.save`` or ``torch.save`` wrote; by default no more than plain values.

    Local. Tensors, and objects that hold plain values, as in ``resume_from_checkpoint``. A file of
    objects of other classes needs ``weights_only=False``, which can run code from
    the file.

    Args:
        f: file name, as it was given to ``smp.save``.
        map_location: as in ``torch.load``.
        pickle_module: as in ``torch.load``; another than ``pickle`` needs ``weights_only=False``.
        partial: read this rank's own file.
        back_compat: accepted, without effect.
        pickle_load_args: passed on to ``torch.load``, as the further arguments by keyword are.
        more_pickle_load_args: passed on to ``torch.load``.

    Raises:
        TypeError: ``f`` is no str.
        CheckpointError: there is no file of this rank; lists those found and their degrees.

    Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading.
    """
    return rank_files.load(
        slot.get(),
        f,
        partial=partial,
        map_location=map_location,
        pickle_module=pickle_module,
        arguments={**(pickle_load_args or {}), **more_pickle_load_args},
    )
