"""Models and optimizers in the names of DCP, as PyTorch's own jobs have them there.

A state is ``{"model": ..., "optimizer": {"state": ..., "param_groups": ...}}`` with the names of
parameters, as ``get_model_state_dict`` and ``get_optimizer_state_dict`` give it. A master in fp32
is the model's weight there, so jobs of any precision read each other's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.pieces import Part, Piece, Rectangle
from smdistributed.modelparallel.torch.checkpoint.dcp_folder import Held
from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.model.state import PARTIAL_KEY, ModelState
from smdistributed.modelparallel.torch.optimizer import state as optimizer_state
from smdistributed.modelparallel.torch.optimizer.distributed import DistributedOptimizer
from smdistributed.modelparallel.torch.optimizer.state import LOSS_SCALE, MASTER
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

#: Where states of this library lie; those of others are looked for.
MODEL, OPTIMIZER = "model", "optimizer"
#: What PyTorch's own jobs have no name for.
LOSS_SCALE_PATH = ("smp", LOSS_SCALE)


# --------------------------------------------------------------- writing


class HeldStates:
    """What this rank writes of a model and its optimizer. Collective: every process.

    Args:
        runtime: the state of the library in this process.
        model: is partitioned.
        optimizer: of this model alone; or None.

    Raises:
        ValueError: the optimizer has parameters of other models.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        model: DistributedModel,
        optimizer: DistributedOptimizer | None,
    ) -> None:
        self._runtime = runtime
        self._places = model.holder.pieces()
        self._has_owners = runtime.config.shard_optimizer_state
        if optimizer is not None:
            self._check_names(optimizer)
        named = None if optimizer is None else optimizer.local_state_dict(gather_if_shard=False)
        self._states: dict[str, dict[str, Any]] = dict(named["state"]) if named else {}
        self._mastered = self._masters_of_all()
        self.held = list(self._of_model(model))
        if named is not None:
            self.held += self._of_optimizer(named)

    def _check_names(self, optimizer: DistributedOptimizer) -> None:
        for name in (name for group in optimizer.names_of_groups() for name in group):
            if name not in self._places and not name.startswith("#"):
                raise ValueError(
                    f"format='dcp' saves one model and its optimizer, and the optimizer has {name} "
                    "of several models: save with format='torch'."
                )

    def _masters_of_all(self) -> set[str]:
        own = {name for name, values in self._states.items() if MASTER in values}
        if not self._has_owners:
            return own
        return set().union(*self._runtime.communicator.allgather(own, CommGroup.WORLD))

    def _speaks(self, name: str) -> bool:
        """Whether this rank writes its piece of a tensor; where state has owners, see below."""
        pieces = self._places.get(name)
        return pieces is None or _own(pieces, self._runtime.rank).speaker == self._runtime.rank

    def _of_model(self, model: DistributedModel) -> Iterator[Held]:
        state = model.local_state_dict()
        del state[PARTIAL_KEY]
        ties = ModelState(self._runtime, model.holder).ties(state)
        for name, value in state.items():
            first = ties.get(name, name)
            if first not in self._places:  # a module's extra state
                if self._runtime.coordinates.dp_cp_rank == 0:
                    yield Held((MODEL, name), value)
                continue
            writes = self._speaks(first)
            if first in self._mastered:
                master = self._states.get(first, {}).get(MASTER)
                # Of several copies with one owner, that has it in fp32.
                writes = master is not None and (self._has_owners or writes)
                value = master
            if writes:
                yield from self._piece(first, (MODEL, name), value)

    def _of_optimizer(self, named: Mapping[str, Any]) -> Iterator[Held]:
        for name, values in self._states.items():
            if not (self._has_owners or self._speaks(name)):
                continue
            for key, value in values.items():
                if key != MASTER:
                    yield from self._piece(name, (OPTIMIZER, "state", name, key), value)
        told = self._runtime.communicator.allgather(named["param_groups"], CommGroup.WORLD)
        if self._runtime.rank != 0:
            return
        merged = optimizer_state.merge([{"state": {}, "param_groups": each} for each in told])
        for number, group in enumerate(merged["param_groups"]):
            for key, value in group.items():
                yield Held.whole((OPTIMIZER, "param_groups", number, key), value)
        if LOSS_SCALE in named:
            yield Held(LOSS_SCALE_PATH, named[LOSS_SCALE])

    def _piece(self, name: str, path: tuple[str, ...], value: Any) -> Iterator[Held]:
        """Yields what is here of a value that lies as a parameter does, or once for all."""
        pieces = self._places.get(name)
        if pieces is None:
            if self._runtime.rank == 0:
                yield Held.whole(path, value)
            return
        own = _own(pieces, self._runtime.rank)
        if tuple(getattr(value, "shape", (-1,))) == tuple(own.part.sizes):
            if own.part.num_elements or len(pieces) == 1:
                yield Held(path, value, own.shape, own.part)
        elif own.part == pieces[0].part:
            yield Held.whole(path, value)


