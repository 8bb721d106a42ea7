"""Data sets of Minari: ours are read by Minari, and its sets are played as an environment would play them.

h5py is enough for most of it. What needs Minari, or JAX, is skipped where that is not installed.
"""

import gc
import json
import signal
import sys
import time
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from forked import Forked, run_forked
from gymnasium import spaces
from toys import Acts, Scripted, sampled

from rollpipe.pipes import (
    CheckInvariants,
    EnvStepper,
    EpisodeCollector,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    RewardScaler,
    nested,
)
from rollpipe.pipes.data.errors import CheckpointError, DataError, SpaceError
from rollpipe.pipes.data.fragment import Fragment
from rollpipe.pipes.data.fragment_ops import join
from rollpipe.pipes.graph.pipe import restore_stream, stream_state
from rollpipe.pipes.recording import from_minari, to_minari, whole_episodes
from rollpipe.pipes.recording.minari_source import dealt

h5py = pytest.importorskip("h5py")
ARRAYS = ("observations", "actions", "rewards", "terminations", "truncations")
DICT = spaces.Dict(
    place=spaces.Box(-1, 1, (2,), np.float64),
    more=spaces.Tuple([spaces.Discrete(4, start=-1), spaces.MultiBinary(3)]),
)
ACT = spaces.Tuple([spaces.MultiDiscrete([3, 4]), spaces.Box(-1, 1, (2, 2))])


# -- a writer that knows nothing of ours, checked against Minari's below --------------------------------------------------


def put(group, name, tree):
    if isinstance(tree, tuple):
        tree = {f"_index_{i}": x for i, x in enumerate(tree)}
    if not isinstance(tree, dict):
        return group.create_dataset(
            name, data=tree, chunks=True, maxshape=(None, *np.shape(tree)[1:])
        )
    group = group.create_group(name)
    for key, x in tree.items():
        put(group, key, x)


def space_text(space):
    kind = type(space).__name__
    if kind == "Dict":
        return dict(type=kind, subspaces={k: space_text(s) for k, s in space.spaces.items()})
    if kind == "Tuple":
        return dict(type=kind, subspaces=[space_text(s) for s in space.spaces])
    if kind == "MultiBinary":
        return dict(type=kind, n=space.n)
    if kind == "Discrete":
        return dict(type=kind, dtype="int64", start=int(space.start), n=int(space.n))
    if kind == "MultiDiscrete":
        return dict(
            type=kind, dtype=str(space.dtype), nvec=space.nvec.tolist(), start=space.start.tolist()
        )
    return dict(
        type=kind,
        dtype=str(space.dtype),
        shape=list(space.shape),
        low=space.low.tolist(),
        high=space.high.tolist(),
    )


def write(folder, name, episodes, obs_space, act_space, **more):
    "A set with these episodes, dicts of the arrays by Minari's names."
    (data := folder / name / "data").mkdir(parents=True)
    with h5py.File(data / "main_data.hdf5", "w", track_order=True) as file:
        for k, episode in enumerate(episodes):
            put(file, f"episode_{k}", episode)
            file[f"episode_{k}"].attrs.update(id=k, total_steps=len(episode["rewards"]))
    facts = dict(
        total_episodes=len(episodes),
        total_steps=sum(len(e["rewards"]) for e in episodes),
        data_format="hdf5",
        dataset_id=name,
        observation_space=json.dumps(space_text(obs_space)),
        action_space=json.dumps(space_text(act_space)),
        minari_version="0.5.0",
    )
    (data / "metadata.json").write_text(
        json.dumps({k: x for k, x in {**facts, **more}.items() if x is not None})
    )
    return data


def random_episodes(lengths, obs_space, act_space, seed=0, reward=np.float64, infos=True):
    rng = np.random.default_rng(seed)
    for space in (obs_space, act_space):
        space.seed(seed)

    def rows(space, n):
        return nested.map(
            lambda x: x, nested.stack([nested.map(np.asarray, space.sample()) for _ in range(n)])
        )

    for n in lengths:
        end = np.arange(n) == n - 1
        term = bool(rng.integers(2))
        more = (
            dict(speed=rng.normal(size=(n + 1, 2)), deep=dict(count=rng.integers(9, size=n + 1)))
            if infos
            else {}
        )
        yield dict(
            observations=rows(obs_space, n + 1),
            actions=rows(act_space, n),
            rewards=rng.normal(size=n).astype(reward),
            terminations=end & term,
            truncations=end & (not term),
            infos=more,
        )


def read(path):
    "Of each episode, the arrays by their paths in the file."
    with h5py.File(
        path / "main_data.hdf5" if path.name == "data" else path / "data" / "main_data.hdf5"
    ) as file:
        found = []
        for k in range(len(file)):
            arrays = {}
            file[f"episode_{k}"].visititems(
                lambda name, x, arrays=arrays: arrays.update(
                    {name: x[()]} if hasattr(x, "dtype") else {}
                )
            )
            found.append(arrays)
        return found


def assert_same_episodes(xs, ys, infos=True):
    assert len(xs) == len(ys)
    for x, y in zip(xs, ys):
        assert {k for k in x if "/_" not in k or "_index" in k} == y.keys() if infos else True
        for key in y:
            first = 1 if key.startswith("infos") else 0  # that of the reset is not in a fragment
            assert x[key].dtype == y[key].dtype and x[key].shape == y[key].shape, key
            np.testing.assert_array_equal(x[key][first:], y[key][first:], err_msg=key)


