"Infos, from the recorder to the end of a pipeline, against slow ones that look at single numbers."

import os
import signal
from collections import defaultdict
from functools import cache, partial
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_same, snapshot
from toys import Alone, Counting, Plain, Scripted, Thrifty

from rollpipe.agents import evaluate
from rollpipe.layers import MLPPolicy
from rollpipe.pipes import (
    DataError,
    EnvError,
    EnvStepper,
    EpisodeCollector,
    EpisodeStats,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    Minibatcher,
    ProcessReading,
    ReplayMemory,
    RewardScaler,
    collect,
    context,
    nested,
    prepare,
    startup,
)
from rollpipe.pipes.data.fragment_ops import (
    ENV_REWARD,
    columns,
    join,
    pad_episodes,
    transitions,
)
from rollpipe.pipes.envs.agents import Agents
from rollpipe.pipes.envs.infos import SingleInfos, VectorInfos
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.steps import Steps

fast = settings(deadline=None, max_examples=60)
numbers = dict(
    int=st.integers(-9, 9),
    float=st.sampled_from([0.0, 0.5, -3.25, 7.0]),
    bool=st.booleans(),
    text=st.sampled_from(["a", "b"]),
)


# --- the recorder, step by step


@st.composite
def stories(draw):
    """`(story, valid)`: `story[step][environment]` is a dict of numbers and texts, of which some are missing.

    An info that begins as an integer or a float may go on as the other.
    """
    keys = draw(st.sets(st.sampled_from("abcd"), min_size=1))
    kinds = {key: draw(st.sampled_from(sorted(numbers))) for key in keys}

    def value(key, step):
        kind = kinds[key]
        if kind in ("int", "float") and step:
            kind = draw(st.sampled_from(["int", "float"]))
        return draw(numbers[kind])

    n = draw(st.integers(1, 4))
    n_steps = draw(st.integers(1, 6))
    often = draw(st.sampled_from([1, 3, 20]))
    valid = [np.array([bool(draw(st.integers(0, 4))) for _ in range(n)]) for _ in range(n_steps)]

    def info(step, v):
        return {key: value(key, step) for key in kinds if v and draw(st.integers(0, often))}

    return [[info(step, v) for v in valid[step]] for step in range(n_steps)], valid


def slow(story, valid):
    "What must be recorded, a dict for each step, found from the whole story so far for each step anew."
    return [slow_step(story[: step + 1], valid[: step + 1]) for step in range(len(story))]


def slow_step(story, valid):
    record = {}
    infos = [info for step in story for info in step]
    for key in set().union(*infos):
        values = [info[key] for info in infos if key in info]
        if isinstance(values[0], str):
            continue
        dtype = np.result_type(*(np.asarray(x).dtype for x in values))
        filler = np.nan if dtype.kind == "f" else 0
        record[key] = np.array([info.get(key, filler) for info in story[-1]], dtype)

        # An info has a mask if it came late, or was missed since.
        is_early = any(key in info for info in story[0])
        steps = zip(infos, np.concatenate(valid))
        if not is_early or any(v and key not in info for info, v in steps):
            record[f"_{key}"] = np.array([key in info for info in story[-1]])
    return record


def same(a, b):
    assert sorted(a) == sorted(b)
    for key in a:
        assert a[key].dtype == b[key].dtype and a[key].shape == b[key].shape
        np.testing.assert_array_equal(a[key], b[key])


@fast
@given(story=stories())
def test_single_environments(story):
    infos, valid = story
    recorder = SingleInfos(len(infos[0]))
    for step, v, expected in zip(infos, valid, slow(*story)):
        same(recorder.record(step, v), expected)


@pytest.mark.parametrize(
    "value",
    [[1, 2], np.zeros(2), "text", {"x": 1}, None, object()],
    ids=["list", "array", "text", "dict", "None", "object"],
)
@pytest.mark.parametrize(
    "known", [1, {"a": 1, "b": 2.0}, np.zeros(3)], ids=["number", "dict", "array"]
)
@pytest.mark.parametrize("late", [False, True])
def test_an_info_that_changes_its_form_names_the_environment(value, known, late):
    recorder = SingleInfos(3)
    every = np.ones(3, bool)
    if late:
        recorder.record([{}] * 3, every)
    recorder.record([{"x": known}] * 3, every)
    text = r"environment 1, leaf info\['x'\]: an info changed its form .*Expected.*got"
    with pytest.raises(EnvError, match=text):
        recorder.record([{"x": known}, {"x": value}, {}], every)


