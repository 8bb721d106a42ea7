"`rollpipe tune`: the preset that it writes, what goes on after a kill, trials that fail, and what is refused."

import shlex
import sys
from pathlib import Path

import pytest
from command_line import process

from rollpipe.cli.main import build_parser, main
from rollpipe.settings import files
from rollpipe.settings.config import device_named
from rollpipe.settings.files import read_table
from rollpipe.tuning import tune
from rollpipe.tuning.tune import Choice, best_of, connections, ended_trials, open_study, try_one

SMALL = [
    "--steps",
    "64",
    "--n-envs",
    "2",
    "--n-steps",
    "16",
    "--minibatch",
    "16",
    "--hidden",
    "4",
    "--engine",
    "torch",
]
WORDS = ["tune", "ppo", "CartPole-v1", *SMALL, "--seeds", "7", "--evaluations", "2"]


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
    assert main([*WORDS, "--trials", "2"]) == 0
    out, preset = capsys.readouterr().out, "tuning/ppo-CartPole-v1/preset.toml"
    assert (
        f"2 trials, 0 failed; best: trial {best_of(study()).number}" in out
        and f"{preset} written" in out
    )
    assert (
        main(["train", "ppo", "CartPole-v1", "--config", preset, "--quiet", "--no-tensorboard"])
        == 0
    )
    found = read_table(here / "runs/ppo-CartPole-v1-s0/config.json")
    best = best_of(study()).params
    assert found["steps"] == 64 and {name: found["options"][name] for name in best} == best
    assert found["options"]["hidden"] == [4] and "n_envs" not in best
    found = best_of(study()).user_attrs["returns"][0]
    assert (
        f"# {found:.3g}: mean returns of 10 episodes after 64 steps, seeds 7"
        in (here / preset).read_text()
    )


def test_the_printed_command_trains_an_environment_that_a_module_registers(
    here, curves, monkeypatch, capsys
):
    curves(lambda options: [0.0])
    (here / "courtyard.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Yard-v0', 'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=9)\n"
    )
    monkeypatch.syspath_prepend(here)
    words = [
        "tune",
        "ppo",
        "Yard-v0",
        "--import",
        "courtyard",
        *SMALL,
        "--encoder",
        '{"images": "conv"}',
        "--trials",
        "1",
    ]
    assert main(words) == 0
    command = shlex.split(capsys.readouterr().out.rpartition("train with it:")[2])
    at = command.index("--seeds")
    command[at : at + 2] = []  # one seed is enough
    assert main([*command[1:], "--quiet", "--no-tensorboard"]) == 0
    found = read_table(here / "runs/ppo-Yard-v0-s0/config.json")
    assert found["imports"] == ["courtyard"] and found["options"]["encoder"] == {"images": "conv"}


@pytest.mark.parametrize("seeds, others", [("7", "0-4"), ("0,1", "2-6"), ("3-5", "6-10")])
def test_the_printed_command_has_seeds_that_the_search_has_not_seen(
    here, curves, capsys, seeds, others
):
    curves(lambda options: [0.0])
    assert main(["tune", "ppo", "CartPole-v1", *SMALL, "--trials", "1", "--seeds", seeds]) == 0
    assert f"--seeds {others}" in capsys.readouterr().out


@pytest.mark.slow_but_one
@pytest.mark.parametrize("words", [[], ["--preset", "none"]])
def test_the_preset_is_complete_whatever_the_package_has(here, curves, monkeypatch, words):
    "What the search took from a preset of the package is in the file, and what it did not take is not added to it."
    from rollpipe.runs.commands import config_from

    def shipped(**table):
        monkeypatch.setattr(files, "presets_of", lambda algorithm: {"CartPole-v1": table})

    shipped(decay_steps=5_000, lr=0.25, checkpoint_every=7)
    seen = []
    curves(lambda options: [float(len(seen.append(options) or seen))])
    assert main([*WORDS, *words, "--trials", "2"]) == 0
    for table in (dict(max_grad_norm=0.125), dict(decay_steps=9_000), {}):
        shipped(**table)
        for more in ([], ["--preset", "none"]):
            train = [
                "train",
                "ppo",
                "CartPole-v1",
                "--config",
                "tuning/ppo-CartPole-v1/preset.toml",
                *more,
            ]
            found = config_from(build_parser().parse_args(train))
            assert (
                found["options"] == seen[-1]
                and found["checkpoint_every"] == (20 if words else 7)
                and found["preset"] is None
            )


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_killed_search_goes_on(here):
    with process(*WORDS, "--trials", "1000") as child:
        first = next(line for line in child.stdout if line.startswith("trial 0"))
        child.kill()
        child.wait()
    before = {x.number: (x.value, x.params) for x in ended_trials(study())}
    assert first and 0 in before and not (here / "tuning/ppo-CartPole-v1/preset.toml").exists()
    assert main([*WORDS, "--trials", str(len(before) + 1)]) == 0
    after = ended_trials(study())
    assert len(after) == len(before) + 1 and not any(
        x.state.name == "RUNNING" for x in study().trials
    )
    assert {x.number: (x.value, x.params) for x in after if x.number in before} == before
    assert (here / "tuning/ppo-CartPole-v1/preset.toml").exists()


