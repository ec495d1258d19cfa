"""The state of a DistributedOptimizer by the names of parameters, over all ranks.

A rank has the state of the parameters that it updates. What is split, over partitions, slices or
the owners of sharded state, is brought together by name. The fp32 master of a parameter is part of
its state, as ``master``, so it travels and is cut as the rest is.

Source: smd_model_parallel_pytorch.rst, DistributedOptimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import CheckpointError, SMPError, UnsupportedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.absence.tensors import AbsentTensor
from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.model.slices import SlicedTensors
from smdistributed.modelparallel.torch.model.state import PARTIAL_KEY, collect
from smdistributed.modelparallel.torch.optimizer import state as optimizer_state
from smdistributed.modelparallel.torch.optimizer.state import LOSS_SCALE, MASTER
from smdistributed.modelparallel.torch.precision.master_update import MasterUpdate
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.tensors.nested import map_tensors, tensors_in

#: Which shards a partial state has, and of how many ranks.
SHARD_KEY = "_smp_shard"


class NamedState:
    """Reads and writes the state of one optimizer by name.

    Args:
        runtime: the state of the library in this process.
        optimizer: the wrapped optimizer.
        masters: what it updates by; None: the parameters themselves.
        models: whose parameters it holds.
        groups: the parameters that the script gave, by parameter group.
        is_whole: what it keeps of a parameter in parts is whole on each rank.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        optimizer: torch.optim.Optimizer,
        masters: MasterUpdate | None,
        models: Sequence[DistributedModel],
        groups: Sequence[Sequence[torch.Tensor]],
        *,
        is_whole: bool = False,
    ) -> None:
        self._runtime = runtime
        self._optimizer = optimizer
        self._masters = masters
        self._models = models
        self._groups = groups
        self._spans_partitions = is_whole and runtime.topology.pp_size > 1
        in_parts = () if is_whole else models
        prefixes = [f"{number}." if len(models) > 1 else "" for number in range(len(models))]
        holders = dict(zip(prefixes, (each.holder for each in in_parts), strict=False))
        self._sliced = SlicedTensors.of(runtime, holders)
        self._has_shards = any(each.holder.has_shards for each in in_parts)

    # ------------------------------------------------------------------ reading

    def local(self, *, gather: bool) -> dict[str, Any]:
        """Returns the state of this rank's parameters, and whether that is only a part.

        Where each replica has state of its own, ``gather`` brings a list of it, a dict a replica.
        Collective with ``gather``, if state or parameters are sharded: DP_GROUP.

        Raises:
            UnsupportedError: what it keeps is computed from parameters of several partitions.
        """
        self._check_readable()
        if self._masters is not None:
            self._masters.adopt()
        named = optimizer_state.to_names(
            self._optimizer.state_dict(), self._held_names(), self._own_names()
        )
        names = self._names()
        for parameter, value in self._master_values().items():
            kept = named["state"].get(names[id(parameter)], {})
            named["state"][names[id(parameter)]] = {**kept, MASTER: value}
        has_owners = self._runtime.config.shard_optimizer_state
        is_part = self._is_split or (has_owners and not gather)
        if has_owners and gather:
            named = self._with_owners(named)
        elif self._has_shards and gather:
            own = map_tensors(dict(named), torch.Tensor.cpu)
            parts = self._runtime.communicator.allgather(own, CommGroup.DP_CP_GROUP)
            named = self._merged(parts, CommGroup.DP_CP_GROUP)
            is_part = self._runtime.topology.pp_size > 1
        whose = {SHARD_KEY: self._shard} if self._has_shards and not gather else {}
        return {**named, **self._loss_scale(), **whose, PARTIAL_KEY: is_part}

    def whole(self, *, to_rank0: bool) -> dict[str, Any]:
        """Returns the state over all partitions in torch's form, if with ``to_rank0`` on rank 0.

        Collective: the ranks that hold the model together.
        """
        if not self._is_split and self._masters is None:
            return self._optimizer.state_dict()
        local = optimizer_state.joined(self.local(gather=not self._has_shards))
        if self._is_split:
            local["state"] = self._sliced.to_send(local["state"])
            own = map_tensors(local, torch.Tensor.cpu)
            parts = collect(self._runtime, own, self._sliced.group, to_rank0=to_rank0)
            if not parts:
                return {}
            local = self._merged(parts, self._sliced.group)
        numbered = optimizer_state.to_numbers(local, self._ordered(local))
        return {**numbered, **self._loss_scale()}

    def _check_readable(self) -> None:
        """Makes sure that one rank has each tensor that the optimizer keeps; alike on all ranks."""
        for each in tensors_in(list(self._optimizer.state.values())):
            if isinstance(each, AbsentTensor) and len(each.absent.origin.owners) > 1:
                raise UnsupportedError(
                    f"the state of {type(self._optimizer).__name__} cannot be read with "
                    f"{self._runtime.topology.pp_size} partitions: it keeps what is computed from "
                    "parameters of several, which no rank has. Go on without it, or with an "
                    "optimizer that keeps something of each parameter by itself (AdamW)."
                )

    @property
    def _is_split(self) -> bool:
        return self._runtime.topology.pp_size > 1 or bool(self._sliced)

    @property
    def _shard(self) -> tuple[int, int]:
        degree = self._runtime.config.sharded_data_parallel_degree
        return self._runtime.coordinates.rdp_cp_rank % degree, degree

    def _master_values(self) -> dict[nn.Parameter, torch.Tensor]:
        return {} if self._masters is None else self._masters.store.values()

    def _loss_scale(self) -> dict[str, Any]:
        scale = None if self._masters is None else self._masters.loss_scale
        return {} if scale is None else {LOSS_SCALE: scale.state_dict()}

    def _with_owners(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a state with what the owners have, by replica. Collective: DP_GROUP.

        Of a replica, that are the ranks that hold what this one does; slices of others are not.
        """
        topology = self._runtime.topology
        own = map_tensors(dict(named), torch.Tensor.cpu)
        parts = self._runtime.communicator.allgather(own, CommGroup.DP_CP_GROUP)
        members = topology.members(CommGroup.DP_CP_GROUP, self._runtime.rank)
        states: list[dict[str, Any]] = [{} for _ in range(topology.rdp_cp_size)]
        for rank, part in zip(members, parts, strict=True):
            if topology.coordinates(rank).tp_rank != self._runtime.coordinates.tp_rank:
                part["state"] = {
                    name: each for name, each in part["state"].items() if name not in self._sliced
                }
            states[topology.coordinates(rank).rdp_cp_rank].update(part["state"])
        return {**optimizer_state.merge(parts), "state": states}

    def _merged(self, parts: list[Any], group: CommGroup) -> dict[str, Any]:
        """Returns the union of the states that the ranks of a group gave, with slices joined."""
        merged = optimizer_state.merge(parts)
        states = self._sliced.merge([part["state"] for part in parts], group)
        return {**merged, "state": states}

    # ------------------------------------------------------------------ writing

    def load_settings(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Loads the settings of parameter groups; returns the state by name.

        Raises:
            ValueError: it is for other numbers of parameters.
        """
        groups = self.group_names()
        state = optimizer_state.joined(state)
        if not optimizer_state.is_named(state):
            every = {name for each in groups for name in each}
            scale = {key: state[key] for key in (LOSS_SCALE,) if key in state}
            state = {**optimizer_state.to_names(state, groups, every), **scale}
        if len(state["param_groups"]) != len(groups):
            raise ValueError(
                f"the state has {len(state['param_groups'])} parameter groups, the optimizer has "
                f"{len(groups)}."
            )
        bare = {"state": {}, "param_groups": state["param_groups"]}
        self._optimizer.load_state_dict(optimizer_state.to_numbers(bare, self._held_names()))
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads the state of the parameters that this rank updates, once that is known.

        Collective for a partial state: the ranks that hold the model, and its state, together.

        Raises:
            CheckpointError: a parameter of this rank is not in it, or some rank was given the
                shards of another one.
        """
        if self._masters is not None:
            self._masters.adopt()
        # What goes by all parameters keeps something of each on every rank: whole tensors, which
        # the next update makes those of one partition.
        own = self._every_name() if self._spans_partitions else self._own_names()
        if state.get(PARTIAL_KEY, False):
            given = {name for names in optimizer_state.names_in(state) for name in names}
            # Under the same partition every rank has what it needs, and nothing travels.
            is_sharded = self._runtime.config.shard_optimizer_state
            group = CommGroup.WORLD if is_sharded else self._sliced.group
            found = self._problem_of(state), not own <= given
            everyones = self._runtime.communicator.allgather(found, group)
            if problem := next((each for each, _ in everyones if each), ""):
                raise CheckpointError(problem)
            if any(lacks for _, lacks in everyones):
                part = map_tensors(dict(state), torch.Tensor.cpu)
                state = self._merged(collect(self._runtime, part, group), group)
        optimizer_state.check_covers(state, self.group_names(), own)
        # A copy, as torch would go on with the given tensors themselves.
        values = {
            name: dict(
                map_tensors(self._sliced.cut(name, state["state"][name]), torch.Tensor.clone)
            )
            for name in state["state"]  # whose values may be read when they are asked for
            if name in own
        }
        masters = {name: each.pop(MASTER) for name, each in values.items() if MASTER in each}
        values = {name: each for name, each in values.items() if each}
        # The settings are those of now: the script may have changed them since they were loaded.
        now = {"state": values, "param_groups": self._optimizer.state_dict()["param_groups"]}
        self._optimizer.load_state_dict(optimizer_state.to_numbers(now, self._held_names()))
        self._load_masters(masters)
        if self._masters is not None and self._masters.loss_scale and LOSS_SCALE in state:
            self._masters.loss_scale.load_state_dict(state[LOSS_SCALE])

    def _problem_of(self, state: Mapping[str, Any]) -> str:
        """Returns what is wrong with whose shards a partial state has; empty if nothing is."""
        (shard, of), (own, degree) = state.get(SHARD_KEY, self._shard), self._shard
        if (shard, of) == (own, degree):
            return ""
        return (
            f"rank {self._runtime.rank} updates shard {own} of {degree}, and was given the "
            f"optimizer state of shard {shard} of {of}: each rank saves a state of its own and "
            "loads that, by smp.save_checkpoint, or by smp.save(..., partial=True, v3=True) on "
            "every rank."
        )

    @torch.no_grad()
    def _load_masters(self, masters: Mapping[str, torch.Tensor]) -> None:
        parameters = dict(self._named_parameters())
        by_parameter = {parameters[name]: value for name, value in masters.items()}
        if self._masters is not None:
            self._masters.store.load(by_parameter)
            for model in self._models:
                model.data_parallel.share_updates()
            return
        for parameter, value in by_parameter.items():
            parameter.copy_(value)

    # ------------------------------------------------------------------ names

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (f"{number}.{name}" if len(self._models) > 1 else name, parameter)
            for number, model in enumerate(self._models)
            for name, parameter in model.get_module().named_parameters()
        ]

    def _names(self) -> dict[int, str]:
        """Returns the name of each parameter of the models, by id."""
        if not self._models and self._runtime.topology.pp_size > 1:
            raise SMPError(
                "the optimizer holds no parameter of a DistributedModel: make the model before "
                "the state of its optimizer is read or loaded."
            )
        return {id(parameter): name for name, parameter in self._named_parameters()}

    def group_names(self) -> list[list[str]]:
        """Returns the names of the parameters of each group, of all ranks."""
        names = self._names()
        return [
            # A parameter of no model goes by its place; every rank has it.
            [names.get(id(each), f"#{number}.{place}") for place, each in enumerate(group)]
            for number, group in enumerate(self._groups)
        ]

    def _held_names(self) -> list[list[str]]:
        """Returns the names of what the wrapped optimizer has in its groups now."""
        if self._masters is None:
            return self.group_names()
        name_of = {
            id(each): name
            for group, names in zip(self._groups, self.group_names(), strict=True)
            for each, name in zip(group, names, strict=True)
        }
        parameter_of = self._masters.store.parameter_of
        return [
            [name_of[id(parameter_of(each))] for each in group["params"]]
            for group in self._optimizer.param_groups
        ]

    def _own_names(self) -> set[str]:
        """Returns the names of the parameters that this rank updates."""
        here = {id(each) for model in self._models for each in model.local_parameters()}
        foreign = {name for key, name in self._names().items() if key not in here}
        return self._every_name() - foreign

    def _every_name(self) -> set[str]:
        """Returns the names of the parameters that the wrapped optimizer has."""
        return {name for names in self._held_names() for name in names}

    def _ordered(self, merged: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Returns the groups of a merged state in the order of the whole optimizer."""
        own, found = self.group_names(), optimizer_state.names_in(merged)
        if all(set(names) == set(others) for names, others in zip(own, found, strict=True)):
            return own
        # Built over the parameters of this rank alone: the order of the model.
        places = {name: place for place, name in enumerate(self._names().values())}
        return [sorted(names, key=lambda name: places.get(name, len(places))) for names in found]
