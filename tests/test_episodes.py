"Whole episodes against a naive player, one environment at a time."

from functools import partial
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_fragments import episodes as plans
from reference import Solo, apply, assert_same, grid, snapshot
from toys import (
    WORLDS,
    Acts,
    Counting,
    Limit,
    Memory,
    Plain,
    Scripted,
    factories,
)

from rollpipe.pipes import (
    DataError,
    EnvStepper,
    EpisodeCollector,
    FragmentCollector,
    Lanes,
    State,
    episodes,
)
from rollpipe.pipes.data.fragment_ops import pad_episodes

fast = settings(deadline=None, max_examples=20)


def stepper(*args, **kwargs):
    return EnvStepper(*args, **kwargs, terminal_obs=True)


def play(env, actor, n_steps):
    "`(last step, episode)` of one environment, in the most naive way."
    solo = Solo(env, actor, apply(np.zeros_like, env.action_space.sample()))
    found = []
    states = []
    for t in range(n_steps):
        if not states:
            actors = []
            envs = []
            hx = solo.hx
        states.append(solo.state)
        act, solo.hx, info = solo.react(solo.state, solo.hx, virtual=False)
        obs, rew, term, trunc, env_info = env.step(apply(lambda x: x.copy(), act))
        actors.append(info)
        envs.append(env_info)
        solo.state = (solo.state[0] + 1, snapshot(obs), act, rew, bool(term or trunc))
        if not solo.state[-1]:
            continue
        states.append(solo.state)
        actors.append(solo.react((*solo.state[:-1], False), solo.hx, virtual=True)[2])
        found.append((t, dict(states=states, actors=actors, envs=envs, hx=hx, term=bool(term))))
        solo.state, solo.hx, states = (
            (0, snapshot(env.reset()[0]), act, rew, True),
            solo.fresh(),
            [],
        )
    return found


def check(episode, seq, expected):
    stepno, obs, act, rew, fin = grid([expected], "states")
    assert_same(episode.state, State(stepno, obs, act, rew.astype(np.float32), fin))
    assert_same(episode.actor, grid([expected], "actors"))
    assert_same(
        episode.env,
        {key: grid([{"x": [i[key] for i in expected["envs"]]}], "x") for key in ("count", "parts")},
    )
    assert_same(episode.hx, expected["hx"])
    assert episode.term[:, 0].tolist() == [False] * episode.n_steps + [expected["term"]]
    assert episode.valid.all() and episode.valid.shape == (len(stepno) - 1, 1)
    assert (episode.lane.tolist(), episode.seq.tolist(), episode.version.tolist()) == (
        [0],
        [seq],
        [0],
    )
    final = episode.final
    assert (final.t.tolist(), final.b.tolist()) == ([episode.n_steps - 1], [0])
    last = apply(lambda x: x[-1], (episode.state.obs, episode.actor))
    assert_same((final.obs, final.actor), last)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("world", WORLDS)
@fast
@given(each=st.lists(plans, min_size=1, max_size=3), n_steps=st.integers(1, 60))
def test_equals_the_naive_player(world, each, n_steps):
    env = WORLDS[world][0]
    actor = WORLDS[world][1]()
    found = [
        (t, b, episode)
        for b, make in enumerate(factories(env, each))
        for t, episode in play(make(), actor, n_steps)
    ]
    came = list(EpisodeCollector(Limit(stepper(factories(env, each), actor), n_steps)))
    assert len(came) == len(found) and all(type(item) is list and len(item) == 1 for item in came)
    for seq, (item, (_, _, expected)) in enumerate(zip(came, sorted(found, key=lambda x: x[:2]))):
        check(item[0], seq, expected)


@pytest.mark.parametrize(
    "batch, sizes", [(1, [1] * 7), (2, [2, 2, 2, 1]), (3, [3, 3, 1]), (9, [7])]
)
def test_batches(batch, sizes):
    def source():
        return Limit(EnvStepper(lambda: Counting([(3, "trunc")]), Plain()), 21)

    one_by_one = [episode for [episode] in EpisodeCollector(source())]
    together = list(EpisodeCollector(source(), batch))
    assert [len(item) for item in together] == sizes
    for a, b in zip(one_by_one, [episode for item in together for episode in item]):
        assert_same(a, b)


@fast
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), memory=st.booleans())
def test_padded_batches_come_apart_again(lengths, memory):
    def source():
        pipe = EnvStepper(
            lambda: Counting([(n, "trunc") for n in lengths]), Memory() if memory else Plain()
        )
        return Limit(pipe, sum(lengths))

    [singles] = EpisodeCollector(source(), len(lengths))
    [batch] = EpisodeCollector(source(), len(lengths), pad=True)
    assert (batch.n_steps, batch.n_envs) == (max(lengths), len(lengths))
    assert batch.valid.sum(0).tolist() == lengths == [f.n_steps for f in singles]
    assert batch.final.t.tolist() == [n - 1 for n in lengths] and batch.final.b.tolist() == list(
        range(len(lengths))
    )
    for b, (n, f) in enumerate(zip(lengths, singles)):
        rows = apply(
            lambda x, b=b, n=n: x[: n + 1, b : b + 1], (batch.state, batch.actor, batch.term)
        )
        assert_same(rows, (f.state, f.actor, f.term))
        assert_same(apply(lambda x, b=b, n=n: x[:n, b : b + 1], batch.env), f.env)
        assert_same(apply(lambda x, b=b: x[:, b : b + 1], batch.hx), f.hx)
        rest = (
            batch.state.fin[n + 1 :, b],
            ~batch.valid[n:, b],
            batch.state.rew[n + 1 :, b] == 0,
            ~batch.term[n + 1 :, b],
        )
        assert all(x.all() for x in rest)


