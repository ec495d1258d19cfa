"""A population of layers that depend on the order of one process: forward, backward, forward again.

In a pipeline other microbatches run forward before one has its gradients. What a layer keeps may
then be another by the time that its backward pass computes with it, reads it in code, or changes it.
What a layer does for some inputs only is no less its own. See ``uses``.
"""

# Code of scripts stands on one line.
# ruff: noqa: E501

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator

from uses import Use
from writes import WAYS

_MEETINGS = {
    "alone": Use(),
    "again": Use(late="x = self.second(x)"),
    "again, late": Use(late="x = self.first(x)"),
}
_HEAD = """
ALL = {"kept": None, "count": 0.0}
class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.y = y
        return x * y
    @staticmethod
    def backward(ctx, g):
        return g * ctx.y, None
class Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, later):
        ctx.later = later
        return x * 1
    @staticmethod
    def backward(ctx, g):
        found = ctx.later(g)
        return g if found is None else found, None
"""


def _layer(init: str, forward: str, later: str = "return None", head: str = _HEAD) -> str:
    def code(text: str) -> str:
        return textwrap.indent(textwrap.dedent(text).strip() or "pass", " " * 8)

    return f"""{head}
class Keeping(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
{code(init)}
    def later(self, g):
{code(later)}
    def forward(self, x):
{code(forward)}
"""


# What autograd keeps of a call, and the next call writes to

#: What a call keeps of what it computes with: at first, what it makes, and where it is.
_MADE = {
    "activation": ("self.kept = None", "x = new = x * 1", "self.kept"),
    "input": ("self.kept = None", "new = x.detach()", "self.kept"),
    "activation in a list": ("self.all = [None]", "x = new = x * 1", "self.all[0]"),
    "activation in a class": ("type(self).kept = None", "x = new = x * 1", "type(self).kept"),
    "activation in a global": ("pass", "x = new = x * 1", "ALL['kept']"),
    "factor": ("self.kept = None", "new = 0.5 + x.detach().mean(0); x = x * new", "self.kept"),
    "factor of a function": (
        "self.kept = None",
        "new = x.detach().clone(); x = Times.apply(x, new)",
        "self.kept",
    ),
}
#: What it computes with that is there from the beginning.
_THERE = {
    "weight": ("pass", "self.weight"),
    "scale": ("self.scale = nn.Parameter(torch.ones(4))", "self.scale"),
    "frozen": (
        "self.scale = nn.Parameter(torch.ones(4), requires_grad=False)",
        "self.scale",
    ),
    "buffer": ("self.register_buffer('scale', torch.ones(4))", "self.scale"),
    "attribute": ("self.scale = torch.ones(4)", "self.scale"),
    "list": ("self.all = [torch.ones(4)]", "self.all[0]"),
    "global": ("ALL['kept'] = torch.ones(4)", "ALL['kept']"),
}


def _kept() -> Iterator[tuple[str, Use]]:
    for what, way, meeting in itertools.product(_MADE, WAYS, _MEETINGS):
        init, make, place = _MADE[what]
        forward = f"""
            kept, mean = {place}, x.detach().mean(0)
            if kept is not None:
                {WAYS[way]}
            {make}
            {place} = new
            return super().forward(x)
        """
        late = _MEETINGS[meeting].late
        yield f"{what}, {way}, {meeting}", Use(_layer(init, forward), layer="Keeping", late=late)
    for what, way, meeting in itertools.product(_THERE, WAYS, _MEETINGS):
        init, place = _THERE[what]
        forward = f"""
            kept, mean = {place}, x.detach().mean(0)
            {WAYS[way]}
            return super().forward(x * {"1" if what == "weight" else place})
        """
        late = _MEETINGS[meeting].late
        yield f"{what}, {way}, {meeting}", Use(_layer(init, forward), layer="Keeping", late=late)


# State that is changed for some inputs only

#: At first, how it is changed, and how it is read; ``{0}`` is the layer.
_STATES = {
    "attribute": ("self.count = 0.0", "{0}.count = {0}.count + 1", "{0}.count"),
    "list": ("self.all = []", "{0}.all.append(1)", "len({0}.all)"),
    "item": ("self.all = [0.0]", "{0}.all[0] += 1", "{0}.all[0]"),
    "tensor": ("self.count = torch.zeros(())", "{0}.count.add_(1)", "{0}.count"),
    "data of a tensor": (
        "self.count = torch.zeros(())",
        "{0}.count.data.add_(1)",
        "{0}.count",
    ),
    "buffer": (
        "self.register_buffer('count', torch.zeros(()))",
        "{0}.count.add_(1)",
        "{0}.count",
    ),
    "data of a buffer": (
        "self.register_buffer('count', torch.zeros(()))",
        "{0}.count.data.add_(1)",
        "{0}.count",
    ),
    "new buffer": (
        "self.register_buffer('count', torch.zeros(()))",
        "{0}.count = {0}.count + 1",
        "{0}.count",
    ),
    "class": ("type(self).shared = 0.0", "type({0}).shared += 1", "type({0}).shared"),
    "global": ("pass", "ALL['count'] += 1", "ALL['count']"),
}
_CONDITIONS = {
    "half": "x.sum() > 0",
    "large": "x.abs().max() > 2",
    "not a number": "not torch.isfinite(x).all()",
}
_READERS = {
    "alone": Use(),
    "again": Use(late="x = self.second(x)"),
    "again, late": Use(late="x = self.first(x)"),
    "late": Use(late="x = x * (1 + {0})"),
    "early": Use(glue="x = x * (1 + {1})"),
    "loss": Use(loss="loss = ((out - y) ** 2).mean() * (1 + {2})"),
}


