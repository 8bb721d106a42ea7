"""The address of a Ray cluster in somebody's file is not used unless the user names it again.

A cluster gets code of the learner, and a worker of it gets what it sends back into the training. No test here connects to one.
"""

import json

import pytest
from command_line import SMALL, rollpipe

from rollpipe.agents.checkpoint import load_checkpoint
from rollpipe.pipes.cluster.door import ClusterPlace
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.keeping.files import write_atomically
from rollpipe.results import ablation, bench
from rollpipe.results.experiments import EndedRuns
from rollpipe.runs import changes
from rollpipe.runs.folder import resume
from rollpipe.runs.training import train
from rollpipe.settings import files
from rollpipe.traces.history import History

EVIL = "203.0.113.9:6379"


class Connects(Exception):
    "Stands for a connection to a cluster."


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.setattr(files, "_NAMED_ADDRESSES", set())

    def connect(self):
        raise Connects(self.address)

    monkeypatch.setattr(ClusterPlace, "connect", connect)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = "train trpo CartPole-v1 --steps 512 --lanes 2 --workers 1 --keep 9".split()
    assert rollpipe(*words, *SMALL, "--out", folder) == 0
    return folder


def changed(folder, out, due=(), edits=(), **config):
    "A copy of a run, as a stranger could send it, with edits that are due, or that were made."
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "lock":
            (out / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (out / path.relative_to(folder)).write_bytes(path.read_bytes())
    found = load_checkpoint(out / "checkpoint.safetensors")
    config = {**found.config, **config}
    history = History([*found.history, *edits])
    made = found._replace(config=config, history=history)
    write_atomically(out / "checkpoint.safetensors", made.data())
    (out / "config.json").write_text(json.dumps(config))
    history.write(out, due)
    return out


@pytest.fixture
def stranger(trained, tmp_path):
    return changed(trained, tmp_path / "run", reading="ray", address=EVIL, steps=1024)


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow_but_one
@pytest.mark.parametrize("more", [{}, dict(eval_every=1), dict(eval_every="512 steps")])
def test_a_resume_asks_for_the_address(trained, tmp_path, capsys, more):
    run = changed(trained, tmp_path / "run", reading="ray", address=EVIL, steps=1024, **more)
    before = content(run)
    for path in (run, run / "checkpoint.safetensors"):
        assert rollpipe("train", "--resume", path, *SMALL[-2:]) == 2
        err = capsys.readouterr().err
        assert f"Expected --address {EVIL}" in err and f"resume(folder, address='{EVIL}')" in err
        assert content(run) == before
    with pytest.raises(DataError, match="address"):
        resume(run)
    with pytest.raises(Connects, match=EVIL):
        rollpipe("train", "--resume", run, "--address", EVIL, *SMALL[-2:])


def test_another_address_replaces_that_of_the_file(stranger):
    with pytest.raises(Connects, match="localhost:1"):
        train(resume(stranger, address="localhost:1"), progress=False, tensorboard=False)


def test_an_edit_that_is_due_names_no_cluster(trained, tmp_path):
    at = int(load_checkpoint(trained / "checkpoint.safetensors").counters["updates"])
    edit = dict(event="edited", at=at, set=dict(reading="ray", address=EVIL))
    run = changed(trained, tmp_path / "run", steps=1024, due=[edit])
    with pytest.raises(DataError, match=f"--address {EVIL}"):
        train(resume(run), progress=False, tensorboard=False)


def test_a_training_takes_no_address_from_an_ask(trained, tmp_path):
    run = resume(changed(trained, tmp_path / "run", steps=1024))
    with pytest.raises(DataError, match=f"--address {EVIL}"):
        changes._with_request(run, dict(set=dict(reading="ray", address=EVIL)), None)


@pytest.mark.slow
def test_a_repetition_needs_no_cluster(stranger, trained, tmp_path):
    assert rollpipe("verify", stranger, "--updates", 1) == 0
    assert rollpipe("replay", stranger, "--update", 2) == 0
    edit = dict(event="edited", at=1, set=dict(reading="ray", address=EVIL))
    run = changed(trained, tmp_path / "edited", reading="ray", address=EVIL, edits=[edit])
    assert rollpipe("replay", run, "--update", 2) == 0


def test_other_commands_do_not_connect(stranger, tmp_path, capsys):
    assert rollpipe("evaluate", stranger, "--episodes", 1) == 0
    assert rollpipe("fork", stranger, "--out", tmp_path / "a", "--set", "lr=0.1") in (0, 2)
    assert rollpipe("fork", stranger, "--out", tmp_path / "b", "--set", "max_kl=0.02") == 0
    capsys.readouterr()
    assert rollpipe("train", "--resume", tmp_path / "b", *SMALL[-2:]) == 2
    assert f"--address {EVIL}" in capsys.readouterr().err
    assert rollpipe("diff", stranger, tmp_path / "b") == 0


def test_a_file_of_settings_names_no_cluster(stranger, tmp_path, capsys):
    (tmp_path / "own.toml").write_text(
        f'lanes = 2\nworkers = 1\nreading = "ray"\naddress = "{EVIL}"\n'
    )
    for file in (stranger / "config.json", tmp_path / "own.toml"):
        files._NAMED_ADDRESSES.clear()
        words = ["train", "trpo", "CartPole-v1", *SMALL, "--config", file, "--out", tmp_path / "x"]
        assert rollpipe(*words) == 2
        assert f"Expected --address {EVIL}" in capsys.readouterr().err
        assert not (tmp_path / "x").exists()
        with pytest.raises(Connects, match=EVIL):
            rollpipe(*words, "--address", EVIL)
        assert not (tmp_path / "x").exists()


def test_a_specification_names_no_cluster(tmp_path, capsys, monkeypatch):
    spec = tmp_path / "spec.toml"
    spec.write_text(
        '[[row]]\nalgorithm = "trpo"\nenv = "CartPole-v1"\nsteps = 512\n'
        f'options = {{lanes = 2, workers = 1, reading = "ray", address = "{EVIL}"}}\n'
    )
    trained = []

    def run_all(jobs, n):
        trained.extend(jobs)
        return EndedRuns([], [], None)

    monkeypatch.setattr(bench, "run_all", run_all)
    assert rollpipe("bench", spec, "--dir", tmp_path / "bench") == 2
    assert f"Expected --address {EVIL}" in capsys.readouterr().err and not trained
    rollpipe("bench", spec, "--dir", tmp_path / "bench", "--address", EVIL)
    assert trained


@pytest.mark.parametrize("words", [[], ["--address", EVIL]])
def test_an_ablation_names_the_address_to_its_branches(stranger, tmp_path, monkeypatch, words):
    "A branch is resumed by a command, which asks for the address as any other one does."
    trained = {}

    def run_all(commands, n):
        trained.update(commands)
        return EndedRuns([], ["all: not trained here"], None)

    monkeypatch.setattr(ablation, "run_all", run_all)
    asked = ["--at", 2, "--set", "max_kl=0.02", "--updates", 1, "--out", tmp_path / "out"]
    assert rollpipe("ablate", stranger, *asked, *words) == 2
    assert sorted(trained) == ["at2-0", "at2-0-max_kl=0.02"]
    for command in trained.values():
        assert command[command.index("--no-tensorboard") + 1 :] == words
