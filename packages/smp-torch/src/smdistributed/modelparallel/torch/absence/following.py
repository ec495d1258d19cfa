"""Functions of torch on absent tensors.

Each runs on fakes, which give shapes, types and errors; random numbers are drawn as on the rank
that has the values. Where Python needs a value, the ranks of the pipeline compute it together
(``absence.values``), or it is refused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.absence.digests import digest_of, place_of
from smdistributed.modelparallel.torch.absence.notes import (
    REMEDY,
    Call,
    Origin,
    Source,
    check_forms,
    check_not_traced,
    name_of,
    not_differentiated,
    shortened,
)
from smdistributed.modelparallel.torch.absence.owned import (
    awake,
    digest_in,
    is_owned,
    is_shown,
    leave,
    noting_writes,
    owned_in,
    read_only,
    track,
    wake,
)
from smdistributed.modelparallel.torch.absence.set_data import set_data
from smdistributed.modelparallel.torch.absence.tensors import (
    AbsentTensor,
    Keeper,
    absent_in,
    as_gradient,
    become_absent,
    clear_gradient,
    gradient_of,
    make_present,
    new_absent,
    new_gradient,
    vacant,
)
from smdistributed.modelparallel.torch.absence.values import Question
from smdistributed.modelparallel.torch.compat.private.below import Scripted
from smdistributed.modelparallel.torch.compat.private.compiled import (
    breaks_graph,
    is_being_compiled,
)
from smdistributed.modelparallel.torch.compat.private.modes import (
    DATA_DEPENDENT,
    OpOverload,
    is_of_fakes,
    past_subclass_functions,
    pytree,
    quiet_fakes,
)
from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.tensors.foreach import is_foreach, one_by_one
from smdistributed.modelparallel.torch.tensors.functions import (
    ABOUT,
    DIFFERENTIATING,
    GIVING_MEMORY,
    GIVING_VALUES,
    HOOKING_GRADIENTS,
    MAKING_LIKE,
    OF_OBJECTS,
)
from smdistributed.modelparallel.torch.trial.on_fakes import Trial

_TENSOR: Any = torch.Tensor
_UNKNOWN = Source()
#: Arguments of functions of torch that are numbers, where a tensor of one may be given.
_NUMBERS = frozenset(("alpha", "beta", "value"))
#: Calls that come to absent tensors alone, and not to those of this rank.
_PAST_FUNCTIONS = (OpOverload, Scripted)
#: Calls that stand behind a value one after the other, at most: a moving average goes on for ever.
_MOST_CALLS = 2048


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function of torch that got an absent tensor."""
    own = args[0] if args and isinstance(args[0], AbsentTensor) else None
    with past_subclass_functions():
        if (own is not None and func in OF_OBJECTS) or func in HOOKING_GRADIENTS:
            return func(*args, **kwargs)
        if own is not None and func in ABOUT:
            return func(own.absent.fake, *args[1:], **kwargs)
        return _answer(func, args, kwargs)


def _is_absent(value: Any) -> bool:
    return isinstance(value, AbsentTensor)


