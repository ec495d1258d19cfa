"""The state of a model by name, of which each rank of the pipeline may hold a part.

A state is torch's own: a dict from the names of the unpartitioned model to tensors. A partial one
has the names of one rank only, and says so under ``PARTIAL_KEY``.

Source: smd_model_parallel_pytorch.rst, DistributedModel, Methods.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.model.holder import Holder, loads_by_itself
from smdistributed.modelparallel.torch.model.slices import SlicedTensors
from smdistributed.modelparallel.torch.record.fakes import Slot
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.tensors.nested import map_tensors

PARTIAL_KEY = "_smp_is_partial"


class ModelState:
    """Reads and writes the tensors of one model by name.

    Args:
        runtime: the state of the library in this process.
        holder: says what of the model is here.
    """

    def __init__(self, runtime: TorchRuntime, holder: Holder) -> None:
        self._runtime = runtime
        self._holder = holder
        fakes = holder.fakes
        self._module = fakes.model
        #: By all names of a module that is in several places.
        self._modules = {
            name: module
            for name, module in fakes.model.named_modules(remove_duplicate=False)
            if module in fakes.names
        }
        self._slots = {
            f"{name}.{attribute}" if name else attribute: (module, attribute)
            for name, module in self._modules.items()
            for attribute in (*module._parameters, *module._buffers)
            if (module, attribute) in fakes.slots
        }
        self._sliced = SlicedTensors.of(runtime, {"": holder})

    def local(self) -> dict[str, Any]:
        """Returns what this rank holds, and whether that is only a part."""
        state = {name: value for name, value in self._state().items() if self._is_here(name)}
        return {**state, PARTIAL_KEY: self._holder.is_split}

    def whole(self, *, to_rank0: bool) -> dict[str, Any]:
        """Returns what all ranks hold together, or with ``to_rank0`` nothing but on rank 0.

        Collective: every rank of the PP_GROUP; with tensor parallelism of the MP_GROUP.
        """
        runtime, sliced = self._runtime, self._sliced
        # With its metadata.
        state = self._state()
        if self._holder.is_split:
            local = self.local()
            del local[PARTIAL_KEY]
            ties = self.ties(local)
            local = {name: each for name, each in local.items() if name not in ties}
            part = map_tensors(sliced.to_send(local), torch.Tensor.cpu)
            given = collect(runtime, (part, ties), sliced.group, to_rank0=to_rank0)
            if given:
                state.update(sliced.merge([part for part, _ in given]))
            for _, ties in given:  # one object, so that they have one memory
                state.update((name, state[first]) for name, first in ties.items())
        return {} if to_rank0 and runtime.rank != 0 else state

    def load(self, state: Mapping[str, Any], *, strict: bool) -> Any:
        """Loads from a whole state what belongs on this rank.

        Returns:
            As ``torch.nn.Module.load_state_dict``; the same on every rank.

        Raises:
            RuntimeError: torch's own, about missing or unexpected keys and sizes.
        """
        for name in self._sliced:
            value = state.get(name)
            if value is not None and tuple(value.shape) != self._sliced.whole_shape(name):
                raise RuntimeError(
                    f"size mismatch for {name}: its whole shape is "
                    f"{self._sliced.whole_shape(name)}; received {tuple(value.shape)}."
                )
        cut = copy.copy(state)  # keeps torch's metadata
        for name in self._sliced:
            if name in state:
                cut[name] = self._sliced.cut(name, state[name])  # type: ignore[index]
        return self._load(cut, {name for name in self._elsewhere() if name not in state}, strict)

    def merged(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the whole state of which every rank gives a part.

        Collective: every rank of the PP_GROUP; with tensor parallelism of the MP_GROUP.
        """
        part = map_tensors(dict(part), torch.Tensor.cpu)
        return self._sliced.merge(collect(self._runtime, part, self._sliced.group))

    def load_own(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Loads what this rank itself saved under the same partition.

        Raises:
            CheckpointError: it was another partition; names the first parameter that differs.
        """
        elsewhere = self._elsewhere()
        for name in self._state():
            if name in elsewhere and name in state:
                problem = "is in the state and belongs on another rank"
            elif name not in elsewhere and name not in state and strict:
                problem = "belongs on this rank and is not in the state"
            else:
                continue
            raise CheckpointError(
                f"rank {self._runtime.rank}: {name} {problem}, which was saved under another "
                "partition: load it with same_partition_load=False."
            )
        self._load(state, set(), strict)

    def _load(self, state: Mapping[str, Any], absent: set[str], strict: bool) -> Any:
        """Loads what belongs here; ``absent`` are the names that other ranks miss."""
        elsewhere = self._elsewhere()
        if not elsewhere:
            with self._holder.as_blocks():
                return self._module.load_state_dict(state, strict=strict)
        here = collections.OrderedDict(
            (name, value) for name, value in state.items() if name not in elsewhere
        )
        # Versions of modules, by which they read older states.
        here._metadata = getattr(state, "_metadata", {})  # type: ignore[attr-defined]
        self._check_shapes(state)
        # Not strict, as torch would miss what is elsewhere.
        with self._holder.as_blocks():
            keys = self._module.load_state_dict(here, strict=False)
        missing = [name for name in keys.missing_keys if name not in elsewhere or name in absent]
        problems = [
            f"{kind} key(s) in state_dict: {', '.join(map(repr, names))}."
            for kind, names in (("Unexpected", keys.unexpected_keys), ("Missing", missing))
            if names
        ]
        if strict and problems:
            lines = "\n\t".join(problems)
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self._module).__name__}:\n\t{lines}"
            )
        return type(keys)(missing, keys.unexpected_keys)

    def _check_shapes(self, state: Mapping[str, Any]) -> None:
        """Finds tensors that do not fit, also those of other ranks.

        Raises:
            RuntimeError: as torch's, on every rank.
        """
        problems = []
        for name, (slot, shape) in self._loadable().items():
            module, value = slot[0], state.get(name)
            if not isinstance(value, torch.Tensor) or loads_by_itself(module):
                continue
            # Torch takes vectors of one number for scalars.
            if value.shape != shape and (len(shape), value.numel()) != (0, 1):
                problems.append(
                    f"size mismatch for {name}: copying a param with shape {value.shape} from "
                    f"checkpoint, the shape in current model is {shape}."
                )
        if problems:
            lines = "\n\t".join(problems)
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self._module).__name__}:\n\t{lines}"
            )

    def _loadable(self) -> dict[str, tuple[Slot, torch.Size]]:
        """Returns each tensor's place, and the shape of what is loaded of it."""
        return {
            name: (slot, torch.Size(self._holder.piece(slot).part.sizes))
            for name, slot in self._slots.items()
        }

    def gather_tensors(self) -> None:
        """Gives this rank the tensors of all, on the host. Collective: every rank of PP_GROUP."""
        fakes = self._holder.fakes
        here = {
            fakes.slot_name(slot): getattr(*slot).detach().cpu()
            for slot in fakes.slots
            if self._holder.holds(slot)
        }
        parts = self._runtime.communicator.allgather(here, CommGroup.PP_GROUP)
        self._holder.gather({name: tensor for part in parts for name, tensor in part.items()})

    def _state(self) -> dict[str, Any]:
        """Returns torch's own dict; what is elsewhere is empty in it, what is cut the own part."""
        with self._holder.absence.past(), self._holder.as_blocks():
            return self._module.state_dict()

    def name_ties(self, state: dict[str, Any]) -> None:
        """Gives a whole state all names that tensors of the model have, where it has one."""
        groups: dict[int, list[str]] = {}
        with self._holder.absence.past():
            for name, tensor in self._module.state_dict(keep_vars=True).items():
                groups.setdefault(id(tensor), []).append(name)
        for names in groups.values():
            given = next((name for name in names if name in state), None)
            if given is not None:
                state.update((name, state[given]) for name in names if name not in state)

    def ties(self, names: Collection[str]) -> dict[str, str]:
        """Returns, for each name but the first that a tensor has, the first one. Local."""
        with self._holder.absence.past():
            state = self._module.state_dict(keep_vars=True)
        first_of: dict[int, str] = {}
        ties = {}
        for name in names:
            if isinstance(state[name], torch.Tensor):
                first = first_of.setdefault(id(state[name]), name)
                if first != name:
                    ties[name] = first
        return ties

    def _elsewhere(self) -> set[str]:
        return {name for name in self._state() if not self._is_here(name)}

    def _is_here(self, name: str) -> bool:
        if not self._holder.is_partial:
            return True
        if name in self._slots:
            return self._holder.holds(self._slots[name])
        # What a module adds by itself, such as its extra state, is where the module is.
        owner = name
        while owner not in self._modules:
            owner = owner.rpartition(".")[0]
        return self._holder.holds_module(self._modules[owner])


def collect(
    runtime: TorchRuntime, part: Any, group: CommGroup, *, to_rank0: bool = False
) -> list[Any]:
    """Returns the parts that the ranks of a group give, or none of them but on rank 0.

    Collective: every rank of the group.
    """
    if not to_rank0:
        return runtime.communicator.allgather(part, group)
    if 0 not in runtime.topology.members(group, runtime.rank):
        return []
    return runtime.communicator.gather(part, group) or []
