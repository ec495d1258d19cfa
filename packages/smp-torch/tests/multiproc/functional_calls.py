"""A population of models that are called with other parameters than their own: fast weights.

What the parameters are made of, at every place, of layers of every kind, beside other calls; see
``uses``. ``torch.func.functional_call`` puts them into the modules for the time of a call.
"""

# Code of scripts stands on one line.
# ruff: noqa: E501

from __future__ import annotations

import itertools
from typing import Any

from uses import Use

#: What makes the parameters {p} of those of {m}, with an activation {x}.
MADE = {
    "scaled": "{p} = {{name: 1.5 * each for name, each in {m}.named_parameters()}}",
    "frozen": "{p} = {{name: each.detach() * 0.5 for name, each in {m}.named_parameters()}}",
    "the same": "{p} = dict({m}.named_parameters())",
    "one": "{p} = {{name: each * 2 for name, each in list({m}.named_parameters())[:1]}}",
    "made of an activation": "{p} = {{name: each + 0.1 * {x}.mean() for name, each in {m}.named_parameters()}}",
    "of another": "{p} = {{name: 0.5 * (each + other) for (name, each), other in zip({m}.named_parameters(), reversed(list({m}.parameters()))) if each.shape == other.shape}}",
    "buffers too": "{p} = {{**{{name: 1.5 * each for name, each in {m}.named_parameters()}}, **{{name: each.clone() for name, each in {m}.named_buffers()}}}}",
    "a step ahead": (
        "own = dict({m}.named_parameters()); first = torch.func.functional_call({m}, own, ({x},)).square().mean()\n"
        "{p} = {{name: each - 0.1 * g for (name, each), g in zip(own.items(), torch.autograd.grad(first, list(own.values()), create_graph=True))}}"
    ),
    "a step ahead of constants": (
        "own = dict({m}.named_parameters()); first = torch.func.functional_call({m}, own, ({x},)).square().mean()\n"
        "{p} = {{name: each - 0.1 * g for (name, each), g in zip(own.items(), torch.autograd.grad(first, list(own.values())))}}"
    ),
}
#: The layer that is called: its class, more of its construction.
LAYERS = {
    "linear": "nn.Linear(4, 4)",
    "several": "nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))",
    "norm": "nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))",
    "counting": "Counting()",
}
#: Where it is called: code before the call, which gives {p}; and behind.
PLACES: dict[str, tuple[str, str, str]] = {
    "glue": ("glue", "self.layer", "x"),
    "late": ("late", "self.layer", "x"),
    "step": ("loss", "NET.layer", "out"),
    "model": ("call", "NET", "x"),
}
MEETINGS = {
    "alone": "",
    "beside": "{x} = {x} + {m}({x})",
    "left": "{m}.weight = nn.Parameter(torch.ones(4, 4)); {x} = {m}({x})",
}


def _use(made: str, layer: str, place: str, meeting: str) -> Use:
    where, module, x = PLACES[place]
    called = f"torch.func.functional_call({module}, p, ({x},))"
    code = [MADE[made].format(p="p", m=module, x=x)]
    if place == "model":
        code += [f"out = {called}", *(["out = out + model(x)"] if meeting == "beside" else [])]
    else:
        code += [f"{x} = {x} + {called}", MEETINGS[meeting].format(m=module, x=x)]
    if where == "loss":
        code.append("loss = ((out - y) ** 2).mean()")
    top = """
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.count = 0
        def forward(self, x):
            self.count += 1
            return super().forward(x) * self.count
    """
    more: dict[str, Any] = {where: "\n".join(code)}
    if place == "model":
        more["late"] = "x = self.layer(x)"
    return Use(top=top, init=f"self.layer = {LAYERS[layer]}", **more)


CALLED = {
    f"{made}, {layer}, {place}, {meeting}": _use(made, layer, place, meeting)
    for made, layer, place, meeting in itertools.product(MADE, LAYERS, PLACES, MEETINGS)
    if not (meeting == "left" and (place == "model" or layer != "linear"))
}
