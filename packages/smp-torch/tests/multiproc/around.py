"""Small scripts in which something is around the calls of a step, or in objects of the library.

A *surrounding* is what holds while a step is called: hooks of saved tensors, modes of torch, hooks
of all modules, functions that are patched. Each is changed between two steps: by what it reads, or
by coming late. See ``small_scripts``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from small_scripts import WIDTH, outcome_of
from torch import nn

#: Where code that is around keeps what it reads: at the top of the script, how it is read, put.
PLACES = {
    "a global": ("FACTOR = 1.0", "FACTOR", "globals()['FACTOR'] = value"),
    "a list": ("ITEMS = [1.0]", "ITEMS[0]", "ITEMS[0] = value"),
    "an object": (
        "class Box: pass\nBOX = Box(); BOX.factor = 1.0",
        "BOX.factor",
        "BOX.factor = value",
    ),
}

_SAVED = "torch.autograd.graph.saved_tensors_hooks"
_FUNCTIONS = """
class Functions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {{}}))
        return result * {read} if func is torch.sigmoid else result
"""
_OPERATIONS = """
from torch.utils._python_dispatch import TorchDispatchMode
class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {{}}))
        return result * {read} if func is torch.ops.aten.sigmoid.default else result
"""
_HOOKED = """
import contextlib
@contextlib.contextmanager
def around():
    handle = {register}
    try:
        yield
    finally:
        handle.remove()
"""
_PATCHED = """
from unittest import mock
{before}
def patched({arguments}): return before({arguments}) * {{read}}
def around(): return mock.patch.object({owner}, {name!r}, patched)
"""


def _patched(owner: str, name: str, arguments: str) -> str:
    before = f"before = {owner}.{name}"
    return _PATCHED.format(before=before, owner=owner, name=name, arguments=arguments)


#: What is around a call: code that defines ``around()``; ``{read}`` is a number.
SURROUNDINGS = {
    "pack": f"def pack(t): return t * {{read}}\ndef unpack(t): return t\n"
    f"def around(): return {_SAVED}(pack, unpack)",
    "unpack": f"def pack(t): return t\ndef unpack(t): return t * {{read}}\n"
    f"def around(): return {_SAVED}(pack, unpack)",
    "packing object": "class Pack:\n    def __call__(self, t): return t * {read}\n"
    f"    def back(self, t): return t\nPACK = Pack()\n"
    f"def around(): return {_SAVED}(PACK, PACK.back)",
    "pack made anew": f"def around(): return {_SAVED}(lambda t: t * {{read}}, lambda t: t)",
    "outer and inner pack": "import contextlib\ndef pack(t): return t * {read}\n"
    "def keep(t): return t\n@contextlib.contextmanager\ndef around():\n"
    f"    with {_SAVED}(keep, keep), {_SAVED}(pack, keep): yield",
    "function mode": _FUNCTIONS + "MODE = Functions()\ndef around(): return MODE",
    "function mode made anew": _FUNCTIONS + "def around(): return Functions()",
    "dispatch mode": _OPERATIONS + "MODE = Operations()\ndef around(): return MODE",
    "dispatch mode made anew": _OPERATIONS + "def around(): return Operations()",
    "autocast": "def around():\n"
    "    return torch.autocast('cpu', torch.bfloat16, enabled={read} != 1.5)",
    "forward hook of all": "def hook(module, args, result):\n"
    "    return result * {read} if type(module) is Leaf else None\n"
    + _HOOKED.format(register="nn.modules.module.register_module_forward_hook(hook)"),
    "forward pre-hook of all": "def hook(module, args):\n"
    "    return tuple(a * {read} for a in args) if type(module) is Leaf else None\n"
    + _HOOKED.format(register="nn.modules.module.register_module_forward_pre_hook(hook)"),
    "backward hook of all": "def hook(module, given, got):\n"
    "    is_leaf = type(module) is Leaf\n"
    "    return tuple(g * {read} if is_leaf and g is not None else g for g in given)\n"
    + _HOOKED.format(register="nn.modules.module.register_module_full_backward_hook(hook)"),
    "function of torch": _patched("torch", "sigmoid", "x"),
    "function of functional": _patched("nn.functional", "softplus", "x"),
    "forward of a class of torch": _patched("nn.Linear", "forward", "self, x"),
}

_NET = """
import torch
from torch import nn
from torch.nn import functional as F

