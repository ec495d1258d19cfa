"""A population of code between modules that writes to a tensor by one name and reads it by another.

Every kind of view, written in every way, read by every name and in every place; see ``uses``. What
follows from the inputs alone each partition computes again, in which a write must not be lost.
"""

from __future__ import annotations

import itertools

from uses import Use

#: What is written to, of a tensor ``base``.
VIEWS = {
    "itself": "base",
    "row": "base[0]",
    "column": "base[:, 0]",
    "transposed": "base.t()",
    "flat": "base.view(-1)",
    "narrow": "base.narrow(1, 1, 2)",
    "chunk": "base.chunk(2, 1)[1]",
    "diagonal": "base.diagonal()",
    "part of flat": "base.view(-1)[2:]",
    "detached": "base.detach()",
}
#: How; ``by`` is a number in a tensor.
WAYS = {
    "add": "part.add_(by)",
    "multiply": "part.mul_(by + 2)",
    "operator": "part += by",
    "item": "part[...] = by",
    "out": "torch.add(part, by, out=part)",
    "fill": "part.masked_fill_(part > by, 0.5)",
    "copy": "part.copy_(part * 2 + by)",
    "many at once": "torch._foreach_add_([part, base], [by, by])",
    "old sum": "old = base.sum(); part.add_(by); base.add_(old)",
    "old mask": "old = base > 0; part.add_(by); base.mul_(old)",
    "twice": "part.add_(by); base.view(-1)[1:3].mul_(2); part.sub_(by / 2)",
}
#: By which name it is read; ``earlier`` is a view that there was before.
READS = {
    "itself": "base",
    "earlier": "earlier.view(base.shape)",
    "written": "base * 0 + part.sum()",
    "later": "base.t().t()",
    "decision": "base * (1 if base.sum() > 0.5 else 2)",
    "number": "base * (base.sum().item() + 1)",
    "selected": "base * (base.view(-1)[earlier > 0.1].sum() + 1)",
}
_BEGIN = "earlier = base.view(-1); part = {view}; by = {by}"
#: The model takes all four.
_TAKES = ["out = model(x, base, earlier, part, by)"]
_TAKE = "base, earlier, part, by = given"
#: Where it is made, written and read: code by place, in lines.
PLACES: dict[str, dict[str, list[str]]] = {
    "before the model": {
        "body": ["base = x.clone()", _BEGIN, "{way}", "x = {read}"],
    },
    "the batch, which comes again": {
        "top": ["REUSES_BATCH = True"],
        "body": ["base = x", _BEGIN, "{way}", "x = x * 0.1 + {read}"],
    },
    "the batch, late, which comes again": {
        "top": ["REUSES_BATCH = True"],
        "body": ["base = x", _BEGIN, "x = x.clone()"],
        "call": _TAKES,
        "late": [_TAKE, "{way}", "x = x + 0.1 * {read}"],
    },
    "made of nothing": {
        "body": [
            *("base = torch.linspace(-1, 1, x.numel()).view(x.shape)", _BEGIN, "{way}"),
            "x = x * 0.1 + {read}",
        ],
    },
    "read late": {
        "body": ["base = x * 2", _BEGIN, "{way}"],
        "call": _TAKES,
        "late": [_TAKE, "x = x + {read}"],
    },
    "written late": {
        "body": ["base = x.clone()", _BEGIN],
        "call": _TAKES,
        "late": [_TAKE, "{way}", "x = x + {read}"],
    },
    "written in between, read twice": {
        "body": ["base = x.clone()", _BEGIN],
        "call": _TAKES,
        "glue": [_TAKE, "x = x + {read}", "{way}"],
        "late": [_TAKE, "x = x + {read}"],
    },
    "in the loss": {
        "body": ["base = y.clone()", _BEGIN, "{way}"],
        "loss": ["loss = ((out - y) ** 2).mean() + (out * ({read}).mean()).mean()"],
    },
    "of an activation": {
        "late": ["base = x.clone()", _BEGIN, "{way}", "x = {read}"],
    },
    "by an activation": {
        "body": ["base = x.clone()", _BEGIN],
        "call": _TAKES,
        "late": [_TAKE, "by = x.detach().mean()", "{way}", "x = x + {read}"],
    },
    "by an activation, seen on": {
        "body": ["base = x.clone()", _BEGIN],
        "call": _TAKES,
        "glue": [_TAKE, "by = x.detach().mean()", "{way}"],
        "late": [_TAKE, "x = x + {read}"],
    },
}


def _use(place: str, view: str, way: str, read: str) -> Use:
    number = "torch.tensor(0.25)"
    code = {
        name: "\n".join(
            line.format(view=VIEWS[view], way=WAYS[way], read=READS[read], by=number)
            for line in lines
        )
        for name, lines in PLACES[place].items()
    }
    return Use(more=", *given", **code)


SEEN = {
    f"{place}, {view}, {way}, {read}": _use(place, view, way, read)
    for place, view, way, read in itertools.product(PLACES, VIEWS, WAYS, READS)
}