def test_the_record_has_memory_of_its_own():
    "A vector environment may use its arrays again."
    infos = dict(x=np.zeros(2), at=dict(y=np.zeros((2, 3))))
    every = np.ones(2, bool)
    record = partial(VectorInfos(2).record, ended=~every, valid=every)
    first = record(infos)
    for x in nested.leaves(infos):
        x[:] = 7
    assert not any(x.any() for x in nested.leaves(first))
    assert (record(infos)["x"] == 7).all()

    mask = np.array([True, False])
    second = record(dict(infos, _x=mask))
    mask[:] = False
    assert second["_x"].tolist() == [True, False]
    assert record(infos)["_x"].tolist() == [True, True]
    assert every.all()


@pytest.mark.parametrize("engine", ["torch", "onnxruntime"])
@pytest.mark.parametrize(
    "paid", [np.zeros(()), torch.zeros((), dtype=torch.double)], ids=["array", "tensor"]
)
@pytest.mark.parametrize("keys", [None, ["n"]])
def test_what_environments_use_again_is_recorded_as_it_was(engine, paid, keys):
    def fragments(fresh):
        makes = [partial(Thrifty, paid, fresh, tag=tag) for tag in range(2)]
        actor = MLPPolicy.for_env(Counting, seed=0)
        options = dict(seed=0, engine=engine, info_keys=keys)
        return list(islice(collector(makes, 5, actor, **options), 3))

    recorded = fragments(False)
    assert_same(recorded, fragments(True))
    for f in recorded:
        assert torch.equal(f.env["n"], f.state.stepno[:-1] + 1)
        assert (f.state.rew[1:] % 100 >= f.env["n"]).all()
        assert f.env.keys() == ({"n", "place", "parts"} if keys is None else {"n"})


def collector(source, n_steps, actor=None, n_envs=None, **options):
    return FragmentCollector(EnvStepper(source, actor or Idle(), n_envs, **options), n_steps)


def test_numbers_that_a_network_computed():
    "They are recorded without their graph."
    one = torch.tensor(1.0, requires_grad=True)
    source = partial(Scripted, pay=lambda env: one * 7, tell=lambda env: {"n": one * env.count})
    f = next(iter(collector(source, 5)))
    assert f.env["n"][:, 0].tolist() == [1, 2, 3, 1, 2]
    assert (f.state.rew[1:] == 7).all()


def test_an_info_that_is_not_recorded_may_be_anything():
    "It is not copied, and nothing is read in it."
    endless = {}
    endless["me"] = [endless, endless]
    tell = lambda env: {"n": env.count, 7: object(), "endless": endless, "lock": signal}
    f = next(iter(collector(partial(Scripted, tell=tell), 5, info_keys=["n"])))
    assert f.env["n"][:, 0].tolist() == [1, 2, 3, 1, 2]


def test_a_dict_that_invents_what_is_asked_for_invents_nothing():
    recorder = SingleInfos(2)
    every = np.ones(2, bool)
    recorder.record([{"x": 1}, {"x": 2}], every)
    record = recorder.record([defaultdict(int), {"x": 3}], every)
    assert record["x"].tolist() == [0, 3] and record["_x"].tolist() == [False, True]


# --- what is said


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "rollpipe"]


def telling(tell):
    "A factory of environments that tell in each step what `tell(step)` says. Episodes have 4 steps."
    rules = dict(tell=lambda env: tell(env.calls["step"]), tell_first={"reset": 7})
    return partial(Scripted, [(4, "trunc")], **rules)


def ticks(tell, n, **options):
    return list(islice(EnvStepper([telling(tell)] * 2, Plain(), **options), n))


NAME = "'name' (it is not numeric: 'step 1')"


