"""Who continues exactly: trainings that are saved, loaded in a new process and continued, against trainings that are never interrupted.

    python benchmarks/peers_resume.py --peer-python PATH [--only NAME ...]

PATH is the interpreter of a virtual environment with `stable-baselines3`, `tianshou` and `torchrl`. Each training is made three times, in
three processes: 2N updates; N updates, after which it is saved as the documentation of the library says, with everything that it names; and
N updates of what was loaded from there. The environments are those of gymnasium, in a wrapper that sums up their observations (CRC-32).
After each update there is a record: the sum of the observations since the last one, and that of the weights. The second training has to
have the first records of the first one, or else the library does not repeat itself here. One that continues exactly has its last ones.

Options that would change with the planned number of updates, such as rates that fall, are constant. CleanRL has no checkpoints; its page on
resuming saves the weights of the agent, which is done here with the loop of `cleanrl_style.py`, written anew in its style.
"""

import argparse
import json
import pickle
import random
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from importlib.metadata import version
from pathlib import Path
from zlib import crc32

import gymnasium as gym
import numpy as np
import torch

SEED, N_ENVS = 0, 2


class Ledger:
    "The records of a training."

    def __init__(self):
        self.records = []
        self.crc = 0
        self.begun = None

    def saw(self, obs):
        self.crc = crc32(np.ascontiguousarray(obs), self.crc)

    def begin(self, parameters):
        self.records, self.crc, self.begun = [], 0, self.sum(parameters)

    def line(self, parameters):
        self.records.append((self.crc, self.sum(parameters)))
        self.crc = 0

    def sum(self, parameters):
        weights = 0
        for x in parameters:
            weights = crc32(x.detach().numpy().tobytes(), weights)
        return weights


ledger = Ledger()


class Seen(gym.Wrapper):
    "Enters the observations of all steps in the ledger."

    def step(self, action):
        answer = self.env.step(action)
        ledger.saw(answer[0])
        return answer


for name in ("CartPole-v1", "Pendulum-v1"):
    gym.register(f"Seen{name}", lambda name=name, **kwargs: Seen(gym.make(name, **kwargs)))


