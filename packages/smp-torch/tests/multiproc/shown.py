"""A population of layers whose results show what they keep: a buffer, an attribute, a view of it.

In one process such a result is what the layer has just written, until it is called again. Other
partitions, questions and microbatches under way must not see what later calls write to it.
"""

from __future__ import annotations

import itertools

from uses import Use

#: What is kept: how it is made, and its name.
KEPT = {
    "buffer": ("self.register_buffer('kept', torch.ones(4))", "self.kept"),
    "attribute": ("self.kept = torch.ones(4)", "self.kept"),
    "row": ("self.kept = torch.ones(2048, 4)", "self.kept[0]"),
    "item": ("self.kept = [torch.ones(4)]", "self.kept[0]"),
    "parameter": ("self.kept = nn.Parameter(torch.ones(4), requires_grad=False)", "self.kept"),
}
#: How a call writes to it, before it returns it or after.
WRITES = {
    "not": "",
    "in place": "{0}.mul_(0.5).add_(x.detach().mean(0))",
    "copied": "{0}.copy_({0} * 0.5 + x.detach().mean(0))",
    "by data": "{0}.data.mul_(0.5).add_(x.detach().mean(0))",
    "anew": "{0} = {0} * 0.5 + x.detach().mean(0)",
}
#: What is returned of it.
SHOWN = {
    "itself": "{0}",
    "detached": "{0}.detach()",
    "view": "{0}[None]",
    "part": "{0}[1:2]",
    "copy": "{0} * 1",
}
#: What becomes of that: code between layers, on the partition of the layer, and on the other.
READS = {
    "near": Use(glue="x = x + shown"),
    "far": Use(late="x = x + shown"),
    "near and far": Use(glue="x = x * 2 + shown", late="x = x + shown"),
    "asked": Use(glue="if shown.sum() > 1: x = x * 2", late="x = x + shown"),
    "asked later": Use(late="x = x + shown\nif x.mean() > 0.1: x = x * 2"),
    "in the loss": Use(late="self.seen = (shown,)", call="out = model(x) + NET.seen[0]"),
    "called again": Use(late="x, again = self.keeper(x); x = x + shown + again"),
    "called again near": Use(glue="x, again = self.keeper(x); x = x + shown + again"),
    "written near": Use(glue="shown.add_(0.5); x = x + shown"),
    "written far": Use(late="shown.add_(0.5); x = x + shown"),
    "written by a view": Use(glue="shown[..., :1].zero_(); x = x + shown"),
    "written on a copy": Use(late="shown = shown.clone(); shown.add_(0.5); x = x + shown"),
}


def _use(kept: tuple[str, str], write: str, shown: str, read: Use) -> Use:
    made, name = kept
    return Use(
        top=f"""
            class Keeper(nn.Linear):
                def __init__(self):
                    super().__init__(4, 4)
                    {made}
                def forward(self, x):
                    x = super().forward(x)
                    {write.format(name) or "pass"}
                    return x, {shown.format(name)}
        """,
        init="self.keeper = Keeper()",
        glue=f"x, shown = self.keeper(x)\n{read.glue}",
        late=read.late,
        call=read.call,
    )


SHOWS = {
    f"{kept}, {write}, {shown}, {read}": _use(KEPT[kept], WRITES[write], SHOWN[shown], READS[read])
    for kept, write, shown, read in itertools.product(KEPT, WRITES, SHOWN, READS)
    if (kept, write) != ("parameter", "anew")
}
