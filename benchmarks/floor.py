"""The floors: hand-written collection loops that do the inference and the recording of on-policy fragments, and nothing else."""

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from rollpipe.pipes import Pipe

HALF_LOG_2PI = 0.5 * float(np.log(2 * np.pi))


def mlp(n_in, n_out, hidden=64):
    "A perceptron with two tanh layers."
    return nn.Sequential(
        nn.Linear(n_in, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, n_out),
    )


class Passing(Pipe):
    "Ticks pass through it. So a collector behind it reads all of them, and its source cannot write into the fragment."

    reads, keeps_items = 1, False

    def stream(self, items):
        yield from items


class Floor:
    """A loop over `B` environments in eager torch, which collects one fragment per call.

    It records observation, action, reward, both ends, log-probability and value.

    `values` says when the critic is asked: every 'step', as most code does, or once a 'fragment'.
    """

    def __init__(self, env_id, n_envs, n_steps, seed=0, values="step"):
        torch.manual_seed(seed)
        self.envs = [gym.make(env_id, disable_env_checker=True) for _ in range(n_envs)]
        self.n_envs = n_envs
        self.n_steps = n_steps
        self.values = values
        obs_space, act_space = self.envs[0].observation_space, self.envs[0].action_space
        self.discrete = isinstance(act_space, gym.spaces.Discrete)
        n_obs = obs_space.shape[0]
        n_act = act_space.n if self.discrete else act_space.shape[0]
        self.actor = mlp(n_obs, int(n_act))
        self.critic = mlp(n_obs, 1)
        self.log_std = torch.zeros(int(n_act))
        if not self.discrete:
            self.low, self.high = act_space.low, act_space.high
        self.obs = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)])

    def act(self, obs):
        "Actions, their log-probabilities, and what the environments take."
        out = self.actor(obs)
        if self.discrete:
            logits = out.log_softmax(-1)
            act = torch.multinomial(logits.exp(), 1)
            return act[:, 0], logits.gather(-1, act)[:, 0], act[:, 0].tolist()
        noise = torch.randn_like(out)
        act = out + self.log_std.exp() * noise
        logp = (-0.5 * noise * noise - self.log_std - HALF_LOG_2PI).sum(-1)
        return act, logp, np.clip(act.numpy(), self.low, self.high)

    @torch.no_grad()
    def collect(self):
        T, B = self.n_steps, self.n_envs
        obs_buf = torch.empty(T + 1, B, self.obs.shape[1])
        act_buf = (
            torch.empty(T, B, dtype=torch.long)
            if self.discrete
            else torch.empty(T, B, len(self.log_std))
        )
        rew_buf = torch.empty(T, B)
        logp_buf = torch.empty(T, B)
        value_buf = torch.empty(T, B)
        term_buf = torch.empty(T, B, dtype=torch.bool)
        trunc_buf = torch.empty(T, B, dtype=torch.bool)
        for t in range(T):
            obs = torch.as_tensor(self.obs, dtype=torch.float32)
            act, logp, env_act = self.act(obs)
            if self.values == "step":
                value_buf[t] = self.critic(obs)[:, 0]
            obs_buf[t] = obs
            act_buf[t] = act
            logp_buf[t] = logp
            rew = np.empty(B, np.float32)
            term = np.empty(B, bool)
            trunc = np.empty(B, bool)
            next_obs = np.empty_like(self.obs)
            for b, env in enumerate(self.envs):
                x, rew[b], term[b], trunc[b], _ = env.step(env_act[b])
                if term[b] or trunc[b]:
                    x, _ = env.reset()
                next_obs[b] = x
            self.obs = next_obs
            rew_buf[t] = torch.from_numpy(rew)
            term_buf[t] = torch.from_numpy(term)
            trunc_buf[t] = torch.from_numpy(trunc)
        obs_buf[T] = torch.as_tensor(self.obs, dtype=torch.float32)
        if self.values == "fragment":
            value_buf = self.critic(obs_buf)[..., 0]
        return obs_buf, act_buf, rew_buf, term_buf, trunc_buf, logp_buf, value_buf

    def close(self):
        for env in self.envs:
            env.close()


class NumpyFloor(Floor):
    "The same loop with the inference in numpy, the fastest way by hand for networks of this size. The critic is asked once a fragment."

    def __init__(self, env_id, n_envs, n_steps, seed=0):
        super().__init__(env_id, n_envs, n_steps, seed, values="fragment")
        self.weights = [x.detach().numpy() for x in self.actor.parameters()]
        self.rng = np.random.default_rng(seed)
        self.shift, self.std = self.log_std.numpy() + HALF_LOG_2PI, self.log_std.exp().numpy()

    def collect(self):
        T, B = self.n_steps, self.n_envs
        w1, b1, w2, b2, w3, b3 = self.weights
        obs_buf = np.empty((T + 1, B, self.obs.shape[1]), np.float32)
        act_buf = (
            np.empty((T, B), np.int64)
            if self.discrete
            else np.empty((T, B, len(self.std)), np.float32)
        )
        rew_buf = np.empty((T, B), np.float32)
        logp_buf = np.empty((T, B), np.float32)
        term_buf = np.zeros((T, B), bool)
        trunc_buf = np.zeros((T, B), bool)
        obs_buf[0] = self.obs
        rows = np.arange(B)
        for t in range(T):
            out = np.tanh(np.tanh(obs_buf[t] @ w1.T + b1) @ w2.T + b2) @ w3.T + b3
            if self.discrete:
                logits = out - out.max(-1, keepdims=True)
                logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
                act = (logits + self.rng.gumbel(size=out.shape)).argmax(-1)
                logp_buf[t] = logits[rows, act]
                env_act = act.tolist()
            else:
                noise = self.rng.standard_normal(out.shape, np.float32)
                act = out + self.std * noise
                logp_buf[t] = (-0.5 * noise * noise - self.shift).sum(-1)
                env_act = np.clip(act, self.low, self.high)
            act_buf[t] = act
            for b, env in enumerate(self.envs):
                x, rew_buf[t, b], term_buf[t, b], trunc_buf[t, b], _ = env.step(env_act[b])
                if term_buf[t, b] or trunc_buf[t, b]:
                    x, _ = env.reset()
                obs_buf[t + 1, b] = x
        self.obs = obs_buf[T].copy()
        obs_buf, *others = map(
            torch.from_numpy, (obs_buf, act_buf, rew_buf, term_buf, trunc_buf, logp_buf)
        )
        with torch.no_grad():
            return obs_buf, *others, self.critic(obs_buf)[..., 0]
