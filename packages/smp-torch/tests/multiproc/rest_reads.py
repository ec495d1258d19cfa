"""Between steps slices stand for whole tensors.

A population of accesses and tensors: each does the same to plain PyTorch. Accesses are those of
scripts, and all roads to what reads or writes numbers.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from roads import READS, WRITES, Road
from tensor_cases import WIDTH, alone, local_part, slice_itself
from torch import nn
from weight_reads import KINDS, like_map

import smdistributed.modelparallel.torch as smp

#: Of all gradients or weights, a number.
NUMBERS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "norm by hand": lambda each: torch.stack([one.norm() for one in each]).norm(),
    "squares": lambda each: sum((one**2).sum() for one in each),
    "foreach": lambda each: torch.stack(torch._foreach_norm(each)).norm(),
    "items": lambda each: sum(one.data.norm(2).item() ** 2 for one in each),
    "largest": lambda each: max(float(one.abs().max()) for one in each),
    "inf": lambda each: torch.stack(
        [torch.linalg.vector_norm(one, torch.inf) for one in each]
    ).max(),
    "vector": lambda each: torch.nn.utils.parameters_to_vector(each).norm(),
    "cat": lambda each: torch.cat([one.flatten() for one in each]).mean(),
    "finite": lambda each: all(bool(torch.isfinite(one).all()) for one in each),
    "rows": lambda each: sum(one.norm(dim=-1).max() for one in each),
    "view": lambda each: sum(one.view(-1)[0] for one in each),
    "dot": lambda each: sum(torch.dot(one.flatten(), one.flatten()) for one in each),
    "std": lambda each: sum(one.std() for one in each if one.numel() > 1),
    "histogram": lambda each: sum(torch.histc(one, 4, -1, 1)[0] for one in each),
    "quantile": lambda each: sum(one.flatten().quantile(0.3) for one in each),
    "equal": lambda each: float(torch.equal(each[0], each[0] + 0)) + each[0].shape[0],
    "numpy": lambda each: float(sum((one.detach().numpy() ** 2).sum() for one in each)),
    "list": lambda each: sum(one.detach().flatten().tolist()[0] for one in each),
    "total norm": lambda each: torch.nn.utils.get_total_norm(each),
    **{
        name: lambda each, read=read: sum(read(like_map(one)) for one in each if one.dim() == 2)
        for name, read in KINDS.items()
    },
}


def clipped(parameters: list[nn.Parameter]) -> None:
    norm = torch.stack([each.grad.norm() for each in parameters]).norm()
    for each in parameters:
        each.grad.mul_(min(1.0, 0.01 / float(norm)))


def clipped_by_rows(parameters: list[nn.Parameter]) -> None:
    for each in parameters:
        if each.dim() > 1:
            bound = each.detach().norm(dim=1, keepdim=True) * 0.01
            each.grad.mul_((bound / each.grad.norm(dim=1, keepdim=True)).clamp(max=1.0))


def centred(parameters: list[nn.Parameter]) -> None:
    for each in parameters:
        each.grad.sub_(each.grad.mean())


def first_row(parameters: list[nn.Parameter]) -> None:
    for each in parameters:
        each.data[0] = 0.0


def signed(parameters: list[nn.Parameter]) -> None:
    for each in parameters:
        each.data.sub_(each.grad.sign() * 0.01)


def decayed(parameters: list[nn.Parameter]) -> None:
    torch._foreach_mul_([each.data for each in parameters], 0.5)


def averaged(parameters: list[nn.Parameter]) -> None:
    kept = [each.detach().clone() for each in parameters]
    for each, other in zip(parameters, kept, strict=True):
        each.data.clamp_(-0.1, 0.1).lerp_(other, 0.3)


def masked(parameters: list[nn.Parameter]) -> None:
    for each in parameters:
        each.grad = torch.where(each.grad.abs() > 1e-3, each.grad, torch.zeros_like(each.grad))


#: What changes weights or gradients.
CHANGES: dict[str, Callable[[list[nn.Parameter]], None]] = {
    "clip": clipped,
    "clip of rows": clipped_by_rows,
    "centred": centred,
    "first row": first_row,
    "clip_grad_norm_": lambda each: torch.nn.utils.clip_grad_norm_(each, 0.01),
}
#: Those that work number by number.
POINTWISE: dict[str, Callable[[list[nn.Parameter]], None]] = {
    "sign": signed,
    "decay": decayed,
    "average": averaged,
    "mask": masked,
    "clip_grad_value_": lambda each: torch.nn.utils.clip_grad_value_(each, 1e-3),
    "sgd": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9).step(),
    "adamw": lambda each: torch.optim.AdamW(each, lr=0.1, foreach=True).step(),
}
#: Which tensors are read.
TENSORS: dict[str, Callable[[list[nn.Parameter]], list[torch.Tensor]]] = {
    "weights": lambda each: list(each),
    "gradients": lambda each: [one.grad for one in each],
    "detached": lambda each: [one.detach() for one in each],
    "clones": lambda each: [one.grad.clone() for one in each],
    "products": lambda each: [one.detach() * one.grad * 3 for one in each],
    "copies": lambda each: [one.detach().double().float() for one in each],
}


#: Roads that give the slice, as is documented, or say whose it is.
AS_IT_IS = ("as_subclass", "text")
#: Roads to bytes, which rounding changes in what was computed.
BYTES = ("storage",)
COMPUTED = ("clones", "products")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Linear(16, WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(states)))


class Pair:
    """A split model after a step, and plain PyTorch beside it."""

    def __init__(self, *, auto: bool) -> None:
        torch.manual_seed(3)
        with smp.tensor_parallelism(**({"auto": True} if auto else {})):
            self.model = smp.DistributedModel(Net())
        torch.manual_seed(3)
        with alone():
            self.plain = Net()
        self.states = torch.randn(4, WIDTH)

        @smp.step
        def train(model: Any, states: torch.Tensor) -> torch.Tensor:
            loss = model(states).square().mean()
            model.backward(loss)
            return loss

        self._train = train
        self.step()

    def step(self) -> None:
        self.plain.zero_grad()
        self.model.zero_grad()
        with alone():
            self.plain(self.states).square().mean().backward()
        self._train(self.model, self.states)

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        named = dict(self.plain.named_parameters())
        local = dict(self.model.local_named_parameters())
        return [local[name] for name in named], list(named.values())

    def compare(self) -> None:
        wanted = dict(self.plain.named_parameters())
        for name, each in self.model.local_named_parameters():
            for got, want in ((each, wanted[name]), (each.grad, wanted[name].grad)):
                part = local_part(self.model, name, want.detach())
                torch.testing.assert_close(slice_itself(got.detach()), part)


class NoReferenceError(Exception):
    """Plain PyTorch cannot take a road."""


def number(pair: Pair, kind: str, tensors: str) -> None:
    local, whole = pair.parameters()
    try:
        want = NUMBERS[kind](TENSORS[tensors](whole))
    except Exception as error:
        raise NoReferenceError from error
    got = NUMBERS[kind](TENSORS[tensors](local))
    torch.testing.assert_close(torch.as_tensor(got).float(), torch.as_tensor(want).float())


def change(pair: Pair, kind: str) -> None:
    for each in pair.parameters():
        {**CHANGES, **POINTWISE}[kind](each)
    pair.compare()
    pair.step()
    pair.compare()


def taken(road: Road, pair: Pair, tensors: str) -> list[Any]:
    """Takes a road from the last weight of plain PyTorch, and of the split model."""
    local, whole = (TENSORS[tensors](each)[-2] for each in pair.parameters())
    try:
        want = road(whole)
    except Exception as error:
        raise NoReferenceError from error
    return [road(local), want]


def read_by(road: Road, pair: Pair, tensors: str) -> None:
    got, want = (torch.as_tensor(each).detach() for each in taken(road, pair, tensors))
    torch.testing.assert_close(slice_itself(got).float(), want.float())


def written_by(road: Road, pair: Pair, tensors: str) -> None:
    taken(road, pair, tensors)
    pair.compare()
    pair.step()
    pair.compare()


def outcome(function: Callable[..., None], *args: Any) -> str:
    try:
        function(*args)
    except NoReferenceError:
        return "not in PyTorch"
    except AssertionError:
        return "wrong"
    except Exception as error:  # TorchScript tells the library's in its own
        says = str(error)
        is_clear = "tensor-parallel rank has a slice" in says and "clone()" in says
        is_clear |= "write what has its shape and type by copy_" in says
        is_clear |= "array is read-only" in says  # of NumPy
        return "refused" if is_clear else f"unclear {type(error).__name__}"
    return "exact"


def by_roads(*, auto: bool, first: int = 0, stride: int = 1) -> dict[str, int]:
    """Returns how often roads came to which end."""
    found: Counter[str] = Counter()
    pair: Any = Pair(auto=auto)
    chosen = {label: road for label, road in READS.items() if label not in AS_IT_IS}
    reads = itertools.product(chosen, TENSORS)
    writes = itertools.product(WRITES, ("weights", "gradients", "detached"))
    cases = [(read_by, *each) for each in reads] + [(written_by, *each) for each in writes]
    cases = [each for each in cases if each[1] not in BYTES or each[2] not in COMPUTED]
    for function, label, tensors in cases[first::stride]:
        road = (READS if function is read_by else WRITES)[label]
        end = outcome(function, road, pair, tensors)
        if end not in ("exact", "refused", "not in PyTorch"):
            print(f"{function.__name__} {label} of {tensors}: {end}")
        found[end] += 1
        if function is written_by and end != "exact":  # half of it may be written
            pair = None
            gc.collect()
            pair = Pair(auto=auto)
    return dict(found)


def population(*, auto: bool, stride: int = 1) -> dict[str, int]:
    """Returns how often accesses came to which end."""
    found: Counter[str] = Counter()
    pair = Pair(auto=auto)
    for kind, tensors in itertools.islice(itertools.product(NUMBERS, TENSORS), 0, None, stride):
        end = outcome(number, pair, kind, tensors)
        if end not in ("exact", "not in PyTorch"):
            print(f"{kind} of {tensors}: {end}")
        found[end] += 1
    for kind in (*CHANGES, *POINTWISE):
        end = outcome(change, Pair(auto=auto), kind)
        if end != "exact":
            print(f"{kind}: {end}")
        found[end] += 1
    return dict(found)
