"""Gradients that were put off are those of one backward pass, and user code sees no difference."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.execute.compiled_backward import WaitingCalls
from smdistributed.modelparallel.torch.execute.waiting_layers import putting_off, that_can_wait
from smdistributed.modelparallel.torch.execute.weight_gradients import WaitingGradients, put_off_in

IN, OUT = 6, 4


class Layer:
    """A layer with a weight and a bias, and what its uses have seen."""

    weight: Any
    bias: Any
    function: Callable[..., torch.Tensor]
    register_parameter: Callable[..., None]
    named_parameters: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    seen: list[torch.Tensor]

    def options(self) -> dict[str, Any]:
        return {}

    def compute(self, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return self.function(x, weight, bias, **self.options())


class Linear(Layer, nn.Linear):
    """The layer of that name."""

    function = staticmethod(functional.linear)

    def __init__(self, bias: bool) -> None:
        nn.Linear.__init__(self, IN, OUT, bias)
        self.seen = []


class _Convolution(Layer):
    stride: Any
    padding: Any
    dilation: Any
    groups: int

    def options(self) -> dict[str, Any]:
        names = ("stride", "padding", "dilation", "groups")
        return {name: getattr(self, name) for name in names}


class Convolution1d(_Convolution, nn.Conv1d):
    """The layer of that name."""

    function = staticmethod(functional.conv1d)

    def __init__(self, bias: bool) -> None:
        nn.Conv1d.__init__(self, IN, OUT, 3, padding=1, dilation=2, bias=bias)
        self.seen = []


class Convolution2d(_Convolution, nn.Conv2d):
    """The layer of that name."""

    function = staticmethod(functional.conv2d)

    def __init__(self, bias: bool) -> None:
        nn.Conv2d.__init__(
            self, IN, OUT, (3, 2), stride=(2, 1), padding=(1, 0), groups=2, bias=bias
        )
        self.seen = []


class Convolution3d(_Convolution, nn.Conv3d):
    """The layer of that name."""

    function = staticmethod(functional.conv3d)

    def __init__(self, bias: bool) -> None:
        nn.Conv3d.__init__(self, IN, OUT, 2, bias=bias)
        self.seen = []


FUNCTIONS = (functional.linear, functional.conv1d, functional.conv2d, functional.conv3d)


# How a layer gets from its input to its output


def by_layer(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer(x)  # type: ignore[no-any-return]


def as_the_program_does(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    function = that_can_wait(type(layer).function)
    return function(x, layer.weight, layer.bias, **layer.options())  # type: ignore[no-any-return]


def twice(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return by_layer(layer, x) + by_layer(layer, 2 * x).tanh()


def of_a_computed_weight(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.compute(x, layer.weight * 2, layer.bias)


def of_part_of_a_weight(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    parts = [layer.compute(x, part, None) for part in layer.weight.split(2)]
    return torch.cat(parts, -1)


def also_looked_up(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    rows = functional.embedding(torch.tensor([0, 2]), layer.weight.flatten(1))
    return by_layer(layer, x) + rows.sum()


def changed_in_place(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return by_layer(layer, x).mul_(3).relu_()


def checkpointed(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    out = checkpoint(lambda rows: by_layer(layer, rows).tanh(), x, use_reentrant=False)
    assert isinstance(out, torch.Tensor)
    return out


def checkpointed_by_a_backward_of_its_own(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    out = checkpoint(lambda rows: by_layer(layer, rows).tanh(), x, use_reentrant=True)
    assert isinstance(out, torch.Tensor)
    return out


def with_a_penalty_on_the_gradient(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    inner = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(by_layer(layer, inner).tanh().sum(), inner, create_graph=True)
    return by_layer(layer, x) + slope.square().sum()


def with_a_gradient_in_between(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(by_layer(layer, x.detach()).square().sum(), layer.weight)
    layer.seen.append(slope)
    return by_layer(layer, x) * slope.mean()


class Differentiating(torch.autograd.Function):
    """Its backward asks autograd for the gradient of a weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        with torch.no_grad():
            return by_layer(layer, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            out = by_layer(ctx.layer, inner)
        own, of_weight = torch.autograd.grad(out, (inner, ctx.layer.weight), gradients[0])
        ctx.layer.seen.append(of_weight)
        return own, None


def differentiated_in_backward(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return by_layer(layer, Differentiating.apply(x, layer).mean() * x)  # type: ignore[no-untyped-call]


def by_transform(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    def loss(row: torch.Tensor) -> torch.Tensor:
        return by_layer(layer, row).sum(-1)

    return by_layer(layer, x) + torch.func.vmap(loss)(x).sum()


def by_tangents(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    _, tangent = torch.func.jvp(lambda rows: by_layer(layer, rows).tanh(), (x,), (x,))
    assert isinstance(tangent, torch.Tensor)
    return tangent


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in FUNCTIONS else out


def in_a_mode(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with Doubling():
        return by_layer(layer, x)


def under_autocast(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (by_layer(layer, x) + by_layer(layer, x * 2)).float()


def penalised_under_autocast(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return with_a_penalty_on_the_gradient(layer, x).float()


def saved_elsewhere(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return by_layer(layer, x)


def saved_otherwise(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1.5, lambda t: t):
        return by_layer(layer, x)


def of_one_row(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return by_layer(layer, x[0])


def without_gradient(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        factor = by_layer(layer, x).mean()
    return by_layer(layer, x) * factor


def of_a_broadcast(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    out = by_layer(layer, x[:1].expand_as(x)).sum(-1, keepdim=True)
    return out.expand(*out.shape[:-1], 3)


def of_channels_last(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return by_layer(layer, x.transpose(1, -1).contiguous().transpose(1, -1))


USES: dict[str, Callable[[Layer, torch.Tensor], torch.Tensor]] = {
    use.__name__: use
    for use in (
        *(
            by_layer,
            as_the_program_does,
            twice,
            of_a_computed_weight,
            of_part_of_a_weight,
            also_looked_up,
        ),
        *(changed_in_place, checkpointed, checkpointed_by_a_backward_of_its_own),
        *(with_a_penalty_on_the_gradient, with_a_gradient_in_between, differentiated_in_backward),
        *(by_transform, by_tangents, in_a_mode, under_autocast, penalised_under_autocast),
        *(saved_elsewhere, saved_otherwise, of_one_row, without_gradient),
        *(of_a_broadcast, of_channels_last),
    )
}

#: What a compiler that differentiates does not take: gradients of gradients.
NOT_COMPILED = {
    *("with_a_penalty_on_the_gradient", "penalised_under_autocast", "differentiated_in_backward"),
}

# What else is known of the weight


def plain(layer: Layer) -> None:
    pass


def has_a_gradient(layer: Layer) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)


def has_a_gradient_of_its_own_layout(layer: Layer) -> None:
    layer.weight.grad = torch.ones_like(layer.weight.transpose(0, 1).contiguous()).transpose(0, 1)
    warnings.simplefilter("ignore")  # torch says once that this is slow


def is_frozen(layer: Layer) -> None:
    layer.weight.requires_grad_(False)


def bias_is_frozen(layer: Layer) -> None:
    if layer.bias is not None:
        layer.bias.requires_grad_(False)


def gradient_is_clipped(layer: Layer) -> None:
    layer.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))


def is_updated_at_once(layer: Layer) -> None:
    def update(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        layer.seen.append(weight.grad.clone())
        weight.grad = None

    layer.weight.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]


def bias_is_clipped(layer: Layer) -> None:
    if layer.bias is not None:
        layer.bias.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))


def lies_across(layer: Layer) -> None:
    layer.weight.data = layer.weight.data.transpose(0, 1).contiguous().transpose(0, 1)


def is_parametrized(layer: Layer) -> None:
    parametrizations.weight_norm(layer)


def is_a_tensor(layer: Layer) -> None:
    value = layer.weight.detach().requires_grad_()
    del layer.weight
    layer.weight = value  # type: ignore[assignment]


STATES: dict[str, Callable[[Layer], None]] = {
    state.__name__: state
    for state in (
        *(plain, has_a_gradient, has_a_gradient_of_its_own_layout, is_frozen, bias_is_frozen),
        *(gradient_is_clipped, is_updated_at_once, bias_is_clipped, lies_across),
        *(is_parametrized, is_a_tensor),
    )
}
#: Layers with the shapes of their inputs.
LAYERS: dict[str, tuple[Callable[[bool], Any], tuple[tuple[int, ...], ...]]] = {
    "linear": (Linear, ((3, IN), (2, 3, IN))),
    "conv1d": (Convolution1d, ((2, IN, 8),)),
    "conv2d": (Convolution2d, ((2, IN, 5, 4), (IN, 5, 4))),
    "conv3d": (Convolution3d, ((2, IN, 3, 3, 2),)),
}


def in_halves(out: list[torch.Tensor], starts: list[torch.Tensor]) -> None:
    waiting = WaitingGradients(out)
    with put_off_in(waiting):
        torch.autograd.backward(out, starts)
    waiting.compute()


def in_one(out: list[torch.Tensor], starts: list[torch.Tensor]) -> None:
    torch.autograd.backward(out, starts)


def leaves(layer: Layer) -> Iterator[tuple[str, torch.Tensor]]:
    yield from layer.named_parameters()
    for name in ("weight", "bias"):
        tensor = getattr(layer, name)
        if isinstance(tensor, torch.Tensor) and tensor.is_leaf:
            yield name, tensor


def outcome(
    use: Callable[[Layer, torch.Tensor], torch.Tensor],
    state: Callable[[Layer], None],
    kind: Callable[[bool], Any],
    shape: tuple[int, ...],
    bias: bool,
    halves: bool,
    compiled: bool = False,
) -> dict[str, torch.Tensor | str | None]:
    """Returns the result and all gradients of two backward passes; or what was raised."""
    torch.manual_seed(0)
    layer = kind(bias)
    found: dict[str, torch.Tensor | str | None] = {}
    context = putting_off() if halves else contextlib.nullcontext()
    try:
        with context, warnings.catch_warnings():
            state(layer)
            if compiled:
                use = compiled_use(use, layer, halves)
            for number in range(2):
                x = torch.randn(shape, requires_grad=True)
                out = use(layer, x)
                (in_halves if halves else in_one)([out], [torch.randn_like(out)])
                found |= {f"out {number}": out, f"x {number}": x.grad}
    except Exception as error:
        return {"error": type(error).__name__}
    found |= {name: leaf.grad for name, leaf in leaves(layer)}
    return found | {f"seen {place}": each for place, each in enumerate(layer.seen)}


class Used(nn.Module):
    """A module that uses a layer."""

    def __init__(self, use: Callable[[Layer, torch.Tensor], torch.Tensor], layer: Any) -> None:
        super().__init__()
        self.layer, self.use = layer, use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.layer, x)


def compiled_use(
    use: Callable[[Layer, torch.Tensor], torch.Tensor], layer: Layer, halves: bool
) -> Callable[[Layer, torch.Tensor], torch.Tensor]:
    """Returns a use that is compiled, as the program of a segment calls it."""
    torch.compiler.reset()
    module = Used(use, layer)
    module.compile(backend="aot_eager")
    calls = WaitingCalls([module])

    def run(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        with calls.in_place() if halves else contextlib.nullcontext():
            return module(x)  # type: ignore[no-any-return]

    return run


@pytest.mark.parametrize(
    "kind",
    # Convolutions differ in the number of their dimensions alone.
    [
        pytest.param(kind, marks=() if kind in ("linear", "conv2d") else pytest.mark.slow)
        for kind in LAYERS
    ],
)
@pytest.mark.parametrize("use", USES)
def test_halves_give_the_gradients_of_the_whole(use: str, kind: str) -> None:
    layer, shapes = LAYERS[kind]
    compare(use, layer, itertools.product(STATES, shapes, (True, False)))


@pytest.mark.slow
@pytest.mark.parametrize("use", [use for use in USES if use != "as_the_program_does"])
def test_compiled_halves_give_the_gradients_of_the_compiled_whole(use: str) -> None:
    layer, shapes = LAYERS["linear"]
    compare(use, layer, itertools.product(STATES, shapes, (True, False)), compiled=True)


def compare(use: str, layer: Callable[[bool], Any], cases: Any, *, compiled: bool = False) -> None:
    exact = 0
    refused = compiled and use in NOT_COMPILED
    for state, shape, bias in cases:
        given = USES[use], STATES[state], layer, shape, bias
        want, got = outcome(*given, False, compiled), outcome(*given, True, compiled)
        assert got.keys() == want.keys(), (state, shape, bias, want, got)
        for name, value in want.items():
            other = got[name]
            if isinstance(value, torch.Tensor):
                assert isinstance(other, torch.Tensor), (state, shape, bias, name)
                assert other.stride() == value.stride(), (state, shape, bias, name)
                # Uses of a weight are added up in half precision, or where they are kept.
                share = 3e-2 if "autocast" in use else 1e-5
                error = (other - value).norm() / value.norm().clamp(min=1e-3)
                assert error < share, (state, shape, bias, name)
            else:
                assert other == value, (state, shape, bias, name)
        exact += "error" not in want
    assert exact >= len(STATES) or refused


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_gradient_waits_for_the_second_half(kind: str, bias: bool) -> None:
    layer, (shape, *_) = LAYERS[kind][0](bias), LAYERS[kind][1]
    after = nn.PReLU()
    x = torch.randn(shape, requires_grad=True)
    with putting_off():
        out = after(layer(x))
        waiting = WaitingGradients([out])
        with put_off_in(waiting):
            torch.autograd.backward([out], [torch.ones_like(out)])
        assert x.grad is not None
        assert after.weight.grad is not None
        assert layer.weight.grad is None
        waiting.compute()
    assert all(parameter.grad is not None for parameter in layer.parameters())


class Shifted(nn.Conv2d):
    """Convolves in a way of its own."""

    def _conv_forward(self, input: Any, weight: Any, bias: Any) -> torch.Tensor:
        return super()._conv_forward(input, weight + 1, bias)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(IN, OUT, 3, padding="same"),
        nn.Conv2d(IN, OUT, 3, padding=1, padding_mode="circular"),
        nn.ConvTranspose2d(IN, OUT, 3),
        Shifted(IN, OUT, 3),
    ],
)
def test_other_convolutions_are_computed_at_once(layer: nn.Module) -> None:
    x = torch.randn(2, IN, 5, 5, requires_grad=True)
    leaves = [x, *layer.parameters()]
    whole = torch.autograd.grad(layer(x).tanh().sum(), leaves)
    with putting_off():
        out = layer(x).tanh().sum()
        waiting = WaitingGradients([out])
        with put_off_in(waiting):
            out.backward()
    torch.testing.assert_close([each.grad for each in leaves], list(whole))


@pytest.mark.parametrize("changed", ["input", "gradient"])
@pytest.mark.parametrize("use", [by_layer, under_autocast])
def test_what_is_changed_while_its_gradient_waits_is_an_error(
    use: Callable[[Layer, torch.Tensor], torch.Tensor], changed: str
) -> None:
    layer = Linear(bias=True)
    x = torch.randn(3, IN, requires_grad=True)
    with putting_off():
        out = use(layer, x)
        start = torch.ones_like(out)
        waiting = WaitingGradients([out])
        with put_off_in(waiting):
            torch.autograd.backward([out], [start])
    with torch.no_grad():
        (x if changed == "input" else start).mul_(2)
    if use is under_autocast:
        waiting.compute()  # both were cast: copies wait
    else:
        with pytest.raises(UnsupportedError, match=r"shape \(4, 6\).* changed in place"):
            waiting.compute()


def test_what_needs_no_gradient_may_be_changed_by_later_microbatches() -> None:
    layer, buffer = Linear(bias=True), torch.randn(3, IN)
    before = buffer.clone()
    with putting_off():
        out = by_layer(layer, buffer)
        waiting = WaitingGradients([out])
        with put_off_in(waiting):
            torch.autograd.backward([out], [torch.ones_like(out)])
    buffer.zero_()
    waiting.compute()
    torch.testing.assert_close(layer.weight.grad, before.sum(0).expand(OUT, IN))


@pytest.mark.parametrize("shape", LAYERS["linear"][1])
def test_conv1d_of_transformers_waits_too(shape: tuple[int, ...]) -> None:
    layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(OUT, IN)
    x = torch.randn(shape, requires_grad=True)
    whole = torch.autograd.grad(layer(x).tanh().sum(), (x, layer.weight, layer.bias))
    with putting_off():
        out = layer(x).tanh().sum()
        waiting = WaitingGradients([out])
        with put_off_in(waiting):
            out.backward()
        assert layer.weight.grad is None
        waiting.compute()
    torch.testing.assert_close((x.grad, layer.weight.grad, layer.bias.grad), whole)


@pytest.mark.parametrize("options", [{"beta": 2}, {"alpha": 0.5}])
def test_a_product_with_factors_does_not_wait(options: dict[str, float]) -> None:
    weight, bias = nn.Parameter(torch.randn(IN, OUT)), nn.Parameter(torch.randn(OUT))
    x = torch.randn(3, IN, requires_grad=True)
    whole = torch.autograd.grad(torch.addmm(bias, x, weight, **options).sum(), (weight, bias))
    with putting_off():
        out = that_can_wait(torch.addmm)(bias, x, weight, **options).sum()
        waiting = WaitingGradients([out])
        with put_off_in(waiting):
            out.backward()
    torch.testing.assert_close((weight.grad, bias.grad), whole)


def test_compiled_code_keeps_its_backward_pass() -> None:
    layer = nn.Linear(IN, OUT)
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(3, IN)
    with putting_off():
        out = compiled(x)
        waiting = WaitingGradients([out])
        with put_off_in(waiting):
            torch.autograd.backward([out], [torch.ones_like(out)])
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(OUT, IN))


def test_nothing_is_left_outside() -> None:
    before = nn.Linear.forward
    with putting_off():
        assert nn.Linear.forward is not before
    assert nn.Linear.forward is before
    layer = nn.Linear(IN, OUT)
    x = torch.ones(2, IN, requires_grad=True)
    out = that_can_wait(functional.linear)(x, layer.weight)
    assert type(out.grad_fn).__name__ != "_ProductBackward"


def test_a_layer_whose_forward_a_script_has_replaced_computes_that() -> None:
    x = torch.ones(2, 3)
    with mock.patch.object(nn.Linear, "forward", lambda layer, x: x * 2), putting_off():
        assert torch.equal(nn.Linear(3, 3)(x), x * 2)