def seed_all():
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def rollpipe(algorithm, env, n, old, new, steps=256):
    from rollpipe.runs import resume, start, train
    from rollpipe.settings.config import make_config

    options = dict(
        lanes=1,
        n_envs=N_ENVS,
        **(dict(n_steps=steps // N_ENVS) if algorithm == "ppo" else dict(warmup=64, n_steps=4)),
    )
    size = options["n_envs"] * options["n_steps"]
    if old:
        run = resume(old, steps=2 * n * size)
    else:
        run = start(new, make_config(algorithm, env, options, steps=n * size, seed=SEED))
    networks = [x for x in vars(run.agent).values() if isinstance(x, torch.nn.Module)]

    def weights():
        return (x for network in networks for x in network.parameters())

    def callback(run, record):
        ledger.line(weights())

    ledger.begin(weights())  # without the steps of the test at the start
    train(run, progress=False, tensorboard=False, callbacks=[callback])


def sb3(algorithm, env, n, old, new, normalize=False):
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    kind = getattr(stable_baselines3, algorithm.upper())
    vec = make_vec_env(env, N_ENVS, seed=SEED)
    if normalize:
        vec = VecNormalize.load(old / "vec_normalize.pkl", vec) if old else VecNormalize(vec)
    size = 256 if algorithm == "ppo" else 8
    if algorithm == "ppo":
        more = dict(n_steps=size // N_ENVS)
    else:
        more = dict(train_freq=size // N_ENVS, learning_starts=64, buffer_size=4096)
    if algorithm == "dqn":
        more |= dict(exploration_initial_eps=0.1, exploration_final_eps=0.1)
    if old:
        model = kind.load(old / "model.zip", env=vec, device="cpu")
    else:
        model = kind("MlpPolicy", vec, seed=SEED, device="cpu", **more)
    if old and algorithm != "ppo":
        model.load_replay_buffer(old / "replay_buffer.pkl")
    ledger.begin(model.policy.parameters())

    class Line(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_start(self):
            self.n_calls and ledger.line(self.model.policy.parameters())

        def _on_training_end(self):
            ledger.line(self.model.policy.parameters())

    model.learn(n * size, Line(), reset_num_timesteps=not old)
    model.save(new / "model.zip")
    if algorithm != "ppo":
        model.save_replay_buffer(new / "replay_buffer.pkl")
    if normalize:
        vec.save(new / "vec_normalize.pkl")


def tianshou(algorithm, env, n, old, new):
    from tianshou.algorithm import DQN, PPO
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.trainer import OffPolicyTrainerParams, OnPolicyTrainerParams
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

    seed_all()
    envs = DummyVectorEnv([partial(gym.make, env)] * N_ENVS)
    one = gym.make(env)
    envs.seed(SEED)
    net = partial(Net, state_shape=one.observation_space.shape, hidden_sizes=[64, 64])
    if algorithm == "ppo":
        actor = DiscreteActor(preprocess_net=net(), action_shape=one.action_space.n)
        policy = DiscreteActorPolicy(actor=actor, action_space=one.action_space)
        critic = DiscreteCritic(preprocess_net=net())
        learner = PPO(policy=policy, critic=critic, optim=AdamOptimizerFactory(lr=3e-4))
        params = partial(OnPolicyTrainerParams, update_step_num_repetitions=4, batch_size=64)
        size = 256
    else:
        policy = DiscreteQLearningPolicy(
            model=net(action_shape=one.action_space.n),
            action_space=one.action_space,
            eps_training=0.1,
        )
        learner = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), target_update_freq=20)
        params = partial(
            OffPolicyTrainerParams,
            update_step_num_gradient_steps_per_sample=0.125,
            batch_size=32,
        )
        size = 8
    buffer = VectorReplayBuffer(4096, N_ENVS)
    if old:
        learner.load_state_dict(torch.load(old / "checkpoint.pt", weights_only=False))
        buffer = pickle.loads((old / "buffer.pkl").read_bytes())
    ledger.begin(learner.parameters())

    def line(epoch, step):
        step and ledger.line(learner.parameters())

    collector = Collector(learner, envs, buffer, exploration_noise=True)
    learner.run_training(
        params(
            training_collector=collector,
            max_epochs=1,
            epoch_num_steps=n * size,
            collection_step_num_env_steps=size,
            training_fn=line,
            show_progress=False,
            verbose=False,
        )
    )
    ledger.line(learner.parameters())
    torch.save(learner.state_dict(), new / "checkpoint.pt")
    (new / "buffer.pkl").write_bytes(pickle.dumps(collector.buffer))


def torchrl(algorithm, env, n, old, new):
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torchrl.checkpoint import Checkpoint, GlobalRNGState
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.envs import GymWrapper, SerialEnv
    from torchrl.modules import MLP, EGreedyModule, ProbabilisticActor, QValueActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss, DQNLoss, SoftUpdate

    seed_all()

    def make():
        return GymWrapper(gym.make(env), categorical_action_encoding=True)

    envs = SerialEnv(N_ENVS, make)
    size = 256 if algorithm == "ppo" else 8
    envs.set_seed(SEED)
    mlp = partial(
        MLP, in_features=envs.observation_spec["observation"].shape[-1], num_cells=[64, 64]
    )
    n_actions = make().action_spec.space.n
    more = {}
    if algorithm == "ppo":
        logits = TensorDictModule(
            mlp(out_features=n_actions), in_keys=["observation"], out_keys=["logits"]
        )
        policy = ProbabilisticActor(
            logits,
            in_keys=["logits"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
            spec=envs.action_spec,
        )
        loss = ClipPPOLoss(policy, ValueOperator(mlp(out_features=1), in_keys=["observation"]))
        loss.make_value_estimator()
    else:
        spec = make().action_spec
        greedy = QValueActor(mlp(out_features=n_actions), spec=spec, action_space="categorical")
        explore = EGreedyModule(spec, eps_init=0.1, eps_end=0.1)
        policy = TensorDictSequential(greedy, explore)
        loss = DQNLoss(greedy, action_space="categorical", delay_value=True)
        loss.make_value_estimator()
        more = dict(
            replay_buffer=TensorDictReplayBuffer(storage=LazyTensorStorage(4096), batch_size=32)
        )
        target = SoftUpdate(loss, eps=0.95)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-3)
    collector = Collector(envs, policy, frames_per_batch=size, total_frames=n * size)
    checkpoint = Checkpoint(
        loss_module=loss, optimizer=optimizer, collector=collector, rng=GlobalRNGState(), **more
    )
    if old:
        checkpoint.load(old / "checkpoint")
        collector.total_frames += n * size  # the count of frames goes on
    ledger.begin(loss.parameters())

    def step(x):
        sum(value for key, value in loss(x).items() if key.startswith("loss")).backward()
        optimizer.step()
        optimizer.zero_grad()

    for data in collector:
        if algorithm == "ppo":
            for _ in range(4):
                values = dict(
                    params=loss.critic_network_params,
                    target_params=loss.target_critic_network_params,
                )
                with torch.no_grad():
                    loss.value_estimator(data, **values)
                rows = data.reshape(-1)
                for part in torch.randperm(len(rows)).split(64):
                    step(rows[part])
        else:
            more["replay_buffer"].extend(data.reshape(-1))
            step(more["replay_buffer"].sample())
            target.step()
        collector.update_policy_weights_()
        ledger.line(loss.parameters())
    if not old:
        checkpoint.save(new / "checkpoint")
    collector.shutdown()


def cleanrl(algorithm, env, n, old, new):
    from cleanrl_style import PPOLoop

    loop = PPOLoop(env, SEED)
    if old:
        loop.agent.load_state_dict(torch.load(old / "agent.pt"))
    ledger.begin(loop.agent.parameters())
    for _ in range(n):
        loop.update(loop.collect())
        ledger.line(loop.agent.parameters())
    torch.save(loop.agent.state_dict(), new / "agent.pt")


POLE, PENDULUM = "SeenCartPole-v1", "SeenPendulum-v1"
CASES = {  # name -> package, N updates, function; and what is saved as its documentation says
    "rollpipe ppo": ("rollpipe", 4, partial(rollpipe, "ppo", POLE), "one checkpoint"),
    "rollpipe dqn": (
        "rollpipe",
        40,
        partial(rollpipe, "dqn", POLE),
        "one checkpoint, and chunks of the memory",
    ),
    "rollpipe sac": (
        "rollpipe",
        40,
        partial(rollpipe, "sac", PENDULUM),
        "one checkpoint, and chunks of the memory",
    ),
    "sb3 ppo": ("stable-baselines3", 4, partial(sb3, "ppo", POLE), "`save`"),
    "sb3 ppo, normalized": (
        "stable-baselines3",
        4,
        partial(sb3, "ppo", PENDULUM, normalize=True),
        "`save`, and that of `VecNormalize`",
    ),
    "sb3 dqn": ("stable-baselines3", 40, partial(sb3, "dqn", POLE), "`save`, `save_replay_buffer`"),
    "sb3 sac": (
        "stable-baselines3",
        40,
        partial(sb3, "sac", PENDULUM),
        "`save`, `save_replay_buffer`",
    ),
    "tianshou ppo": (
        "tianshou",
        4,
        partial(tianshou, "ppo", POLE),
        "`state_dict` of the algorithm, the buffer",
    ),
    "tianshou dqn": (
        "tianshou",
        40,
        partial(tianshou, "dqn", POLE),
        "`state_dict` of the algorithm, the buffer",
    ),
    "torchrl ppo": (
        "torchrl",
        4,
        partial(torchrl, "ppo", POLE),
        "`Checkpoint` of loss, optimiser, collector, `GlobalRNGState`",
    ),
    "torchrl dqn": (
        "torchrl",
        40,
        partial(torchrl, "dqn", POLE),
        "the same, and the replay buffer",
    ),
    "cleanrl ppo": (
        "its page on resuming",
        4,
        partial(cleanrl, "ppo", POLE),
        "`state_dict` of the agent",
    ),
}
HERE = "rollpipe", "cleanrl"  # these run with the interpreter that runs this file


def first_difference(whole, rest):
    "In words."
    for k, (a, b) in enumerate(zip(whole, rest, strict=True), 1):
        if a == b:
            continue
        return f"{'observations' if a[0] != b[0] else 'weights'} of the {k}. update"
    return "none"


def trained(phase, names, python, root):
    "Name -> `dict(version, records)`, or `dict(error)`, of some trainings in one new process."
    done = subprocess.run(
        [python, __file__, "--phase", phase, str(root), "--only", *names],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def make_all(phase, root, names):
    "Make some trainings in this process. Those of the phase 'rest' go on from what 'first' has saved."
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {}
    for name in names:
        package, n, function, _ = CASES[name]
        old = root / f"first {name}" if phase == "rest" else None
        new = (
            old if old and package == "rollpipe" else root / f"{phase} {name}"
        )  # a run goes on in its folder
        new.mkdir(exist_ok=True)
        try:
            function(2 * n if phase == "whole" else n, old, new)
        except Exception as e:
            found[name] = dict(error=f"{type(e).__name__}: {e}")
        else:
            found[name] = dict(
                records=ledger.records,
                begun=ledger.begun,
                version="" if " " in package else version(package),
            )
    print(json.dumps(found))


def row(name, whole, first, rest):
    "A row of the table."
    n = CASES[name][1]
    saves = CASES[name][3]
    if errors := [x["error"] for x in (whole, first, rest) if "error" in x]:
        return [name, "", saves, "failed", errors[0], ""]
    before = whole["records"][:n]
    after = whole["records"][n:]
    loaded = "the same" if rest["begun"] == before[-1][1] else "others"
    return [
        name,
        whole["version"],
        saves,
        first_difference(before, first["records"]),
        loaded,
        first_difference(after, rest["records"]),
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--phase", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        return make_all(args.phase[0], Path(args.phase[1]), args.only)
    titles = (
        "training",
        "version",
        "what is saved",
        "differs before it is saved",
        "loaded weights",
        "differs first after loading",
    )
    print("|", " | ".join(titles), "|\n" + "|---" * len(titles) + "|", flush=True)
    here = [name for name in args.only if name.startswith(HERE)]
    for python, names in (
        (sys.executable, here),
        (args.peer_python, [name for name in args.only if name not in here]),
    ):
        with tempfile.TemporaryDirectory() as place:
            phases = (
                [trained(phase, names, python, place) for phase in ("whole", "first", "rest")]
                if names
                else []
            )
        for name in names:
            print("|", " | ".join(row(name, *(phase[name] for phase in phases))), "|", flush=True)


if __name__ == "__main__":
    main()