def _answer(func: Any, args: Any, kwargs: Any) -> Any:
    own = args[0] if args and isinstance(args[0], AbsentTensor) else None
    if func == _TENSOR.data.__set__ and is_computed_for(*args):
        return _give_data(*args)
    if func == _TENSOR.grad.__set__ and is_computed_for(*args):
        return _give_gradient(*args)
    if func == _TENSOR.data.__set__ and not _is_own(*args):
        found = absent_in((args, kwargs))
        found[0].absent.keeper.check_use(_all_names(found), name_of(func))
        return set_data(args[0], args[1], _origin(func, args, {}))
    if func in (_TENSOR.data.__set__, _TENSOR.grad.__set__) and own is None:
        with awake(owned_in(args)):
            return func(*args)  # which the next step refuses
    if own is not None:
        handled, result = _of_one(func, own, args)
        if handled:
            return result
    found = absent_in((args, kwargs))
    found[0].absent.keeper.check_use(_all_names(found), name_of(func))
    check_not_traced(func, _all_names(found))
    if func is torch.autograd.grad:
        try:
            return _follow(func, args, kwargs)
        except RuntimeError as error:  # what is here is no leaf among fakes
            raise not_differentiated(func, _origin(func, args, kwargs).names) from error
    if func in DIFFERENTIATING:
        raise not_differentiated(func, _origin(func, args, kwargs).names)
    if func in GIVING_MEMORY:
        reason = (
            f"{name_of(func)} asks for the memory of {_all_names(found)}, which another partition "
            f"has, or of what was computed from it. {REMEDY}"
        )
        raise breaks_graph(reason) if is_being_compiled() else UnsupportedError(reason)
    if func in GIVING_VALUES:
        return _with_values(func, args, kwargs, is_everywhere=True)
    if func is _TENSOR.__iter__:
        return iter(_follow(_TENSOR.unbind, args, kwargs))
    if is_foreach(func):
        return one_by_one(functools.partial(_with_one, func), args, kwargs)
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
            given = args[1]
            own.grad = as_gradient(given, own) if _is_absent(given) else new_gradient(own)
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
        about.origin = replace(about.origin, digest=_origin(func, args, {}).digest)
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


