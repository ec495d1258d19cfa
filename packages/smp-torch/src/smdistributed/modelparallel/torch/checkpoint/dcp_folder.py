"""Folders of ``torch.distributed.checkpoint`` (DCP): what ranks write and read of them.

Torch's own planners know whole tensors and those on meshes of devices. What a rank has here is any
part of a tensor, so there is a planner for these; files and metadata are torch's own. Ranks take
DCP's steps in the exchange of the checkpoint's folder, and each reads by itself.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import io
import math
import pathlib
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from smdistributed.modelparallel.common.checkpoint.directory import Rest, Step
from smdistributed.modelparallel.common.checkpoint.store import is_plain
from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.common.pieces import Part, Rectangle
from smdistributed.modelparallel.torch.checkpoint.held_copies import HeldCopy
from smdistributed.modelparallel.torch.checkpoint.plain_classes import TRUST_VARIABLE

#: The file by which a folder is one of DCP.
METADATA = ".metadata"
#: What its metadata is made of besides the classes of torch's module of that name and paths.
_NAMES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


@dataclass(frozen=True)
class Held:
    """A value of a nested state, of which this rank writes what it has.

    Attributes:
        path: the keys of dicts and the places in lists that lead to it.
        value: a tensor, or what ``torch.load`` takes without trust.
        shape: of the whole tensor.
        part: of it, that ``value`` is; None for what is no tensor.
    """

    path: tuple[str | int, ...]
    value: Any
    shape: tuple[int, ...] = ()
    part: Part | None = None

    @classmethod
    def whole(cls, path: tuple[str | int, ...], value: Any) -> Held:
        """Returns a value that no other rank has more of."""
        if not torch.is_tensor(value):
            return cls(path, value)
        return cls(path, value, tuple(value.shape), Rectangle.whole(value.shape))

    @property
    def key(self) -> str:
        """What DCP calls it."""
        return ".".join(map(str, self.path))


class DcpWriter:
    """The steps in which the ranks write a folder; see ``CheckpointDirectory``.

    Args:
        rank: of this process.
        held: what it writes; no other rank writes the same.
        behind: write a copy, after the steps, while the job goes on.
    """

    def __init__(self, rank: int, held: Sequence[Held], *, behind: bool) -> None:
        self._rank = rank
        self._held = held
        self._behind = behind
        self.steps: tuple[Step, ...] = (self._plan, self._write, self._finish)
        self.rest: Rest | None = None
        if behind:
            self.steps = (self._plan, self._divide)
            self.rest = Rest(self._write_rest, self._complete)

    def _plan(self, folder: Path, before: Sequence[Any]) -> SavePlan:
        held, leads = self._held, self._rank == 0
        if self._behind:
            self._copy = HeldCopy([each.value for each in held])
            held = _with_values(held, self._copy.state)
        self._planner = _HeldPlanner(held)
        self._planner.set_up_planner({}, is_coordinator=leads)
        # What is on the host needs no stream of a device, which a capture beside it would not bear.
        ahead = {"per_thread_copy_ahead": 0} if self._behind else {}
        self._writer = FileSystemWriter(folder, **ahead)  # type: ignore[arg-type]
        self._writer.set_up_storage_writer(leads)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _divide(self, folder: Path, before: Sequence[Any]) -> None:
        # All find the same from the same plans.
        plans, self._metadata = self._planner.create_global_plan(list(before))
        self._own = self._writer.prepare_global_plan(plans)[self._rank]

    def _write(self, folder: Path, before: Sequence[Any]) -> list[WriteResult]:
        self._divide(folder, before)
        return self._write_data()

    def _write_data(self) -> list[WriteResult]:
        plan = self._planner.finish_plan(self._own)
        return self._writer.write_data(plan, self._planner).wait()

    def _finish(self, folder: Path, before: Sequence[Any]) -> list[str]:
        if self._rank != 0:
            return self._names(folder)
        self._writer.finish(self._metadata, list(before))
        return [*self._names(folder), METADATA]

    def _names(self, folder: Path) -> list[str]:
        return sorted(path.name for path in folder.glob(f"__{self._rank}_*"))

    def _write_rest(self, folder: Path) -> tuple[list[str], str]:
        self._planner.hold(_with_values(self._held, self._copy.to_host()))
        places = {each.index: each.storage_data for each in self._write_data()}
        told = pickle.dumps(Metadata({}, storage_data=places))
        return self._names(folder), base64.b64encode(told).decode()

    def _complete(self, folder: Path, told: Sequence[str]) -> list[str]:
        results = [
            [WriteResult(index, place.length, place) for index, place in _places_in(each).items()]
            for each in told
        ]
        self._writer.finish(self._metadata, results)
        return [METADATA]


def _with_values(held: Sequence[Held], values: Sequence[Any]) -> list[Held]:
    pairs = zip(held, values, strict=True)
    return [dataclasses.replace(each, value=value) for each, value in pairs]


class _HeldPlanner(DefaultSavePlanner):
    """Plans to write parts of tensors."""

    def __init__(self, held: Sequence[Held]) -> None:
        super().__init__()
        self._paths = {each.key: each.path for each in held}
        self.hold(held)

    def hold(self, held: Sequence[Held]) -> None:
        """Has what is written lie elsewhere than when it was planned."""
        self._items: list[WriteItem] = []
        self._values: dict[MetadataIndex, Any] = {}
        for each in held:
            self._add(each)

    def _add(self, held: Held) -> None:
        if held.part is None:
            item = WriteItem(MetadataIndex(held.key), WriteItemType.BYTE_IO)
            self._items.append(item)
            self._values[item.index] = held.value
            return
        everything = Rectangle.whole(held.value.shape)
        for there, here in held.part.places():
            data = TensorWriteData(
                chunk=_chunk(there),
                properties=TensorProperties(dtype=held.value.dtype),
                size=torch.Size(held.shape),
            )
            index = MetadataIndex(held.key, there.offsets)
            self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            self._values[index] = held.value.detach()[here.within(everything)]

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items, planner_data=self._paths)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._values[index]


class DcpFolder:
    """A folder that is read. Local.

    Args:
        path: where it is.
        trust_pickle: load values of any class.

    Attributes:
        tensors: the shapes of the whole tensors, by key.
        others: the keys of what is no tensor.

    Raises:
        CheckpointError: its metadata is damaged, or says more than DCP does; a file is missing.
    """

    def __init__(self, path: Path, trust_pickle: bool = False) -> None:
        self._path = path
        self._trust_pickle = trust_pickle
        self._reader = _PlainReader(path)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        for file in sorted({each.relative_path for each in self._metadata.storage_data.values()}):
            if not is_plain(file) or not (path / file).is_file():
                raise CheckpointError(
                    f"{path / METADATA} names the file {file}, which is not beside it: copy the "
                    "folder again, whole."
                )
        stored = self._metadata.state_dict_metadata
        self._stored = {
            key: each for key, each in stored.items() if isinstance(each, TensorStorageMetadata)
        }
        self.tensors = {key: tuple(each.size) for key, each in self._stored.items()}
        self.others = stored.keys() - self.tensors.keys()

    def read(self, parts: Mapping[str, Part], others: Iterable[str] = ()) -> dict[str, Any]:
        """Returns parts of tensors, on the host, and values that are none.

        Args:
            parts: which part of which tensor, by key.
            others: keys of what is no tensor.

        Raises:
            CheckpointError: some of a tensor is in no file, or a value needs trust.
        """
        planner = _PartsPlanner(self._trust_pickle)
        for key, part in parts.items():
            planner.want(key, self._stored[key], part)
        for key in others:
            planner.want_other(key)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = self._reader.prepare_global_plan([plan])
        try:
            self._reader.read_data(plan, planner).wait()
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{self._path} holds more than tensors and plain values, which can run code when "
                f"it is loaded: if you trust it, pass trust_pickle=True or set {TRUST_VARIABLE}=1. "
                f"({error})"
            ) from error
        return planner.values


class _PartsPlanner(LoadPlanner):
    """Plans to read parts of tensors, as one rank alone."""

    def __init__(self, trust_pickle: bool) -> None:
        self._trust_pickle = trust_pickle
        self.values: dict[str, Any] = {}
        self._items: list[ReadItem] = []
        self._targets: dict[MetadataIndex, torch.Tensor] = {}

    def want(self, key: str, stored: TensorStorageMetadata, part: Part) -> None:
        held = torch.empty(part.sizes, dtype=stored.properties.dtype, device="cpu")
        self.values[key] = held
        for there, here in part.places():
            chunk = _chunk(there)
            self._targets[MetadataIndex(key, there.offsets)] = held[
                here.within(Rectangle.whole(held.shape))
            ]
            if not there.num_elements:
                continue
            items = create_read_items_for_chunk_list(key, stored, [chunk])
            if sum(math.prod(each.lengths) for each in items) != there.num_elements:
                raise CheckpointError(
                    f"the checkpoint lacks elements of {key}: {METADATA} lists "
                    f"{len(stored.chunks)} parts of it, which do not cover it. Save it again."
                )
            self._items += items

    def want_other(self, key: str) -> None:
        index, nothing = MetadataIndex(key), torch.Size([0])
        self._items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Is told nothing: it was given what to read."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self._items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = torch.load(
            value, map_location="cpu", weights_only=not self._trust_pickle
        )

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        part = Rectangle(tuple(read_item.dest_offsets), tuple(read_item.lengths))
        target = self._targets[read_item.dest_index]
        return target[part.within(Rectangle.whole(target.shape))]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Has nothing to do: the tensor is the part that it was read to."""


