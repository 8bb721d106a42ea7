"`rollpipe report`: the statistics against slow ones, odd folders, and a page that needs and runs nothing from elsewhere."

import csv
import itertools
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from command_line import rollpipe
from hypothesis import given
from hypothesis import strategies as st

from rollpipe.pipes.data.errors import DataError
from rollpipe.results.bench import BENCH
from rollpipe.results.collect import (
    differing_options,
    improvement,
    improvement_interval,
    interval,
    iqm,
    read_results,
    resampled,
    steps_to,
)
from rollpipe.results.report import diagnostics, page, write_report
from rollpipe.results.tables import (
    csv_text,
    curve_of,
    curves_text,
    draw_curves,
    draw_profiles,
    improvements,
    markdown,
    notes_of,
    on_scales,
    profile_of,
    together,
)
from rollpipe.runs.evaluations import evaluation_seed, write_evaluations
from rollpipe.runs.plots import DIAGNOSTICS, svg
from rollpipe.traces.history import History

HOSTILE = "_<script>alert('1')</script>&\"|`=[a](b)$\\frac$\\"


BEGAN = dict(event="began", at=0, kept={}, inexact=None)


def make_run(folder, means, seed=0, steps=20, history=(BEGAN,), **config):
    "A run with an evaluation every 10 steps. It is complete if it has come to its steps."
    folder.mkdir(parents=True)
    config = dict(
        dict(
            algorithm="trpo",
            env="CartPole-v1",
            seed=seed,
            steps=steps,
            eval_every="10 steps",
            options=dict(max_kl=0.01),
        ),
        **config,
    )
    (folder / "config.json").write_text(json.dumps(config))
    History(history).write(folder)
    (folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps(dict(steps=10 * i, updates=i, kl=0.01 * i, accepted=1)) + "\n"
            for i in (1, 2)
        )
    )
    about = dict(updates=1, seconds=2.5, std=0.0, returns=[0.0], lengths=[1], seed=1, resumes=0)
    records = [dict(about, kind="training", steps=10 * i, mean=x) for i, x in enumerate(means)]
    if records[-1]["steps"] >= steps:
        records += [dict(records[-1], kind=kind, mean=means[-1]) for kind in ("last", "best")]
    write_evaluations(folder, records)


def make_bench(folder, runs, published=(), **row):
    "A bench of one row; `runs` are the means of its runs, None for one that is not there."
    row = dict(
        dict(
            name="a",
            label="TRPO",
            algorithm="trpo",
            env="CartPole-v1",
            seeds=list(range(len(runs))),
            threshold=None,
            scale=None,
            command="rollpipe train trpo CartPole-v1",
        ),
        **row,
    )
    folder.mkdir()
    (folder / BENCH).write_text(
        json.dumps(dict(format=1, title="A bench", rows=[row], published=list(published)))
    )
    for seed, means in enumerate(runs):
        if means:
            make_run(folder / f"a-s{seed}", means, seed, env=row["env"])
    return folder


# -- statistics --------------------------------------------------------------------------------------------------------


def slow_iqm(values):
    "By definition: take away the least and the greatest, a quarter of them each, and average what is left."
    left = list(values)
    for _ in range(math.floor(len(values) * 0.25)):
        left.remove(min(left))
        left.remove(max(left))
    return sum(left) / len(left)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_the_interquartile_mean_is_what_is_left_without_the_outer_quarters(values):
    assert iqm(values) == pytest.approx(slow_iqm(values), rel=1e-9, abs=1e-6)


X = [3.0, -1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.5, 8.0]
Y = [10.0, 12.0, 11.0, 19.0, 7.0]


def test_what_scipy_computes():
    "SciPy 1.17.1: `trim_mean(x, .25)`, and `bootstrap(..., method='percentile', n_resamples=200_000)` of it, for one sample and for two."
    assert (iqm(X), iqm(Y)) == (pytest.approx(28.5 / 7), pytest.approx(11))
    np.testing.assert_allclose(interval([X], n=100_000), [2.2857142857, 6], atol=0.08)
    np.testing.assert_allclose(interval([X, Y], n=100_000), [4.3125, 7.625], atol=0.08)


def test_the_interval_is_that_of_all_resamples():
    "With four runs there are 4^4 resamples of equal probability, so the distribution is known."
    values = np.array([1.0, 2.0, 4.0, 100.0])
    every = np.array(
        [slow_iqm(values[list(chosen)]) for chosen in itertools.product(range(4), repeat=4)]
    )
    drawn = iqm(resampled([values], 200_000))
    for x in np.unique(every):
        assert (drawn == x).mean() == pytest.approx((every == x).mean(), abs=0.005)
    low, high = interval([values], level=0.8, n=100_000)
    assert (low, high) == pytest.approx(tuple(np.quantile(every, [0.1, 0.9])))


