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
from rollpipe.agents.offline import BC, IQL, TD3BC
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
from rollpipe.layers.critic import QVCritic
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
from rollpipe.settings.algorithms import ALGORITHMS

ENV, N = "Pendulum-v1", 2


def pair(policy, critic, env=ENV, **options):
    "Makes a learner's networks."

    def make(hidden):
        options_of_policy = dict(hidden=hidden, seed=0) | options
        actor = policy.for_env(env, **options_of_policy)
        return (actor,) if critic is None else (actor, critic.for_env(env, hidden=hidden, seed=1))

    return make


GAUSSIAN = pair(GaussianPolicy, Critic)
DETERMINISTIC = pair(DeterministicPolicy, ActionCritic, normalize=True)
NATURAL = dict(critic_epochs=2, max_kl=0.02)
BY_ADAM = dict(lr=1e-2)
BY_VALUE = dict(BY_ADAM, target_every=2, eps_steps=400, multi_step=2)
BY_ACTION = dict(BY_ADAM, multi_step=2, random_steps=100)

# learner -> its class, its networks and options; a learner that joins ranks has a row
KINDS = dict(
    TRPO=(TRPO, GAUSSIAN, NATURAL),
    NPG=(NPG, GAUSSIAN, NATURAL),
    PPO=(PPO, GAUSSIAN, BY_ADAM),
    A2C=(A2C, GAUSSIAN, BY_ADAM),
    REINFORCE=(REINFORCE, GAUSSIAN, BY_ADAM),
    VTrace=(VTrace, GAUSSIAN, BY_ADAM),
    DQN=(DQN, pair(QPolicy, None, "CartPole-v1"), BY_VALUE),
    QRDQN=(QRDQN, pair(QuantilePolicy, None, "CartPole-v1"), BY_VALUE),
    SAC=(SAC, pair(SquashedPolicy, ActionCritic, normalize=True), BY_ACTION),
    TD3=(TD3, DETERMINISTIC, BY_ACTION),
    DDPG=(DDPG, DETERMINISTIC, BY_ACTION),
    TD3BC=(TD3BC, DETERMINISTIC, dict(BY_ADAM, multi_step=2)),
    IQL=(IQL, pair(GaussianPolicy, QVCritic, normalize=True), dict(BY_ADAM, multi_step=2)),
    BC=(BC, pair(GaussianPolicy, None), BY_ADAM),
)
FROM_MEMORY = ("DQN", "QRDQN", "SAC", "TD3", "DDPG", "TD3BC", "IQL")


def learner(kind="TRPO", hidden=(16,), **options):
    "Such as 'PPO', or 'recurrent PPO'."
    cls, make, defaults = KINDS[kind.split()[-1]]
    make = pair(RecurrentPolicy, Critic) if "recurrent" in kind else make
    agent = cls(*make(hidden), seed=0, **defaults | options)
    optimizers = (
        [] if cls in (TRPO, NPG) else getattr(agent, "optimizers", None) or {"": agent.optimizer}
    )
    for optimizer in dict(optimizers).values():
        for group in optimizer.param_groups:
            group["eps"] = 1e-2  # Adam makes steps of rounding errors
    return agent


def pipeline(agent, rank, n_steps=48):
    "Two of four lanes, side by side: 0 and 1, or 2 and 3."
    lanes = Lanes(FragmentCollector(EnvStepper(ENV, agent.actor, 4), n_steps), 2 * N, seed=0)
    lanes.apply_sharding(N, rank, SHARDING_PRIORITIES.DISTRIBUTED)
    if agent.critic is None:
        return FragmentStacker(lanes, 2)
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


def holes(batch, recurrent):
    "The batch with rows that are no transitions; those of a recurrent policy are at the end, where no memory goes through them."
    valid = batch.valid.clone()
    valid[29:, 1] = valid[40:, 5] = False
    if not recurrent:
        valid[3::5, 1] = valid[:7, 2] = False
    return batch._replace(valid=valid)


def memory_of(agent, kind, rank):
    "Samples of this rank's part of a memory."
    env = "CartPole-v1" if "DQN" in kind else ENV
    lanes = Lanes(FragmentCollector(EnvStepper(env, agent.actor, 4), 8), 2 * N, seed=0)
    lanes.divide(N, rank)
    stream = dict(batch_size=64, n_batches=3, warmup=100, length=3, seed=5)
    replay = Replay(FragmentStacker(lanes, 2), 1000, **stream)
    replay.divide(N)
    assert (replay.batch_size, replay.capacity, replay.warmup) == (32, 500, 50)
    return replay