def test_several_workers_say_once_what_is_left_out(caplog, capfd):
    source = telling(lambda step: {"x": step, "name": f"step {step}"})
    pipe = Lanes(collector(source, 5, n_envs=2), n=4, seed=5)
    with DataLoader2(pipe, reading_service=ProcessReading(2)) as loader:
        assert all(set(f.env) == {"x"} for f in islice(loader, 8))
    (warning,) = warnings_in(caplog)
    assert NAME in warning
    assert "not recorded" not in capfd.readouterr().err


def test_what_is_left_out_is_said_once(caplog):
    def tell(step):
        late = {"none": None} if step == 3 else {}
        return {"x": step, "name": f"step {step}", "_own": 1, **late}

    for f in islice(Lanes(collector(telling(tell), 5, n_envs=2), n=3), 6):
        assert set(f.env) == {"x"}
    first, second = warnings_in(caplog)
    assert NAME in first and "`info_keys`" in first
    assert "'_own' (such names are those of the masks: 1)" in first
    assert "'none' (it is not numeric: None)" in second and "'name'" not in second

    # Nothing is said of what was not chosen.
    caplog.clear()
    assert set(ticks(tell, 9, info_keys=["x"])[-1].env) == {"x"}
    assert ticks(tell, 9, info_keys=())[-1].env == {}
    assert warnings_in(caplog) == []


def test_every_stream_says_it_again(caplog):
    for _ in range(2):
        ticks(lambda step: {"name": "text"}, 5)
    assert len(warnings_in(caplog)) == 2


def test_an_evaluation_records_no_infos_and_says_nothing(caplog):
    evaluate(telling(lambda step: {"name": "text"}), Plain(), 2)
    assert warnings_in(caplog) == []


def test_an_info_that_was_chosen_and_never_appears_is_said_once(caplog):
    for name, n in (("is_success", 4), ("is_sucess", 3)):
        ticks(lambda step: {"is_success": 1}, n, info_keys=[name])
        assert not warnings_in(caplog)
    late = lambda step: {"is_sucess": step} if step == 9 else {}
    items = ticks(late, 17, info_keys=["is_sucess"])
    [text] = warnings_in(caplog)
    assert "'is_sucess'" in text and "first episode" in text
    assert [tick.env.get("is_sucess", [None])[0] for tick in items] == [None] * 8 + [9] + [0] * 8

    caplog.clear()
    vector = lambda: SyncVectorEnv([telling(lambda step: {})] * 2)
    list(islice(EnvStepper(vector, Plain(), info_keys=["never"]), 12))
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("vector", [False, True])
def test_an_info_that_was_chosen_and_appears_late_as_text(vector):
    makes = [telling(lambda step: {"late": "text"} if step == 3 else {})] * 2
    source = (lambda: SyncVectorEnv(makes)) if vector else makes
    text = (
        r"EnvStepper, lane 0.*leaf info\['late'\]: this info cannot be recorded: it is not numeric"
    )
    with pytest.raises(EnvError, match=text):
        list(islice(EnvStepper(source, Plain(), info_keys=["late"]), 5))


def test_one_name_is_no_list():
    text = r"EnvStepper.*info_keys.*Expected \['episode'\], got 'episode'"
    with pytest.raises(DataError, match=text):
        next(iter(EnvStepper("CartPole-v1", Plain(), info_keys="episode")))


# --- from the environment to the end of the pipeline


