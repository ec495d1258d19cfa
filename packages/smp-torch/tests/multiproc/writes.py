"""A population of layers that write to a tensor they keep, and of code that meets it.

Every kind of tensor, written in every way, met in every place; see ``uses``. What a layer writes in
a microbatch the next one reads, in the order of one process, or the library must refuse it.
"""

# Code of scripts stands on one line.
# ruff: noqa: E501

from __future__ import annotations

import itertools

from uses import Use

#: Where the layer keeps it: how it is made, and how it is reached.
HOLDERS = {
    "buffer": ("self.register_buffer('kept', torch.zeros(4))", "kept"),
    "frozen parameter": ("self.kept = nn.Parameter(torch.zeros(4), requires_grad=False)", "kept"),
    "parameter": ("self.kept = nn.Parameter(torch.zeros(4))", "kept"),
    "attribute": ("self.kept = torch.zeros(4)", "kept"),
    "list": ("self.all = [torch.zeros(4)]", "all[0]"),
    "gradient": ("self.all = [torch.zeros(4, requires_grad=True)]", "all[0]"),
    "part of another": ("self.kept = torch.zeros(3, 4)[1]", "kept"),
    "large": ("self.kept = torch.zeros(2000, 4)", "kept"),
}
#: What it does with ``kept`` and the ``mean`` of its input.
WAYS = {
    "in place": "kept.detach().mul_(0.9).add_(mean, alpha=0.1)",
    "data": "kept.data.mul_(0.9).add_(mean, alpha=0.1)",
    "data of a part": "kept.data[..., :2] += mean[:2]",
    "new data": "kept.data = kept.data * 0.9 + 0.1 * mean",
    "out": "torch.add(kept.data, mean, out=kept.data)",
    "many at once": "torch._foreach_mul_([kept.data], 0.5); kept.data.add_(mean)",
    "copy": "kept.data.copy_(mean)",
    "new memory": "kept.data.set_((kept * 0.9 + mean).detach())",
    "NumPy": "array = kept.detach().numpy(); array += 0.1",
    "array": "numpy.asarray(kept.data)[...] += 0.1",
    "view": "kept.data.view(-1)[1] += mean.sum()",
    "without gradients": "torch.no_grad()(lambda: kept.mul_(0.9).add_(mean))()",
    "statistics": "F.batch_norm(x, kept.data.view(-1)[:4], torch.ones(4), training=True)",
    # A layer that decides by its input runs on numbers when it is recorded.
    "in place, decided": "kept.detach().add_(mean if x.sum() > -1e9 else 0)",
    "data, decided": "kept.data.add_(mean if x.sum() > -1e9 else 0)",
    "new data, decided": "kept.data = kept.data + (mean if x.sum() > -1e9 else 0)",
    "statistics, decided": "F.batch_norm(x if x.sum() > -1e9 else 0, kept.data.view(-1)[:4], torch.ones(4), training=True)",
}
#: Who meets it. ``{0}`` is the layer before, ``{1}`` one behind.
MEETINGS = {
    "alone": Use(),
    "late": Use(late="x = x * (1 + self.first.{0}.detach().sum())"),
    "early": Use(glue="x = x * (1 + self.third.{0}.detach().sum())"),
    "again": Use(late="x = self.second(x)"),
    "again, late": Use(late="x = self.first(x)"),
    "between": Use(between="[each.{0}.data.mul_(2) for each in (net.first, net.third)]"),
}


def _use(made: str, place: str, way: str, meeting: Use) -> Use:
    top = f"""
        class Keeping(nn.Linear):
            def __init__(self, *sizes):
                super().__init__(*sizes)
                {made}
            def forward(self, x):
                kept, mean = self.{place}, x.detach().mean(0)
                {way}
                return super().forward(x) - self.{place}.detach().view(-1)[:4]
    """
    places = {name: getattr(meeting, name).format(place) for name in ("glue", "late", "between")}
    return Use(top=top, layer="Keeping", **places)


WRITES = {
    f"{holder}, {way}, {meeting}": _use(*HOLDERS[holder], WAYS[way], MEETINGS[meeting])
    for holder, way, meeting in itertools.product(HOLDERS, WAYS, MEETINGS)
}