def test_resamples_of_several_tasks_keep_the_number_of_runs_of_each():
    draws = resampled([np.zeros(3), np.ones(5)], 100)
    assert draws.shape == (100, 8) and (draws.sum(-1) == 5).all()


TASKS = st.lists(
    st.tuples(*[st.lists(st.integers(-3, 3), min_size=1, max_size=6)] * 2), min_size=1, max_size=4
)


@given(TASKS)
def test_the_probability_of_improvement_against_a_count_of_pairs(tasks):
    each = [
        sum((x > y) + 0.5 * (x == y) for x in xs for y in ys) / (len(xs) * len(ys))
        for xs, ys in tasks
    ]
    xs, ys = ([np.array(task[k], float) for task in tasks] for k in (0, 1))
    assert improvement(xs, ys) == pytest.approx(np.mean(each)) and improvement(
        ys, xs
    ) == pytest.approx(1 - np.mean(each))


BOTH = [
    np.array([[3.0, -1, 4, 1, 5, 9], [2, 6, 5, 3.5, 8, 6]]),
    np.array([[1.0, 2, 4, 0, 3, 1], [5, 5, 7, 3.5, 1, 0]]),
]


def test_what_rliable_computes():
    "rliable 1.2.0, 50 000 resamples, two tasks of six runs: `probability_of_improvement`, and `create_performance_profile` of the first."
    (xs, ys) = map(list, BOTH)
    taus = np.array([0.0, 2, 3.5, 5, 8])
    assert improvement(xs, ys) == pytest.approx(0.6736111111) and improvement(
        xs[:1], ys[:1]
    ) == pytest.approx(2 / 3)
    np.testing.assert_allclose(
        improvement_interval(xs, ys, n=50_000), [0.4375, 0.88194444], atol=0.008
    )
    curve = profile_of("x", xs, taus)
    np.testing.assert_allclose(curve.middle, [0.91666667, 0.75, 0.58333333, 0.33333333, 0.08333333])
    np.testing.assert_allclose(curve.low, [0.75, 0.5, 0.33333333, 0.08333333, 0], atol=1e-6)
    np.testing.assert_allclose(curve.high, [1, 1, 0.83333333, 0.58333333, 0.25], atol=1e-6)


def test_the_interval_of_the_improvement_is_that_of_all_pairs_of_resamples():
    "Two runs against two: X and Y are drawn apart, so 16 pairs of resamples have equal probability."
    x = np.array([1.0, 3.0])
    y = np.array([2.0, 2.5])
    pairs = itertools.product(itertools.product(x, repeat=2), itertools.product(y, repeat=2))
    every = [np.mean([(a > b) + 0.5 * (a == b) for a in xs for b in ys]) for xs, ys in pairs]
    np.testing.assert_allclose(
        improvement_interval([x], [y], n=20_000), np.quantile(every, [0.025, 0.975])
    )
    assert improvement_interval([x], [y[:1]]) is None


def test_an_improvement_of_all_runs_has_an_interval_with_a_width():
    "The bound is the probability with which that many independent pairs all come out so in 2.5 % of the cases."
    few = np.array([1.0, 2.0, 3.0])
    many = np.array([5.0, 6.0, 7.0, 8.0])
    for n_tasks in (1, 4):
        low, high = improvement_interval([few] * n_tasks, [many] * n_tasks)
        assert low == 0 < high < 1 and (1 - high) ** (3 * n_tasks) == pytest.approx(0.025)
        assert improvement_interval([many] * n_tasks, [few] * n_tasks) == (1 - high, 1)
    assert improvement_interval([few * 0], [many * 0]) is None


@given(st.lists(st.integers(0, 4), max_size=8), st.integers(0, 4))
def test_steps_to_a_threshold_against_a_loop(returns, threshold):
    found = math.inf
    for i in range(len(returns)):
        if all(x >= threshold for x in returns[i:]):
            found = 10.0 * i
            break
    assert steps_to([10 * i for i in range(len(returns))], returns, threshold) == found


def test_seeds_of_evaluations_are_apart_from_those_of_the_training():
    of_training = {
        int(x)
        for seed in range(50)
        for resumes in range(4)
        for x in np.random.SeedSequence([seed, resumes]).generate_state(4)
    }
    of_evaluations = [
        evaluation_seed(seed, kind, steps)
        for seed in range(50)
        for kind in ("training", "last", "best")
        for steps in (0, 2048, 10**6)
    ]
    assert not of_training & set(of_evaluations) and len(set(of_evaluations)) == 450