class Chatty(gym.Env):
    """Tells anything at any step. The observation `[tag, step]` determines the next infos, see `told`.

    `story`: a seed. Episodes have random lengths and ends. What a reset tells must never be recorded.
    """

    observation_space = Box(-np.inf, np.inf, (2,))
    action_space = Discrete(2)

    def __init__(self, story):
        self.story = story

    def look(self):
        return np.array([self.tag, self.step_n], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.tag = seed % 1000
            self.step_n = 0
        return self.look(), {"score": 99.0, "of_resets": 1, "episode": {"r": 99.0, "l": 99}}

    def step(self, action):
        info, end = told(self.story, self.tag, self.step_n)
        self.step_n += 1
        return self.look(), 1.0, end == 1, end == 2, info


def told(story, tag, step):
    "`(infos, end)` of the step after an observation."
    info, end = drawn(story, int(tag), int(step))
    return dict(info), end


@cache
def drawn(story, tag, step):
    "What each environment tells at each step, with its own probability for each key."
    often = np.random.default_rng(story).choice([0.03, 0.3, 0.9, 1.0], 6)
    rng = np.random.default_rng([story, tag, step])
    values = dict(
        score=rng.normal(),
        n=int(rng.integers(-5, 5)),
        ok=bool(rng.integers(2)),
        at=rng.integers(9, size=2).astype(np.int16),
        episode=dict(r=float(rng.integers(9)), l=int(rng.integers(9))),
        name="text",
    )
    info = {key: value for (key, value), p in zip(values.items(), often) if rng.random() < p}
    return info, int(rng.choice([0, 0, 0, 0, 1, 2]))


class Idle:
    "Acts with 0 and reports nothing."

    def step(self, stepno, *args, hx, virtual):
        return torch.zeros_like(stepno), (), {}

    def reset(self, hx, at):
        return hx


KEYS = "score", "n", "ok", "at", "episode"


def check_record(story, obs, valid, env, keys=KEYS, padded=False):
    "Check the infos of steps, number by number. `obs` `[T, B, 2]` was seen before them, `valid` is `[T, B]`."
    assert set(env) <= {*keys, *(f"_{key}" for key in keys), ENV_REWARD}
    assert all(key[1:] in env for key in env if key.startswith("_"))
    for t, b in np.ndindex(*valid.shape):
        info = told(story, *obs[t, b].tolist())[0] if valid[t, b] else {}
        for key in keys:
            if key in info:
                assert key in env and bool(env.get(f"_{key}", valid)[t, b])
                recorded = nested.getitem(env[key], (t, b))
                expected = nested.map(lambda x: np.asarray(x).tolist(), info[key])
                assert nested.map(torch.Tensor.tolist, recorded) == expected
            elif key in env:
                assert not env.get(f"_{key}", valid)[t, b]
                for x in nested.leaves(env[key]):
                    if not x.is_floating_point():
                        assert not x[t, b].any()
                    else:
                        assert x[t, b].isnan().all() or padded and not valid[t, b]


def check_fragments(story, fragments, keys=KEYS, padded=False):
    for f in fragments:
        assert {x.shape[:2] for x in nested.leaves(f.env)} <= {f.valid.shape}
        check_record(story, f.state.obs[:-1], f.valid, f.env, keys, padded)


def makes(story, n):
    return [partial(Chatty, story)] * n


def vector(story, n, mode):
    return lambda: SyncVectorEnv(makes(story, n), autoreset_mode=mode)


stream = settings(deadline=None, max_examples=15)
seeds = st.integers(0, 10**6)
few = st.integers(1, 3)


@stream
@given(
    story=seeds,
    n=few,
    n_steps=st.integers(1, 8),
    keys=st.none() | st.sets(st.sampled_from([*KEYS, "never"])),
)
def test_fragments(story, n, n_steps, keys):
    info_keys = None if keys is None else sorted(keys)
    pipe = collector(makes(story, n), n_steps, seed=story, info_keys=info_keys)
    fragments = list(islice(pipe, 10))
    check_fragments(story, fragments, KEYS if keys is None else keys)
    for f, g in zip(fragments, fragments[1:]):
        assert f.env.keys() <= g.env.keys()


@stream
@given(story=seeds, n=few, period=st.integers(2, 7))
def test_environments_that_rest(story, n, period):
    pipe = collector(makes(story, n), period, seed=story, sticky=period)
    fragments = list(islice(pipe, 8))
    check_fragments(story, fragments)
    infos = [told(story, *obs)[0] for f in fragments for obs in f.state.obs[:-1][f.valid].tolist()]
    always = [key for key in KEYS if all(key in info for info in infos)]
    for f in fragments:
        assert not any(f"_{key}" in f.env for key in always)


@stream
@given(story=seeds, n=few, mode=st.sampled_from([*AutoresetMode]), n_steps=st.integers(1, 8))
def test_vector_environments(story, n, mode, n_steps):
    check_fragments(story, islice(collector(vector(story, n, mode), n_steps, seed=story), 10))


@stream
@given(story=seeds, n=few, mode=st.sampled_from([AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]))
def test_a_vector_gives_the_fragments_of_single_environments(story, n, mode):
    pair = (collector(x, 5, seed=story) for x in (vector(story, n, mode), makes(story, n)))
    assert_same(*(list(map(snapshot, islice(pipe, 6))) for pipe in pair))


@pytest.mark.slow
@stream
@given(
    story=seeds, n=few, batch=st.integers(1, 4), pad=st.booleans(), lanes=few, below=st.booleans()
)
def test_whole_episodes(story, n, batch, pad, lanes, below):
    ticks = EnvStepper(makes(story, n), Idle(), terminal_obs=True)
    if below:
        pipe = EpisodeCollector(Lanes(ticks, lanes, seed=story), batch, pad=pad)
    else:
        pipe = Lanes(EpisodeCollector(ticks, batch, pad=pad), lanes, seed=story)
    items = list(islice(pipe, 12))
    fragments = items if pad else [f for item in items for f in item]
    check_fragments(story, fragments, padded=pad)
    check_fragments(story, [pad_episodes(fragments)], padded=True)


@pytest.mark.slow
@stream
@given(story=seeds, n=few, lanes=few, data=st.data())
def test_batches_their_parts_and_minibatches(story, n, lanes, data):
    pipe = Lanes(collector(makes(story, n), 4), lanes, seed=story)
    stacked = FragmentStacker(pipe, data.draw(st.integers(1, 5)))
    for batch in islice(stacked, 6):
        environments = st.integers(0, batch.n_envs - 1)
        index = data.draw(st.lists(environments, min_size=1, max_size=4, unique=True))
        every_step = torch.arange(batch.valid.numel())
        parts = columns(batch, torch.tensor(index)), transitions(batch, every_step)
        check_fragments(story, [batch, *parts])
    check_fragments(story, islice(Minibatcher(stacked, 3, seed=0), 12))


def in_a_replay(story, n, lanes, capacity, length, path=None):
    "Every sample has what was told, however often infos have appeared since its steps were stored."
    pipe = Lanes(collector(makes(story, n), 5), lanes, seed=story)
    memory = ReplayMemory(capacity, length=length, seed=0, path=path)
    for f in islice(pipe, 15):
        memory.add(f)
        if memory.sampler.n_segments:
            check_fragments(story, [memory.sample(6).fragment])
    check_fragments(story, [memory.sample(300).fragment])
    assert len(memory) == memory.store.records["fragment.valid"].sum() == min(capacity, 15 * 5 * n)


@pytest.mark.parametrize("length", [1, 3])
def test_samples_have_the_infos_of_their_steps(length):
    in_a_replay(story=7, n=2, lanes=2, capacity=60, length=length)


@pytest.mark.slow
@stream
@given(
    story=seeds,
    n=few,
    lanes=few,
    capacity=st.integers(30, 200),
    length=st.integers(1, 4),
    is_mapped=st.booleans(),
)
def test_replay(story, n, lanes, capacity, length, is_mapped, tmp_path_factory):
    path = tmp_path_factory.mktemp("replay") if is_mapped else None
    in_a_replay(story, n, lanes, capacity, length, path)


def number_or_half(env):
    "The number of a step, or half of it from a step on that is drawn at the first reset."
    if env.calls["step"] == 1:
        env.begin_of_halves = int(env.np_random.integers(8, 40))
    number = env.calls["step"]
    return number if number < env.begin_of_halves else number / 2


def both_numbers(env):
    return {"number": number_or_half(env), "deep": {"number": number_or_half(env)}}


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_replay_goes_on_when_an_integer_goes_on_as_a_float(lanes, is_mapped, tmp_path):
    halves = partial(Scripted, [(7, "term")], pay=number_or_half, tell=both_numbers)
    pipe = FragmentStacker(Lanes(collector(halves, 5, n_envs=2), lanes, seed=0), lanes)
    memory = ReplayMemory(1000, seed=0, path=tmp_path if is_mapped else None)
    dtypes = []
    for f in islice(pipe, 10):
        memory.add(f)
        sample = memory.sample(50).fragment
        dtypes.append(sample.env["number"].dtype)
        for x in (sample.env["number"], sample.env["deep"]["number"]):
            assert torch.equal(x.float(), sample.state.rew[1:])
    assert (dtypes[0], dtypes[-1]) == (torch.int64, torch.float64)
    assert len(memory) == 10 * 5 * 2 * lanes


@settings(deadline=None, max_examples=8)
@given(story=seeds, lanes=few)
def test_manual_loops(story, lanes):
    with startup(prepare(makes(story, 2), Idle(), 4, seed=story)) as ctx:
        check_fragments(story, [collect(ctx) for _ in range(6)])
    with context(makes(story, 2), seed=story) as ctx:
        for _ in range(12):
            obs = ctx.state.obs
            out = ctx.step(torch.zeros(1, 2, dtype=torch.int64))
            rows = (obs, out.valid, out.info)
            check_record(story, *nested.map(lambda x: torch.from_numpy(x)[None], rows))


def piped(story, lanes):
    ticks = RewardScaler(EnvStepper(makes(story, 2), Idle()))
    fragments = RewardScaler(FragmentCollector(ticks, 4))
    return FragmentStacker(Lanes(fragments, lanes, seed=story), lanes)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("story", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, dict(lag=1)], ids=["lag 0", "lag 1"])
