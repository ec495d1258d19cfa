"""A population of models that write to parameters between their layers: averages of weights.

Every way of a write, to parameters of every kind, at every place, met by every reader; see
``uses``. What a microbatch makes of a parameter the next one computes with, in the order of one
process, or the library must refuse it.
"""

# Code of scripts stands on one line.
# ruff: noqa: E501

from __future__ import annotations

import itertools
from typing import Any

from uses import Use

#: What the code does with a parameter {k}, another one {l} of the kind, one {q} that it is made of,
#: and an activation {x}.
WAYS = {
    "average": "with torch.no_grad(): {k}.mul_(0.9).add_({q}, alpha=0.1)",
    "average of data": "{k}.data.mul_(0.9).add_({q}.data, alpha=0.1)",
    "average of others": "{k}.detach().mul_(0.9).add_({q}.detach(), alpha=0.1)",
    "new data": "{k}.data = {k}.data * 0.9 + {q}.data * 0.1",
    "copy": "with torch.no_grad(): {k}.copy_(0.9 * {k} + 0.1 * {q})",
    "between the two": "with torch.no_grad(): {k}.lerp_({q}, 0.1)",
    "many at once": "with torch.no_grad(): torch._foreach_lerp_([{k}, {l}], [{q}, {q}], 0.1)",
    "by a copy": "new = 0.9 * {k}.data; new.add_({q}.data, alpha=0.1); {k}.data.copy_(new)",
    "both": "with torch.no_grad(): {k}.lerp_({q}, 0.1); {l}.lerp_({k}, 0.2)",
    "the other way too": "with torch.no_grad(): {k}.lerp_({q}, 0.1); {q}.mul_(0.99)",
    "a part": "{k}.data[:2] = {q}.data[:2] * 0.5",
    "a view": "row = {k}.data.view(-1)[:4]; row.mul_(0.5)",
    "clamped": "{k}.data.clamp_(-0.3, 0.3)",
    "normalised": "{k}.data = F.normalize({k}.data, dim=1)",
    "out": "data = {k}.data; torch.mul(data, 0.9, out=data)",
    "of an activation": "{k}.data.add_({x}.detach().mean(0))",
    "new of an activation": "{k}.data = 0.1 * {x}.detach().T @ {x}.detach()",
    "at times": "COUNT[0] += 1; {k}.data.mul_(0.9) if COUNT[0] % 4 else None",
    "drawn": "{k}.data.add_(torch.full((4, 4), 0.01))",
    "exchanged": "old = {k}.data; {k}.data = 0.5 * old; {x} = {x} + {k}.sum() * 0.01; {k}.data = old",
    "of one memory": "{k}.data = {q}.data",
    "kept on": "new = 0.9 * {k}.data; {k}.data = new; new.add_(0.1)",
    "of a shape": "{k}.data = {k}.data[:1]",
}
#: Parameters, with the code in which they are read: frozen ones of an early and a late layer,
#: trained ones, one of the split model itself.
KINDS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "frozen early": (
        *("{0}.frozen.weight", "{0}.other.weight", "{0}.fourth.weight"),
        {"glue": "with torch.no_grad(): z = self.other(self.frozen(x))\nx = x + z"},
    ),
    "frozen late": (
        *("{0}.frozen.weight", "{0}.other.weight", "{0}.first.weight"),
        {"late": "with torch.no_grad(): z = self.other(self.frozen(x))\nx = x + z"},
    ),
    "frozen on the way": (
        *("{0}.frozen.weight", "{0}.other.weight", "{0}.first.weight"),
        {"late": "x = x + self.other(self.frozen(x))"},
    ),
    "trained early": ("{0}.first.weight", "{0}.second.weight", "{0}.fourth.weight", {}),
    "trained late": ("{0}.third.weight", "{0}.fourth.weight", "{0}.first.weight", {}),
    "its own": (
        "{0}.scale",
        "{0}.shift",
        "{0}.third.weight",
        {"late": "x = x @ self.scale + self.shift.sum()"},
    ),
}
PLACES = {"glue": ("self", "x"), "late": ("self", "x"), "loss": ("NET", "out")}
#: What else there is.
MEETINGS: dict[str, dict[str, str]] = {
    "alone": {},
    "behind": {"behind": ""},
    "read": {"late": "x = x * (1 + 0.1 * {k}.mean())"},
    "branch": {"late": "x = x * 2 if x.sum() > 0 else x"},
    "twice": {"call": "out = model(x) + 0.5 * model(-x)"},
    "gradient": {
        "call": "x.requires_grad_(); out = model(x)",
        "loss": "loss = loss + torch.autograd.grad(out.sum(), x, create_graph=True)[0].square().mean()",
    },
    "checkpoint": {"call": "out = checkpoint(model, x, use_reentrant=False)"},
    "between": {"between": "net.frozen.weight.data.mul_(1.1)"},
}


def _use(way: str, kind: str, place: str, meeting: dict[str, str]) -> Use:
    *names, reads = KINDS[kind]
    code = {"glue": [], "late": [], "loss": ["loss = ((out - y) ** 2).mean()"]}  # type: ignore[var-annotated]
    for where, read in reads.items():
        code[where].append(read)
    model, x = PLACES[place]
    of = dict(zip("klq", (name.format(model) for name in names), strict=True))
    # Before what reads the parameter, or behind it.
    at = len(code[place]) if place == "loss" or "behind" in meeting else 0
    code[place].insert(at, WAYS[way].format(**of, x=x))
    for where in ("late", "loss"):
        if where in meeting:
            code[where].append(meeting[where].format(k=names[0].format("self")))
    more: dict[str, Any] = {name: meeting[name] for name in ("call", "between") if name in meeting}
    return Use(
        top="COUNT = [0]",
        init=(
            "self.frozen, self.other = (nn.Linear(4, 4).requires_grad_(False) for _ in range(2))\n"
            "self.scale, self.shift = (nn.Parameter(torch.eye(4)) for _ in range(2))"
        ),
        glue="\n".join(code["glue"]),
        late="\n".join(code["late"]),
        loss="\n".join(code["loss"]),
        **more,
    )


WRITTEN = {
    f"{way}, {kind}, {place}, {meeting}": _use(way, kind, place, MEETINGS[meeting])
    for way, kind, place, meeting in itertools.product(WAYS, KINDS, PLACES, MEETINGS)
}