{setup}

class Leaf(nn.Linear):
    def __init__(self):
        super().__init__({width}, {width})

    def forward(self, x):
        x = super().forward(x)
        return torch.sigmoid(x) * F.softplus(x){leaf}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Leaf(), Leaf()
        self.third, self.fourth = nn.Linear({width}, {width}), nn.Linear({width}, {width})

    def forward(self, x):
        x = self.second(torch.tanh(self.first(x)))
        return self.fourth(torch.tanh(self.third(x)))

VALUES = iter([1.5, 0.5, -0.0, 2.0, 0.25])

def put(net):
    value = next(VALUES)
    {put}

def body(model, x, y):
    loss = ((model(x) - y) ** 2).mean()
    model.backward(loss)
    return loss
"""
#: Of what is around: it is there from the last step on, or before the last step.
_LATE = """
CALLS = []
always = around
def around():
    import contextlib
    CALLS.append(0)
    return always() if {when} else contextlib.nullcontext()
"""
MOMENTS = {"read": "", "late": "len(CALLS) > 2", "early": "len(CALLS) < 3"}

_OPTIMIZER = """
def made(model, distributed):
    global OPTIMIZER
    OPTIMIZER = distributed(torch.optim.SGD(model.parameters(), lr=1.0{options}))
    {more}
