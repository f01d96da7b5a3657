"""Updates of reinforcement learning on one batch of transitions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workloads import optimizers
from workloads.workload import Array, Params, Workload, dense_layers, float32, perceptron

DISCOUNT = 0.99


@dataclass(frozen=True, kw_only=True)
class Ppo(Workload):
    """A minibatch of PPO with continuous actions (Schulman et al., 2017).

    Clipped surrogate with normalized advantages, squared error of the value, entropy of a Gaussian
    whose deviation does not depend on the observation.
    """

    num_observations: int = 17
    num_actions: int = 6
    width: int = 64
    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.01

    @property
    def shape(self) -> str:
        return (
            f"PPO, policy and value {self.num_observations}-{self.width}-{self.width} tanh, {self.num_actions} actions"
        )

    def small(self) -> Ppo:
        return replace(self, batch=8, width=8)

    def data(self) -> tuple[Array, ...]:
        """Observations, actions, their old log probabilities, advantages, returns."""
        generator = np.random.default_rng(1)
        observations = generator.standard_normal((self.batch, self.num_observations), np.float32)
        actions = generator.standard_normal((self.batch, self.num_actions), np.float32)
        old = -0.5 * (actions**2 + math.log(2 * math.pi)).sum(axis=1)
        advantages, returns = generator.standard_normal((2, self.batch), np.float32)
        return observations, actions, old, advantages, returns

    def parameters(self) -> Params:
        generator = np.random.default_rng(0)
        hidden = (self.num_observations, self.width, self.width)
        return {
            "policy": dense_layers(generator, (*hidden, self.num_actions)),
            "value": dense_layers(generator, (*hidden, 1)),
            "log_std": np.zeros(self.num_actions, np.float32),
        }

    def loss(self, lib: Any, params: Params, *data: Any) -> Any:
        xp = lib.numpy
        observations, actions, old, advantages, returns = data
        advantages = (advantages - xp.mean(advantages)) / (xp.std(advantages) + 1e-8)
        mean = perceptron(params["policy"], observations, xp.tanh)
        log_std = params["log_std"]
        distance = (actions - mean) * xp.exp(-log_std)
        log_prob = -xp.sum(0.5 * distance**2 + log_std + 0.5 * math.log(2 * math.pi), axis=1)
        ratio = xp.exp(log_prob - old)
        clipped = xp.clip(ratio, 1 - self.clip, 1 + self.clip)
        surrogate = xp.mean(xp.minimum(ratio * advantages, clipped * advantages))
        value = perceptron(params["value"], observations, xp.tanh)[:, 0]
        value_loss = xp.mean((value - returns) ** 2)
        entropy = xp.sum(log_std + 0.5 * math.log(2 * math.pi * math.e))
        return -surrogate + self.value_weight * value_loss - self.entropy_weight * entropy


@dataclass(frozen=True, kw_only=True)
class Td3Critic(Workload):
    """The twin critics of TD3 (Fujimoto et al., 2018), with targets that follow them in every step."""

    num_observations: int = 17
    num_actions: int = 6
    width: int = 256
    target_rate: float = 0.005

    @property
    def shape(self) -> str:
        return f"twin critics {self.num_observations}+{self.num_actions}-{self.width}-{self.width}-1 relu, TD3"

    def small(self) -> Td3Critic:
        return replace(self, batch=8, width=8)

    def data(self) -> tuple[Array, ...]:
        """Observations, actions, rewards, whether it goes on, next observations, noise of the next actions."""
        generator = np.random.default_rng(1)
        observations, following = generator.standard_normal((2, self.batch, self.num_observations), np.float32)
        actions = np.tanh(generator.standard_normal((self.batch, self.num_actions), np.float32))
        noise = 0.2 * generator.standard_normal((self.batch, self.num_actions), np.float32)
        rewards = generator.standard_normal(self.batch, np.float32)
        going_on = float32(generator.uniform(size=self.batch) < 0.95)
        return observations, actions, rewards, going_on, following, noise

    def parameters(self) -> Params:
        generator = np.random.default_rng(0)
        widths = (self.num_observations + self.num_actions, self.width, self.width, 1)
        return [dense_layers(generator, widths, gain=2.0) for _ in range(2)]

    def initial_state(self) -> Any:
        params = self.parameters()
        actor_widths = (self.num_observations, self.width, self.width, self.num_actions)
        return {
            "critics": params,
            "targets": self.parameters(),
            "actor": dense_layers(np.random.default_rng(2), actor_widths, gain=2.0),
            "moments": optimizers.init(self.optimizer, params),
        }

    def loss(self, lib: Any, params: Params, *data: Any) -> Any:
        observations, actions, wanted = data
        pairs = lib.numpy.concatenate([observations, actions], axis=1)
        values = [perceptron(critic, pairs, lib.nn.relu)[:, 0] for critic in params]
        return sum(lib.numpy.mean((value - wanted) ** 2) for value in values)

    def wanted(self, lib: Any, state: Any, data: Any) -> Any:
        """The values that the critics learn."""
        xp = lib.numpy
        _, _, rewards, going_on, following, noise = data
        actions = xp.tanh(perceptron(state["actor"], following, lib.nn.relu))
        actions = xp.clip(actions + xp.clip(noise, -0.5, 0.5), -1.0, 1.0)
        pairs = xp.concatenate([following, actions], axis=1)
        first, second = (perceptron(critic, pairs, lib.nn.relu)[:, 0] for critic in state["targets"])
        return rewards + DISCOUNT * going_on * xp.minimum(first, second)

    def step(self, lib: Any, state: Any, data: Any) -> tuple[Any, Any]:
        batch = (data[0], data[1], self.wanted(lib, state, data))
        (critics, moments), value = super().step(lib, (state["critics"], state["moments"]), batch)
        rate = self.target_rate
        targets = lib.tree.map(lambda old, new: (1 - rate) * old + rate * new, state["targets"], critics)
        return {"critics": critics, "targets": targets, "actor": state["actor"], "moments": moments}, value


@dataclass(frozen=True, kw_only=True)
class Dqn(Workload):
    """Deep Q-learning (Mnih et al., 2015) with Huber's loss; every ``refresh_steps`` the target network is replaced."""

    layers: tuple[int, ...]
    refresh_steps: int = 500

    @property
    def shape(self) -> str:
        return f"{'-'.join(map(str, self.layers))} relu, DQN"

    def small(self) -> Dqn:
        return replace(self, batch=8, layers=(self.layers[0], 12, 8, self.layers[-1]), refresh_steps=7)

    def data(self) -> tuple[Array, ...]:
        """Observations, actions, rewards, whether it goes on, next observations."""
        generator = np.random.default_rng(1)
        observations, following = generator.standard_normal((2, self.batch, self.layers[0]), np.float32)
        actions = generator.integers(self.layers[-1], size=self.batch, dtype=np.int32)
        rewards = np.ones(self.batch, np.float32)
        going_on = float32(generator.uniform(size=self.batch) < 0.95)
        return observations, actions, rewards, going_on, following

    def parameters(self) -> Params:
        return dense_layers(np.random.default_rng(0), self.layers, gain=2.0)

    def initial_state(self) -> Any:
        params = self.parameters()
        return {"params": params, "target": self.parameters(), "moments": optimizers.init(self.optimizer, params)}

    def loss(self, lib: Any, params: Params, *data: Any) -> Any:
        xp = lib.numpy
        observations, actions, wanted = data
        chosen = lib.nn.one_hot(actions, self.layers[-1])
        error = xp.sum(perceptron(params, observations, lib.nn.relu) * chosen, axis=1) - wanted
        inside = xp.clip(error, -1.0, 1.0)
        return xp.mean(inside * (error - 0.5 * inside))

    def step(self, lib: Any, state: Any, data: Any) -> tuple[Any, Any]:
        xp = lib.numpy
        observations, actions, rewards, going_on, following = data
        best = xp.max(perceptron(state["target"], following, lib.nn.relu), axis=1)
        batch = (observations, actions, rewards + DISCOUNT * going_on * best)
        (params, moments), value = super().step(lib, (state["params"], state["moments"]), batch)
        is_due = moments["count"] % self.refresh_steps == 0
        target = lib.tree.map(lambda old, new: xp.where(is_due, new, old), state["target"], params)
        return {"params": params, "target": target, "moments": moments}, value


PPO = Ppo(name="ppo", batch=64, learning_rate=3e-4)
TD3_CRITIC = Td3Critic(name="td3_critic", batch=256, learning_rate=3e-4)
DQN = Dqn(name="dqn", batch=128, layers=(4, 120, 84, 2), learning_rate=2.5e-4)
