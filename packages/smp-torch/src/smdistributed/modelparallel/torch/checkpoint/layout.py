"""The index of a partial checkpoint: with which degrees it was saved, and where each tensor lies.

It is the file ``layout.json``. A tensor is listed as a whole (shape and dtype) with the pieces that
it was saved in: the file, and which part of the tensor lies there. So a job with any other layout
knows what to read without asking who wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.common.pieces import Part, Piece, Rectangle, covers
from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.model.state import PARTIAL_KEY
from smdistributed.modelparallel.torch.optimizer import state as optimizer_state
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

#: What the index is called in a checkpoint.
FILE = "layout.json"


@dataclass(frozen=True)
class StoredPiece:
    """A part of a tensor in a file.

    Attributes:
        file: its name.
        offsets, sizes: which part of the whole tensor it is.
        at: where it lies in the tensor of the file; empty: it is all of that.
    """

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...] = ()

    @property
    def part(self) -> Rectangle:
        """Which part of the whole tensor it is."""
        return Rectangle(self.offsets, self.sizes)

    @property
    def held(self) -> Rectangle:
        """Which part of the tensor of the file it is."""
        return Rectangle(self.at or (0,) * len(self.sizes), self.sizes)

    def taken(self, tensor: torch.Tensor, part: Rectangle) -> torch.Tensor:
        """Returns a part of the whole that is in this piece, of the tensor of the file."""
        piece = tensor[self.held.within(Rectangle.whole(tensor.shape))]
        return piece[part.within(self.part)]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the model.

    Attributes:
        shape: of the whole tensor.
        dtype: its name, such as ``float32``.
        pieces: that it was saved in; they do not overlap.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]

    def shapes_in_files(self) -> set[tuple[int, ...]]:
        """Returns the shapes that the files' tensors have."""
        ends: dict[str, tuple[int, ...]] = {}
        for each in self.pieces:
            known = ends.get(each.file, each.held.ends)
            ends[each.file] = tuple(map(max, known, each.held.ends))
        return set(ends.values())

    def part(
        self, name: str, files: Mapping[str, Mapping[str, torch.Tensor]], wanted: Part
    ) -> torch.Tensor:
        """Returns a part of the tensor; no copy, if that is in one piece.

        Args:
            name: of the tensor.
            files: what they hold of it, by file name.
            wanted: which part.

        Raises:
            CheckpointError: some of it is in no file.
        """
        held = [each for each in self.pieces if name in files.get(each.file, {})]
        if not all(covers((each.part for each in held), there) for there, _ in wanted.places()):
            raise CheckpointError(
                f"the checkpoint lacks elements of {name}: {FILE} lists its pieces in "
                f"{', '.join(each.file for each in self.pieces)}, of which "
                f"{', '.join(each.file for each in held) or 'none'} hold it. A file is missing or "
                "is another checkpoint's."
            )
        found = [
            (common, each.taken(files[each.file][name], common), there, here)
            for there, here in wanted.places()
            for each in held
            if (common := each.part.intersection(there)) is not None
        ]
        if len(found) == 1 and found[0][0].num_elements == wanted.num_elements:
            return found[0][1]
        dtype = files[held[0].file][name].dtype if held else getattr(torch, self.dtype)
        joined = torch.empty(wanted.sizes, dtype=dtype, device="cpu")
        everything = Rectangle.whole(wanted.sizes)
        for common, values, there, here in found:
            joined[here.within(everything)][common.within(there)] = values
        return joined


