"What `rollpipe data` tells of a recording is so, on every edge of every recipe, and also of damaged recordings."

import json
import signal
import sys
import tracemalloc
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from command_line import rollpipe
from test_recording import EDGES, POLE, RECIPES, IterList, recorded

from rollpipe.layers import MLPPolicy
from rollpipe.pipes import (
    DataError,
    EnvStepper,
    EpisodeCollector,
    FragmentCollector,
    Lanes,
    Minibatcher,
    Recorder,
    Replayer,
    insert_after,
    rollouts,
)
from rollpipe.pipes.data.fragment import Fragment
from rollpipe.pipes.data.fragment_ops import env_rewards
from rollpipe.pipes.recording.recorder import item_files
from rollpipe.pipes.recording.replayer import records_of_folder
from rollpipe.runs.pack import Contents, bars

pytestmark = pytest.mark.timeout(300)


def slow(fragments):
    "`(return, length, terminated)` of the episodes of fragments, step by step; and how many go on."
    sums = {}
    found = []
    for f in fragments:
        rew = env_rewards(f)
        for b in range(f.n_envs):
            key = int(f.lane[b]), b - int((f.lane[:b] != f.lane[b]).sum())
            for t in range(f.n_steps):
                if not f.valid[t, b]:
                    continue
                ret, length = sums.get(key, (0.0, 0))
                sums[key] = ret + float(rew[t, b]), length + 1
                if f.state.fin[t + 1, b]:
                    found.append((*sums.pop(key), float(f.term[t + 1, b])))
    return sorted(found), len(sums)


def record(make, edge, path, n=5):
    "Learn `n` times from a recipe that records below this pipe."
    pipe, agent = make()
    with torch.random.fork_rng():
        list(
            map(
                agent.update,
                islice(
                    insert_after(
                        pipe, lambda p: type(p).__name__ == edge, partial(Recorder, path=path)
                    ),
                    n,
                ),
            )
        )


@pytest.mark.slow_but_one
@pytest.mark.parametrize("recipe", RECIPES)
def test_episodes_are_those_that_were_played_on_every_edge(recipe, tmp_path):
    for name, edge in EDGES:
        if name == recipe:
            record(RECIPES[recipe], edge, tmp_path / edge)
    played, running = slow(Replayer(tmp_path / "Lanes"))
    assert played or recipe == "sac"  # an episode of Pendulum has 200 steps
    for path in tmp_path.iterdir():
        found = Contents(path)
        assert (sorted(map(tuple, found.episodes)), found.n_ends, found.faults) == (
            played,
            len(played),
            [],
        ), path
        steps_left = found.steps - int(found.episodes[:, 1].sum())
        assert f"{running} unfinished, {steps_left:,} steps" in str(found)
        assert " in 2 lanes" in str(found)
        assert found.steps == sum(int(f.valid.sum()) for f in Replayer(tmp_path / "Lanes"))


def test_lists_and_padded_batches_of_episodes_count(tmp_path):
    def ticks():
        return Lanes(
            EnvStepper(POLE, MLPPolicy.for_env(POLE, seed=0), n_envs=2, terminal_obs=True),
            2,
            seed=0,
        )

    for pad in (False, True):
        list(islice(Recorder(EpisodeCollector(ticks(), batch=4, pad=pad), tmp_path / str(pad)), 6))
    a = Contents(tmp_path / "False")
    b = Contents(tmp_path / "True")
    assert a.kinds == {"list of Fragment": 6} and b.kinds == {"Fragment": 6}
    assert len(a.episodes) == 24 and sorted(a.returns) == sorted(b.returns)
    assert "0 unfinished" in str(a) and "\n.state.obs " in str(a)


def test_shuffled_steps_have_no_episodes(tmp_path):
    pipe = rollouts(POLE, MLPPolicy.for_env(POLE, seed=0), n_steps=32, n_envs=2, lanes=1, seed=0)
    list(islice(Recorder(Minibatcher(pipe, 16, seed=0), tmp_path), 8))
    found = Contents(tmp_path)
    assert found.steps == 128 and not len(found.episodes) and "episodes" not in str(found)
    with pytest.raises(DataError, match="no returns to draw"):
        found.draw()


