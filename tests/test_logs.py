"Metric files that survive crashes and resumes, and progress on terminals and in files."

import importlib.util
import io
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gallery import quietly, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from test_writer import rows, write

from rollpipe.agents.checkpoint import keep_checkpoint
from rollpipe.agents.metrics import EpisodeReturns
from rollpipe.pipes.data.errors import DataError
from rollpipe.runs.folder import start
from rollpipe.runs.logs import Progress, read_metrics
from rollpipe.settings.config import make_config


@pytest.mark.parametrize("torn", ['{"st', '{"steps": 3, "kl": 0.1}', "\x00\x00"])
def test_torn_last_line_is_dropped(tmp_path, torn):
    write(tmp_path, dict(steps=1), dict(steps=2))
    for name in ("metrics.jsonl", "metrics.csv"):
        with open(tmp_path / name, "a") as file:
            file.write(torn)
    assert read_metrics(tmp_path)["steps"].tolist() == [1, 2]
    write(tmp_path, dict(steps=4))
    assert read_metrics(tmp_path)["steps"].tolist() == [1, 2, 4]
    assert [r["steps"] for r in rows(tmp_path)] == ["1", "2", "4"]


def test_damage_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"steps": 1}\nrubbish\n{"steps": 2}\n')
    refused("metrics.jsonl, line 2: damaged.*rubbish", read_metrics, tmp_path)


def test_records_after_the_checkpoint_are_dropped(tmp_path):
    write(
        tmp_path, *(dict(steps=min(10 * n, 20), updates=n) for n in (1, 2, 3, 4))
    )  # the last two have no fresh step
    write(tmp_path, dict(steps=25, updates=4), updates=3)
    read = read_metrics(tmp_path)
    assert read["steps"].tolist() == [10, 20, 20, 25] and read["updates"].tolist() == [1, 2, 3, 4]


def test_records_that_were_lost_are_told_and_stay_in_the_table(tmp_path, caplog):
    write(tmp_path, *({"steps": 10 * n, "updates": n, "my/x": n / 3} for n in range(1, 6)))
    path = tmp_path / "metrics.jsonl"
    table = rows(tmp_path)
    path.write_text("".join(path.read_text().splitlines(True)[:2]))
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("damaged,row\n" + "60,6")
    kept = tmp_path / "checkpoints"
    for steps in (10, 20, 30):
        keep_checkpoint(kept, b"content", steps, 3)
    for n in (5, 6):
        write(tmp_path, dict(steps=10 * n + 10, updates=n + 1), updates=n)
        assert rows(tmp_path)[:5] == table and [int(r["updates"]) for r in rows(tmp_path)] == [
            *range(1, n + 2)
        ]
    assert read_metrics(tmp_path)["updates"].tolist() == [1, 2, 6, 7]
    words = f"rollpipe train --resume {kept}/checkpoint-000000020.safetensors"
    assert caplog.messages == [f"{path} has lost the updates 3 to 5; `{words}` makes them again"]
    write(tmp_path, dict(steps=50, updates=5), updates=4)  # a resume from an earlier checkpoint
    assert rows(tmp_path)[:4] == table[:4] and len(rows(tmp_path)) == 5


def test_what_a_checkpoint_has_counted_is_on_disk_before(tmp_path, monkeypatch):
    run = start(
        tmp_path / "run",
        make_config("ppo", "CartPole-v1", dict(n_envs=2, n_steps=16), steps=64, checkpoint_every=1),
    )
    synced = []
    fsync = os.fsync

    def noted(number):
        synced.extend(
            x.name for x in run.folder.iterdir() if os.path.samestat(x.stat(), os.fstat(number))
        )
        fsync(number)

    monkeypatch.setattr(os, "fsync", noted)
    quietly(run)
    saved = [k for k, name in enumerate(synced) if name.startswith(".checkpoint.safetensors")]
    assert len(saved) == 2 and all(
        synced[k - 2 : k] == ["metrics.jsonl", "journal.jsonl"] for k in saved
    )


def test_columns_of_an_older_version_are_brought_up_to_date(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"steps": 1.0, "kl": 0.5}\n')
    (tmp_path / "metrics.csv").write_text("steps,kl\n1,0.5\n")
    write(tmp_path, dict(steps=2, entropy=1))
    assert [(r["kl"], r["entropy"]) for r in rows(tmp_path)] == [("0.5", ""), ("", "1")]


