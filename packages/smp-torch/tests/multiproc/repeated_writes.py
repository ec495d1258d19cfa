"""A population of tensors that are written to several times, in parts and whole, and cross a cut.

``FUNCTIONS`` has every function of torch that writes to a tensor, found by looking for those that
do and for arguments that they take; ``WRITTEN`` a few of them on every view of every kind of
tensor. A write is before the cut or behind it, with gradients of the tensor, of what is written, or
of none. See ``uses``.
"""

# Code of scripts stands on one line.
# ruff: noqa: E501

from __future__ import annotations

import functools
import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from uses import Use

#: What is written to, and what is written. Each function is defined there, for any number of times.
BASES = {
    "new": "torch.full_like(x, 0.5)",
    "computed": "torch.sigmoid(x) * 0.4 + 0.3",
    "detached": "torch.sigmoid(x.detach()) * 0.4 + 0.3",
    "given": "given * 1",
    "of a layer": "torch.sigmoid(self.side(x))",
    "empty": "torch.empty(x.shape).fill_(0.5)",
}
SOURCES = {
    "with gradient": "torch.sigmoid(x * 1.5) * 0.4 + 0.3",
    "without": "torch.sigmoid(x.detach() * 1.5) * 0.4 + 0.3",
}
VIEWS = {
    "whole": "base",
    "itself": "base.view(base.shape)",
    "rows": "base[1:]",
    "row": "base[1]",
    "columns": "base[:, 1:3]",
    "steps": "base[:, ::2]",
    "transposed": "base.T",
    "flat": "base.view(-1)",
    "chunk": "base.chunk(2, 1)[1]",
    "unbound": "base.unbind(1)[2]",
    "split": "base.split([1, 3], 1)[1]",
    "diagonal": "base.diagonal()",
    "of a view": "base.t()[1:].t()",
    "more dims": "base[:, None]",
    "narrow": "base.narrow(1, 1, 2)",
    "detached": "base.detach()",
}
#: Writes of ``by``, which fits into ``part``.
WRITES = {
    "copy": "part.copy_(by)",
    "item": "part[...] = by",
    "add": "part += by * 0.5",
    "multiply": "part.mul_(by)",
    "lerp": "part.lerp_(by, 0.5)",
    "masked": "part.masked_scatter_(by.detach() > 0.45, by)",
    "without gradients": "torch.no_grad()(lambda: part.mul_(0.5))()",
    "by a module": "self.{where}(part, by)",
}
#: Where ``part`` is written to: before the cut, and behind it. Its first write is not the last.
MOMENTS = [
    (before, behind)
    for before, behind in itertools.product(range(4), repeat=2)
    if 0 < before + behind < 4
]
READS = {
    "base": "x = x + base",
    "part": "x = x + part.mean()",
    "both, and earlier": "x = x + earlier.mean() + base * part.mean()",
}
_TOP = """
    STEPS = 2
    def fit(source, part):
        return source.reshape(-1)[:part.numel()].reshape(part.shape)
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(4, 4)
        def forward(self, part, by):
            part.mul_(0.5).add_(torch.sigmoid(self.map(fit(by, torch.empty(2)).repeat(2))).mean())
"""
#: The second step does something else behind the writes: what is known branches there.
_FACTOR = "x = x * self.factor"


def _script(
    base: str, source: str, view: str, ways: list[tuple[list[str], list[str]]], read: str
) -> Use:
    """Returns a use with tensors that are written to before the cut, and behind it."""
    made, late = [f"given, source = given * 1, {source}"], []
    for number, (before, behind) in enumerate(ways):
        names = f"base{number}, earlier{number}, part{number}, by{number}"
        made += [
            f"base = {base}",
            f"earlier = base.view(-1)[1:]; part = {view}; by = fit(source, part)",
            *before,
            f"{names} = base, earlier, part, by",
        ]
        late += [f"base, earlier, part, by = {names}", *behind, read]
    return Use(
        top=_TOP,
        init="""
            self.side, self.factor = nn.Linear(4, 4), 1.0
            self.early, self.late = Writing(), Writing()
        """,
        more=", given",
        body="given = x * 0.1 + 0.5",
        call="out = model(x, given)",
        glue="\n".join(made),
        late="\n".join([*late, _FACTOR]),
        between="net.factor = 2.0",
    )