def is_computed_for(parameter: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether ranks that compute it together can give a model's own tensor its data."""
    if not isinstance(data, AbsentTensor) or len(data.absent.origin.owners) < 2:
        return False
    is_alike = parameter.shape == data.shape and parameter.dtype == data.dtype
    return _is_own(parameter, data) and is_alike and not data.absent.source.is_own


def _is_own(parameter: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether a tensor, which is given data, is a model's own; one of both is absent."""
    if isinstance(parameter, AbsentTensor):
        return parameter.absent.source.is_own
    assert isinstance(data, AbsentTensor)
    return data.absent.keeper.is_here(parameter)


def _give_data(parameter: torch.Tensor, data: AbsentTensor) -> None:
    """Writes the data to the memory that there is: no rank has the memory of what is computed."""
    with torch.no_grad():
        _answer(_TENSOR.copy_, (parameter, data), {})
    note_given(data)


def note_given(data: AbsentTensor) -> None:
    """Takes note that a parameter was given what an absent tensor is as its data."""
    data.absent.keeper.given.note(data.absent.fake, _all_names([data]))


def _all_names(found: Sequence[AbsentTensor]) -> str:
    return shortened(frozenset[str]().union(*(each.absent.names for each in found)))


def _with_values(func: Any, args: Any, kwargs: Any, *, is_everywhere: bool) -> Any:
    """Runs a function on values: what the ranks have told each other, or compute together."""
    owned = owned_in((args, kwargs))
    if is_everywhere:
        leave(owned)

    def value(each: Any) -> Any:
        if not isinstance(each, AbsentTensor):
            return each
        is_of_several = len(each.absent.origin.owners) > 1
        asked = _question(func, each, is_everywhere=is_everywhere or is_of_several)
        return each.absent.keeper.answer(asked)

    given: Any = pytree.tree_map(value, (tuple(args), dict(kwargs)))
    if not owned:
        return read_only(func(*given[0], **given[1]))
    keeper, origin = owned[0].owned.keeper, _origin(func, args, kwargs)
    with noting_writes((args, kwargs), keeper, origin), awake(owned):
        return read_only(func(*given[0], **given[1]))


def _give_gradient(parameter: torch.Tensor, gradient: AbsentTensor) -> None:
    """Makes a gradient of what all ranks compute: the rank that has the parameter updates by it."""
    values = computed_gradient(gradient)
    if isinstance(parameter, AbsentTensor):
        clear_gradient(parameter)
        parameter.grad = new_gradient(parameter)
        return
    with awake(owned_in([parameter])):
        parameter.grad = values


def computed_gradient(gradient: AbsentTensor) -> torch.Tensor:
    """Returns what all ranks compute to be a gradient. Collective: PP_GROUP."""
    asked = _question(_TENSOR.grad.__set__, gradient, is_everywhere=True)
    return gradient.absent.keeper.answer(asked).clone()


def make_whole(tensors: Iterable[torch.Tensor]) -> None:
    """Gives all ranks of a pipeline what only some have. Collective: PP_GROUP.

    Args:
        tensors: of a copy of a model, say; those that every rank has stay as they are.
    """
    for each in tensors:
        if is_owned(each):
            leave(owned_in([each]))
            wake(each)
        elif isinstance(each, AbsentTensor):
            asked = _question(_TENSOR.clone, each, is_everywhere=True)
            make_present(each, each.absent.keeper.answer(asked))


def bring_arguments(tensors: Iterable[torch.Tensor]) -> None:
    """Gives all ranks of a pipeline what a script has computed from what some of them have.

    Collective: PP_GROUP, if there is something.

    Args:
        tensors: that every rank gives to the same call; a model's own stay where they are.
    """
    make_whole(
        each
        for each in tensors
        if (isinstance(each, AbsentTensor) and not each.absent.writes_to_own)
        or (is_owned(each) and not each.owned.writes_to_own)  # type: ignore[attr-defined]
    )


def _question(func: Any, tensor: AbsentTensor, *, is_everywhere: bool) -> Question:
    about = tensor.absent
    place = place_of(about.origin.digest)
    return Question(about.source_now, about.origin, name_of(func), is_everywhere, place)


def _origin(func: Any, args: Any, kwargs: Any) -> Origin:
    """Returns the origin of what a call gives, the same on every rank."""
    origins = [each.absent.origin for each in absent_in((args, kwargs))]
    origins += [each.owned.origin for each in owned_in((args, kwargs))]
    origin = Origin.of_call(origins, digest_of(func, args, kwargs, _digest))
    return replace(origin, is_told=False) if isinstance(func, _PAST_FUNCTIONS) else origin


def _digest(tensor: Any) -> str | None:
    about = tensor.absent.origin if isinstance(tensor, AbsentTensor) else None
    if about is None:
        return digest_in(tensor)
    return about.digest if about.owners else None


def _with_one(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function of many tensors on one, which is here or not."""
    if absent_in((args, kwargs)):
        return _follow(func, args, kwargs)
    return track(func, args, kwargs) if owned_in((args, kwargs)) else func(*args, **kwargs)


def _follow(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function on fakes; what it gives is absent."""
    absent = absent_in((args, kwargs))
    keeper = absent[0].absent.keeper
    stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    origins = [each.absent.origin for each in absent]
    check_forms(func, (args, kwargs), origins)

    def stand_in(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in stand_ins:
            stand_ins[id(value)] = value, _fake_of(value, keeper)
        return stand_ins[id(value)][1]

    given = pytree.tree_map(stand_in, (tuple(args), dict(kwargs)))
    sources = {id(each): _source_of(each) for each in absent}
    before = [version_of(fake) for _, fake in stand_ins.values()]
    try:
        with quiet_fakes(), keeper.fake_mode, Trial() as trial:
            result = func(*given[0], **given[1])
    except DATA_DEPENDENT:
        given_numbers = {name: each for name, each in kwargs.items() if name in _NUMBERS}
        if absent_in(given_numbers):  # all ranks ask for these, not for what is computed with them
            told = {
                name: each.item() for name, each in given_numbers.items() if torch.is_tensor(each)
            }
            return func(*args, **{**kwargs, **told})
        return _with_values(func, args, kwargs, is_everywhere=True)
    except Exception as error:
        if not is_of_fakes(error):
            raise
        raise UnsupportedError(
            f"{name_of(func)} cannot tell the form of what it gives without the values of "
            f"{_all_names(absent)}, which another partition has. {REMEDY}"
        ) from error
    check_forms(func, result, origins)
    written = [
        (place, value, fake)
        for place, (value, fake) in enumerate(stand_ins.values())
        if trial.has_written(fake) or version_of(fake) != before[place] or _is_reshaped(value, fake)
    ]
    unchanged = [fake for place, _, fake in written if version_of(fake) == before[place]]
    torch.autograd.graph.increment_version(unchanged)
    here = [value for _, value, _ in written if not _is_absent(value)]
    elsewhere = [value for _, value, _ in written if isinstance(value, AbsentTensor)]
    if any(each.absent.writes_to_own for each in elsewhere):
        # The rank that has what is written to asks for the values.
        leave(owned_in((args, kwargs)))
        for one in absent:
            if len(one.absent.origin.owners) > 1 and not one.absent.writes_to_own:
                keeper.answer(_question(func, one, is_everywhere=True))
    if any(_writes_here(each, keeper) for each in here):
        return _with_values(func, args, kwargs, is_everywhere=False)
    sharing = {id(value): _sharing_memory(func, value, absent) for value in here}
    origin = _origin(func, args, kwargs)
    if func in MAKING_LIKE:
        origin = Origin(frozenset(), frozenset(), origin.digest)
    is_noted = not trial.has_drawn and all(each.is_noted for each in sources.values())
    call = (
        _call(func, args, kwargs, sources, [each for _, each, _ in written]) if is_noted else None
    )
    taken = [id(each) for each in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(each)]
    for _, value, fake in written:
        place = -1 - taken.index(id(value))
        source = _UNKNOWN if call is None else Source(call, place)
        for each in sharing.get(id(value), (value,)):
            _write(each, fake, keeper, origin.at(f"to {-1 - place}"), source)
    numbers = itertools.count()
    originals = {id(fake): value for value, fake in stand_ins.values()}

    def real(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        number = next(numbers)
        if id(value) in originals:
            return originals[id(value)]
        source = _UNKNOWN if call is None else Source(call, number)
        made = new_absent(keeper, value, origin.at(str(number)), source)
        made.absent.sees_own = func is _TENSOR.detach and absent[0].absent.writes_to_own
        return made

    return pytree.tree_map(real, result)


def _writes_here(tensor: Any, keeper: Keeper) -> bool:
    """Whether what is written to a tensor is written to one that this rank has, all of it."""
    return keeper.is_here(tensor) or (is_owned(tensor) and tensor.owned.writes_to_own)


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
    depths = (each.call.depth for each in sources.values() if each.call is not None)
    depth = 1 + max(depths, default=0)
    if depth > _MOST_CALLS:
        return None
    will_change = set(map(id, written))
    versions = []

    def noted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in sources:
            return sources[id(value)]
        if is_shown(value):
            value = value.detach().clone()  # it is whole for as long as the function runs
        elif id(value) in will_change:
            value = value.detach()
        versions.append(version_of(value))
        return value

    kept: Any = pytree.tree_map(noted, (tuple(args), dict(kwargs)))
    return Call(func, kept, tuple(versions), depth)


def _source_of(tensor: AbsentTensor) -> Source:
    """Returns where values come from; what one rank has need not be computed again."""
    about = tensor.absent
    is_had = about.origin.is_told and len(about.origin.owners) == 1
    return about.source_now if about.source_now.is_noted or not is_had else Source(like=about.fake)


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
    wake(tensor)
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
    tensor: torch.Tensor, fake: torch.Tensor, keeper: Keeper, origin: Origin, source: Source
) -> None:
    """Makes a tensor what it is after something absent was written to it."""
    wake(tensor)
    if isinstance(tensor, AbsentTensor):
        about = tensor.absent
        if fake.shape != tensor.shape:
            tensor.data = vacant(fake, tensor.device)
        if about.writes_to_own:  # the rank that has it has what it becomes
            about.origin = replace(about.origin, digest=origin.digest)
            about.source = about.source if about.source.is_own else _UNKNOWN
        else:
            about.source, about.version, about.origin = source, version_of(fake), origin
        return
    with keeper.fake_mode:
        own = fake.detach()
    become_absent(tensor, keeper, own, origin, source)
