"Two processes that learn together make the step of one process that has the joined batch; and what they say if they cannot."

import copy
import os
import signal
import warnings
from datetime import timedelta
from functools import reduce
from itertools import islice

import gymnasium as gym
import pytest
import torch
import torch.distributed as dist
from forked import SERVER
from gymnasium.spaces import Discrete
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from rollpipe import ranks
from rollpipe.agents import (
    A2C,
    DDPG,
    DQN,
    NPG,
    PPO,
    QRDQN,
    REINFORCE,
    SAC,
    TD3,
    TRPO,
    QLearning,
    VTrace,
)
from rollpipe.agents.gradient_learner import adam_for, descend
from rollpipe.agents.offline import TD3BC
from rollpipe.agents.tabular import TabularQ
from rollpipe.layers import (
    ActionCritic,
    Critic,
    DeterministicPolicy,
    GaussianPolicy,
    QPolicy,
    QuantilePolicy,
    RecurrentPolicy,
    SquashedPolicy,
)
from rollpipe.pipes import (
    AdvantageBuffer,
    DataError,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    WorkerError,
    nested,
)
from rollpipe.pipes.data.fragment_ops import join, with_restarts
from rollpipe.pipes.graph.modules import bump_version
from rollpipe.pipes.replay.memory import Sample
from rollpipe.pipes.replay.pipe import Replay, Replayed
from rollpipe.runs.joint import joint

ENV, N = "Pendulum-v1", 2


OFF_POLICY = dict(SAC=SAC, TD3=TD3, DDPG=DDPG, TD3BC=TD3BC)
KINDS = dict(TRPO=TRPO, NPG=NPG, PPO=PPO, A2C=A2C, REINFORCE=REINFORCE, VTrace=VTrace)


def learner(kind="TRPO", hidden=(16,), **options):
    "Such as 'PPO', or 'recurrent PPO'."
    policy = RecurrentPolicy if "recurrent" in kind else GaussianPolicy
    actor = policy.for_env(ENV, hidden=hidden, seed=0)
    critic = Critic.for_env(ENV, hidden=hidden, seed=1)
    is_natural = "TRPO" in kind or "NPG" in kind
    defaults = dict(critic_epochs=2, max_kl=0.02) if is_natural else dict(lr=1e-2)
    agent = KINDS[kind.split()[-1]](actor, critic, seed=0, **defaults | options)
    for group in [] if is_natural else agent.optimizer.param_groups:
        group["eps"] = 1e-2  # Adam makes steps of rounding errors
    return agent


def pipeline(agent, rank, n_steps=48):
    "Two of four lanes, side by side: 0 and 1, or 2 and 3."
    lanes = Lanes(FragmentCollector(EnvStepper(ENV, agent.actor, 4), n_steps), 2 * N, seed=0)
    lanes.apply_sharding(N, rank, SHARDING_PRIORITIES.DISTRIBUTED)
    return FragmentStacker(AdvantageBuffer(lanes, agent.critic, gamma=0.99, lam=0.95), 2)


def begin(rank, folder, n=N):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=60),
    )


def one_rank(rank, n, task, folder, *args):
    "Run `task`, and keep what it returns, or the error that it raises."
    try:
        begin(rank, folder, n)
        found = task(rank, folder, *args)
    except Exception as error:
        found = error
    torch.save(found, f"{folder}/{rank}")
    os._exit(0)  # without a word to the other rank


