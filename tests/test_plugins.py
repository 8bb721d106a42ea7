"Algorithms of others: from entry points of installed packages and from imported modules."

import importlib
import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from command_line import error_of, rollpipe, run_command, script
from gallery import refused

from rollpipe.agents import A2C, ActorCriticLearner
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import on_policy
from rollpipe.pipes.data.errors import CheckpointError, DataError
from rollpipe.runs import load_agent
from rollpipe.runs.folder import load_run
from rollpipe.settings import algorithms
from rollpipe.settings.algorithms import (
    ALGORITHMS,
    Algorithm,
    is_algorithm,
    load_plugins,
    options_for,
    register_algorithm,
)

SMALL = "--n-envs 4 --n-steps 16 --hidden 8 --critic-hidden 8 --steps 128 --quiet --no-tensorboard"

MODULE = """
from rollpipe.agents import A2C
from rollpipe.settings.algorithms import Algorithm
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import on_policy


class Shy(A2C):
    "A2C that learns little."
    def __init__(self, actor, critic=None, *,
        shyness: float = 0.5,         # factor of every advantage
        milestones: tuple = (3, 7),   # a tuple that is no list of layers
        **options,
    ):
        super().__init__(actor, critic, **options)
        self.shyness = shyness

    def update(self, batch): return {**super().update(batch._replace(adv=self.shyness*batch.adv)), "shy/factor": self.shyness}


algorithm = Algorithm(Shy, on_policy, MLPPolicy, Critic, dict(n_steps=16))
"""

REGISTERS = (
    MODULE
    + "\nfrom rollpipe.settings.algorithms import register_algorithm\nregister_algorithm('shy', algorithm)\n"
)


class Mine(A2C):
    "An algorithm of the test's own."


mine = Algorithm(Mine, on_policy, MLPPolicy, Critic)

no_algorithm = A2C


class FromThePage(ActorCriticLearner):
    "The learner of docs/howto/own_algorithm.md, without more than its loss and another default."

    lr: float = 1e-3

    def loss(self, batch):
        policy = -(batch.adv * self.actor.replay(batch)["logp"])[batch.valid].mean()
        return policy + self.c_value * (self.critic(batch.state.obs[:-1]) - batch.ret)[
            batch.valid
        ].square().mean(), {}


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    known = dict(ALGORITHMS)
    yield
    ALGORITHMS.clear()
    ALGORITHMS.update(known)
    algorithms._tried.clear()


def installed(monkeypatch, **points):
    "Pretend that packages with these entry points are installed."
    points = [
        EntryPoint(name.replace("_", "-"), value, "rollpipe.algorithms")
        for name, value in points.items()
    ]
    monkeypatch.setattr(
        algorithms, "entry_points", lambda group: [p for p in points if p.group == group]
    )


def test_the_learner_on_the_page_about_algorithms_has_its_options_on_the_command_line(
    tmp_path, monkeypatch
):
    page = Path(__file__).resolve().parents[1] / "docs" / "howto" / "own_algorithm.md"
    texts = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    text = next(text for text in texts if "(ActorCriticLearner)" in text)
    (tmp_path / "of_the_page.py").write_text(text.partition("\nagent = ")[0])
    monkeypatch.syspath_prepend(tmp_path)
    learner = importlib.import_module("of_the_page").GoodSurprises
    register_algorithm("page", Algorithm(learner, on_policy, MLPPolicy, Critic))
    run = tmp_path / "run"
    assert rollpipe(f"train page CartPole-v1 --lr 0.002 --c-value .25 --out {run} {SMALL}") == 0
    assert {"lr": 0.002, "c_value": 0.25}.items() <= load_run(run).config["options"].items()


# -- registering -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, found, told",
    [
        ("ppo", mine, "name 'ppo' is taken.*rollpipe.agents.policy_gradient.PPO"),
        ("Mine!", mine, "cannot be the name.*'Mine!'"),
        (3, mine, "cannot be the name.*3"),
        ("mine", None, "no algorithm"),
        ("mine", tuple(mine), "no algorithm"),
        ("mine", mine._replace(learner=3), "learner"),
        ("mine", mine._replace(pipeline="x"), "pipeline"),
        ("mine", mine._replace(policy=object), "policy.*for_env"),
        ("mine", mine._replace(critic=3), "critic.*for_env"),
        (
            "mine",
            mine._replace(defaults=dict(n_step=3)),
            "n_step.*one of .*n_steps|default of 'mine'.*n_step",
        ),
    ],
)
def test_what_cannot_be_registered_is_told(name, found, told):
    before = dict(ALGORITHMS)
    refused(told, register_algorithm, name, found)
    assert ALGORITHMS == before


