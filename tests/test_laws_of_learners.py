"""What every learner promises, each promise as one law over all learners of the table of algorithms.

Each algorithm is built as the command line builds it, also with memory and with a shared network where the table has these. A new
algorithm is in every law at once. If it needs other options than `SMALL`, it gets a row in `OPTIONS`.
"""

import copy
import math
from functools import cache
from itertools import islice

import gymnasium as gym
import pytest
import torch
from recordings import recorded
from reference import assert_same, snapshot

import rollpipe.testing  # noqa: F401  registers environments with goals
from rollpipe.agents.checkpoint import load_checkpoint, save_checkpoint
from rollpipe.agents.metrics import METRICS, check_metrics
from rollpipe.agents.shared_options import changing
from rollpipe.agents.tabular import QLearning, TabularQ
from rollpipe.pipes import DataError, EnvStepper, ProcessReading, nested, rollouts
from rollpipe.pipes.data.fragment_ops import columns
from rollpipe.pipes.data.nested import first_difference
from rollpipe.pipes.envs.keeping import keeper_for
from rollpipe.pipes.graph.edits import find
from rollpipe.pipes.graph.modules import bump_version, version_of
from rollpipe.pipes.graph.pipe import restore_stream, stream_state, unknown_states
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.keeping.chunks import ChunkFolder
from rollpipe.pipes.replay.pipe import Replayed
from rollpipe.runs.states import load_states, states_of
from rollpipe.settings.algorithms import ALGORITHMS, options_for
from rollpipe.settings.config import build, make_config

# --- the registry, and how each learner is made

OURS = {name: x for name, x in ALGORITHMS.items() if x.learner.__module__.startswith("rollpipe.")}
LEARNERS = {name: algorithm.learner for name, algorithm in OURS.items()} | dict(q_table=QLearning)
CONTINUOUS = ("npg", "sac", "crossq", "td3", "ddpg", "bc", "iql", "td3bc")  # on Pendulum

# Each algorithm takes those of these options that it has.
SMALL = dict(
    n_envs=3,
    n_steps=8,
    hidden=(8,),
    critic_hidden=(8,),
    warmup=16,
    batch_size=6,
    capacity=200,
    length=3,
    random_steps=30,
    eps_steps=80,
    engine="torch",
)
PER_STEP = dict(samples_per_step=0.25, policy_every=1)
OPTIONS = dict(
    npg=dict(fvp_subsample=0.5),
    ppo=dict(epochs=2, minibatch=10),
    dqn=dict(multi_step=2, target_every=3),
    qr_dqn=dict(multi_step=2, tau=0.1),
    **{name: PER_STEP for name in ("sac", "crossq", "td3", "ddpg", "td3bc")},
)
CASES = {name: (name, {}) for name in OURS}
CASES |= {
    f"{name} with memory": (name, dict(recurrent="gru")) for name in OURS if OURS[name].recurrent
}
CASES |= {f"{name} as one network": (name, dict(shared=True)) for name in OURS if OURS[name].shared}
CASES["q_table"] = ("q_table", {})
each_case = pytest.mark.parametrize("case", CASES)
each_learner = pytest.mark.parametrize("name", LEARNERS)
RECORDED = {}  # environment -> folder of recorded steps


@pytest.fixture(scope="module", autouse=True)
def recording(tmp_path_factory):
    "Recorded steps, for the learners from data."
    for env in ("CartPole-v1", "Pendulum-v1"):
        RECORDED[env] = str(recorded(tmp_path_factory.mktemp("data") / "steps", env))


@cache
def known_options(name):
    return frozenset(option.name for option in options_for(name))


def env_of(name):
    return "Pendulum-v1" if name in CONTINUOUS else "CartPole-v1"


