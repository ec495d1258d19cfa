"""Functions of torch on absent tensors.

Each runs on fakes, which give shapes, types and errors; random numbers are drawn as on the rank
that has the values. Where Python needs a value, the ranks of the pipeline compute it together
(``absence.values``), or it is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.absence.notes import (
    REMEDY,
    Call,
    Source,
    name_of,
    shortened,
)
from smdistributed.modelparallel.torch.absence.numbers import AbsentNumber
from smdistributed.modelparallel.torch.absence.tensors import (
    Absent,
    AbsentTensor,
    Keeper,
    absent_in,
    clear_gradient,
    gradient_of,
    new_absent,
    new_gradient,
    vacant,
)
from smdistributed.modelparallel.torch.absence.values import Question
from smdistributed.modelparallel.torch.compat.private.modes import (
    DATA_DEPENDENT,
    is_of_fakes,
    is_traced,
    past_subclass_functions,
    pytree,
    quiet_fakes,
)
from smdistributed.modelparallel.torch.compat.private.tensors import ABOUT_TENSORS, version_of
from smdistributed.modelparallel.torch.trial.on_fakes import Trial

_TENSOR: Any = torch.Tensor
_UNKNOWN = Source()
#: Calls that stand behind a value, at most: a moving average goes on for ever.
_MOST_CALLS = 2048


def _of(names: str) -> frozenset[Any]:
    found = set()
    for name in names.split():
        each = getattr(_TENSOR, name, None)
        if each is not None:
            found.add(each if callable(each) else each.__get__)
    return frozenset(found)


#: What concerns the object itself.
_OBJECT = frozenset(
    {*_of("__hash__ register_hook register_post_accumulate_grad_hook"), *ABOUT_TENSORS}
)
#: What asks for no values.
_ABOUT = frozenset(
    {
        *_of("device layout dtype shape size dim ndim ndimension numel nelement element_size"),
        *_of("itemsize nbytes is_cuda is_cpu is_xpu is_mps is_meta is_sparse is_quantized stride"),
        *_of("is_mkldnn is_nested is_floating_point is_complex is_signed __len__ get_device"),
        *_of("is_inference is_leaf grad_fn requires_grad is_contiguous storage_offset name"),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
#: What tells values to Python, or gives them to what is no tensor.
_VALUES = _of(
    "item __bool__ __float__ __int__ __index__ __complex__ tolist numpy __array__ __format__ "
    "__contains__ is_nonzero"
)
#: What would give away memory that has no values.
_MEMORY = _of("data_ptr untyped_storage storage __reduce_ex__ share_memory_ __dlpack__ is_shared")
_DIFFERENTIATING = frozenset({_TENSOR.backward, torch.autograd.grad, torch.autograd.backward})
#: Give a tensor like another one, whatever its values.
_LIKE = frozenset(
    {torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like}
    | {torch.rand_like, torch.randn_like, torch.randint_like}
    | _of("new_zeros new_ones new_full new_empty new_tensor")
)


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function of torch that got an absent tensor."""
    own = args[0] if args and isinstance(args[0], AbsentTensor) else None
    if func is _TENSOR.item and own is not None and own.absent.source_now.known is None:
        return AbsentNumber(own)
    with past_subclass_functions():
        if own is not None and func in _OBJECT:
            return func(*args, **kwargs)
        if own is not None and func in _ABOUT:
            return func(own.absent.fake, *args[1:], **kwargs)
        given = AbsentNumber.as_tensors((tuple(args), kwargs))
        return _answer(func, *given)


def _is_absent(value: Any) -> bool:
    return isinstance(value, AbsentTensor)


def _answer(func: Any, args: Any, kwargs: Any) -> Any:
    own = args[0] if args and isinstance(args[0], AbsentTensor) else None
    if own is not None:
        handled, result = _of_one(func, own, args)
        if handled:
            return result
    found = absent_in((args, kwargs))
    found[0].absent.keeper.check_use(_all_names(found), name_of(func))
    if is_traced():
        raise UnsupportedError(
            f"{name_of(func)} gets {_all_names(found)}, which another partition has, while "
            f"torch.jit.trace runs: trace a module of your own. {REMEDY}"
        )
    if func in _DIFFERENTIATING:
        raise UnsupportedError(
            f"{name_of(func)} asks for gradients of what depends on {_all_names(found)}, which "
            "another partition has: compute them in a step function, by model.backward."
        )
    if func in _MEMORY:
        raise UnsupportedError(
            f"{name_of(func)} asks for the memory of {_all_names(found)}, which another partition "
            f"has, or of what was computed from it. {REMEDY}"
        )
    if func in _VALUES:
        return _with_values(func, args, kwargs, is_everywhere=True)
    if getattr(func, "__name__", "").startswith("_foreach_"):
        return _one_by_one(func, args, kwargs)
    return _follow(func, args, kwargs)