def _written(
    base: str, source: str, view: str, write: str, moment: tuple[int, int], read: str
) -> Use:
    early, late = (WRITES[write].format(where=where) for where in ("early", "late"))
    return _script(
        BASES[base],
        SOURCES[source],
        VIEWS[view],
        [([early] * moment[0], [late] * moment[1])],
        READS[read],
    )


#: Of all of these, so many that each meets each other one often.
_DRAWN = 1500
WRITTEN = {
    ", ".join(map(str, choice)): functools.partial(_written, *choice)
    for choice in random.Random(0).sample(
        list(itertools.product(BASES, SOURCES, VIEWS, WRITES, MOMENTS, READS)), _DRAWN
    )
}

# ---------------------------------------------------------------- every function

#: What functions may take, and need: those that spread gradients come first.
ARGUMENTS = (
    "by",
    "by, 0.5",
    "by, by",
    "by, by.t() @ by",
    "by[None], (by.t() @ by)[None]",
    "by[:, 0], by[0]",
    "by.t() @ by, by[0]",
    "by > 0.5, by",
    "by.detach() > 0.5, by",
    "0, torch.tensor([1, 0]), by",
    "(torch.tensor([1, 0]),), by",
    "torch.tensor([1, 0, 3]), by.view(-1)[:3]",
    "1, torch.tensor([[1, 0], [2, 3]]), by[:, :2]",
    "1, torch.tensor([[1, 0], [2, 3]]), by[:, :2], 'amax'",
    "0, torch.tensor([1, 0]), by, 'amax'",
    "[by]",
    "[by], [by]",
    "[by], 0.5",
    "[by], [by], 0.5",
    "",
    "0.5",
    "1",
    "2",
    "0.2, 0.6",
    "0, 1",
    "2, 0, 0.5",
    "0.5, 0.1",
    "by.detach() > 0.5, 0.5",
    "0, torch.tensor([1]), 0.5",
    "torch.tensor([3, 1])",
    "[2]",
    "by.detach().double()",
)
#: What is written to, with code before and behind.
RECEIVERS = (
    ("part", "", ""),
    ("part[None]", "", ""),
    ("part[0]", "", ""),
    ("part", "part.sub_(0.5)", ""),
    ("part", "part.add_(1)", ""),
    (
        "whole",
        "whole = (part.detach() * 10).long(); by = (by.detach() * 10).long()",
        "part.add_(whole * 0.1)",
    ),
)
_INDICES = (
    "0", "-1", "1:", "::2", "...", "None", "True", "(..., 0)", "(0, 1)", "(slice(None), 2)",
    "(slice(None), slice(1, 3))", "(slice(None), None)", "[0, 1]", "([1, 0], [2, 3])",
    "torch.tensor([1, 0])", "(torch.tensor([1, 0]), torch.tensor([0, 0]))", "(slice(None), torch.tensor([2, 0]))",
    "torch.tensor([True, False])", "torch.eye(2, 4).bool()", "(0, torch.tensor([3, 1]))", "(torch.tensor(1), 2)",
    "part.detach() > 0.45",
)  # fmt: skip