def test_a_module_may_be_imported_again_but_not_take_a_name_of_another():
    register_algorithm("mine", mine)
    again = type("Mine", (A2C,), dict(__module__=Mine.__module__, __qualname__="Mine"))
    register_algorithm("mine", mine._replace(learner=again))  # as after a reload
    assert ALGORITHMS["mine"].learner is again
    with pytest.raises(DataError, match="'mine' is taken"):
        register_algorithm("mine", mine._replace(learner=A2C))


# -- entry points ------------------------------------------------------------------------------------------------------


def test_entry_points_are_loaded_and_those_that_fail_are_told_once(monkeypatch, caplog):
    here = __name__
    points = dict(mine="mine", none="no_algorithm", ppo="mine", attr="missing")
    points = {name: f"{here}:{x}" for name, x in points.items()}
    installed(monkeypatch, gone="no_such_module_here:x", **points)
    load_plugins()
    load_plugins()
    assert is_algorithm("mine") and not is_algorithm("gone")
    assert ALGORITHMS["ppo"].learner.__name__ == "PPO" and len(caplog.messages) == 4
    for name, why in {
        "gone": "ModuleNotFoundError",
        "none": "no algorithm",
        "ppo": "is taken",
        "attr": "AttributeError",
    }.items():
        assert sum(repr(name) in text and why in text for text in caplog.messages) == 1, name


def test_an_installed_algorithm_is_on_the_command_line_and_its_runs_need_nothing_else(
    monkeypatch, tmp_path
):
    installed(monkeypatch, mine=f"{__name__}:mine")
    run = tmp_path / "run"
    assert rollpipe(f"train mine CartPole-v1 --out {run} {SMALL}") == 0
    assert "imports" not in json.loads((run / "config.json").read_text())
    del ALGORITHMS["mine"]
    algorithms._tried.clear()  # as in a new process
    assert rollpipe(f"evaluate {run} --episodes 1") == 0
    del ALGORITHMS["mine"]
    told = "the algorithm 'mine' is not known here.*installed package"
    refused(told, load_run, run, error=CheckpointError)


# -- --import ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_imported_algorithm_is_trained_resumed_evaluated_and_exported(tmp_path):
    (tmp_path / "shy.py").write_text(REGISTERS)
    words = f"train shy CartPole-v1 --import shy --shyness .25 --out run {SMALL}"
    trained = script(tmp_path, words)
    assert trained.returncode == 0, trained.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    named = (config["algorithm"], config["imports"], config["options"]["shyness"])
    assert named == ("shy", ["shy"], 0.25)
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["shy/factor"] == 0.25
    command = trained.stdout.splitlines()[-1].partition("rollpipe ")[2]
    evaluated = run_command(tmp_path, f"{command} --episodes 1")
    assert evaluated.returncode == 0 and evaluated.stdout.startswith("return "), evaluated.stderr
    resumed = "train --resume run --steps 192 --quiet --no-tensorboard"
    for words in (resumed, "export run --to torchscript"):
        done = run_command(tmp_path, f"{words} --import=shy")
        assert done.returncode == 0, done.stderr
    without = run_command(tmp_path, "evaluate run")
    assert without.returncode == 2 and without.stderr.count("\n") == 1
    assert "'shy' is not known here" in without.stderr and "--import shy" in without.stderr


@pytest.mark.parametrize(
    "module, text, told",
    [
        ("half_written", "raise ValueError('half written')", "half written"),
        ("importing", "import no_such_module_here", "no_such_module_here"),
        ("taking", REGISTERS.replace("'shy'", "'ppo'"), "'ppo' is taken"),
        ("registering_nothing", "x = 3", "invalid choice: 'shy'"),
    ],
)
def test_a_module_that_does_not_register_is_one_clear_line(
    module, text, told, tmp_path, monkeypatch, capsys
):
    "Nothing is begun."
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    err = error_of(capsys, f"train shy CartPole-v1 --import {module}")
    assert told in err and err.count("\n") == 1
    assert [path.suffix for path in tmp_path.iterdir() if path.is_file()] == [".py"]


def test_a_learner_of_ones_own_has_the_options_of_its_base_on_the_command_line(tmp_path):
    register_algorithm("page", Algorithm(FromThePage, on_policy, MLPPolicy, Critic))
    defaults = {option.name: option.default for option in options_for("page")}
    assert {"lr": 1e-3, "c_value": 0.5, "decay_steps": 0}.items() <= defaults.items()
    typed = dict(lr=0.01, c_value=0.25, critic_lr=0.002, decay_steps=256, max_grad_norm=None)
    words = " ".join(f"--{name.replace('_', '-')} {x}" for name, x in typed.items())
    assert rollpipe(f"train page CartPole-v1 {SMALL} {words} --out", tmp_path / "run") == 0
    agent = load_agent(tmp_path / "run")
    assert {name: getattr(agent, name) for name in typed} == typed
