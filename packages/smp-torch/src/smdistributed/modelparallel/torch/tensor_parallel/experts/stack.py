"""Which modules are stacks of experts, and whether ranks can have some experts of each.

A stack has parameters of which each is as many experts long along dim 0, and is called with tokens,
the experts that each goes to, and weights (``routed``). Its result must be a sum over choices, each
of which one expert computes from its token and weight alone. That is tried, in double precision on
small random numbers: the whole stack, called with some tokens and then with others, must give what
the shares of all ranks give when each is called with all of its tokens at once; also where experts,
or a rank, get nothing, and where all tokens go to one expert; in training and in evaluation. It may
change nothing else: no state that its code can reach, and not what it is given.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.state.snapshot import Snapshot
from smdistributed.modelparallel.torch.tensor_parallel.auto.outputs import RefutedError
from smdistributed.modelparallel.torch.tensor_parallel.auto.template import copied_with
from smdistributed.modelparallel.torch.tensor_parallel.auto.trial_slices import tried
from smdistributed.modelparallel.torch.tensor_parallel.experts.routed import Routed, routed
from smdistributed.modelparallel.torch.tensor_parallel.experts.rows import (
    Dispatch,
    computed,
    dispatched,
)
from smdistributed.modelparallel.torch.trial.alone import alone

#: Widths are divided until the smallest is about this.
_WIDTH = 8
#: A stack of more numbers than this is not tried at its own widths.
_MOST_NUMBERS = 1 << 26
#: Of which the trials are: tokens and choices.
_TOKENS = 11, 40
_CHOICES = 1, 2
#: In training first, as most can be seen there.
_MODES = True, False
#: In which precision, the first that its code takes, and what rounding may change of the largest
#: number; code may have single precision written in it.
_PRECISIONS = ((torch.float64, 1e-5), (torch.float32, 1e-4))
_SEED = 0


@dataclass(frozen=True)
class Stack:
    """How a stack of experts is spread.

    Attributes:
        parameters: the names of those that are cut along dim 0.
        number: of experts.
        counts: attributes of the module that say how many experts there are.
    """

    parameters: tuple[str, ...]
    number: int
    counts: tuple[str, ...]


def looks_stacked(module: nn.Module) -> int:
    """Returns how many experts a module may be a stack of; 0 if it is none.

    Its own parameters have one size along dim 0, and one of them has three dims or more.
    """
    own = [each for each in module._parameters.values() if each is not None]
    inner = sum(1 for _ in module.parameters())
    if not own or inner != len(own) or any(True for _ in module.buffers()):
        return 0
    sizes = {each.shape[0] for each in own if each.dim()}
    is_deep = max(each.dim() for each in own) > 2
    if len(sizes) != 1 or not is_deep or min(each.dim() for each in own) < 2:
        return 0
    return sizes.pop()


def find_stack(module: nn.Module, size: int) -> Stack:
    """Returns how a stack of experts is spread over ranks.

    Args:
        module: that looks like one.
        size: how many ranks there are.

    Raises:
        RefutedError: it cannot be; says why.
    """
    number = looks_stacked(module)
    if number % size:
        raise RefutedError(
            f"the number of ranks ({size}) must divide that of its experts ({number})"
        )
    if "forward" in vars(module):
        raise RefutedError("its forward was replaced")
    return alone(lambda: _proven(module, number, size))


def _proven(module: nn.Module, number: int, size: int) -> Stack:
    names = tuple(name for name, each in module._parameters.items() if each is not None)
    reason: RefutedError | None = None
    for divisor in dict.fromkeys((_divisor(module), 1)):
        numbers = sum(each.numel() for each in module.parameters()) // divisor**2
        if numbers > _MOST_NUMBERS:
            break
        tries = itertools.product(_PRECISIONS, _counts(module, number))
        for (dtype, near), counts in tries:
            stack = Stack(names, number, counts)
            try:
                _Proof(module, stack, size, divisor, dtype, near).run()
            except (RefutedError, UnsupportedError) as error:
                reason = reason or RefutedError(str(error))
            else:
                return stack
    raise reason or RefutedError("it is too large to be tried")


def _counts(module: nn.Module, number: int) -> Iterator[tuple[str, ...]]:
    """Yields which attributes may count experts: those that have this number, all or by name."""
    equal = tuple(
        name for name, value in vars(module).items() if type(value) is int and value == number
    )
    named = tuple(name for name in equal if "expert" in name)
    yield from dict.fromkeys((equal, named, ()))


def _widths(module: nn.Module) -> set[int]:
    return {
        size for each in module._parameters.values() if each is not None for size in each.shape[1:]
    }


def _divisor(module: nn.Module) -> int:
    """Returns by what all widths can be divided."""
    common = math.gcd(*_widths(module))
    return common // _WIDTH if common % _WIDTH == 0 else 1


class _Proof:
    """A trial of one way to spread a stack, at widths divided by ``divisor``."""

    def __init__(
        self,
        module: nn.Module,
        stack: Stack,
        size: int,
        divisor: int,
        dtype: torch.dtype,
        near: float,
    ) -> None:
        self._stack, self._size, self._divisor = stack, size, divisor
        self._dtype, self._near = dtype, near
        self._draws = torch.Generator().manual_seed(_SEED)
        self._whole = self._small(module)
        self._form: _Form = next(_forms(self._whole))

    def run(self) -> None:
        """Tries it.

        Raises:
            RefutedError: the ranks do not compute what the whole computes, or it cannot be tried.
        """
        reason: RefutedError | None = None
        for form in _forms(self._whole):
            self._form = form
            for width in sorted(_widths(self._whole)):
                try:
                    for trains, count, choices in itertools.product(_MODES, _TOKENS, _CHOICES):
                        self._whole.train(trains)
                        for index in self._indices(count, choices):
                            self._try(width, index)
                except RefutedError as error:
                    # What the likeliest way to call it shows says most.
                    reason = reason or error
                else:
                    return
        raise reason or RefutedError("it cannot be called with tokens, experts and weights")

    def _small(self, module: nn.Module) -> nn.Module:
        """Returns a copy with random numbers for parameters, and divided widths."""
        widths = _widths(module)

        def values(parameter: nn.Parameter) -> torch.Tensor:
            first, *rest = parameter.shape
            shape = [first, *(each // self._divisor for each in rest)]
            made = torch.randn(shape, generator=self._draws, dtype=self._dtype)
            return nn.Parameter(made / math.sqrt(shape[-1]), requires_grad=True)

        small = copied_with(module, values, torch.clone)
        for name, value in list(vars(small).items()):
            is_width = type(value) is int and (value in widths or 2 * value in widths)
            if is_width and name not in self._stack.counts and value % self._divisor == 0:
                setattr(small, name, value // self._divisor)
        return small

    def _indices(self, count: int, choices: int) -> Iterator[torch.Tensor]:
        """Yields which experts tokens go to."""
        number = self._stack.number
        noise = torch.rand((count, number), generator=self._draws)
        yield noise.argsort(-1)[:, :choices]
        first = torch.arange(choices).expand(count, -1).contiguous()
        yield first  # the other ranks get nothing
        yield number - 1 - first

    def _try(self, width: int, index: torch.Tensor) -> None:
        tokens = torch.randn((len(index), width), generator=self._draws, dtype=self._dtype)
        weights = torch.rand(index.shape, generator=self._draws, dtype=self._dtype)
        whole = self._results(tokens, weights, index, self._of_whole)
        spread = self._results(tokens, weights, index, self._of_ranks)
        for name, expected in whole.items():
            found = spread[name]
            most = float(expected.abs().max())
            if found.shape != expected.shape or not math.isfinite(most):
                raise RefutedError(f"its {name} is not like that of tokens")
            if float((found - expected).abs().max()) > self._near * (1 + most):
                raise RefutedError(
                    f"the {name} that its experts give, each by itself, differs from what they "
                    "give together"
                )

    def _results(
        self,
        tokens: torch.Tensor,
        weights: torch.Tensor,
        index: torch.Tensor,
        function: Callable[[Routed], torch.Tensor],
    ) -> Mapping[str, torch.Tensor]:
        """Returns the result and all gradients."""
        sources = [tokens.clone().requires_grad_(), weights.clone().requires_grad_()]
        call = routed(*self._form(sources[0], index, sources[1]))
        if call is None or call.tokens is not sources[0]:
            raise RefutedError("its tokens and weights cannot be told from each other")
        result = function(call)
        if result.shape != tokens.shape or result.dtype != tokens.dtype or not result.requires_grad:
            raise RefutedError("it returns something else than what its tokens become")
        sources += [getattr(self._whole, name) for name in self._stack.parameters]
        names = ["tokens", "weights", *self._stack.parameters]
        by = torch.linspace(-1, 1, result.numel(), dtype=self._dtype).view_as(result)
        gradients = torch.autograd.grad(result, sources, by, allow_unused=True)
        found = {"result": result.detach()}
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is None or not gradient.any():
                raise RefutedError(f"its result does not depend on {name}")
            found[f"gradient of {name}"] = gradient
        return found

    def _of_whole(self, call: Routed) -> torch.Tensor:
        """Returns what the whole makes of some tokens, and then of others."""
        some = len(call.index) // 3
        given = call.tokens, call.index, call.weights
        versions = [version_of(each) for each in given]
        before = Snapshot(self._whole.modules())
        try:
            parts = [
                _result_of(self._whole, call.with_tensors(*(each[part] for each in given)))
                for part in (slice(some), slice(some, None))
            ]
        finally:
            is_changed = bool(before.note_changes())
            before.put_all_back()
        if is_changed:
            raise RefutedError("it keeps something of a call")
        if [version_of(each) for each in given] != versions:
            raise RefutedError("it changes what it is given")
        return torch.cat(parts)

    def _of_ranks(self, call: Routed) -> torch.Tensor:
        total = torch.zeros_like(call.tokens)
        share = self._stack.number // self._size
        for rank in range(self._size):
            dispatch = dispatched(call.index, self._stack.number, self._size).of(rank)
            total = total + self._of_rank(rank * share, share, call, dispatch)
        return total

    def _of_rank(self, first: int, share: int, call: Routed, dispatch: Dispatch) -> torch.Tensor:
        part = copied_with(self._whole, lambda each: each, torch.clone)
        for name in self._stack.counts:
            setattr(part, name, share)
        own = {
            name: getattr(self._whole, name)[first : first + share]
            for name in self._stack.parameters
        }
        rows = call.tokens.index_select(0, dispatch.tokens)
        chosen = call.weights.reshape(-1).index_select(0, dispatch.choices)
        with standing_in(part, own):
            made = computed(
                call,
                rows,
                dispatch.rows,
                dispatch.experts,
                chosen,
                lambda given: _result_of(part, given),
            )
        return torch.zeros_like(call.tokens).index_add(0, dispatch.tokens, made)


#: Gives arguments, by position and by keyword, of tokens, experts and weights.
_Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[Any, Any]]


def _forms(module: nn.Module) -> Iterator[_Form]:
    """Yields how a stack may be called: by position in any order, or by name."""
    parameters = list(inspect.signature(module.forward).parameters.values())[:3]
    is_named = any(each.kind is each.KEYWORD_ONLY for each in parameters)

    def form(order: tuple[int, ...], *given: torch.Tensor) -> tuple[Any, Any]:
        ordered = [given[place] for place in order]
        if is_named:
            return (), dict(zip([each.name for each in parameters], ordered, strict=True))
        return tuple(ordered), {}

    for order in itertools.permutations(range(3)):
        yield functools.partial(form, order)


def _result_of(module: nn.Module, arguments: object) -> torch.Tensor:
    result, dropped, _ = tried(module, arguments)
    if dropped:
        raise RefutedError("it draws random numbers for its tokens")
    if len(result.leaves) != 1 or not isinstance(result.leaves[0], torch.Tensor):
        raise RefutedError("it returns something else than what its tokens become")
    return result.leaves[0]


@contextlib.contextmanager
def standing_in(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, code of a module finds other tensors in the places of its parameters."""
    vars(module).update(tensors)  # found before parameters are
    try:
        yield
    finally:
        for name in tensors:
            del vars(module)[name]
