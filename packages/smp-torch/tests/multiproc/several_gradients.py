"""Small scripts whose hooks look at the gradients of several tensors in one backward pass.

A pipeline has a backward pass for each part of the model, each on the rank that has it: what one
hook sees of several parts in one process, no process sees there. Every *road* by which code gets a
gradient in a backward pass, in every *place* that can take it, on tensors of one part and of
several, with what hooks do with gradients. See ``small_scripts``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from small_scripts import WIDTH, outcome_of
from torch import nn

_EDGE = "torch.autograd.graph.get_gradient_edge"
#: Road -> code that has ``one(place, gradient)``, or ``many(gradients)``, get the gradients.
ROADS = {
    "all": "torch.autograd.graph.register_multi_grad_hook(tensors, many)",
    "any": "torch.autograd.graph.register_multi_grad_hook(tensors, one, mode='any')",
    "each": "for each in tensors: each.register_hook(lambda gradient: one(gradient))",
    "same": "for each in tensors: each.register_hook(one)",
    "after": """for each in tensors:
        def after(each):
            changed = one(each.grad)
            if changed is not None: each.grad = changed
        each.register_post_accumulate_grad_hook(after)""",
    "before a node": f"""for each in tensors:
        def before(given):
            changed = one(given[0])
            return None if changed is None else (changed,)
        keep({_EDGE}(each).node).register_prehook(before)""",
    "after a node": f"""for each in tensors:
        def behind(got, given, each=each):
            one(given[0] if each.grad is None else each.grad)
        keep({_EDGE}(each).node).register_hook(behind)""",
}
#: What a hook of one gradient does, and one of all.
DEEDS = {
    "looks": ("float(gradient.norm())", "[float(each.norm()) for each in gradients]"),
    "logs": ("seen.append(gradient.norm())", "seen.append(gradients[0].norm())"),
    "scales": ("return gradient * 2", "for each in gradients: each.mul_(2)"),
    "counts": (
        "calls[0] += 1; return gradient * (1 + calls[0] % 3)",
        "calls[0] += 1\n        for each in gradients: each.mul_(1 + calls[0] % 3)",
    ),
    "adds up": (
        "total.add_(gradient.norm()); return gradient / (1 + total)",
        "total.add_(gradients[0].norm())\n        for each in gradients: each.div_(1 + total)",
    ),
    "clips": (
        "seen.append(gradient)\n        if len(seen) == number: many(seen); seen.clear()",
        "norm = torch.stack([each.norm() for each in gradients]).norm()\n"
        "        for each in gradients: each.div_(1 + norm)",
    ),
}
#: Which tensors.
TARGETS = {
    "one": "[net.first.weight]",
    "module": "[net.first.weight, net.first.bias]",
    "later module": "[net.fourth.weight, net.fourth.bias]",
    "spread": "[net.first.weight, net.fourth.weight]",
    "everything": "list(net.parameters())",
}
#: Where the hooks are put: in setup, between steps, or while a step runs, once or in each call;
#: and on which tensors that is tried.
PLACES = {
    "built": ({"setup": "def built(net): put_hooks({targets}, *STATE)"}, TARGETS),
    "made": (
        {
            "setup": "def made(net, distributed):\n    net = net.module\n"
            "    put_hooks({targets}, *STATE)"
        },
        TARGETS,
    ),
    "between": ({"put": "put_once({targets})"}, TARGETS),
    "body": ({"body": "net = NET; put_once({targets})"}, ("module", "spread")),
    "each body": ({"body": "net = NET; put_hooks({targets}, *STATE)"}, ("one",)),
    "body behind it": ({"late": "net = NET; put_once({targets})"}, ("spread",)),
    "split": ({"split": "net = self; put_once({targets})"}, ("module", "spread")),
    "leaf": ({"leaf": "net = NET; put_in_leaf({targets}, self)"}, ("one", "module")),
    "leaf, others": ({"leaf": "net = NET; put_in_leaf({targets}, self)"}, ("spread",)),
}
#: Tensors that a forward makes, in each call anew.
MADE = {
    "of a leaf": {"leaf": "put_hooks([x, y], *new_state())"},
    "of a leaf and its weight": {"leaf": "put_hooks([x, self.weight], *new_state())"},
    "between leaves": {"between": "put_hooks([x, y], *STATE)"},
    "of a body": {"late": "put_hooks([found], *STATE)"},
}

_NET = """
import torch
from torch import nn
from torch.nn import functional as F

def new_state():
    return [0], [], torch.zeros(()), []

STATE = new_state()
PUT = []

def put_hooks(tensors, calls, seen, total, nodes):
    number = len(tensors)

    def many(gradients):
        {many}

    def one(gradient):
        {one}

    def keep(node):
        nodes.append(node)
        return node

    {road}

def put_once(tensors):
    if not PUT:
        PUT.append(0)
        put_hooks(tensors, *STATE)

def put_in_leaf(tensors, module):
    if not hasattr(module, "put") and module is NET.first:
        module.put = new_state()
        put_hooks(tensors, *module.put)

{setup}

class Leaf(nn.Linear):
    def __init__(self):
        super().__init__({width}, {width})

    def forward(self, x):
        x = super().forward(x)
        y = torch.sigmoid(x)
        {leaf}
        return y * F.softplus(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Leaf(), Leaf()
        self.third, self.fourth = nn.Linear({width}, {width}), nn.Linear({width}, {width})

    def forward(self, x):
        {split}
        x = self.second(torch.tanh(self.first(x)))
        y = self.third(x)
        {between}
        return self.fourth(torch.tanh(y))

def put(net):
    {put}

def body(model, x, y):
    {body}
    found = model(x)
    {late}
    loss = ((found - y) ** 2).mean()
    model.backward(loss)
    return loss
"""


@dataclass(frozen=True)
class Hooked:
    """One script."""

    script: str

    def outcome(self) -> str:
        """Runs it in this job; see ``small_scripts.outcome_of``."""

        def between(names: dict[str, Any], net: nn.Module, model: Any, number: int) -> None:
            names["put"](net)

        return outcome_of(self.script, between)


def _script(road: str, deed: str, place: dict[str, str], targets: str) -> Hooked:
    one, many = DEEDS[deed]
    parts = dict.fromkeys(("leaf", "split", "between", "put", "body", "late"), "pass")
    parts |= {key: code.format(targets=targets) for key, code in place.items()}
    parts.setdefault("setup", "")
    return Hooked(_NET.format(one=one, many=many, road=ROADS[road], width=WIDTH, **parts))


def _scripts() -> dict[str, Hooked]:
    found = {}
    for road, deed in itertools.product(ROADS, DEEDS):
        for place, (code, names) in PLACES.items():
            # Who asks another module's parameter for its node fails where that is not.
            for name in names if place != "leaf, others" or "node" not in road else ():
                found[f"{road}, {deed}, {place}, {name}"] = _script(road, deed, code, TARGETS[name])
        for name, code in MADE.items():
            if "node" in road and "weight" in name:
                continue  # how long such a node lives is for the graphs that have it
            found[f"{road}, {deed}, made, {name}"] = _script(road, deed, code, "")
    return found


HOOKED = _scripts()
