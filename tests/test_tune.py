"`rollpipe tune`: the preset that it writes, what goes on after a kill, trials that fail, and what is refused."

import itertools
import json
import sys
from pathlib import Path

import pytest
from command_line import QUIET, error_of, process, rollpipe, words_of

from rollpipe.cli.main import build_parser, main
from rollpipe.runs.commands import config_from
from rollpipe.settings import files
from rollpipe.settings.config import device_named
from rollpipe.settings.files import read_table
from rollpipe.tuning import tune
from rollpipe.tuning.tune import Choice, best_of, connections, ended_trials, open_study, try_one

SMALL = "--steps 64 --n-envs 2 --n-steps 16 --minibatch 16 --hidden 4 --engine torch"


POLE = f"tune ppo CartPole-v1 {SMALL}"

WORDS = f"{POLE} --seeds 7 --evaluations 2"


PRESET = "tuning/ppo-CartPole-v1/preset.toml"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def curves(monkeypatch):
    "A function that replaces the training: `curve(options)` gives the returns that a trial reports, or raises."

    def use(curve):
        def returns_of(configs, n, report):
            values = curve(configs[0]["options"])
            for k, value in enumerate(values):
                report(value, k)
            return values[-1:]

        monkeypatch.setattr(tune, "returns_of", returns_of)

    return use


def study(folder=Path("tuning/ppo-CartPole-v1")):
    import optuna

    storage = optuna.storages.RDBStorage(
        "sqlite://", engine_kwargs=connections(folder / "study.db")
    )
    return optuna.load_study(study_name="rollpipe", storage=storage)


@pytest.mark.slow
def test_training_accepts_the_preset(here, capsys):
    assert rollpipe(f"{WORDS} --trials 2") == 0
    out = capsys.readouterr().out
    best = best_of(study())
    assert f"2 trials, 0 failed; best: trial {best.number}" in out and f"{PRESET} written" in out
    assert rollpipe(f"train ppo CartPole-v1 --config {PRESET} {QUIET}") == 0
    found = read_table(here / "runs/ppo-CartPole-v1-s0/config.json")
    assert found["steps"] == 64 and found["options"].items() >= best.params.items()
    assert found["options"]["hidden"] == [4] and "n_envs" not in best.params
    value = best.user_attrs["returns"][0]
    told = f"# {value:.3g}: mean returns of 10 episodes after 64 steps, seeds 7"
    assert told in (here / PRESET).read_text()


@pytest.mark.slow
def test_the_printed_command_trains_an_environment_that_a_module_registers(
    here, curves, monkeypatch, capsys
):
    curves(lambda options: [0.0])
    (here / "courtyard.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Yard-v0', 'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=9)\n"
    )
    monkeypatch.syspath_prepend(here)
    encoder = dict(images="conv")
    words = f"tune ppo Yard-v0 --import courtyard {SMALL} --encoder '{json.dumps(encoder)}'"
    assert rollpipe(f"{words} --trials 1") == 0
    command = words_of(capsys.readouterr().out.rpartition("train with it:")[2])[1:]
    at = command.index("--seeds")
    command[at : at + 2] = []  # one seed is enough
    assert main([*command, *QUIET.split()]) == 0
    found = read_table(here / "runs/ppo-Yard-v0-s0/config.json")
    assert found["imports"] == ["courtyard"] and found["options"]["encoder"] == encoder


@pytest.mark.parametrize("seeds, others", [("7", "0-4"), ("0,1", "2-6"), ("3-5", "6-10")])
def test_the_printed_command_has_seeds_that_the_search_has_not_seen(
    here, curves, capsys, seeds, others
):
    curves(lambda options: [0.0])
    assert rollpipe(f"{POLE} --trials 1 --seeds {seeds}") == 0
    out = capsys.readouterr().out
    assert f"--seeds {others}" in out and "1 trial, of which 0 are over" in out
    assert "1 trial, 0 failed" in out and "1 trials" not in out


