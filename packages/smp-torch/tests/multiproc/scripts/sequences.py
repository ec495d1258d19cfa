"""Recurrent networks, attention, speech, and ragged lengths."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from scripts.kit import Kit, script


@script(draws=True)
def seq2seq_with_teacher_forcing_by_chance(kit: Kit) -> None:
    class Attention(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.wa, self.ua, self.va = (
                nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1),
            )  # fmt: skip

        def forward(self, query: Any, keys: Any) -> Any:
            scores = self.va(torch.tanh(self.wa(query) + self.ua(keys))).squeeze(2).unsqueeze(1)
            weights = F.softmax(scores, dim=-1)
            return torch.bmm(weights, keys), weights

    class Decoder(nn.Module):
        def __init__(self, width: int, words: int) -> None:
            super().__init__()
            self.embedding = nn.Embedding(words, width)
            self.attention = Attention(width)
            self.gru = nn.GRU(2 * width, width, batch_first=True)
            self.out = nn.Linear(width, words)

        def forward(self, encoded: Any, hidden: Any, target: Any, ratio: float) -> Any:
            inp, outs = torch.zeros(len(encoded), 1, dtype=torch.long), []
            for i in range(target.shape[1]):
                context, _ = self.attention(hidden.permute(1, 0, 2), encoded)
                out, hidden = self.gru(torch.cat((self.embedding(inp), context), 2), hidden)
                out = self.out(out)
                outs.append(out)
                if random.random() < ratio:
                    inp = target[:, i].unsqueeze(1)
                else:
                    _, top = out.topk(1)
                    inp = top.squeeze(-1).detach()
            return F.log_softmax(torch.cat(outs, 1), -1)

    class Seq2Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 8)
            self.encoder = nn.GRU(8, 8, batch_first=True)
            self.decoder = Decoder(8, 9)

        def forward(self, src: Any, tgt: Any, ratio: float) -> Any:
            encoded, hidden = self.encoder(self.embedding(src))
            return self.decoder(encoded, hidden, tgt, ratio)

    model = kit.model(Seq2Seq())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, src: Any, tgt: Any) -> Any:
        out = model(src, tgt, 0.5)
        loss = F.nll_loss(out.view(-1, out.size(-1)), tgt.reshape(-1))
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randint(0, 9, (4, 4)), torch.randint(0, 9, (4, 3))))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@script()
def tagger_with_packed_sequences_sorted(kit: Kit) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(12, 6, padding_idx=0)
            self.lstm = nn.LSTM(6, 5, bidirectional=True, batch_first=True)
            self.head = nn.Linear(10, 4)

        def forward(self, ids: Any, lengths: Any) -> Any:
            lengths, order = lengths.sort(descending=True)
            packed = pack_padded_sequence(self.embed(ids[order]), lengths.cpu(), batch_first=True)
            out, _ = self.lstm(packed)
            out, _ = pad_packed_sequence(out, batch_first=True, total_length=ids.shape[1])
            return self.head(out[order.argsort()])

    model = kit.model(Tagger())
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))

    @kit.step
    def train(model: Any, ids: Any, lengths: Any, tags: Any) -> Any:
        out = model(ids, lengths)
        loss = F.cross_entropy(out.transpose(1, 2), tags, ignore_index=-100)
        model.backward(loss)
        return loss

    for _number in range(2):
        lengths = torch.tensor([3, 5, 2, 4])
        ids = pad_sequence([torch.randint(1, 12, (n,)) for n in lengths.tolist()], True)
        tags = torch.randint(0, 4, ids.shape).masked_fill(ids == 0, -100)
        optimizer.zero_grad()
        kit.note(train(model, ids, lengths, tags))
        optimizer.step()


@script()
def pointer_network_with_masked_steps(kit: Kit) -> None:
    class Pointer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(2, 8)
            self.encoder, self.cell = nn.LSTM(8, 8, batch_first=True), nn.LSTMCell(8, 8)
            self.w1, self.w2 = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.v = nn.Parameter(torch.rand(8))
            self.start = nn.Parameter(torch.zeros(8))

        def forward(self, points: Any, tour: Any) -> Any:
            x = self.embed(points)
            enc, (h, c) = self.encoder(x)
            h, c = h[0], c[0]
            inp = self.start.expand(len(x), -1)
            mask = torch.zeros(points.shape[:2], dtype=torch.bool)
            loss = 0
            for i in range(points.shape[1]):
                h, c = self.cell(inp, (h, c))
                score = torch.tanh(self.w1(enc) + self.w2(h).unsqueeze(1)) @ self.v
                score = score.masked_fill(mask, -1e9)
                loss = loss + F.cross_entropy(score, tour[:, i])
                inp = x[torch.arange(len(x)), tour[:, i]]
                mask = mask.scatter(1, tour[:, i : i + 1], True)
            return loss / points.shape[1]

    model = kit.model(Pointer())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    @kit.step
    def train(model: Any, points: Any, tour: Any) -> Any:
        loss = model(points, tour)
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        points = torch.rand(4, 3, 2)
        kit.note(train(model, points, torch.stack([torch.randperm(3) for _ in range(4)])))
        optimizer.step()
        scheduler.step()


@script()
def language_model_with_carried_hidden_state(kit: Kit) -> None:
    class Lm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Embedding(10, 8)
            self.rnn = nn.LSTM(8, 8, 2)
            self.decoder = nn.Linear(8, 10)
            self.decoder.weight = self.encoder.weight

        def init_hidden(self, batch: int) -> Any:
            weight = next(self.parameters())
            return weight.new_zeros(2, batch, 8), weight.new_zeros(2, batch, 8)

        def forward(self, ids: Any, h: Any, c: Any) -> Any:
            x, (h, c) = self.rnn(self.encoder(ids).transpose(0, 1), (h, c))
            return self.decoder(x), h, c

    net = Lm()
    h, c = (each.transpose(0, 1) for each in net.init_hidden(4))
    model = kit.model(net)
    lr = 1.0

    @kit.step
    def train(model: Any, ids: Any, targets: Any, h: Any, c: Any) -> Any:
        out, h, c = model(ids, h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous())
        loss = F.cross_entropy(out.reshape(-1, 10), targets.t().reshape(-1))
        model.backward(loss)
        return loss, h.transpose(0, 1), c.transpose(0, 1)

    corpus = torch.randint(0, 10, (4, 13))
    for start in range(0, 9, 4):
        model.zero_grad()
        chunk = corpus[:, start : start + 5]
        loss, hs, cs = train(model, chunk[:, :-1], chunk[:, 1:], h, c)
        h, c = hs.concat().detach(), cs.concat().detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        kit.note(loss, math.exp(min(loss.reduce_mean().item(), 20)))
