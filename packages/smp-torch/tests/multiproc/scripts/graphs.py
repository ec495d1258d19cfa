"""Networks on graphs and sets."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scripts.kit import Kit, script


@script()
def graph_convolution_with_index_add_and_pooling(kit: Kit) -> None:
    class Gcn(nn.Module):
        def __init__(self, n_in: int, n_out: int) -> None:
            super().__init__()
            self.lin, self.bias = (
                nn.Linear(n_in, n_out, bias=False),
                nn.Parameter(torch.zeros(n_out)),
            )

        def forward(self, x: Any, edges: Any) -> Any:
            src, dst = edges
            deg = torch.zeros(len(x)).index_add_(0, dst, torch.ones(len(dst))) + 1
            norm = deg[src].rsqrt() * deg[dst].rsqrt()
            h = self.lin(x)
            out = h / deg.unsqueeze(1)
            return out.index_add(0, dst, h[src] * norm.unsqueeze(1)) + self.bias

    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([Gcn(4, 8), Gcn(8, 8), Gcn(8, 8)])
            self.lin = nn.Linear(16, 3)

        def forward(self, x: Any, edges: Any, batch: Any) -> Any:
            for conv in self.convs:
                x = F.relu(conv(x, edges))
            count = int(batch.max()) + 1
            total = torch.zeros(count, 8).index_add_(0, batch, x)
            size = torch.bincount(batch, minlength=count).clamp(min=1).unsqueeze(1)
            top = torch.full((count, 8), -1e9).scatter_reduce(
                0, batch.unsqueeze(1).expand(-1, 8), x, "amax"
            )
            return self.lin(torch.cat([total / size, top], 1))

    model = kit.model(Graphs())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2, weight_decay=5e-4))

    @kit.step
    def train(model: Any, x: Any, edges: Any, y: Any) -> Any:
        """Each example is a graph of five nodes: they become one graph of all."""
        n, size, _ = x.shape
        shift = torch.arange(n) * size
        joined = (edges + shift[:, None, None]).permute(1, 0, 2).reshape(2, -1)
        batch = torch.arange(n).repeat_interleave(size)
        out = model(x.reshape(n * size, -1), joined, batch)
        loss = F.cross_entropy(out, y)
        model.backward(loss)
        return loss, out.argmax(1).eq(y).double().mean()

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(
            *train(
                model, torch.randn(4, 5, 4), torch.randint(0, 5, (4, 2, 7)),
                torch.randint(0, 3, (4,)),
            )
        )  # fmt: skip
        optimizer.step()


@script()
def graph_attention_on_one_whole_graph(kit: Kit) -> None:
    class Gat(nn.Module):
        def __init__(self, n_in: int, n_out: int) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(n_in, n_out))
            self.a = nn.Parameter(torch.empty(2 * n_out, 1))
            nn.init.xavier_uniform_(self.w.data, gain=1.414)
            nn.init.xavier_uniform_(self.a.data, gain=1.414)

        def forward(self, h: Any, adj: Any) -> Any:
            wh = torch.mm(h, self.w)
            n = self.w.shape[1]
            e = F.leaky_relu(wh @ self.a[:n] + (wh @ self.a[n:]).T, 0.2)
            attention = F.softmax(torch.where(adj > 0, e, -9e15 * torch.ones_like(e)), dim=1)
            return F.elu(attention @ wh)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attentions = [Gat(4, 4) for _ in range(2)]
            for i, attention in enumerate(self.attentions):
                self.add_module(f"attention_{i}", attention)
            self.out_att = Gat(8, 3)

        def forward(self, x: Any, adj: Any) -> Any:
            x = torch.cat([att(x, adj) for att in self.attentions], dim=1)
            return F.log_softmax(self.out_att(x, adj), dim=1)

    model = kit.model(Net())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 5e-3, weight_decay=5e-4))
    x, adj = torch.randn(6, 4), (torch.rand(6, 6) > 0.5).double() + torch.eye(6)
    y = torch.randint(0, 3, (6,))

    @kit.step(non_split_inputs=["x", "adj"])
    def train(model: Any, index: Any, x: Any = None, adj: Any = None) -> Any:
        loss = F.nll_loss(model(x, adj)[index], y[index])
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.tensor([0, 2, 3, 5]), x=x, adj=adj))
        optimizer.step()


@script()
def equivariant_messages_on_positions(kit: Kit) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edge = nn.Sequential(nn.Linear(9, 8), nn.SiLU(), nn.Linear(8, 4), nn.SiLU())
            self.node = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 4))
            self.coord = nn.Linear(4, 1, bias=False)

        def forward(self, h: Any, x: Any) -> tuple[Any, Any]:
            n = h.shape[1]
            diff = x[:, :, None] - x[:, None]
            radial = diff.square().sum(-1, keepdim=True)
            pairs = [h[:, :, None].expand(-1, -1, n, -1), h[:, None].expand(-1, n, -1, -1), radial]
            m = self.edge(torch.cat(pairs, -1)) * (1 - torch.eye(n)[None, ..., None])
            x = x + (diff * self.coord(m)).mean(2)
            return h + self.node(torch.cat([h, m.sum(2)], -1)), x

    class Egnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.layers = nn.ModuleList(Layer() for _ in range(2))
            self.energy = nn.Linear(4, 1)

        def forward(self, kinds: Any, x: Any) -> Any:
            h = self.embed(kinds)
            for layer in self.layers:
                h, x = layer(h, x)
            return self.energy(h).sum((1, 2))

    model = kit.model(Egnn())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, kinds: Any, x: Any, energy: Any, forces: Any) -> Any:
        x.requires_grad_(True)
        predicted = model(kinds, x)
        own = -torch.autograd.grad(predicted.sum(), x, create_graph=True)[0]
        loss = F.mse_loss(predicted, energy) + 10 * F.mse_loss(own, forces)
        model.backward(loss)
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        kit.note(
            train(
                model, torch.randint(0, 5, (4, 4)), torch.randn(4, 4, 3), torch.randn(4),
                torch.randn(4, 4, 3),
            )
        )  # fmt: skip
        optimizer.step()
