"""Optimizers whose update of one parameter looks at the gradients of others are found."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.optimizer.tensor_by_tensor import check_tensor_by_tensor
from smdistributed.modelparallel.torch.optimizers.fused_lamb import FusedLamb


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    mean = self.state[each].setdefault("mean", torch.zeros_like(each))
                    each.add_((0.9 * mean + 0.1 * each.grad).sign(), alpha=-group["lr"])
                    mean.lerp_(each.grad, 0.01)


class Noisy(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(each.grad + torch.randn_like(each), alpha=-group["lr"])


class Centred(torch.optim.AdamW):
    """Changes each gradient by itself."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None and each.dim() > 1:
                    each.grad -= each.grad.mean()
        return super().step(closure)


class Factored(Lion):
    """Needs at least two dims somewhere, and the names of its groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["name"] in ("one", "two")
            for each in group["params"]:
                if each.grad is None:
                    continue
                scale = each.grad.square().mean(-1, keepdim=True) if each.dim() > 1 else 1.0
                each.sub_(group["lr"] * each.grad * scale)


class Clipping(torch.optim.SGD):
    """Clips by torch's function."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_(
            [each for group in self.param_groups for each in group["params"]], 0.5
        )
        return super().step(closure)


class Sam(torch.optim.Optimizer):
    """Climbs along the gradient of all parameters, and goes down by another optimizer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "needs a closure"
        every = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in every]).norm()
        with torch.no_grad():
            climbed = [0.05 * each.grad / norm for each in every]
            torch._foreach_add_(every, climbed)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_sub_(every, climbed)
        self.base.step()


class Sizes(Lion):
    """A size of step that follows from all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [each for group in self.param_groups for each in group["params"]]
        most = max(each.grad.abs().max() for each in every)
        for each in every:
            each.sub_(each.grad / most, alpha=0.1)


class OnGpus(Lion):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("expected a tensor of a GPU")


class Standardized(Lion):
    """Has no number for a parameter of one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    mean = each.grad.mean()
                    deviation = (each.grad - mean).square().mean().sqrt()
                    each.sub_((each.grad - mean) / deviation, alpha=0.1)


class Around(Lion):
    """Has another optimizer do the work."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.inner = Lion(self.param_groups)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape)) for shape in ((40, 30), (40,), (), (5, 4, 3))]


def names(given: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": given[:2], "name": "one"}, {"params": given[2:], "name": "two"}]


def check(optimizer: Any, has_whole_norms: bool = False) -> None:
    check_tensor_by_tensor(optimizer, "why", has_whole_norms=has_whole_norms)


GOOD: dict[str, Any] = {
    "torch": torch.optim.Adafactor,
    "lamb": FusedLamb,
    "lion": Lion,
    "noisy": Noisy,
    "centred": Centred,
    "groups": lambda given: Factored(names(given)),
    "around": Around,
    "standardized": Standardized,
}
BAD: dict[str, Any] = {
    "clipping": lambda given: Clipping(given, lr=0.1),
    "sam": Sam,
    "sizes": Sizes,
}
REFUSED = r"^why, and \w+ updates a parameter by the gradients of others"


@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_what_depends_on_other_gradients_is_refused(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = parameters()
    given[0].grad = torch.ones(40, 30)
    optimizer = {**GOOD, **BAD}[name](given)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if isinstance(optimizer, Sam):
        torch.optim.lr_scheduler.StepLR(optimizer.base, 2)  # which wraps its step
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook"))
    before = [each.detach().clone() for each in given]
    attributes = {key: copy.copy(value) for key, value in vars(optimizer).items()}
    numbers = torch.get_rng_state()
    for has_whole_norms in (False, True):
        if name in GOOD or (name == "clipping" and has_whole_norms):
            check(optimizer, has_whole_norms)
        else:
            with pytest.raises(UnsupportedError, match=REFUSED):
                check(optimizer, has_whole_norms)
    assert all(torch.equal(one, other) for one, other in zip(given, before, strict=True))
    assert torch.equal(torch.get_rng_state(), numbers)
    assert given[0].grad is not None
    assert all(each.grad is None for each in given[1:])
    assert not optimizer.state
    assert vars(optimizer).keys() == attributes.keys()
    assert getattr(optimizer, "calls", 0) == 0
    assert schedule.last_epoch == 0
    assert not caplog.text


def test_one_in_use_is_tried_without_its_state(caplog: pytest.LogCaptureFixture) -> None:
    for kind in (Lion, Around):
        given = parameters()
        optimizer = kind(given)
        for each in given:
            each.grad = torch.ones_like(each)
        optimizer.step()
        state = {key: dict(value) for key, value in optimizer.state.items()}
        check(optimizer)
        assert state.keys() == optimizer.state.keys()
    assert not caplog.text


def test_one_that_says_so_is_not_tried() -> None:
    class Known(Sizes):
        updates_tensor_by_tensor = True

    check(Known(parameters()))


def test_one_that_cannot_be_tried_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check(OnGpus(parameters()))
    assert "OnGpus could not be tried on small tensors (RuntimeError: expected " in caplog.text
    assert "it is wrong here: why." in caplog.text


def test_one_that_makes_no_numbers_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check(Standardized([nn.Parameter(torch.ones(())) for _ in range(3)]))
    assert "it makes no finite numbers of them" in caplog.text


def test_frozen_parameters_have_no_gradient() -> None:
    given = parameters()
    given[-1].requires_grad_(False)
    with pytest.raises(UnsupportedError):
        check(Clipping(given, lr=0.1))
    check(Lion(given))
    check(Lion([nn.Parameter(torch.ones(2), requires_grad=False)]))
