"""A model as a folder of safetensors, which ``from_pretrained`` of Transformers opens.

Each partition's first rank writes the tensors that its partition has, file after file: what is in
pieces on several ranks comes together one file at a time, so no rank holds the whole. A tensor that
has several names is there once, under its first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from smdistributed.modelparallel.common.checkpoint.durable_files import Writer
from smdistributed.modelparallel.common.checkpoint.store import is_plain
from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.torch.checkpoint.held_copies import HeldCopy
from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.model.slices import SlicedTensors
from smdistributed.modelparallel.torch.model.state import PARTIAL_KEY, ModelState
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

#: All of a model in one file, and what says in which of several files each tensor is.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: By which readers know that the tensors are torch's.
_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class _Listed:
    """A tensor that will be written.

    Attributes:
        partition: whose ranks have it.
        num_bytes: of the whole tensor.
    """

    partition: int
    num_bytes: int


class SafetensorsFolder:
    """What the ranks of a job write of one model.

    Args:
        runtime: the state of the library in this process.
        model: what is saved; it is partitioned.
        max_shard_size_bytes: begin another file where one would be larger.
        translated: the whole state in the form of the modules that were replaced, on rank 0, which
            then writes all of it; empty on other ranks. None: the model's own, from all.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        model: DistributedModel,
        max_shard_size_bytes: int,
        translated: Mapping[str, Any] | None,
    ) -> None:
        self._runtime = runtime
        self._model = model
        self._sliced = SlicedTensors.of(runtime, {"": model.holder})
        self._translated = translated
        if translated is None:
            self._state = model.local_state_dict()
            ties = ModelState(runtime, model.holder).ties(model.holder.saved_names())
            listed = _listed(runtime, model, ties)
            self._names = listed.keys() | ties.keys() | {PARTIAL_KEY}
        else:
            self._state = dict(translated)
            listed = _once(translated)
            self._names = {name for name, each in translated.items() if torch.is_tensor(each)}
        self._num_bytes = sum(each.num_bytes for each in listed.values())
        self._files = _files(listed, max_shard_size_bytes)

    def small_files(self) -> dict[str, Writer]:
        """Returns what rank 0 writes besides: the index, and the model's configurations."""
        module = self._model.get_module()
        texts = {}
        for name in ("config", "generation_config"):
            config: Any = getattr(module, name, None)
            if hasattr(config, "to_json_string"):
                texts[f"{name}.json"] = config.to_json_string()
        if len(self._files) > 1:
            index = {
                "metadata": {"total_size": self._num_bytes},
                "weight_map": {
                    name: file for file, (_, names) in self._files.items() for name in names
                },
            }
            texts[INDEX] = json.dumps(index, indent=2, sort_keys=True) + "\n"
        return {name: _writer(text) for name, text in texts.items()}

    def check(self, folder: Path, before: Sequence[Any]) -> None:
        """Raises unless all that is here can be written. Local.

        Raises:
            CheckpointError: some of the state is no parameter or buffer, or the package is missing.
        """
        _of_package("save_file")
        if beyond := self._state.keys() - self._names:
            raise CheckpointError(
                f"safetensors holds parameters and buffers alone, and {min(beyond)} of the model's "
                "state is what a module adds by itself: save the model with format='torch'."
            )

    def write(self, folder: Path, before: Sequence[Any]) -> list[str]:
        """Writes this rank's files; returns their names. Collective: DP_GROUP."""
        return _write(folder, ((file, _apart(each)) for file, each in self._own_files()))

    def take(self, folder: Path, before: Sequence[Any]) -> None:
        """Copies what ``write_taken`` will write. Collective: DP_GROUP."""
        self._taken = [(file, HeldCopy(tensors)) for file, tensors in self._own_files()]

    def write_taken(self, folder: Path) -> tuple[list[str], None]:
        """Writes this rank's files, of which it has taken a copy; returns their names. Local."""
        return _write(folder, ((file, _apart(each.to_host())) for file, each in self._taken)), None

    def _own_files(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yields the names and the tensors of the files that this rank writes."""
        own = self._runtime.coordinates.pp_rank
        for file, (partition, names) in self._files.items():
            # The others of the partition give their pieces of every file.
            if partition == own and (tensors := self._gathered(names)):
                yield file, tensors

    def _gathered(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        part = {name: self._state[name] for name in names}
        return part if self._translated is not None else self._sliced.gather(part)


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns tensors on the host, of which no two have one memory: a file has no such."""
    return {name: each.detach().to("cpu", copy=True).contiguous() for name, each in tensors.items()}


def _write(folder: Path, files: Iterable[tuple[str, dict[str, torch.Tensor]]]) -> list[str]:
    save_file = _of_package("save_file")
    written: list[str] = []
    failure: Exception | None = None
    for file, tensors in files:
        # The ranks that give pieces of the next files wait for nobody, whatever fails here.
        if failure is None:
            try:
                save_file(tensors, folder / file, metadata=_METADATA)
                written.append(file)
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure
    return written


def read(index: str, path_of: Callable[[str], Path]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a folder, mapped into memory: what nobody looks at is not read.

    Args:
        index: ``INDEX``, or the name of the only file.
        path_of: finds a file of the folder by its name.

    Raises:
        CheckpointError: a file is missing or damaged, or has not what the index says.
    """
    path = path_of(index)
    if not index.endswith(".json"):
        return _loaded(path)
    found: dict[str, torch.Tensor] = {}
    places = _weight_map(path)
    for file in sorted(set(places.values())):
        listed = {name for name, each in places.items() if each == file}
        tensors = _loaded(path_of(file))
        if lacking := listed - tensors.keys():
            raise CheckpointError(
                f"{path} says that {min(lacking)} is in {file}, which has {len(tensors)} other "
                "tensors: one of the two is another model's. Copy the folder again, whole."
            )
        found.update((name, tensors[name]) for name in listed)
    return found


def _loaded(path: Path) -> dict[str, torch.Tensor]:
    load_file = _of_package("load_file", path)
    try:
        return dict(load_file(path))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing, and {INDEX} beside it names it: copy the folder again, whole."
        ) from error
    except Exception as error:  # the package has an error of its own for what is damaged
        raise CheckpointError(
            f"{path} is no whole file of safetensors ({error}): copy it again."
        ) from error


def _weight_map(path: Path) -> dict[str, str]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if outside := [file for file in places.values() if not is_plain(file)]:
            raise ValueError(f"{outside[0]!r} is no name of a file beside it")
        return dict(places)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} must be an index of safetensors, with the file of each tensor under "
            f"'weight_map'; received something else ({error!r}): copy it again."
        ) from error


def _listed(
    runtime: TorchRuntime, model: DistributedModel, ties: Container[str]
) -> dict[str, _Listed]:
    """Returns the tensors of a model's state, once; every rank finds the same by itself."""
    holder = model.holder
    shapes, pieces = holder.saved_shapes(), holder.pieces()
    with holder.absence.past(), holder.as_blocks():
        state = model.get_module().state_dict()
    listed = {}
    for name, value in state.items():
        if name in ties or name not in pieces:
            continue
        speaker = runtime.topology.coordinates(pieces[name][0].speaker)
        num_bytes = torch.Size(shapes[name]).numel() * value.dtype.itemsize
        listed[name] = _Listed(speaker.pp_rank, num_bytes)
    return listed


def _once(state: Mapping[str, Any]) -> dict[str, _Listed]:
    listed: dict[str, _Listed] = {}
    seen = set()
    for name, value in state.items():
        if not torch.is_tensor(value):
            continue
        memory = (value.data_ptr(), value.shape, value.dtype)
        if not value.numel() or memory not in seen:
            seen.add(memory)
            listed[name] = _Listed(0, value.numel() * value.dtype.itemsize)
    return listed


def _files(
    listed: Mapping[str, _Listed], max_shard_size_bytes: int
) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Returns the partition and the names of each file; a tensor alone may be larger."""
    groups: list[tuple[int, list[str]]] = []
    for partition in sorted({each.partition for each in listed.values()}):
        room = -1
        for name, each in listed.items():
            if each.partition != partition:
                continue
            if room < each.num_bytes:
                groups.append((partition, []))
                room = max_shard_size_bytes
            groups[-1][1].append(name)
            room -= each.num_bytes
    if len(groups) == 1:
        return {SINGLE: (groups[0][0], tuple(groups[0][1]))}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": (partition, tuple(names))
        for number, (partition, names) in enumerate(groups, start=1)
    }


def _of_package(name: str, path: Path | None = None) -> Any:
    try:
        from safetensors import torch as package
    except ImportError as error:
        what = "format='safetensors' needs" if path is None else f"{path} is a file of"
        raise CheckpointError(
            f"{what} safetensors, and the package safetensors is not installed: install it with "
            "pip, or use a file of torch.save."
        ) from error
    return getattr(package, name)


def _writer(text: str) -> Writer:
    def write(stream: BinaryIO) -> None:
        stream.write(text.encode())

    return write