# -- reports -----------------------------------------------------------------------------------------------------------


def test_numbers_of_a_report_are_those_of_its_runs(tmp_path, capsys):
    runs = [[0.0, 480.0, 400.0 + 10 * seed] for seed in range(5)]
    who = dict(
        algorithm="trpo",
        env="CartPole-v1",
        name="Somebody",
        mean=450.0,
        sd=20.0,
        of="last",
        source="a book",
    )
    folder = make_bench(tmp_path / "a", runs, [who])
    assert rollpipe("report", folder, "--out", tmp_path / "out") == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("| CartPole-v1"))
    low, high = interval([[r[-1] for r in runs]])
    assert (
        f"| 420 [{low:.0f}, {high:.0f}] | 420 +- 15.8 | Somebody: 450 +- 20.0 | 480 [480, 480] |"
        in line
    )
    assert "475: never (0 of 5)" in line
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        f"report.{x}" for x in ("csv", "html", "jsonl", "md", "png")
    ]
    rows = list(csv.DictReader((tmp_path / "out" / "report.csv").read_text().splitlines()))
    assert [float(row["last"]) for row in rows] == [r[-1] for r in runs] and {
        row["best_evaluation"] for row in rows
    } == {"480"}
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "report.jsonl").read_text().splitlines()
    ]
    for seed, returns in enumerate(runs):
        assert [
            x["mean"] for x in lines if x["seed"] == seed and x["kind"] == "training"
        ] == returns
    assert (tmp_path / "out" / "report.md").read_text() in out and "Somebody" in (
        tmp_path / "out" / "report.html"
    ).read_text()


def labelled(folder, rows):
    "A bench of two environments on scales; `rows` are the means of the runs of each label in each."
    make_bench(folder, [])
    bench = json.loads((folder / BENCH).read_text())
    about = bench["rows"][0]
    bench["rows"] = []
    for k, (label, env, means) in enumerate(rows):
        bench["rows"].append(
            dict(
                about,
                name=f"r{k}",
                label=label,
                env=env,
                seeds=list(range(len(means))),
                scale=[0, 100],
            )
        )
        for seed, mean in enumerate(means):
            make_run(folder / f"r{k}-s{seed}", [0.0, 0.0, mean], seed, env=env)
    (folder / BENCH).write_text(json.dumps(bench))
    return read_results(folder)


@pytest.mark.slow
def test_labels_are_compared_in_the_environments_that_both_have(tmp_path):
    rows = [
        ("A", "CartPole-v1", [10.0, 20.0]),
        ("A", "Acrobot-v1", [30.0, 40.0]),
        ("B", "CartPole-v1", [20.0, 5.0]),
        ("C", "Pendulum-v1", [1.0]),
    ]
    results = labelled(tmp_path / "a", rows)
    ((label, other, n, middle, bounds),) = improvements(results)
    assert (label, other, n, middle) == ("A", "B", 1, (1 + 1 + 0.5) / 4) and bounds[
        0
    ] < middle < bounds[1]
    told = f"P(A > B) = 0.62 [{bounds[0]:.2f}, {bounds[1]:.2f}] over 1 environment."
    assert (
        told in markdown(results)
        and "P(A &gt; B)" in page(results)
        and "share of runs above it" in page(results)
    )
    lines = draw_profiles(results).axes[0].lines
    assert [x.get_label() for x in lines] == ["A (4 runs)"]
    at = dict(zip(lines[0].get_xdata().round(6), lines[0].get_ydata()))
    assert (at[0], at[10], at[15], at[35], at[100]) == (1, 0.75, 0.75, 0.25, 0)
    bad = labelled(tmp_path / "b", [*rows[:2], ("B", "CartPole-v1", [20.0, math.nan])])
    assert not improvements(bad) and "P(A" not in markdown(bad).split("IQM is")[0]


def test_environments_with_more_runs_do_not_count_for_more(tmp_path):
    "Quantiles over all runs are defined for equal numbers of them. With others there is a note."
    results = labelled(
        tmp_path / "a", [("A", "CartPole-v1", [100.0] * 5), ("A", "Acrobot-v1", [0.0, 0.0])]
    )
    assert not on_scales(results) and draw_profiles(results) is None
    assert "A: no figure over all environments, because they have 5, 2 runs." in notes_of(results)
    ((_, n, middle, _),) = together(
        labelled(
            tmp_path / "b", [("A", "CartPole-v1", [100.0] * 2), ("A", "Acrobot-v1", [0.0, 0.0])]
        )
    )
    assert (n, middle) == (2, 0.5)