"""
#: Objects of the library: code that makes them, how a number is read, how it is put.
OBJECTS = {
    "learning rate": (
        _OPTIMIZER.format(options="", more="pass"),
        "OPTIMIZER.param_groups[0]['lr']",
        "OPTIMIZER.param_groups[0]['lr'] = value",
    ),
    "group of the wrapped optimizer": (
        _OPTIMIZER.format(options=", momentum=0.0", more="pass"),
        "OPTIMIZER.param_groups[-1]['momentum']",
        "getattr(OPTIMIZER, 'optimizer', OPTIMIZER).param_groups[-1]['momentum'] = value",
    ),
    "default of an optimizer": (
        _OPTIMIZER.format(options="", more="pass"),
        "OPTIMIZER.defaults['lr']",
        "OPTIMIZER.defaults['lr'] = value",
    ),
    "attribute of an optimizer": (
        _OPTIMIZER.format(options="", more="OPTIMIZER.factor = 1.0"),
        "OPTIMIZER.factor",
        "OPTIMIZER.factor = value",
    ),
    "attribute that an optimizer gets": (
        _OPTIMIZER.format(options="", more="pass"),
        "getattr(OPTIMIZER, 'factor', 1.0)",
        "OPTIMIZER.factor = value",
    ),
    "attribute of the wrapped optimizer": (
        _OPTIMIZER.format(
            options="", more="getattr(OPTIMIZER, 'optimizer', OPTIMIZER).factor = 1.0"
        ),
        "OPTIMIZER.factor",
        "getattr(OPTIMIZER, 'optimizer', OPTIMIZER).factor = value",
    ),
    "state of an optimizer": (
        _OPTIMIZER.format(options="", more="OPTIMIZER.state['factor'] = 1.0"),
        "OPTIMIZER.state['factor']",
        "OPTIMIZER.state['factor'] = value",
    ),
    "scheduler": (
        _OPTIMIZER.format(
            options="",
            more="global SCHEDULER; SCHEDULER = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)",
        ),
        "SCHEDULER.get_last_lr()[0]",
        "OPTIMIZER.step(); SCHEDULER.step(); net.zero_grad()",
    ),
    "optimizer in an object": (
        "class Trainer: pass\nTRAINER = Trainer()\n"
        + _OPTIMIZER.format(options="", more="TRAINER.optimizers = [OPTIMIZER]"),
        "TRAINER.optimizers[0].param_groups[0]['lr']",
        "OPTIMIZER.param_groups[0]['lr'] = value",
    ),
    "attribute of the model": (
        "def made(model, distributed):\n    global MODEL\n"
        "    MODEL = model\n    MODEL.factor = 1.0",
        "MODEL.factor",
        "MODEL.factor = value",
    ),
    "attribute that the model gets": (
        "def made(model, distributed):\n    global MODEL\n    MODEL = model",
        "getattr(MODEL, 'factor', 1.0)",
        "MODEL.factor = value",
    ),
    "list of the model": (
        "def made(model, distributed):\n    global MODEL\n    MODEL = model\n"
        "    MODEL.settings = {'table': [1.0]}",
        "MODEL.settings['table'][0]",
        "MODEL.settings['table'][0] = value",
    ),
    "attribute of the user's model": (
        "def built(net): net.factor = 1.0\n"
        "def made(model, distributed):\n    global MODEL\n    MODEL = model",
        "MODEL.module.factor",
        "net.factor = value",
    ),
    "attribute of another module": (
        "def built(net): net.fourth.factor = net.first.factor = 1.0\n"
        "def made(model, distributed):\n    global MODEL\n    MODEL = model",
        "MODEL.module.fourth.factor * MODEL.module.first.factor",
        "net.fourth.factor = value; net.first.factor = value",
    ),
    "whether the model trains": (
        "def made(model, distributed):\n    global MODEL\n    MODEL = model",
        "(2.0 if MODEL.training else 3.0)",
        "MODEL.training = not MODEL.training",
    ),
}

#: Hooks of the nodes that add gradients up, which tensors do not know of.
NODES = {
    "hook of a node": (
        "def made(model, distributed):\n    global NODE\n    weight = model.module.first.weight\n"
        "    NODE = weight.expand_as(weight).grad_fn.next_functions[0][0]\n"
        "    NODE.register_prehook(lambda gradients: (gradients[0] * {read},))",
    ),
    "hook of a node after it": (
        "def made(model, distributed):\n    global NODE\n    weight = model.module.first.weight\n"
        "    NODE = weight.expand_as(weight).grad_fn.next_functions[0][0]\n"
        "    def scale(given, got): weight.grad.mul_({read})\n"
        "    NODE.register_hook(scale)",
    ),
    "hook of several gradients": (
        "def made(model, distributed):\n"
        "    weights = model.module.first.weight, model.module.second.weight\n"
        "    def scale(gradients):\n        for each in gradients: each.mul_({read})\n"
        "    torch.autograd.graph.register_multi_grad_hook(weights, scale)",
    ),
}

_SETTINGS = (
    "import operator, importlib, sys, types\nsettings = sys.modules['probe_made_up'] = "
    "types.ModuleType('probe_made_up')\nsettings.factor = 1.0; PARTS = ['fac', 'tor']\n"
    "sub = sys.modules['probe_made_up.sub'] = settings.sub = "
    "types.ModuleType('probe_made_up.sub')\n"
    "sub.factor = 1.0\nFACTOR = 1.0\n"
)
_NAME = "''.join(PARTS)"
_PUT = f"setattr(settings, {_NAME}, value)"
#: Names that are made up when they are read: code, how a number is read, how it is put.
MADE_UP = {
    "getattr": ("", f"getattr(settings, {_NAME})", _PUT),
    "getattr with a default": ("", f"getattr(settings, {_NAME}, 3.0)", _PUT),
    "getattr of another function": (
        "def fetch(obj, name): return getattr(obj, name)",
        f"fetch(settings, {_NAME})",
        _PUT,
    ),
    "getattr beside one of a constant": (
        "def fetch(): return getattr(settings, 'factory', 1.0) * getattr(settings, "
        f"{_NAME}) * len(getattr(PARTS, 'copy')())",
        "fetch()",
        _PUT,
    ),
    "getattr that a function is given": (
        "import functools",
        f"functools.reduce(getattr, [{_NAME}], settings)",
        _PUT,
    ),
    "vars": ("", f"vars(settings)[{_NAME}]", _PUT),
    "dict": ("", f"settings.__dict__[{_NAME}]", _PUT),
    "getattribute": ("", f"settings.__getattribute__({_NAME})", _PUT),
    "attrgetter": ("", f"operator.attrgetter({_NAME})(settings)", _PUT),
    "attrgetter made before": (
        f"GET = operator.attrgetter({_NAME})",
        "GET(settings)",
        _PUT,
    ),
    "module in an object": (
        "class Box: pass\nBOX = Box(); BOX.settings = settings",
        f"getattr(BOX.settings, {_NAME})",
        _PUT,
    ),
    "module in a module": (
        "",
        f"getattr(getattr(settings, 'su' + PARTS[1][:0] + 'b'), {_NAME})",
        f"setattr(sub, {_NAME}, value)",
    ),
    "import": (
        "",
        f"getattr(importlib.import_module('probe_' + 'made_up'[:0] + 'made_up'), {_NAME})",
        _PUT,
    ),
    "modules of sys": (
        "",
        f"getattr(sys.modules['_'.join(['probe', 'made', 'up'])], {_NAME})",
        _PUT,
    ),
    "globals": ("", f"globals()[{_NAME}.upper()]", f"globals()[{_NAME}.upper()] = value"),
    "eval": ("", f"eval({_NAME}.upper())", f"globals()[{_NAME}.upper()] = value"),
    "globals of a function": (
        "",
        f"put.__globals__[{_NAME}.upper()]",
        f"globals()[{_NAME}.upper()] = value",
    ),
    "list in a module": (
        "settings.table = [1.0]",
        "getattr(settings, 'ta' + PARTS[0][:0] + 'ble')[0]",
        "settings.table[0] = value",
    ),
    "object in a module": (
        "class Box: pass\nsettings.box = Box(); settings.box.factor = 1.0",
        "getattr(settings, 'b' + PARTS[0][:0] + 'ox').factor",
        "settings.box.factor = value",
    ),
    "attribute that comes late": (
        "",
        "getattr(settings, 'fact' + PARTS[0][:0] + 'ors', 1.0)",
        "settings.factors = value",
    ),
}


@dataclass(frozen=True)
class Around:
    """One script."""

    script: str
    puts: bool

    def outcome(self) -> str:
        """Runs it in this job; see ``small_scripts.outcome_of``."""

        def between(names: dict[str, Any], net: nn.Module, model: Any, number: int) -> None:
            if self.puts:
                names["put"](net)

        return outcome_of(self.script, between)


def _scripts() -> dict[str, Around]:
    found = {}
    for (name, surrounding), place, moment in itertools.product(
        SURROUNDINGS.items(), PLACES, MOMENTS
    ):
        if moment != "read" and place != "a global":
            continue
        top, read, put = PLACES[place]
        if moment != "read":
            read = "0.5"
        setup = f"{top}\n" + surrounding.format(read=read)
        if moment != "read":
            setup += _LATE.format(when=MOMENTS[moment])
        script = _NET.format(setup=setup, put=put, width=WIDTH, leaf="")
        found[f"{name}, {place}, {moment}"] = Around(script, moment == "read")
    for (name, (setup,)), place in itertools.product(NODES.items(), PLACES):
        top, read, put = PLACES[place]
        setup = f"{top}\n{setup.format(read=read)}"
        script = _NET.format(setup=setup, put=put, width=WIDTH, leaf="")
        found[f"{name}, {place}"] = Around(script, True)
    for kind, table in (("object", OBJECTS), ("made up", MADE_UP)):
        for name, (setup, read, put) in table.items():
            if kind == "made up":
                setup = _SETTINGS + setup
            script = _NET.format(setup=setup, put=put, width=WIDTH, leaf=f" * ({read})")
            found[f"{kind}: {name}"] = Around(script, True)
    return found


AROUND = _scripts()
