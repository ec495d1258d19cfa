"""A population of ways to use torch within a step that a recording could get wrong.

A use is code in some place of a small script: in the split model's forward, in a module that is
never split, in the body of the step, before the training, between the steps. Each is run as plain
PyTorch and with the library; losses, gradients and buffers must be the same, or the library must
refuse it with an error of its own. Long, since it is one table.
"""

# Code of scripts stands on one line.
# ruff: noqa: E501

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from small_scripts import WIDTH, losses_of, outcome_of
from torch import nn


@dataclass(frozen=True)
class Use:
    """Code of a script, by place.

    Attributes:
        top: at its top.
        init: at the end of the model's ``__init__``.
        glue: between two layers of the split model; ``x`` is the activation.
        late: the same, between two layers of another partition.
        leaf: in a layer; ``x`` is what it returns.
        body: before the model is called.
        call: calls the model; gives ``out``.
        loss: gives ``loss``.
        backward: asks for the gradients.
        built: after the model was built, before it is given to the library.
        between: between two steps; ``step`` counts them, ``model`` is the DistributedModel.
        layer: the class that a layer is derived from.
        more: parameters of the model's ``forward`` behind ``x``.
        keyed: it draws random numbers that go by the library's keys: they are not those of plain
            PyTorch, but the same with any number of partitions.
    """

    top: str = ""
    init: str = ""
    glue: str = ""
    late: str = ""
    leaf: str = ""
    body: str = ""
    call: str = "out = model(x)"
    loss: str = "loss = ((out - y) ** 2).mean()"
    backward: str = "model.backward(loss)"
    built: str = ""
    between: str = ""
    layer: str = "nn.Linear"
    more: str = ""
    keyed: bool = False

    def script(self) -> str:
        """Returns the code of the script."""

        def code(text: str, depth: int) -> str:
            return textwrap.indent(textwrap.dedent(text).strip() or "pass", "    " * depth)

        return f"""
import contextlib, copy, functools, random, weakref
import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, stateless
from torch.utils.checkpoint import checkpoint

{textwrap.dedent(self.top)}

class Layer({self.layer}):
    def forward(self, x):
        x = super().forward(x)
{code(self.leaf, 2)}
        return x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer({WIDTH}, {WIDTH}), Layer({WIDTH}, {WIDTH})
        self.third, self.fourth = Layer({WIDTH}, {WIDTH}), Layer({WIDTH}, {WIDTH})
{code(self.init, 2)}

    def forward(self, x{self.more}):
        x = torch.tanh(self.first(x))
{code(self.glue, 2)}
        x = torch.tanh(self.second(x))
        x = torch.tanh(self.third(x))
{code(self.late, 2)}
        return self.fourth(x)

def built(net):
{code(self.built, 1)}

def between(net, model, step):
{code(self.between, 1)}

def body(model, x, y):
{code(self.body, 1)}
{code(self.call, 1)}
{code(self.loss, 1)}
{code(self.backward, 1)}
    return loss
"""


_NORM = "self.norm = nn.BatchNorm1d(4)"
_ADAPTER = """
    class Adapted(nn.Linear):
        mode = 1.0
        def forward(self, x): return super().forward(x) * self.mode
"""
_COUNTING = """
    class Counting(nn.Linear):
        count = 0
        def forward(self, x):
            self.count += 1
            return super().forward(x) * self.count
"""
_SQUARE = """
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x
        @staticmethod
        def backward(ctx, g):
            x, = ctx.saved_tensors
            return 2 * g * x
"""
_BRANCH = """
    class Branch(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.pre, self.shared, self.post = nn.Linear(4, 4), shared, nn.Linear(4, 4)
        def forward(self, x): return self.post(self.shared(self.pre(x)))
"""
_RECURRENT = """
    def recurrent(layer, x):
        lengths = torch.tensor([1, 2], device="cpu")
        pack = nn.utils.rnn.pack_padded_sequence(
            torch.stack([x, -x]), lengths, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(layer(pack)[0], total_length=2)[0].sum(0)
"""

_SHOWN_BUFFER = "self.register_buffer('kept', torch.ones(4))"