def test_a_profile_is_shown_as_far_down_as_its_returns(tmp_path):
    results = labelled(
        tmp_path / "a", [("A", "CartPole-v1", [-150.0, 50.0]), ("A", "Acrobot-v1", [0.0, 100.0])]
    )
    (axes,) = draw_profiles(results).axes
    assert axes.get_xlim()[0] == min(axes.lines[0].get_xdata()) == -150


def test_what_is_missing_unfinished_damaged_or_alone_is_said(tmp_path, capsys):
    folder = make_bench(tmp_path / "a", [[0.0, 1.0, 2.0], [0.0, 1.0], None, [0.0, 1.0, 2.0]])
    (folder / "a-s3" / "evaluations.jsonl").write_text("nonsense\n")
    assert rollpipe("report", folder) == 0
    out = capsys.readouterr().out
    for told in (
        "unfinished, and left out of the numbers: seed 1",
        "missing, and left out of the numbers: seed 2",
        "damaged.*seed 3.*line 1",
        "one run has no interval",
        r"\| 1 of 4 \|.*\| 2.00 \| 2.00 \|",
    ):
        assert re.search(told, out), told


def test_evaluations_that_a_run_does_not_have_are_no_obstacle(tmp_path):
    "One was never evaluated, and another one only at its end."
    for seed in (0, 1):
        make_run(tmp_path / f"s{seed}", [0.0, 1.0, 2.0], seed)
    path = tmp_path / "s0" / "evaluations.jsonl"
    path.write_text(
        "".join(
            f"{line}\n"
            for line in path.read_text().splitlines()
            if json.loads(line)["kind"] != "training"
        )
    )
    (tmp_path / "s1" / "evaluations.jsonl").unlink()
    results = read_results(tmp_path)
    assert math.isnan(results.rows[0].results[0].best) and csv_text(results)
    assert "seed 1 (it has no evaluations by steps)" in " ".join(notes_of(results))


def test_a_return_that_is_not_a_number_is_shown_and_never_averaged(tmp_path, capsys):
    folder = make_bench(
        tmp_path / "a", [[0.0, 1.0, 2.0], [0.0, 1.0, math.nan], [0.0, math.nan, 3.0]]
    )
    assert rollpipe("report", folder) == 0
    out = capsys.readouterr().out
    assert "| not a number (seed 1) | not a number (seed 1, 2) | not a number (seed 1) |" in out
    assert "+-" not in out and "so there is no mean: seed 1, 2" in out
    assert "NaN" not in (folder / "report.html").read_text()