KINDS = {
    "dict": (DICT, ACT),
    "number": (spaces.Discrete(16), spaces.Discrete(4)),
    "box": (spaces.Box(-1, 1, (3,)), spaces.Box(-2, 2, (1,))),
    "image": (spaces.Box(0, 255, (33, 34, 3), np.uint8), spaces.MultiBinary(2)),
}
LENGTHS = [5, 1, 9, 3, 3, 12, 2]


# -- playing ------------------------------------------------------------------------------------------------------------


class Player(Scripted):
    "Plays the episodes of one column, of which the first observation begins each. Its observation tells the action that was taken."

    observation_space = spaces.Box(-99, 99, (2,))
    action_space = spaces.Discrete(5)

    def __init__(self, episodes):
        super().__init__(see=self.see, pay=self.pay, ends=self.end, tell={}, tell_first={})
        self.column = episodes

    def of(self, name, t, otherwise):
        "Entry `t` of an array of this episode; after the last episode, something else."
        is_over = self.episode >= len(self.column)
        return otherwise if is_over else self.column[self.episode][name][t]

    def see(self, _):
        return self.of("observations", self.count, np.zeros(2, np.float32))

    def pay(self, _):
        assert self.action == self.of("actions", self.count - 1, self.action)
        return float(self.of("rewards", self.count - 1, 0))

    def end(self, _):
        names = "terminations", "truncations"
        return [bool(self.of(name, self.count - 1, False)) for name in names]


TOLD = Acts(lambda shown: told(shown.obs))


def told(obs):
    act = (7 * obs[..., 0] + obs[..., 1]) % 5
    return act.long() if isinstance(act, torch.Tensor) else act.astype(int)


def told_episodes(lengths):
    for k, n in enumerate(lengths):
        obs = np.stack([np.full(n + 1, k), np.arange(n + 1)], 1).astype(np.float32)
        end = np.arange(n) == n - 1
        yield dict(
            observations=obs,
            actions=told(obs[:-1]),
            rewards=(100.0 * k + np.arange(n)) / 3,
            terminations=end & bool(k % 2),
            truncations=end & (not k % 2),
            infos={},
        )


