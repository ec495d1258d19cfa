"""Norms of gradients over all partitions, through torch's own functions.

A rank has the gradients of its own partition only, so what ``torch.nn.utils.clip_grad_norm_`` finds
is the norm of a part. Here the ranks of a pipeline combine their parts. Where optimizer state is
sharded, a gradient is on one rank of the job, and all ranks combine.

Source: model-parallel-customize-training-script-pt.md, Important Considerations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.absence.tensors import AbsentTensor
from smdistributed.modelparallel.torch.compat.private.tensors import work_of
from smdistributed.modelparallel.torch.gradients.elsewhere import GradientElsewhere
from smdistributed.modelparallel.torch.runtime.protocols import Model
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.sharding.parameter import gradient_here, held
from smdistributed.modelparallel.torch.tensor_parallel.slices_at_rest import whole

Tensors = torch.Tensor | Iterable[torch.Tensor]


@contextlib.contextmanager
def norms_of_whole_models(runtime: TorchRuntime) -> Iterator[None]:
    """Makes torch's functions see all partitions of distributed models, as long as it is entered.

    It concerns ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm``, also where a script has
    imported them by name before; with one partition of whole tensors nothing changes. A call with
    tensors of a distributed model, or with none, is collective then: every rank of the MP_GROUP,
    with sharded optimizer state of WORLD. All other calls go to torch. Under fp16, where the
    gradients of parameters carry the loss scale, such a call is refused.
    """
    config = runtime.config
    is_whole_here = runtime.topology.mp_size == 1 and runtime.sharding_groups is None
    if is_whole_here and not (config.fp16 or config.shard_optimizer_state):
        yield
        return
    functions = _WholeModelFunctions(runtime)
    with (
        _replaced(torch.nn.utils.clip_grad_norm_, functions.clip_grad_norm_),
        _replaced(torch.nn.utils.get_total_norm, functions.get_total_norm),
    ):
        yield


@contextlib.contextmanager
def norms_of_one() -> Iterator[None]:
    """Makes torch's functions find a norm of 1, whatever they are given, as long as it is entered.

    For who asks what else something depends on.
    """

    def clip(parameters: Tensors, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, torch.ones(()))
        return torch.ones(())

    def norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones(())

    with (
        _replaced(torch.nn.utils.clip_grad_norm_, clip),
        _replaced(torch.nn.utils.get_total_norm, norm),
    ):
        yield


class _WholeModelFunctions:
    """Stand-ins for torch's functions, which call them with gradients switched off.

    Attributes:
        torch_get_total_norm: torch's own.
    """

    def __init__(self, runtime: TorchRuntime) -> None:
        self._runtime = runtime
        self._torch_clip_grad_norm_ = work_of(torch.nn.utils.clip_grad_norm_).cell_contents
        self.torch_get_total_norm = work_of(torch.nn.utils.get_total_norm).cell_contents
        self._is_torchs_own_call = False

    def clip_grad_norm_(
        self,
        parameters: Tensors,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Stands for ``torch.nn.utils.clip_grad_norm_``."""
        chosen = _listed(parameters)
        own = self._own()
        if chosen and own.keys().isdisjoint(map(id, chosen)):
            self._is_torchs_own_call = True
            try:
                clip = self._torch_clip_grad_norm_
                norm: torch.Tensor = clip(chosen, max_norm, norm_type, error_if_nonfinite, foreach)
            finally:
                self._is_torchs_own_call = False
            return norm
        if self._runtime.config.fp16:
            raise UnsupportedError(
                "under fp16 the gradients of parameters carry the loss scale, so clipping them "
                "would bound something else: call optimizer.clip_master_grads(max_norm) before "
                "optimizer.step()."
            )
        self._check_is_over()
        given = {id(each): own.get(id(each), each) for each in chosen}
        self._check_reduced(given.values())
        found = [(each, gradient_here(each)) for each in given.values()]
        gradients = [
            (each, gradient)
            for each, gradient in found
            if gradient is not None and not isinstance(gradient, GradientElsewhere)
        ]
        norm = self._norm_over_partitions(gradients, norm_type, error_if_nonfinite, foreach)
        # What torch's function asks for of a parameter is its gradient alone.
        holders: Any = [SimpleNamespace(grad=gradient) for _, gradient in gradients]
        torch.nn.utils.clip_grads_with_norm_(holders, max_norm, norm, foreach)
        return norm

    def _check_is_over(self) -> None:
        """Raises if there are no gradients yet, since a step of several partitions is recorded."""
        step = self._runtime.current_step
        if step is not None and step.is_tracing:
            raise UnsupportedError(
                "clip_grad_norm_ and get_total_norm of torch.nn.utils take gradients that are "
                "there when a step function of several partitions has returned; received a call "
                "inside of one: call them after it, before optimizer.step()."
            )

    def _check_reduced(self, parameters: Iterable[torch.Tensor]) -> None:
        chosen = set(map(id, parameters))
        for model in self._runtime.live_models():
            if not chosen.isdisjoint(map(id, model.parameters())):
                model.data_parallel.check_reduced()

    def _own(self) -> dict[int, nn.Parameter]:
        """Returns the parameters of models, by id: their own, or of what is here of them."""
        parameters = [each for model in self._runtime.live_models() for each in model.parameters()]
        return {id(key): each for each in parameters for key in (each, held(each))}

    def get_total_norm(
        self,
        tensors: Tensors,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Stands for ``torch.nn.utils.get_total_norm``."""
        given = _listed(tensors)
        if self._is_torchs_own_call or (given and not self._has_gradient(given)):
            norm: torch.Tensor = self.torch_get_total_norm(
                list(map(whole, given)), norm_type, error_if_nonfinite, foreach
            )
            return norm
        self._check_is_over()
        parameter_of = self._parameters_of_gradients()
        pairs = [(parameter_of.get(id(each)), each) for each in given]
        return self._norm_over_partitions(
            [
                (each, _plain(each, gradient))
                for each, gradient in pairs
                if not isinstance(gradient, AbsentTensor | GradientElsewhere)
            ],
            norm_type,
            error_if_nonfinite,
            foreach,
        )

    def _parameters_of_gradients(self) -> dict[int, nn.Parameter]:
        return {
            id(gradient): each
            for each in self._own().values()
            for gradient in (each.grad, gradient_here(each))
            if gradient is not None
        }

    def _has_gradient(self, tensors: Sequence[torch.Tensor]) -> bool:
        return not self._parameters_of_gradients().keys().isdisjoint(map(id, tensors))

    def _norm_over_partitions(
        self,
        gradients: Sequence[tuple[torch.Tensor | None, torch.Tensor]],
        norm_type: float,
        error_if_nonfinite: bool,
        foreach: bool | None,
    ) -> torch.Tensor:
        models = self._runtime.live_models()
        split = {id(each) for model in models for each in model.split_parameters()}
        if self._runtime.sharding_groups is not None:
            speaks = who_speaks(models)
            gradients = [
                (each, gradient)
                for each, gradient in gradients
                if each is None or speaks(each, id(each) in split)
            ]
        return norm_over_ranks(
            self._runtime,
            [gradient for each, gradient in gradients if id(each) not in split],
            [gradient for each, gradient in gradients if id(each) in split],
            norm_type,
            error_if_nonfinite,
            foreach,
        )


def who_speaks(models: Iterable[Model]) -> Callable[[torch.Tensor, bool], bool]:
    """Returns what tells whether this rank is the first of those that have the same of a parameter.

    It takes the parameter, and whether that is a slice.
    """
    homes: dict[int, list[Model]] = {}
    for model in models:
        for each in model.parameters():
            homes.setdefault(id(each), []).append(model)

    def speaks(parameter: torch.Tensor, is_slice: bool) -> bool:
        return any(
            model.data_parallel.speaks_for(parameter, is_slice=is_slice)
            for model in homes.get(id(parameter), ())
        )

    return speaks


def _plain(parameter: Any, gradient: torch.Tensor) -> torch.Tensor:
    """Returns what a rank has of a gradient, for what a script sees of it."""
    here = None if parameter is None else gradient_here(parameter)
    return gradient if here is None else here


def norm_over_ranks(
    runtime: TorchRuntime,
    whole: Sequence[torch.Tensor],
    slices: Sequence[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Returns the norm of the gradients of a whole model, of which each rank has some.

    Collective: MP_GROUP; with sharded optimizer state or sharded parameters WORLD, as a gradient is
    on one rank then, or its blocks are on several.

    Args:
        runtime: the state of the library in this process.
        whole: gradients on this rank that tensor-parallel ranks hold alike; with sharded
            parameters, those that no rank before this one has.
        slices: those of which tensor-parallel ranks hold different slices.
        norm_type: order of the norm.
        error_if_nonfinite: raise where it is not finite.
        foreach: as in ``torch.nn.utils.get_total_norm``.

    Raises:
        RuntimeError: it is not finite and ``error_if_nonfinite`` is set.
    """
    torch_norm, order = _torchs_norm(), float(norm_type)
    has_blocks = runtime.sharding_groups is not None
    is_sharded = runtime.config.shard_optimizer_state or has_blocks
    kind = CommGroup.WORLD if is_sharded else CommGroup.MP_GROUP
    members = runtime.topology.members(kind, runtime.rank)
    if len(members) == 1:
        alone: torch.Tensor = torch_norm([*whole, *slices], order, error_if_nonfinite, foreach)
        return alone.to(runtime.device)
    own: torch.Tensor = torch_norm(whole, order, False, foreach)
    if not whole and order < 0:
        own = torch.tensor(float("inf"))  # what is not here must not be the smallest
    # Tensor-parallel ranks hold the same of what is not split: it counts once.
    counts = is_sharded or runtime.coordinates.tp_rank == 0
    if order == 0 and has_blocks:
        raise UnsupportedError(
            "a norm of order 0 counts tensors, and with sharded_data_parallel_degree above 1 they "
            "are in blocks on several ranks: take another order."
        )
    nothing = float("inf") if order < 0 else 0.0
    part = torch.full((2,), nothing, dtype=torch.float64, device=runtime.device)
    if counts:
        part[0] = own
    if order == 0 and runtime.topology.tp_size > 1:
        if is_sharded and slices:
            raise UnsupportedError(
                "a norm of order 0 counts tensors, and with shard_optimizer_state their slices are "
                "on ranks that do not match: take another order."
            )
        number = 0 if is_sharded else _number_not_zero(runtime, slices)
        part[1] = number if counts else 0
    elif slices:
        part[1] = torch_norm(slices, order, False, foreach)
    parts = [torch.empty_like(part) for _ in members]
    with runtime.peers.blaming(members, "combining the norms of gradients with"):
        dist.all_gather(parts, part, group=runtime.process_groups[kind])
    together = torch.cat(parts)
    # Of order 0 is the number of tensors that are not all zero.
    total = together.sum() if order == 0 else torch.linalg.vector_norm(together, order)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {order} of the gradients of all partitions is "
            f"{total.item()}, so they cannot be clipped. To scale them all the same, pass "
            "error_if_nonfinite=False."
        )
    return total.to(own.dtype)