@pytest.mark.slow
def test_a_line_that_was_cut_off_is_no_obstacle(tmp_path, capsys):
    folder = make_bench(tmp_path / "a", [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    path = folder / "a-s1" / "evaluations.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert rollpipe("report", folder) == 0
    assert "unfinished, and left out of the numbers: seed 1" in capsys.readouterr().out


class Page(HTMLParser):
    "The tags, attributes and texts of a page."

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.attrs = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attrs += attrs

    def handle_data(self, data):
        self.text += data


def test_a_page_needs_nothing_from_elsewhere_and_runs_nothing_of_its_names(tmp_path):
    who = dict(
        algorithm="trpo",
        env=HOSTILE,
        name=HOSTILE,
        mean=4.0,
        sd=None,
        of="best",
        source=f"https://example.org/{HOSTILE}",
    )
    folder = make_bench(
        tmp_path / "a",
        [[0.0, 1.0, 2.0], [0.0, 1.0, 3.0]],
        [who],
        label=HOSTILE,
        env=HOSTILE,
        command=HOSTILE,
    )
    (folder / "a-s1" / "config.json").write_text(
        json.dumps(
            dict(
                algorithm=HOSTILE,
                env=HOSTILE,
                steps=20,
                eval_every="10 steps",
                options={HOSTILE: HOSTILE},
            )
        )
    )
    assert rollpipe("report", folder) == 0
    text = (folder / "report.html").read_text()
    page = Page(text)
    shown = " ".join(page.text.split())  # a long label has several lines
    assert (
        page.tags.count("svg") >= 2
        and f"{HOSTILE} (2 runs)" in shown
        and f"{HOSTILE}: {HOSTILE}, best" in shown
    )
    assert not {"script", "img", "link", "iframe", "object", "a", "base", "form"} & set(page.tags)
    assert not [
        name for name, _ in page.attrs if name in ("src", "href", "action") or name.startswith("on")
    ]
    ids, used = (
        [x for name, x in page.attrs if name == "id"],
        re.findall(r'(?:url\(|href=")#(.*?)[")]', text),
    )
    assert (
        used
        and len(ids) == len(set(ids))
        and set(used) <= set(ids)
        and len(used) == text.count("url(") + text.count("href=")
    )
    assert (
        "@import" not in text
        and "@font-face" not in text
        and "default-src 'none'; style-src 'unsafe-inline'\"" in text
    )
    markdown = (folder / "report.md").read_text().partition("Commands:")[0]
    assert "<script" not in markdown and "[a](b)" not in markdown
    assert not any(
        cell[:1] in "=+@"
        for row in csv.reader((folder / "report.csv").read_text().splitlines())
        for cell in row
        if cell
    )


def test_what_is_wider_than_a_narrow_window_scrolls_by_itself(tmp_path):
    page = write_report(
        read_results(make_bench(tmp_path / "a", [[0.0, 1.0, 2.0], [0.0, 1.0, 3.0]])), tmp_path / "b"
    )[-1].read_text()
    parts = re.split(r'(<div class="wide">|</div>)', page)
    depth = 0
    for part in parts:
        depth += part.startswith("<div") - (part == "</div>")
        assert depth or not re.search("<svg|<table", part)
    style = re.search("<style>(.*?)</style>", page, re.S)[1]
    assert re.search(r"\.wide \{ overflow-x: auto", style) and re.search(
        r"pre \{[^}]*overflow-x: auto", style
    )
    assert (
        re.search(r"body \{[^}]*overflow-wrap: anywhere", style) and "max-width: 700px" in style
    )  # paths and names break


def test_the_same_runs_give_the_same_bytes_and_a_gap_where_a_return_is_not_a_number(tmp_path):
    folder = make_bench(tmp_path / "a", [[0.0, 1.0, math.nan, 2.0, 3.0]], threshold=475.0, steps=40)
    once, again = (
        [path.read_bytes() for path in write_report(read_results(folder), tmp_path / name)]
        for name in "bc"
    )
    assert once == again and b"threshold 475" in once[-1]
    assert (
        len(
            re.findall(
                rb'<path d="M [^M]*M [^M]*" clip-path="[^"]*" style="fill: none; stroke: #1f77b4',
                once[-1],
            )
        )
        == 1
    )


def test_a_seed_that_is_there_twice_is_said(tmp_path):
    "A copy of a run, or a fork without an edit, is no run of its own."
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_run(tmp_path / "runs" / name, [5, 6], seed)
    text = markdown(read_results(tmp_path / "runs"))
    assert (
        "counts a seed more than once, as if its runs were independent: 1." in text
        and "--seeds 1,2\n" in text
    )
    make_run(tmp_path / "other" / "a", [5, 6], 1), make_run(tmp_path / "other" / "b", [5, 6], 2)
    assert "more than once" not in markdown(read_results(tmp_path / "other"))


def test_plain_runs_are_reported_by_what_they_differ_in(tmp_path, capsys):
    for seed in (0, 1):
        make_run(tmp_path / f"x-s{seed}", [0.0, 1.0, 2.0 + seed], seed)
    make_run(tmp_path / "y-s0", [0.0, 1.0, 9.0], options=dict(max_kl=0.5))
    assert rollpipe("report", tmp_path) == 0
    out = capsys.readouterr().out
    assert re.search(r"trpo, max_kl=0.01 \| 2 of 2", out) and re.search(
        r"trpo, max_kl=0.5 \| 1 of 1", out
    )
    assert (
        "What differs" in (tmp_path / "report.html").read_text()
        and rollpipe("report", tmp_path / "y-s0") == 0
    )


def test_plain_runs_of_several_environments_are_compared_over_all_of_them(tmp_path):
    "Settings that differ between environments, as presets do, do not make other experiments."
    for k, env in enumerate(("CartPole-v1", "Acrobot-v1")):
        for seed, better in ((0, 2.0), (1, 4.0)):
            make_run(
                tmp_path / f"{env}-a{seed}",
                [0.0, 1.0, 3.0 + better],
                seed,
                env=env,
                options=dict(max_kl=0.1 + k),
            )
            make_run(
                tmp_path / f"{env}-b{seed}",
                [0.0, 1.0, 3.0],
                seed,
                env=env,
                name="other",
                algorithm="ppo",
                options=dict(clip=0.2),
            )
    results = read_results(tmp_path)
    assert {(row.env, row.label) for row in results.rows} == {
        (env, x) for env in ("Acrobot-v1", "CartPole-v1") for x in ("other", "trpo")
    }
    # four pairs, all won: the exact interval begins at 0.025 ** (1 / 4)
    assert "P(trpo > other) = 1.00 [0.40, 1.00] over 2 environments." in markdown(results)


@pytest.mark.parametrize("out", ["file", "file/more"])
def test_a_report_does_not_go_where_a_file_is(tmp_path, out, capsys):
    folder = make_bench(tmp_path / "a", [[0.0, 1.0, 2.0]])
    (tmp_path / "file").write_text("mine")
    assert rollpipe("report", folder, "--out", tmp_path / out) == 2
    assert (
        f"{tmp_path}/file: this is a file. Expected a folder, or a path where nothing is"
        in capsys.readouterr().err
    )
    assert (tmp_path / "file").read_text() == "mine"


def test_runs_of_a_row_that_were_trained_otherwise_are_named(tmp_path, capsys):
    folder = make_bench(tmp_path / "a", [[0.0, 1.0, 2.0], None, None])
    make_run(folder / "a-s1", [0.0, 1.0, 2.0], 1, options=dict(max_kl=0.5), device="cuda")
    make_run(
        folder / "a-s2",
        [0.0, 1.0, 2.0, 3.0],
        2,
        steps=30,
        name="third",
        origins=dict(max_kl="preset"),
    )
    assert rollpipe("report", folder) == 0
    told = "TRPO on CartPole-v1: its runs do not have the same options: steps (20 | 30), max_kl (0.01 | 0.5), device (- | cuda)."
    assert (
        told in capsys.readouterr().out.replace("\\", "")
        and told in Page((folder / "report.html").read_text()).text
    )


def test_a_row_that_has_not_begun_differs_in_nothing(tmp_path):
    folder = make_bench(tmp_path / "a", [[0.0, 1.0, 2.0]])
    bench = json.loads((folder / BENCH).read_text())
    bench["rows"].append(dict(bench["rows"][0], name="b", label="OTHER"))
    (folder / BENCH).write_text(json.dumps(bench))
    rows = read_results(folder).rows
    assert [x.state for row in rows for x in row.results] == [
        "complete",
        "missing",
    ] and not differing_options(x.results for x in rows)


def test_what_was_edited_or_forked_is_said_beside_its_command(tmp_path):
    folder = make_bench(tmp_path / "a", [None])
    make_run(
        folder / "a-s0",
        [0.0, 1.0, 2.0],
        options=dict(max_kl=0.01),
        history=[BEGAN, dict(event="edited", at=1, set=dict(max_kl=0.5))],
    )
    fork = {**BEGAN, "event": "forked", "at": 3, "run": "base", "set": dict(max_kl=0.01)}
    make_run(tmp_path / "b" / "x", [0.0, 1.0, 2.0], history=[fork])
    told = (
        "was edited while it trained, or is a fork, so the command does not train it again: seed 0"
    )
    for name, why in dict(
        a="max_kl=0.5 after update 1", b="a fork of base after update 3, with max_kl=0.01"
    ).items():
        assert any(
            note.endswith(f"{told} ({why}).") for note in notes_of(read_results(tmp_path / name))
        )
    make_run(tmp_path / "c" / "x", [0.0, 1.0, 2.0])
    assert not any(told in note for note in notes_of(read_results(tmp_path / "c")))


WHY = "the mean return 500 has reached stop_at_return=450"


def test_runs_that_stopped_early_have_the_steps_that_they_made(tmp_path):
    folder = make_bench(tmp_path / "a", [None, None])
    for seed in (0, 1):
        make_run(
            folder / f"a-s{seed}",
            [0.0, 1.0, 500.0],
            seed,
            history=[BEGAN, dict(event="stopped", at=2, why=WHY)],
        )
    for config in folder.glob("*/config.json"):
        config.write_text(json.dumps(dict(json.loads(config.read_text()), steps=50_000)))
    text = markdown(results := read_results(folder))
    assert "| 2 of 2 | 20 |" in text and {
        x["steps"] for x in csv.DictReader(csv_text(results).splitlines())
    } == {"20"}
    assert (
        "stopped before its last step: seed 0 (the mean return 500 has reached stop_at_return=450), 1 ("
        in text.replace("\\", "")
    )


def test_a_curve_keeps_the_evaluations_of_an_interval_that_became_longer(tmp_path):
    "Within an interval of today, the first evaluation is the one that was due."
    make_run(tmp_path / "x", [float(10 * k) for k in range(7)], steps=60, eval_every="30 steps")
    (curve,) = map(curve_of, read_results(tmp_path).rows)
    assert curve.steps.tolist() == curve.middle.tolist() == [0, 30, 60]


def test_the_command_of_runs_over_ranks_begins_with_torchrun_and_names_one_run_each(
    tmp_path, capsys
):
    for seed in (0, 1):
        make_run(tmp_path / f"x-s{seed}", [0.0, 1.0, 2.0], seed, ranks=2)
    make_run(tmp_path / "y-s3", [0.0, 1.0, 2.0], 3, name="alone")
    assert rollpipe("report", tmp_path) == 0
    out = capsys.readouterr().out
    each = [
        f"torchrun --standalone --nproc-per-node 2 -m rollpipe train trpo CartPole-v1 --config {tmp_path}/x-s{seed}/config.json "
        f"--seed {seed}"
        for seed in (0, 1)
    ]
    assert f"    {' && '.join(each)}\n" in out
    assert (
        f"    rollpipe train trpo CartPole-v1 --config {tmp_path}/y-s3/config.json --seeds 3\n"
        in out
    )


def test_runs_of_another_program_tell_their_own_command(tmp_path, capsys):
    for seed in (0, 1):
        make_run(
            tmp_path / f"x-s{seed}", [0.0, 1.0, 2.0], seed, command="python peer.py --seed SEED"
        )
    assert rollpipe("report", tmp_path) == 0
    out = capsys.readouterr().out
    assert out.count("    python peer.py --seed SEED\n") == 1 and "rollpipe train" not in out


@pytest.mark.parametrize(
    "files, told",
    [
        ({}, "has no results. Expected bench.json"),
        ({BENCH: "{"}, "bench.json: not JSON"),
        (
            {BENCH: '{"format": 2, "rows": []}'},
            "made by another version of rollpipe. Expected format 1, got 2",
        ),
        ({BENCH: '{"format": 1, "rows": [{"name": "a"}]}'}, "bench.json: damaged"),
        (
            {"x/config.json": '{"env": "CartPole-v1", "algorithm": "trpo", "steps": 3}'},
            "its runs have no evaluations. Expected runs of .*--eval-every 'N steps'",
        ),
        ({"x/config.json": "?"}, "config.json: not JSON"),
        (
            {
                "x/config.json": '{"env": "CartPole-v1", "algorithm": "trpo", "steps": 3}',
                "x/evaluations.jsonl": '{"format": 3, "kind": "last"}\n',
            },
            "made by another version of rollpipe. Expected format 1, got 3",
        ),
    ],
)
def test_a_folder_of_another_kind_is_refused(tmp_path, capsys, files, told):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert rollpipe("report", tmp_path) == 2
    err = capsys.readouterr().err
    assert re.search(told, err) and err.count("\n") == 1
    assert not (tmp_path / "report.md").exists()


@pytest.mark.parametrize(
    "damage, told",
    [
        (dict(title=None), "bench.json: damaged: wrong type of value. Expected a text, got None"),
        (dict(rows=[]), "bench.json: damaged: has no rows"),
        (dict(rows=[3]), "bench.json: damaged: wrong type of value"),
        (
            dict(label=["a"]),
            "leaf label: .*bench.json: damaged, row 1: wrong type of value. Expected a text, got \\['a'\\]",
        ),
        (
            dict(threshold="475"),
            "leaf threshold: .*damaged, row 1: wrong type of value. Expected a number, got '475'",
        ),
        (
            dict(threshold=math.nan),
            "leaf threshold: .*damaged, row 1: wrong type of value. Expected a number, got nan",
        ),
        (
            dict(threshold=10**400),
            "leaf threshold: .*damaged, row 1: wrong type of value. Expected a number, got 1000",
        ),
        (
            dict(seeds=3),
            "leaf seeds: .*damaged, row 1: wrong type of value. Expected a list of whole numbers, got 3",
        ),
        (
            dict(published=[{}]),
            "bench.json: damaged, published 1: a key is missing. Expected algorithm",
        ),
    ],
)
def test_what_is_wrong_in_the_file_of_a_bench_is_named(tmp_path, capsys, damage, told):
    folder = make_bench(tmp_path / "a", [[0.0, 1.0, 2.0]])
    found = json.loads((folder / BENCH).read_text())
    for name, x in damage.items():
        (found if name in found else found["rows"][0])[name] = x
    (folder / BENCH).write_text(json.dumps(found))
    for words in (["report", folder], ["bench", _spec(tmp_path), "--dir", folder]):
        assert rollpipe(*words) == 2
        err = capsys.readouterr().err
        assert re.search(told, err) and err.count("\n") == 1


def _spec(folder):
    (folder / "spec.toml").write_text(
        '[[row]]\nalgorithm = "trpo"\nenv = "CartPole-v1"\nsteps = 64\n'
    )
    return folder / "spec.toml"


def places(tree, at=()):
    "The path of everything in a tree."
    yield at
    for key, x in (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    ):
        yield from places(x, (*at, key))


def damaged(tree, at, value):
    "The text of a tree with this text of JSON at a place."
    mark = tree = json.loads(json.dumps(tree))
    if not at:
        return value
    for key in at[:-1]:
        mark = mark[key]
    mark[at[-1]] = "HERE"
    return json.dumps(tree).replace('"HERE"', value)


ODD = [
    "null",
    "true",
    "[]",
    "{}",
    '""',
    '"x"',
    '"\\ud800"',
    '["a"]',
    "[[1]]",
    '{"a": 1}',
    "-1",
    "2.5",
    "NaN",
    "Infinity",
    "1" + "0" * 400,
    "[" * 100_000 + "]" * 100_000,
]


OF_A_RUN = [
    "a-s0/config.json",
    "a-s0/history.jsonl",
    "a-s0/evaluations.jsonl",
    "a-s0/metrics.jsonl",
]


@pytest.fixture
def charts_once(monkeypatch):
    "Pages whose charts are drawn again only where what they show has changed. Most damages are elsewhere."
    found = {}
    figures = dict(curves=draw_curves, diagnostics=diagnostics)

    def drawn(results, name):
        rows = [
            (
                row.label,
                row.env,
                [
                    (run.seed, [run.metrics.get(x) for x in ("updates", *DIAGNOSTICS)])
                    for run in row.results
                ],
            )
            if name == "diagnostics"
            else (
                row.label,
                row.env,
                row.threshold,
                [(x.name, x.mean, x.of) for x in row.published],
                [(run.state, run.config.get("eval_every"), run.curve) for run in row.results],
            )
            for row in results.rows
        ]
        if (key := (name, repr(rows))) not in found:
            found[key] = (figure := figures[name](results)) and svg(figure, name)
        return found[key] or ""

    for name in ("draw_curves", "diagnostics"):
        monkeypatch.setattr(f"rollpipe.results.report.{name}", lambda results: results)
    monkeypatch.setattr("rollpipe.results.report.svg", drawn)


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_bench, name", [(True, BENCH), *itertools.product([True, False], OF_A_RUN)]
)
def test_whatever_is_damaged_a_report_is_made_or_an_error_names_the_file(
    tmp_path, charts_once, is_bench, name
):
    who = dict(
        algorithm="trpo",
        env="CartPole-v1",
        name="Somebody",
        mean=450.0,
        sd=20.0,
        of="last",
        source="a book",
    )
    folder = make_bench(tmp_path / "a", [[0.0, 1.0, 2.0]], [who], scale=[0, 1], threshold=3.0)
    config = json.loads((folder / "a-s0" / "config.json").read_text())
    (folder / "a-s0" / "config.json").write_text(
        json.dumps(
            dict(
                config,
                name="n",
                imports=["rollpipe"],
                env_kwargs=dict(g=1),
                ranks=1,
            )
        )
    )
    fork = {**BEGAN, "event": "forked", "at": 1, "run": "r", "set": dict(k=1)}
    edit = dict(event="edited", at=1, insert="m:f", kwargs=dict(k=1))
    History([fork, edit, dict(event="stopped", at=1, why="x")]).write(folder / "a-s0")
    if not is_bench:
        (folder / BENCH).unlink()
    path = folder / name
    first, *more = [path.read_text()] if name.endswith(".json") else path.read_text().splitlines()
    texts = [damaged(json.loads(first), at, x) for at in places(json.loads(first)) for x in ODD]
    contents = ["\n".join([text, *more, ""]).encode() for text in texts] + [
        b"\xff\xfe\n",
        b"{\n",
        first.encode("utf-16") + b"\n",
    ]
    refused = 0
    for content in contents:
        path.write_bytes(content)
        try:
            results = read_results(folder)
            "".join(
                [markdown(results), csv_text(results), curves_text(results), page(results)]
            ).encode()
        except DataError as e:
            refused += 1
            assert str(path) in str(e), content[:200]
    assert (
        is_bench and name != BENCH or refused > 10
    )  # a bench says in its notes which of its runs are damaged


def test_there_is_no_such_folder(tmp_path):
    with pytest.raises(DataError, match="there is no such folder"):
        read_results(tmp_path / "x")