@pytest.mark.parametrize(
    "n_steps, n_envs, seed", [(4, 1, None), (3, 2, None), (5, 3, 7), (50, 2, 1), (1, 7, None)]
)
def test_fragments_are_those_of_an_environment_that_plays_the_episodes(
    n_steps, n_envs, seed, tmp_path
):
    fragments = list(CheckInvariants(told_set(tmp_path, n_steps, n_envs, seed=seed)))

    # The episodes of each column, played by an environment.
    episodes = list(told_episodes(LENGTHS))
    n = len(LENGTHS)
    order = range(n) if seed is None else np.random.default_rng(seed).permutation(n)
    columns = [[episodes[k] for _, k in column] for column in dealt(LENGTHS, order, n_envs)]
    makes = [partial(Player, column) for column in columns]
    played = FragmentCollector(EnvStepper(makes, TOLD, terminal_obs=True), n_steps)

    left = torch.tensor([sum(len(e["rewards"]) for e in column) for column in columns])
    assert len(fragments) == -(-int(left.max()) // n_steps)
    row = torch.arange(n_steps + 1)[:, None].expand(-1, n_envs)
    for f, wanted in zip(fragments, played):
        # Rows after the last step of a column say nothing.
        assert torch.equal(f.valid, row[:-1] < left)
        ours = nested.leaves((f.state._replace(obs=()), f.term))
        theirs = nested.leaves((wanted.state._replace(obs=()), wanted.term))
        for x, y in zip(ours, theirs):
            assert x.dtype == y.dtype and torch.equal(x[row <= left], y[row <= left])
        assert torch.equal(f.state.obs[row < left], wanted.state.obs[row < left])

        for x, y in zip(f.final[:3], wanted.final[:3]):
            assert x.dtype == y.dtype and torch.equal(x, y)
        for name in ("lane", "seq", "version"):
            assert torch.equal(getattr(f, name), getattr(wanted, name))
        assert (f.actor, f.hx, f.final.actor) == ({}, (), {})
        left = left - n_steps


def told_set(folder, *args, **options):
    "A set of the told episodes, played."
    if not (folder / "told").exists():
        episodes = list(told_episodes(LENGTHS))
        write(folder, "told/all-v0", episodes, Player.observation_space, Player.action_space)
    return from_minari("told/all-v0", *args, folder=folder, **options)


def test_a_resumed_stream_goes_on_where_it_was(tmp_path):
    known = dict(n_steps=3, n_envs=2, seed=5)
    whole = list(told_set(tmp_path, **known))
    pipe = told_set(tmp_path, **known)
    items = iter(pipe)
    for n in range(1, len(whole)):
        next(items)
        state = stream_state(pipe)
        rest = list(restore_stream(told_set(tmp_path, **known), state))
        assert len(rest) == len(whole) - n
        for x, y in zip(nested.leaves(rest), nested.leaves(whole[n:])):
            assert torch.equal(x, y)
    for other in (dict(n_steps=4), dict(seed=6), dict(n_envs=1)):
        with pytest.raises(CheckpointError, match="another stream"):
            next(iter(restore_stream(told_set(tmp_path, **known | other), state)))


# -- round trips ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow_but_one
@pytest.mark.parametrize("reward", [np.float64, np.float32, np.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_set_that_is_played_and_written_is_the_same(kind, reward, tmp_path):
    obs_space, act_space = KINDS[kind]
    made = write(
        tmp_path,
        "some/set-v0",
        list(random_episodes(LENGTHS, obs_space, act_space, reward=reward)),
        obs_space,
        act_space,
    )
    options = dict(observation_space=obs_space, action_space=act_space, folder=tmp_path)
    again = to_minari(from_minari("some/set-v0", 4, folder=tmp_path), "some/again-v0", **options)
    xs = read(again)
    ys = read(made)
    if reward == np.int64:
        ys = [{**y, "rewards": y["rewards"].astype(float)} for y in ys]
    assert_same_episodes(xs, ys)
    for x in xs:
        assert (
            not x["infos/_speed"][0]
            and x["infos/_speed"][1:].all()
            and np.isnan(x["infos/speed"][0]).all()
        )
    # with several columns the episodes come in the order in which they end; played again, the set stays as it is
    several = read(
        to_minari(
            from_minari("some/set-v0", 4, 3, seed=1, folder=tmp_path), "some/several-v0", **options
        )
    )

    def key(episode):
        return episode["rewards"].tobytes()

    assert_same_episodes(sorted(several, key=key), sorted(xs, key=key), infos=False)
    third = to_minari(from_minari("some/again-v0", 64, folder=tmp_path), "some/third-v0", **options)
    for x, y in zip(read(third), xs):
        assert x.keys() == y.keys()
        for name in x:
            np.testing.assert_array_equal(x[name], y[name])


def recorded(env, n=6, n_envs=3, n_steps=80, **options):
    space = gym.make(env).action_space
    space.seed(0)

    def random(shown):
        rows = nested.stack([space.sample() for _ in range(shown.stepno.numel())])
        return nested.map(lambda x: torch.from_numpy(x)[None], rows)

    stepper = EnvStepper(env, Acts(random), n_envs, terminal_obs=True, **options)
    return list(islice(Lanes(FragmentCollector(stepper, n_steps), 2, seed=3), n))


@pytest.mark.slow_but_one
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Taxi-v4"])
def test_a_recorded_stream_has_its_steps_in_the_file(env, tmp_path):
    fragments = recorded(env)
    path = to_minari(fragments, "some/recorded-v0", env, folder=tmp_path)
    found = read(path)
    about = json.loads((path / "data" / "metadata.json").read_text())
    assert about["total_steps"] == 6 * 3 * 80 == sum(len(e["rewards"]) for e in found) and about[
        "total_episodes"
    ] == len(found)
    rows = Counter(
        (x["actions"][t].tobytes(), float(x["rewards"][t]), x["observations"][t].tobytes())
        for x in found
        for t in range(len(x["rewards"]))
    )
    wanted = Counter(
        (
            f.state.act[t + 1, b].numpy().tobytes(),
            float(f.state.rew[t + 1, b]),
            f.state.obs[t, b].numpy().tobytes(),
        )
        for f in fragments
        for b in range(3)
        for t in range(80)
    )
    assert rows == wanted
    ends = Counter((bool(x["terminations"][-1]), x["observations"][-1].tobytes()) for x in found)
    lasts = Counter(
        (bool(f.term[t + 1, b]), obs.numpy().tobytes())
        for f in fragments
        for t, b, obs in zip(*map(list, f.final[:3]))
    )
    unfinished = Counter(
        (False, f.state.obs[-1, b].numpy().tobytes())
        for f in fragments[-2:]
        for b in range(3)
        if not f.state.fin[-1, b]
    )
    assert ends == lasts + unfinished
    for x in found:
        assert (
            not (x["terminations"] | x["truncations"])[:-1].any()
            and x["terminations"][-1] != x["truncations"][-1]
        )
    left = read(to_minari(fragments, "some/left-v0", env, folder=tmp_path, unfinished=False))
    assert len(left) == len(found) - sum(unfinished.values())


def test_joined_fragments_whole_episodes_and_padded_ones_give_the_same_set(tmp_path):
    made = lambda: EnvStepper("CartPole-v1", BALANCE, 3, terminal_obs=True, seed=1)
    plain = list(islice(FragmentCollector(made(), 20), 8))

    def write_it(name, items):
        return read(
            to_minari(items, f"some/{name}-v0", "CartPole-v1", folder=tmp_path, unfinished=False)
        )

    xs = write_it("plain", plain)
    n = len(xs)
    assert_same_episodes(
        write_it("stacked", islice(FragmentStacker(FragmentCollector(made(), 20), 4), 2)), xs
    )
    assert_same_episodes(write_it("episodes", islice(EpisodeCollector(made(), 1), n)), xs)
    assert_same_episodes(write_it("padded", islice(EpisodeCollector(made(), n, pad=True), 1)), xs)


BALANCE = Acts(lambda shown: (shown.obs[..., 2] > 0).long())  # to where the pole falls


def test_rewards_are_those_of_the_environment(tmp_path):
    scaled = RewardScaler(
        Lanes(
            FragmentCollector(
                EnvStepper(
                    "Pendulum-v1", Acts(np.zeros(1, np.float32), uses_past=False), 2, seed=0
                ),
                50,
            )
        ),
        gamma=0.9,
    )
    fragments = list(islice(scaled, 3))
    assert not torch.equal(fragments[-1].state.rew[1:], fragments[-1].env["rollpipe.reward"])
    e = read(to_minari(fragments, "some/scaled-v0", "Pendulum-v1", folder=tmp_path))[0]
    np.testing.assert_array_equal(
        e["rewards"], torch.cat([f.env["rollpipe.reward"][:, 0] for f in fragments])
    )
    assert not any("reward" in name for name in e if name != "rewards")


def test_infos_that_appear_later_are_marked_as_missing(tmp_path):
    stats = lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
    pipe = FragmentCollector(EnvStepper(stats, BALANCE, 2, terminal_obs=True, seed=0), 7)
    path = to_minari(islice(pipe, 40), "some/stats-v0", "CartPole-v1", folder=tmp_path)
    found = read(path)
    assert any("infos/episode/r" in e for e in found)
    for e in found:
        if "infos/episode/r" not in e or not e["infos/_episode"].any():
            continue
        assert e["infos/_episode"][:-1].sum() == 0 and e["infos/_episode"][-1]
        assert e["infos/episode/r"][-1] == e["rewards"].sum() and e["infos/episode/l"][-1] == len(
            e["rewards"]
        )
    total = 0
    for f in CheckInvariants(from_minari("some/stats-v0", 16, 2, folder=tmp_path)):
        total += int((f.env["episode"]["l"] * f.env["_episode"]).sum())
        assert not (f.env["_episode"] & ~f.state.fin[1:]).any()
    assert total == sum(
        len(e["rewards"]) for e in found if e.get("infos/_episode", np.zeros(1))[-1]
    )
    few = next(iter(from_minari("some/stats-v0", 16, folder=tmp_path, info_keys=[])))
    assert few.env == {}
    with pytest.raises(DataError, match="no such info. Expected _episode, episode, got speed"):
        next(iter(from_minari("some/stats-v0", 16, folder=tmp_path, info_keys=["speed"])))


def steps(n, obs=2, act=None, **more):
    "A fragment of `n` steps of one environment."
    act = torch.zeros(n, 1, dtype=torch.int64) if act is None else act
    return Fragment.from_steps(torch.zeros(n + 1, 1, obs), act, torch.ones(n, 1), **more)


SPACES = dict(observation_space=spaces.Box(-1, 1, (2,)), action_space=spaces.Discrete(2))


@pytest.mark.parametrize(
    "fragments, options, words",
    [
        ([steps(3, obs=4)], {}, "leaf observations: wrong shape. Expected float32"),
        ([steps(3, act=torch.zeros(3, 1))], {}, "leaf actions: wrong dtype. Expected int64"),
        (
            [
                steps(3, env=dict(x=torch.zeros(3, 1, 2))),
                steps(3, env=dict(x=torch.zeros(3, 1, 4)), stepno=3),
            ],
            {},
            r"leaf \['x'\]",
        ),
        (
            [
                steps(
                    3,
                    env=dict(x=torch.zeros(3, 1, 2)),
                    terminated=torch.tensor([[0], [0], [1]]).bool(),
                    last_obs=None,
                )
            ],
            {},
            "terminal_obs=True",
        ),
        ([steps(3), steps(3, stepno=4)], {}, "a fragment does not continue"),
        ([], {}, "no episode to write"),
        ([steps(3)], dict(unfinished=False), "no episode to write"),
        ([3], {}, "Fragments are wanted here"),
        ([steps(3)], dict(observation_space=None), "the spaces of a data set are not known"),
        (
            [steps(3)],
            dict(metadata=dict(total_steps=3)),
            "leaf metadata: these facts are written anyway",
        ),
        ([steps(3)], dict(env="Pendulm-v1"), "Pendulum-v1"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name_and_leaves_nothing(
    fragments, options, words, tmp_path
):
    with pytest.raises(Exception, match=words):
        to_minari(fragments, "some/bad-v0", folder=tmp_path, **{**SPACES, **options})
    assert not [*tmp_path.rglob("*v0*")] and not [*tmp_path.rglob(".*")]


def test_infos_of_another_shape_in_another_episode_are_refused(tmp_path):
    end = dict(truncated=torch.tensor([[0], [0], [1]]).bool(), last_obs=torch.zeros(1, 2))
    fragments = [steps(3, env=dict(x=torch.zeros(3, 1, n)), **end) for n in (2, 4)]
    with pytest.raises(DataError, match=r"leaf infos\['x'\]: an info has several shapes"):
        to_minari(fragments, "some/bad-v0", folder=tmp_path, **SPACES)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_unsigned_integers_have_the_dtype_of_their_space(dtype, tmp_path):
    "torch has them as int32 and int64."
    space = spaces.Dict(depth=spaces.Box(0, 60_000, (2,), dtype))
    like = torch.int32 if dtype is np.uint16 else torch.int64

    def fragments(x):
        return [
            Fragment.from_steps(
                dict(depth=torch.full((4, 1, 2), x, dtype=like)),
                torch.zeros(3, 1, 1),
                torch.ones(3, 1),
            )
        ]

    about = dict(observation_space=space, action_space=spaces.Box(-1, 1, (1,)), folder=tmp_path)
    path = to_minari(fragments(50_000), "some/depths-v0", **about)
    found = read(path)[0]["observations/depth"]
    assert found.dtype == dtype and (found == 50_000).all()
    (played,) = from_minari("some/depths-v0", 3, folder=tmp_path)
    assert played.state.obs["depth"].dtype == like and (played.state.obs["depth"] == 50_000).all()
    with pytest.raises(
        DataError,
        match=f"leaf observations: a number does not fit the space. Got -1 is no {np.dtype(dtype)}",
    ):
        to_minari(fragments(-1), "some/other-v0", **about)


def test_a_user_without_a_home_names_the_folder(tmp_path, monkeypatch):
    import pwd

    def unknown(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "MINARI_DATASETS_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        DataError,
        match="leaf folder: .*not known. Expected a folder, or MINARI_DATASETS_PATH, got no HOME",
    ):
        from_minari("some/set-v0", 4)


def test_an_unknown_last_observation_may_be_repeated_and_the_file_says_so(tmp_path):
    fragment = steps(3, terminated=torch.tensor([[0], [1], [0]]).bool())
    path = to_minari([fragment], "some/repeated-v0", folder=tmp_path, repeat_last=True, **SPACES)
    with h5py.File(path / "data" / "main_data.hdf5") as file:
        assert [
            bool(file[f"episode_{k}"].attrs.get("repeated_last_observation", False)) for k in (0, 1)
        ] == [True, False]
    (played,) = from_minari("some/repeated-v0", 4, folder=tmp_path)
    assert played.final.t.tolist() == [2]  # the termination has no row, as in the recorded stream
    with pytest.raises(DataError, match="repeat_last=True"):
        to_minari([played], "some/again-v0", folder=tmp_path, **SPACES)


def test_a_lane_that_was_lost_with_its_worker_begins_anew():
    def part(restarts, seq, stepno=0):
        return steps(
            3,
            lane=torch.tensor([0]),
            seq=torch.tensor([seq]),
            restarts=torch.tensor([restarts]),
            stepno=stepno,
        )

    found = list(whole_episodes([part(0, 0), part(0, 1, 3), part(1, 0), part(1, 1, 3)]))
    assert [(len(e.rew), e.term) for e in found] == [(6, False), (6, False)]
    joined = (
        [part(0, 0), join([part(0, 1, 3), part(1, 0)]), part(1, 1, 3)],
        [part(0, 0), part(0, 1, 3), join([part(1, 0), part(1, 1, 3)])],
    )
    for stream in (
        *joined,
        [join([part(0, 0), part(1, 0)])],
    ):  # a batch may have fragments from before and after the loss
        assert [len(e.rew) for e in whole_episodes(stream)] == (
            [6, 6] if len(stream) > 1 else [3, 3]
        )
    assert (
        list(whole_episodes([part(0, 0), part(0, 1, 3), part(1, 0)], unfinished=False)) == []
    )  # nor the one that was lost
    with pytest.raises(DataError, match="does not continue"):
        list(whole_episodes([part(0, 0), part(0, 0)]))


def test_a_fragment_that_is_missing_between_two_episodes_is_told():
    def part(seq, lane=0, restarts=0):
        end = dict(truncated=torch.tensor([[0], [0], [1]]).bool(), last_obs=torch.zeros(1, 2))
        return steps(
            3,
            lane=torch.tensor([lane]),
            seq=torch.tensor([seq]),
            restarts=torch.tensor([restarts]),
            **end,
        )

    with pytest.raises(
        DataError,
        match="lane 0: a fragment does not continue the one before. Expected seq=2, got seq=3",
    ):
        list(whole_episodes([part(0), part(0, 1), part(1), part(1, 1), part(3)]))
    late = [part(5), part(6)]
    lost = [part(0), part(1), part(0, restarts=1)]
    other = [part(0), part(1), part(0)]
    for stream in (late, lost, other):
        assert len(list(whole_episodes(stream))) == len(stream)


def test_an_info_with_a_slash_is_refused_by_name(tmp_path):
    for env in ({"reward/forward": torch.ones(3, 1)}, {"a": {"b/c": torch.ones(3, 1)}}):
        with pytest.raises(
            DataError, match=r"leaf infos\[.*'\]: .*nested one. Expected a name without /"
        ):
            to_minari([steps(3, env=env)], "some/slash-v0", folder=tmp_path, **SPACES)


def test_an_interrupt_leaves_the_older_set_under_its_name(tmp_path, monkeypatch):
    path = to_minari([steps(3)], "some/set-v0", folder=tmp_path, **SPACES)
    rename = Path.rename
    n = Counter()

    def interrupted(self, to):
        n["renamed"] += 1
        if n["renamed"] == 2:
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        to_minari([steps(4)], "some/set-v0", folder=tmp_path, replace=True, **SPACES)
    assert [len(e["rewards"]) for e in read(path)] == [3] and [*path.parent.iterdir()] == [path]
    to_minari([steps(4)], "some/set-v0", folder=tmp_path, replace=True, **SPACES)
    assert [len(e["rewards"]) for e in read(path)] == [4] and [*path.parent.iterdir()] == [path]


# -- damage, kills, full disks --------------------------------------------------------------------------------------------


def damaged(change, folder, **more):
    data = write(
        folder,
        "some/set-v0",
        list(random_episodes(LENGTHS, *KINDS["dict"])),
        *KINDS["dict"],
        **more,
    )
    change(data)
    return data


def edit(change):
    def changed(data):
        with h5py.File(data / "main_data.hdf5", "a") as file:
            change(file)

    return changed


def replaced(name, value):
    def change(file):
        del file[name]
        if value is not None:
            file[name] = value

    return edit(change)


def cut(data):
    (data / "main_data.hdf5").write_bytes((data / "main_data.hdf5").read_bytes()[:5000])


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "change, more, words",
    [
        (cut, {}, "the data set is damaged"),
        (lambda data: (data / "main_data.hdf5").write_bytes(b"no"), {}, "the data set is damaged"),
        (lambda data: (data / "main_data.hdf5").unlink(), {}, "the data set is damaged"),
        (lambda data: (data / "metadata.json").write_text("{"), {}, "the data set is damaged"),
        (lambda data: (data / "metadata.json").write_text("[]"), {}, "the data set is damaged"),
        (lambda data: (data / "metadata.json").unlink(), {}, "the data set is damaged"),
        (lambda data: None, dict(observation_space=None), "KeyError: 'observation_space'"),
        (lambda data: None, dict(data_format="arrow"), "another format"),
        (lambda data: None, dict(total_episodes=10**12), "episodes are missing, or too many"),
        (replaced("episode_3", None), {}, "episodes are missing, or too many"),
        (
            replaced("episode_2/observations/place", np.zeros((10, 3))),
            {},
            r"leaf episode_2/observations\['place'\]: an array does not fit. Expected float64 \[10, 2\]",
        ),
        (
            replaced("episode_2/observations/place", np.zeros((9, 2))),
            {},
            r"leaf episode_2/observations\['place'\]",
        ),
        (
            replaced("episode_2/observations/more/_index_0", np.zeros(10)),
            {},
            r"leaf episode_2/observations\['more'\]\[0\]",
        ),
        (replaced("episode_2/observations/more", None), {}, "the data set is damaged.*more"),
        (
            replaced("episode_2/actions/_index_0", np.zeros((3, 2), int)),
            {},
            r"leaf episode_2/actions\[0\]",
        ),
        (replaced("episode_2/terminations", np.zeros(3, bool)), {}, "leaf episode_2/terminations"),
        (
            replaced("episode_2/truncations", np.arange(9) == 4),
            {},
            "an episode goes on after its end",
        ),
        (replaced("episode_2/rewards", np.zeros(0)), {}, "steps of episode_2"),
        (replaced("episode_2/rewards", 3.0), {}, "the data set is damaged"),
        (
            replaced("episode_2/infos/speed", np.zeros((9, 2))),
            {},
            r"leaf episode_2/infos/speed: an array does not fit",
        ),
        (
            replaced("episode_2/infos/speed", np.zeros((10, 3))),
            {},
            r"leaf episode_2/infos\['speed'\]: an info has no fixed numeric form",
        ),
        (
            replaced("episode_2/infos/speed", ["a"] * 10),
            {},
            r"leaf episode_2/infos\['speed'\]: an info has no fixed numeric form.*info_keys",
        ),
        (replaced("episode_2/infos/deep", np.zeros(10)), {}, "damaged"),
    ],
)
def test_a_damaged_set_is_named(change, more, words, tmp_path):
    data = damaged(change, tmp_path, **more)
    with pytest.raises(DataError, match=words) as e:
        list(from_minari("some/set-v0", 4, 2, folder=tmp_path))
    assert str(data) in str(e.value)


def test_each_block_that_we_write_has_a_checksum(tmp_path):
    path = (
        to_minari(recorded("Pendulum-v1"), "some/set-v0", "Pendulum-v1", folder=tmp_path)
        / "data"
        / "main_data.hdf5"
    )
    with h5py.File(path) as file:
        at = file["episode_1/observations"].id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[at + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="the data set is damaged.*OSError") as e:
        list(from_minari("some/set-v0", 16, 2, folder=tmp_path))
    assert "episode_1" in str(e.value)


def test_sizes_that_a_file_claims_are_not_allocated(tmp_path):
    "An array of a petabyte that was never written takes no room in a file."
    data = write(
        tmp_path,
        "some/set-v0",
        [dict(rewards=np.zeros(1))],
        spaces.Box(-1, 1, (100,)),
        spaces.Discrete(2),
    )
    n = 10**12
    with h5py.File(data / "main_data.hdf5", "a") as file:
        del file["episode_0/rewards"]
        for key, shape, dtype in (
            ("observations", (n + 1, 100), "f4"),
            ("actions", (n,), "i8"),
            ("rewards", (n,), "f8"),
            ("terminations", (n,), "?"),
            ("truncations", (n,), "?"),
        ):
            file["episode_0"].create_dataset(key, shape, dtype, chunks=(1000, *shape[1:]))
    fragments = list(islice(from_minari("some/set-v0", 10, folder=tmp_path), 3))
    assert fragments[-1].state.stepno[-1] == 30
    with pytest.raises(DataError, match="not enough memory"):
        next(iter(from_minari("some/set-v0", 10**11, folder=tmp_path)))
    with pytest.raises(DataError, match="n_envs <= 1"):
        next(iter(from_minari("some/set-v0", 10, 2, folder=tmp_path)))


def test_nothing_that_a_set_names_is_imported(tmp_path):
    spec = dict(id="Bad-v0", entry_point="antigravity:fly", kwargs={}, additional_wrappers=[])
    write(
        tmp_path,
        "some/set-v0",
        list(random_episodes([3], *KINDS["box"])),
        *KINDS["box"],
        env_spec=json.dumps(spec),
    )
    assert (
        len(list(from_minari("some/set-v0", 4, folder=tmp_path))) == 1
        and "antigravity" not in sys.modules
    )


WRITER = """
import resource, sys
from itertools import count
import torch
from gymnasium import spaces
from rollpipe.pipes import Fragment
from rollpipe.pipes.recording.minari_files import to_minari
end = dict(truncated=torch.arange(100)[:, None] == 99, last_obs=torch.zeros(1, 50))
def fragments():
    for k in count():
        if k == 3: print("writes", flush=True)
        yield Fragment.from_steps(torch.randn(101, 1, 50), torch.zeros(100, 1, dtype=torch.int64), torch.ones(100, 1), **end)
if len(sys.argv) > 2: resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try: to_minari(fragments(), "some/set-v0", observation_space=spaces.Box(-9, 9, (50,)), action_space=spaces.Discrete(2), folder=sys.argv[1])
except OSError as e: print("refused", e)
"""


@pytest.mark.parametrize("wait", [0, 0.1])
def test_a_killed_writer_leaves_no_set(wait, tmp_path):
    with Forked(["-c", WRITER, tmp_path]) as process:
        assert process.stdout.readline() == "writes\n"
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
    assert [p.name for p in (tmp_path / "some").iterdir() if not p.name.startswith(".")] == []
    path = to_minari([steps(3)], "some/set-v0", folder=tmp_path, **SPACES)
    assert len(read(path)) == 1


@pytest.mark.slow_but_one
@pytest.mark.parametrize("limit", [2**20, 2**25 + 77])
def test_a_full_disk_is_an_error_and_leaves_nothing(limit, tmp_path):
    res = run_forked(["-c", WRITER, tmp_path, limit])
    assert (
        (res.returncode, res.stderr) == (0, "")
        and "refused [Errno 27] File too large" in res.stdout
        and "main_data.hdf5" in res.stdout
    )
    assert [*(tmp_path / "some").iterdir()] == []


# -- with Minari ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def minari(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return pytest.importorskip("minari")


QUIET = pytest.mark.filterwarnings("ignore:`:UserWarning", "ignore:env_spec is None:UserWarning")


@QUIET
@pytest.mark.parametrize("kind", ["dict", "number", "box"])
def test_our_idea_of_the_layout_is_that_of_minari(kind, minari, tmp_path):
    from minari.data_collector import EpisodeBuffer

    obs_space, act_space = KINDS[kind]
    episodes = list(random_episodes(LENGTHS, obs_space, act_space))
    minari.create_dataset_from_buffers(
        "some/theirs-v0",
        [EpisodeBuffer(**e) for e in episodes],
        observation_space=obs_space,
        action_space=act_space,
    )
    write(tmp_path, "some/set-v0", episodes, obs_space, act_space)
    for x, y in zip(read(tmp_path / "some/theirs-v0"), read(tmp_path / "some/set-v0"), strict=True):
        assert x.keys() == y.keys()
        for key in x:
            np.testing.assert_array_equal(x[key], y[key])
    theirs, mine = (
        json.loads((tmp_path / f"some/{name}-v0/data/metadata.json").read_text())
        for name in ("theirs", "set")
    )
    assert all(
        theirs[key] == mine[key] for key in mine if key not in ("dataset_id", "minari_version")
    )
    again = to_minari(
        from_minari("some/theirs-v0", 4),
        "some/again-v0",
        observation_space=obs_space,
        action_space=act_space,
    )
    assert_same_episodes(read(again), read(tmp_path / "some/theirs-v0"))
    about = json.loads((again / "data" / "metadata.json").read_text())
    assert all(
        about[key] == theirs[key]
        for key in theirs
        if key not in ("dataset_id", "minari_version", "dataset_size", "jpeg_encoding")
    )


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Taxi-v4"])
def test_minari_reads_what_we_have_recorded(env, minari):
    fragments = recorded(env)
    to_minari(
        fragments,
        "some/recorded-v0",
        env,
        metadata=dict(author=["somebody"], algorithm_name="random"),
    )
    dataset = minari.load_dataset("some/recorded-v0")
    episodes = list(whole_episodes(fragments))
    assert len(dataset) == len(episodes) and dataset.total_steps == 1440
    for x, y in zip(dataset, episodes):
        np.testing.assert_array_equal(x.observations, y.obs)
        np.testing.assert_array_equal(x.actions, y.act)
        np.testing.assert_array_equal(x.rewards, y.rew)
        assert (x.terminations[-1], x.truncations[-1]) == (y.term, not y.term)
    made = dataset.recover_environment()
    assert (made.spec.id, made.observation_space, made.action_space) == (
        env,
        dataset.observation_space,
        dataset.action_space,
    )
    assert [*minari.list_local_datasets()] == ["some/recorded-v0"] and dataset.sample_episodes(2)


def test_minari_reads_nested_spaces_images_and_infos(minari, tmp_path):
    obs_space = spaces.Dict(image=KINDS["image"][0], rest=DICT)
    episodes = list(random_episodes(LENGTHS, obs_space, ACT))
    write(tmp_path, "some/set-v0", episodes, obs_space, ACT)
    to_minari(
        from_minari("some/set-v0", 4),
        "some/again-v0",
        observation_space=obs_space,
        action_space=ACT,
    )
    dataset = minari.load_dataset("some/again-v0")
    assert (dataset.observation_space, dataset.action_space, dataset.env_spec) == (
        obs_space,
        ACT,
        None,
    )
    for x, y in zip(dataset, episodes, strict=True):
        for a, b in zip(
            nested.leaves((x.observations, x.actions)),
            nested.leaves((y["observations"], y["actions"])),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(x.infos["deep"]["count"][1:], y["infos"]["deep"]["count"][1:])


@QUIET
def test_images_that_minari_has_compressed_are_read_as_minari_reads_them(minari):
    from minari.data_collector import EpisodeBuffer

    obs_space = spaces.Dict(
        big=KINDS["image"][0],
        grey=spaces.Box(0, 255, (40, 40), np.uint8),
        small=spaces.Box(0, 255, (4, 4), np.uint8),
    )
    episodes = list(random_episodes(LENGTHS, obs_space, spaces.Discrete(2), infos=False))
    minari.create_dataset_from_buffers(
        "some/jpeg-v0",
        [EpisodeBuffer(**e) for e in episodes],
        observation_space=obs_space,
        action_space=spaces.Discrete(2),
    )
    for f, e in zip(
        whole_episodes(from_minari("some/jpeg-v0", 4)),
        minari.load_dataset("some/jpeg-v0"),
        strict=True,
    ):
        for key in obs_space:
            np.testing.assert_array_equal(f.obs[key], e.observations[key])


class Maze(Scripted):
    "Observations of all kinds, and infos."

    observation_space = DICT
    action_space = spaces.Discrete(3)

    def __init__(self):
        super().__init__(
            see=sampled,
            pay=lambda env: env.count / 3,
            ends=lambda env: (env.count == 5 and env.action == 1, env.count == 7),
            tell=lambda env: {"speed": np.ones(2) * env.count, "deep": {"count": env.count}},
            tell_first={"speed": np.zeros(2), "deep": {"count": 0}},
        )


@QUIET
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Taxi-v4", Maze])
def test_a_set_of_minaris_collector_is_the_same_after_it_was_played_and_written(
    env, minari, tmp_path
):
    pytest.importorskip("jax")
    made = Maze() if env is Maze else gym.make(env)
    collector = minari.DataCollector(made, record_infos=True)
    for episode in range(6):
        collector.reset(seed=episode)
        collector.action_space.seed(episode)
        for _ in range(200):
            *_, terminated, truncated, _ = collector.step(collector.action_space.sample())
            if terminated or truncated:
                break
    collector.create_dataset("some/theirs-v0", algorithm_name="random")
    collector.close()
    del collector
    gc.collect()  # its temporary folders complain now, and not in another test
    again = to_minari(
        from_minari("some/theirs-v0", 16), "some/again-v0", Maze() if env is Maze else env
    )
    xs = read(again)
    ys = read(tmp_path / "some/theirs-v0")
    if ys[0]["rewards"].dtype.kind == "i":
        ys = [{**y, "rewards": y["rewards"].astype(float)} for y in ys]
    assert len(ys) == 6
    assert_same_episodes(xs, ys)
    for x, y in zip(
        minari.load_dataset("some/again-v0"), minari.load_dataset("some/theirs-v0"), strict=True
    ):
        for a, b in zip(
            nested.leaves((x.observations, x.actions)),
            nested.leaves((y.observations, y.actions)),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)


def test_a_space_and_a_fact_that_a_set_cannot_have_are_named(tmp_path):
    space = gym.spaces.Dict(mission=gym.spaces.Text(4))
    facts = dict(type="Dict", subspaces=dict(mission=dict(type="Text", max_length=4)))
    folder = tmp_path / "texts-v0" / "data"
    folder.mkdir(parents=True)
    about = dict(observation_space=json.dumps(facts), action_space='{"type": "Discrete", "n": 2}')
    (folder / "metadata.json").write_text(json.dumps(about))
    told = r"leaf observation_space\['mission'\].*FilterObs.*got Text"
    with pytest.raises(SpaceError, match=told) as e:
        from_minari("texts-v0", 4, folder=tmp_path)
    assert str(folder) in str(e.value)
    with pytest.raises(SpaceError, match=r"leaf observation_space\['mission'\]"):
        to_minari([], "more-v0", observation_space=space, action_space=space, folder=tmp_path)
    with pytest.raises(DataError, match=r"leaf metadata\['by'\]\[1\]: JSON cannot.*got \{2\}"):
        to_minari([], "more-v0", "CartPole-v1", metadata=dict(by=["me", {2}]), folder=tmp_path)
    assert not (tmp_path / "more-v0").exists()