@pytest.mark.slow_but_one
@pytest.mark.parametrize("words, every", [("", 7), ("--preset none", 20)])
def test_the_preset_is_complete_whatever_the_package_has(here, curves, monkeypatch, words, every):
    "What the search took from a preset of the package is in the file, and what it did not take is not added to it."

    def shipped(**table):
        monkeypatch.setattr(files, "presets_of", lambda algorithm: {"CartPole-v1": table})

    shipped(decay_steps=5_000, lr=0.25, checkpoint_every=7)
    seen = []
    curves(lambda options: [float(len(seen.append(options) or seen))])
    assert rollpipe(f"{WORDS} {words} --trials 2") == 0
    for table in (dict(max_grad_norm=0.125), dict(decay_steps=9_000), {}):
        shipped(**table)
        for more in ("", "--preset none"):
            train = f"train ppo CartPole-v1 --config {PRESET} {more}"
            found = config_from(build_parser().parse_args(train.split()))
            assert found["options"] == seen[-1] and found["preset"] is None
            assert found["checkpoint_every"] == every


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_killed_search_goes_on(here):
    with process(f"{WORDS} --trials 1000") as child:
        assert any(line.startswith("trial 0") for line in child.stdout)
        child.kill()
        child.wait()

    def ended():
        return {x.number: (x.value, x.params) for x in ended_trials(study())}

    before = ended()
    assert 0 in before and not (here / PRESET).exists()
    assert rollpipe(f"{WORDS} --trials {len(before) + 1}") == 0
    after = ended()
    assert len(after) == len(before) + 1 and before.items() <= after.items()
    assert not any(x.state.name == "RUNNING" for x in study().trials)
    assert (here / PRESET).exists()


def test_fewer_trials_than_the_study_has(here, curves, capsys):
    "The file may be that of a run, whose other options do not matter."
    curves(lambda options: [0.0])
    (here / "run.toml").write_text("keep = 3")
    for n in (2, 1):
        assert rollpipe(f"{WORDS} --config run.toml --trials {n}") == 0
    told = "ppo on CartPole-v1: 2 trials are over, and --trials asks for 1, in tuning"
    assert told in capsys.readouterr().out


@pytest.mark.slow
def test_processes_share_the_trials(here):
    assert rollpipe(f"{WORDS} --trials 3 --jobs 2") == 0
    params = [x.params for x in ended_trials(study())]
    assert len(params) == 3
    assert all(a != b for a, b in itertools.combinations(params, 2))


@pytest.mark.slow
def test_a_trial_that_fails_is_recorded_and_the_search_goes_on(curves, capsys):
    def curve(options):
        if options["clip"] == 0.1:
            raise ValueError(f"clip of {options['clip']}")
        return [1.0, options["lr"]]

    curves(curve)
    assert rollpipe(f"{WORDS} --trials 8") == 0
    errors = [x.user_attrs["error"] for x in study().trials if x.state.name == "FAIL"]
    assert 0 < len(errors) < 8 and {*errors} == {"ValueError: clip of 0.1"}
    clips = [x.params["clip"] == 0.1 for x in study().trials]
    assert sum(clips) == len(errors)
    assert f"8 trials, {len(errors)} failed" in capsys.readouterr().out
    assert best_of(study()).params["clip"] != 0.1


def test_a_choice_may_be_of_texts_or_have_none(here):
    told = {
        try_one(
            open_study(here, {}, seed, 1),
            dict(a=Choice(["x"]), b=Choice([None]), c=Choice([1 / 3])),
            lambda *_: [1.0],
        )
        for seed in (0, 1)
    }
    assert told == {f"trial {k}: return 1.0, a=x, b=None, c=0.333" for k in (0, 1)}


def test_if_all_fail_there_is_an_error_and_no_preset(here, curves, capsys):
    def curve(options):
        raise ValueError("never")

    curves(curve)
    assert rollpipe(f"{WORDS} --trials 2") == 2
    told = "no trial is complete, 2 failed; the first error: ValueError: never"
    assert told in capsys.readouterr().err and not list(here.rglob("*.toml"))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 2])
def test_a_poor_curve_ends_early(curves, seeds):
    "A third of the first training is free."
    begun = []

    def curve(options):
        begun.append(options)
        return [100.0 - 10 * len(begun)] * (6 * seeds)

    curves(curve)
    assert rollpipe(f"{POLE} --evaluations 6 --seeds 7-{6 + seeds} --trials 7") == 0
    trials = study().trials
    assert [x.state.name for x in trials] == ["COMPLETE"] * 5 + ["PRUNED"] * 2
    assert [len(x.intermediate_values) for x in trials[5:]] == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupt_keeps_what_is_over_and_writes_the_best(here, curves, capsys, at):
    begun = []

    def curve(options):
        begun.append(options)
        if len(begun) == at:
            raise KeyboardInterrupt
        return [float(len(begun))]

    curves(curve)
    assert rollpipe(f"{WORDS} --trials 5") == 130
    assert (here / PRESET).exists() == (at > 1)
    assert "the same command goes on" in capsys.readouterr().err
    assert len(ended_trials(study())) == at - 1
    assert rollpipe(f"{WORDS} --trials 5") == 0
    assert len(ended_trials(study())) == 5 and begun[at]["lr"] == begun[at - 1]["lr"]  # tried again
    assert ("replaced" in capsys.readouterr().out) == (at > 1)


