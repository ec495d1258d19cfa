"""Reinforcement learning: policies, values, target networks, replay."""

from __future__ import annotations

import copy
import random
from collections import deque, namedtuple
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F

from scripts.kit import Kit, script
from scripts.small import Line


@script()
def dqn_with_replay_and_hard_target_updates(kit: Kit) -> None:
    Transition = namedtuple("Transition", ("state", "action", "next_state", "reward", "done"))

    class Memory:
        def __init__(self, capacity: int) -> None:
            self.memory: deque[Any] = deque(maxlen=capacity)

        def push(self, *args: Any) -> None:
            self.memory.append(Transition(*args))

        def sample(self, size: int) -> Any:
            return random.sample(self.memory, size)

    class Dueling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 16), nn.ReLU())
            self.value, self.advantage = nn.Linear(16, 1), nn.Linear(16, 2)

        def forward(self, x: Any) -> Any:
            h = self.body(x)
            a = self.advantage(h)
            return self.value(h) + a - a.mean(1, keepdim=True)

    policy = kit.model(Dueling())
    target = kit.model(Dueling())
    target.load_state_dict(policy.state_dict())
    target.eval()
    optimizer = kit.optimizer(torch.optim.AdamW(policy.parameters(), 1e-2, amsgrad=True))

    @kit.step
    def act(policy: Any, x: Any) -> Any:
        return policy(x)

    @kit.step
    def learn(policy: Any, target: Any, s: Any, a: Any, s2: Any, r: Any, done: Any) -> Any:
        q = policy(s).gather(1, a)
        with torch.no_grad():
            best = policy(s2).argmax(1, keepdim=True)
            value = target(s2).gather(1, best).squeeze(1) * (1 - done)
        loss = nn.SmoothL1Loss()(q, (value * 0.9 + r).unsqueeze(1))
        policy.backward(loss)
        return loss

    env, memory = Line(), Memory(50)
    state = env.reset()
    for steps in range(1, 15):
        if random.random() < 0.9 * 0.9**steps:
            action = random.randrange(2)
        else:
            with torch.no_grad():
                row = torch.tensor(state).unsqueeze(0).repeat(2, 1)
                action = act(policy, row).concat()[:1].max(1).indices.item()
        after, reward, done = env.step(action)
        memory.push(state, action, after, reward, done)
        state = env.reset() if done else after
        if len(memory.memory) >= 8 and steps % 2 == 0:
            batch = Transition(*zip(*memory.sample(8), strict=True))
            optimizer.zero_grad()
            loss = learn(
                policy, target, torch.tensor(np.stack(batch.state)),
                torch.tensor(batch.action).unsqueeze(1), torch.tensor(np.stack(batch.next_state)),
                torch.tensor(batch.reward), torch.tensor(batch.done).double(),
            )  # fmt: skip
            torch.nn.utils.clip_grad_value_(policy.parameters(), 100)
            optimizer.step()
            kit.note(loss)
        if steps % 5 == 0:
            target.load_state_dict(policy.state_dict())