def made(case, seed=0, env=None, intrinsic=0.0, **more):
    "`(learner, pipeline)` of a case."
    name, options = CASES[case]
    if name == "q_table":
        actor = TabularQ.for_env("Taxi-v4", seed=seed)
        pipe = rollouts("Taxi-v4", actor, n_envs=3, n_steps=8, seed=0)
        return QLearning(actor, eps_steps=80), pipe

    # The options that this algorithm has
    env = env or env_of(name)
    wanted = SMALL | OPTIONS.get(name, {}) | options | dict(data=RECORDED.get(env)) | more
    if "recurrent" in options:
        wanted |= dict(length=8)
    if "shared" in options:
        del wanted["critic_hidden"]
    options = {k: x for k, x in wanted.items() if k in known_options(name)}

    # Rates that fall must last for the whole training.
    length = dict(steps=more["decay_steps"]) if "decay_steps" in more else {}
    return build(make_config(name, env, options, seed=seed, intrinsic=intrinsic, **length))


@cache
def batches(case, n=4):
    "Batches that the untrained policy of a case collects; of a memory, what comes once it is warm. Do not change them."
    _, pipe = made(case)
    collected = []
    for batch in pipe:
        if isinstance(batch, Replayed):
            batch = Replayed(batch.fresh, list(batch.samples), None)
        if not isinstance(batch, Replayed) or batch.samples:
            collected.append(batch)
        if len(collected) == n:
            return collected


def given(batch):
    "A batch as a pipeline gives it."
    return batch._replace(samples=iter(batch.samples)) if isinstance(batch, Replayed) else batch


def fragment_of(batch):
    "The rows that a learner trains on."
    return batch.samples[0].fragment if isinstance(batch, Replayed) else batch


def fresh_of(batch):
    "The rows that a learner counts."
    return batch.fresh if isinstance(batch, Replayed) else batch


def timeless(metrics):
    return {name: x for name, x in metrics.items() if not name.startswith("seconds")}


def networks(agent):
    named = {name: getattr(agent, name, None) for name in ("actor", "critic", "target")}
    return {name: x for name, x in named.items() if isinstance(x, torch.nn.Module)}


# --- an update


@each_case
def test_an_update_moves_everything_and_says_how(case):
    "Every parameter that is trained, and every normaliser; the metrics are finite numbers with known names."
    agent, _ = made(case)
    before = copy.deepcopy({name: x.state_dict() for name, x in networks(agent).items()})
    steps = 0
    for k, batch in enumerate(batches(case)):
        metrics = agent.update(given(batch))
        rows = fresh_of(batch)
        steps += int(rows.valid.sum())
        assert set(metrics) <= METRICS.keys() and check_metrics(metrics) == metrics, case
        assert all(type(x) in (int, float) and math.isfinite(x) for x in metrics.values()), metrics
        assert metrics["lag"] == (k if rows.version is not None else 0), case
        assert agent.steps == steps, case
        assert {version_of(x) for x in (agent.actor, agent.critic) if x is not None} == {k + 1}

    # A target follows its network. Constants such as bounds, and what is frozen, stay.
    for name, network in networks(agent).items():
        still = [k for k, x in network.state_dict().items() if torch.equal(x, before[name][k])]
        trained = {k for k, p in network.named_parameters() if p.requires_grad or name == "target"}
        counted = {k for k in before[name] if "_norm." in k or k.startswith("ret_")}
        assert not (trained | counted) & {*still}, (case, name, still)


@each_case
def test_the_lag_is_reported_and_does_no_harm(case):
    agent, _ = made(case)
    batch = batches(case)[0]
    bump_version(agent.actor, to=3)
    versions = torch.full((fresh_of(batch).n_envs,), 3)
    versions[1] = 0
    for version, lags in ((versions, (3, 4)), (None, (0, 0))):
        rows = fresh_of(batch)._replace(version=version)
        item = batch._replace(fresh=rows) if isinstance(batch, Replayed) else rows
        assert [agent.update(given(item))["lag"] for _ in lags] == [*lags], case
    assert all(p.isfinite().all() for x in networks(agent).values() for p in x.parameters()), case