def test_without_optuna_the_error_says_what_to_install(here, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert "pip install 'rollpipe[tune]'" in error_of(capsys, f"{WORDS} --trials 1")
    assert not list(here.iterdir())


# Options of a search => what is told

OWN_PROCESS = "rollpipe tune trains in its own process. Expected"


NO_RUN = "a trial leaves no run, and ends only after its steps or by its --evaluations. Expected"


REFUSED = {
    "--trials 0": "an integer trials >= 1",
    "--jobs 0": "an integer jobs >= 1",
    "--seeds five": "seeds",
    "--lanes 2 --workers 2": f"workers: {OWN_PROCESS} workers=0, and --jobs N for N trials at a time, got 2",
    "--reading ray": f"reading: {OWN_PROCESS} reading=processes",
    "--address auto": f"address: {OWN_PROCESS} address=None",
    "--lag 1": f"lag: {OWN_PROCESS} lag=0",
    "--stop-after 1min": f"--stop-after: {NO_RUN} stop_after=",
    "--patience 2": f"--patience: {NO_RUN} patience=",
    "--eval-every 9": f"--eval-every: {NO_RUN} eval_every=",
    "--keep 3": f"--keep: {NO_RUN} keep=",
    "--video-every 2": f"--video-every: {NO_RUN} video_every=",
    "--exact": f"--exact: {NO_RUN} exact=",
    "--record": f"--record: {NO_RUN} record=",
    "--name x": f"--name: {NO_RUN} name=",
}


@pytest.mark.parametrize("words, told", REFUSED.items())
def test_what_cannot_be_right_is_refused(here, capsys, words, told):
    assert told in error_of(capsys, f"{WORDS} --trials 1 {words}")
    assert not list(here.iterdir())


def test_files_that_belong_to_something_else_are_refused(here, curves, capsys):
    words = f"{WORDS} --trials 1 --out mine.toml"
    (here / "mine.toml").write_text("lr = 1")
    told = "mine.toml is there already. Expected another --out, or --overwrite"
    assert told in error_of(capsys, words)
    curves(lambda options: [1.0])
    assert rollpipe(f"{words} --overwrite") == 0
    assert "Found by rollpipe tune" in (here / "mine.toml").read_text()
    told = "steps: the study in tuning/ppo-CartPole-v1 has other settings"
    assert told in error_of(capsys, f"{WORDS} --trials 1 --steps 128")
    (here / "tuning/ppo-CartPole-v1/study.db").write_bytes(b"no database" * 100)
    told = "study.db: cannot be used as the file of a study"
    assert told in error_of(capsys, f"{WORDS} --trials 1")


@pytest.mark.slow
def test_a_trial_has_the_threads_and_the_device_of_its_configuration(here, monkeypatch):
    import torch

    from rollpipe.agents import parallel_evaluation

    seen = []
    before = torch.get_num_threads()
    evaluate = parallel_evaluation.evaluate

    def see(*args, device, **kwargs):
        seen.append((torch.get_num_threads(), device))
        return evaluate(*args, device=device, **kwargs)

    monkeypatch.setattr(parallel_evaluation, "evaluate", see)
    assert rollpipe(f"{WORDS} --trials 1 --threads {before + 1} --device auto") == 0
    assert seen == [(before + 1, device_named("auto"))] * 2 and torch.get_num_threads() == before


@pytest.mark.parametrize(
    "words, is_searched",
    {
        "": False,
        "--preset none": True,
        "--tau none": True,
        "--preset none --tau 0.5": False,
    }.items(),
)
def test_an_option_that_is_not_read_is_not_searched(words, is_searched):
    "The preset of DQN for CartPole sets `tau`, with which there are no copies whose number of steps could matter."
    args = build_parser().parse_args(f"tune dqn CartPole-v1 {words}".split())
    args.words = []
    assert ("target_every" in tune.Search(args).space) == is_searched


@pytest.mark.slow
def test_the_seed_decides_what_is_tried(here):
    from rollpipe.tuning.tune import Range

    def tried(name, seed):
        (here / name).mkdir()
        search = open_study(here / name, {}, seed, 1)
        return [Range(1e-4, 1.0).ask(search.ask(), "lr") for _ in range(3)]

    assert tried("a", 1) == tried("b", 1) != tried("c", 2)


@pytest.mark.parametrize("name", ["what?", "a{b}", "50%25", "a#b"])
def test_the_name_of_a_folder_is_no_address(here, name):
    "`what?/study.db` was the file `what`, and the folder `a{b}` was refused."
    (here / name).mkdir()
    open_study(here / name, {}, 1, 1).ask()
    assert [*here.iterdir()] == [here / name] and [*(here / name).iterdir()] == [
        here / name / "study.db"
    ]
    assert len(study(here / name).trials) == 1