def test_missing_steps_are_refused(tmp_path):
    with pytest.raises(DataError, match="steps"):
        write(tmp_path, dict(kl=0))


@pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="TensorBoard is an extra")
def test_tensorboard_has_the_same_numbers(tmp_path, capfd):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(
        tmp_path,
        dict(steps=8, updates=1, kl=0.5),
        dict(steps=16, updates=2, kl=0.75),
        tensorboard="auto",
    )
    write(tmp_path, dict(steps=16, updates=2, kl=0.25), tensorboard=True, updates=1)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("kl")] == [(8, 0.5), (16, 0.25)]
    assert capfd.readouterr() == ("", "")


def test_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    write(tmp_path / "auto", dict(steps=1), tensorboard="auto")
    assert sorted(p.name for p in (tmp_path / "auto").iterdir()) == ["metrics.csv", "metrics.jsonl"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(file, initial=0):
    "The progress of a run of 1000 steps."
    progress = Progress(file=file)
    progress.begin(SimpleNamespace(config=dict(steps=1000), counters=dict(steps=initial)))
    return progress


def test_progress_on_a_terminal_redraws_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    progress = shown(file := Terminal())
    for steps in range(100, 1100, 100):
        progress.after(dict(steps=steps, kl=0.01, return_mean=-1234.5))
    progress.close()
    text = file.getvalue()
    assert text.count("\n") == 1 and "return -1234" in text and "1k/1k steps" in text


def test_progress_of_a_resumed_run_counts_only_its_own_speed():
    progress = shown(io.StringIO(), initial=900)
    progress.begun -= 10
    progress.after(dict(steps=950))
    assert "5/s" in progress.text() and "0:10 left" in progress.text()


# -- episode returns: the same numbers from a slow, simple loop over time ---------------------------------------------


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    n_lanes=st.integers(1, 3),
    n_envs=st.integers(1, 3),
    n_fragments=st.integers(1, 4),
    n_steps=st.integers(1, 6),
    stacked=st.booleans(),
)
def test_episode_returns_against_a_loop(seed, n_lanes, n_envs, n_fragments, n_steps, stacked):
    rng = np.random.default_rng(seed)
    T = n_fragments * n_steps
    shape = (n_lanes, n_fragments * n_steps, n_envs)
    rew = rng.normal(size=shape).astype(np.float32)
    fin = rng.random(shape) < 0.3
    valid = rng.random(shape) < 0.9
    expected = []
    stepnos = np.zeros(shape, np.int64)
    for lane in range(n_lanes):
        for b in range(n_envs):
            ret = length = 0
            for t in range(T):
                stepnos[lane, t, b] = length
                if not valid[lane, t, b]:
                    continue
                ret = ret + float(rew[lane, t, b])
                length = length + 1
                if fin[lane, t, b]:
                    expected.append((ret, length))
                    ret = length = 0

    def fragment(lane, k):
        at = slice(k * n_steps, (k + 1) * n_steps)
        row = lambda x: torch.as_tensor(
            np.concatenate([np.zeros((1, n_envs), x.dtype), x[lane, at]])
        )
        stepno = torch.as_tensor(stepnos[lane, at])  # the last row is not looked at
        state = SimpleNamespace(stepno=stepno, rew=row(rew), fin=row(fin))
        ids = (torch.full((n_envs,), i) for i in (lane, k))
        return SimpleNamespace(
            state=state,
            term=row(fin),
            valid=torch.as_tensor(valid[lane, at]),
            n_envs=n_envs,
            env={},
            restarts=None,
            **dict(zip(("lane", "seq"), ids)),
        )

    def stack(fs):
        cat = lambda items, *names: {
            n: torch.cat([getattr(x, n) for x in items], -1) for n in names
        }
        state = SimpleNamespace(**cat([f.state for f in fs], "stepno", "rew", "fin"))
        return SimpleNamespace(
            state=state,
            n_envs=sum(f.n_envs for f in fs),
            env={},
            restarts=None,
            **cat(fs, "term", "valid", "lane", "seq"),
        )

    episodes = EpisodeReturns()
    fragments = [fragment(lane, k) for k in range(n_fragments) for lane in range(n_lanes)]
    for f in [stack(fragments)] if stacked else fragments:
        episodes.add(f)
    ret, length = episodes.pop()
    assert sorted(length.tolist()) == sorted(n for _, n in expected)
    assert sorted(ret.tolist()) == sorted(r for r, _ in expected)
    assert (episodes.episodes, episodes.steps) == (len(expected), int(valid.sum()))
