"""Training scripts of reinforcement learning, in the shape of their sources; models are small and random."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

from .loop import STEPS, compiled, log, script, steps


@script("vwxyzjn/cleanrl: ppo", "rollout under no_grad, several epochs of mini-batches, clipping, annealed rate")
def ppo() -> None:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(
                nn.Conv2d(4, 16, 8, 4),
                nn.ReLU(),
                nn.Conv2d(16, 32, 4, 2),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(32 * 16, 128),
                nn.ReLU(),
            )
            self.actor, self.critic = nn.Linear(128, 4), nn.Linear(128, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.network(x)
            return self.actor(hidden), self.critic(hidden)

    agent = compiled(Agent())
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    for update in steps(range(STEPS)):
        optimizer.param_groups[0]["lr"] = (1.0 - update / STEPS) * 2.5e-4
        obs = torch.rand(16, 8, 4, 48, 48)
        actions, logprobs, values = torch.zeros(16, 8), torch.zeros(16, 8), torch.zeros(16, 8)
        for step in range(16):
            with torch.no_grad():
                logits, value = agent(obs[step])
                probs = torch.distributions.Categorical(logits=logits)
                actions[step] = probs.sample()
                logprobs[step], values[step] = probs.log_prob(actions[step]), value.flatten()
        returns = torch.rand(16, 8) + values
        advantages = returns - values
        b_obs = obs.flatten(0, 1)
        b_actions, b_logprobs, b_returns, b_advantages = (t.flatten() for t in (actions, logprobs, returns, advantages))
        for _ in range(2):
            for mb_inds in torch.randperm(128).chunk(2):
                logits, newvalue = agent(b_obs[mb_inds])
                probs = torch.distributions.Categorical(logits=logits)
                ratio = (probs.log_prob(b_actions[mb_inds]) - b_logprobs[mb_inds]).exp()
                mb_advantages = b_advantages[mb_inds]
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                pg_loss = torch.max(-mb_advantages * ratio, -mb_advantages * ratio.clamp(0.9, 1.1)).mean()
                v_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb_inds]) ** 2).mean()
                loss = pg_loss - 0.01 * probs.entropy().mean() + v_loss * 0.5
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        log(loss)


@script("pytorch/examples: reinforce", "many forwards before one backward, sampling, Adam")
def reinforce() -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.affine1, self.dropout, self.affine2 = nn.Linear(64, 256), nn.Dropout(p=0.6), nn.Linear(256, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu(self.dropout(self.affine1(x)))
            return F.softmax(self.affine2(x), dim=1)

    policy = compiled(Policy())
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in steps(range(STEPS)):
        saved_log_probs, rewards = [], []
        for _ in range(10):
            state = torch.randn(512, 64)  # of many environments
            m = Categorical(policy(state))
            action = m.sample()
            saved_log_probs.append(m.log_prob(action))
            rewards.append(torch.rand(512))
        R, policy_loss, returns = torch.zeros(512), [], []
        for r in rewards[::-1]:
            R = r + 0.99 * R
            returns.insert(0, R)
        scaled = torch.stack(returns)
        scaled = (scaled - scaled.mean()) / (scaled.std() + 1e-6)
        for log_prob, ret in zip(saved_log_probs, scaled, strict=True):
            policy_loss.append(-log_prob * ret)
        optimizer.zero_grad()
        loss = torch.cat(policy_loss).sum()
        loss.backward()
        optimizer.step()
        log(loss)
