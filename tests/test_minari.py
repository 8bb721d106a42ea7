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
from reference import apply, assert_same
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
from rollpipe.pipes.data.errors import CheckpointError, DataError, EnvError, SpaceError
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


# -- a writer that knows nothing of ours, checked against Minari's below


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
    bounds = dict(low=space.low.tolist(), high=space.high.tolist())
    return dict(type=kind, dtype=str(space.dtype), shape=list(space.shape), **bounds)


def write(folder, name, episodes, obs_space, act_space, **more):
    "A set with these episodes, dicts of the arrays by Minari's names. Returns its folder."
    path = folder / name
    (path / "data").mkdir(parents=True)
    with h5py.File(arrays_of(path), "w", track_order=True) as file:
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
    facts = {key: x for key, x in (facts | more).items() if x is not None}
    facts_of(path).write_text(json.dumps(facts))
    return path


def arrays_of(path):
    "The file with the episodes of a set."
    return path / "data" / "main_data.hdf5"


def facts_of(path):
    "The file with the facts of a set."
    return path / "data" / "metadata.json"


def random_episodes(lengths, obs_space, act_space, seed=0, reward=np.float64, infos=True):
    rng = np.random.default_rng(seed)
    for space in (obs_space, act_space):
        space.seed(seed)

    def rows(space, n):
        return nested.stack([nested.map(np.asarray, space.sample()) for _ in range(n)])

    for n in lengths:
        end = np.arange(n) == n - 1
        term = bool(rng.integers(2))
        more = {}
        if infos:
            more["speed"] = rng.normal(size=(n + 1, 2))
            more["deep"] = dict(count=rng.integers(9, size=n + 1))
        yield dict(
            observations=rows(obs_space, n + 1),
            actions=rows(act_space, n),
            rewards=rng.normal(size=n).astype(reward),
            terminations=end & term,
            truncations=end & (not term),
            infos=more,
        )


def read(path):
    "Of each episode of a set, the arrays by their paths in the file."
    episodes = []
    with h5py.File(arrays_of(path)) as file:
        for k in range(len(file)):
            arrays = {}
            file[f"episode_{k}"].visititems(partial(read_array, arrays))
            episodes.append(arrays)
    return episodes


def read_array(arrays, name, x):
    if hasattr(x, "dtype"):
        arrays[name] = x[()]


def assert_same_episodes(xs, ys, infos=True):
    for x, y in zip(xs, ys, strict=True):
        if infos:
            assert {k for k in x if "/_" not in k or "_index" in k} == y.keys()
        for key in y:
            first = 1 if key.startswith("infos") else 0  # that of the reset is not in a fragment
            assert x[key].dtype == y[key].dtype and x[key].shape == y[key].shape, key
            np.testing.assert_array_equal(x[key][first:], y[key][first:], err_msg=key)


def with_float_rewards(episodes):
    "As we write them, whatever the whole numbers were."
    return [
        {**e, "rewards": e["rewards"].astype(float)} if e["rewards"].dtype.kind == "i" else e
        for e in episodes
    ]


KINDS = {
    "dict": (DICT, ACT),
    "number": (spaces.Discrete(16), spaces.Discrete(4)),
    "box": (spaces.Box(-1, 1, (3,)), spaces.Box(-2, 2, (1,))),
    "image": (spaces.Box(0, 255, (33, 34, 3), np.uint8), spaces.MultiBinary(2)),
}
LENGTHS = [5, 1, 9, 3, 3, 12, 2]
ENVS = ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Taxi-v4"]


# -- playing