def run(task, folder, *args, n=N):
    """What `task(rank, folder, *args)` returns or raises in each rank; None for a rank that was killed.

    The ranks are children of a server without threads: other tests may have left threads in this process, which a fork does not take along.
    """
    processes = [
        SERVER.Process(target=one_rank, args=(rank, n, task, folder, *args)) for rank in range(n)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        assert not any(process.is_alive() for process in processes), "a rank hangs"
        assert {process.exitcode for process in processes} <= {0, -signal.SIGKILL}
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
    return [
        torch.load(path, weights_only=False) if os.path.exists(path := f"{folder}/{rank}") else None
        for rank in range(n)
    ]


# --- the same step


def updates(rank, folder, kind, options, invalid):
    "The learner's state before each update, the batch of this rank, and the state and the metrics after it."
    agent = learner(kind, **options)
    found = []
    with ranks.distributed(agent):
        for batch in islice(pipeline(agent, rank), 2):
            if invalid and rank:
                batch = holes(batch, "recurrent" in kind)
            before = copy.deepcopy(agent.state_dict())
            metrics = agent.update(batch)
            found.append((before, batch, copy.deepcopy(agent.state_dict()), metrics))
    assert not ranks.active()
    return found


def holes(batch, recurrent):
    "The batch with rows that are no transitions; those of a recurrent policy are at the end, where no memory goes through them."
    valid = batch.valid.clone()
    valid[29:, 1] = valid[40:, 5] = False
    if not recurrent:
        valid[3::5, 1] = valid[:7, 2] = False
    return batch._replace(valid=valid)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, options, invalid",
    [
        ("TRPO", {}, True),
        ("TRPO", dict(precondition=64, hidden=(16, 16)), True),
        ("NPG", {}, False),
        ("recurrent TRPO", {}, True),
        ("PPO", dict(minibatch=100, epochs=2, clip_value=0.2), True),
        ("PPO", dict(minibatch=3, epochs=1, normalize_adv="minibatch"), True),
        ("PPO", dict(epochs=30, target_kl=0.003), True),
        ("recurrent PPO", dict(minibatch=144, epochs=2), True),
        ("recurrent PPO", dict(minibatch=48, epochs=1, normalize_adv="minibatch"), True),
        ("A2C", dict(normalize_adv=True), True),
        ("recurrent A2C", {}, True),
        ("REINFORCE", dict(epochs=2), True),
        ("VTrace", {}, True),
    ],
)
def test_the_step_is_that_of_one_process_on_the_joined_batch(kind, options, invalid, tmp_path):
    a, b = run(updates, tmp_path, kind, options, invalid)
    for found in (a, b):
        if isinstance(found, Exception):
            raise found
    one = learner(kind, **options)
    for k, ((before, batch, after, metrics), (_, other, after_other, metrics_other)) in enumerate(
        zip(a, b)
    ):
        assert nested.paths(after) == nested.paths(after_other)
        for x, y in zip(nested.leaves(after), nested.leaves(after_other)):
            assert torch.equal(torch.as_tensor(x), torch.as_tensor(y))
        one.load_state_dict(before)
        expected = one.update(join([batch, other]))
        assert metrics.keys() == expected.keys()
        for name in expected:
            if name.startswith("seconds") or name in NOT_COMPARED:
                continue
            assert metrics[name] == pytest.approx(expected[name], rel=2e-3, abs=1e-5), name
            assert metrics[name] == metrics_other[name], name
        assert metrics.get("precondition_rows", 0) == options.get("precondition", 0)
        moved = 0.0
        for name, x, y, start in zip(
            nested.paths(after), *map(nested.leaves, (after, one.state_dict(), before))
        ):
            x, y, start = map(torch.as_tensor, (x, y, start))
            moved = max(moved, float((y.double() - start.double()).abs().max()))
            assert torch.allclose(
                x.double(), y.double(), rtol=1e-4, atol=1e-4 if k == 0 else 1e-5
            ), (k, name)
        assert moved > 1e-3


def off_policy_learner(kind):
    if kind in OFF_POLICY:
        policy = SquashedPolicy if kind == "SAC" else DeterministicPolicy
        networks = (
            cls.for_env(ENV, hidden=(16,), normalize=True, seed=0) for cls in (policy, ActionCritic)
        )
        agent = OFF_POLICY[kind](
            *networks,
            seed=0,
            lr=1e-2,
            multi_step=2,
            **dict(random_steps=100) if kind != "TD3BC" else {},
        )
    else:
        policy = QuantilePolicy if kind == "QRDQN" else QPolicy
        agent = (QRDQN if kind == "QRDQN" else DQN)(
            policy.for_env("CartPole-v1", hidden=(16,), seed=0),
            seed=0,
            lr=1e-2,
            target_every=2,
            eps_steps=400,
            multi_step=2,
        )
    for optimizer in agent.optimizers.values() if kind in OFF_POLICY else [agent.optimizer]:
        for group in optimizer.param_groups:
            group["eps"] = 1e-2
    return agent


def many_updates(rank, folder, kind):
    "The batches of this rank, which the first policy collects, and the state after an update with each."
    agent = learner(kind)
    batches = list(islice(pipeline(agent, rank, n_steps=16), 20))
    with ranks.distributed(agent):
        for batch in batches:
            agent.update(batch)
    return batches, agent.state_dict()


