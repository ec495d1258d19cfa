"""Roads by which code comes to the numbers of a parameter past the functions of torch.

Each takes a weight, of a square map, and gives a number or a scalar. A slice would answer all of
them otherwise than the whole does.
"""

from __future__ import annotations

import io
import pickle
import threading
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from roads import at_address
from torch import nn
from torch.nn import functional as F

Road = Callable[[torch.Tensor], Any]


def script(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


def squares(weight: torch.Tensor) -> torch.Tensor:
    return weight.pow(2).sum()


@script
def scripted(weight: torch.Tensor) -> torch.Tensor:
    return weight.pow(2).sum()


@script
def scripted_in_place(weight: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(1)
    made += weight.abs().max()
    return made.sum()


@script
def scripted_shape(weight: torch.Tensor) -> float:
    return weight.shape[0] * 0.01 + weight.shape[1] * 0.001


@script
def scripted_size(weight: torch.Tensor) -> float:
    return (weight.size(0) * 10 + weight.size(1)) * 0.001


@script
def scripted_numel(weight: torch.Tensor) -> float:
    return weight.numel() * 0.0001 + len(weight) * 0.01


@script
def scripted_stride(weight: torch.Tensor) -> float:
    return weight.stride(0) * 0.01


@script
def scripted_branch(weight: torch.Tensor) -> float:
    return 0.5 if bool(weight.sum() > 0) else float(weight.mean())


@script
def scripted_fork(weight: torch.Tensor) -> torch.Tensor:
    return torch.jit.wait(torch.jit.fork(scripted, weight))


class Penalty(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.abs().mean()


class Applied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))

    def forward(self) -> torch.Tensor:
        return self.weight.square().mean()


def traced(weight: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(squares, weight)


TRACED = traced(torch.ones(2, 2))
SCRIPTED_MODULE = script(Penalty())


@torch.library.custom_op("roads::squares", mutates_args=())
def custom_squares(weight: torch.Tensor) -> torch.Tensor:
    return (weight**2).sum()


@custom_squares.register_fake
def _(weight: torch.Tensor) -> torch.Tensor:
    return weight.new_empty(())


custom_squares.register_autograd(
    lambda ctx, gradient: 2 * gradient * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def of_bytes(raw: bytes) -> float:
    return float(np.abs(np.frombuffer(raw, np.float32)).sum())


def pickled(weight: torch.Tensor) -> Any:
    return pickle.loads(pickle.dumps(weight)).square().sum()


def saved(weight: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return torch.load(file).square().sum()


def forked(weight: torch.Tensor) -> Any:
    return len(ForkingPickler.dumps(weight.detach())) * 0.0 + weight.detach().numpy().sum()


def by_pointer(weight: torch.Tensor) -> Any:
    return at_address(weight).abs().sum()


def in_storage(weight: torch.Tensor) -> Any:
    return of_bytes(bytes(weight.untyped_storage()))


def copied(weight: torch.Tensor) -> Any:
    with torch.no_grad():
        return torch.empty(weight.shape).copy_(weight).sum()


def copied_unseen(weight: torch.Tensor) -> Any:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return torch.zeros(weight.dim() + 1).copy_(weight.max().expand(3)).sum()


def unseen(road: Road) -> Road:
    """Returns a road that no subclass sees."""

    def call(weight: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return road(weight)

    return call


def out_of(weight: torch.Tensor) -> Any:
    with torch.no_grad():
        return torch.sum(weight, 0, out=torch.empty(0)).abs().sum()


def in_a_capsule(weight: torch.Tensor) -> Any:
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach())).sum()


def in_a_thread(weight: torch.Tensor) -> Any:
    found: list[Any] = []

    def look() -> None:
        try:
            found.append(float(weight.detach().norm()))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def compiled(weight: torch.Tensor) -> Any:
    torch.compiler.reset()
    return torch.compile(squares, backend="eager")(weight)


def vector_of(weight: torch.Tensor) -> Any:
    return torch.nn.utils.parameters_to_vector([weight]).square().sum()


def of_jvp(weight: torch.Tensor) -> Any:
    return torch.func.jvp(squares, (weight,), (weight,))[1]


def of_vjp(weight: torch.Tensor) -> Any:
    _, back = torch.func.vjp(squares, weight)
    return back(torch.ones(()))[0].sum()


def of_forward_ad(weight: torch.Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(weight.detach(), torch.ones(weight.shape))
        return torch.autograd.forward_ad.unpack_dual(squares(dual)).tangent


ROADS: dict[str, Road] = {
    "script": scripted,
    "script in place": scripted_in_place,
    "script shape": scripted_shape,
    "script size": scripted_size,
    "script numel": scripted_numel,
    "script stride": scripted_stride,
    "script branch": scripted_branch,
    "script fork": scripted_fork,
    "script module": SCRIPTED_MODULE,
    "trace": TRACED,
    "traced now": lambda weight: traced(weight)(weight),
    "vmap": lambda weight: torch.func.vmap(torch.sum)(weight).square().sum(),
    "vmap of rows": lambda weight: torch.vmap(squares, in_dims=1)(weight).mean(),
    "grad": lambda weight: torch.func.grad(squares)(weight).abs().sum(),
    "jvp": of_jvp,
    "vjp": of_vjp,
    "jacrev": lambda weight: torch.func.jacrev(squares)(weight).sum(),
    "hessian": lambda weight: torch.func.jacfwd(squares)(weight).sum(),
    "functionalize": lambda weight: torch.func.functionalize(squares)(weight),
    "forward AD": of_forward_ad,
    "functional_call": lambda weight: torch.func.functional_call(Applied(), {"weight": weight}, ()),
    "nested": lambda weight: torch.nested.nested_tensor([weight]).to_padded_tensor(0.0).sum(),
    "as nested": lambda weight: torch.nested.as_nested_tensor([weight]).to_padded_tensor(0.0).sum(),
    "custom op": custom_squares,
    "op": lambda weight: torch.ops.roads.squares(weight),
    "overload": lambda weight: torch.ops.aten.sum.default(weight),
    "packet": lambda weight: torch.ops.aten.linalg_vector_norm(weight),
    "VF": lambda weight: torch._VF.norm(weight),
    "foreach": lambda weight: torch._foreach_norm([weight])[0],
    "einsum": lambda weight: torch.einsum("ij,ij->", weight, weight),
    "embedding": lambda weight: F.embedding(torch.tensor([1]), weight).sum(),
    "numpy": lambda weight: np.abs(weight.detach().numpy()).sum(),
    "asarray": lambda weight: np.asarray(weight.detach()).sum(),
    "numpy function": lambda weight: np.linalg.norm(weight.detach()),
    "to dlpack": lambda weight: np.from_dlpack(weight.detach()).sum(),
    "from dlpack": lambda weight: torch.from_dlpack(weight.detach()).sum(),
    "capsule": in_a_capsule,
    "address": by_pointer,
    "storage": in_storage,
    "pickle": pickled,
    "save": saved,
    "to a process": forked,
    "copy_": copied,
    "copy_ unseen": copied_unseen,
    "out": out_of,
    "thread": in_a_thread,
    "compile": compiled,
    "vector": vector_of,
    "unseen norm": unseen(lambda weight: weight.norm()),
    "unseen view": unseen(lambda weight: weight.view(-1)[:3].sum()),
    "unseen data": unseen(lambda weight: weight.data.sum()),
    "unseen numpy": unseen(lambda weight: weight.detach().numpy().sum()),
    "unseen address": unseen(by_pointer),
    "unseen storage": unseen(in_storage),
    "unseen pickle": unseen(pickled),
    "unseen like": unseen(lambda weight: torch.ones_like(weight).sum() / 2000),
    "unseen shape": unseen(lambda weight: weight.shape[0] * 0.01 + weight.shape[1] * 0.001),
    "unseen equal": unseen(lambda weight: float(torch.equal(weight, weight.clone()))),
    "plain": lambda weight: weight.as_subclass(torch.Tensor).norm(),
    "new parameter": lambda weight: nn.Parameter(weight).norm(),
}
