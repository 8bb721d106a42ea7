"""PPO and SAC as single loops of torch and gymnasium, in the style of CleanRL: the floor that other benchmarks compare with.

The loops are written anew. `PPOLoop` has the structure and the settings of `ppo.py`: a `SyncVectorEnv`, actor and critic asked at every
step through `torch.distributions`, GAE in a Python loop, torch's default Adam; 4 environments x 128 steps, 4 epochs of 4 minibatches,
learning rate 2.5e-4 that falls to 0, Adam's epsilon 1e-5, clip 0.2 of ratios and values, entropy weight 0.01, value weight 0.5 of half
the squared error, advantages scaled for each minibatch, gradients clipped at 0.5, separate MLPs 2x64 tanh. It bootstraps from the
observation after a truncation as if the episode had ended there, as that file does.

`SACLoop` has the structure of `sac_continuous_action.py`: one environment, a memory in numpy, after each step one update of both
critics, the policy, the temperature and the targets with 256 transitions, networks 2x256 relu. All rates are 1e-3, and the policy is
updated as often as the critics (that file has 3e-4 and 1e-3, and updates the policy twice at every second step).
"""

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Normal

N_ENVS = 4
N_STEPS = 128
EPOCHS = 4
MINIBATCHES = 4
LR = 2.5e-4
EPS = 1e-5
GAMMA = 0.99
LAM = 0.95
CLIP = 0.2
C_ENTROPY = 0.01
C_VALUE = 0.5
MAX_GRAD_NORM = 0.5


def layer(n_in, n_out, gain=2**0.5):
    made = nn.Linear(n_in, n_out)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


def greedy_score(env, act):
    "Mean return of an episode in each of 20 environments; `act(obs)` gives the actions as tensors."
    envs = gym.vector.SyncVectorEnv([lambda: gym.make(env)] * 20)
    total = np.zeros(20)
    obs = envs.reset(seed=1000)[0]
    alive = np.ones(20, dtype=bool)
    while alive.any():
        with torch.no_grad():
            actions = act(torch.tensor(obs, dtype=torch.float32)).numpy()
        obs, rew, terminated, truncated, _ = envs.step(actions)
        total += rew * alive
        alive &= ~(terminated | truncated)
    return total.mean()