def test_the_stream_does_not_depend_on_the_workers(story, options):
    serial = list(map(snapshot, islice(piped(story, 3), 12)))
    check_fragments(story, islice(piped(story, 3), 12))
    for workers in (0, 1, 2):
        service = ProcessReading(workers, **options if workers else {})
        with DataLoader2(piped(story, 3), reading_service=service) as loader:
            assert_same(list(map(snapshot, islice(loader, 12))), serial)


def test_large_infos_that_appear_late_come_out_of_the_workers():
    "The workers put arrays of this size into the places of a layout, which is made after the first batches."

    def tell(step):
        is_told = step > 18 or step % 4 == 3 and step > 9
        return {"large": np.full((200, 200), step, np.float32)} if is_told else {}

    pipe = FragmentStacker(Lanes(collector(telling(tell), 4, n_envs=2), 2, seed=0), 2)
    serial = list(map(snapshot, islice(pipe, 7)))
    n_told = [int(f.env["_large"].sum()) if "_large" in f.env else None for f in serial]
    assert n_told == [None, None, 4, 4, 8, 16, 16]
    with DataLoader2(pipe, reading_service=ProcessReading(2)) as loader:
        assert_same(list(map(snapshot, islice(loader, 7))), serial)


def test_lanes_that_begin_anew_record_the_same_infos():
    "Their first steps may report fewer infos than the steps before, and nothing is lost or shifted."
    fragments = []
    memory = ReplayMemory(1000, seed=0)
    with DataLoader2(piped(5, 2), reading_service=ProcessReading(2, restart=1)) as loader:
        for k, f in enumerate(islice(loader, 30)):
            fragments.append(f)
            memory.add(f)
            if k == 8:
                os.kill(loader.reading_service.health()[0]["pid"], signal.SIGKILL)
        assert loader.reading_service.health()[0]["restarted"] == 1
    check_fragments(5, [*fragments, memory.sample(400).fragment])


