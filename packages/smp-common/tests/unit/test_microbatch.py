from __future__ import annotations

import argparse
import dataclasses
import types
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smdistributed.modelparallel.common.containers import Container, take_apart
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.common.microbatch import (
    Microbatches,
    SplitRules,
    argument_of,
    bind_arguments,
    signature_of,
    split_arguments,
    split_sizes,
    tensors_to_cut,
)


class _Arrays:
    knows_shapes = True

    def take_apart(self, value: object) -> Container | None:
        return None if isinstance(value, _Handle) else take_apart(value)

    def is_state(self, value: object) -> bool:
        return isinstance(value, _Model)

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, (np.ndarray, _Handle))

    def shape(self, value: Any) -> tuple[int, ...]:
        return (value.array if isinstance(value, _Handle) else value).shape

    def narrow(self, value: Any, axis: int, start: int, length: int) -> Any:
        assert axis >= 0
        part = slice(start, start + length)
        if isinstance(value, _Handle):
            return _Handle(value.array[part])
        return value[(slice(None),) * axis + (part,)]


class _Model:
    """What has tensors that are no examples."""

    def __init__(self, weight: np.ndarray) -> None:
        self.weight = weight


@dataclasses.dataclass(frozen=True, eq=False)
class _Handle:
    """A tensor that can be in a set."""

    array: np.ndarray