class Agent(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.critic = nn.Sequential(
            layer(n_obs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0)
        )
        self.actor = nn.Sequential(
            layer(n_obs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, n_act, 0.01)
        )

    def act_and_value(self, obs, act=None):
        dist = Categorical(logits=self.actor(obs))
        if act is None:
            act = dist.sample()
        return act, dist.log_prob(act), dist.entropy(), self.critic(obs)[:, 0]


class PPOLoop:
    "PPO in the style of CleanRL's `ppo.py`; its policy acts greedily in `score`."

    def __init__(self, env, seed):
        torch.manual_seed(seed)
        self.env = env
        self.rng = np.random.default_rng(seed)
        make = lambda: gym.wrappers.RecordEpisodeStatistics(gym.make(env))
        self.envs = gym.vector.SyncVectorEnv(
            [make] * N_ENVS, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
        )
        self.n_obs = self.envs.single_observation_space.shape
        self.agent = Agent(self.n_obs[0], int(self.envs.single_action_space.n))
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=LR, eps=EPS)
        self.obs = torch.tensor(self.envs.reset(seed=seed)[0])
        self.done = torch.zeros(N_ENVS)

    def collect(self):
        obs = torch.zeros((N_STEPS, N_ENVS, *self.n_obs))
        act = torch.zeros((N_STEPS, N_ENVS), dtype=torch.long)
        logp, rew, done, value = (torch.zeros((N_STEPS, N_ENVS)) for _ in range(4))
        for t in range(N_STEPS):
            obs[t], done[t] = self.obs, self.done
            with torch.no_grad():
                act[t], logp[t], _, value[t] = self.agent.act_and_value(self.obs)
            new, r, terminated, truncated, _ = self.envs.step(act[t].numpy())
            rew[t] = torch.tensor(r)
            self.obs = torch.tensor(new)
            self.done = torch.tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
        with torch.no_grad():
            next_value = self.agent.critic(self.obs)[:, 0]
            next_done = self.done
            last = 0.0
            adv = torch.zeros_like(rew)
            for t in reversed(range(N_STEPS)):
                delta = rew[t] + GAMMA * next_value * (1 - next_done) - value[t]
                adv[t] = last = delta + GAMMA * LAM * (1 - next_done) * last
                next_value = value[t]
                next_done = done[t]
        return [x.flatten(0, 1) for x in (obs, act, logp, adv, adv + value, value)]

    def update(self, batch):
        obs, act, logp, adv, ret, value = batch
        order = np.arange(len(adv))
        size = len(adv) // MINIBATCHES
        self.clipped = []
        for _ in range(EPOCHS):
            self.rng.shuffle(order)
            for start in range(0, len(adv), size):
                rows = order[start : start + size]
                _, new_logp, entropy, v = self.agent.act_and_value(obs[rows], act[rows])
                ratio = (new_logp - logp[rows]).exp()
                a = adv[rows]
                with torch.no_grad():
                    self.kl = ((ratio - 1) - ratio.log()).mean()
                    self.clipped.append(((ratio - 1).abs() > CLIP).float().mean().item())
                a = (a - a.mean()) / (a.std() + 1e-8)
                policy = torch.max(-a * ratio, -a * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                clipped = value[rows] + (v - value[rows]).clamp(-CLIP, CLIP)
                error = torch.max((v - ret[rows]) ** 2, (clipped - ret[rows]) ** 2)
                loss = policy - C_ENTROPY * entropy.mean() + C_VALUE * 0.5 * error.mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), MAX_GRAD_NORM)
                self.optimizer.step()

    def score(self):
        def act(obs):
            return self.agent.actor(obs).argmax(-1)

        return greedy_score(self.env, act)


# SAC
SAC_HIDDEN = 256
SAC_BATCH = 256
SAC_LR = 1e-3
SAC_WARMUP = 1000
TAU = 0.005
LOG_STD_MIN, LOG_STD_MAX = -5, 2


def hidden_layers(n_in):
    return [nn.Linear(n_in, SAC_HIDDEN), nn.ReLU(), nn.Linear(SAC_HIDDEN, SAC_HIDDEN), nn.ReLU()]


class SoftQ(nn.Module):
    "The value of an observation and an action."

    def __init__(self, n_obs, n_act):
        super().__init__()
        self.layers = nn.Sequential(*hidden_layers(n_obs + n_act), nn.Linear(SAC_HIDDEN, 1))

    def forward(self, obs, act):
        return self.layers(torch.cat([obs, act], 1))[:, 0]


class SquashedActor(nn.Module):
    "A normal distribution through tanh, stretched to the bounds of the actions."

    def __init__(self, n_obs, space):
        super().__init__()
        self.layers = nn.Sequential(*hidden_layers(n_obs))
        self.mean = nn.Linear(SAC_HIDDEN, space.shape[0])
        self.log_std = nn.Linear(SAC_HIDDEN, space.shape[0])
        self.register_buffer("scale", torch.tensor((space.high - space.low) / 2))
        self.register_buffer("centre", torch.tensor((space.high + space.low) / 2))

    def forward(self, obs):
        x = self.layers(obs)
        log_std = torch.tanh(self.log_std(x))
        return self.mean(x), LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) * (log_std + 1) / 2

    def act(self, obs):
        "A random action, and the logarithm of its density."
        mean, log_std = self(obs)
        normal = Normal(mean, log_std.exp())
        x = normal.rsample()
        y = torch.tanh(x)
        logp = normal.log_prob(x) - torch.log(self.scale * (1 - y**2) + 1e-6)
        return y * self.scale + self.centre, logp.sum(1)


