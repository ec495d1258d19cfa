"""Blocks of which slices compute something else at times, as a few small numbers do not show.

Each is called split and whole, on several inputs, before and after a script has changed it. It must
give the same numbers, be no group, or be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import auto_cases
import torch
from auto_cases import WIDTH
from torch import nn
from torch.nn import functional as F
from world import generator

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError


class Unit(torch.autograd.Function):
    """Passes gradients on with a norm of one in each row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return F.normalize(gradient, dim=-1)


def _unit_hook(module: nn.Module, given: Any, got: Any) -> Any:
    return tuple(F.normalize(each, dim=-1) for each in given)


def _unit_pre_hook(module: nn.Module, got: Any) -> Any:
    return tuple(F.normalize(each, dim=-1) for each in got)


class Block(nn.Module):
    """Two maps, and what is done between them and after them."""

    table = (0.0,)

    def __init__(self, inner: Callable[..., Any] | None, last: Callable[..., Any] | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.activation: nn.Module = nn.ReLU()
        self.dropout = nn.Dropout(0.0)
        self.inner, self.last = inner, last
        self.softness = 0.0
        self.settings = {"softness": [0.0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.activation(self.up(x)))
        softness = self.softness + self.settings["softness"][0] + self.table[0]
        if softness:
            hidden = hidden.softmax(-1) * softness
        if self.inner is not None:
            hidden = self.inner(x, hidden)
        hidden = self.down(hidden)
        return hidden if self.last is None else self.last(x, hidden)


def _hooked(x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    if hidden.requires_grad:
        hidden = hidden.clone()
        hidden.register_hook(lambda gradient: F.normalize(gradient, dim=-1))
    return hidden


#: What is done between the maps or after them: numbers that are large, batches, gradients.
LAST: dict[str, Callable[..., Any]] = {
    "clamp": lambda x, h: h.clamp(-20, 20),
    "hardtanh": lambda x, h: F.hardtanh(h, -30.0, 30.0),
    "nan to num": lambda x, h: torch.where(h.abs() > 50, torch.zeros_like(h), h),
    "large ones halved": lambda x, h: h / (1 + (h.abs() > 30)),
    "clamp of large inputs": lambda x, h: h * (2 if float(x.detach().abs().max()) > 30 else 1),
    "cap of a norm": lambda x, h: h * (100 / h.norm(dim=-1, keepdim=True)).clamp(max=1),
}
INNER: dict[str, Callable[..., Any]] = {
    "softmax of many examples": lambda x, h: h.softmax(-1) if len(x) > 8 else h,
    "softmax of an odd number": lambda x, h: h.softmax(-1) if len(x) % 2 else h,
    "softmax of large numbers": lambda x, h: torch.where(h.amax() > 30, h.softmax(-1), h),
    "function with a backward": lambda x, h: Unit.apply(h),
    "hook in a forward": _hooked,
}
HARMLESS: dict[str, Callable[..., Any]] = {
    "many examples doubled": lambda x, h: h * (2 if len(x) > 8 else 1),
    "clamp between the maps": lambda x, h: h.clamp(-20, 20),
    "gradients doubled": lambda x, h: h,
}


def _hook(module: Any) -> None:
    module.activation.register_full_backward_hook(_unit_hook)


def _pre_hook(module: Any) -> None:
    module.down.register_full_backward_pre_hook(_unit_pre_hook)


def _hook_of_parameter(module: Any) -> None:
    module.up.weight.register_hook(lambda gradient: F.normalize(gradient, dim=0))


def _double(module: Any) -> None:
    module.activation.register_full_backward_hook(lambda _, given, got: (given[0] * 2,))


def _nothing(module: Any) -> None:
    pass


def _attribute(module: Any) -> None:
    module.softness = 2.0


def _in_a_list(module: Any) -> None:
    module.settings["softness"][0] = 2.0


def _of_the_class(module: Any) -> None:
    type(module).table = (2.0,)


def _module(module: Any) -> None:
    module.activation = nn.Softmax(-1)


def _attribute_of_a_module(module: Any) -> None:
    module.activation.forward = lambda x: x.softmax(-1)


def _forward_hook(module: Any) -> None:
    module.activation.register_forward_hook(lambda _, given, result: result.softmax(-1))


def _function(module: Any) -> None:
    module.inner = lambda x, h: h.softmax(-1)


def _other_activation(module: Any) -> None:
    module.activation = nn.GELU()


def _map(module: Any) -> None:
    module.down = nn.Linear(40, WIDTH)


def _rate(module: Any) -> None:
    module.dropout.p = 0.5  # in evaluation


#: What a script does to a block after it was split.
LATER: dict[str, Callable[[Any], None]] = {
    "attribute": _attribute,
    "in a list": _in_a_list,
    "of the class": _of_the_class,
    "module": _module,
    "forward of a module": _attribute_of_a_module,
    "forward hook": _forward_hook,
    "function": _function,
    "backward hook": _hook,
    "backward pre-hook": _pre_hook,
    "gradients of hooks": _double,
    "another activation": _other_activation,
    "map": _map,
    "rate": _rate,
}


class Bare(Block):
    """Has no biases."""

    def __init__(self, last: Callable[..., Any]) -> None:
        super().__init__(None, last)
        self.up, self.down = (nn.Linear(*each, bias=False) for each in ((WIDTH, 40), (40, WIDTH)))


class Normed(Bare):
    """Makes its input large by itself."""

    def __init__(self, last: Callable[..., Any]) -> None:
        super().__init__(last)
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.constant_(self.norm.weight, 100.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


Case = tuple[Callable[[], nn.Module], Callable[[Any], None], Callable[[Any], None]]


def _cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name, last in LAST.items():
        found[f"last: {name}"] = (lambda last=last: Block(None, last), _nothing, _nothing)
    for kind in (Bare, Normed):
        found[f"last: clamp, {kind.__name__}"] = (
            lambda kind=kind: kind(LAST["clamp"]),
            *(_nothing, _nothing),
        )
    for name, inner in {**INNER, **HARMLESS}.items():
        found[f"inner: {name}"] = (lambda inner=inner: Block(inner, None), _nothing, _nothing)
    before = {"backward hook": _hook, "pre-hook": _pre_hook, "doubled": _double}
    for name, change in {**before, "hook of a parameter": _hook_of_parameter}.items():
        found[f"before: {name}"] = (lambda: Block(None, None), change, _nothing)
    for name, change in LATER.items():
        found[f"later: {name}"] = (lambda: Block(None, None), _nothing, change)
    return found


CASES = _cases()
#: Of each input, how many examples and how large.
INPUTS = [(4, 1.0), (4, 100.0), (3, 1.0), (12, 1.0)]


def outcome(name: str) -> str:
    """Returns what became of a block: "exact", "apart" (the same, but no group), or what else."""
    make, before, later = CASES[name]

    def made() -> nn.Module:
        module = make()
        before(module)
        return module

    torch.manual_seed(5)
    reference = made()
    module = auto_cases.split(made, 5)
    model = smp.DistributedModel(module)
    is_group = bool(auto_cases.groups_in(module))
    for each in (model, reference):
        each.eval()
    draws = generator(3 + smp.tp_rank())
    try:
        for change in (_nothing, later):
            change(reference)
            if change is not later or Block.table == (0.0,):
                change(module)
            for examples, size in INPUTS:
                given = torch.randn(examples, 5, WIDTH, generator=draws) * size
                weight = torch.randn(examples, 5, WIDTH, generator=draws)
                found = []
                for each in (model, reference):
                    x = given.clone().requires_grad_()
                    result = each(x)
                    (result * weight).sum().backward()
                    found += [result, x.grad]
                    each.zero_grad()
                for got, want in ((found[0], found[2]), (found[1], found[3])):
                    if not (got - want).norm() <= 1e-3 * want.norm():
                        return f"wrong: {examples} examples of size {size}"
    except SMPError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"
    finally:
        Block.table = (0.0,)
    return "exact" if is_group else "apart"
