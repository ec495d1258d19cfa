"""Policies that are optimized, and worlds that are imagined."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from scripts.kit import Kit, script
from scripts.small import Line


@script()
def ppo_with_shared_trunk_and_early_stop(kit: Kit) -> None:
    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(self._init(nn.Linear(3, 8)), nn.Tanh())
            self.actor, self.critic = (
                self._init(nn.Linear(8, 2), 0.01),
                self._init(nn.Linear(8, 1), 1),
            )

        @staticmethod
        def _init(layer: Any, std: float = 2**0.5) -> Any:
            nn.init.orthogonal_(layer.weight, std)
            nn.init.constant_(layer.bias, 0.0)
            return layer

        def forward(self, x: Any) -> Any:
            h = self.trunk(x)
            return Categorical(logits=self.actor(h)), self.critic(h).squeeze(-1)

    agent = kit.model(ActorCritic())
    optimizer = kit.optimizer(torch.optim.Adam(agent.parameters(), lr=1e-2, eps=1e-5))

    @kit.step
    def look(agent: Any, obs: Any) -> Any:
        dist, value = agent(obs)
        return dist.logits, value

    @kit.step
    def update(agent: Any, obs: Any, actions: Any, old: Any, adv: Any, returns: Any) -> Any:
        dist, value = agent(obs)
        logratio = dist.log_prob(actions) - old
        ratio = logratio.exp()
        with torch.no_grad():
            kl = ((ratio - 1) - logratio).mean()
            clipfrac = ((ratio - 1.0).abs() > 0.2).double().mean()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        pg = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
        v = 0.5 * ((value - returns) ** 2).mean()
        entropy = dist.entropy().mean()
        loss = pg - 0.01 * entropy + 0.5 * v
        agent.backward(loss)
        return loss, kl, clipfrac, entropy

    env = Line()
    for _ in range(2):
        obs, actions, logps, rewards, values = [], [], [], [], []
        state = env.reset()
        for _ in range(8):
            with torch.no_grad():
                logits, value = look(agent, torch.tensor(state).repeat(2, 1))
            dist = Categorical(logits=logits.concat()[0])
            action = dist.sample()
            obs.append(state)
            actions.append(action)
            logps.append(dist.log_prob(action))
            values.append(value.concat()[0])
            state, reward, _ = env.step(action.item())
            rewards.append(reward)
        last, advs = 0.0, torch.zeros(8)
        for t in reversed(range(8)):
            following = values[t + 1] if t < 7 else 0.0
            last = rewards[t] + 0.9 * following - values[t] + 0.9 * 0.95 * last
            advs[t] = last
        returns = advs + torch.stack(values)
        for _ in range(3):
            at = np.random.permutation(8)
            optimizer.zero_grad()
            loss, kl, clipfrac, entropy = update(
                agent, torch.tensor(np.stack(obs))[at], torch.stack(actions)[at],
                torch.stack(logps)[at], advs[at], returns[at],
            )  # fmt: skip
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            kit.note(loss, clipfrac, entropy)
            if kl.reduce_mean() > 0.02:
                break


@script()
def reinforce_with_saved_log_probs_and_returns(kit: Kit) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.affine1, self.affine2 = nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, x: Any) -> Any:
            return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=1)

    model = kit.model(Policy())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    eps = np.finfo(np.float32).eps.item()

    @kit.step
    def finish(model: Any, states: Any, actions: Any, returns: Any) -> Any:
        dist = Categorical(model(states))
        loss = []
        for log_prob, value in zip(dist.log_prob(actions), returns, strict=True):
            loss.append(-log_prob * value)
        total = torch.stack(loss).sum()
        model.backward(total)
        return total

    running = 10.0
    for _episode in range(3):
        states, rewards = torch.randn(8, 3), np.random.rand(8)
        value, returns = 0.0, deque()  # type: ignore[var-annotated]
        for r in rewards[::-1]:
            value = r + 0.99 * value
            returns.appendleft(value)
        target = torch.tensor(list(returns))
        target = (target - target.mean()) / (target.std() + eps)
        optimizer.zero_grad()
        loss = finish(model, states, torch.randint(0, 2, (8,)), target)
        optimizer.step()
        running = 0.05 * rewards.sum() + (1 - 0.05) * running
        kit.note(loss, running)


@script()
def world_model_with_imagined_rollouts(kit: Kit) -> None:
    class Rssm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.inp = nn.GRUCell(6, 6), nn.Linear(4 + 2, 6)
            self.prior, self.posterior = nn.Linear(6, 8), nn.Linear(6 + 3, 8)
            self.decode, self.reward = nn.Linear(10, 3), nn.Linear(10, 1)

        def forward(self, obs: Any, actions: Any, noise: Any) -> Any:
            h, z = obs.new_zeros(len(obs), 6), obs.new_zeros(len(obs), 4)
            recons, kls = [], []
            for t in range(obs.shape[1]):
                h = self.cell(F.elu(self.inp(torch.cat([z, actions[:, t]], -1))), h)
                pm, ps = self.prior(h).chunk(2, -1)
                qm, qs = self.posterior(torch.cat([h, obs[:, t]], -1)).chunk(2, -1)
                ps, qs = F.softplus(ps) + 0.1, F.softplus(qs) + 0.1
                z = qm + qs * noise[:, t]
                kls.append(
                    torch.distributions.kl_divergence(Normal(qm, qs), Normal(pm, ps)).sum(-1)
                )
                recons.append(self.decode(torch.cat([h, z], -1)))
            return torch.stack(recons, 1), torch.stack(kls, 1)

    model = kit.model(Rssm())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4))

    @kit.step
    def train(model: Any, obs: Any, actions: Any, noise: Any) -> Any:
        recon, kl = model(obs, actions, noise)
        loss = F.mse_loss(recon, obs) + torch.clamp(kl.mean(), min=0.3)
        model.backward(loss)
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(4, 3, 3), torch.rand(4, 3, 2), torch.randn(4, 3, 4)))
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()


@script()
def preference_optimization_with_frozen_reference(kit: Kit) -> None:
    class Lm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.gru = nn.Embedding(7, 6), nn.GRU(6, 6, batch_first=True)
            self.head = nn.Linear(6, 7)

        def forward(self, ids: Any) -> Any:
            return self.head(self.gru(self.embed(ids))[0])

    net = Lm()
    reference = copy.deepcopy(net).eval()
    for p in reference.parameters():
        p.requires_grad_(False)
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.RMSprop(model.parameters(), 1e-3))

    def logps(logits: Any, ids: Any) -> Any:
        each = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
        return each.sum(-1)

    @kit.step
    def train(model: Any, chosen: Any, rejected: Any, ref_c: Any, ref_r: Any) -> Any:
        n = len(chosen)
        every = logps(model(torch.cat([chosen, rejected])), torch.cat([chosen, rejected]))
        c, r = every[:n] - ref_c, every[n:] - ref_r
        loss = -F.logsigmoid(0.1 * (c - r)).mean()
        model.backward(loss)
        return loss, (c > r + 1e-6).double().mean(), (0.1 * (c - r)).mean().detach()

    for _ in range(3):
        chosen, rejected = torch.randint(0, 7, (4, 5)), torch.randint(0, 7, (4, 5))
        with torch.no_grad():
            ref_c, ref_r = (logps(reference(each), each) for each in (chosen, rejected))
        optimizer.zero_grad()
        kit.note(*train(model, chosen, rejected, ref_c, ref_r))
        optimizer.step()