# --- its state


@each_case
def test_a_learner_from_a_file_makes_the_same_updates(case, tmp_path):
    """Bit for bit, whatever it has learned before; TRPO and NPG also where nobody asks for gradients.

    The batch and the global random numbers stay as they are.
    """
    natural = CASES[case][0] in ("trpo", "npg")
    agent, _ = made(case)
    other, _ = made(case, seed=9)
    first, second, *rest = batches(case)
    for batch in (first, second):
        agent.update(given(batch))
    other.update(given(rest[0]))
    assert first_difference(agent.state_dict(), other.state_dict()), case
    save_checkpoint(tmp_path / "x", agent)
    other.load_state_dict(load_checkpoint(tmp_path / "x").agent_state)
    for batch in rest:
        before = copy.deepcopy(nested.leaves(fragment_of(batch)))
        state = torch.get_rng_state()
        metrics = timeless(agent.update(given(batch)))
        with torch.set_grad_enabled(not natural):
            assert repr(timeless(other.update(given(batch)))) == repr(metrics), case
        assert all(map(torch.equal, before, nested.leaves(fragment_of(batch)))), case
        assert torch.equal(torch.get_rng_state(), state), case
    assert first_difference(agent.state_dict(), other.state_dict()) is None, case


# What the stream of a learner is besides: priorities, ratios, goals, new rewards, an average, rates that fall.
PRIORITIES = dict(prioritized=True, n_batches=2, samples_per_step=None)
STREAMS = {case: {} for case in CASES} | {
    "dqn, priorities": dict(PRIORITIES, beta_steps=300),
    "dqn with memory, priorities": dict(PRIORITIES, length=8, burn_in=2),
    "dqn, ratio": dict(length=1, multi_step=1, samples_per_step=1 / 16),
    "dqn, goals": dict(
        PRIORITIES, env="rollpipe.testing:BitFlip-v0", n_sampled_goal=4, length=1, multi_step=1
    ),
    "sac, goals": dict(env="rollpipe.testing:PointReach-v0", n_sampled_goal=4, length=1),
    "sac, priorities": dict(PRIORITIES, beta_steps=300),
    "crossq, average": dict(average_policy=3),
    "ddpg, priorities": PRIORITIES,
    "trpo, decay": dict(env="Pendulum-v1", decay_steps=1000, reward_scale=0.5),
    "ppo, average": dict(average_policy=3, decay_steps=1000),
    "ppo, novelty": dict(intrinsic=0.5),
}
N, SPLIT = 7, 4  # updates in all, and before the state is taken


def trained(stream, n, workers=0, state=None, chunks=None):
    "Metrics of `n` updates, all weights and other state afterwards, and the state with which others go on."
    case = stream.partition(",")[0]
    agent, pipe = made(
        case, lanes=2, n_envs=2, n_steps=6, warmup=40, batch_size=16, **STREAMS[stream]
    )
    env = STREAMS[stream].get("env", "Taxi-v4" if case == "q_table" else env_of(CASES[case][0]))
    for stepper in find(pipe, EnvStepper):
        stepper.keeper = keeper_for(lambda: gym.make(env))
    assert unknown_states(pipe) == [], stream
    if state is not None:
        agent.load_state_dict(state["agent"])
        load_states(pipe, state["learning"])
        restore_stream(pipe, state["stream"], chunks)

    service = ProcessReading(workers, lag=int(case == "vtrace")) if workers else None
    with DataLoader2(pipe, reading_service=service) as loader:
        metrics = [timeless(agent.update(batch)) for batch in islice(loader, n)]
        state = dict(
            agent=agent.state_dict(),
            learning=states_of(loader.datapipe),
            stream=stream_state(loader.datapipe, chunks),
        )
        return metrics, snapshot((state["agent"], state["learning"])), copy.deepcopy(state)


class Plain:
    "As a learner to `save_checkpoint`."

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state