def _of_one(func: Any, own: AbsentTensor, args: Any) -> tuple[bool, Any]:
    """Runs what concerns one object: its gradient, its data, whether it requires a gradient.

    Returns:
        whether it was that, and the result.
    """
    about = own.absent
    if func == _TENSOR.grad.__get__:
        return True, gradient_of(own)
    if func in (_TENSOR.grad.__set__, _TENSOR.grad.__delete__):
        clear_gradient(own)
        if len(args) > 1 and args[1] is not None:
            own.grad = new_gradient(own)
        return True, None
    if func in (_TENSOR.requires_grad.__set__, _TENSOR.requires_grad_):
        flag = args[1] if len(args) > 1 else True
        about.fake.requires_grad_(flag)
        own.requires_grad_(flag)
        return True, own if func is _TENSOR.requires_grad_ else None
    if func == _TENSOR.data.__get__:
        return True, _follow(_TENSOR.detach, (own,), {})
    if func == _TENSOR.data.__set__:
        with about.keeper.fake_mode:
            fake = torch.empty(args[1].shape, dtype=args[1].dtype, device=about.fake.device)
        about.fake = fake.requires_grad_(own.requires_grad)
        own.data = vacant(fake, own.device)
        if not about.source.is_own:
            about.source = _UNKNOWN
        return True, None
    if func is _TENSOR.__deepcopy__:
        memo = args[1]
        if id(own) not in memo:
            copied = _follow(_TENSOR.clone, (_follow(_TENSOR.detach, (own,), {}),), {})
            if isinstance(own, nn.Parameter):
                copied._is_param = True
            memo[id(own)] = _of_one(_TENSOR.requires_grad_, copied, (copied, own.requires_grad))[1]
        return True, memo[id(own)]
    return False, None


def _all_names(found: Sequence[AbsentTensor]) -> str:
    return shortened(frozenset[str]().union(*(each.absent.names for each in found)))


def _with_values(func: Any, args: Any, kwargs: Any, *, is_everywhere: bool) -> Any:
    """Runs a function on values, which the ranks compute together or have computed."""

    def value(each: Any) -> Any:
        if not isinstance(each, AbsentTensor):
            return each
        about = each.absent
        asked = Question(about.source_now, about.names, name_of(func), is_everywhere)
        return about.keeper.answer(asked)

    given: Any = pytree.tree_map(value, (tuple(args), dict(kwargs)))
    return func(*given[0], **given[1])


