"""Another library on a MuJoCo environment with the settings that its authors publish, in the form of a run that `rollpipe report` reads.

    python benchmarks/peer_mujoco.py contrib|sb3|tianshou ENV --seed 0 --out FOLDER [--steps 1000000]

contrib: `TRPO` of Stable-Baselines3-contrib, sb3: `PPO` of Stable-Baselines3, with the settings of rl-baselines3-zoo (22e3ff2) for the v4
environment of the same name, or for Ant where it has none. tianshou: `TRPO` with the settings of its `examples/mujoco/mujoco_trpo.py`. They
train on the same v5 environments as rollpipe, and rollpipe's `evaluate` plays with them: ten greedy episodes every 50 000 steps, 100 at the
end, with the normalisation of observations as it is at that moment. The interpreter has the library, rollpipe, and both in one:

    python -m venv DIR; DIR/bin/pip install . sb3-contrib tianshou 'gymnasium[mujoco]'

A training that was cut off begins again. One that is complete is not made again.
"""

import argparse
import copy
import json
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from rollpipe.agents import evaluate
from rollpipe.layers import Actor
from rollpipe.runs.evaluations import evaluation_seed, read_evaluations, write_evaluations

EVERY = 50_000
TRPO = dict(
    n_envs=2,
    n_steps=1024,
    batch_size=128,
    gamma=0.99,
    gae_lambda=0.95,
    cg_max_steps=25,
    cg_damping=0.1,
    n_critic_updates=20,
    learning_rate=1e-3,
)
WIDE = dict(
    log_std_init=-2,
    ortho_init=False,
    activation_fn=torch.nn.ReLU,
    net_arch=dict(pi=[256, 256], vf=[256, 256]),
)
ZOO: dict = dict(
    contrib={
        "Ant": TRPO,
        "HalfCheetah": TRPO | dict(target_kl=0.04),
        "Swimmer": TRPO | dict(gamma=0.9999),
    },
    sb3={
        "Ant": dict(n_envs=1),
        "Swimmer": dict(
            n_envs=4,
            n_steps=1024,
            batch_size=256,
            gamma=0.9999,
            learning_rate=6e-4,
            gae_lambda=0.98,
        ),
        "HalfCheetah": dict(
            n_envs=1,
            n_steps=512,
            batch_size=64,
            gamma=0.98,
            learning_rate=2.0633e-05,
            ent_coef=0.000401762,
            clip_range=0.1,
            n_epochs=20,
            gae_lambda=0.92,
            max_grad_norm=0.8,
            vf_coef=0.58096,
            policy_kwargs=WIDE,
        ),
        "Hopper": dict(
            n_envs=1,
            n_steps=512,
            batch_size=32,
            gamma=0.999,
            learning_rate=9.80828e-05,
            ent_coef=0.00229519,
            clip_range=0.2,
            n_epochs=5,
            gae_lambda=0.99,
            max_grad_norm=0.7,
            vf_coef=0.835671,
            policy_kwargs=WIDE,
        ),
        "Walker2d": dict(
            n_envs=1,
            n_steps=512,
            batch_size=32,
            gamma=0.99,
            learning_rate=5.05041e-05,
            ent_coef=0.000585045,
            clip_range=0.1,
            n_epochs=20,
            gae_lambda=0.95,
            max_grad_norm=1,
            vf_coef=0.871923,
        ),
    },
)


class Greedy(Actor):
    "A policy of another library: `act` maps observations [B, ...] to actions [B, ...], both numpy."

    uses_past = False

    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        return (
            torch.from_numpy(np.ascontiguousarray(self.act(obs[0].numpy()), np.float32))[None],
            (),
            {},
        )


