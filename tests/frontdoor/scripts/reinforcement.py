"""Rollouts without gradients, then several epochs of updates; the model is called by its parts only."""

import torch
from torch import nn


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def get_value(self, x):
        return self.critic(x)

    def get_action(self, x, action=None):
        chances = torch.distributions.Categorical(logits=self.actor(x))
        action = chances.sample() if action is None else action
        return action, chances.log_prob(action), chances.entropy(), self.critic(x)


torch.manual_seed(0)
agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
state = torch.randn(8, 4)
for _ in range(30):
    states, actions, rewards = [], [], []
    for _ in range(32):
        with torch.no_grad():
            action, _, _, _ = agent.get_action(state)
        states.append(state)
        actions.append(action)
        state = state + 0.1 * torch.randn(8, 4) * (1.0 + action[:, None])
        rewards.append(-state.square().mean(1))
    states, actions, rewards = torch.cat(states), torch.cat(actions), torch.cat(rewards)
    for _ in range(2):
        for part in torch.randperm(len(states)).split(64):
            _, chance, entropy, value = agent.get_action(states[part], actions[part])
            advantage = rewards[part] - value.squeeze(1)
            loss = -(chance * advantage.detach()).mean() + advantage.square().mean() - 0.01 * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            print(f"loss {loss.item():.7f}", flush=True)