def _decided() -> Iterator[tuple[str, Use]]:
    for state, condition, reader in itertools.product(_STATES, _CONDITIONS, _READERS):
        init, change, read = _STATES[state]
        forward = f"""
            if {_CONDITIONS[condition]}:
                {change.format("self")}
            return super().forward(x) * (1 + {read.format("self")})
        """
        owners = [read.format(each) for each in ("self.first", "self.third", "NET.third")]
        places = {
            name: getattr(_READERS[reader], name).format(*owners)
            for name in ("glue", "late", "loss")
        }
        name = f"{state}, changed if {condition}, {reader}"
        yield name, Use(_layer(init, forward), layer="Keeping", **places)


# Code that a backward pass runs

#: What has it run: at the end of ``__init__``, and in the forward pass.
_CODE = {
    "hook": ("pass", "x = x * 1; x.requires_grad and x.register_hook(self.later)"),
    "function": ("pass", "x = Later.apply(x, self.later)"),
    "hook of the weight": ("self.weight.register_hook(self.later)", "pass"),
    "hook of the module": (
        "self.register_full_backward_hook(lambda m, given, made: None if m.later(made[0]) is None else tuple(each if each is None else m.later(each) for each in given))",
        "pass",
    ),
    "hook of a node": (
        "pass",
        "x = x * 1; x.requires_grad and x.grad_fn.register_prehook(lambda g: None if self.later(g[0]) is None else (self.later(g[0]),))",
    ),
    "later hook of a node": (
        "pass",
        "x = x * 1; x.requires_grad and x.grad_fn.register_hook(lambda made, g: None if self.later(made[0]) is None else (self.later(made[0]), *made[1:]))",
    ),
    "hook of what is kept": (
        "pass",
        "with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t if self.later(t) is None else self.later(t)): x = x * x",
    ),
    "checkpoint": (
        "pass",
        "x = checkpoint(lambda x: torch.tanh(x if self.later(x) is None else self.later(x)), x, use_reentrant=False)",
    ),
}
#: What it does, what the forward pass of the layer does, and what others do.
_DEEDS = {
    "reads what forward changes": ("return g * (1 + {read})", "{change}", Use()),
    "changes what forward reads": ("{change}", "x = x * (1 + {read})", Use()),
    "changes, nobody reads": ("{change}", "pass", Use()),
    "reads what glue changes": ("return g * (1 + {read})", "pass", Use(glue="{change}")),
    "reads what late glue changes": ("return g * (1 + {read})", "pass", Use(late="{change}")),
    "reads what the body changes": ("return g * (1 + {read})", "pass", Use(body="{change}")),
    "changes what glue reads": ("{change}", "pass", Use(late="x = x * (1 + {read})")),
    "changes what the body reads": (
        "{change}",
        "pass",
        Use(loss="loss = ((out - y) ** 2).mean() * (1 + {read})"),
    ),
}
_OWNERS = {"glue": "self.first", "late": "self.first", "body": "NET.first", "loss": "NET.first"}


def _code() -> Iterator[tuple[str, Use]]:
    for code, state, deed in itertools.product(_CODE, _STATES, _DEEDS):
        hook, begin = _CODE[code]
        init, change, read = _STATES[state]
        later, forward, others = _DEEDS[deed]

        def filled(text: str, owner: str, change: str = change, read: str = read) -> str:
            return text.replace("{change}", change.format(owner)).replace(
                "{read}", read.format(owner)
            )

        top = _layer(
            f"{init}\n{hook}",
            f"{filled(forward, 'self')}\n{begin}\nreturn super().forward(x)",
            filled(later, "self"),
        )
        places = {
            name: filled(getattr(others, name), owner)
            for name, owner in _OWNERS.items()
            if getattr(others, name) != getattr(Use(), name)
        }
        yield f"{code}, {state}, {deed}", Use(top, layer="Keeping", **places)


ORDER = dict(itertools.chain(_kept(), _decided(), _code()))