def _writers() -> Iterator[tuple[str, str]]:
    """Yields what is written with, by name: code with a receiver and arguments to put in."""
    for name in dir(torch.Tensor):
        in_place = name.endswith("_") and not name.startswith("_")
        if in_place or (name.startswith("__i") and "init" not in name):
            yield f"Tensor.{name}", f"{{receiver}}.{name}({{arguments}})"
    for module, where in ((torch, "torch"), (F, "F"), (torch.special, "torch.special")):
        for name in dir(module):
            function = getattr(module, name)
            if not callable(function) or isinstance(function, type):
                continue
            if name.startswith("_foreach_") and name.endswith("_"):
                yield f"torch.{name}", f"torch.{name}([{{receiver}}], {{arguments}})"
            elif name.endswith("_") and not name.startswith("_"):
                yield f"{where}.{name}", f"{where}.{name}({{receiver}}, {{arguments}})"
            elif inspect.isbuiltin(function):
                if not name.startswith("_") and where != "F":
                    code = f"torch.no_grad()({where}.{name})({{arguments}}, out={{receiver}})"
                    yield f"out of {where}.{name}", code
            elif _takes(function, "inplace"):
                code = f"{where}.{name}({{receiver}}, {{arguments}}, inplace=True)"
                yield f"{where}.{name} in place", code
    for name in dir(nn):
        if isinstance(getattr(nn, name), type) and _takes(getattr(nn, name).__init__, "inplace"):
            yield f"nn.{name} in place", f"nn.{name}({{arguments}}, inplace=True)({{receiver}})"
    for index in _INDICES:
        yield f"part[{index}]", f"part[{index}] = by[{index}]"
        yield f"a number to part[{index}]", f"part[{index}] = 0.6"
        yield f"one to part[{index}]", f"part[{index}] = by.mean()"
        yield f"+= of part[{index}]", f"part[{index}] += by[{index}] * 0.5"


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _result(code: str) -> torch.Tensor | None:
    """Returns what writes make of a tensor, or None if they, or their gradients, cannot be.

    What draws is for ``uses``: the library draws other numbers than plain PyTorch.
    """
    generator = torch.get_rng_state()
    try:
        with torch.device("cpu"):  # whose generator that is, also where others compute on GPUs
            base = torch.sigmoid(torch.linspace(-1, 1, 8).view(2, 4).requires_grad_())
            part, by = base * 0.4 + 0.3, 1 - base
            before = part.detach().clone()
            exec(code, {"torch": torch, "F": F, "nn": nn, "part": part, "by": by})
        if not torch.equal(generator, torch.get_rng_state()):
            return None
        (part * by).sum().backward()
        is_written = part.shape == before.shape and not torch.equal(part, before)
        return part.detach() if is_written and bool(part.isfinite().all()) else None
    except Exception:
        return None


def _way(code: str) -> str:
    """Returns code that writes to ``part``; "" if none is known."""
    for (receiver, first, last), arguments in itertools.product(RECEIVERS, ARGUMENTS):
        call = code.format(receiver=receiver, arguments=arguments)
        call = call.replace("(, ", "(").replace(", )", ")").replace(", ,", ",")
        way = "; ".join(filter(None, [first, call, last]))
        found = _result(way)
        if found is not None and torch.equal(found, _result(way)):  # type: ignore[arg-type]
            return way
    return ""


#: Where the way is, and where other writes are: ``|`` is the cut.
_ORDERS = ("w|", "|w", "sw|", "ws|", "s|w", "w|s", "|ws", "sws|", "s|ws")
_OTHER = "part.view(-1)[1:].mul_(0.5).add_(by.view(-1)[:-1] * 0.5)"
_KINDS = list(itertools.product(("computed", "new", "given", "detached"), SOURCES))


_WRITERS = list(_writers())
#: How many functions a script tries, each with a tensor of its own.
_TOGETHER = 12


def _functions(codes: Sequence[str], order: str, kind: int) -> Use:
    base, source = _KINDS[kind % len(_KINDS)]
    ways = []
    for way in filter(None, map(_way, codes)):
        parts = [[way if each == "w" else _OTHER for each in part] for part in order.split("|")]
        if _result("; ".join(itertools.chain(*parts))) is not None:
            ways.append((parts[0], parts[1]))
    return _script(BASES[base], SOURCES[source], "base", ways, READS["both, and earlier"])


FUNCTIONS = {
    f"{', '.join(names)}; {order}": functools.partial(_functions, codes, order, number)
    for number, (start, order) in enumerate(
        itertools.product(range(0, len(_WRITERS), _TOGETHER), _ORDERS)
    )
    for names, codes in [zip(*_WRITERS[start : start + _TOGETHER], strict=True)]
}
REPEATED = {**FUNCTIONS, **WRITTEN}