def _number_not_zero(runtime: TorchRuntime, slices: Sequence[torch.Tensor]) -> int:
    """Returns how many tensors have an element that is not zero. Collective: TP_GROUP."""
    group = runtime.process_groups[CommGroup.TP_GROUP]
    flags = torch.tensor([bool(each.any()) for each in slices], device=runtime.device)
    members = runtime.topology.members(CommGroup.TP_GROUP, runtime.rank)
    with runtime.peers.blaming(members, "combining the norms of gradients with"):
        found = flags.to(torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return int(found.sum())


def _torchs_norm() -> Callable[..., torch.Tensor]:
    """Returns torch's function, also while another one stands for it."""
    found = work_of(torch.nn.utils.get_total_norm).cell_contents
    stands_for = getattr(found, "__self__", None)
    original: Callable[..., torch.Tensor] = (
        stands_for.torch_get_total_norm if isinstance(stands_for, _WholeModelFunctions) else found
    )
    return original


def over_slices(runtime: TorchRuntime, norms: torch.Tensor, order: float) -> torch.Tensor:
    """Returns the norms of whole tensors, of which every rank has a slice. Collective: TP_GROUP.

    Shape: ``(n,)``.

    Args:
        runtime: the state of the library in this process.
        norms: of the own slices; the same tensors on every rank.
        order: of the norms: 2, or infinite.
    """
    is_largest = order == float("inf")
    found = norms.clone() if is_largest else norms.double().square()
    members = runtime.topology.members(CommGroup.TP_GROUP, runtime.rank)
    with runtime.peers.blaming(members, "combining the norms of slices with"):
        dist.all_reduce(
            found,
            dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM,
            group=runtime.process_groups[CommGroup.TP_GROUP],
        )
    return found if is_largest else found.sqrt().to(norms.dtype)


def _listed(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


@contextlib.contextmanager
def _replaced(function: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    cell = work_of(function)
    original = cell.cell_contents
    cell.cell_contents = replacement
    try:
        yield
    finally:
        cell.cell_contents = original
