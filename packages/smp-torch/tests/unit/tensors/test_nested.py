from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from smdistributed.modelparallel.torch.tensors import nested


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: Any
    name: str = "n"


class Bag(dict[str, Any]):
    pass


def examples() -> list[Any]:
    one, two = torch.ones(1), torch.zeros(2)
    return [
        one,
        [one, [two, 3]],
        (one, None, "x"),
        {"a": one, "b": {"c": two}},
        Pair(one, (two,)),
        Frozen(one),
        Bag(a=one, b=[two]),
        collections.OrderedDict(z=one, a=two),
        collections.defaultdict(list, k=one),
        slice(one, None, 2),
        torch.Size([1, 2]),
    ]


def same(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        return torch.equal(got, want)
    if type(got) is not type(want):
        return False
    if dataclasses.is_dataclass(want) and not isinstance(want, type):
        return all(
            same(getattr(got, f.name), getattr(want, f.name)) for f in dataclasses.fields(want)
        )
    if isinstance(want, dict):
        return list(got) == list(want) and all(same(got[key], want[key]) for key in want)
    if isinstance(want, list | tuple):
        return len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, slice):
        return same(got.start, want.start) and got.stop == want.stop and got.step == want.step
    return bool(got == want)


@pytest.mark.parametrize("index", range(len(examples())))
def test_a_template_is_filled_to_the_same_structure(index: int) -> None:
    obj = examples()[index]
    tensors: dict[complex, torch.Tensor] = {}

    def placeholder(tensor: torch.Tensor) -> complex:
        tensors[complex(len(tensors))] = tensor
        return complex(len(tensors) - 1)

    made = nested.template(obj, placeholder, "test")
    assert list(nested.placeholders(made, complex)) == list(tensors)
    assert same(nested.fill(made, complex, tensors.__getitem__), obj)
    assert [id(t) for t in nested.tensors_in(obj)] == [id(t) for t in tensors.values()]


@pytest.mark.parametrize("index", range(len(examples())))
def test_map_changes_a_copy(index: int) -> None:
    obj, untouched = examples()[index], examples()[index]
    mapped = nested.map_tensors(obj, lambda tensor: tensor + 1)
    assert same(obj, untouched)
    assert same(nested.map_tensors(mapped, lambda tensor: tensor - 1), obj)
    assert type(mapped) is type(obj)


def test_paths_lead_to_their_tensors() -> None:
    obj = {"a": [torch.ones(1), Frozen(torch.zeros(1))], "b": Pair(None, torch.ones(2))}
    paths = list(nested.tensor_paths(obj))
    assert [path for path, _ in paths] == [
        (("item", "a"), ("item", 0)),
        (("item", "a"), ("item", 1), ("attribute", "tensor")),
        (("item", "b"), ("item", 1)),
    ]
    assert all(nested.follow(obj, path) is tensor for path, tensor in paths)


class Cache:
    def __init__(self) -> None:
        self.keys = torch.ones(1)


def test_objects_with_state_are_left_to_the_caller() -> None:
    cache = Cache()
    assert nested.template([cache, 1], lambda tensor: 0, lambda obj: (obj,)) == [(cache,), 1]
    assert not list(nested.tensor_paths(cache))