@script()
def sac_with_twin_critics_and_temperature(kit: Kit) -> None:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
            self.mu, self.log_std = nn.Linear(8, 2), nn.Linear(8, 2)

        def forward(self, s: Any, eps: Any) -> Any:
            h = self.net(s)
            mu, log_std = self.mu(h), self.log_std(h).clamp(-5, 2)
            u = mu + log_std.exp() * eps
            a = torch.tanh(u)
            logp = Normal(mu, log_std.exp()).log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)
            return a, logp.sum(-1, keepdim=True)

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q1 = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
            self.q2 = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, s: Any, a: Any) -> Any:
            x = torch.cat([s, a], -1)
            return self.q1(x), self.q2(x)

    actor, net = kit.model(Actor()), Critic()
    copied = copy.deepcopy(net).requires_grad_(False)
    critic, target = kit.model(net), kit.model(copied)
    log_alpha = torch.zeros(1, requires_grad=True)
    oa = kit.optimizer(torch.optim.Adam(actor.parameters(), 1e-2))
    oc = kit.optimizer(torch.optim.Adam(critic.parameters(), 1e-2))
    ol = torch.optim.Adam([log_alpha], 1e-2)

    @kit.step
    def critic_step(actor: Any, critic: Any, target: Any, batch: Any, eps: Any, alpha: Any) -> Any:
        s, a, r, s2 = batch
        with torch.no_grad():
            a2, logp2 = actor(s2, eps)
            y = r + 0.9 * (torch.min(*target(s2, a2)) - alpha * logp2)
        q1, q2 = critic(s, a)
        loss = F.mse_loss(q1, y) + F.mse_loss(q2, y)
        critic.backward(loss)
        return loss

    @kit.step
    def actor_step(actor: Any, critic: Any, s: Any, eps: Any, alpha: Any) -> Any:
        a, logp = actor(s, eps)
        loss = (alpha * logp - torch.min(*critic(s, a))).mean()
        actor.backward(loss)
        return loss, logp.mean().detach()

    for _ in range(3):
        s, a, r, s2 = torch.randn(8, 3), torch.rand(8, 2), torch.randn(8, 1), torch.randn(8, 3)
        alpha = log_alpha.exp().item()
        oc.zero_grad()
        kit.note(critic_step(actor, critic, target, (s, a, r, s2), torch.randn(8, 2), alpha))
        oc.step()
        for p in net.parameters():
            p.requires_grad = False
        oa.zero_grad()
        loss, logp = actor_step(actor, critic, s, torch.randn(8, 2), alpha)
        oa.step()
        for p in net.parameters():
            p.requires_grad = True
        ol.zero_grad()
        (-log_alpha * (logp.reduce_mean() - 2)).mean().backward()
        ol.step()
        with torch.no_grad():
            for p, t in zip(net.parameters(), copied.parameters(), strict=True):
                t.data.copy_(0.05 * p.data + 0.95 * t.data)
        kit.note(loss, log_alpha.item())


@script()
def ddpg_with_parameter_noise_and_delayed_actor(kit: Kit) -> None:
    class Ddpg:
        """An agent with methods, as in many repositories."""

        def __init__(self) -> None:
            self.actor_net = nn.Sequential(
                nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1), nn.Tanh()
            )
            self.critic_net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
            self.actor, self.critic = kit.model(self.actor_net), kit.model(self.critic_net)
            self.oa = kit.optimizer(torch.optim.Adam(self.actor.parameters(), 1e-2))
            self.oc = kit.optimizer(
                torch.optim.Adam(self.critic.parameters(), 1e-2, weight_decay=1e-2)
            )
            self.total = 0

            @kit.step
            def critic_step(actor: Any, critic: Any, s: Any, a: Any, r: Any, s2: Any) -> Any:
                with torch.no_grad():
                    y = r + 0.9 * critic(torch.cat([s2, actor(s2)], 1))
                loss = F.mse_loss(critic(torch.cat([s, a], 1)), y)
                critic.backward(loss)
                return loss

            @kit.step
            def actor_step(actor: Any, critic: Any, s: Any) -> Any:
                loss = -critic(torch.cat([s, actor(s)], 1)).mean()
                actor.backward(loss)
                return loss

            self.critic_step, self.actor_step = critic_step, actor_step

        def perturb(self, std: float) -> None:
            with torch.no_grad():
                for p in self.actor_net.parameters():
                    p.add_(torch.randn(p.shape) * std)

        def learn(self, s: Any, a: Any, r: Any, s2: Any) -> Any:
            self.total += 1
            self.oc.zero_grad()
            found = [self.critic_step(self.actor, self.critic, s, a, r, s2)]
            self.oc.step()
            if self.total % 2 == 0:
                self.oa.zero_grad()
                found.append(self.actor_step(self.actor, self.critic, s))
                self.oa.step()
                self.perturb(0.01)
            return found

    agent = Ddpg()
    for _ in range(4):
        kit.note(
            *agent.learn(torch.randn(8, 3), torch.rand(8, 1), torch.randn(8, 1), torch.randn(8, 3))
        )
