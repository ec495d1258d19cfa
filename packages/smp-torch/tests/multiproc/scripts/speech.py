"""Speech, tags and tables of words."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scripts.kit import Kit, script


@script()
def speech_with_ctc_and_lengths(kit: Kit) -> None:
    class Acoustic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv1d(5, 8, 3, 2, 1), nn.BatchNorm1d(8), nn.Hardtanh(0, 20)
            )
            self.rnns = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(2))
            self.fc = nn.Linear(8, 6)

        def forward(self, x: Any, lengths: Any) -> Any:
            x = self.conv(x.transpose(1, 2)).transpose(1, 2)
            lengths = torch.div(lengths + 1, 2, rounding_mode="floor")
            mask = torch.arange(x.shape[1])[None] < lengths[:, None]
            for rnn in self.rnns:
                x = rnn(x * mask.unsqueeze(-1))[0]
            return self.fc(x).log_softmax(-1), lengths

    model = kit.model(Acoustic())
    optimizer = kit.optimizer(torch.optim.AdamW(model.parameters(), 1e-2))
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)

    @kit.step
    def train(model: Any, x: Any, lengths: Any, targets: Any, target_lengths: Any) -> Any:
        out, out_lengths = model(x, lengths)
        loss = ctc(out.transpose(0, 1), targets, out_lengths, target_lengths)
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(
            train(
                model, torch.randn(4, 12, 5), torch.tensor([12, 10, 11, 9]),
                torch.randint(1, 6, (4, 3)), torch.tensor([3, 2, 1, 3]),
            )
        )  # fmt: skip
        optimizer.step()


@script()
def transducer_joint_with_dynamic_programming(kit: Kit) -> None:
    class Transducer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.embed = nn.LSTM(4, 6, batch_first=True), nn.Embedding(5, 6)
            self.predictor, self.joint = nn.GRU(6, 6, batch_first=True), nn.Linear(6, 5)

        def forward(self, x: Any, y: Any) -> Any:
            enc = self.encoder(x)[0]
            y = F.pad(y, (1, 0))
            pred = self.predictor(self.embed(y))[0]
            return self.joint(torch.tanh(enc.unsqueeze(2) + pred.unsqueeze(1))).log_softmax(-1)

    def rnnt(lp: Any, y: Any) -> Any:
        _, frames, units, _ = lp.shape
        alpha: dict[tuple[int, int], Any] = {(0, 0): torch.zeros(len(lp))}
        for t in range(frames):
            for u in range(units):
                ways = []
                if t > 0:
                    ways.append(alpha[t - 1, u] + lp[:, t - 1, u, 0])
                if u > 0:
                    label = lp[:, t, u - 1].gather(1, y[:, u - 1 : u]).squeeze(1)
                    ways.append(alpha[t, u - 1] + label)
                if ways:
                    alpha[t, u] = torch.logsumexp(torch.stack(ways), 0)
        return -(alpha[frames - 1, units - 1] + lp[:, -1, -1, 0]).mean()

    model = kit.model(Transducer())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        loss = rnnt(model(x, y), y)
        model.backward(loss)
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(4, 4, 4), torch.randint(1, 5, (4, 2))))
        optimizer.step()


@script()
def crf_tagger_with_transitions(kit: Kit) -> None:
    class Crf(nn.Module):
        def __init__(self, tags: int) -> None:
            super().__init__()
            self.start = nn.Parameter(torch.empty(tags).uniform_(-0.1, 0.1))
            self.end = nn.Parameter(torch.empty(tags).uniform_(-0.1, 0.1))
            self.transitions = nn.Parameter(torch.empty(tags, tags).uniform_(-0.1, 0.1))

        def forward(self, emissions: Any, tags: Any, mask: Any) -> Any:
            batch = torch.arange(len(tags))
            score = self.start[tags[:, 0]] + emissions[batch, 0, tags[:, 0]]
            alpha = self.start + emissions[:, 0]
            for i in range(1, tags.shape[1]):
                step = (
                    self.transitions[tags[:, i - 1], tags[:, i]] + emissions[batch, i, tags[:, i]]
                )
                score = score + step * mask[:, i]
                following = torch.logsumexp(
                    alpha.unsqueeze(2) + self.transitions + emissions[:, i].unsqueeze(1), 1
                )
                alpha = torch.where(mask[:, i].unsqueeze(1), following, alpha)
            last = mask.long().sum(1) - 1
            score = score + self.end[tags[batch, last]]
            return (torch.logsumexp(alpha + self.end, 1) - score).mean()

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(9, 6), nn.LSTM(6, 6, batch_first=True)
            self.hidden2tag, self.crf = nn.Linear(6, 4), Crf(4)

        def forward(self, ids: Any, tags: Any) -> Any:
            return self.crf(self.hidden2tag(self.lstm(self.embed(ids))[0]), tags, ids != 0)

    model = kit.model(Tagger())
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1, weight_decay=1e-4))

    @kit.step
    def train(model: Any, ids: Any, tags: Any) -> Any:
        nll = model(ids, tags)
        model.backward(nll)
        return nll

    for _ in range(3):
        ids = torch.randint(1, 9, (4, 5))
        ids[1, 3:] = 0
        optimizer.zero_grad()
        kit.note(train(model, ids, torch.randint(0, 4, (4, 5))))
        optimizer.step()


@script()
def text_with_embedding_bag_and_offsets(kit: Kit) -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.EmbeddingBag(20, 8, mode="mean", padding_idx=0)
            self.fc = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

        def forward(self, text: Any) -> Any:
            return self.fc(self.embedding(text))

    model = kit.model(Text())
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), lr=5.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)

    @kit.step
    def train(model: Any, text: Any, label: Any) -> Any:
        out = model(text)
        loss = F.cross_entropy(out, label)
        model.backward(loss)
        return loss, (out.argmax(1) == label).sum()

    total = 0
    for _ in range(3):
        text = torch.randint(1, 20, (8, 6))
        text[:, 4:] = 0
        optimizer.zero_grad()
        loss, right = train(model, text, torch.randint(0, 4, (8,)))
        total += right.reduce_sum().item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        kit.note(loss, total / 8)


@script()
def recommender_with_sparse_embeddings(kit: Kit) -> None:
    class TwoTower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users = nn.Embedding(10, 6, sparse=True)
            self.items = nn.Embedding(12, 6, sparse=True)
            self.user_bias, self.item_bias = nn.Embedding(10, 1), nn.Embedding(12, 1)
            self.mlp = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, u: Any, i: Any) -> Any:
            a, b = self.users(u), self.items(i)
            dot = (a * b).sum(-1) + self.user_bias(u).squeeze(-1) + self.item_bias(i).squeeze(-1)
            return dot + self.mlp(torch.cat([a, b], -1)).squeeze(-1)

    net = TwoTower()
    model = kit.model(net)
    sparse = [net.users.weight, net.items.weight]
    ids = set(map(id, sparse))
    dense = [p for p in net.parameters() if id(p) not in ids]
    optimizers = [
        kit.optimizer(torch.optim.SparseAdam(sparse, lr=1e-2)),
        kit.optimizer(torch.optim.Adam(dense, lr=1e-2)),
    ]

    @kit.step
    def train(model: Any, u: Any, i: Any, negative: Any) -> Any:
        loss = -F.logsigmoid(model(u, i) - model(u, negative)).mean()
        model.backward(loss)
        return loss

    for _ in range(3):
        for each in optimizers:
            each.zero_grad()
        kit.note(
            train(
                model, torch.randint(0, 10, (8,)), torch.randint(0, 12, (8,)),
                torch.randint(0, 12, (8,)),
            )
        )  # fmt: skip
        for each in optimizers:
            each.step()