def test_fewer_trials_than_the_study_has(here, curves, capsys):
    "The file may be that of a run, whose other options do not matter."
    curves(lambda options: [0.0])
    (here / "run.toml").write_text("keep = 3")
    for n in (2, 1):
        assert main([*WORDS, "--config", "run.toml", "--trials", str(n)]) == 0
    assert (
        "ppo on CartPole-v1: 2 trials are over, and --trials asks for 1, in tuning"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_processes_share_the_trials(here):
    assert main([*WORDS, "--trials", "3", "--jobs", "2"]) == 0
    params = [x.params for x in ended_trials(study())]
    assert len(params) == 3 and all(a != b for k, a in enumerate(params) for b in params[:k])


@pytest.mark.slow
def test_a_trial_that_fails_is_recorded_and_the_search_goes_on(curves, capsys):
    def curve(options):
        if options["clip"] == 0.1:
            raise ValueError(f"clip of {options['clip']}")
        return [1.0, options["lr"]]

    curves(curve)
    assert main([*WORDS, "--trials", "8"]) == 0
    failed = [x for x in study().trials if x.state.name == "FAIL"]
    assert failed and all(
        x.user_attrs["error"] == f"ValueError: clip of {x.params['clip']}" for x in failed
    )
    assert f"8 trials, {len(failed)} failed" in capsys.readouterr().out and len(failed) < 8
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
    assert main([*WORDS, "--trials", "2"]) == 2
    assert (
        "no trial is complete, 2 failed; the first error: ValueError: never"
        in capsys.readouterr().err
    )
    assert not list(here.rglob("*.toml"))


@pytest.mark.slow_but_one
@pytest.mark.parametrize("seeds", [1, 2])
def test_a_poor_curve_ends_early(curves, seeds):
    begun = []

    def curve(options):
        begun.append(options)
        return [100.0 - 10 * len(begun)] * (6 * seeds)

    curves(curve)
    assert main([*WORDS, "--evaluations", "6", "--seeds", f"7-{6 + seeds}", "--trials", "7"]) == 0
    trials = study().trials
    assert [x.state.name for x in trials] == ["COMPLETE"] * 5 + ["PRUNED"] * 2
    assert all(
        len(x.intermediate_values) == 3 for x in trials[5:]
    )  # a third of the first training is free


@pytest.mark.slow_but_one
@pytest.mark.parametrize("at, code", [(1, 130), (3, 130)])
def test_an_interrupt_keeps_what_is_over_and_writes_the_best(here, curves, capsys, at, code):
    begun = []

    def curve(options):
        begun.append(options)
        if len(begun) == at:
            raise KeyboardInterrupt
        return [float(len(begun))]

    curves(curve)
    assert main([*WORDS, "--trials", "5"]) == code
    assert (here / "tuning/ppo-CartPole-v1/preset.toml").exists() == (at > 1)
    assert (
        "the same command goes on" in capsys.readouterr().err
        and len(ended_trials(study())) == at - 1
    )
    assert main([*WORDS, "--trials", "5"]) == 0
    assert len(ended_trials(study())) == 5 and begun[at]["lr"] == begun[at - 1]["lr"]  # tried again
    assert ("replaced" in capsys.readouterr().out) == (at > 1)


def test_without_optuna_the_error_says_what_to_install(here, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main([*WORDS, "--trials", "1"]) == 2
    assert "pip install 'rollpipe[tune]'" in capsys.readouterr().err and not list(here.iterdir())


@pytest.mark.slow
def test_what_cannot_be_right_is_refused(here, curves, capsys):
    def refused(text, *words):
        assert main([*WORDS, "--trials", "1", *words]) == 2
        assert text in capsys.readouterr().err

    refused("an integer trials >= 1", "--trials", "0")
    refused("an integer jobs >= 1", "--jobs", "0")
    refused("seeds", "--seeds", "five")
    refused(
        "workers: rollpipe tune trains in its own process. Expected workers=0, and --jobs N for N trials at a time, got 2",
        "--lanes",
        "2",
        "--workers",
        "2",
    )
    refused(
        "reading: rollpipe tune trains in its own process. Expected reading=processes",
        "--reading",
        "ray",
    )
    refused(
        "address: rollpipe tune trains in its own process. Expected address=None",
        "--address",
        "auto",
    )
    for words in (
        "--stop-after 1min",
        "--patience 2",
        "--eval-every 9",
        "--keep 3",
        "--video-every 2",
        "--exact",
        "--record",
        "--name x",
    ):
        flag = words.split()[0]
        name = flag.strip("-").replace("-", "_")
        refused(
            f"{flag}: a trial leaves no run, and ends only after its steps or by its --evaluations. Expected {name}=",
            *words.split(),
        )
    refused("lag: rollpipe tune trains in its own process. Expected lag=0", "--lag", "1")
    assert not list(here.iterdir())
    (here / "mine.toml").write_text("lr = 1")
    refused(
        "mine.toml is there already. Expected another --out, or --overwrite", "--out", "mine.toml"
    )
    curves(lambda options: [1.0])
    assert main([*WORDS, "--trials", "1", "--out", "mine.toml", "--overwrite"]) == 0
    assert "Found by rollpipe tune" in (here / "mine.toml").read_text()
    refused("steps: the study in tuning/ppo-CartPole-v1 has other settings", "--steps", "128")
    (here / "tuning/ppo-CartPole-v1/study.db").write_bytes(b"no database" * 100)
    refused("study.db: cannot be used as the file of a study")


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
    assert main([*WORDS, "--trials", "1", "--threads", str(before + 1), "--device", "auto"]) == 0
    assert seen == [(before + 1, device_named("auto"))] * 2 and torch.get_num_threads() == before


@pytest.mark.parametrize(
    "words, is_searched",
    [
        ([], False),
        (["--preset", "none"], True),
        (["--tau", "none"], True),
        (["--preset", "none", "--tau", "0.5"], False),
    ],
)
def test_an_option_that_is_not_read_is_not_searched(words, is_searched):
    "The preset of DQN for CartPole sets `tau`, with which there are no copies whose number of steps could matter."
    args = build_parser().parse_args(["tune", "dqn", "CartPole-v1", *words])
    args.words = []
    assert ("target_every" in tune.Search(args).space) == is_searched


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