def test_steps_without_an_image():
    def tell(step):
        return {} if step == 3 else {"image": np.full((2, 2, 3), step, np.uint8)}

    steps = islice(Steps(collector(telling(tell), 5, n_envs=2), image="image"), 20)
    pixels = [s.image if s.image is None else int(s.image[0, 0, 0]) for s in steps]
    assert pixels[::2] == [1, 2, None, *range(4, 11)]


# --- the statistics of episodes that gymnasium reports


def recorded(length):
    return gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1", max_episode_steps=length))


def check_statistics(n_least, source, **options):
    "The infos of a stream tell the ends of episodes as the library's own statistics do."
    ends = []
    reported = []
    pipe = collector(source, 7, seed=0, **options)
    for f in islice(EpisodeStats(pipe, sink=ends.append), 12):
        if "episode" not in f.env:
            continue
        assert torch.equal(f.env["_episode"], f.state.fin[1:] & f.valid)
        for t, b in f.env["_episode"].nonzero().tolist():
            episode = nested.map(lambda x, at=(t, b): x[at].item(), f.env["episode"])
            reported.append((int(f.lane[b]), b, episode["r"], episode["l"]))
    assert reported == [(end.lane, end.env, end.ret, end.length) for end in ends]
    assert len(reported) > n_least