def test_padding_what_already_fits_changes_nothing():
    f = next(iter(FragmentCollector(EnvStepper(Counting, Plain(), 2), 3)))
    assert pad_episodes([f]) is f


@pytest.mark.parametrize("below", [False, True])
def test_lanes(below):
    "Collectors above or below the lanes: the same episodes."
    source = EnvStepper(
        [lambda: Counting([(2, "trunc")], 0), lambda: Counting([(3, "trunc")], 1)], Memory()
    )
    pipe = (
        EpisodeCollector(Lanes(source, 2, seed=0))
        if below
        else Lanes(EpisodeCollector(source), 2, seed=0)
    )
    alone = [episode for [episode] in islice(EpisodeCollector(source), 8)]
    came = [episode for [episode] in islice(pipe, 16)]
    for lane in (0, 1):
        mine = [episode for episode in came if episode.lane.tolist() == [lane]]
        assert len(mine) == 8
        for a, b in zip(alone, mine):
            assert_same(a, b._replace(lane=a.lane))


def episodes_of(source, n):
    return [f for [f] in islice(EpisodeCollector(source), n)]


def test_environments_that_rest_leave_no_trace():
    plan = [(2, "trunc"), (5, "trunc"), (1, "trunc")]
    free, sticky = (
        episodes_of(EnvStepper(lambda: Counting(plan), Memory(), sticky=s), 6) for s in (None, 4)
    )
    for a, b in zip(free, sticky):
        assert_same(a._replace(state=()), b._replace(state=()))
    for a, b in zip(free, sticky):
        assert_same(
            (a.state.stepno, a.state.obs, a.state.fin), (b.state.stepno, b.state.obs, b.state.fin)
        )
        assert_same((a.state.act[1:], a.state.rew[1:]), (b.state.act[1:], b.state.rew[1:]))


Timed = partial(
    Scripted,
    [(3, "trunc"), (5, "term")],
    observation_space=gym.spaces.Box(-np.inf, np.inf, (2,)),
    see=lambda env: np.float32([env.episode, env.count]),
    pay=lambda env: float(env.count),
    tell={},
    tell_first={},
)


def looking():
    "Acts by the step that it sees, and reports it."
    return Acts(
        lambda x: (x.obs[..., 1].long() + x.stepno) % 5, report=lambda x: {"at": x.obs.clone()}
    )


@pytest.mark.parametrize("mode", list(gym.vector.AutoresetMode))
def test_vector_environments_in_any_mode(mode):
    def vector():
        return gym.vector.SyncVectorEnv([Timed] * 2, autoreset_mode=mode)

    for a, b in zip(
        episodes_of(stepper(Timed, looking(), 2), 8), episodes_of(stepper(vector, looking()), 8)
    ):
        assert_same(
            (a.state.stepno, a.state.obs, a.state.fin), (b.state.stepno, b.state.obs, b.state.fin)
        )
        assert_same(
            (a.state.act[1:], a.state.rew[1:], a.actor, a.term),
            (b.state.act[1:], b.state.rew[1:], b.actor, b.term),
        )


# --- memory


@fast
@given(script=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=40))
def test_rows_against_a_list(script):
    "Append some rows and drop some, again and again: what is left is what a list would hold."
    rows = episodes.RowQueue()
    held = []
    dropped = 0
    for n_new, n_old in script:
        for _ in range(n_new):
            x = len(held)
            held.append(x)
            rows.append((np.array([x, -x]), torch.tensor([2 * x, 0])))
        dropped = min(len(held), dropped + n_old)
        rows.drop(dropped)
        assert (len(rows), rows.end) == (len(held) - dropped, len(held))
        if held[dropped:]:
            a = rows.cut(dropped, len(held), 1)
            b = rows.cut(dropped, len(held), 0)
            assert a[0][:, 0].tolist() == [-x for x in held[dropped:]] and b[1][:, 0].tolist() == [
                2 * x for x in held[dropped:]
            ]


def test_rows_become_wider():
    rows = episodes.RowQueue()
    for x in (np.zeros(1, np.int64), np.full(1, 0.5), np.ones(1, np.int64), np.ones(1, np.int64)):
        rows.append({"x": x})
    assert rows.cut(0, 4, 0)["x"][:, 0].tolist() == [0, 0.5, 1, 1]


@pytest.mark.slow
def test_memory_follows_the_oldest_episode(monkeypatch):
    "One environment has long episodes in the beginning, then all are short."
    kept = []

    class Watched(episodes.RowQueue):
        def __init__(self):
            super().__init__()
            kept.append(self)

    monkeypatch.setattr(episodes, "RowQueue", Watched)
    plan = [[(300, "trunc")] + [(5, "trunc")] * 400, [(7, "trunc")]]
    sizes = []
    for [_] in islice(EpisodeCollector(EnvStepper(factories(Counting, plan), Plain())), 400):
        [rows] = kept
        sizes.append((rows.end, len(rows)))
    early = [n for end, n in sizes if end < 300]
    late = [n for end, n in sizes if end > 1000]
    assert max(early) > 290
    assert late and max(late) <= 7


# --- bad input


def is_no_second(tick):
    return bool(tick.state.stepno[0] != 1)


def test_ticks_that_do_not_follow_one_another():
    "Of two steppers in turn, and with a gap."
    for ticks in (
        stepper(Counting, Plain()).mux(stepper(Counting, Plain())),
        stepper(Counting, Plain()).filter(is_no_second),
    ):
        with pytest.raises(
            DataError,
            match="EpisodeCollector, lane 0, leaf stepno: ticks that do not follow one another",
        ):
            next(iter(EpisodeCollector(ticks)))