class _Words:
    """An object that cuts itself."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.axes: list[int] = []

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> list[str]:
        self.axes.append(axis)
        return self.words[mb::num_mb]


_Pair = namedtuple("_Pair", ["x", "y"])


def _split(
    function: Callable[..., Any],
    *args: Any,
    n: int = 2,
    whole: tuple[str, ...] = (),
    axes: dict[str, int] | None = None,
    **kwargs: Any,
) -> Microbatches:
    rules = SplitRules(signature_of(function), whole, axes or {})
    return split_arguments(_Arrays(), rules, n, args, kwargs)


def _only(value: Any, **options: Any) -> list[Any]:
    """The microbatches of a single argument."""
    return [args[0] for args, _ in _split(lambda x: None, value, **options).calls]


def _batch(size: int = 4, *, columns: int = 2) -> np.ndarray:
    return np.arange(size * columns).reshape(size, columns)


# ---------------------------------------------------------------- sizes and weights


@pytest.mark.parametrize(
    ("batch", "n", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (5, 3, [2, 2, 1]), (3, 3, [1, 1, 1]), (5, 1, [5])],
)
def test_sizes_and_weights(batch: int, n: int, sizes: list[int]) -> None:
    assert split_sizes(batch, n) == sizes
    result = _split(lambda x: None, _batch(batch), n=n)
    assert [len(args[0]) for args, _ in result.calls] == sizes
    assert result.weights == tuple(size / batch for size in sizes)


@given(batch=st.integers(1, 60), n=st.integers(1, 60))
def test_any_split_keeps_order_and_total(batch: int, n: int) -> None:
    if n > batch:
        return
    x = _batch(batch)
    result = _split(lambda x: None, x, n=n)
    parts = [args[0] for args, _ in result.calls]
    assert len(parts) == n
    np.testing.assert_array_equal(np.concatenate(parts), x)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert list(map(len, parts)) == sorted(map(len, parts), reverse=True)
    mean = sum(w * part.mean() for w, part in zip(result.weights, parts, strict=True))
    assert mean == pytest.approx(x.mean())


def test_no_tensor_gives_equal_weights() -> None:
    result = _split(lambda x: None, "text", n=4)
    assert result.weights == (0.25,) * 4
    assert [args for args, _ in result.calls] == [("text",)] * 4


# ---------------------------------------------------------------- arguments


def test_axes_and_whole_arguments() -> None:
    mask = _batch(3)
    time_major = np.arange(12).reshape(3, 4)
    result = _split(
        lambda x, t, mask: None,
        _batch(4),
        time_major,
        mask=mask,
        whole=("mask",),
        axes={"t": 1},
    )
    for index, (args, kwargs) in enumerate(result.calls):
        assert kwargs == {}
        np.testing.assert_array_equal(args[0], _batch(4)[2 * index : 2 * index + 2])
        np.testing.assert_array_equal(args[1], time_major[:, 2 * index : 2 * index + 2])
        assert args[2] is mask


def test_negative_axis() -> None:
    parts = _only(np.arange(12).reshape(3, 4), axes={"x": -1})
    assert [part.shape for part in parts] == [(3, 2), (3, 2)]


def test_method_gets_its_object() -> None:
    class Trainer:
        def train_step(self, model: object, x: np.ndarray) -> None: ...

    trainer, model = Trainer(), object()
    for args, kwargs in _split(Trainer.train_step, trainer, model, x=_batch()).calls:
        assert args[0] is trainer
        assert args[1] is model
        assert args[2].shape == (2, 2)
        assert kwargs == {}


def test_variable_arguments() -> None:
    def step(first: Any, *rest: Any, scale: Any = 1, **named: Any) -> None: ...

    whole = _batch(3)
    calls = _split(
        step, 1, _batch(), "word", scale=2, y=_batch(), table=whole, whole=("table",)
    ).calls
    for args, kwargs in calls:
        assert args[0] == 1
        assert args[1].shape == (2, 2)
        assert args[2] == "word"
        assert kwargs["scale"] == 2
        assert kwargs["y"].shape == (2, 2)
        assert kwargs["table"] is whole


def test_rules_for_the_names_of_variable_arguments() -> None:
    def step(*rest: Any, **named: Any) -> None: ...

    x, y = _batch(2), _batch(6)
    calls = _split(step, x, y=y, whole=("rest",), axes={"named": 1}).calls
    assert [args[0] is x for args, _ in calls] == [True, True]
    assert [kwargs["y"].shape for _, kwargs in calls] == [(6, 1), (6, 1)]


def test_skipped_optional_argument_stays_skipped() -> None:
    calls = _split(lambda x, y=None, z=None: None, _batch(), z=_batch()).calls
    assert [(len(args), list(kwargs)) for args, kwargs in calls] == [(1, ["z"])] * 2


def test_unknown_signature_takes_anything() -> None:
    assert list(signature_of(min).parameters) == ["args", "kwargs"]


def test_binding_names_the_arguments() -> None:
    signature = signature_of(lambda model, x, *rest, flag=False: None)
    bound = bind_arguments(signature, (1, 2, 3), {"flag": True})
    assert bound.arguments == {"model": 1, "x": 2, "rest": (3,), "flag": True}
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        bind_arguments(signature, (1,), {})


# ---------------------------------------------------------------- containers


class _Output(OrderedDict[str, Any]):
    """A mapping whose items are attributes too, and whose constructor takes fields."""

    def __init__(self, loss: Any = None, logits: Any = None) -> None:
        super().__init__()
        for name, value in (("loss", loss), ("logits", logits)):
            if value is not None:
                self[name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return type(self), tuple(self.get(name) for name in ("loss", "logits"))


class _Frozen(Mapping[str, Any]):
    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class _List(list[Any]):
    tag = ""


def _tagged(items: list[Any]) -> _List:
    result = _List(items)
    result.tag = "kept"
    return result


def _default_dict(items: dict[str, Any]) -> defaultdict[str, list[Any]]:
    return defaultdict(list, items)


@pytest.mark.parametrize(
    "container",
    [
        {"a": _batch(), "b": 3},
        OrderedDict(b=_batch(), a=3),
        _default_dict({"a": _batch()}),
        UserDict({"a": _batch()}),
        types.MappingProxyType({"a": _batch()}),
        _Frozen({"a": _batch()}),
        _Output(loss=3, logits=_batch()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_mappings_keep_their_class(container: Mapping[str, Any]) -> None:
    before = dict(container)
    for index, part in enumerate(_only(container)):
        assert type(part) is type(container)
        assert list(part) == list(container)
        for key, value in before.items():
            expected = value[2 * index : 2 * index + 2] if isinstance(value, np.ndarray) else value
            np.testing.assert_array_equal(part[key], expected)
    assert all(container[key] is value for key, value in before.items())


def test_mappings_keep_what_their_class_holds_besides() -> None:
    assert _only(_default_dict({"a": _batch()}))[0].default_factory is list
    output = _only(_Output(loss=3, logits=_batch()))[1]
    np.testing.assert_array_equal(output.logits, _batch()[2:])
    assert output.loss == 3


def test_sequences_keep_their_class() -> None:
    for part in _only([_batch(), (_batch(), _Pair(_batch(), "y"), None), _tagged([_batch()])]):
        first, (second, pair, nothing), tagged = part
        assert first.shape == second.shape == pair.x.shape == tagged[0].shape == (2, 2)
        assert type(pair) is _Pair
        assert pair.y == "y"
        assert nothing is None
        assert type(tagged) is _List
        assert tagged.tag == "kept"


@pytest.mark.parametrize("kind", [set, frozenset])
def test_sets(kind: Any) -> None:
    for part in _only(kind([_Handle(_batch()), 7])):
        assert type(part) is kind
        assert [h.array.shape for h in part if isinstance(h, _Handle)] == [(2, 2)]
        assert 7 in part


@pytest.mark.parametrize(
    "value",
    [
        argparse.Namespace(rate=0.1, scale=np.ones(())),
        _Model(_batch()),
        {"rate": 0.1, "steps": [1, 2]},
        [1, 2, 3, 4],
        "four",
        None,
        range(4),
        lambda: None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_everything_else_is_passed_whole(value: object) -> None:
    assert all(part is value for part in _only(value))


@dataclasses.dataclass
class _Record:
    x: Any
    count: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class _Packed:
    x: Any


class _Attrs:
    """As attrs makes classes: with slots, and a list of its attributes."""

    __attrs_attrs__ = ()
    __slots__ = ("__dict__", "x")

    def __init__(self, x: Any) -> None:
        self.x = x


@pytest.mark.parametrize("kind", [_Record, _Packed, _Attrs])
def test_classes_that_hold_data_are_taken_apart(kind: Any) -> None:
    whole = kind(_batch())
    for index, part in enumerate(_only([whole])):
        assert type(part[0]) is kind
        np.testing.assert_array_equal(part[0].x, _batch()[2 * index : 2 * index + 2])
    assert whole.x.shape == (4, 2)


def test_what_is_no_field_is_cut_too() -> None:
    record = _Record(_batch())
    record.more = _batch()  # type: ignore[attr-defined]
    part = _only(record)[1]
    assert part.more.shape == (2, 2)
    assert part.count == 3


def test_deques_keep_their_length() -> None:
    part = _only(deque([_batch(), 1], maxlen=2))[0]
    assert type(part) is deque
    assert part.maxlen == 2
    assert part[0].shape == (2, 2)


def test_an_object_may_lead_to_itself() -> None:
    record = _Record(None)
    record.count = [record]  # type: ignore[assignment]
    assert _only(record) == [record, record]
    record.x = _batch()
    with pytest.raises(UnsupportedError, match=r"x leads to itself, at x.count\[0\], so that"):
        _only(record)


class _Shared(MutableMapping[str, Any]):
    """A mapping whose items no copy reaches."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._held = (items,)

    def __getitem__(self, key: str) -> Any:
        return self._held[0][key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._held[0][key] = value

    def __delitem__(self, key: str) -> None:
        del self._held[0][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held[0])

    def __len__(self) -> int:
        return len(self._held[0])


def test_a_copy_that_is_the_original_is_refused() -> None:
    batch = _batch()
    shared = _Shared({"x": batch})
    with pytest.raises(UnsupportedError, match="give _Shared a __copy__, or smp_slice"):
        _only(shared)
    assert shared["x"] is batch


class _Slotted:
    __slots__ = ("__x",)

    def __init__(self, x: Any) -> None:
        self.__x = x


@pytest.mark.parametrize(
    "value",
    [
        argparse.Namespace(x=_batch()),
        _Slotted({"x": [_batch()]}),
        {"x": _batch()}.values(),
        {"x": _batch()}.items(),
        [argparse.Namespace(x=_batch())],
    ],
    ids=["attributes", "slots", "values", "items", "in a list"],
)
def test_objects_that_hold_a_batch_unseen_are_refused(value: object) -> None:
    text = r"step argument x.* cannot take apart, and what it holds.*, of shape \(4, 2\).*smp_slice"
    with pytest.raises(ConfigError, match=text):
        _only(value)
    with pytest.raises(ConfigError, match="name y in non_split_inputs"):
        _split(lambda x, y: None, _batch(), value)
    assert _only(value, whole=("x",)) == [value, value]
    assert _only(value, n=1) == [value]
    other = _split(lambda x, y: None, _batch(6), value)
    assert all(args[1] is value for args, _ in other.calls), "not as long as the batch"


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_that_may_have_an_entry_an_example_is_refused(kind: Any) -> None:
    lists = kind({"boxes": _batch()} for _ in range(4))
    with pytest.raises(ConfigError, match="step argument x has 4 entries, as many as the batch"):
        _only(lists)
    with pytest.raises(ConfigError, match=r"input_split_axes=\{'x': 0\}"):
        _only({"inner": lists})
    assert _only(lists, axes={"x": 0})[0][3]["boxes"].shape == (2, 2)
    assert _only(lists, n=1)[0][3]["boxes"].shape == (4, 2)
    assert _only(kind([_batch()] * 4))[0][0].shape == (2, 2), "of tensors alone"
    assert _only(lists[:3])[0][0]["boxes"].shape == (2, 2), "of another length"


def test_the_hint_for_lists_of_examples() -> None:
    with pytest.raises(ConfigError, match="If y has one entry an example, give an object with"):
        _split(lambda x, y: None, _batch(), [{"boxes": _batch(n)} for n in (1, 2, 3, 4)])


def test_arguments_in_a_row_are_no_list() -> None:
    assert len(_split(lambda *x: None, {"a": _batch(2)}, {"a": _batch(2)}).calls) == 2


# ---------------------------------------------------------------- smp_slice


def test_objects_that_slice_themselves() -> None:
    words = _Words(["a", "b", "c", "d"])
    assert _only({"w": words}, axes={"x": 1}) == [{"w": ["a", "c"]}, {"w": ["b", "d"]}]
    assert words.axes == [1, 1]


def test_smp_slice_is_asked_before_containers_and_tensors() -> None:
    class Own(dict[str, Any]):
        def smp_slice(self, num_mb: int, mb: int, axis: int) -> str:
            return f"{mb} of {num_mb}"

    assert _only(Own(a=_batch(3))) == ["0 of 2", "1 of 2"]


def test_smp_slice_is_asked_of_the_class() -> None:
    class Forwarding:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    model = Forwarding()
    assert _only(model) == [model, model]
    assert _only(_Words) == [_Words, _Words]


def test_error_of_smp_slice_names_the_argument() -> None:
    class Broken:
        def smp_slice(self, num_mb: int, mb: int, axis: int) -> None:
            raise KeyError("gone")

    with pytest.raises(KeyError) as caught:
        _split(lambda data: None, [1, Broken()])
    assert caught.value.__notes__ == ["raised by smp_slice of step argument data[1]"]


# ---------------------------------------------------------------- errors of a call


@pytest.mark.parametrize("n", [1, 2])
def test_empty_batch(n: int) -> None:
    with pytest.raises(ConfigError, match="the batch is empty: x has 0 along axis 0"):
        _only(np.zeros((0, 3)), n=n)


@pytest.mark.parametrize(("batch", "sizes"), [(1, [1]), (3, [1, 1, 1]), (5, [2, 1, 1, 1])])
def test_fewer_microbatches_than_asked_for(batch: int, sizes: list[int]) -> None:
    words = _Words([*"abcd"])
    result = _split(lambda x, y: None, _batch(batch), words, n=4)
    assert [len(args[0]) for args, _ in result.calls] == sizes
    assert [args[1] for args, _ in result.calls] == [
        words.words[mb :: len(sizes)] for mb in range(len(sizes))
    ]
    assert result.weights == tuple(size / batch for size in sizes)


def test_a_single_example_is_not_cut() -> None:
    """So nothing has to be told from a batch: a list of one entry, an object with a tensor."""

    class Holder:
        def __init__(self) -> None:
            self.array = _batch(1)

    boxes, holder = [{"boxes": _batch(1)}], Holder()
    ((args, _),) = _split(lambda x, y, z: None, _batch(1), boxes, holder, n=4).calls
    assert args[1][0]["boxes"].tolist() == boxes[0]["boxes"].tolist()
    assert args[2] is holder


def test_tensors_to_cut() -> None:
    def step(x: Any, y: Any, mask: Any) -> None: ...

    rules = SplitRules(signature_of(step), ["mask"], {"y": -1})
    given = {"a": _batch(4), "b": 3}, [_batch(2, columns=4)], _batch(4)
    found = tensors_to_cut(_Arrays(), rules, given, {})
    assert {label: axis for label, (_, axis) in found.items()} == {"x['a']": 0, "y[0]": 1}
    assert [argument_of(label) for label in found] == ["x", "y"]


def test_tensors_without_elements_but_with_a_batch() -> None:
    assert [part.shape for part in _only(np.zeros((4, 0)))] == [(2, 0), (2, 0)]


def test_unequal_batches() -> None:
    with pytest.raises(ConfigError) as caught:
        _split(lambda x, y: None, {"a": _batch(4)}, np.zeros((2, 6)), axes={"y": 1})
    assert "x['a'] has 4 along axis 0, y has 6 along axis 1" in str(caught.value)
    assert "input_split_axes" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "axes", "text"),
    [
        (np.zeros(()), {}, r"step argument x of shape \(\) has no axis 0"),
        (_batch(), {"x": 2}, r"step argument x of shape \(4, 2\) has no axis 2"),
        (_batch(), {"x": -3}, r"step argument x of shape \(4, 2\) has no axis -3"),
    ],
)
def test_missing_axis(value: np.ndarray, axes: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        _only(value, axes=axes)


def test_nothing_is_cut_before_all_checks_pass() -> None:
    words = _Words(["a"])
    with pytest.raises(ConfigError):
        _split(lambda w, x: None, words, np.zeros(()))
    assert words.axes == []


# ---------------------------------------------------------------- errors of a decoration


@pytest.mark.parametrize(
    ("whole", "axes", "text"),
    [
        (["z"], {}, "non_split_inputs names 'z', .* use some of x, y"),
        ([], {"z": 1}, "input_split_axes names 'z', .* use some of x, y"),
        (["x"], {"x": 1}, "x is both in non_split_inputs and in input_split_axes"),
        ([], {"x": "1"}, r"input_split_axes\['x'\] must be an int, got '1'"),
        ([], {"x": True}, r"input_split_axes\['x'\] must be an int, got True"),
        ("x", {}, r"write \['x'\]"),
    ],
)
def test_wrong_rules(whole: Any, axes: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SplitRules(signature_of(lambda x, y: None), whole, axes)


def test_any_name_may_be_a_variable_keyword() -> None:
    rules = SplitRules(signature_of(lambda **kwargs: None), ["anything"], {"other": 1})
    assert rules.axis("anything") is None
    assert rules.axis("other") == 1
    assert rules.axis("third") == 0