USES = {
    # Hooks
    "hook of an activation": Use(glue="x.register_hook(lambda g: 2 * g)"),
    "hook of the output": Use(call="out = model(x); out.register_hook(lambda g: 3 * g)"),
    "hook of an activation in a leaf": Use(leaf="x.register_hook(lambda g: 2 * g)"),
    "hook of a parameter": Use(built="net.third.weight.register_hook(lambda g: 2 * g)"),
    "hook of a parameter in the step": Use(
        glue="self.third.weight.register_hook(lambda g: 0 * g) if self.training else None"
    ),
    "retain_grad": Use(glue="x.retain_grad(); self.kept = x"),
    "backward hook of the model": Use(
        built="net.register_full_backward_hook(lambda m, i, o: tuple(2 * g for g in i if g is not None) or None)"
    ),
    "backward hook of a layer": Use(
        built="net.third.register_full_backward_hook(lambda m, i, o: tuple(2 * g for g in i))"
    ),
    "backward pre-hook of the model": Use(
        built="net.register_full_backward_pre_hook(lambda m, o: tuple(2 * g for g in o))"
    ),
    "backward pre-hook of a layer": Use(
        built="net.second.register_full_backward_pre_hook(lambda m, o: tuple(2 * g for g in o))"
    ),
    "forward hook of a layer": Use(built="net.third.register_forward_hook(lambda m, i, o: 2 * o)"),
    "forward pre-hook of a layer": Use(
        built="net.third.register_forward_pre_hook(lambda m, i: (2 * i[0],))"
    ),
    "forward hook of the model": Use(built="net.register_forward_hook(lambda m, i, o: 2 * o)"),
    "forward hook added later": Use(
        between="net.third.register_forward_hook(lambda m, i, o: 2 * o)"
    ),
    "global forward hook later": Use(
        top="HANDLES = []",
        between="""
            HANDLES.append(nn.modules.module.register_module_forward_hook(
                lambda m, i, o: 2 * o if m is net.second else None)) if step == 1 else None
            HANDLES[0].remove() if step == 2 else None
        """,
    ),
    "hook of the distributed model": Use(
        between="model.register_forward_hook(lambda m, i, o: 2 * o) if hasattr(model, 'register_forward_hook') else net.register_forward_hook(lambda m, i, o: 2 * o)"
    ),
    "features of a hook": Use(
        top="FEATURES = []",
        built="net.second.register_forward_hook(lambda m, i, o: FEATURES.append(o))",
        body="FEATURES.clear()",
        loss="loss = ((out - y) ** 2).mean() + FEATURES[0].square().mean()",
    ),
    "features of every layer": Use(
        top="FEATURES = {}",
        built="""
            for name, layer in net.named_children():
                layer.register_forward_hook(lambda m, i, o, name=name: FEATURES.update({name: o}))
        """,
        loss="loss = ((out - y) ** 2).mean() + sum(f.square().mean() for f in FEATURES.values()); FEATURES.clear()",
    ),
    "losses in a list of the model": Use(
        top="LOSSES = []",
        leaf="LOSSES.append(x.square().mean())",
        loss="loss = ((out - y) ** 2).mean() + sum(LOSSES)",
        body="LOSSES.clear()",
    ),
    "losses in a shared config": Use(
        top="class Config: pass\nCONFIG = Config(); CONFIG.losses = []",
        init="self.config = self.second.config = self.third.config = CONFIG",
        leaf="self.config.losses.append(x.square().mean()) if hasattr(self, 'config') else None",
        loss="loss = ((out - y) ** 2).mean() + sum(CONFIG.losses); CONFIG.losses.clear()",
    ),
    "loss in an attribute of a layer": Use(
        leaf="self.extra = x.square().mean()",
        call="out = model(x); net = getattr(model, 'module', model)",
        loss="loss = ((out - y) ** 2).mean() + NET.second.extra + NET.third.extra",
    ),
    "number of calls in a shared list": Use(
        top="CALLS = []",
        leaf="CALLS.append(1)",
        loss="loss = ((out - y) ** 2).mean() * len(CALLS)",
    ),
    "shared counter": Use(
        top="class Config: count = 0\nCONFIG = Config()",
        init="self.config = self.second.config = CONFIG",
        leaf="""
            if hasattr(self, 'config'): self.config.count += 1
        """,
        late="x = x * self.config.count",
    ),
    "saved tensors hooks": Use(
        glue="""
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
                x = x * x
        """
    ),
    "saved tensors hooks around the model": Use(
        call="""
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
                out = model(x)
        """
    ),
    # Parts of a model
    "parts of the model": Use(
        call="out = NET.fourth(torch.tanh(NET.third(torch.tanh(NET.second(NET.first(x))))))"
    ),
    "parts of the model, then the model": Use(call="out = model(torch.tanh(NET.fourth(x)))"),
    "some parts of the model": Use(call="out = NET.third(torch.tanh(NET.second(x)))"),
    "parameters of the model": Use(call="out = x @ NET.second.weight + NET.second.bias"),
    "a parameter as the loss": Use(
        init="self.level = nn.Parameter(torch.tensor(0.5))", call="out = x", loss="loss = NET.level"
    ),
    "a parameter that is added to the loss": Use(
        init="self.level = nn.Parameter(torch.tensor(0.5))",
        loss="loss = torch.tensor(0.0); loss += ((out - y) ** 2).mean(); loss += NET.level ** 2",
    ),
    "a penalty of parameters": Use(
        loss="loss = ((out - y) ** 2).mean() + 0.1 * NET.third.weight.square().sum()"
    ),
    # Annotations, which compute nothing
    "record_function": Use(
        glue="""
            with torch.profiler.record_function("between"):
                x = torch.relu(x * 2)
        """,
        call="""
            with torch.autograd.profiler.record_function("model", "x"):
                out = model(x)
        """,
        backward="""
            with torch.profiler.record_function("backward"):
                model.backward(loss)
        """,
    ),
    "a decorator that annotates": Use(
        top="@torch.profiler.record_function('f')\ndef f(x): return torch.sin(x)", late="x = f(x)"
    ),
    "anomalies": Use(
        glue="""
            with torch.autograd.detect_anomaly(check_nan=False), torch.autograd.set_multithreading_enabled(False):
                x = torch.sin(x)
        """,
    ),
    # Modes
    "autocast": Use(
        call="""
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
            out = out.float()
        """
    ),
    "autocast switched off inside": Use(
        glue="""
            with torch.autocast("cpu", enabled=False):
                x = x.float() @ x.float().t() @ x.float()
        """,
        call="""
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
            out = out.float()
        """,
    ),
    "autocast switched off for the late half": Use(
        late="""
            with torch.autocast("cpu", enabled=False):
                x = F.linear(x.float(), self.third.weight)
        """,
        call="""
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
            out = out.float()
        """,
    ),
    "autocast in a leaf": Use(
        leaf="""
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = (x @ x.t() @ x).float()
        """
    ),
    "type of a leaf's result": Use(
        init="self.second.half = False",
        leaf="x = x.bfloat16() if getattr(self, 'half', False) else x",
        glue="x = x",
        late="x = x.float()",
        between="net.second.half = not net.second.half",
    ),
    "default type between steps": Use(
        late="x = x + torch.ones(4) * 0.1",
        between="torch.set_default_dtype(torch.float64 if step == 1 else torch.float32)",
    ),
    "default type in the step": Use(
        late="""
            torch.set_default_dtype(torch.float64)
            x = (x + torch.full((4,), 0.1)).float()
            torch.set_default_dtype(torch.float32)
        """
    ),
    "no_grad in the middle": Use(
        glue="""
            with torch.no_grad():
                scale = x.abs().mean()
            x = x * scale
        """
    ),
    "enable_grad in no_grad": Use(
        late="""
            with torch.no_grad():
                with torch.enable_grad():
                    x = x * 2
        """
    ),
    "inference mode in the middle": Use(
        glue="""
            with torch.inference_mode():
                scale = x.detach().abs().mean()
            x = x * scale.clone()
        """
    ),
    "detach": Use(late="x = x + x.detach()"),
    "train and eval in a step": Use(
        init=_NORM,
        glue="""
            x = self.norm(x)
            self.norm.eval()
            x = self.norm(x)
            self.norm.train()
        """,
    ),
    "eval of a layer in the body": Use(
        init="self.norm = nn.BatchNorm1d(4); self.drop = nn.Dropout(0.5)",
        late="x = self.norm(x)",
        body="NET.norm.train(not NET.norm.training)",
    ),
    "eval of an early layer in the body": Use(
        init="self.norm = nn.BatchNorm1d(4)",
        glue="x = self.norm(x)",
        body="NET.norm.train(not NET.norm.training)",
    ),
    # State of leaves
    "adapter switched between calls": Use(
        top=_ADAPTER,
        layer="Adapted",
        glue="""
            self.third.mode = 2.0
            x = self.third(x)
            self.third.mode = 1.0
        """,
    ),
    "attribute that a leaf reads": Use(
        top=_ADAPTER,
        layer="Adapted",
        glue="self.third.mode = 0.5 if self.third.mode == 1.0 else 1.0",
    ),
    "attribute that a leaf reads, once": Use(
        top=_ADAPTER, layer="Adapted", glue="self.third.mode = 0.5"
    ),
    "leaf that counts": Use(top=_COUNTING, layer="Counting"),
    "leaf that counts, twice": Use(top=_COUNTING, layer="Counting", late="x = self.second(x)"),
    "count of a leaf read in glue": Use(
        top=_COUNTING, layer="Counting", late="x = x / self.second.count"
    ),
    "norm": Use(init=_NORM, late="x = self.norm(x)"),
    "norm, twice": Use(init=_NORM, glue="x = self.norm(x)", late="x = self.norm(x)"),
    "spectral norm": Use(built="parametrizations.spectral_norm(net.third)"),
    "spectral norm, twice": Use(
        built="parametrizations.spectral_norm(net.third)", glue="x = self.third(x)"
    ),
    "weight norm": Use(built="parametrizations.weight_norm(net.third)"),
    "orthogonal": Use(built="parametrizations.orthogonal(net.third)"),
    "dropout in eval": Use(init="self.drop = nn.Dropout(0.5).eval()", late="x = self.drop(x)"),
    "buffer of another rank": Use(
        init="self.fourth.register_buffer('scale', torch.tensor(2.0))",
        glue="x = x * self.fourth.scale",
    ),
    "buffer of the first rank": Use(
        init="self.first.register_buffer('scale', torch.tensor(2.0))",
        late="x = x * self.first.scale",
    ),
    "statistics of a leaf read in glue": Use(
        init=_NORM, glue="x = self.norm(x)", late="x = x * self.norm.running_var.mean()"
    ),
    "statistics of a late leaf read early": Use(
        init=_NORM, glue="x = x * self.norm.running_var.mean()", late="x = self.norm(x)"
    ),
    "number of batches of a norm": Use(
        init=_NORM, glue="x = self.norm(x)", late="x = x * self.norm.num_batches_tracked"
    ),
    "buffer updated in glue": Use(
        init="self.register_buffer('average', torch.zeros(4))",
        late="self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1); x = x + self.average",
    ),
    "buffer updated in glue, not read": Use(
        init="self.register_buffer('average', torch.zeros(4))",
        late="self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)",
    ),
    "buffer replaced in glue": Use(
        init="self.register_buffer('average', torch.zeros(4))",
        late="self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)",
    ),
    "buffer counted in glue": Use(
        init="self.register_buffer('steps', torch.zeros(()))",
        late="self.steps += 1; x = x * self.steps",
    ),
    "buffer of a leaf counted in it": Use(
        init="self.third.register_buffer('steps', torch.zeros(()))",
        leaf="""
            if hasattr(self, 'steps'):
                self.steps += 1
                x = x * self.steps
        """,
    ),
    "buffer of a leaf set in glue": Use(
        init="self.third.register_buffer('steps', torch.zeros(()))",
        glue="self.third.steps += 1",
        leaf="x = x * (1 + self.steps) if hasattr(self, 'steps') else x",
    ),
    "memory of an activation": Use(
        init="self.memory = None",
        late="x = x if self.memory is None else x + self.memory; self.memory = x.detach()",
    ),
    "memory of an activation in a leaf": Use(
        leaf="""
            old = getattr(self, 'memory', None)
            self.memory = x.detach()
            x = x if old is None else x + 0.1 * old
        """
    ),
    "parameter changed in glue": Use(
        glue="""
            with torch.no_grad():
                self.third.weight.mul_(0.99)
        """
    ),
    "parameter changed in a leaf": Use(
        leaf="""
            with torch.no_grad():
                self.bias.clamp_(max=0.01)
        """
    ),
    "parameter changed in the body": Use(
        body="""
            with torch.no_grad():
                NET.second.bias.add_(0.01)
        """
    ),
    # Inputs
    "input changed in place": Use(
        body="x = x.mul_(2)", loss="loss = ((out - y) ** 2).mean() + x.mean()"
    ),
    "input changed and used again": Use(
        body="z = x; x.add_(1)", loss="loss = ((out - y) ** 2).mean() * z.mean()"
    ),
    "target changed after the model": Use(call="out = model(x); y.mul_(0.5)"),
    "other input changed in place": Use(
        body="SHARED.add_(1); x = x * SHARED", top="SHARED = torch.ones(())"
    ),
    "data of an activation": Use(glue="x.data = x.data * 2"),
    "data of a parameter": Use(body="NET.third.weight.data.mul_(0.9)"),
    "data of a parameter replaced": Use(
        between="net.third.weight.data = net.third.weight.data * 0.5"
    ),
    "input that requires a gradient": Use(
        body="x.requires_grad_()", loss="loss = ((out - y) ** 2).mean()"
    ),
    "gradient penalty": Use(
        body="x.requires_grad_()",
        loss="g, = torch.autograd.grad(out.sum(), x, create_graph=True); loss = ((out - y) ** 2).mean() + g.square().sum()",
    ),
    "gradient of an activation": Use(
        late="z = x * x; g, = torch.autograd.grad(z.sum(), x, create_graph=True); x = x + g"
    ),
    "gradient, unused": Use(
        late="g, = torch.autograd.grad((x * x).sum(), self.first.weight, allow_unused=True); x = x if g is None else x + g.sum()"
    ),
    "gradient, materialized": Use(
        late="g, = torch.autograd.grad((x * x).sum(), self.first.weight, materialize_grads=True, retain_graph=True); x = x + g.sum()"
    ),
    "gradient of a parameter of one's own": Use(
        late="g, = torch.autograd.grad((F.linear(x, self.third.weight)).sum(), self.third.weight, retain_graph=True); x = x + g.sum()"
    ),
    "functional vjp": Use(
        late="z, pull = torch.func.vjp(torch.sin, x); x = x + pull(torch.ones_like(z))[0]"
    ),
    "functional grad": Use(late="x = x + torch.func.grad(lambda a: a.square().sum())(x)"),
    "vmap": Use(late="x = torch.vmap(lambda row: row * row.sum())(x)"),
    "jvp": Use(late="x = x + torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]"),
    "jacobian in a leaf": Use(leaf="x = x + torch.func.jacrev(lambda a: a.square().sum())(x)"),
    "grad of a parameter read": Use(
        backward="model.backward(loss); global_norm = NET.third.weight.grad",
        loss="loss = ((out - y) ** 2).mean()",
    ),
    "grad of a parameter changed": Use(
        backward="model.backward(loss); NET.third.weight.grad.mul_(2)"
    ),
    "zero_grad in the step": Use(body="NET.zero_grad()"),
    "requires_grad switched in the step": Use(
        body="NET.second.weight.requires_grad_(not NET.second.weight.requires_grad)"
    ),
    "requires_grad switched between steps": Use(
        between="net.second.weight.requires_grad_(step % 2 == 0)"
    ),
    # What else trains
    "head outside": Use(top="HEAD = nn.Linear(4, 4)", loss="loss = ((HEAD(out) - y) ** 2).mean()"),
    "frozen head outside": Use(
        top="HEAD = nn.Linear(4, 4).requires_grad_(False)",
        loss="loss = ((HEAD(out) - y) ** 2).mean()",
    ),
    "norm outside": Use(
        top="HEAD = nn.BatchNorm1d(4, affine=False)", loss="loss = ((HEAD(out) - y) ** 2).mean()"
    ),
    "parameter outside": Use(
        top="SCALE = nn.Parameter(torch.ones(()))", loss="loss = ((out * SCALE - y) ** 2).mean()"
    ),
    "parameter outside, detached": Use(
        top="SCALE = nn.Parameter(torch.full((), 2.0))",
        loss="loss = ((out * SCALE.detach() - y) ** 2).mean()",
    ),
    "tensor outside written": Use(
        top="STATE = torch.zeros(4)",
        loss="STATE.add_(out.detach().mean(0)); loss = ((out - y) ** 2).mean()",
    ),
    "teacher": Use(
        built="net.teacher = copy.deepcopy(net.second).requires_grad_(False)",
        late="x = x + 0.1 * self.teacher(x)",
    ),
    "teacher outside": Use(
        top="torch.manual_seed(9); TEACHER = nn.Linear(4, 4).requires_grad_(False)",
        loss="loss = ((out - TEACHER(x)) ** 2).mean()",
    ),
    # Structure
    "functional_call of a layer": Use(
        late="x = torch.func.functional_call(self.third, {'weight': self.third.weight * 2}, (x,))"
    ),
    "functional_call of the model": Use(
        call="out = torch.func.functional_call(NET, {n: 2 * p for n, p in NET.named_parameters()}, (x,))"
    ),
    "parameter registered later": Use(
        between="net.extra = nn.Parameter(torch.full((4,), 0.5)) if step == 1 else net.extra",
        late="x = x * self.extra if hasattr(self, 'extra') else x",
    ),
    "buffer registered later": Use(
        between="net.register_buffer('extra', torch.full((4,), 0.5)) if step == 1 else None",
        late="x = x * self.extra if hasattr(self, 'extra') else x",
    ),
    "module swapped": Use(
        between="torch.manual_seed(4); net.third = nn.Linear(4, 4) if step == 1 else net.third"
    ),
    "module replaced by an activation": Use(
        between="net.third = nn.Identity() if step == 1 else net.third"
    ),
    "module added": Use(
        between="""
            torch.manual_seed(4)
            net.more = nn.Linear(4, 4) if step == 1 else net.more
        """,
        late="x = self.more(x) if hasattr(self, 'more') else x",
    ),
    "weights tied": Use(built="net.third.weight = net.first.weight"),
    "weights tied later": Use(between="net.third.weight = net.first.weight"),
    "weight in glue": Use(late="x = F.linear(x, self.first.weight)"),
    "weight in glue, far": Use(glue="x = F.linear(x, self.fourth.weight)"),
    "parameter list": Use(
        init="self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])",
        glue="x = x * self.scales[0]",
        late="x = x * self.scales[1]",
    ),
    "attribute tensor": Use(init="self.table = torch.arange(4.0)", late="x = x + self.table"),
    "attribute tensor, replaced then written": Use(
        init="self.table = torch.arange(4.0)",
        late="x = x + self.table",
        between="""
            if step == 1: net.table = torch.arange(4.0)
            else: net.table.mul_(2)
        """,
    ),
    "attribute tensor of a leaf": Use(
        init="self.third.table = torch.arange(4.0)",
        leaf="x = x + self.table if hasattr(self, 'table') else x",
        between="net.third.table.mul_(2)",
    ),
    "global tensor in a leaf": Use(
        top="TABLE = torch.arange(4.0)", leaf="x = x + TABLE", between="TABLE.mul_(2)"
    ),
    "global tensor written in glue, read in a leaf": Use(
        top="TABLE = torch.arange(4.0)", leaf="x = x + TABLE", glue="TABLE.mul_(2)"
    ),
    "tensor from NumPy": Use(
        top="ARRAY = numpy.ones(4, dtype=numpy.float32)",
        late="x = x * torch.from_numpy(ARRAY)",
        between="ARRAY[:] = step",
    ),
    "model called twice": Use(call="out = model(x); out = model(out)"),
    "two losses": Use(backward="model.backward(loss); model.backward((out ** 2).mean())"),
    "loss from a part": Use(loss="loss = (out[:, :2] - y[:, :2]).abs().max()"),
    # What plain PyTorch is given counts by its share of the batch, as here.
    "backward of torch": Use(
        backward="torch.autograd.backward(loss * getattr(model, 'weight', 1.0))"
    ),
    "vector backward": Use(backward="model.backward(out, torch.ones_like(out) / out.numel())"),
    # Operations
    "in-place operations": Use(late="x = x * 1; x.relu_(); x.add_(1); x.t_(); x.t_()"),
    "views written": Use(late="x = x.clone(); x[:, 0] = 0; x[:, 1:].mul_(2); x.view(-1)[0] += 1"),
    "index_put": Use(late="x = x.clone(); x[torch.tensor([0, 1]), torch.tensor([1, 0])] = 0.5"),
    "scatter": Use(late="x = x.scatter(1, torch.zeros(x.shape[0], 1, dtype=torch.long), 0.5)"),
    "out argument": Use(
        late="with_out = torch.empty(0); torch.add(x.detach(), 1, out=with_out); x = x + with_out"
    ),
    **{
        f"{name} to an out argument": Use(
            late=f"z = given * 10; torch.{call}, out=z); x = x + z.mean()",
            more=", given",
            call="out = model(x, x * 0.1 + 0.5)",
        )
        for name, call in {
            "a selection": "masked_select(given, given > 0.5",
            "a constant selection": "masked_select(torch.ones(2), torch.tensor([True, False])",
        }.items()
    },
    "resize": Use(late="z = torch.zeros(2); z.resize_(4).fill_(0.5); x = x + z"),
    "squeeze in place": Use(late="z = x.unsqueeze(0).clone(); z.squeeze_(0); x = z"),
    "set_": Use(late="z = torch.zeros(1); z.set_(torch.full((4,), 2.0)); x = x * z"),
    "swap of views": Use(late="a, b = x.chunk(2, 1); x = torch.cat([b, a], 1)"),
    "custom function": Use(top=_SQUARE, late="x = Square.apply(x)"),
    "custom function in a leaf": Use(top=_SQUARE, leaf="x = Square.apply(x)"),
    "checkpoint": Use(late="x = checkpoint(lambda a: self.third(a) * 2, x, use_reentrant=False)"),
    "checkpoint, reentrant": Use(late="x = checkpoint(self.third, x, use_reentrant=True)"),
    "complex numbers": Use(late="x = torch.fft.ifft(torch.fft.fft(x)).real"),
    "double": Use(late="x = x.double().sin().float()"),
    "where": Use(late="x = torch.where(x > 0, x, 0.1 * x)"),
    "sort and topk": Use(late="x = x.sort(1).values + x.topk(1).values"),
    "einsum": Use(late="x = torch.einsum('ij,kj->ik', x, self.third.weight)"),
    "unbind and stack": Use(
        late="x = torch.stack([each * i for i, each in enumerate(x.unbind(1))], 1)"
    ),
    "shape in Python": Use(late="x = x * (x.shape[0] + x.numel() + len(x))"),
    "mask of the input": Use(
        body="x = x * (x > 0)", loss="loss = ((out - y)[x[:, 0] > 0] ** 2).sum()"
    ),
    "branch on the input": Use(body="x = x * 2 if x.mean() > 0 else x"),
    "number of the input": Use(body="x = x * float(x.abs().max())"),
    "list of the input": Use(body="x = x * sum(x[0].tolist())"),
    "NumPy of the input": Use(body="x = x * float(x.numpy().max())"),
    "unique of the input": Use(body="x = x * len((x > 0).unique())"),
    "nonzero of the input": Use(body="rows = (x[:, 0] > 0).nonzero(); x = x + rows.numel()"),
    "item of an activation": Use(late="x = x * x.abs().max().item()"),
    "item of an activation in a leaf": Use(leaf="x = x * x.abs().max().item()"),
    "branch on an activation in a leaf": Use(leaf="x = x if x.sum() > 0 else 2 * x"),
    "decision after a leaf with a constant": Use(
        top="ARRAY = numpy.ones(4, dtype=numpy.float32)",
        leaf="x = x * torch.from_numpy(ARRAY)",
        loss="loss = ((out - y) ** 2).mean() * (2 if (y < 100).all() else 1)",
    ),
    "NumPy of an activation in a leaf": Use(leaf="x = x * float(x.detach().numpy().max())"),
    "assertion on an activation": Use(late="assert torch.isfinite(x).all()"),
    "printed activation": Use(late="text = str(x.shape) + repr(x.dtype)"),
    # Random numbers
    "noise in glue": Use(late="x = x + 0 * torch.randn_like(x)"),
    "own generator": Use(
        top="GENERATOR = torch.Generator(torch.get_default_device())",
        body="GENERATOR.manual_seed(3)",
        late="x = x + torch.randn(x.shape, generator=GENERATOR)",
    ),
    "own generator going on": Use(
        top="GENERATOR = torch.Generator(torch.get_default_device()).manual_seed(3)",
        late="x = x + torch.randn(x.shape, generator=GENERATOR)",
    ),
    "own generator of a leaf": Use(
        init="self.third.generator = torch.Generator(torch.get_default_device()).manual_seed(3)",
        leaf="x = x + torch.randn(x.shape, generator=self.generator) if hasattr(self, 'generator') else x",
    ),
    "seed in the step": Use(late="torch.manual_seed(5); x = x + torch.randn(x.shape)"),
    "seed in a leaf": Use(leaf="torch.manual_seed(5); x = x + torch.randn(x.shape)"),
    "fork_rng": Use(
        late="""
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(5)
                x = x + torch.randn(x.shape)
        """,
    ),
    "gradients behind dropout": Use(
        keyed=True,
        leaf="x = nn.functional.dropout(x, 0.3)",
        body="x.requires_grad_()",
        loss="""
        g, = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = ((model(x + 0.1 * g) - y) ** 2).mean() + g.square().sum()
        """,
    ),
    "Python's random numbers": Use(
        keyed=True, body="random.seed(3)", late="x = x * random.random()"
    ),
    "NumPy's random numbers": Use(
        keyed=True, body="numpy.random.seed(3)", late="x = x * float(numpy.random.rand())"
    ),
    "a question behind dropout": Use(
        keyed=True,
        init="self.left_out = nn.Dropout(0.5)",
        late="""
        x = nn.functional.dropout(self.left_out(x), 0.3)
        x = x * 2 if x.mean() > 0 else x * float(x.detach().sum())
        """,
    ),
    "NumPy's random array": Use(
        keyed=True,
        body="numpy.random.seed(3)",
        late="x = x * torch.from_numpy(numpy.random.rand(4).astype(numpy.float32)).to(x.device)",
    ),
    "Python's random numbers in a leaf": Use(leaf="random.seed(3); x = x * random.random()"),
    "NumPy generator": Use(
        top="GENERATOR = numpy.random.default_rng(3)", late="x = x * float(GENERATOR.random())"
    ),
    "NumPy generator in a leaf": Use(
        top="GENERATOR = numpy.random.default_rng(3)", leaf="x = x * float(GENERATOR.random())"
    ),
    "older NumPy generator": Use(
        top="GENERATOR = numpy.random.RandomState(3)", late="x = x * float(GENERATOR.rand())"
    ),
    "older NumPy generator in a leaf": Use(
        top="GENERATOR = numpy.random.RandomState(3)", leaf="x = x * float(GENERATOR.rand())"
    ),
    "older NumPy generator of a module": Use(
        init="self.draws = numpy.random.RandomState(3)", late="x = x * float(self.draws.rand())"
    ),
    "weak proxy of a module": Use(
        init="self.other = [weakref.proxy(self.first)]",
        late="x = x * (1 + self.other[0].training)",
    ),
    "cumulative statistics in a block": Use(
        top="""
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 4)
                self.norm = nn.BatchNorm1d(4, momentum=None)  # divides by float(a counter)

            def forward(self, x):
                return self.norm(self.linear(x))
        """,
        init="self.first = Block()",
    ),
    "counter that a block divides by": Use(
        top="""
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 4)
                self.register_buffer("calls", torch.zeros((), dtype=torch.long))

            def forward(self, x):
                self.calls.add_(1)
                return self.linear(x) / float(self.calls)
        """,
        init="self.first = Block()",
    ),
    "cached function in leaves": Use(
        top="""
        @functools.lru_cache
        def ramp(rows):
            return torch.linspace(0, 1, rows)[:, None]
        """,
        leaf="x = x + ramp(x.shape[0])",
    ),
    "cached function in glue": Use(
        top="""
        @functools.cache
        def ramp(rows):
            return [torch.linspace(0, 1, rows)[:, None]]
        """,
        glue="x = x + ramp(x.shape[0])[0]",
        late="x = x * ramp(x.shape[0])[0]",
    ),
    "layer dropped by a counter": Use(
        top="COUNT = [0]",
        glue="COUNT[0] += 1; x = self.third(x) if COUNT[0] % 2 else x",
    ),
    "exception caught in the step": Use(
        late="""
            try:
                x = x @ torch.ones(3, 3)
            except RuntimeError:
                x = x * 2
        """
    ),
    "exception of a leaf caught": Use(
        late="""
            try:
                x = self.third(x[:, :2])
            except RuntimeError:
                x = x * 2
        """
    ),
    "generator expression": Use(late="x = sum(layer(x) for layer in (self.second, self.third))"),
    "module in a dict": Use(
        init="self.layers = nn.ModuleDict({'a': nn.Linear(4, 4), 'b': nn.Linear(4, 4)})",
        late="x = self.layers['b' if self.training else 'a'](x)",
        between="net.train(step % 2 == 0)",
    ),
    "lambda shared with a leaf": Use(
        top="FACTOR = [1.0]\nscale = lambda x: x * FACTOR[0]",
        leaf="x = scale(x)",
        glue="FACTOR[0] += 1",
    ),
    "tensor subclass": Use(
        top="class Tagged(torch.Tensor): pass",
        late="x = x.as_subclass(Tagged).sin().as_subclass(torch.Tensor)",
    ),
    "penalty on a layer that keeps statistics": Use(
        init="self.norm = nn.BatchNorm1d(4)",
        late="x = self.norm(x)",
        loss="loss = ((out - y) ** 2).mean() + sum(p.square().sum() for p in NET.parameters())",
    ),
    "copy of the model": Use(between="other = copy.deepcopy(net)"),
    "conjugate across a cut": Use(
        init="self.second, self.third = (nn.Linear(4, 4, dtype=torch.cfloat) for _ in range(2))",
        glue="x = self.third(self.second(torch.fft.fft(x).conj()).conj()).conj()\n"
        "return self.fourth(x.real + x.conj().imag)",
    ),
    "buffer changed in glue and used": Use(
        init="self.register_buffer('n', torch.zeros(4))",
        glue="self.n.add_(x.detach().mean(0)); x = x * self.n",
    ),
    "decision on a buffer": Use(
        init="self.register_buffer('n', torch.ones(4))",
        late="x = x * 2 if bool((self.n > 0).all()) else x",
    ),
    "number of a buffer": Use(
        init="self.register_buffer('n', torch.ones(()))", late="x = x * self.n.item()"
    ),
    "decision on a buffer in a leaf": Use(
        top="""
            class Counting(nn.Linear):
                def __init__(self, *args):
                    super().__init__(*args)
                    self.register_buffer("n", torch.zeros(()))
        """,
        layer="Counting",
        leaf="x = x * 2 if self.n > 1 else x\nself.n += 1",
    ),
    "decision on a buffer of a leaf": Use(
        init=_NORM,
        late="x = self.norm(x); x = x * 2 if self.norm.num_batches_tracked > 2 else x",
    ),
    "decision on a parameter": Use(late="x = x * 2 if self.first.weight.sum() > 0 else x"),
    "norm without momentum": Use(
        init="self.norm = nn.BatchNorm1d(4, momentum=None)", late="x = self.norm(x)"
    ),
    "sparse in glue": Use(late="x = torch.sparse.mm(torch.eye(4).to_sparse(), x.t()).t()"),
    "sparse in a leaf": Use(leaf="x = torch.sparse.mm(torch.eye(4).to_sparse(), x.t()).t()"),
    "control flow of torch": Use(
        late="x = torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a * 3, (x,))"
    ),
    "error of a question caught": Use(
        body="""
            try:
                y.view(-1)[x.abs().max().int() + 1000]
            except IndexError:
                x = x * 2
        """
    ),
    "output kept by its module": Use(leaf="self.seen = x"),
    "output kept by its module and used": Use(
        leaf="self.seen = x", late="x = x + self.second.seen"
    ),
    "module wrapped by the first forward": Use(
        top="""
            class Other(nn.Module):
                def __init__(self, inner):
                    super().__init__()
                    self.inner = inner
                def forward(self, x):
                    return self.inner(x) * 2
        """,
        glue="""
            if not isinstance(self.second, Other):
                self.second = Other(self.second)
        """,
    ),
    "module made by the first forward": Use(
        glue="""
            if not hasattr(self, "is_ready"):
                self.is_ready = True
                new = nn.Linear(4, 4)
                new.load_state_dict(self.second.state_dict())
                self.second = new
        """
    ),
    "value set once": Use(
        glue="""
            if not hasattr(self, "width"):
                self.width = x.shape[1]
            x = x * self.width
        """
    ),
    "sizes of an activation in a leaf": Use(
        leaf="n = (x > 0).sum().item(); x = torch.cat(x.view(-1).split([n, x.numel() - n]))"
        ".view(x.shape)"
    ),
    "sizes of an activation in glue": Use(
        late="n = (x > 0).sum().item(); x = torch.cat(x.view(-1).split([n, x.numel() - n]))"
        ".view(x.shape)"
    ),
    "sizes of an activation around a layer": Use(
        top="""
            class Experts(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.inner = nn.Linear(4, 4)
                def forward(self, x):
                    counts = [(x > 0).sum().item(), (x <= 0).sum().item()]
                    return self.inner(torch.cat(x.view(-1).split(counts)).view(x.shape))
        """,
        init="self.third = Experts()",
    ),
    "clipped in the step": Use(
        backward="model.backward(loss); torch.nn.utils.clip_grad_norm_(NET.parameters(), 1.0)"
    ),
    "buffers in a list": Use(
        built="""
            for each in (net.second, net.third):
                each.register_buffer('table', torch.arange(4.0))
                each.all = [each.table]
        """,
        leaf="x = x + self.all[0] if hasattr(self, 'all') else x",
    ),
    "weights in a list, as of an LSTM": Use(
        init="self.third.all = [self.third.weight, self.third.bias]",
        leaf="x = F.linear(x, *self.all) if hasattr(self, 'all') else x",
    ),
    "decision beside what is no number": Use(
        init="self.third.kept = torch.full((4,), float('nan'))",
        leaf="x = x if x.sum() > -1e9 else -x",
    ),
    "decision beside a sparse tensor": Use(
        init="self.third.kept = torch.eye(4).to_sparse()",
        leaf="x = x if x.sum() > -1e9 else -x",
    ),
    "decision about a sparse tensor": Use(
        init="self.third.kept = torch.eye(4).to_sparse()",
        leaf="kept = getattr(self, 'kept', x); x = x if kept.mul_(2).sum() > -1e9 else -x",
    ),
    "decision and a tensor that grows": Use(
        init="self.third.all = [torch.zeros(0, 4)]",
        leaf="""
            if hasattr(self, 'all') and x.sum() > -1e9:
                self.all[0].data = torch.cat([self.all[0].data, x.detach()[:1]])
                x = x + self.all[0].mean(0)
        """,
    ),
    "memory of an activation asked for": Use(late="x = x * (1 if x.data_ptr() else 2)"),
    "requires_grad_ in the step": Use(body="NET.first.weight.requires_grad_(False)"),
    "average assigned anew": Use(
        init="self.second.register_buffer('mean', torch.zeros(4))",
        leaf="""
            if hasattr(self, 'mean'):
                self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
                x = x - self.mean
        """,
    ),
    "layer of two parents": Use(
        top=_BRANCH,
        init="shared = nn.Linear(4, 4); self.left, self.right = Branch(shared), Branch(shared)",
        glue="x = self.left(x)",
        late="x = self.right(x)",
    ),
    "activation with a weight in all blocks": Use(
        top=_BRANCH,
        init="shared = nn.PReLU(); self.left, self.right = Branch(shared), Branch(shared)",
        glue="x = self.left(x)",
        late="x = self.right(x)",
    ),
    "penalty of a router": Use(
        top="""
            class Router(nn.Linear):
                def forward(self, x):
                    rows, = torch.where(x.sum(-1) > 0)
                    out = torch.zeros_like(x).index_add(0, rows, super().forward(x[rows]))
                    self.penalty = out.square().mean()
                    return x + out
        """,
        init="self.third = Router(4, 4)",
        loss="loss = ((out - y) ** 2).mean() + NET.third.penalty",
    ),
    "view of a buffer left in an attribute": Use(
        top="""
            class Leaving(nn.Linear):
                def forward(self, x):
                    x = super().forward(x)
                    self.kept.mul_(0.5).add_(x.detach().mean(0))
                    self.last = self.kept[:4]
                    return x
        """,
        init="self.leaving = Leaving(4, 4); self.leaving.register_buffer('kept', torch.ones(4))",
        glue="x = self.leaving(x)",
        late="x = x + self.leaving.last",
    ),
    "dlpack of a buffer, written": Use(
        init=_SHOWN_BUFFER, glue="torch.from_dlpack(self.kept).add_(0.1)"
    ),
    "dlpack of a buffer of a layer, written": Use(
        top="""
            class Sharing(nn.Linear):
                def forward(self, x):
                    torch.from_dlpack(self.kept).add_(0.1)
                    return super().forward(x) * self.kept
        """,
        init="self.sharing = Sharing(4, 4); self.sharing.register_buffer('kept', torch.ones(4))",
        late="x = self.sharing(x)",
    ),
    "array of a buffer, read": Use(
        init=_SHOWN_BUFFER, glue="x = x * float(self.kept.numpy().sum())"
    ),
    "array of a buffer, written": Use(init=_SHOWN_BUFFER, late="self.kept.numpy()[:] += 0.1"),
    "array of a buffer, written by a tensor": Use(
        init=_SHOWN_BUFFER, glue="torch.from_numpy(self.kept.numpy()).add_(0.1)"
    ),
    "array of a buffer of a layer, written": Use(
        top="""
            class Adding(nn.Linear):
                def forward(self, x):
                    self.kept.detach().numpy()[:] += 0.1
                    return super().forward(x) * self.kept
        """,
        init="self.adding = Adding(4, 4); self.adding.register_buffer('kept', torch.ones(4))",
        late="x = self.adding(x)",
    ),
    "two packed recurrent layers": Use(
        top=_RECURRENT,
        init="self.left, self.right = nn.GRU(4, 4), nn.LSTM(4, 2, bidirectional=True)",
        glue="x = recurrent(self.left, x)",
        late="x = recurrent(self.right, x)",
    ),
}


def _between(names: dict[str, Any], net: nn.Module, model: Any, step: int) -> None:
    names["between"](net, model, step)


def outcome(use: Use) -> Any:
    """Tries a use in this job; returns what became of it, or its losses if they go by keys."""
    try_it = losses_of if use.keyed else outcome_of
    return try_it(use.script(), _between)
