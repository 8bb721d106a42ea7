"""The floor: a hand-written collection loop that does the inference and the recording of on-policy fragments, and nothing else."""
import gymnasium as gym
import numpy as np
import torch
from torch import nn

HALF_LOG_2PI = 0.5 * float(np.log(2 * np.pi))


def mlp(n_in, n_out, hidden=64):
    "A perceptron with two tanh layers."
    return nn.Sequential(nn.Linear(n_in, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, n_out))


class Floor:
    """A loop over `B` environments in eager torch, which collects one fragment per call.

    It records observation, action, reward, both ends, log-probability and value.

    `values` says when the critic is asked: every 'step', as most code does, or once a 'fragment'.
    """
    def __init__(self, env_id, n_envs, n_steps, seed=0, values='step'):
        torch.manual_seed(seed)
        self.envs = [gym.make(env_id, disable_env_checker=True) for _ in range(n_envs)]
        self.n_envs, self.n_steps, self.values = n_envs, n_steps, values
        obs_space, act_space = self.envs[0].observation_space, self.envs[0].action_space
        self.discrete = isinstance(act_space, gym.spaces.Discrete)
        n_obs, n_act = obs_space.shape[0], act_space.n if self.discrete else act_space.shape[0]
        self.actor, self.critic = mlp(n_obs, int(n_act)), mlp(n_obs, 1)
        self.log_std = torch.zeros(int(n_act))
        if not self.discrete: self.low, self.high = act_space.low, act_space.high
        self.obs = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)])

    @torch.no_grad()
    def collect(self):
        T, B = self.n_steps, self.n_envs
        obs_buf = torch.empty(T + 1, B, self.obs.shape[1])
        act_buf = torch.empty(T, B, dtype=torch.long) if self.discrete else torch.empty(T, B, len(self.log_std))
        rew_buf, logp_buf, value_buf = torch.empty(T, B), torch.empty(T, B), torch.empty(T, B)
        term_buf, trunc_buf = torch.empty(T, B, dtype=torch.bool), torch.empty(T, B, dtype=torch.bool)
        std = self.log_std.exp()
        for t in range(T):
            obs = torch.as_tensor(self.obs, dtype=torch.float32)
            out = self.actor(obs)
            if self.discrete:
                logits = out.log_softmax(-1)
                act = torch.multinomial(logits.exp(), 1)
                logp = logits.gather(-1, act)[:, 0]
                act = act[:, 0]
                env_act = act.tolist()
            else:
                noise = torch.randn_like(out)
                act = out + std * noise
                logp = (-0.5 * noise * noise - self.log_std - HALF_LOG_2PI).sum(-1)
                env_act = np.clip(act.numpy(), self.low, self.high)
            if self.values == 'step': value_buf[t] = self.critic(obs)[:, 0]
            obs_buf[t], act_buf[t], logp_buf[t] = obs, act, logp
            rew, term, trunc = np.empty(B, np.float32), np.empty(B, bool), np.empty(B, bool)
            next_obs = np.empty_like(self.obs)
            for b, env in enumerate(self.envs):
                x, rew[b], term[b], trunc[b], _ = env.step(env_act[b])
                if term[b] or trunc[b]: x, _ = env.reset()
                next_obs[b] = x
            self.obs = next_obs
            rew_buf[t], term_buf[t], trunc_buf[t] = torch.from_numpy(rew), torch.from_numpy(term), torch.from_numpy(trunc)
        obs_buf[T] = torch.as_tensor(self.obs, dtype=torch.float32)
        if self.values == 'fragment': value_buf = self.critic(obs_buf)[..., 0]
        return obs_buf, act_buf, rew_buf, term_buf, trunc_buf, logp_buf, value_buf

    def close(self):
        for env in self.envs: env.close()
