"""The loss scale: what it is made of, and how it follows."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.precision.loss_scale import (
    DynamicLossScale,
    LossScale,
    options_of,
)


def scale(**options: Any) -> LossScale:
    runtime: Any = types.SimpleNamespace(device=torch.device("cpu"), process_groups={}, rank=0)
    return LossScale(runtime, DynamicLossScale(**{"init_scale": 64.0, **options}))


def followed(given: LossScale, finite: str) -> list[float]:
    """Returns the factor after each update; ``x`` is one whose gradients are not finite."""
    seen = []
    for each in finite:
        given.vote(torch.tensor(each != "x"))
        given.update()
        seen.append(given.scale.item())
    return seen


@pytest.mark.parametrize(
    ("options", "finite", "want"),
    [
        ({"scale_window": 2}, "..x...", [64, 128, 64, 64, 128, 128]),
        ({"scale_window": 100, "scale_factor": 4.0}, "xx.", [16, 4, 4]),
        ({"min_scale": 32.0}, "xxx", [32, 32, 32]),
        ({"delayed_shift": 3}, "xxx.x", [64, 64, 32, 32, 16]),
        ({"delayed_shift": 2, "consecutive_hysteresis": True}, "x.xx", [64, 64, 64, 32]),
        ({"delayed_shift": 2, "scale_window": 1}, "x.xx", [64, 128, 128, 64]),
    ],
)
def test_it_follows_what_is_seen(options: dict[str, Any], finite: str, want: list[float]) -> None:
    assert followed(scale(**options), finite) == want


def test_it_goes_on_where_it_was_saved() -> None:
    one, other = scale(scale_window=3, delayed_shift=2), scale(scale_window=3, delayed_shift=2)
    followed(one, "..x.")
    other.load_state_dict(one.state_dict())
    assert followed(one, "..xx.") == followed(other, "..xx.")


def test_at_its_least_it_gives_up() -> None:
    given = scale(min_scale=32.0)
    followed(given, "x")
    given.check()
    followed(given, "x")
    with pytest.raises(SMPError, match=r"min_scale \(32\)"):
        given.check()


def test_what_the_arguments_say() -> None:
    assert options_of(None, False, {}) == 1.0
    assert options_of(8, False, {}) == 8.0
    assert options_of(1.0, True, {}) == DynamicLossScale()
    assert DynamicLossScale().init_scale == 2**32
    given = {"init_scale": 4, "scale_window": 5}
    assert options_of(None, True, given) == DynamicLossScale(init_scale=4, scale_window=5)


@pytest.mark.parametrize(
    ("static", "dynamic", "given", "error", "said"),
    [
        (8.0, True, {}, ValueError, "static or dynamic: .* received 8.0"),
        (0.0, False, {}, ValueError, "above 0; received 0.0"),
        (None, True, {"window": 1}, TypeError, "consecutive_hysteresis; received window"),
        (None, True, {"init_scale": 0}, ValueError, "init_scale must be a number above 0"),
        (None, True, {"scale_factor": 1.0}, ValueError, "scale_factor must be a number above 1"),
        (None, True, {"delayed_shift": 0}, ValueError, "delayed_shift must be a number above 0"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    static: float | None, dynamic: bool, given: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        options_of(static, dynamic, given)