@pytest.mark.parametrize("keys", [None, ["episode"]])
@pytest.mark.parametrize("source", ["single", *AutoresetMode])
def test_the_statistics_of_gymnasium(source, keys):
    makes = [partial(recorded, n) for n in (12, 30, 500)]
    source = makes if source == "single" else partial(SyncVectorEnv, makes, autoreset_mode=source)
    check_statistics(15, source, info_keys=keys)


CART = partial(gym.make, "CartPole-v1")
VectorStatistics = gym.wrappers.vector.RecordEpisodeStatistics


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_the_statistics_of_a_vector(mode):
    carts = partial(SyncVectorEnv, [CART] * 2, autoreset_mode=mode)
    check_statistics(10, lambda: VectorStatistics(carts()))


def test_statistics_of_a_vector_that_gymnasium_would_lose():
    "gymnasium's vectors drop `reset_mask`, so the wrapper around them clears the episodes of all."
    carts = partial(SyncVectorEnv, [CART] * 2, autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(EnvError, match="forgets .* Expected SameStep or NextStep"):
        next(iter(EnvStepper(lambda: VectorStatistics(carts()), Idle())))


def step_of_gymnasium_1_3(self, actions):
    "The step after an end counts as the reset, in each mode."
    answer = self.env.step(actions)
    obs, rewards, terminated, truncated, infos = answer
    before = self.prev_dones
    self.episode_returns[before] = 0
    self.episode_lengths[before] = 0
    self.episode_returns[~before] += rewards[~before]
    self.episode_lengths[~before] += 1
    self.prev_dones = ended = terminated | truncated
    if ended.any():
        numbers = dict(r=self.episode_returns, l=self.episode_lengths, t=np.zeros(len(ended)))
        infos[self._stats_key] = {key: np.where(ended, x, 0) for key, x in numbers.items()}
        infos[f"_{self._stats_key}"] = ended
    return answer


class OwnStatistics(VectorStatistics):
    "A subclass with another signature."

    def __init__(self, key, env):
        super().__init__(env, stats_key=key)


@pytest.mark.parametrize("wrap", ["", "own"])
@pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv, Agents])
def test_statistics_that_an_older_gymnasium_counts_wrongly(monkeypatch, wrap, vector):
    monkeypatch.setattr(VectorStatistics, "step", step_of_gymnasium_1_3)
    monkeypatch.setattr(gym, "__version__", "1.3.0")

    def source(mode=AutoresetMode.SAME_STEP):
        if vector is Agents:
            inner = Agents(lambda: Alone(Counting()), 2)
        else:
            inner = vector([CART] * 2, autoreset_mode=mode)
        return OwnStatistics("own", inner) if wrap else VectorStatistics(inner)

    with pytest.raises(EnvError, match="RecordEpisodeStatistics.*Expected .*NextStep"):
        next(iter(EnvStepper(source, Idle())))
    if vector is SyncVectorEnv:
        next(iter(EnvStepper(partial(source, AutoresetMode.NEXT_STEP), Idle())))


# --- the same keys


def test_a_lane_with_another_form_of_an_info_is_refused():
    forms = (1, {"y": 1})
    pipes = [collector(telling(lambda step, x=x: {"x": x}), 3) for x in forms]
    with pytest.raises(DataError, match="env"):
        join([next(iter(pipe)) for pipe in pipes])