class Memory:
    "Transitions in numpy arrays, the oldest of which are overwritten."

    def __init__(self, capacity, n_obs, n_act, seed):
        self.rng = np.random.default_rng(seed)
        self.obs = np.zeros((capacity, n_obs), np.float32)
        self.next_obs = np.zeros((capacity, n_obs), np.float32)
        self.act = np.zeros((capacity, n_act), np.float32)
        self.rew = np.zeros(capacity, np.float32)
        self.term = np.zeros(capacity, np.float32)
        self.n = 0

    def add(self, obs, next_obs, act, rew, term):
        i = self.n % len(self.rew)
        self.obs[i], self.next_obs[i], self.act[i] = obs, next_obs, act
        self.rew[i], self.term[i] = rew, term
        self.n += 1

    def sample(self, n):
        rows = self.rng.integers(min(self.n, len(self.rew)), size=n)
        arrays = (self.obs, self.next_obs, self.act, self.rew, self.term)
        return [torch.from_numpy(x[rows]) for x in arrays]


class SACLoop:
    "SAC in the style of CleanRL's `sac_continuous_action.py`; its policy acts greedily in `score`."

    def __init__(self, env, seed):
        torch.manual_seed(seed)
        self.env = env
        make = lambda: gym.wrappers.RecordEpisodeStatistics(gym.make(env))
        self.envs = gym.vector.SyncVectorEnv(
            [make], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
        )
        self.space = self.envs.single_action_space
        self.space.seed(seed)
        n_obs, n_act = self.envs.single_observation_space.shape[0], self.space.shape[0]
        self.actor = SquashedActor(n_obs, self.space)
        self.critics = nn.ModuleList([SoftQ(n_obs, n_act) for _ in range(2)])
        self.targets = nn.ModuleList([SoftQ(n_obs, n_act) for _ in range(2)])
        self.targets.load_state_dict(self.critics.state_dict())
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.target_entropy = -float(n_act)
        self.optimizers = [
            torch.optim.Adam(parameters, lr=SAC_LR)
            for parameters in (
                self.critics.parameters(),
                self.actor.parameters(),
                [self.log_alpha],
            )
        ]
        self.memory = Memory(1_000_000, n_obs, n_act, seed)
        self.obs = self.envs.reset(seed=seed)[0]

    def step(self):
        "One step of the environment."
        if self.memory.n < SAC_WARMUP:
            act = self.space.sample()[None]
        else:
            with torch.no_grad():
                act = self.actor.act(torch.tensor(self.obs, dtype=torch.float32))[0].numpy()
        new, rew, term, trunc, info = self.envs.step(act)
        end = info["final_obs"][0] if (term | trunc)[0] else new[0]
        self.memory.add(self.obs[0], end, act[0], rew[0], term[0])
        self.obs = new

    def update(self):
        obs, next_obs, act, rew, term = self.memory.sample(SAC_BATCH)
        of_critics, of_actor, of_alpha = self.optimizers
        alpha = self.log_alpha.exp().item()
        with torch.no_grad():
            next_act, next_logp = self.actor.act(next_obs)
            next_q = torch.min(*(target(next_obs, next_act) for target in self.targets))
            goal = rew + GAMMA * (1 - term) * (next_q - alpha * next_logp)
        loss = sum(nn.functional.mse_loss(critic(obs, act), goal) for critic in self.critics)
        of_critics.zero_grad()
        loss.backward()
        of_critics.step()

        new_act, logp = self.actor.act(obs)
        q = torch.min(*(critic(obs, new_act) for critic in self.critics))
        loss = (alpha * logp - q).mean()
        of_actor.zero_grad()
        loss.backward()
        of_actor.step()

        loss = (-self.log_alpha.exp() * (logp.detach() + self.target_entropy)).mean()
        of_alpha.zero_grad()
        loss.backward()
        of_alpha.step()

        for target, x in zip(self.targets.parameters(), self.critics.parameters()):
            target.data.copy_(TAU * x.data + (1 - TAU) * target.data)

    def score(self):
        def act(obs):
            mean, _ = self.actor(obs)
            return torch.tanh(mean) * self.actor.scale + self.actor.centre

        return greedy_score(self.env, act)