class _PlainReader(FileSystemReader):
    """Reads metadata without running code from it, which torch's own would."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path, METADATA)
        try:
            with open(path, "rb") as stream:
                return _metadata_in(stream)
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} must be metadata of torch.distributed.checkpoint; received something "
                f"else ({error}): copy the folder again, whole."
            ) from error


def _places_in(told: str) -> dict[MetadataIndex, Any]:
    """Returns where a rank says that it has written what."""
    return dict(_metadata_in(io.BytesIO(base64.b64decode(told))).storage_data)


def _metadata_in(stream: BinaryIO) -> Metadata:
    """Returns metadata that a stream holds, without running code from it.

    Raises:
        pickle.UnpicklingError: it holds something else.
    """
    found = _MetadataUnpickler(stream).load()
    if not isinstance(found, Metadata) or found.storage_data is None:
        raise pickle.UnpicklingError(f"it holds {type(found).__name__}")
    return found


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = None
        if (module, name) == ("builtins", "getattr"):
            return _member
        if "." not in name and (
            module in (metadata.__name__, "torch") or module.split(".")[0] == "pathlib"
        ):
            found = super().find_class(module, name)
        elif (module, name) in _NAMES:
            return super().find_class(module, name)
        is_own = isinstance(found, type) and found.__module__ == metadata.__name__
        is_path = isinstance(found, type) and issubclass(found, pathlib.PurePath)
        if is_own or is_path or isinstance(found, torch.dtype) or found is torch.Size:
            return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _member(kind: Any, name: str) -> enum.Enum:
    """Returns a member of an enumeration; Python 3.11.0 to 3.11.3 pickle them by ``getattr``.

    Raises:
        pickle.UnpicklingError: it is none.
    """
    if isinstance(kind, enum.EnumType) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"it asks for {name} of a {type(kind).__name__}")


def _chunk(rectangle: Rectangle) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(rectangle.offsets), torch.Size(rectangle.sizes))