@pytest.mark.slow_but_one
@pytest.mark.parametrize("kind", ["TRPO", "PPO"])
def test_twenty_updates_are_those_of_one_process(kind, tmp_path):
    a, b = run(many_updates, tmp_path, kind)
    for found in (a, b):
        if isinstance(found, Exception):
            raise found
    one = learner(kind)
    for batches in zip(a[0], b[0]):
        one.update(join(list(batches)))
    for path, x, y in zip(nested.paths(a[1]), *map(nested.leaves, (a[1], one.state_dict()))):
        assert torch.allclose(
            torch.as_tensor(x).double(), torch.as_tensor(y).double(), rtol=1e-5, atol=1e-5
        ), path


def by_gloo(rank, folder, task, *args):
    "As on several machines, where ranks have no memory in common."
    ranks.collectives.shared_sums = lambda *_: None
    return task(rank, folder, *args)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["TRPO", "PPO"])
def test_gloo_sums_as_shared_memory_does(kind, tmp_path):
    for name in ("memory", "gloo"):
        (tmp_path / name).mkdir()
    (_, memory), _ = run(many_updates, tmp_path / "memory", kind)
    (_, gloo), _ = run(by_gloo, tmp_path / "gloo", many_updates, kind)
    for path, x, y in zip(nested.paths(memory), *map(nested.leaves, (memory, gloo))):
        assert torch.equal(torch.as_tensor(x), torch.as_tensor(y)), path


def sums(rank, folder):
    "Numbers of this rank, of several sizes, and their sums over ranks."
    found = []
    with ranks.distributed(learner()):
        for size in (0, 1, 2, 5, 1000, 100_000):
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
                x = (1000 * torch.randn(size, generator=torch.Generator().manual_seed(rank))).to(
                    dtype
                )
                found.append((x, ranks.total(x)))
    return found


@pytest.mark.parametrize("task", [[sums], [by_gloo, sums]], ids=["memory", "gloo"])
@pytest.mark.parametrize("n", [3, 4])
def test_sums_are_in_the_order_of_the_ranks(n, task, tmp_path):
    first, *more = task
    found = run(first, tmp_path, *more, n=n)
    for numbers in zip(*found):
        expected = reduce(torch.add, [x for x, _ in numbers])
        for _, total in numbers:
            assert total.equal(expected)


def replay_updates(rank, folder, kind, n_extra=0):
    "As `updates`, with a memory in each rank; the last samples of rank 1 may be more."
    agent = off_policy_learner(kind)
    found = []
    lanes = Lanes(
        FragmentCollector(
            EnvStepper(ENV if kind in OFF_POLICY else "CartPole-v1", agent.actor, 4), 8
        ),
        2 * N,
        seed=0,
    )
    lanes.divide(N, rank)
    replay = Replay(
        FragmentStacker(lanes, 2), 1000, batch_size=64, n_batches=3, warmup=100, length=3, seed=5
    )
    replay.divide(N)
    assert (replay.batch_size, replay.capacity, replay.warmup) == (32, 500, 50)
    with ranks.distributed(agent):
        for batch in islice(replay, 3):
            before = copy.deepcopy(agent.state_dict())
            samples = [Sample(s.fragment, None, None) for s in batch.samples]
            metrics = agent.update(
                Replayed(batch.fresh, iter(samples + samples[: n_extra * rank]), None)
            )
            found.append(
                (before, (batch.fresh, samples), copy.deepcopy(agent.state_dict()), metrics)
            )
    return found


@pytest.mark.slow_but_one
@pytest.mark.parametrize("kind", ["DQN", "QRDQN", "SAC", "TD3", "DDPG", "TD3BC"])
def test_memories_of_several_ranks_are_one(kind, tmp_path):
    a, b = run(replay_updates, tmp_path, kind)
    for found in (a, b):
        if isinstance(found, Exception):
            raise found
    one = off_policy_learner(kind)
    for (before, (fresh, samples), after, metrics), (_, (other, others), after_other, _) in zip(
        a, b
    ):
        for x, y in zip(nested.leaves(after), nested.leaves(after_other)):
            assert torch.equal(torch.as_tensor(x), torch.as_tensor(y))
        one.load_state_dict(before)
        joined = [
            Sample(join([x.fragment, y.fragment]), None, None) for x, y in zip(samples, others)
        ]
        expected = one.update(Replayed(join([fresh, other]), iter(joined), None))
        assert metrics.keys() == expected.keys() and len(samples) == 3
        for name in expected:
            if not name.startswith("seconds"):
                assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
        for name, x, y in zip(nested.paths(after), *map(nested.leaves, (after, one.state_dict()))):
            assert torch.allclose(
                torch.as_tensor(x).double(), torch.as_tensor(y).double(), rtol=1e-4, atol=1e-5
            ), name