def stored(state, path):
    "The state, after it was in a file."
    pipes = dict(learning=state["learning"], stream=state["stream"])
    save_checkpoint(path, Plain(state["agent"]), {}, {}, pipes=pipes)
    found = load_checkpoint(path)
    return dict(agent=found.agent_state, **found.pipes)


@cache
def uninterrupted(stream, workers):
    return trained(stream, N, workers)[:2]


def check(stream, workers, change=lambda state: state, chunks=lambda: None, then=None):
    whole, weights = uninterrupted(stream, workers)
    first, _, state = trained(stream, SPLIT, workers, chunks=chunks())
    then = workers if then is None else then
    rest, again, _ = trained(stream, N - SPLIT, then, change(state), chunks())
    assert repr(first + rest) == repr(whole), stream
    assert_same(again, weights)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("stream", STREAMS)
def test_the_rest_is_the_same_in_new_objects(stream):
    "Some updates, a state and the rest in new objects make the same updates as all of them in one go."
    check(stream, workers=int(stream == "vtrace"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "stream", ["dqn, priorities", "dqn, goals", "sac", "td3", "ppo", "ppo, novelty"]
)
@pytest.mark.parametrize("then", [0, 1])
def test_through_a_file_and_with_another_number_of_workers(stream, then, tmp_path):
    "The file of the checkpoint holds no row of the memory: these are in chunks."
    path = tmp_path / "checkpoint.safetensors"
    folder = tmp_path / "chunks"
    check(
        stream, 1 - then, lambda state: stored(state, path), lambda: ChunkFolder(folder), then=then
    )
    assert bool(list(folder.glob("*.chunk"))) == (not stream.startswith("ppo"))
    ChunkFolder(folder).sweep([path])
    check(
        stream, 1 - then, lambda state: stored(state, path), then=then
    )  # without a folder, it does


def test_a_resumed_training_is_resumed_again(tmp_path):
    whole, weights, _ = trained("dqn, priorities", 7)
    metrics = []
    state = None
    for n in (1, 2, 1, 3):
        chunks = ChunkFolder(tmp_path / "chunks")
        more, found, state = trained("dqn, priorities", n, 0, state, chunks)
        state = stored(state, tmp_path / "checkpoint")
        chunks.sweep([tmp_path / "checkpoint"])
        metrics += more
    assert repr(metrics) == repr(whole)
    assert_same(found, weights)


# --- what is in a batch


def resting(f, junk=0.0):
    "Environment 1 rests from the start: nothing in its rows means anything, floats are `junk`."

    def spoilt(x):
        x = x.clone()
        x[:, 1] = junk if x.is_floating_point() else 0
        return x

    state, actor, adv, ret = nested.map(spoilt, (f.state._replace(fin=None), f.actor, f.adv, f.ret))
    flags = [f.state.fin, f.valid, f.term]
    fin, valid, term = nested.map(torch.clone, flags)
    fin[:, 1] = True
    valid[:, 1] = term[:, 1] = False
    final = nested.getitem(f.final, f.final.b != 1)
    return f._replace(
        state=state._replace(fin=fin),
        actor=actor,
        valid=valid,
        term=term,
        adv=adv,
        ret=ret,
        final=final,
    )


def updated(case, rows):
    "Metrics and state after one update from these rows, without minibatches and noise."
    whole = dict(epochs=1, minibatch=10**6, critic_epochs=1, fvp_subsample=1.0, cg_iters=2)
    agent, _ = made(case, **whole)
    agent.noise = lambda f, shape=(1,): torch.zeros(*f.valid.shape, *shape)
    metrics = timeless(agent.update(rows)) | dict(steps=agent.steps)
    return metrics, {name: x.state_dict() for name, x in networks(agent).items()}


@each_case
def test_rows_that_are_not_valid_change_nothing(case):
    "What stands there does not matter, bit for bit, and neither does whether they are there."
    rows = fragment_of(batches(case)[0])
    metrics, state = updated(case, resting(rows))
    for junk in (77.0, math.nan, math.inf):
        found, other = updated(case, resting(rows, junk))
        assert repr(found) == repr(metrics), (case, junk)
        assert first_difference(state, other) is None, (case, junk)

    there = torch.tensor([b for b in range(rows.n_envs) if b != 1])
    found, other = updated(case, columns(rows, there))
    assert found == pytest.approx(metrics, rel=1e-3, abs=1e-4, nan_ok=True), case
    torch.testing.assert_close(other, state, rtol=1e-4, atol=2e-5, msg=case)


def put(x, place, value):
    x = x.clone()
    x[place] = value
    return x


def with_value(rows, name, value):
    "The rows with `value` in one that counts."
    t, b = rows.valid.nonzero()[0].tolist()
    if name in ("adv", "ret"):
        return rows._replace(**{name: put(getattr(rows, name), (t, b), value)})
    if name == "logp":
        return rows._replace(actor=dict(rows.actor, logp=put(rows.actor["logp"], (t, b), value)))
    at = (t + (name != "obs"), b)
    return rows._replace(
        state=rows.state._replace(**{name: put(getattr(rows.state, name), at, value)})
    )


def refused_rows(agent, rows):
    "`(name of the leaf in the message, rows)` that a learner refuses."
    yield "no valid row", rows._replace(valid=rows.valid & False)
    needs = {
        *agent.batch_needs,
        *(["ret"] if "adv" in agent.batch_needs and agent.critic is not None else []),
    }
    for name in needs & {"adv", "ret"}:
        yield dict(adv="AdvantageBuffer", ret="ret")[name], rows._replace(**{name: None})
    if "logp" in needs:
        yield "logp", rows._replace(actor={})
        yield "logp", rows._replace(actor=rows.state.rew)
        yield "logp", rows._replace(actor={**rows.actor, "logp": rows.actor["logp"].unsqueeze(-1)})

    # Numbers that are none, and those whose squares overflow
    floats = [name for name in ("obs", "act") if getattr(rows.state, name).is_floating_point()]
    for name in {*floats, "rew", *needs}:
        for value in (3e38, -1e20, math.inf, math.nan):
            yield name, with_value(rows, name, value)


@each_case
def test_what_a_batch_lacks_or_has_too_large_is_named_and_nothing_changes(case):
    agent, pipe = made(case)
    rows = fragment_of(batches(case)[0])
    agent.update(rows)
    before = copy.deepcopy(agent.state_dict())
    for name, wrong in refused_rows(agent, fragment_of(batches(case)[1])):
        with pytest.raises(DataError, match=name):
            agent.update(wrong)
        assert first_difference(agent.state_dict(), before) is None, (case, name)
    with pytest.raises(DataError, match="Expected Fragment, got"):
        agent.update(pipe)


@pytest.mark.parametrize("case", [case for case in CASES if "memory" in case])
def test_the_memory_of_the_policy_that_acted_is_needed(case):
    "Without it, or with that of a policy of another size or kind, an update is refused."
    agent, _ = made(case)
    rows = fragment_of(batches(case)[0])
    wrong = [rows.hx[..., 1:], torch.cat([rows.hx, rows.hx]), (rows.hx, rows.hx)]
    for hx in wrong:
        with pytest.raises(DataError, match="hx: this is the memory of another policy"):
            agent.update(rows._replace(hx=hx))
    for hx in [(), None] if "logp" in agent.batch_needs else []:
        with pytest.raises(DataError, match="hx: the memory of the policy that acted is not known"):
            agent.update(rows._replace(hx=hx))
    agent.update(rows)


# --- its options

NAN_OR_INFINITE = (math.nan, -math.inf, math.inf, 10**400)
# option -> values that are refused in whichever learner it is; a new option needs a row
REFUSED = dict(
    lr=(-0.1,),
    lr_kl=(-0.1,),
    critic_lr=(-1.0,),
    max_grad_norm=(-1.0,),
    decay_steps=(-1,),
    average_policy=(-1, 0.5),
    seed=(-1, 2**70, 0.5, True, None),
    gamma=(-0.1, 1.5),
    lam=(-0.1, 1.1),
    tau=(-0.1, 2.0),
    eps_start=(-0.1, 1.1),
    eps_end=(-1.0, 1.1),
    eps_steps=(-1,),
    beta_steps=(-1,),
    multi_step=(0, 1.5),
    random_steps=(-1,),
    burn_in=(-1, 0.5),
    target_every=(0,),
    huber=(-1.0,),
    double=("no", 1),
    max_kl=(0.0, -1.0),
    damping=(-0.1,),
    cg_iters=(0, 2.0),
    cg_gain=(-0.1,),
    fvp_subsample=(0.0, 1.5),
    precondition=(-1, "on"),
    backtrack=(0.0, 1.5),
    max_backtracks=(0,),
    accept_ratio=(-0.1,),
    critic_epochs=(0, -1, 1.5),
    epochs=(0, 1.5),
    minibatch=(0, 2.5),
    clip=(-1,),
    clip_value=(-1.0,),
    target_kl=(-1.0,),
    c_value=(-1.0,),
    c_entropy=(-1.0,),
    c_rho=(-1.0,),
    rho_clip=(-1.0,),
    c_clip=(-1.0, 1.5),
    eta=(-0.1, 2.0),
    normalize_adv=("sometimes", None),
    temperature=(-1.0,),
    first_temperature=(0.0, -1.0),
    target_entropy=(),
    policy_every=(0,),
    beta1=(-0.1, 1.0),
    smoothing=(-1.0,),
    smoothing_limit=(-1.0,),
    expectile=(-0.1, 2.0),
    beta=(-1.0,),
    max_weight=(-1.0,),
    alpha=(-1.0,),
)
ALSO_REFUSED = dict(
    trpo=dict(critic_lr=(None,)), npg=dict(critic_lr=(None,)), ppo=dict(normalize_adv=(True,))
)
NO_LIMIT = {
    "max_grad_norm",
    "rho_clip",
    "c_clip",
    "c_rho",
    "huber",
    "smoothing_limit",
}  # infinity stands for none
ONLY_COMPARED = "_steps"  # numbers of steps may be of any size


def options_of_learner(name):
    if name == "q_table":
        return {x: None for x in ("gamma", "lr", "eps_start", "eps_end", "eps_steps")}
    return {o.param: o for o in options_for(name) if o.part == "learner"} | dict(seed=None)


def refused_values(learner, name, option):
    "Values that this option of a learner may not have."
    values = [*REFUSED[name], *ALSO_REFUSED.get(learner, {}).get(name, ())]
    kinds = () if option is None else option.kinds
    if "float" in kinds:
        values += [
            x for x in NAN_OR_INFINITE if x not in (math.inf, 10**400) or name not in NO_LIMIT
        ]
    if "int" in kinds and not name.endswith(ONLY_COMPARED):
        values.append(2**63)
    return values


@cache
def parts_of(name):
    "The networks of a learner."
    agent, _ = made(name)
    return [agent.actor] + [x for x in (agent.critic,) if x is not None]


@each_learner
def test_an_option_out_of_its_range_is_refused_with_its_name(name):
    cls = LEARNERS[name]
    for option, declared in options_of_learner(name).items():
        assert option in REFUSED, f"{cls.__name__}.{option} is new: give it a row in REFUSED"
        for value in refused_values(name, option, declared):
            with pytest.raises(
                DataError, match=f"{cls.__name__}.*{option}|{option}.*{cls.__name__}"
            ) as e:
                cls(*parts_of(name), **{option: value})
            assert str(value) in e.value.got, (name, option, value)


# A value that an option gets while the learner runs: one that its networks feel, in its range
ANOTHER = dict(
    gamma=0.5,
    lr=0.02,
    critic_lr=0.03,
    max_kl=0.2,
    fvp_subsample=0.5,
    tau=0.5,
    eta=0.5,
    lam=0.5,
    backtrack=0.5,
)


@pytest.mark.slow_but_one
@each_learner
def test_an_option_that_changes_acts_as_one_that_the_learner_was_made_with(name):
    "So no learner keeps an older value anywhere."
    for option in changing(LEARNERS[name]):
        agent, _ = made(name)
        value = ANOTHER.get(option, 0.25)
        if option == "critic_lr" and agent.critic_lr is None:
            with pytest.raises(DataError, match="leaf critic_lr: .*no learning rate of its own"):
                agent.set_option(option, value)
            continue

        # One that was made with the value, from the same networks
        other, _ = made(name)
        networks = [x for x in (other.actor, other.critic) if x is not None]
        other = type(other)(*networks, **given_options(agent) | {option: value})
        agent.set_option(option, value)
        for batch in batches(name)[:3]:
            metrics = [timeless(x.update(given(batch))) for x in (agent, other)]
            assert repr(metrics[0]) == repr(metrics[1]), (name, option)
        difference = first_difference(agent.state_dict(), other.state_dict())
        assert difference is None, (name, option, difference)
        assert getattr(agent, option) == getattr(other, option) == value


def given_options(agent):
    "The options of a learner, to make another one with."
    names = [f.name for f in type(agent).__dataclass_fields__.values() if f.init]
    return {name: getattr(agent, name) for name in names if name not in ("actor", "critic")}


@each_learner
def test_an_option_that_may_not_change_is_refused_by_name(name):
    "Also a value out of the range of one that may, and a schedule that leaves it. Then nothing has changed."
    agent, _ = made(name)
    cls = type(agent).__name__
    before = given_options(agent)
    free = {*changing(type(agent))}
    for option in before.keys() - free:
        with pytest.raises(DataError, match=f"leaf {option}: {cls}: this option cannot change"):
            agent.set_option(option, before[option])
    if before.get("critic_lr") is None:
        free.discard("critic_lr")
    for option in free:
        for value in (-1.0, lambda steps: -1.0, "linear:.1:0.2"):
            with pytest.raises(DataError, match=f"leaf {option}: {cls}: "):
                agent.set_option(option, value)
    assert given_options(agent) == before and not agent.schedules


@pytest.mark.parametrize("name", [x for x in OURS if "decay_steps" in options_of_learner(x)])
def test_rates_fall_to_zero_and_then_an_update_is_refused(name):
    "Linearly, or by half a cosine for IQL, whose critic keeps its rate; a trust region falls, too."
    n = int(fresh_of(batches(name)[0]).valid.sum())
    agent, _ = made(name, decay_steps=4 * n)
    groups = [group for group, _ in agent.rates() if agent.decay_of_rate(group)]
    rates = [group["lr"] for group in groups]
    falling = [option for option in agent.decaying if getattr(agent, option, None)]
    limits = {option: getattr(agent, option) for option in falling}
    assert groups, name
    for k in range(4):
        left = (1 + math.cos(math.pi * k / 4)) / 2 if name == "iql" else 1 - k / 4
        metrics = agent.update(given(batches(name)[k]))
        assert metrics["rate_left"] == pytest.approx(left), name
        assert [group["lr"] for group in groups] == pytest.approx([x * left for x in rates]), name
        for option, limit in limits.items():
            assert getattr(agent, option) == pytest.approx(limit * left), (name, option)
        if "kl" in metrics and "max_kl" in limits:
            assert metrics["kl"] <= 1.1 * limits["max_kl"] * left, name
    with pytest.raises(
        DataError, match=f"the learning rates have fallen to 0.*more than the {4 * n}"
    ):
        agent.update(given(batches(name)[0]))
