"Learning curves in a notebook."

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from gallery import refused

from rollpipe.results.collect import Result, differing_options
from rollpipe.runs.evaluations import read_evaluations
from rollpipe.runs.plots import group_runs, learning_curve, smooth, svg
from rollpipe.traces.history import History

FIRST_CELL = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
found = shell.run_cell(f"from rollpipe.runs.plots import learning_curve; learning_curve({sys.argv[1]!r})")
assert "matplotlib.pyplot" not in sys.modules
shell.display_formatter.active_types = shell.display_formatter.format_types  # as in a notebook
shell.display_formatter.active_types = shell.display_formatter.format_types  # as in a notebook
shown = shell.display_formatter.format(found.result)[0]
print("shown:", sorted(shown), shown.get("image/png", b"")[:4])
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(algorithm="trpo", env="Toy", options={})))
    (tmp_path / "metrics.jsonl").write_text(
        '{"steps": 1, "return_mean": 1}\n{"steps": 2, "return_mean": 2}\n'
    )
    return tmp_path


@pytest.mark.slow
def test_the_first_cell_of_a_notebook_shows_a_picture(run):
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CELL, str(run)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "image/png" in done.stdout and "PNG" in done.stdout


def test_the_band_is_the_deviation_that_a_report_gives(tmp_path):
    "That of a sample. The band was that of a population, which is narrower: 0.82 in place of 1 for 1, 2, 3."
    for seed in range(3):
        (folder := tmp_path / f"seed{seed}").mkdir()
        (folder / "config.json").write_text(
            json.dumps(dict(algorithm="trpo", env="Toy", seed=seed, options={}))
        )
        (folder / "metrics.jsonl").write_text(
            "".join(f'{{"steps": {n}, "return_mean": {seed + 1}}}\n' for n in (1, 2))
        )
    (band,) = learning_curve(sorted(tmp_path.iterdir()), band="std").axes[0].collections
    y = band.get_paths()[0].vertices[:, 1]
    assert (y.min(), y.max()) == pytest.approx((1, 3))
    assert not learning_curve(folder, band="std").axes[0].collections


def test_a_curve_can_be_pickled(run):
    assert pickle.loads(pickle.dumps(learning_curve(run)))._repr_png_()[:4] == b"\x89PNG"


