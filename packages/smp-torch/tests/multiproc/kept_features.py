"""A population of scripts that keep what a module computes, and read it later in the same forward.

Each has a place (a dict, a list, an attribute, a global), a writer (a hook of a layer, the forward
of a layer or of one inside it, of a module that is split) and a reader (the forward of the model,
another layer, the step function).
"""

from __future__ import annotations

import itertools
from functools import partial

from small_scripts import outcome_of

#: How a place is made, written ({value}) and read; ``net`` is the model.
PLACES = {
    "key": ("net.kept = {'a': None}", "net.kept['a'] = {value}", "net.kept['a']"),
    "new key": ("net.kept = {}", "net.kept['a'] = {value}", "net.kept.pop('a')"),
    "key that stays": ("net.kept = {}", "net.kept['a'] = {value}", "net.kept['a']"),
    "list": ("net.kept = []", "net.kept.append({value})", "net.kept.pop()"),
    "slot": ("net.kept = [None, None]", "net.kept[1] = {value}", "net.kept[1]"),
    "attribute": ("net.kept = None", "net.kept = {value}", "net.kept"),
    "own attribute": ("here.kept = None", "here.kept = {value}", "here.kept"),
    "own new attribute": ("pass", "here.kept = {value}", "here.kept"),
    "own dict": ("here.kept = {}", "here.kept['a'] = {value}", "here.kept['a']"),
    "own list": ("here.kept = []", "here.kept[:] = [{value}]", "here.kept[0]"),
    "global dict": ("KEPT.clear()", "KEPT['a'] = {value}", "KEPT['a']"),
    "global list": ("KEPT['l'] = []", "KEPT['l'].append({value})", "KEPT['l'].pop()"),
    "object": ("BOX.kept = None", "BOX.kept = {value}", "BOX.kept"),
    "tuple in an attribute": ("here.kept = ()", "here.kept = ({value}, 1)", "here.kept[0]"),
    "plain number": ("net.kept = 0.0", "net.kept = 1.0", "torch.as_tensor(net.kept)"),
    "two, by turns": (
        "net.turn = 0",
        "net.turn += 1; both = {value} * 2, {value} * 3; "
        "setattr(net, 'ab'[net.turn % 2], both[net.turn % 2])",
        "getattr(net, 'ab'[net.turn % 2])",
    ),
    "detached": ("net.kept = {}", "net.kept['a'] = {value}.detach()", "net.kept['a']"),
    "made anew": ("here.kept = []", "here.kept = [{value} * 2, 1]", "here.kept[0]"),
    "dict made anew": ("pass", "here.kept = {{'a': {value}.abs().mean()}}", "here.kept['a']"),
    "penalty": ("KEPT['l'] = []", "KEPT['l'].append({value}.abs().mean())", "KEPT['l'].pop()"),
    "penalties": (
        "KEPT['l'] = []",
        "KEPT['l'] += [{value}.tanh(), {value}.square()]",
        "sum(KEPT['l'].pop() for _ in range(len(KEPT['l'])))",
    ),
    "ordered": (
        "net.kept = collections.OrderedDict()",
        "net.kept['a'] = {value} * 3",
        "net.kept.popitem()[1]",
    ),
    "number": ("net.kept = {}", "net.kept['a'] = {value}.square().mean()", "net.kept['a']"),
}
#: Who writes: code in the forward of a layer, of one in it, of a split module; or hooks.
WRITERS = ("layer", "inner", "split", "hook", "inner hook", "pre-hook")
READERS = ("model", "later layer", "step", "loss")
_SCRIPT = """
import collections
import types
import torch
from torch import nn

KEPT, BOX = {{}}, types.SimpleNamespace()

class Inner(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        net, here = NET, NET.first.inner
        {inner}
        return out

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner(4, 4)

    def forward(self, x):
        out = self.inner(x).tanh()
        net, here = NET, self
        {layer}
        return out

class Later(nn.Linear):
    def forward(self, x):
        net, here = NET, {holder}
        {later}
        return super().forward(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Layer()
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.later = Later(4, 4)

    def forward(self, x):
        x = self.first(x)
        net, out, here = NET, x, {holder}
        {split}
        x = self.later(self.blocks(x).tanh())
        {model}
        return x

def built(net):
    global NET
    NET = net
    here = {holder}
    {made}
    {hooked}

def body(model, x, y):
    net = NET
    here = {holder}
    x = model(x)
    {step}
    loss = (x - y).square().mean()
    {loss}
    model.backward(loss)
    return loss
"""


def script_of(place: str, writer: str, reader: str) -> str:
    """Returns a script."""
    made, written, read = PLACES[place]
    holes = dict.fromkeys(("inner", "layer", "later", "split", "model", "step", "loss"), "pass")
    hooked = "pass"
    holder = {"inner": "NET.first.inner", "inner hook": "NET.first.inner", "split": "NET"}
    if "hook" in writer:
        kind = "register_forward_pre_hook" if writer == "pre-hook" else "register_forward_hook"
        value = "given[0]" if writer == "pre-hook" else "rest[0]"
        target = "first.inner" if writer == "inner hook" else "first"
        here = holder.get(writer, "NET.first")
        hooked = (
            f"def hook(module, given, *rest):\n        net, here = NET, {here}\n"
            f"        {written.format(value=value)}\n    net.{target}.{kind}(hook)"
        )
    else:
        holes[writer] = written.format(value="out")
    used = f"x = x + {read} * 0.5"
    if reader == "later layer":
        holes["later"] = used
    elif reader == "loss":
        holes["loss"] = f"loss = loss + ({read}).square().mean()"
    else:
        holes[reader] = used
    return _SCRIPT.format(made=made, hooked=hooked, holder=holder.get(writer, "NET.first"), **holes)


def _outcome(place: str, writer: str, reader: str) -> str:
    return outcome_of(script_of(place, writer, reader), lambda *_: None)


#: Name -> runs it in this job, and returns what became of it.
KEPT = {
    ", ".join(each): partial(_outcome, *each)
    for each in itertools.product(PLACES, WRITERS, READERS)
}