def _one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function of many tensors on those that are here, and on the others apart."""
    given = [*args, *kwargs.values()]
    lists = [each for each in given if isinstance(each, list | tuple)]
    if any(map(_is_absent, given)):
        return _follow(func, args, kwargs)
    length = len(lists[0])
    results: list[Any] = [None] * length
    is_absent = [any(_is_absent(each[place]) for each in lists) for place in range(length)]
    for wanted in (False, True):
        places = [place for place in range(length) if is_absent[place] is wanted]
        if not places:
            continue

        def chosen(value: Any, places: list[int] = places) -> Any:
            is_list = isinstance(value, list | tuple)
            return [value[place] for place in places] if is_list else value

        some = [chosen(each) for each in args]
        named = {key: chosen(each) for key, each in kwargs.items()}
        found = _follow(func, some, named) if wanted else func(*some, **named)
        for place, each in zip(places, found or (), strict=False):
            results[place] = each
    return None if all(each is None for each in results) else tuple(results)


def _follow(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function on fakes; what it gives is absent."""
    absent = absent_in((args, kwargs))
    keeper = absent[0].absent.keeper
    stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    _check_forms(func, (args, kwargs), absent)

    def stand_in(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in stand_ins:
            stand_ins[id(value)] = value, _fake_of(value, keeper)
        return stand_ins[id(value)][1]

    given = pytree.tree_map(stand_in, (tuple(args), dict(kwargs)))
    sources = {id(each): each.absent.source_now for each in absent}
    before = [version_of(fake) for _, fake in stand_ins.values()]
    try:
        with quiet_fakes(), keeper.fake_mode, Trial() as trial:
            result = func(*given[0], **given[1])
    except DATA_DEPENDENT:
        return _with_values(func, args, kwargs, is_everywhere=True)
    except Exception as error:
        if not is_of_fakes(error):
            raise
        raise UnsupportedError(
            f"{name_of(func)} cannot tell the form of what it gives without the values of "
            f"{_all_names(absent)}, which another partition has. {REMEDY}"
        ) from error
    _check_forms(func, result, absent)
    written = [
        (place, value, fake)
        for place, (value, fake) in enumerate(stand_ins.values())
        if trial.has_written(fake) or version_of(fake) != before[place] or _is_reshaped(value, fake)
    ]
    unchanged = [fake for place, _, fake in written if version_of(fake) == before[place]]
    torch.autograd.graph.increment_version(unchanged)
    here = [value for _, value, _ in written if not _is_absent(value)]
    if any(map(keeper.is_here, here)):
        return _with_values(func, args, kwargs, is_everywhere=False)
    sharing = {id(value): _sharing_memory(func, value, absent) for value in here}
    names = frozenset[str]()
    if func not in _LIKE:
        names = names.union(*(each.absent.names for each in absent))
    is_noted = not trial.has_drawn and all(each.is_noted for each in sources.values())
    call = (
        _call(func, args, kwargs, sources, [each for _, each, _ in written]) if is_noted else None
    )
    taken = [id(each) for each in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(each)]
    for _, value, fake in written:
        place = -1 - taken.index(id(value))
        source = _UNKNOWN if call is None else Source(call, place)
        for each in sharing.get(id(value), (value,)):
            _write(each, fake, keeper, names, source)
    numbers = itertools.count()
    originals = {id(fake): value for value, fake in stand_ins.values()}

    def real(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        number = next(numbers)
        if id(value) in originals:
            return originals[id(value)]
        return new_absent(keeper, value, names, _UNKNOWN if call is None else Source(call, number))

    return pytree.tree_map(real, result)


def _check_forms(func: Any, structure: Any, absent: Sequence[AbsentTensor]) -> None:
    leaves = pytree.tree_leaves(structure)
    if any(torch.is_tensor(each) and each.layout is not torch.strided for each in leaves):
        raise UnsupportedError(
            f"{name_of(func)} takes or makes a sparse or nested tensor, with the values of "
            f"{_all_names(absent)}, which another partition has. {REMEDY}"
        )


def _is_reshaped(value: torch.Tensor, fake: torch.Tensor) -> bool:
    return value.shape != fake.shape


def _call(
    func: Any,
    args: Any,
    kwargs: Any,
    sources: Mapping[int, Source],
    written: Sequence[torch.Tensor],
) -> Call | None:
    """Returns the note of a call, unless too much stands behind it."""
    depth = 1 + sum(each.call.depth for each in sources.values() if each.call is not None)
    if depth > _MOST_CALLS:
        return None
    will_change = set(map(id, written))
    versions = []

    def noted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in sources:
            return sources[id(value)]
        if id(value) in will_change:
            value = value.detach()
        versions.append(version_of(value))
        return value

    kept: Any = pytree.tree_map(noted, (tuple(args), dict(kwargs)))
    return Call(func, kept, tuple(versions), depth)


def _fake_of(tensor: torch.Tensor, keeper: Keeper) -> torch.Tensor:
    if isinstance(tensor, AbsentTensor):
        return tensor.absent.fake
    with keeper.fake_mode:
        fake = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    return fake.requires_grad_(tensor.requires_grad)


def _sharing_memory(
    func: Any, tensor: torch.Tensor, absent: Sequence[AbsentTensor]
) -> list[torch.Tensor]:
    """Returns the tensors that are absent when something absent is written to one of them.

    Raises:
        UnsupportedError: not all of them are known, or see all of the memory.
    """
    keeper = absent[0].absent.keeper
    sharing = (
        keeper.sharing_memory(tensor) if type(tensor) in (torch.Tensor, nn.Parameter) else None
    )
    if sharing is not None and not any(map(keeper.is_here, sharing)):
        places = {(each.shape, each.stride(), each.storage_offset()) for each in sharing}
        if len(places) == 1:
            return sharing
    raise UnsupportedError(
        f"{name_of(func)} would write {_all_names(absent)}, which another partition has, or what "
        "was computed from it, to a part of a tensor that is here. Keep a tensor for each "
        f"parameter, and write to all of it. {REMEDY}"
    )


def _write(
    tensor: torch.Tensor, fake: torch.Tensor, keeper: Keeper, names: frozenset[str], source: Source
) -> None:
    """Makes a tensor what it is after something absent was written to it."""
    made: Any = tensor
    if isinstance(tensor, AbsentTensor):
        about = tensor.absent
        if fake.shape != tensor.shape:
            tensor.data = vacant(fake, tensor.device)
        if not about.source.is_own:
            about.source, about.version = source, version_of(fake)
            about.names |= names
        return
    is_parameter, requires_grad = isinstance(tensor, nn.Parameter), tensor.requires_grad
    with keeper.fake_mode:
        own = fake.detach().requires_grad_(requires_grad)
    tensor.data = vacant(fake, tensor.device)
    tensor.__class__ = AbsentTensor
    if is_parameter:
        made._is_param = True
    made.absent = Absent(keeper, own, names, source, version_of(own))