def test_a_rank_with_more_samples_is_refused_in_all_of_them(tmp_path):
    for error in run(replay_updates, tmp_path, "DQN", 1):
        assert isinstance(error, DataError) and "rank 0 has 3 samples, and others have more" in str(
            error
        ), error


# The last bits decide when the iterations of conjugate gradients end.
NOT_COMPARED = ("cg_residual", "cg_iterations", "curvature", "step_size", "predicted_improvement")


# --- what cannot be joined


def different_forms(rank, folder, form):
    agent = learner()
    batch = next(iter(pipeline(agent, rank, n_steps=8 + (form == "steps" and rank))))
    if rank and form == "environments":
        batch = join([batch, batch])
    if rank and form == "leaf":
        batch = batch._replace(actor={**batch.actor, "more": batch.actor["logp"]})
    if rank and form == "dtype":
        batch = batch._replace(state=batch.state._replace(obs=batch.state.obs.double()))
    with ranks.distributed(agent):
        agent.update(batch)


def different_learners(rank, folder):
    agent = learner()
    if rank:
        agent.critic.net.last.bias.data += 1e-3
    with ranks.distributed(agent):
        pass


def drifted(rank, folder):
    agent = learner()
    with ranks.distributed(agent):
        for batch in islice(pipeline(agent, rank, n_steps=8), 2):
            agent.update(batch)
            if rank:
                next(agent.actor.parameters()).data *= 1.01


@pytest.mark.parametrize(
    "task, args, leaf, text",
    [
        (
            different_forms,
            ["steps"],
            "leaf batch.state.",
            "Expected int64 [9, 8], as on rank 0, got int64 [10, 8]",
        ),
        (
            different_forms,
            ["environments"],
            "leaf batch.state.",
            "Expected int64 [9, 8], as on rank 0, got int64 [9, 16]",
        ),
        (
            different_forms,
            ["leaf"],
            "leaf batch.actor['more']",
            "Expected no such leaf, as on rank 0",
        ),
        (
            different_forms,
            ["dtype"],
            "leaf batch.state.obs",
            "Expected float32 [9, 8, 3], as on rank 0, got float64 [9, 8, 3]",
        ),
        (different_learners, [], "leaf state['critic']", "the learner has another state"),
        (drifted, [], "leaf state['actor']", "the learner has another state"),
    ],
)
def test_all_ranks_say_which_rank_and_which_leaf_differ(task, args, leaf, text, tmp_path):
    for error in run(task, tmp_path, *args):
        assert (
            isinstance(error, DataError)
            and "rank 1: " in str(error)
            and text in str(error)
            and leaf in str(error)
        ), error


class Late(gym.Wrapper):
    "Tells of an episode only at its end, which comes at another time in each environment."

    def reset(self, *, seed=None, options=None):
        self.n = 0
        self.length = 10 + (seed or 0) % 30
        return super().reset(seed=seed, options=options)

    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        self.n += 1
        return (
            obs,
            reward,
            False,
            self.n == self.length,
            info | (dict(length=self.n) if self.n == self.length else {}),
        )


def late_infos(rank, folder):
    agent = learner()
    seen = []
    lanes = Lanes(
        FragmentCollector(EnvStepper(lambda: Late(gym.make(ENV)), agent.actor, 1), 8), N, seed=0
    )
    lanes.divide(N, rank)
    with ranks.distributed(agent):
        for batch in islice(AdvantageBuffer(lanes, agent.critic, gamma=0.99, lam=0.95), 6):
            seen.append("length" in batch.env)
            agent.update(batch)
    return seen


def test_infos_may_appear_earlier_in_one_rank(tmp_path):
    a, b = run(late_infos, tmp_path)
    assert len(a) == len(b) == 6 and a != b, (a, b)


def by_hand(rank, folder, is_numbered):
    agent = learner()
    batch = next(iter(pipeline(agent, rank, n_steps=8)))
    with ranks.distributed(agent):
        agent.update(batch if is_numbered else batch._replace(lane=None, seq=None))
    return agent.state_dict()


def test_a_batch_that_nobody_has_numbered(tmp_path):
    "It comes from no lane, as one that was made by hand."
    for name in ("numbered", "not"):
        (tmp_path / name).mkdir()  # each group has a store of its own
    (plain, _) = run(by_hand, tmp_path / "numbered", True)
    found = run(by_hand, tmp_path / "not", False)
    for state in found:
        for x, y in zip(nested.leaves(plain), nested.leaves(state)):
            assert not isinstance(x, torch.Tensor) or torch.equal(x, y)


