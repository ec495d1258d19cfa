"""A population of models that change a buffer of their own between their layers.

Every way of a change, at every place, met by every reader; see ``uses``. What a microbatch makes of
the buffer the next one reads, in the order of one process, or the library must refuse it.
"""

# Code of scripts stands on one line.
# ruff: noqa: E501

from __future__ import annotations

import itertools
from typing import Any

from uses import Use

#: What the code does with the buffer and an activation.
WAYS = {
    "counter": "{0}.kept += 1",
    "counter in a function": "{0}.kept.add_(torch.ones(()))",
    "average": "with torch.no_grad(): {0}.kept.mul_(0.9).add_(0.1 * {1}.mean(0))",
    "data": "{0}.kept.data.mul_(0.9).add_({1}.detach().mean(0))",
    "data of a part": "{0}.kept.data[:2] += {1}.detach().mean(0)[:2]",
    "item": "{0}.kept[1] = {1}.detach().mean()",
    "view": "row = {0}.kept.view(2, 2)[0]; row.add_({1}.detach().mean())",
    "copy": "{0}.kept.copy_({1}.detach().mean(0))",
    "out": "torch.add({0}.kept, {1}.detach().mean(0), out={0}.kept)",
    "many at once": "torch._foreach_lerp_([{0}.kept], [{1}.detach().mean(0)], 0.1)",
    "assigned": "{0}.kept = 0.9 * {0}.kept + {1}.detach().mean(0)",
    "assigned a counter": "{0}.kept = {0}.kept + 1",
    "assigned without a look": "{0}.kept = {1}.detach().mean(0)",
    "assigned, then written": "{0}.kept = {1}.detach().mean(0); {0}.kept.add_(1)",
    "written, then assigned": "{0}.kept.add_(1); {0}.kept = {0}.kept * 0.5",
    "assigned at times": "COUNT[0] += 1; {0}.kept = {0}.kept * 0.5 + {1}.detach().mean(0) if COUNT[0] % 4 else {0}.kept",
    "written at times": "COUNT[0] += 1; {0}.kept.add_({1}.detach().mean(0)) if COUNT[0] % 4 else None",
    "written from some moment on": "COUNT[0] += 1; {0}.kept.add_({1}.detach().mean(0)) if COUNT[0] > 5 else None",
    "written once": "COUNT[0] += 1; {0}.kept.add_({1}.detach().mean(0)) if COUNT[0] == 6 else None",
    "decided": "{0}.kept += 1 if {0}.kept.sum() < 8 else -1",
    "drawn": "{0}.kept.add_(torch.ones(4))",
    "two": "{0}.kept += 1; {0}.other = {0}.other + {0}.kept",
    "of a weight": "{0}.kept.copy_({0}.third.weight.detach().mean(0))",
    "new data": "{0}.kept.data = {0}.kept.data * 0.9",
    "with a gradient": "{0}.kept = 0.9 * {0}.kept + {1}.mean(0)",
    "another shape": "{0}.kept = {1}.detach()[:1]",
    "nothing": "{0}.kept = None",
}
#: Where the change is made: between two layers of the first partition, of the second, in the step.
PLACES = {"glue": ("self", "x"), "late": ("self", "x"), "loss": ("NET", "out")}
_BY = "x = x * (1 + 0.1 * self.kept.sum())"
#: Who reads the buffer besides.
MEETINGS: dict[str, dict[str, str]] = {
    "alone": {},
    "before": {"before": _BY},
    "early": {"glue": _BY},
    "late": {"late": _BY},
    "both": {"glue": _BY, "late": _BY},
    "step": {"loss": "loss = loss * (1 + NET.kept.sum())"},
    "number": {"late": "x = x * min(2.0, 0.1 * self.kept.sum().item())"},
    "branch": {"late": "x = x * 2 if self.kept.sum() > 4 else x"},
    "activation": {"late": "x = x * 2 if x.sum() > 0 else x"},
    "twice": {"call": "out = model(x) + 0.5 * model(-x)"},
    "gradient": {
        "call": "x.requires_grad_(); out = model(x)",
        "loss": "loss = loss + torch.autograd.grad(out.sum(), x, create_graph=True)[0].square().mean()",
    },
    "checkpoint": {"call": "out = checkpoint(model, x, use_reentrant=False)"},
    "between": {"between": "net.kept.mul_(2)"},
    "anew": {"between": "net.kept = torch.full((4,), float(step))"},
}


def _use(way: str, place: str, meeting: dict[str, str]) -> Use:
    code = {"before": "", "glue": "", "late": "", "loss": "loss = ((out - y) ** 2).mean()"}
    change = WAYS[way].format(*PLACES[place])
    for name in ("glue", "late"):
        if name in meeting:
            code[name] = meeting[name]
    code[place] = f"{code[place]}\n{change}"
    if "loss" in meeting:
        code["loss"] += f"\n{meeting['loss']}"
    more: dict[str, Any] = {name: meeting[name] for name in ("call", "between") if name in meeting}
    glue = "\n".join(filter(None, (meeting.get("before", ""), code["glue"])))
    return Use(
        top="COUNT = [0]",
        init="self.register_buffer('kept', torch.ones(4)); self.register_buffer('other', torch.zeros(4))",
        glue=glue,
        late=code["late"],
        loss=code["loss"],
        **more,
    )


SPLIT = {
    f"{way}, {place}, {meeting}": _use(way, place, MEETINGS[meeting])
    for way, place, meeting in itertools.product(WAYS, PLACES, MEETINGS)
}
