from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.microbatch import SplitRules, signature_of
from smdistributed.modelparallel.torch.stepping.misfits import misfits_named

BATCH = 4


def failing(argument: Any, fail: Callable[[], Any], count: int = 2, **rules: Any) -> Exception:
    """Returns what a step with an argument raises whose microbatches fail."""

    def step(x: Any, thing: Any) -> None: ...

    given = (torch.ones(BATCH, 3), argument), {}
    with (
        pytest.raises(Exception, match=r"\w") as caught,
        misfits_named(SplitRules(signature_of(step), **rules), count, lambda: given),
    ):
        fail()
    return caught.value


def does_not_fit() -> None:
    torch.ones(2, 4) + torch.ones(4, 4)


def does_not_fit_in_python() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16).eval()
    layer(torch.ones(4, 1, 8), src_mask=torch.ones(2, 4))


def is_out_of_bounds() -> None:
    torch.ones(2)[torch.tensor([3])]


def raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


SQUARES: dict[str, Any] = {
    "mask": torch.ones(BATCH, BATCH),
    "flags": torch.ones(BATCH, BATCH, dtype=torch.bool),
    "of heads": torch.ones(BATCH, 2, BATCH),
    "nested": {"mask": [torch.ones(BATCH, BATCH)]},
}
ORDERS: dict[str, Any] = {
    "order": torch.tensor([3, 1, 2, 0]),
    "pairs": torch.tensor([[0, 3]] * BATCH),
    "without values": torch.empty(BATCH, dtype=torch.long, device="meta"),
}
OTHERS: dict[str, Any] = {
    "batch": torch.ones(BATCH, 3),
    "labels": torch.zeros(BATCH, dtype=torch.long),
    "flags": torch.ones(BATCH, dtype=torch.bool),
    "number": 3,
}
FAILING = [does_not_fit, does_not_fit_in_python]


@pytest.mark.parametrize("fail", FAILING)
@pytest.mark.parametrize("kind", SQUARES)
def test_what_may_be_no_batch_is_named(kind: str, fail: Callable[[], None]) -> None:
    found = failing(SQUARES[kind], fail)
    assert type(found) is RuntimeError
    (text,) = found.__notes__
    assert "name thing in non_split_inputs" in text
    assert "x of shape" not in text


@pytest.mark.parametrize("kind", ORDERS)
def test_what_may_index_the_batch_is_named(kind: str) -> None:
    (text,) = failing(ORDERS[kind], is_out_of_bounds).__notes__
    assert "thing of shape (4" in text
    assert "index before the step" in text
    assert "non_split_inputs" in text


MASK, ORDER = SQUARES["mask"], ORDERS["order"]


@pytest.mark.parametrize(
    ("argument", "fail", "count", "rules"),
    [
        *((each, fail, 2, {}) for each in OTHERS.values() for fail in FAILING),
        *((each, is_out_of_bounds, 2, {}) for each in (*OTHERS.values(), MASK)),
        (ORDER, does_not_fit, 2, {}),
        (MASK, does_not_fit, 1, {}),
        (MASK, does_not_fit, 2, {"non_split_inputs": ["thing"]}),
    ],
)
def test_other_errors_stay(argument: Any, fail: Any, count: int, rules: Any) -> None:
    assert not hasattr(failing(argument, fail, count, **rules), "__notes__")


@pytest.mark.parametrize(
    "error",
    [
        *(RuntimeError("of the script"), ValueError("of the script"), KeyError("of the script")),
        *(UnsupportedError("of the library"), torch.OutOfMemoryError("of the device")),
    ],
)
def test_what_a_script_raises_stays(error: Exception) -> None:
    assert failing(MASK, raising(error)) is error
    assert not hasattr(error, "__notes__")


def test_what_packages_raise_whose_names_begin_like_torch_stays() -> None:
    file = f"{Path(torch.__file__).parent}vision/ops.py"
    code = compile("raise RuntimeError('of another package')", file, "exec")
    assert not hasattr(failing(MASK, lambda: exec(code)), "__notes__")


def test_arguments_are_looked_at_where_something_fails_alone() -> None:
    def never() -> Any:
        raise AssertionError("looked at")

    call: Callable[[], Any] = never
    with misfits_named(SplitRules(signature_of(lambda x: None)), 2, call):
        pass