def test_items_of_any_kind_tell_what_they_can(tmp_path):
    list(
        Recorder(
            IterList([1, dict(x=np.zeros(3)), dict(x=np.zeros(5)), "text", None]),
            tmp_path,
            compress=True,
        )
    )
    text = str(Contents(tmp_path))
    assert (
        "1 int, 2 dict, 1 str, 1 NoneType\n" in text
        and "['x']     float64 [3-5]" in text
        and "\nsteps" not in text
    )
    assert "B, compressed" in text and "episodes" not in text


def test_what_is_damaged_or_missing_is_named_and_does_not_join_what_is_around_it(tmp_path):
    recorded(tmp_path, 24, chunk=1)
    whole = Contents(tmp_path)
    lane = tmp_path / "lane-0001"
    files = item_files(lane)
    files[0].path.unlink()
    files[6].path.write_bytes(files[6].path.read_bytes()[:-1])
    (lane / "about.json").write_text(json.dumps(dict(pipes=["A"], envs=["\x1b[2J\n"])))
    (tmp_path / "lane-0000" / "about.json").write_text("[" * 10**5)
    (tmp_path / "lane-0002").mkdir()
    found = Contents(tmp_path)
    text = str(found)
    for part in (
        f"{lane}: items 0 to 0 are missing",
        f"{files[6].path}: damaged",
        "lane-0000/about.json: damaged",
        "lane-0002: no items",
        r"'\x1b[2J\n'",
        "lack their first steps",
    ):
        assert part in text
    assert "\x1b" not in text and found.n_ends > len(found.episodes)
    assert set(map(tuple, found.episodes)) <= set(map(tuple, whole.episodes))


def test_rewards_that_are_no_numbers_are_told(tmp_path):
    rew = torch.tensor([[1.0, 1, float("inf")], [1, float("nan"), 1]])
    fragment = Fragment.from_steps(
        torch.zeros(3, 3), torch.zeros(2, 3), rew, torch.tensor([[False] * 3, [True] * 3])
    )
    list(Recorder(IterList([fragment]), tmp_path))
    found = Contents(tmp_path)
    assert list(found.returns) == [2.0] and found.draw()
    for part in (
        "2 whole: 2 terminated",
        "1 more end here, but lack",
        "1 have a return that is not finite",
        "mean 2, min 2",
    ):
        assert part in str(found)


def test_a_recording_need_not_fit_into_memory(tmp_path):
    list(Recorder(IterList([np.zeros(500_000) for _ in range(12)]), tmp_path, chunk=1))
    tracemalloc.start()
    assert (
        sum(path.stat().st_size for path in Contents(tmp_path).files) > 48e6
        and tracemalloc.get_traced_memory()[1] < 16e6
    )
    tracemalloc.stop()


def test_the_command_tells_of_a_run_and_draws(tmp_path, capsys):
    actor = MLPPolicy.for_env(POLE, seed=0)
    list(
        islice(
            Recorder(
                FragmentCollector(EnvStepper(POLE, actor, 2, seed=0), 64),
                tmp_path / "run" / "recording",
            ),
            4,
        )
    )
    for name in ("a.svg", "b.png"):
        assert rollpipe("data", tmp_path / "run", "--plot", tmp_path / name) == 0
    out = capsys.readouterr().out
    assert (
        "4 Fragment in 1 lane\n" in out
        and "environments  CartPole-v1\n" in out
        and "█" * 40 in out
        and "picture: " in out
    )
    assert (
        b"<svg" in (tmp_path / "a.svg").read_bytes()
        and (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"
    )
    assert (
        rollpipe("data", tmp_path / "nothing") == 2
        and "no recording here" in capsys.readouterr().err
    )


def test_returns_that_differ_by_rounding_only_have_one_bar():
    for low, high, n in (
        (0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 1),
        (-1e9, -1e9 + 1e-6, 1),
        (1.0, 1.0, 1),
        (0.0, 1.0, 10),
        (1e9, 1e9 + 1, 10),
    ):
        found = bars(np.array([low, high, high]))
        assert len(found) == n and sum(int(line.rsplit(" ", 1)[1]) for line in found) == 3


def test_ctrl_c_is_clean(tmp_path, monkeypatch, capsys):
    list(Recorder(IterList([1, 2, 3]), tmp_path))

    def interrupted(*args):
        yield from islice(records_of_folder(*args), 2)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys.modules[Contents.__module__], "records_of_folder", interrupted)
    assert rollpipe("data", tmp_path) == 130
    assert capsys.readouterr() == ("", "\ninterrupted\n")
