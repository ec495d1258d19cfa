"""Operations on tensors without memory come to their class, by whatever road."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.below import (
    is_of_unusable_tensor,
    operated_by,
    past_operations,
    scripted_functions_seen,
    without_memory,
)
from smdistributed.modelparallel.torch.compat.private.modes import (
    FakeTensorMode,
    TorchDispatchMode,
    past_subclass_functions,
    pytree,
)

VALUES = torch.arange(6.0).view(2, 3)


class Lent(torch.nn.Parameter):
    """Has memory while it is operated on."""

    seen: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with past_subclass_functions():
            return func(*args, **(kwargs or {}))

    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        own = next(each for each in pytree.tree_leaves(args) if isinstance(each, cls))
        own.seen.append(func.__name__)
        with past_subclass_functions():
            with past_operations():
                own.data = VALUES
            try:
                return func(*args, **kwargs)
            finally:
                with past_operations():
                    own.data = without_memory(own.shape, own.dtype, own.device)


def lent() -> Any:
    made: Any = torch.nn.Parameter(VALUES.clone())
    with past_operations():
        made.data = without_memory(made.shape, made.dtype, made.device)
    made.__class__ = Lent
    made.seen = []
    return made


def sine(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.sin()


def last_sine(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[-1].sin()


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted = torch.jit.script(sine)
    scripted_list = torch.jit.script(last_sine)


@pytest.mark.parametrize(
    "road",
    [
        torch.sin,
        scripted,
        torch.ops.aten.sin.default,
        torch.func.vmap(torch.sin),
        lambda tensor: torch.func.vjp(torch.cos, tensor)[1](-torch.ones(2, 3))[0],
        lambda tensor: torch._foreach_sin([tensor])[0],
        lambda tensor: torch.nested.as_nested_tensor([tensor], layout=torch.jagged).sin().values(),
    ],
)
def test_it_is_operated_on_by_its_class(road: Callable[[Any], torch.Tensor]) -> None:
    tensor = lent()
    torch.testing.assert_close(road(tensor), VALUES.sin())
    assert tensor.seen
    assert tensor.shape == (2, 3)
    assert tensor.stride() == (3, 1)


def test_beside_tensors_with_a_dispatch_of_their_own() -> None:
    rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    found = torch.nn.functional.linear(rows, lent())
    torch.testing.assert_close(found.values(), torch.ones(3, 3) @ VALUES.T)


def test_inside_modes() -> None:
    with FlopCounterMode(display=False) as counter:
        found = scripted(lent()) @ VALUES.T
    torch.testing.assert_close(found, VALUES.sin() @ VALUES.T)
    assert counter.get_total_flops() == 2 * 2 * 3 * 2


def test_gradients_arrive() -> None:
    tensor = lent()
    (scripted(tensor) * tensor).sum().backward()
    torch.testing.assert_close(tensor.grad, VALUES.cos() * VALUES + VALUES.sin())


@pytest.mark.parametrize("take", [torch.Tensor.data_ptr, torch.Tensor.tolist, torch.Tensor.numpy])
def test_it_has_no_memory_to_give(take: Callable[[Any], Any]) -> None:
    with past_operations(), pytest.raises(RuntimeError) as raised:
        take(lent().requires_grad_(False))
    assert is_of_unusable_tensor(raised.value)


class Refused(torch.Tensor):
    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        raise LookupError(func)


@pytest.mark.parametrize(
    ("operated", "error"), [({}, UnsupportedError), ({"operated": Refused}, LookupError)]
)
def test_what_shares_its_data_is_operated_on(operated: Any, error: Any) -> None:
    tensor = torch.nn.Parameter(VALUES.clone())
    tensor.data = without_memory((7, 2), tensor.dtype, tensor.device, **operated)
    for each in (tensor, tensor.data):
        assert each.shape == (7, 2)
        with pytest.raises(error):
            torch.nn.functional.linear(VALUES.T, each)
    assert operated_by(tensor) is operated.get("operated", operated_by(tensor))
    tensor.data = VALUES
    assert operated_by(tensor) is None
    assert tensor.sum() == VALUES.sum()


def test_functions_of_torchscript_are_functions_of_torch() -> None:
    called = []

    class Noting(Lent):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.append(func.__name__)
            return VALUES

    tensor = lent()
    tensor.__class__ = Noting
    with scripted_functions_seen():
        assert scripted(tensor) is VALUES
        assert scripted(tensor=tensor) is VALUES
        assert scripted_list([torch.zeros(1), tensor]) is VALUES
        assert scripted(torch.zeros(1)).item() == 0
    assert called == ["sine", "sine", "last_sine"]
    scripted(tensor)
    assert len(called) == 3


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0

    def forward(self, x: torch.Tensor, power: float = 2.0) -> torch.Tensor:
        return torch.nn.functional.gelu(x + x).pow(power) * self.factor


def scaled(x: torch.Tensor, power: float = 2.0) -> torch.Tensor:
    return torch.nn.functional.gelu(x + x).pow(power) * 2.0


@pytest.fixture
def fusing() -> Iterator[None]:
    """Has TorchScript fuse operations on the host, as it does on GPUs."""
    settings: Any = torch._C
    before = settings._jit_can_fuse_on_cpu()
    settings._jit_override_can_fuse_on_cpu(True)
    settings._jit_set_te_must_use_llvm_cpu(False)
    yield
    settings._jit_override_can_fuse_on_cpu(before)
    settings._jit_set_te_must_use_llvm_cpu(True)


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("of", [Scaled(), scaled], ids=["method", "function"])
def test_what_torchscript_has_fused_runs_on_fakes_by_operations(fusing: None, of: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made = torch.jit.script(of)
    for _ in range(4):
        made(torch.ones(3), 2.0)
    with _Seen() as seen:
        made(torch.ones(3), 2.0)
    assert "gelu" not in seen.names, "it is fused on tensors"
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(3))
    with scripted_functions_seen(), mode, _Seen() as seen:
        for found in (made(fake), made(fake, 2.0), made(fake, power=2.0)):
            assert found.shape == (3,)
    assert [name for name in seen.names if name != "device"] == ["add", "gelu", "pow", "mul"] * 3
    # Fused on tensors they may round otherwise.
    torch.testing.assert_close(made(torch.ones(3)), of(torch.ones(3)))