def _own(pieces: Sequence[Piece], rank: int) -> Piece:
    return next(piece for piece in pieces if rank in piece.ranks)


# --------------------------------------------------------------- reading


class Stored(Protocol):
    """What has the tensors and values of states, by the keys of DCP."""

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the whole tensors, by key."""

    @property
    def others(self) -> Collection[str]:
        """The keys of what is no tensor."""

    def read(self, parts: Mapping[str, Part], others: Iterable[str]) -> dict[str, Any]:
        """Returns parts of tensors, and values that are no tensors, by key."""


class StoredStates:
    """The states of a model and its optimizer in a folder, by the names of a model of this job.

    Args:
        runtime: the state of the library in this process.
        folder: where they are.
        model: whose names are looked for.
        has_model: whether there is the state of a model, or of an optimizer alone.

    Raises:
        CheckpointError: the folder has no model like this one, or several.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        folder: Stored,
        model: DistributedModel,
        *,
        has_model: bool = True,
    ) -> None:
        self._runtime = runtime
        self._folder = folder
        self._model = model
        self._keys = dict.fromkeys([*folder.tensors, *folder.others])  # in their order
        self._names = model.holder.saved_names()
        self._ties = ModelState(runtime, model.holder).ties(self._names)
        self._has_model = has_model
        self._prefix = self._prefix_of_model(self._names) if has_model else ""
        found = {key[: key.index("param_groups.")] for key in self._keys if "param_groups." in key}
        self._optimizer_prefix = _only(found, "optimizers") if found else None
        self._state_keys = self._keys_of_states()

    @functools.cached_property
    def _places(self) -> dict[str, list[Piece]]:
        """Where the tensors of the model are; asked for when it is partitioned."""
        return self._model.holder.pieces()

    def _keys_of_states(self) -> dict[str, dict[str, str]]:
        """Returns the keys of the state of each parameter, by what they are called there."""
        start = f"{self._optimizer_prefix}state."
        found: dict[str, dict[str, str]] = {}
        for key in self._keys:
            if self._optimizer_prefix is not None and key.startswith(start):
                name, _, last = key.removeprefix(start).rpartition(".")
                found.setdefault(name, {})[last] = key
        return found

    def _prefix_of_model(self, names: Sequence[str]) -> str:
        """Returns what the keys of the model begin with: that under which most names are."""
        found: dict[str, int] = {}
        for name in names:
            if name in self._keys:
                found[""] = found.get("", 0) + 1
        for key in self._keys:
            for name in _endings(key) & set(names):
                prefix = key.removesuffix(name)
                found[prefix] = found.get(prefix, 0) + 1
        most = max(found.values(), default=0)
        if not most:
            raise CheckpointError(
                f"the checkpoint must have the tensors of the model, of which the first is "
                f"{names[0] if names else 'none'}; none of its keys ends in such a name: "
                f"{_some(self._keys)}. Resume into the model that was saved."
            )
        return _only({prefix for prefix, count in found.items() if count == most}, "models")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the model's tensors, by name; without a prefix of those that it has."""
        shapes = {
            key.removeprefix(self._prefix): shape
            for key, shape in self._folder.tensors.items()
            if key.startswith(self._prefix) and (self._prefix or key in self._names)
        }
        for name, first in self._ties.items():
            if first in shapes:
                shapes.setdefault(name, shapes[first])
        return shapes

    @property
    def has_optimizer(self) -> bool:
        """Whether there is the state of an optimizer."""
        return self._optimizer_prefix is not None

    def load_model(self, *, strict: bool) -> None:
        """Loads what belongs on this rank, if there is a model, as soon as that is known."""
        if not self._has_model:
            return
        self._model.follow_changes()
        self._model.holder.when_partitioned(lambda: self._load_model(strict))

    def _load_model(self, strict: bool) -> None:
        state = ModelState(self._runtime, self._model.holder)
        parts: dict[str, Part] = {}
        others = []
        own = state.local()
        keys = {name: key for name in own if (key := self._key_of(name)) is not None}
        for name, key in keys.items():
            if key in self._folder.others:
                others.append(key)
            else:
                parts[key] = self._part(self._ties.get(name, name), key)
        values = self._folder.read(parts, others)
        state.load_own({name: values[key] for name, key in keys.items()}, strict=strict)

    def _key_of(self, name: str) -> str | None:
        """Returns the key of a tensor of the model, which may be that of its first name."""
        for each in (name, self._ties.get(name, name)) if self._has_model else ():
            if f"{self._prefix}{each}" in self._keys:
                return f"{self._prefix}{each}"
        return None

    def optimizer_state(
        self, optimizer: DistributedOptimizer, *, masters_only: bool
    ) -> dict[str, Any]:
        """Returns the named state of the optimizer, of which tensors are read when asked for.

        Raises:
            CheckpointError, ValueError: it is for other parameter groups.
        """
        groups, stored_names = self._groups(optimizer.names_of_groups())
        states = _LazyStates(self, stored_names, optimizer, masters_only)
        scale = ".".join(LOSS_SCALE_PATH)
        more = {LOSS_SCALE: scale} if scale in self._folder.others else {}
        read = self._folder.read({}, more.values())
        return {
            "state": states,
            "param_groups": groups,
            **{name: read[key] for name, key in more.items()},
        }

    def _groups(self, own: Sequence[Sequence[str]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Returns the parameter groups by name, and what names are called in the folder."""
        start = f"{self._optimizer_prefix}param_groups."
        keys = {key.removeprefix(start): key for key in self._keys if key.startswith(start)}
        values = self._folder.read(
            {
                key: Rectangle.whole(self._folder.tensors[key])
                for key in keys.values()
                if key in self._folder.tensors
            },
            [key for key in keys.values() if key in self._folder.others],
        )
        groups: dict[int, dict[str, Any]] = {}
        for key, each in keys.items():
            if match := re.fullmatch(r"(\d+)\.(\w+)", key):
                groups.setdefault(int(match[1]), {})[match[2]] = values[each]
        if not any("params" in group for group in groups.values()):
            return self._flat_groups(own, keys, values), {}
        listed = [groups[number] for number in sorted(groups)]
        if all(isinstance(name, str) for group in listed for name in group["params"]):
            return listed, {}
        every = {name for group in own for name in group}
        named = optimizer_state.to_names({"state": {}, "param_groups": listed}, own, every)
        numbers = [str(number) for group in listed for number in group["params"]]
        names = [name for group in own for name in group]
        return named["param_groups"], dict(zip(names, numbers, strict=True))

    @staticmethod
    def _flat_groups(
        own: Sequence[Sequence[str]], keys: Mapping[str, str], values: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Returns groups of settings that were kept for each parameter (flatten_optimizer)."""
        return [
            {
                **{
                    key.removeprefix(f"{name}."): values[each]
                    for name in names[:1]
                    for key, each in keys.items()
                    if key.startswith(f"{name}.") and "." not in key.removeprefix(f"{name}.")
                },
                "params": [
                    name for name in names if any(key.startswith(f"{name}.") for key in keys)
                ],
            }
            for names in own
        ]

    def read_state(
        self, name: str, stored_name: str, *, master: bool, rest: bool
    ) -> dict[str, Any]:
        """Returns what is here of the state of one parameter.

        Args:
            name: of the parameter.
            stored_name: what it is called in the folder.
            master: with its value in fp32.
            rest: with what the optimizer keeps.
        """
        state_keys = self._state_keys.get(stored_name, {})
        keys = {each: key for each, key in state_keys.items() if rest or each == MASTER}
        weight = self._key_of(name)
        if master and weight is not None:
            keys.setdefault(MASTER, weight)
        parts = {key: self._part(name, key) for key in keys.values() if key in self._folder.tensors}
        values = self._folder.read(parts, [key for key in keys.values() if key not in parts])
        found = {each: values[key] for each, key in keys.items()}
        if MASTER in found:
            found[MASTER] = found[MASTER].float()
        return found

    def _part(self, name: str, key: str) -> Part:
        """Returns which part of a tensor is here, that may lie as a parameter of the model does."""
        pieces, shape = self._places.get(name), self._folder.tensors[key]
        if pieces is None or shape != pieces[0].shape:
            return Rectangle.whole(shape)
        return _own(pieces, self._runtime.rank).part


class _LazyStates(Mapping[str, Any]):
    """The states of parameters, each read when it is asked for."""

    def __init__(
        self,
        stored: StoredStates,
        stored_names: Mapping[str, str],
        optimizer: DistributedOptimizer,
        masters_only: bool,
    ) -> None:
        self._stored = stored
        self._stored_names = stored_names
        self._has_masters = optimizer.fp16_optimizer is not None
        self._masters_only = masters_only
        self._names = [name for group in optimizer.names_of_groups() for name in group]

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self._stored.read_state(
            name,
            self._stored_names.get(name, name),
            master=self._has_masters,
            rest=not self._masters_only,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _endings(key: str) -> set[str]:
    """Returns what a key ends in, after each of its dots."""
    words = key.split(".")
    return {".".join(words[start:]) for start in range(1, len(words))}


def _only(found: Collection[str], what: str) -> str:
    if len(found) > 1:
        raise CheckpointError(
            f"the checkpoint must have one of what is loaded; it has {what} under each of "
            f"{_some(found)}: save the one that you want by itself."
        )
    return next(iter(found))


def _some(names: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(names)[:5]))