class Diary:
    "The evaluations of a training."

    def __init__(self, env, seed, steps, out):
        self.env = env
        self.seed = seed
        self.steps = steps
        self.out = out
        self.records = []
        self.due = 0
        self.begun = perf_counter()
        self.away = 0.0
        self.best = (-np.inf, None)

    def add(self, kind, steps, updates, act, episodes):
        start = perf_counter()
        found = evaluate(
            self.env, Greedy(act), episodes, seed=(seed := evaluation_seed(self.seed, kind, steps))
        )
        self.records.append(
            dict(
                kind=kind,
                steps=steps,
                updates=updates,
                seconds=start - self.begun - self.away,
                mean=found.mean,
                std=found.std,
                returns=found.returns.tolist(),
                lengths=found.lengths.tolist(),
                seed=seed,
            )
        )
        write_evaluations(self.out, self.records)
        self.away += perf_counter() - start
        return found.mean

    def see(self, steps, updates, policy):
        "Evaluate if it is time. `policy()` gives a function that acts as the learner does now, and goes on to do so."
        if steps < self.due:
            return
        self.due = min((steps // EVERY + 1) * EVERY, max(self.steps, steps + 1))
        mean = self.add("training", steps, updates, act := policy(), 10)
        if mean > self.best[0]:
            self.best = mean, act
        if steps >= self.steps:
            self.add("last", steps, updates, act, 100)
            self.add("best", steps, updates, self.best[1], 100)


def of_sb3(model_class, settings, diary):
    "A training with a model of Stable-Baselines3."
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    settings = dict(settings)
    vec = VecNormalize(
        make_vec_env(diary.env, settings.pop("n_envs"), seed=diary.seed),
        gamma=settings.get("gamma", 0.99),
    )
    model = model_class("MlpPolicy", vec, seed=diary.seed, device="cpu", **settings)

    untrained = copy.deepcopy(
        model.policy
    )  # later it holds tensors of a graph, which cannot be copied

    def policy():
        now = copy.deepcopy(untrained)
        rms = copy.deepcopy(vec.obs_rms)
        now.load_state_dict(model.policy.state_dict())
        return lambda obs: now.predict(
            np.clip(
                (obs - rms.mean) / np.sqrt(rms.var + vec.epsilon), -vec.clip_obs, vec.clip_obs
            ).astype(np.float32),
            deterministic=True,
        )[0]

    class Evaluate(BaseCallback):
        def _on_rollout_start(self):
            diary.see(self.num_timesteps, model._n_updates, policy)

        def _on_step(self):
            return True

    model.learn(diary.steps, callback=Evaluate())
    diary.see(model.num_timesteps, model._n_updates, policy)


def of_tianshou(diary):
    "A training with Tianshou's TRPO, which follows its example. The learning rate falls over 3 million steps, as there."
    import gymnasium as gym
    from tianshou.algorithm import TRPO
    from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory, LRSchedulerFactoryLinear
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv, VectorEnvNormObs
    from tianshou.trainer import OnPolicyTrainerParams
    from tianshou.utils.logger.logger_base import LazyLogger
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic
    from torch.distributions import Independent, Normal

    np.random.seed(diary.seed)
    torch.manual_seed(diary.seed)
    envs = VectorEnvNormObs(DummyVectorEnv([lambda: gym.make(diary.env)] * 16))
    envs.seed(diary.seed)
    space = gym.make(diary.env).action_space
    shape = gym.make(diary.env).observation_space.shape
    net = lambda: Net(state_shape=shape, hidden_sizes=[64, 64], activation=torch.nn.Tanh)
    actor = ContinuousActorProbabilistic(
        preprocess_net=net(), action_shape=space.shape, unbounded=True
    )
    critic = ContinuousCritic(preprocess_net=net())
    torch.nn.init.constant_(actor.sigma_param, -0.5)
    for m in [*actor.modules(), *critic.modules()]:
        if not isinstance(m, torch.nn.Linear):
            continue
        torch.nn.init.orthogonal_(m.weight, gain=2**0.5)
        torch.nn.init.zeros_(m.bias)
    for m in actor.mu.modules():
        if isinstance(m, torch.nn.Linear):
            m.weight.data.mul_(0.01)
    optim = AdamOptimizerFactory(lr=1e-3).with_lr_scheduler_factory(
        LRSchedulerFactoryLinear(
            max_epochs=100, epoch_num_steps=30_000, collection_step_num_env_steps=1024
        )
    )
    taught = ProbabilisticActorPolicy(
        actor=actor,
        dist_fn=lambda x: Independent(Normal(*x), 1),
        action_scaling=True,
        action_bound_method="clip",
        action_space=space,
    )
    algorithm = TRPO(
        policy=taught,
        critic=critic,
        optim=optim,
        gamma=0.99,
        gae_lambda=0.95,
        return_scaling=True,
        advantage_normalization=True,
        optim_critic_iters=20,
        max_kl=0.01,
        backtrack_coeff=0.8,
        max_backtracks=10,
    )

    def policy():
        now = copy.deepcopy(actor)
        rms = copy.deepcopy(envs.get_obs_rms())

        def act(obs):
            with torch.no_grad():
                (loc, _), _ = now(rms.norm(obs))
            return taught.map_action(loc.numpy())

        return act

    class Evaluate(LazyLogger):
        def save_data(self, epoch, env_step, update_step, save_checkpoint_fn=None):
            diary.see(env_step, update_step, policy)

    diary.see(0, 0, policy)
    algorithm.run_training(
        OnPolicyTrainerParams(
            training_collector=Collector(
                algorithm, envs, VectorReplayBuffer(4096, 16), exploration_noise=True
            ),
            max_epochs=max(1, diary.steps // EVERY),
            epoch_num_steps=EVERY,
            update_step_num_repetitions=1,
            batch_size=None,
            collection_step_num_env_steps=1024,
            logger=Evaluate(),
            show_progress=False,
            verbose=False,
        )
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("who", choices=("contrib", "sb3", "tianshou"))
    parser.add_argument("env")
    for name, value in (("seed", 0), ("steps", 1_000_000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    packages = {"contrib": "sb3-contrib", "sb3": "stable-baselines3", "tianshou": "tianshou"}
    config = dict(
        algorithm="ppo" if args.who == "sb3" else "trpo",
        env=args.env,
        name=packages[args.who],
        options={},
        env_kwargs={},
        steps=args.steps,
        seed=args.seed,
        eval_every=f"{EVERY} steps",
        command=f"python benchmarks/peer_mujoco.py {args.who} {args.env} --seed SEED --steps {args.steps} --out RUN",
        versions={
            name: version(name) for name in (packages[args.who], "torch", "gymnasium", "mujoco")
        },
    )
    file = args.out / "config.json"
    if file.exists() and json.loads(file.read_text()) != config:
        parser.error(f"{args.out} has a run with other settings or versions")
    if any(record["kind"] == "best" for record in read_evaluations(args.out)):
        return
    args.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(config, indent=2) + "\n")
    diary = Diary(args.env, args.seed, args.steps, args.out)
    kinds = ZOO.get(args.who, {})
    settings = kinds.get(args.env.rpartition("-")[0], kinds.get("Ant"))
    if args.who == "tianshou":
        return of_tianshou(diary)
    from sb3_contrib import TRPO
    from stable_baselines3 import PPO

    of_sb3(TRPO if args.who == "contrib" else PPO, settings, diary)


if __name__ == "__main__":
    main()
