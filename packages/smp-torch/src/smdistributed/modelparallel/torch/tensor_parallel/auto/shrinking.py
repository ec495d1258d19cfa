"""Smaller calls of the same kind: a proof needs few examples and short sequences.

The first tensor of a call has the examples along dim 0, and if it has three dims or more the
sequence along dim 1. Other tensors have them where they have these sizes. A size may mean something
else besides, as the width of a model whose sequences are as long as it is wide; then each way of
shortening some of these dims is tried on tensors without memory until the module takes one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import Call, TensorForm
from smdistributed.modelparallel.torch.tensor_parallel.auto.template import Template

#: Samples of calls have so many examples, and sequences of this length.
_EXAMPLES, _LENGTH = 2, 6
#: Those with more have at least so many, and at most, if calls have; odd, as the others are even.
_MORE_EXAMPLES = 33, 255
#: So many ways of shortening are tried.
_MOST_WAYS = 64

_Forms = Sequence[TensorForm]


def shrunk(template: Template, call: Call, forms: _Forms) -> tuple[_Forms, _Forms | None]:
    """Returns the forms of a call with few examples, and of one with more; None if these are few.

    Args:
        template: of the module that is called.
        call: its structure.
        forms: of its tensors.
    """
    sizes = template.sizes()
    short = _shortened(template, call, forms, sizes)
    few = _with_examples(short, sizes, lambda number: min(number, _EXAMPLES))
    fewest, most = _MORE_EXAMPLES
    # An odd number, as the other is even.
    more = _with_examples(short, sizes, lambda number: min(max(number, fewest) | 1, most))
    return few, None if more == few else more


def _shortened(template: Template, call: Call, forms: _Forms, kept: frozenset[int]) -> _Forms:
    if not forms or len(forms[0].shape) < 3 or forms[0].shape[1] <= 4 * _LENGTH:
        return forms
    length = forms[0].shape[1]
    places = [
        (number, dim)
        for number, form in enumerate(forms)
        for dim, size in enumerate(form.shape)
        if size == length and (number, dim) != (0, 1)
    ]
    if length not in kept:
        return _cut(forms, [(0, 1), *places])
    for chosen in itertools.islice(_subsets(places), _MOST_WAYS):
        short = _cut(forms, [(0, 1), *chosen])
        if _is_taken(template, call, short):
            return short
    return forms


def _subsets(places: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields what may be shortened too, first as much as possible; the first tensor is as wide."""
    inner = [place for place in places if place[0] > 0]
    for number in range(len(inner), -1, -1):
        yield from itertools.combinations(inner, number)


def _cut(forms: _Forms, places: Sequence[tuple[int, int]]) -> list[TensorForm]:
    return [
        TensorForm(
            tuple(
                _LENGTH if (number, dim) in places else size for dim, size in enumerate(form.shape)
            ),
            form.dtype,
        )
        for number, form in enumerate(forms)
    ]


def _is_taken(template: Template, call: Call, forms: _Forms) -> bool:
    """Whether a module takes tensors of these forms, as far as it asks for no values."""
    float_type = next((each.dtype for each in template.module.parameters()), torch.float32)
    try:
        with torch.no_grad(), torch.device("meta"):
            module = template.without_values()
            args, kwargs = call.filled(
                [
                    torch.empty(
                        each.shape, dtype=float_type if each.dtype.is_floating_point else each.dtype
                    )
                    for each in forms
                ]
            )
            module(*args, **kwargs)
    except Exception:  # any code may run here
        return False
    return True


def _with_examples(forms: _Forms, kept: frozenset[int], resize: Callable[[int], int]) -> _Forms:
    if not forms or not forms[0].shape:
        return list(forms)
    first = forms[0].shape
    if first[0] <= 1 or first[0] in kept or first[0] in first[1:]:
        return list(forms)
    sizes = {first[0]: resize(first[0])}
    return [
        TensorForm(tuple(sizes.get(size, size) for size in form.shape), form.dtype)
        for form in forms
    ]