@dataclass(frozen=True)
class Layout:
    """What ``layout.json`` says.

    Attributes:
        pipeline_parallel_degree, tensor_parallel_degree: of the job that saved it.
        partition: of every module of the chosen granularity, by name.
        tensors: of the model, by name.
        sharded_data_parallel_degree: of the job that saved it.
    """

    pipeline_parallel_degree: int
    tensor_parallel_degree: int
    partition: dict[str, int]
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    sharded_data_parallel_degree: int = 1

    @classmethod
    def of(cls, runtime: TorchRuntime, model: DistributedModel | None) -> Layout:
        """Returns the layout of this job. Every rank finds the same by itself."""
        topology = runtime.topology
        return cls(
            topology.pp_size,
            topology.tp_size,
            {} if model is None else model.holder.partition_by_name(),
            {} if model is None else _stored(runtime, model),
            runtime.config.sharded_data_parallel_degree,
        )

    def text(self) -> str:
        """Returns it as JSON."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads what ``text`` gave.

        Raises:
            CheckpointError: it is something else.
        """
        try:
            read = json.loads(text)
            tensors = {
                name: StoredTensor(
                    tuple(each["shape"]),
                    each["dtype"],
                    tuple(_piece(**piece) for piece in each["pieces"]),
                )
                for name, each in read.pop("tensors").items()
            }
            layout = cls(**read, tensors=tensors)
            for degree in (
                layout.pipeline_parallel_degree,
                layout.tensor_parallel_degree,
                layout.sharded_data_parallel_degree,
            ):
                if type(degree) is not int or degree < 1:
                    raise ValueError(f"a degree of {degree!r}")
            for name, index in layout.partition.items():
                if index not in range(layout.pipeline_parallel_degree):
                    raise ValueError(f"partition {index!r} of {name!r}")
            return layout
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{FILE} must be what smp.save_checkpoint of this version writes; received "
                f"something that lacks a part of it ({error!r}): save the checkpoint again, or "
                "resume from a full one."
            ) from error

    def assemble(self, files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the whole state of the model.

        Args:
            files: the states that the ranks saved, by file name.

        Raises:
            CheckpointError: some of a tensor is in no file.
        """
        state = {name: value for each in files.values() for name, value in each.items()}
        tied: dict[Any, torch.Tensor] = {}
        for name, stored in self.tensors.items():
            memory = tuple(
                (piece.file, files[piece.file][name].data_ptr())
                for piece in stored.pieces
                if name in files.get(piece.file, {})
            )
            if (memory, stored.shape) not in tied:
                tied[memory, stored.shape] = stored.part(name, files, Rectangle.whole(stored.shape))
            state[name] = tied[memory, stored.shape]
        return {**state, PARTIAL_KEY: False}

    def assemble_optimizer(self, files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the whole named state of the optimizer.

        A tensor of the size of a parameter's piece lies as the parameter does.

        Args:
            files: the states that the ranks saved, by file name.

        Raises:
            CheckpointError: some of a tensor is in no file.
        """
        merged = optimizer_state.merge(list(files.values()))
        states = merged["state"]
        for name, key, held in self.in_pieces(merged, files):
            stored = self.tensors[name]
            whole = stored.part(name, held, Rectangle.whole(stored.shape))
            states[name] = {**states[name], key: whole}
        return merged

    def in_pieces(
        self, merged: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[tuple[str, str, dict[str, dict[str, Any]]]]:
        """Yields the tensors of an optimizer's state that lie as parameters in several pieces do.

        Args:
            merged: the state of all files.
            files: as for ``assemble_optimizer``.

        Yields:
            The name of the parameter, the key in its state, and the pieces as ``part`` of the
            parameter takes them.
        """
        for name, stored in self.tensors.items():
            if len(stored.pieces) == 1 or name not in merged["state"]:
                continue
            shapes = stored.shapes_in_files()
            for key, value in list(merged["state"][name].items()):
                if not isinstance(value, torch.Tensor) or tuple(value.shape) not in shapes:
                    continue
                yield (
                    name,
                    key,
                    {
                        piece.file: {name: files[file]["state"][name][key]}
                        for piece in stored.pieces
                        if (file := piece.file.replace("model_", "optimizer_", 1)) in files
                        and key in files[file]["state"].get(name, {})
                    },
                )


def _piece(
    file: str, offsets: Sequence[int], sizes: Sequence[int], at: Sequence[int] = ()
) -> StoredPiece:
    return StoredPiece(file, tuple(offsets), tuple(sizes), tuple(at))


def part_name(pp_rank: int, tp_rank: int) -> str:
    """Returns what the names of the files of a rank end in."""
    return f"{pp_rank}_{tp_rank}"


def own_part_name(runtime: TorchRuntime, rank: int) -> str:
    """Returns what the names of the files of a rank end in, with its shard if there are some."""
    place, degree = runtime.topology.coordinates(rank), runtime.config.sharded_data_parallel_degree
    shard = "" if degree == 1 else f"_{place.rdp_cp_rank % degree}"
    return f"{part_name(place.pp_rank, place.tp_rank)}{shard}"


def _stored(runtime: TorchRuntime, model: DistributedModel) -> dict[str, StoredTensor]:
    """Returns where the tensors of a model are saved: by the first rank that holds a piece."""
    pieces = model.holder.pieces() if model.partitioned else {}
    stored = {}
    with model.holder.absence.past(), model.holder.as_blocks():
        state = model.get_module().state_dict()
    for name, tensor in state.items():
        held = pieces.get(name)
        if held is not None:
            stored[name] = StoredTensor(
                held[0].shape,
                str(tensor.dtype).removeprefix("torch."),
                tuple(
                    stored_piece
                    for piece in held
                    for stored_piece in _stored_pieces(runtime, piece)
                    if piece.part.num_elements or len(held) == 1
                ),
            )
    return stored


def _stored_pieces(runtime: TorchRuntime, piece: Piece) -> Iterator[StoredPiece]:
    file = f"model_{own_part_name(runtime, piece.speaker)}.pt"
    for there, here in piece.part.places():
        at = here.offsets if any(here.offsets) else ()
        yield StoredPiece(file, there.offsets, there.sizes, at)