def updates(rank, folder, kind, options, invalid, n_extra=0):
    """The learner's state before each update, the batch of this rank, and the state and the metrics after it.

    A batch of a memory is its fresh fragment and its samples; the last samples of rank 1 may be more.
    """
    agent = learner(kind, **options)
    found = []
    stream = memory_of(agent, kind, rank) if kind in FROM_MEMORY else pipeline(agent, rank)
    with ranks.distributed(agent):
        for batch in islice(stream, 3 if kind in FROM_MEMORY else 2):
            before = copy.deepcopy(agent.state_dict())
            if kind in FROM_MEMORY:
                samples = [Sample(x.fragment, None, None) for x in batch.samples]
                metrics = agent.update(
                    replayed_as(batch.fresh, samples + samples[: n_extra * rank])
                )
                batch = batch.fresh, samples
            else:
                batch = holes(batch, "recurrent" in kind) if invalid and rank else batch
                metrics = agent.update(batch)
            found.append((before, batch, copy.deepcopy(agent.state_dict()), metrics))
    assert not ranks.active()
    return found


def replayed_as(fresh, samples):
    return Replayed(fresh, iter(samples), None)


def joined(batch, other):
    "What one process would get."
    if not isinstance(batch, tuple) or hasattr(batch, "_fields"):
        return join([batch, other])
    (fresh, samples), (fresh_other, samples_other) = batch, other
    assert len(samples) == len(samples_other) == 3
    pairs = zip(samples, samples_other)
    both = [Sample(join([x.fragment, y.fragment]), None, None) for x, y in pairs]
    return replayed_as(join([fresh, fresh_other]), both)


def compared(state, other):
    "Name and values, as float64, of all numbers in two states."
    assert nested.paths(state) == nested.paths(other)
    leaves = zip(nested.paths(state), nested.leaves(state), nested.leaves(other))
    return [(name, *(torch.as_tensor(z).double() for z in (x, y))) for name, x, y in leaves]


def told(found):
    "What the ranks returned, unless one of them raised an error."
    for x in found:
        if isinstance(x, Exception):
            raise x
    return found


# The last bits decide when the iterations of conjugate gradients end.
NOT_COMPARED = ("cg_residual", "cg_iterations", "curvature", "step_size", "predicted_improvement")
STEPS = [
    *((kind, {}, False) for kind in FROM_MEMORY),
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
    ("BC", {}, True),
]


@pytest.mark.slow_but_one
@pytest.mark.parametrize("kind, options, invalid", STEPS)
def test_the_step_is_that_of_one_process_on_the_joined_batch(kind, options, invalid, tmp_path):
    a, b = told(run(updates, tmp_path, kind, options, invalid))
    one = learner(kind, **options)
    has_memory = kind in FROM_MEMORY
    for k, ((before, batch, after, metrics), (_, other, after_other, metrics_other)) in enumerate(
        zip(a, b)
    ):
        assert all(torch.equal(x, y) for _, x, y in compared(after, after_other))
        one.load_state_dict(before)
        expected = one.update(joined(batch, other))

        # The metrics are those of the joined batch, and the same in all ranks.
        assert metrics.keys() == expected.keys()
        for name in expected:
            if name.startswith("seconds") or name in NOT_COMPARED:
                continue
            close = pytest.approx(expected[name], rel=1e-3 if has_memory else 2e-3, abs=1e-5)
            assert metrics[name] == close, name
            assert metrics[name] == metrics_other[name], name
        assert metrics.get("precondition_rows", 0) == options.get("precondition", 0)

        # So is the state, and it has moved.
        atol = 1e-4 if k == 0 and not has_memory else 1e-5
        for name, x, y in compared(after, one.state_dict()):
            assert torch.allclose(x, y, rtol=1e-4, atol=atol), (k, name)
        moves = [(x - y).abs().max() for _, x, y in compared(after["actor"], before["actor"])]
        assert max(moves) > 1e-3


def test_every_learner_that_joins_ranks_has_a_row():
    ours = {x.learner for x in ALGORITHMS.values() if x.learner.__module__.startswith("rollpipe.")}
    joining = {cls for cls in ours if cls.joins_ranks}
    missing = joining - {cls for cls, *_ in KINDS.values()}
    assert not missing, f"{missing}: give it a row in KINDS"


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
    a, b = told(run(many_updates, tmp_path, kind))
    one = learner(kind)
    for batches in zip(a[0], b[0]):
        one.update(join(list(batches)))
    for path, x, y in compared(a[1], one.state_dict()):
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-5), path


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
    assert all(torch.equal(x, y) for _, x, y in compared(memory, gloo))


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


def test_a_rank_with_more_samples_is_refused_in_all_of_them(tmp_path):
    for error in run(updates, tmp_path, "DQN", {}, False, 1):
        assert isinstance(error, DataError) and "rank 0 has 3 samples, and others have more" in str(
            error
        ), error


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