def test_names_are_no_formulas_and_none_is_left_out(run):
    "A dollar sign would begin a formula, and matplotlib leaves out what begins with `_`."
    for name in ("_a", "b $\\frac$"):
        (run / name).mkdir()
        (run / name / "config.json").write_text(
            json.dumps(dict(algorithm="trpo", env="Toy", name=name))
        )
        (run / name / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    text = svg(learning_curve([run / "_a", run / "b $\\frac$"]), "x")
    assert "> _a</text>" in text and ">b $\\frac$</text>" in text


def planted(folder, records=(), history=(), **config):
    folder.mkdir()
    History(history).write(folder)
    config = {**dict(algorithm="ppo", env="Toy", options={}), **config}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


GAMMA = dict(options=dict(gamma=0.9), env_kwargs=dict(gamma=1))


BEGAN = dict(event="began", at=0, kept={}, inexact=None)


EDIT = dict(event="edited", at=1, insert="my:scaled", kwargs=dict(by=0.1))


ORIGIN = dict(BEGAN, event="forked", run="0", at=1, set={})


@pytest.mark.parametrize(
    "cases, expected, names",
    [
        # A name of one's own says nothing about environment and algorithm, and options of the run may change what is learned.
        (
            [
                dict(name="mine", **config)
                for config in (
                    dict(env="Toy"),
                    dict(env="Other"),
                    dict(algorithm="trpo"),
                    dict(intrinsic=0.1),
                    dict(intrinsic=0.5),
                    dict(intrinsic=0.0, seed=1),
                )
            ],
            "05 1 2 3 4",
            {"01": "mine, env=Toy; mine, env=Other", "05": "mine"},
        ),
        # An argument of the environment may have the name of an option, and a lag is no seed.
        (
            [
                dict(env_kwargs=dict(noise=0.1)),
                dict(env_kwargs=dict(noise=0.5)),
                GAMMA,
                dict(GAMMA, options=dict(gamma=0.99)),
                dict(GAMMA, env_kwargs=dict(gamma=2)),
                dict(workers=2, lag=0),
                dict(workers=2, lag=1),
                dict(lag=1),
            ],
            "0 1 2 3 4 57 6",
            {"01": "ppo Toy, env_kwargs noise=0.1; ppo Toy, env_kwargs noise=0.5"},
        ),
        # An inserted pipe and other noise make no seeds.
        (
            [
                {},
                dict(seed=1),
                dict(history=[BEGAN, EDIT]),
                dict(history=[dict(ORIGIN, noise=1)]),
                dict(history=[ORIGIN]),
            ],
            "014 2 3",
            {"02": "ppo Toy, inserted=none; ppo Toy, inserted=my:scaled(by=0.1)"},
        ),
    ],
)
def test_what_is_no_seed_is_a_line_of_its_own(cases, expected, names, tmp_path):
    "The groups of runs that are expected, by their numbers, and the names of the groups of some."
    runs = [planted(tmp_path / str(k), **config) for k, config in enumerate(cases)]
    groups = ["".join(path.name for path in group) for group in group_runs(runs).values()]
    assert " ".join(groups) == expected
    for chosen, told in names.items():
        assert "; ".join(group_runs([runs[int(k)] for k in chosen])) == told


def test_what_differs_between_runs_is_told_with_its_place(tmp_path):
    cases = [GAMMA, dict(GAMMA, options=dict(gamma=0.99)), dict(GAMMA, env_kwargs=dict(gamma=2))]
    group = [Result(k, tmp_path, "", "", x, [], {}) for k, x in enumerate(cases)]
    told = {name: values for name, *values in differing_options([group])}
    assert told == {"gamma": ["0.9 | 0.99"], "env_kwargs gamma": ["1 | 2"]}


def test_a_damaged_history_is_named(tmp_path):
    bad = planted(tmp_path / "bad")
    (bad / "history.jsonl").write_text("3\n")
    refused("history.jsonl, line 1: not an event", group_runs, [bad])


def drawn(runs, **options):
    (line,) = learning_curve(runs, **options).axes[0].lines
    return np.array(line.get_data()).T.tolist()


def test_points_without_x_and_an_x_that_goes_back(tmp_path):
    "An average is over records in turn, and the line is drawn from left to right."
    records = [
        dict(steps=k, seconds=10 * k, length=x, y=y)
        for k, (x, y) in enumerate([(3, 30), (1, 10), (2, 20), (2, 40)])
    ]
    a, b = (planted(tmp_path / name, [*records, dict(steps=9, y=99)]) for name in "ab")
    for runs in ([a], [a, b]):
        assert drawn(runs, x="seconds", y="y")[0 :: len(drawn(runs, x="seconds", y="y")) - 1] == [
            [0, 30],
            [30, 40],
        ]
    assert drawn([a], x="length", y="y") == [[1, 10], [2, 20], [2, 40], [3, 30]]
    assert drawn([a], x="length", y="y", window=2) == [[1, 20], [2, 15], [2, 30], [3, 30]]
    for n in (0, -1):
        refused(f"an integer window >= 1, got window={n}", learning_curve, [a], y="y", window=n)


@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_a_huge_value_is_in_no_average_of_later_records(tmp_path, window):
    y = np.array([[0.1, 1e20, 0.3, 0.7, 2.0, 3.0], [1.0, -1e300, 0.0, 1e-9, 5.0, 6.0]])
    slow = [[row[max(0, k - window) : k].mean() for k in range(1, 7)] for row in y]
    assert np.allclose(smooth(y, window), slow, rtol=1e-15, atol=0) and smooth(
        y[:, :0], window
    ).shape == (2, 0)
    run = planted(tmp_path / "a", [dict(steps=k, y=x) for k, x in enumerate(y[0])])
    assert np.allclose(
        drawn([run], y="y", window=window), [*enumerate(slow[0])], rtol=1e-15, atol=0
    )


def test_an_axis_shows_what_is_below_zero(tmp_path):
    runs = [
        planted(tmp_path / str(k), [dict(steps=1, x=x, y=1.0), dict(steps=2, x=x + 4, y=2.0)])
        for k, x in enumerate((-3.0, 1.0))
    ]
    assert [learning_curve([run], x="x", y="y").axes[0].get_xlim()[0] for run in runs] == [-3, 0]


def test_the_last_evaluation_has_its_time(gallery):
    run = gallery.original("evaluated")
    found, steps = (np.array(drawn([run], x=x, y="eval_return_mean")) for x in ("seconds", "steps"))
    n_evaluations = len([r for r in read_evaluations(run) if r["kind"] == "training"])
    assert np.isfinite(found).all() and found.shape == steps.shape == (n_evaluations, 2)
    assert found[:, 1].tolist() == steps[:, 1].tolist()


def test_a_run_without_an_update_has_no_metrics(run):
    (run / "metrics.jsonl").write_text("")
    refused(
        "no such metric in this run. Expected the metrics of an update, got a run without an update",
        learning_curve,
        run,
    )