def killed(rank, folder):
    agent = learner()
    with ranks.distributed(agent):
        for k, batch in enumerate(islice(pipeline(agent, rank, n_steps=8), 3)):
            if rank and k == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            agent.update(batch)


@pytest.mark.parametrize("task", [[killed], [by_gloo, killed]], ids=["memory", "gloo"])
def test_a_rank_that_dies_ends_the_others(task, tmp_path):
    first, *more = task
    left, gone = run(first, tmp_path, *more)
    assert (
        gone is None
        and isinstance(left, WorkerError)
        and "rank 0: another rank has ended" in str(left)
    )


def without_memory(rank, folder):
    "Rank 1 has no memory for what it sums."
    agent = learner(hidden=(64, 64))
    with ranks.distributed(agent):
        if rank:
            ranks.collectives._sums[0].memories[1].reserve = lambda size: refuse()
        return agent.update(next(iter(pipeline(agent, rank, n_steps=8))))


def refuse():
    raise DataError("not enough memory to share between processes", expected="more", got="none")


def test_a_rank_without_memory_says_so_and_ends_the_others(tmp_path):
    left, refused = run(without_memory, tmp_path)
    assert isinstance(refused, DataError) and "not enough memory" in str(refused)
    assert isinstance(left, WorkerError) and "rank 0: another rank has ended" in str(left)


def making(rank, folder):
    joint(lambda: os.kill(os.getpid(), signal.SIGKILL), {}, dict)


def test_a_rank_that_dies_while_it_makes_the_run_ends_the_others(tmp_path):
    gone, left = run(making, tmp_path)
    assert (
        gone is None
        and isinstance(left, WorkerError)
        and "rank 1: another rank has ended" in str(left)
    )


def older(rank, folder):
    "The batch of rank 1 is of three updates ago, and lost its lane twice."
    batch = next(iter(pipeline(agent := learner(), rank)))
    bump_version(agent.actor, to=3)
    batch = with_restarts(batch, 2) if rank else batch._replace(version=batch.version + 3)
    with ranks.distributed(agent):
        return agent.update(batch)


def test_lag_and_lost_lanes_are_those_of_all_ranks(tmp_path):
    for metrics in run(older, tmp_path):
        assert metrics["lag"] == 3 and metrics["lane_restarts"] == 4  # two lanes of rank 1


def refused(rank, folder):
    found = []
    for agent in (QLearning(TabularQ(Discrete(3), Discrete(2))), learner(fvp_subsample=0.5)):
        with pytest.raises(DataError) as error, ranks.distributed(agent):
            pass
        found.append(str(error.value))
    batch = next(iter(pipeline(agent := learner(), rank)))
    with pytest.raises(DataError) as error, ranks.distributed(agent):
        agent.set_option("fvp_subsample", 0.5)
        agent.update(batch)
    found.append(str(error.value))
    assert not ranks.active()
    return found


def test_learners_that_cannot_are_refused(tmp_path):
    for table, *subsampled in run(refused, tmp_path):
        assert (
            "cannot learn over several ranks" in table
            and "joins_ranks" in table
            and "QLearning" in table
        )
        assert len(subsampled) == 2 and all(
            "leaf fvp_subsample: cannot estimate the Fisher matrix" in text for text in subsampled
        )


def channels_last(rank, folder):
    with ranks.distributed(learner()):
        return stepped(8)


def stepped(n=None):
    "The weights of a convolution after two steps of Adam, in the memory layout that torch advises for images."
    torch.manual_seed(0)
    net = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    params, optimizer = adam_for(net, None, 0.1, 0.1)
    for group in optimizer.param_groups:
        group["eps"] = 1.0
    images = torch.randn(8, 3, 6, 6)
    for _ in range(2):
        descend(params, optimizer, None, net(images).square().mean(), n=n)
    return net.weight.detach()


def test_gradients_of_several_ranks_have_the_layout_of_their_parameters(tmp_path):
    "Which torch's fused Adam does not check."
    for found in run(channels_last, tmp_path):
        torch.testing.assert_close(found, stepped(), rtol=0, atol=1e-6)


def test_without_a_process_group_nothing_changes():
    with ranks.distributed(agent := learner()) as same:
        assert same is agent and not ranks.active()
