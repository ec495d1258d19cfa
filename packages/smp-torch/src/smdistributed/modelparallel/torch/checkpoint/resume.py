"""Resuming: from the rank's own part of a checkpoint, or from its share of all parts.

A partial checkpoint is named after the partition that wrote it, but its parts go by the names of
parameters. A job with the same degrees takes over the partition, and each rank reads its own part;
any other job reads all parts, and each rank keeps what belongs there.

Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from smdistributed.modelparallel.common.checkpoint.store import Checkpoint
from smdistributed.modelparallel.common.errors import CheckpointError, SMPError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.checkpoint import generators, layout
from smdistributed.modelparallel.torch.checkpoint.dcp_folder import METADATA, DcpFolder
from smdistributed.modelparallel.torch.checkpoint.dcp_states import StoredStates
from smdistributed.modelparallel.torch.checkpoint.files import CheckpointFiles
from smdistributed.modelparallel.torch.checkpoint.folder import (
    USER_CONTENT,
    directory_at,
    expect_wrapped,
    finish_pending,
    of_torchs_own,
    weights_at,
)
from smdistributed.modelparallel.torch.checkpoint.layout import Layout, own_part_name, part_name
from smdistributed.modelparallel.torch.checkpoint.parts_of_files import PartsOfFiles
from smdistributed.modelparallel.torch.model.distributed import DistributedModel, models_of
from smdistributed.modelparallel.torch.optimizer import state as optimizer_state
from smdistributed.modelparallel.torch.optimizer.distributed import (
    DistributedOptimizer,
    optimizers_of,
)
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

logger = logging.getLogger(__name__)

#: Names that a message lists.
_MOST_NAMES = 5

_Wrapper = TypeVar("_Wrapper", DistributedModel, DistributedOptimizer)


@dataclass
class _Content:
    """What this rank takes from a checkpoint.

    Attributes:
        model: the whole state, or with ``partition`` this rank's part.
        optimizer: its state, as ``model``.
        partition: the partition to take over, by module name; None to keep the job's own.
        is_own: ``model`` is what this rank itself would have saved.
        random: the state of the random generators.
        user: the user's content.
        stored: the states of both in a folder, of which this rank reads what it keeps.
        loads_optimizer: take that of the optimizer, too.
    """

    model: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    partition: dict[str, int] | None = None
    is_own: bool = False
    random: dict[str, Any] | None = None
    user: Any = None
    stored: StoredStates | None = None
    loads_optimizer: bool = True

    @property
    def has_optimizer(self) -> bool:
        """Whether there is a state of the optimizer to load."""
        if self.stored is not None:
            return self.loads_optimizer and self.stored.has_optimizer
        return self.optimizer is not None

    def state_for(self, optimizer: DistributedOptimizer, *, masters_only: bool) -> dict[str, Any]:
        """Returns that state, with ``masters_only`` without what an optimizer itself keeps."""
        if self.stored is not None:
            return self.stored.optimizer_state(optimizer, masters_only=masters_only)
        assert self.optimizer is not None
        return optimizer_state.only_masters(self.optimizer) if masters_only else self.optimizer


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
    load_sharded_optimizer_state: bool,
    trust_pickle: bool,
    translate: Callable[[Any], Any] | None,
) -> Any:
    """See ``smp.resume_from_checkpoint``."""
    model = _given_or_last(model, DistributedModel, models_of(runtime), "model")
    optimizer = _given_or_last(optimizer, DistributedOptimizer, optimizers_of(runtime), "optimizer")
    if model is None:
        raise SMPError("make the DistributedModel before smp.resume_from_checkpoint.")
    finish_pending(runtime)
    directory = directory_at(runtime, path)
    checkpoint = of_torchs_own(directory, tag) if partial else None
    if checkpoint is None:
        checkpoint = directory.resolve(tag if partial else weights_at(path, tag), partial=partial)
    reader = _Reader(runtime, checkpoint, trust_pickle)
    contents: list[_Content] = []

    def read() -> None:
        if partial:
            content = reader.partial(model, load_optimizer, strict)
        else:
            content = reader.full(load_optimizer)
        # Full checkpoints are also for scripts that do not train.
        if partial and content.has_optimizer and optimizer is None:
            raise CheckpointError(
                "the checkpoint holds optimizer state: make the DistributedOptimizer before "
                "smp.resume_from_checkpoint, or pass load_optimizer=False."
            )
        contents.append(content)

    directory.everywhere(f"Resuming checkpoint '{checkpoint.tag}' in {directory.path}", read)
    (content,) = contents
    if content.partition is not None:
        model.holder.fix_partition(content.partition)
    if content.model is not None and not partial:
        if reader.files.names_weights_once:
            model.name_ties(content.model)
        if translate is not None:
            content.model = translate(content.model)
        elif model.translation:
            names = model.holder.saved_names()
            if not model.translation.is_ours(content.model, names):
                content.model = model.translation.to_ours(content.model)
    if content.stored is not None:
        content.stored.load_model(strict=strict)
    if content.model is not None:
        model.load_state_dict(content.model, strict=strict, same_partition_load=content.is_own)
    if content.has_optimizer and optimizer is not None:
        masters_only = runtime.sharding_groups is not None and not load_sharded_optimizer_state
        optimizer.load_state_dict(content.state_for(optimizer, masters_only=masters_only))
    if content.random is not None:
        generators.restore(content.random, runtime.device)
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
        self.files = CheckpointFiles(checkpoint, trust_pickle)

    def full(self, load_optimizer: bool) -> _Content:
        """Returns the content of a full checkpoint."""
        return _Content(
            model=self.files.weights_of_full(),
            optimizer=self.files.read_if_there("optimizer") if load_optimizer else None,
            user=self._user_content("user_content"),
        )

    def partial(self, model: DistributedModel, load_optimizer: bool, strict: bool) -> _Content:
        """Returns the content of a partial checkpoint that belongs to this rank."""
        if METADATA in self._checkpoint.paths:
            return self._of_dcp(model, load_optimizer, strict)
        stored = self.files.layout()
        num_parts = stored.pipeline_parallel_degree * stored.tensor_parallel_degree
        if num_parts > len(self._checkpoint.paths):
            raise CheckpointError(
                f"{layout.FILE} must fit the files of the checkpoint, of which each rank wrote one "
                f"at least: it says pipeline_parallel_degree {stored.pipeline_parallel_degree} and "
                f"tensor_parallel_degree {stored.tensor_parallel_degree}, and there are "
                f"{len(self._checkpoint.paths)} files. It is damaged: restore it, or resume from "
                "another tag."
            )
        there = {name: each.shape for name, each in stored.tensors.items()}
        _check_model(there, model, strict=strict)
        own = Layout.of(self._runtime, model)
        same_degree = stored.pipeline_parallel_degree == own.pipeline_parallel_degree
        same_split = stored.tensor_parallel_degree == own.tensor_parallel_degree
        adopts = (
            same_degree and same_split and (not own.partition or own.partition == stored.partition)
        )
        # Owners of what tensor-parallel ranks hold alike are among all of these.
        is_spread = load_optimizer and own.tensor_parallel_degree > 1 and self.files.has_owners
        is_own = adopts and _has_same_shards(stored, own) and not is_spread
        content = _Content(
            partition=stored.partition if adopts else None,
            is_own=is_own,
            random=self._random_state(stored),
            user=self._user_content(USER_CONTENT),
        )
        if is_own:
            content.model, content.optimizer = self._own_part(load_optimizer)
            return content
        logger.info(
            "%s was saved with pipeline_parallel_degree %d, tensor_parallel_degree %d and "
            "sharded_data_parallel_degree %d, in other parts; every rank takes its share of "
            "all of them.",
            self._checkpoint.tag,
            stored.pipeline_parallel_degree,
            stored.tensor_parallel_degree,
            stored.sharded_data_parallel_degree,
        )
        models = self.files.models(stored)
        optimizers = self.files.optimizers(stored) if load_optimizer else {}
        parts = PartsOfFiles(stored, models, optimizers)
        content.stored = StoredStates(self._runtime, parts, model, has_model=bool(models))
        return content

    def _of_dcp(self, model: DistributedModel, load_optimizer: bool, strict: bool) -> _Content:
        """Returns the content of a folder of DCP; without a layout another program wrote it."""
        self._verify_share()
        folder = DcpFolder(self._checkpoint.paths[METADATA].parent, self.files.trusts_pickle)
        states = StoredStates(self._runtime, folder, model)
        _check_model(states.shapes, model, strict=strict)
        if layout.FILE not in self._checkpoint.paths:
            return _Content(stored=states, loads_optimizer=load_optimizer)
        stored = self.files.layout()
        topology = self._runtime.topology
        adopts = stored.partition and topology.pp_size == stored.pipeline_parallel_degree
        own = model.holder.partition_by_name()
        return _Content(
            stored=states,
            loads_optimizer=load_optimizer,
            partition=stored.partition if adopts and own in ({}, stored.partition) else None,
            random=self._random_state(stored),
            user=self._user_content(USER_CONTENT),
        )

    def _verify_share(self) -> None:
        """Verifies files that all ranks read parts of: each rank some of them."""
        rank = self._runtime.rank
        size = len(self._runtime.topology.members(CommGroup.WORLD, rank))
        for name in sorted(self._checkpoint.paths)[rank::size]:
            self._checkpoint.open(name).close()

    def _own_part(self, load_optimizer: bool) -> tuple[Any, Any]:
        """Returns the states of model and optimizer that this rank saved; None for what lacks."""
        part = own_part_name(self._runtime, self._runtime.rank)
        optimizer = self.files.optimizer_part(part) if load_optimizer else None
        return self.files.read_if_there(f"model_{part}.pt"), optimizer

    def _user_content(self, name: str) -> Any:
        path = self._checkpoint.paths.get(name)
        # Programs mark a folder as a checkpoint without user content by an empty file; what this
        # library saves is not empty.
        is_own = self._checkpoint.manifest is not None
        is_there = path is not None and (is_own or path.stat().st_size > 0)
        return self.files.read(name) if is_there else None

    def _random_state(self, stored: Layout) -> Any:
        place, topology = self._runtime.coordinates, self._runtime.topology
        # With other degrees, that of the first rank: the numbers of a step follow from it.
        part = part_name(
            place.pp_rank if stored.pipeline_parallel_degree == topology.pp_size else 0,
            place.tp_rank if stored.tensor_parallel_degree == topology.tp_size else 0,
        )
        name = f"random_{part}_{place.rdp_cp_rank}.pt"
        if name not in self._checkpoint.paths:
            logger.warning(
                "%s has no random state of replica %d: the job that saved it had fewer. The "
                "random generators of this rank stay as the script seeded them.",
                self._checkpoint.tag,
                place.rdp_cp_rank,
            )
        return self.files.read_if_there(name)


def _has_same_shards(stored: Layout, own: Layout) -> bool:
    """Tells whether a rank's own files hold what the rank has of each parameter."""
    degrees = {stored.sharded_data_parallel_degree, own.sharded_data_parallel_degree}
    if degrees == {1}:
        return True
    if len(degrees) > 1 or stored.tensors.keys() != own.tensors.keys():
        return False
    return all(
        [piece.part for piece in stored.tensors[name].pieces]
        == [piece.part for piece in each.pieces]
        for name, each in own.tensors.items()
    )


def _check_model(
    there: Mapping[str, tuple[int, ...]], model: DistributedModel, *, strict: bool
) -> None:
    """Makes sure that a checkpoint is of a model like this one; every rank finds the same.

    Raises:
        CheckpointError: names what differs.
    """
    here = model.holder.saved_shapes()
    if not there:
        return
    differences = {
        "lacks": [name for name in here if name not in there] if strict else [],
        "has besides": [name for name in there if name not in here] if strict else [],
        "has in other shapes": [
            f"{name} {there[name]} for {shape}"
            for name, shape in here.items()
            if there.get(name, shape) != shape
        ],
    }
    told = "; ".join(f"it {what} {_listed(names)}" for what, names in differences.items() if names)
    if told:
        raise CheckpointError(
            f"the checkpoint is of another model: {told}. Resume into the model that was saved"
            + (", or pass strict=False to load what has the same name." if strict else ".")
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _given_or_last(
    given: _Wrapper | None, kind: type[_Wrapper], alive: list[_Wrapper], name: str
) -> _Wrapper | None:
    expect_wrapped(given, kind, f"resume_from_checkpoint({name}=...)")
    return given or (alive[-1] if alive else None)