class Player(Scripted):
    "Plays the episodes of one column, each from its first observation, and refuses another action."

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

    # Rows after the last step of a column say nothing.
    n_left = torch.tensor([sum(len(e["rewards"]) for e in column) for column in columns])
    assert len(fragments) == -(-int(n_left.max()) // n_steps)
    row = torch.arange(n_steps + 1)[:, None].expand(-1, n_envs)

    def known(f):
        state = apply(lambda x: x[row <= n_left], (f.state._replace(obs=()), f.term))
        return state, f.state.obs[row < n_left], f.final[:3], (f.lane, f.seq, f.version)

    for ours, theirs in zip(fragments, played):
        assert torch.equal(ours.valid, row[:-1] < n_left)
        assert_same(known(ours), known(theirs))
        assert (ours.actor, ours.hx, ours.final.actor) == ({}, (), {})
        n_left = n_left - n_steps


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
        assert_same(rest, whole[n:])
    for other in (dict(n_steps=4), dict(seed=6), dict(n_envs=1)):
        with pytest.raises(CheckpointError, match="another stream"):
            next(iter(restore_stream(told_set(tmp_path, **known | other), state)))


# -- round trips


@pytest.mark.slow_but_one
@pytest.mark.parametrize("reward", [np.float64, np.float32, np.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_set_that_is_played_and_written_is_the_same(kind, reward, tmp_path):
    obs_space, act_space = KINDS[kind]
    episodes = list(random_episodes(LENGTHS, obs_space, act_space, reward=reward))
    path = write(tmp_path, "some/set-v0", episodes, obs_space, act_space)

    def written(name, *args, of="set", **options):
        played = from_minari(f"some/{of}-v0", *args, folder=tmp_path, **options)
        about = dict(observation_space=obs_space, action_space=act_space, folder=tmp_path)
        return read(to_minari(played, f"some/{name}-v0", **about))

    xs = written("again", 4)
    assert_same_episodes(xs, with_float_rewards(read(path)))
    for x in xs:
        assert not x["infos/_speed"][0] and x["infos/_speed"][1:].all()
        assert np.isnan(x["infos/speed"][0]).all()

    # With several columns the episodes come in the order in which they end.
    def key(episode):
        return episode["rewards"].tobytes()

    several = sorted(written("several", 4, 3, seed=1), key=key)
    assert_same_episodes(several, sorted(xs, key=key), infos=False)

    # Played again, the set stays as it is.
    for x, y in zip(written("third", 64, of="again"), xs):
        np.testing.assert_equal(x, y)


def recorded(env, n=6, n_envs=3, n_steps=80, **options):
    space = gym.make(env).action_space
    space.seed(0)

    def random(shown):
        rows = nested.stack([space.sample() for _ in range(shown.stepno.numel())])
        return nested.map(lambda x: torch.from_numpy(x)[None], rows)

    stepper = EnvStepper(env, Acts(random), n_envs, terminal_obs=True, **options)
    return list(islice(Lanes(FragmentCollector(stepper, n_steps), 2, seed=3), n))


@pytest.mark.slow_but_one
@pytest.mark.parametrize("env", ENVS)
def test_a_recorded_stream_has_its_steps_in_the_file(env, tmp_path):
    fragments = recorded(env)
    path = to_minari(fragments, "some/recorded-v0", env, folder=tmp_path)
    episodes = read(path)
    facts = json.loads(facts_of(path).read_text())
    n_steps = sum(len(e["rewards"]) for e in episodes)
    assert facts["total_steps"] == 6 * 3 * 80 == n_steps
    assert facts["total_episodes"] == len(episodes)

    def joined(name, rows=slice(None)):
        return np.concatenate([e[name][rows] for e in episodes])

    # Each step is there once.
    whole = join(fragments)
    state = whole.state
    in_file = counted(joined("actions"), joined("rewards"), joined("observations", slice(-1)))
    assert in_file == counted(
        state.act[1:].flatten(0, 1),
        state.rew[1:].flatten(),
        state.obs[:-1].flatten(0, 1),
    )

    # So is each last observation, and whether it was an end. The last fragments have episodes that go on.
    last = join(fragments[-2:])
    goes_on = ~last.state.fin[-1]
    ended = counted(whole.term[whole.final.t + 1, whole.final.b], whole.final.obs)
    unfinished = counted(last.state.fin[-1, goes_on], last.state.obs[-1, goes_on])
    end = slice(-1, None)
    assert counted(joined("terminations", end), joined("observations", end)) == ended + unfinished
    assert not (joined("terminations", slice(-1)) | joined("truncations", slice(-1))).any()
    assert (joined("terminations", end) != joined("truncations", end)).all()

    finished = read(to_minari(fragments, "some/left-v0", env, folder=tmp_path, unfinished=False))
    assert len(finished) == len(episodes) - sum(unfinished.values())


def counted(*columns):
    "How often each row occurs."
    rows = zip(*columns, strict=True)
    return Counter(tuple(np.asarray(x).tobytes() for x in row) for row in rows)


def test_joined_fragments_whole_episodes_and_padded_ones_give_the_same_set(tmp_path):
    def ticks():
        return EnvStepper("CartPole-v1", BALANCE, 3, terminal_obs=True, seed=1)

    def written(name, items):
        options = dict(folder=tmp_path, unfinished=False)
        return read(to_minari(items, f"some/{name}-v0", "CartPole-v1", **options))

    xs = written("plain", islice(FragmentCollector(ticks(), 20), 8))
    n = len(xs)
    for name, pipe, n_items in (
        ("stacked", FragmentStacker(FragmentCollector(ticks(), 20), 4), 2),
        ("episodes", EpisodeCollector(ticks(), 1), n),
        ("padded", EpisodeCollector(ticks(), n, pad=True), 1),
    ):
        assert_same_episodes(written(name, islice(pipe, n_items)), xs)


BALANCE = Acts(lambda shown: (shown.obs[..., 2] > 0).long())  # to where the pole falls


def test_rewards_are_those_of_the_environment(tmp_path):
    still = Acts(np.zeros(1, np.float32), uses_past=False)
    ticks = EnvStepper("Pendulum-v1", still, 2, seed=0)
    fragments = list(islice(RewardScaler(Lanes(FragmentCollector(ticks, 50)), gamma=0.9), 3))
    assert not torch.equal(fragments[-1].state.rew[1:], fragments[-1].env["rollpipe.reward"])
    episode = read(to_minari(fragments, "some/scaled-v0", "Pendulum-v1", folder=tmp_path))[0]
    rewards = torch.cat([f.env["rollpipe.reward"][:, 0] for f in fragments])
    np.testing.assert_array_equal(episode["rewards"], rewards)
    assert [name for name in episode if "reward" in name] == ["rewards"]


def test_infos_that_appear_later_are_marked_as_missing(tmp_path):
    stats = lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
    pipe = FragmentCollector(EnvStepper(stats, BALANCE, 2, terminal_obs=True, seed=0), 7)
    episodes = read(to_minari(islice(pipe, 40), "some/stats-v0", "CartPole-v1", folder=tmp_path))

    # Statistics come with the last step of an episode.
    n_steps = 0
    assert any("infos/episode/r" in e for e in episodes)
    for e in episodes:
        if "infos/episode/r" not in e or not e["infos/_episode"].any():
            continue
        n = len(e["rewards"])
        n_steps += n
        assert e["infos/_episode"][:-1].sum() == 0 and e["infos/_episode"][-1]
        assert (e["infos/episode/r"][-1], e["infos/episode/l"][-1]) == (e["rewards"].sum(), n)

    play = partial(from_minari, "some/stats-v0", 16, folder=tmp_path)
    total = 0
    for f in CheckInvariants(play(n_envs=2)):
        total += int((f.env["episode"]["l"] * f.env["_episode"]).sum())
        assert not (f.env["_episode"] & ~f.state.fin[1:]).any()
    assert total == n_steps
    assert next(iter(play(info_keys=[]))).env == {}
    with pytest.raises(DataError, match="no such info. Expected _episode, episode, got speed"):
        next(iter(play(info_keys=["speed"])))


def steps(n, obs=2, act=None, **more):
    "A fragment of `n` steps of one environment."
    act = torch.zeros(n, 1, dtype=torch.int64) if act is None else act
    return Fragment.from_steps(torch.zeros(n + 1, 1, obs), act, torch.ones(n, 1), **more)


def part(seq, lane=0, restarts=0, **more):
    "A fragment of three steps of a lane."
    numbers = dict(lane=lane, seq=seq, restarts=restarts)
    return steps(3, **{name: torch.tensor([x]) for name, x in numbers.items()}, **more)


LAST = torch.tensor([[False], [False], [True]])
ENDED = dict(truncated=LAST, last_obs=torch.zeros(1, 2))
SPACES = dict(observation_space=spaces.Box(-1, 1, (2,)), action_space=spaces.Discrete(2))


def telling(width, **more):
    "Three steps with an info of this width."
    return steps(3, env=dict(x=torch.zeros(3, 1, width)), **more)


ONES = torch.ones(3, 1)
SEVERAL_SHAPES = r"leaf infos\['x'\]: an info has several shapes"
NO_SLASH = r"leaf infos\[.*'\]: .*nested one. Expected a name without /"


@pytest.mark.parametrize(
    "fragments, options, words",
    [
        ([steps(3, obs=4)], {}, "leaf observations: wrong shape. Expected float32"),
        ([steps(3, act=torch.zeros(3, 1))], {}, "leaf actions: wrong dtype. Expected int64"),
        ([telling(2), telling(4, stepno=3)], {}, r"leaf \['x'\]"),
        ([telling(2, **ENDED), telling(4, **ENDED)], {}, SEVERAL_SHAPES),
        ([telling(2, terminated=LAST, last_obs=None)], {}, "terminal_obs=True"),
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
        ([steps(3, env={"reward/forward": ONES})], {}, NO_SLASH),
        ([steps(3, env=dict(a={"b/c": ONES}))], {}, NO_SLASH),
    ],
)
def test_what_cannot_be_written_is_refused_by_name_and_leaves_nothing(
    fragments, options, words, tmp_path
):
    with pytest.raises(EnvError if "env" in options else DataError, match=words):
        to_minari(fragments, "some/bad-v0", folder=tmp_path, **SPACES | options)
    assert not [*tmp_path.rglob("*v0*")] and not [*tmp_path.rglob(".*")]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_unsigned_integers_have_the_dtype_of_their_space(dtype, tmp_path):
    "torch has them as int32 and int64."
    like = torch.int32 if dtype is np.uint16 else torch.int64

    def written(x):
        obs = dict(depth=torch.full((4, 1, 2), x, dtype=like))
        fragment = Fragment.from_steps(obs, torch.zeros(3, 1, 1), torch.ones(3, 1))
        about = dict(
            observation_space=spaces.Dict(depth=spaces.Box(0, 60_000, (2,), dtype)),
            action_space=spaces.Box(-1, 1, (1,)),
        )
        return to_minari([fragment], f"some/depth{x}-v0", folder=tmp_path, **about)

    (episode,) = read(written(50_000))
    (played,) = from_minari("some/depth50000-v0", 3, folder=tmp_path)
    for depth, its_dtype in (
        (episode["observations/depth"], dtype),
        (played.state.obs["depth"], like),
    ):
        assert depth.dtype == its_dtype and (depth == 50_000).all()
    text = "leaf observations: a number does not fit the space. Got -1 is no"
    with pytest.raises(DataError, match=f"{text} {np.dtype(dtype)}"):
        written(-1)


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
    with h5py.File(arrays_of(path)) as file:
        facts = [file[f"episode_{k}"].attrs for k in (0, 1)]
        assert [bool(x.get("repeated_last_observation", False)) for x in facts] == [True, False]
    (played,) = from_minari("some/repeated-v0", 4, folder=tmp_path)
    assert played.final.t.tolist() == [2]  # the termination has no row, as in the recorded stream
    with pytest.raises(DataError, match="repeat_last=True"):
        to_minari([played], "some/again-v0", folder=tmp_path, **SPACES)


def test_a_lane_that_was_lost_with_its_worker_begins_anew():
    a, b = part(0), part(1, stepno=3)
    c, d = part(0, restarts=1), part(1, restarts=1, stepno=3)
    assert [(len(e.rew), e.term) for e in whole_episodes([a, b, c, d])] == [(6, False)] * 2

    # A batch may have fragments from before and after the loss.
    for stream, lengths in (
        ([a, join([b, c]), d], [6, 6]),
        ([a, b, join([c, d])], [6, 6]),
        ([join([a, c])], [3, 3]),
    ):
        assert [len(e.rew) for e in whole_episodes(stream)] == lengths

    # The episode that was lost is as unfinished as the last one.
    assert list(whole_episodes([a, b, c], unfinished=False)) == []
    with pytest.raises(DataError, match="does not continue"):
        list(whole_episodes([a, part(0)]))


def test_a_fragment_that_is_missing_between_two_episodes_is_told():
    def ended(seq, lane=0, restarts=0):
        return part(seq, lane, restarts, **ENDED)

    text = "lane 0: a fragment does not continue the one before. Expected seq=2, got seq=3"
    with pytest.raises(DataError, match=text):
        list(whole_episodes([ended(0), ended(0, 1), ended(1), ended(1, 1), ended(3)]))
    late = [ended(5), ended(6)]
    lost = [ended(0), ended(1), ended(0, restarts=1)]
    other = [ended(0), ended(1), ended(0)]
    for stream in (late, lost, other):
        assert len(list(whole_episodes(stream))) == len(stream)


def test_an_interrupt_leaves_the_older_set_under_its_name(tmp_path, monkeypatch):
    def written(n, **options):
        return to_minari([steps(n)], "some/set-v0", folder=tmp_path, **options, **SPACES)

    def check_length(n):
        assert [len(e["rewards"]) for e in read(path)] == [n]
        assert [*path.parent.iterdir()] == [path]

    path = written(3)
    rename = Path.rename
    renamed = []

    def interrupted(self, to):
        renamed.append(to)
        if len(renamed) == 2:
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        written(4, replace=True)
    check_length(3)
    written(4, replace=True)
    check_length(4)


# -- damage, kills, full disks


def replaced(name, value=None):
    "Changes episode 2 of a set: what stands there under this name, if anything, is `value`."

    def change(path):
        with h5py.File(arrays_of(path), "a") as file:
            del file[f"episode_2/{name}"]
            if value is not None:
                file[f"episode_2/{name}"] = value

    return change


def cut(path):
    arrays_of(path).write_bytes(arrays_of(path).read_bytes()[:5000])


DAMAGED = "the data set is damaged"
TOO_FEW = "episodes are missing, or too many"
NO_FORM = r"leaf episode_2/infos\['speed'\]: an info has no fixed numeric form"


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "change, words",  # a function of the folder, or other facts
    [
        (cut, DAMAGED),
        (lambda path: arrays_of(path).write_bytes(b"no"), DAMAGED),
        (lambda path: arrays_of(path).unlink(), DAMAGED),
        (lambda path: facts_of(path).write_text("{"), DAMAGED),
        (lambda path: facts_of(path).write_text("[]"), DAMAGED),
        (lambda path: facts_of(path).unlink(), DAMAGED),
        (dict(observation_space=None), "KeyError: 'observation_space'"),
        (dict(data_format="arrow"), "another format"),
        (dict(total_episodes=10**12), TOO_FEW),
        (replaced(""), TOO_FEW),
        (
            replaced("observations/place", np.zeros((10, 3))),
            r"leaf episode_2/observations\['place'\]: an array does not fit. Expected float64 \[10, 2\]",
        ),
        (
            replaced("observations/place", np.zeros((9, 2))),
            r"leaf episode_2/observations\['place'\]",
        ),
        (
            replaced("observations/more/_index_0", np.zeros(10)),
            r"leaf episode_2/observations\['more'\]\[0\]",
        ),
        (replaced("observations/more"), f"{DAMAGED}.*more"),
        (replaced("actions/_index_0", np.zeros((3, 2), int)), r"leaf episode_2/actions\[0\]"),
        (replaced("terminations", np.zeros(3, bool)), "leaf episode_2/terminations"),
        (replaced("truncations", np.arange(9) == 4), "an episode goes on after its end"),
        (replaced("rewards", np.zeros(0)), "steps of episode_2"),
        (replaced("rewards", 3.0), DAMAGED),
        (
            replaced("infos/speed", np.zeros((9, 2))),
            "leaf episode_2/infos/speed: an array does not fit",
        ),
        (replaced("infos/speed", np.zeros((10, 3))), NO_FORM),
        (replaced("infos/speed", ["a"] * 10), f"{NO_FORM}.*info_keys"),
        (replaced("infos/deep", np.zeros(10)), "damaged"),
    ],
)
def test_a_damaged_set_is_named(change, words, tmp_path):
    facts = change if isinstance(change, dict) else {}
    episodes = list(random_episodes(LENGTHS, *KINDS["dict"]))
    path = write(tmp_path, "some/set-v0", episodes, *KINDS["dict"], **facts)
    if not facts:
        change(path)
    with pytest.raises(DataError, match=words) as e:
        list(from_minari("some/set-v0", 4, 2, folder=tmp_path))
    assert str(path / "data") in str(e.value)


def test_each_block_that_we_write_has_a_checksum(tmp_path):
    options = dict(env="Pendulum-v1", folder=tmp_path)
    path = arrays_of(to_minari(recorded("Pendulum-v1"), "some/set-v0", **options))
    with h5py.File(path) as file:
        at = file["episode_1/observations"].id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[at + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"{DAMAGED}.*OSError") as e:
        list(from_minari("some/set-v0", 16, 2, folder=tmp_path))
    assert "episode_1" in str(e.value)


def test_sizes_that_a_file_claims_are_not_allocated(tmp_path):
    "An array of a petabyte that was never written takes no room in a file."
    numbers = spaces.Box(-1, 1, (100,)), spaces.Discrete(2)
    path = write(tmp_path, "some/set-v0", [dict(rewards=np.zeros(1))], *numbers)
    n = 10**12
    with h5py.File(arrays_of(path), "a") as file:
        del file["episode_0/rewards"]
        for key, dtype, *shape in (
            ("observations", "f4", n + 1, 100),
            ("actions", "i8", n),
            ("rewards", "f8", n),
            ("terminations", "?", n),
            ("truncations", "?", n),
        ):
            file["episode_0"].create_dataset(key, shape, dtype, chunks=(1000, *shape[1:]))

    play = partial(from_minari, "some/set-v0", folder=tmp_path)
    *_, third = islice(play(10), 3)
    assert third.state.stepno[-1] == 30
    for arguments, text in (([10**11], "not enough memory"), ([10, 2], "n_envs <= 1")):
        with pytest.raises(DataError, match=text):
            next(iter(play(*arguments)))


def test_nothing_that_a_set_names_is_imported(tmp_path):
    spec = dict(id="Bad-v0", entry_point="antigravity:fly", kwargs={}, additional_wrappers=[])
    episodes = list(random_episodes([3], *KINDS["box"]))
    write(tmp_path, "some/set-v0", episodes, *KINDS["box"], env_spec=json.dumps(spec))
    assert len(list(from_minari("some/set-v0", 4, folder=tmp_path))) == 1
    assert "antigravity" not in sys.modules


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
        actions = torch.zeros(100, 1, dtype=torch.int64)
        yield Fragment.from_steps(torch.randn(101, 1, 50), actions, torch.ones(100, 1), **end)
if len(sys.argv) > 2: resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
about = dict(observation_space=spaces.Box(-9, 9, (50,)), action_space=spaces.Discrete(2))
try: to_minari(fragments(), "some/set-v0", folder=sys.argv[1], **about)
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
    assert (res.returncode, res.stderr) == (0, "")
    assert "refused [Errno 27] File too large" in res.stdout and "main_data.hdf5" in res.stdout
    assert [*(tmp_path / "some").iterdir()] == []


# -- with Minari


@pytest.fixture
def minari(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return pytest.importorskip("minari")


QUIET = pytest.mark.filterwarnings("ignore:`:UserWarning", "ignore:env_spec is None:UserWarning")


def created(minari, name, episodes, obs_space, act_space):
    "A set that Minari writes."
    from minari.data_collector import EpisodeBuffer

    buffers = [EpisodeBuffer(**e) for e in episodes]
    about = dict(observation_space=obs_space, action_space=act_space)
    minari.create_dataset_from_buffers(f"some/{name}-v0", buffers, **about)


def written_again(name, *spaces):
    "The set is played, and written by us. Returns its folder."
    about = dict(zip(("observation_space", "action_space"), spaces))
    return to_minari(from_minari(f"some/{name}-v0", 4), "some/again-v0", **about)


def assert_same_leaves(x, y):
    for a, b in zip(nested.leaves(x), nested.leaves(y), strict=True):
        np.testing.assert_array_equal(a, b)


@QUIET
@pytest.mark.parametrize("kind", ["dict", "number", "box"])
def test_our_idea_of_the_layout_is_that_of_minari(kind, minari, tmp_path):
    episodes = list(random_episodes(LENGTHS, *KINDS[kind]))
    created(minari, "theirs", episodes, *KINDS[kind])
    ours = write(tmp_path, "some/set-v0", episodes, *KINDS[kind])
    again = written_again("theirs", *KINDS[kind])
    theirs = tmp_path / "some/theirs-v0"
    for x, y in zip(read(theirs), read(ours), strict=True):
        np.testing.assert_equal(x, y)
    assert_same_episodes(read(again), read(theirs))

    def facts(path, *others):
        "But for those that are others in each set."
        known = json.loads(facts_of(path).read_text())
        return {
            k: x for k, x in known.items() if k not in ("dataset_id", "minari_version", *others)
        }

    assert facts(ours).items() <= facts(theirs).items()
    more = "dataset_size", "jpeg_encoding"
    assert facts(theirs, *more).items() <= facts(again).items()


@pytest.mark.parametrize("env", ENVS)
def test_minari_reads_what_we_have_recorded(env, minari):
    fragments = recorded(env)
    metadata = dict(author=["somebody"], algorithm_name="random")
    to_minari(fragments, "some/recorded-v0", env, metadata=metadata)
    dataset = minari.load_dataset("some/recorded-v0")
    episodes = list(whole_episodes(fragments))
    assert dataset.total_steps == 1440
    for x, y in zip(dataset, episodes, strict=True):
        assert_same_leaves((x.observations, x.actions, x.rewards), (y.obs, y.act, y.rew))
        assert (x.terminations[-1], x.truncations[-1]) == (y.term, not y.term)
    again = dataset.recover_environment()
    assert again.spec.id == env
    assert again.observation_space == dataset.observation_space
    assert again.action_space == dataset.action_space
    assert [*minari.list_local_datasets()] == ["some/recorded-v0"] and dataset.sample_episodes(2)


def test_minari_reads_nested_spaces_images_and_infos(minari, tmp_path):
    pair = spaces.Dict(image=KINDS["image"][0], rest=DICT), ACT
    episodes = list(random_episodes(LENGTHS, *pair))
    write(tmp_path, "some/set-v0", episodes, *pair)
    written_again("set", *pair)
    dataset = minari.load_dataset("some/again-v0")
    assert (dataset.observation_space, dataset.action_space, dataset.env_spec) == (*pair, None)
    for x, y in zip(dataset, episodes, strict=True):
        assert_same_leaves((x.observations, x.actions), (y["observations"], y["actions"]))
        assert_same_leaves(x.infos["deep"]["count"][1:], y["infos"]["deep"]["count"][1:])


@QUIET
def test_images_that_minari_has_compressed_are_read_as_minari_reads_them(minari):
    obs_space = spaces.Dict(
        big=KINDS["image"][0],
        grey=spaces.Box(0, 255, (40, 40), np.uint8),
        small=spaces.Box(0, 255, (4, 4), np.uint8),
    )
    pair = obs_space, spaces.Discrete(2)
    created(minari, "jpeg", list(random_episodes(LENGTHS, *pair, infos=False)), *pair)
    played = whole_episodes(from_minari("some/jpeg-v0", 4))
    for x, y in zip(played, minari.load_dataset("some/jpeg-v0"), strict=True):
        assert x.obs.keys() == obs_space.spaces.keys()
        assert_same_leaves(x.obs, {key: y.observations[key] for key in obs_space})


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
@pytest.mark.parametrize("env", [*ENVS, Maze])
def test_a_set_of_minaris_collector_is_the_same_after_it_was_played_and_written(
    env, minari, tmp_path
):
    pytest.importorskip("jax")
    make = Maze if env is Maze else partial(gym.make, env)
    collector = minari.DataCollector(make(), record_infos=True)
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
    played = from_minari("some/theirs-v0", 16)
    again = to_minari(played, "some/again-v0", Maze() if env is Maze else env)
    theirs = with_float_rewards(read(tmp_path / "some/theirs-v0"))
    assert len(theirs) == 6
    assert_same_episodes(read(again), theirs)
    ours, theirs = (minari.load_dataset(f"some/{name}-v0") for name in ("again", "theirs"))
    for x, y in zip(ours, theirs, strict=True):
        assert_same_leaves((x.observations, x.actions), (y.observations, y.actions))


def test_a_space_and_a_fact_that_a_set_cannot_have_are_named(tmp_path):
    space = gym.spaces.Dict(mission=gym.spaces.Text(4))
    space_facts = dict(type="Dict", subspaces=dict(mission=dict(type="Text", max_length=4)))
    facts = dict(observation_space=json.dumps(space_facts))
    path = write(tmp_path, "texts-v0", [], *KINDS["number"], **facts)
    text = r"leaf observation_space\['mission'\].*FilterObs.*got Text"
    with pytest.raises(SpaceError, match=text) as e:
        from_minari("texts-v0", 4, folder=tmp_path)
    assert str(path / "data") in str(e.value)
    with pytest.raises(SpaceError, match=r"leaf observation_space\['mission'\]"):
        to_minari([], "more-v0", observation_space=space, action_space=space, folder=tmp_path)
    with pytest.raises(DataError, match=r"leaf metadata\['by'\]\[1\]: JSON cannot.*got \{2\}"):
        to_minari([], "more-v0", "CartPole-v1", metadata=dict(by=["me", {2}]), folder=tmp_path)
    assert not (tmp_path / "more-v0").exists()
