"""Roads from a parameter to what reads or writes its numbers, past functions of torch, too.

Each takes a parameter. What reads returns a number, differentiable where torch has it so.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

Road = Callable[[Any], Any]


def script(of: Any) -> Any:
    """Returns what TorchScript, which torch warns of, makes of a function or a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(of)


def trace(function: Any, *args: Any) -> Any:
    """Returns what it makes of a function by running it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(function, args, check_trace=False)


@script
def scripted_gelu(bias: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(inputs + bias)


@script
def scripted_sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0].sin().sum() + tensors[1].mean()


@script
def scripted_write(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().mul_(0.5).sum()


class Scripted(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.cos().sum()


scripted_module = script(Scripted())
traced = trace(lambda tensor: tensor.sin().sum(), torch.ones(3))


@torch.library.custom_op("roads::cubes", mutates_args=())
def cubes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor**3


cubes.register_autograd(
    lambda ctx, gradient: gradient * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("roads::halve", mutates_args={"tensor"})
def halve(tensor: torch.Tensor) -> None:
    tensor.mul_(0.5)


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return scripted_gelu(tensor, tensor) * 0 + tensor.square()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (tensor,) = ctx.saved_tensors
        return gradient * scripted_gelu(tensor, tensor) * 0 + gradient * 2 * tensor


def forward_derivative(tensor: Any) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensor, torch.ones(tensor.shape))
        return forward_ad.unpack_dual(dual * dual).tangent.sum()


def pickled(tensor: Any) -> Any:
    return pickle.loads(pickle.dumps(tensor)).sum()


def saved(tensor: Any) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file).sum()


def at_address(tensor: Any) -> torch.Tensor:
    """Returns the numbers where a tensor says that they are, on the host or a GPU."""
    address, device, length = tensor.data_ptr(), tensor.device, tensor.nbytes
    found: Any = torch._C._construct_storage_from_data_pointer(address, device, length)
    return torch.empty(0, device=device).set_(found)


def by_pointer(tensor: Any) -> float:
    return float(at_address(tensor).sum()) / 10


def compiled(backend: str) -> Road:
    return lambda tensor: torch.compile(lambda each: each.sin().sum(), backend=backend)(tensor)


def without_functions(tensor: Any) -> Any:
    with torch._C.DisableTorchFunction():
        return tensor.sin().sum()


def counted(tensor: Any) -> Any:
    with FlopCounterMode(display=False):
        return scripted_gelu(tensor, tensor).sum()


def nested(layout: torch.layout) -> Road:
    def read(tensor: Any) -> Any:
        rows = tensor.flatten()
        together = torch.nested.as_nested_tensor([rows, rows[:2]], layout=layout)
        return torch.nested.to_padded_tensor(together * 2, 0.0).sum()

    return read


def as_nested(layout: torch.layout) -> Road:
    def read(tensor: Any) -> Any:
        together = torch.nested.as_nested_tensor([tensor, tensor], layout=layout)
        return sum(each.square().sum() for each in together.unbind())

    return read


func = torch.func
READS: dict[str, Road] = {
    "a function of torch": lambda p: p.sin().sum(),
    "clone": lambda p: p.clone().sum(),
    "detach": lambda p: p.detach().sum(),
    "view": lambda p: p.view(-1)[1:].sum(),
    "data": lambda p: p.data.sum(),
    "script": lambda p: scripted_gelu(p, p).sum(),
    "script, by name": lambda p: scripted_gelu(inputs=p, bias=p).sum(),
    "script of lists": lambda p: scripted_sum([p, p * 2]),
    "script in a script": lambda p: script(scripted_gelu)(p, p).mean(),
    "scripted module": lambda p: scripted_module(p),
    "trace": lambda p: traced(p),
    "tracing": lambda p: trace(torch.sin, p)(p).sum(),
    "functional_call": lambda p: func.functional_call(
        nn.Linear(1, 1, bias=False), {"weight": p.view(-1, 1)}, torch.ones(2, 1)
    ).sum(),
    "functional_call of scripts": lambda p: func.functional_call(
        scripted_module_of_parameter(), {"own": p}, ()
    ),
    "vmap": lambda p: func.vmap(lambda row: row.sin().sum())(p).sum(),
    "vmap, around": lambda p: func.vmap(lambda x: (x * p).sum())(torch.ones(3)).sum(),
    "vmap, of a script": lambda p: func.vmap(lambda row: scripted_gelu(row, row))(p).sum(),
    "grad": lambda p: func.grad(lambda each: (each**3).sum())(p).sum(),
    "vmap of grad": lambda p: func.vmap(func.grad(lambda row: (row**3).sum()))(p).sum(),
    "vjp": lambda p: func.vjp(torch.sin, p)[1](torch.ones(p.shape))[0].sum(),
    "jvp": lambda p: func.jvp(torch.sin, (p,), (torch.ones(p.shape),))[1].sum(),
    "jacrev": lambda p: func.jacrev(torch.sin)(p).sum(),
    "jacfwd": lambda p: func.jacfwd(torch.sin)(p).sum(),
    "hessian": lambda p: func.hessian(lambda each: (each**3).sum())(p).sum(),
    "linearize": lambda p: func.linearize(torch.sin, p)[1](torch.ones(p.shape)).sum(),
    "functionalize": lambda p: func.functionalize(torch.sin)(p).sum(),
    "jacobian": lambda p: torch.autograd.functional.jacobian(torch.sin, p).sum(),
    "make_dual": forward_derivative,
    "strided nested": nested(torch.strided),
    "jagged nested": nested(torch.jagged),
    "strided nested, as it is": as_nested(torch.strided),
    "jagged nested, as it is": as_nested(torch.jagged),
    "nested copy": lambda p: torch.nested.nested_tensor([p], layout=torch.jagged).values().sum(),
    "operation": lambda p: torch.ops.aten.sin(p).sum(),
    "overload": lambda p: torch.ops.aten.sin.default(p).sum(),
    "custom operation": lambda p: cubes(p).sum(),
    "custom operation, by name": lambda p: torch.ops.roads.cubes(p).sum(),
    "foreach": lambda p: torch._foreach_mul([p, p], 2.0)[0].sum(),
    "autograd function": lambda p: Squares.apply(p).sum(),
    "checkpoint": lambda p: checkpoint(lambda q: cubes(q).sum(), p, use_reentrant=False),
    "reentrant checkpoint": lambda p: checkpoint(
        lambda q: scripted_gelu(q, q).sum(), p, use_reentrant=True
    ),
    "compile, eager": compiled("eager"),
    "compile, aot": compiled("aot_eager"),
    "without functions": without_functions,
    "counted": counted,
    "numpy": lambda p: float(p.detach().numpy().sum()),
    "numpy, forced": lambda p: float(p.numpy(force=True).sum()),
    "asarray": lambda p: float(numpy.asarray(p.detach()).sum()),
    "array": lambda p: float(numpy.sin(p.detach()).sum()),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).sum(),
    "dlpack to numpy": lambda p: float(numpy.from_dlpack(p.detach()).sum()),
    "pointer": by_pointer,
    "storage": lambda p: sum(p.untyped_storage()) / 1000,
    "typed storage": lambda p: float(p.storage()[1]),
    "item": lambda p: p.flatten()[1].item(),
    "tolist": lambda p: sum(p.flatten().tolist()),
    "iteration": lambda p: sum(each.sum() for each in p),
    "bool": lambda p: 1.0 if (p > 0).any() else 2.0,
    "contains": lambda p: float(0.0 in p),
    "equal": lambda p: float(torch.equal(p, p.detach().clone())),
    "text": lambda p: len(f"{p.detach()}") / 100,
    "copy": lambda p: copy.copy(p).sum(),
    "deepcopy": lambda p: copy.deepcopy(p).sum(),
    "pickle": pickled,
    "save": saved,
    "copy_": lambda p: torch.zeros(p.shape).copy_(p).sum(),
    "out": lambda p: torch.sin(p.detach(), out=torch.zeros(p.shape)).sum(),
    "new parameter": lambda p: nn.Parameter(p).sum(),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor).sin().sum(),
    "make_subclass": lambda p: torch.Tensor._make_subclass(torch.Tensor, p).sum(),
    "as_tensor": lambda p: torch.as_tensor(p).sum(),
    "stack": lambda p: torch.stack([p, p]).sin().sum(),
    "vector": lambda p: nn.utils.parameters_to_vector([p, p]).sin().sum(),
    "share_memory_": lambda p: p.share_memory_().sum(),
    "to sparse": lambda p: p.to_sparse().to_dense().sin().sum(),
}


class OfParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(1))

    def forward(self) -> torch.Tensor:
        return scripted_gelu(self.own, self.own).sum()


@functools.cache
def scripted_module_of_parameter() -> nn.Module:
    return OfParameter()


def by_numpy(tensor: Any) -> None:
    tensor.detach().numpy()[...] *= 0.5


def by_function(function: Callable[[Any], Any]) -> Road:
    def write(tensor: Any) -> None:
        with torch.no_grad():
            function(tensor)

    return write


def by_forward_of_function(tensor: Any) -> None:
    class Halve(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            tensor.mul_(0.5)
            ctx.mark_dirty(tensor)
            return tensor

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    with torch.no_grad():
        Halve.apply(tensor)


def assign(tensor: Any) -> None:
    tensor.data = torch.full(tensor.shape, 0.25)


WRITES: dict[str, Road] = {
    "in place": by_function(lambda p: p.mul_(0.5)),
    "by a view": by_function(lambda p: p.view(-1)[1:].mul_(0.5)),
    "by a row": by_function(lambda p: p[0].zero_()),
    "by an index": by_function(lambda p: p.__setitem__(0, 0.5)),
    "detached": by_function(lambda p: p.detach().mul_(0.5)),
    "data": by_function(lambda p: p.data.mul_(0.5)),
    "assigned data": assign,
    "set_": by_function(lambda p: p.set_(torch.full(p.shape, 0.25))),
    "copied to": by_function(lambda p: p.copy_(torch.full(p.shape, 0.25))),
    "init": by_function(lambda p: nn.init.constant_(p, 0.25)),
    "script": by_function(scripted_write),
    "operation": by_function(lambda p: torch.ops.aten.mul_(p, 0.5)),
    "custom operation": by_function(lambda p: halve(p)),
    "custom operation, detached": by_function(lambda p: halve(p.detach())),
    "foreach": by_function(lambda p: torch._foreach_mul_([p], 0.5)),
    "out": by_function(lambda p: torch.mul(p.detach(), 0.5, out=p.detach())),
    "vmap": by_function(lambda p: func.vmap(lambda row: row.mul_(0.5))(p)),
    "function": by_forward_of_function,
    "vector": lambda p: nn.utils.vector_to_parameters(torch.full((p.numel(),), 0.25), [p]),
    "clip": by_function(lambda p: p.clamp_(-0.1, 0.1)),
    "renorm": by_function(lambda p: torch.renorm(p.view(-1, 1), 2, 0, 0.1, out=p.view(-1, 1))),
    "numpy": by_numpy,
}
#: Those that no count of torch's shows in what is gathered; between steps they are refused.
UNSEEN_WHILE_GATHERED = ("numpy",)

_SOURCE = """
#include <torch/extension.h>
torch::Tensor by_operations(torch::Tensor tensor) { return tensor.sin().sum(); }
double by_accessor(torch::Tensor tensor) {
  auto flat = tensor.view({-1});
  auto numbers = flat.accessor<float, 1>();
  double sum = 0;
  for (int64_t i = 0; i < numbers.size(0); ++i) sum += numbers[i];
  return sum;
}
double by_pointer(torch::Tensor tensor) {
  const float* numbers = tensor.data_ptr<float>();
  return numbers[0] + numbers[1];
}
double by_constant_pointer(torch::Tensor tensor) {
  const float* numbers = tensor.const_data_ptr<float>();
  return numbers[0] + numbers[1];
}
torch::Tensor by_data(torch::Tensor tensor) { return tensor.data().sin().sum(); }
"""


def compiled_roads() -> dict[str, Road]:
    """Returns roads of C++, which the compiler of this machine makes; none without one."""
    if shutil.which("ninja") is None or shutil.which("c++") is None:
        return {}
    from torch.utils import cpp_extension  # a quarter of a second, for setuptools

    names = re.findall(r"(by_\w+)\(", _SOURCE)
    made = cpp_extension.load_inline("roads_of_tests", _SOURCE, functions=names)
    return {f"C++ {name}": getattr(made, name) for name in names}
