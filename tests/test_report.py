"`rollpipe report`: the statistics against slow ones, odd folders, and a page that needs and runs nothing from elsewhere."

import csv
import itertools
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from command_line import error_of, rollpipe
from hypothesis import given
from hypothesis import strategies as st

from rollpipe.pipes.data.errors import DataError
from rollpipe.results.bench import BENCH
from rollpipe.results.collect import (
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
    improvements,
    markdown,
    notes_of,
)
from rollpipe.runs.evaluations import evaluation_seed, write_evaluations
from rollpipe.runs.plots import DIAGNOSTICS, svg
from rollpipe.traces.history import History

HOSTILE = "_<script>alert('1')</script>&\"|`=[a](b)$\\frac$\\"


BEGAN = dict(event="began", at=0, kept={}, inexact=None)


def write_json(path, content):
    path.write_text(json.dumps(content))


def change_json(path, **changes):
    "Store other values in a file of JSON."
    write_json(path, {**json.loads(path.read_text()), **changes})


def make_run(folder, means, seed=0, steps=20, history=(BEGAN,), **config):
    "A run with an evaluation every 10 steps. It is complete if it has come to its steps."
    folder.mkdir(parents=True)
    about = dict(algorithm="trpo", env="CartPole-v1", seed=seed, steps=steps)
    about |= dict(eval_every="10 steps", options=dict(max_kl=0.01))
    write_json(folder / "config.json", {**about, **config})
    History(history).write(folder)
    lines = [json.dumps(dict(steps=10 * i, updates=i, kl=0.01 * i, accepted=1)) for i in (1, 2)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    about = dict(updates=1, seconds=2.5, std=0.0, returns=[0.0], lengths=[1], seed=1, resumes=0)
    records = [dict(about, kind="training", steps=10 * i, mean=x) for i, x in enumerate(means)]
    if records[-1]["steps"] >= steps:
        records += [dict(records[-1], kind=kind, mean=means[-1]) for kind in ("last", "best")]
    write_evaluations(folder, records)


def make_bench(folder, runs, published=(), **row):
    "A bench of one row; `runs` are the means of its runs, None for one that is not there."
    about = dict(name="a", label="TRPO", algorithm="trpo", env="CartPole-v1", threshold=None)
    about |= dict(seeds=[*range(len(runs))], command="rollpipe train trpo CartPole-v1")
    row = {**about, **row}
    folder.mkdir()
    bench = dict(format=1, title="A bench", rows=[row], published=list(published))
    write_json(folder / BENCH, bench)
    for seed, means in enumerate(runs):
        if means:
            make_run(folder / f"a-s{seed}", means, seed, env=row["env"])
    return folder


SOMEBODY = dict(
    algorithm="trpo",
    env="CartPole-v1",
    name="Somebody",
    mean=450.0,
    sd=20.0,
    of="last",
    source="a book",
)


def reported(capsys, folder, more=""):
    "What the command prints for a folder."
    capsys.readouterr()
    assert rollpipe(f"report {folder} {more}") == 0
    return capsys.readouterr().out


def slow_improvement(xs, ys):
    "The share of pairs in which the first is greater, by a count; a tie counts half."
    return np.mean([(x > y) + 0.5 * (x == y) for x in xs for y in ys])


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


TASKS = st.lists(
    st.tuples(*[st.lists(st.integers(-3, 3), min_size=1, max_size=6)] * 2), min_size=1, max_size=4
)


@given(TASKS)
def test_the_probability_of_improvement_against_a_count_of_pairs(tasks):
    expected = np.mean([slow_improvement(*task) for task in tasks])
    xs, ys = ([np.array(task[k], float) for task in tasks] for k in (0, 1))
    assert improvement(xs, ys) == pytest.approx(expected)
    assert improvement(ys, xs) == pytest.approx(1 - expected)


BOTH = [
    np.array([[3.0, -1, 4, 1, 5, 9], [2, 6, 5, 3.5, 8, 6]]),
    np.array([[1.0, 2, 4, 0, 3, 1], [5, 5, 7, 3.5, 1, 0]]),
]


def test_what_rliable_computes():
    "rliable 1.2.0, 50 000 resamples, two tasks of six runs: `probability_of_improvement`."
    xs, ys = map(list, BOTH)
    assert improvement(xs, ys) == pytest.approx(0.6736111111)
    assert improvement(xs[:1], ys[:1]) == pytest.approx(2 / 3)
    bounds = improvement_interval(xs, ys, n=50_000)
    np.testing.assert_allclose(bounds, [0.4375, 0.88194444], atol=0.008)


def test_the_interval_of_the_improvement_is_that_of_all_pairs_of_resamples():
    "Two runs against two: X and Y are drawn apart, so 16 pairs of resamples have equal probability."
    x = np.array([1.0, 3.0])
    y = np.array([2.0, 2.5])
    resamples = [[*itertools.product(values, repeat=2)] for values in (x, y)]
    every = [slow_improvement(*pair) for pair in itertools.product(*resamples)]
    expected = np.quantile(every, [0.025, 0.975])
    np.testing.assert_allclose(improvement_interval([x], [y], n=20_000), expected)
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
    of_training = set()
    for seed in itertools.product(range(50), range(4)):
        of_training.update(map(int, np.random.SeedSequence(seed).generate_state(4)))
    of_evaluations = {
        evaluation_seed(*about)
        for about in itertools.product(range(50), ("training", "last", "best"), (0, 2048, 10**6))
    }
    assert not of_training & of_evaluations and len(of_evaluations) == 450


# -- reports -----------------------------------------------------------------------------------------------------------


def test_a_threshold_that_half_of_the_runs_reach_has_no_median(tmp_path, capsys):
    folder = make_bench(tmp_path / "a", [[0.0, 0.0, 480.0], [0.0, 0.0, 470.0]], threshold=475.0)
    out = reported(capsys, folder, f"--out {tmp_path / 'out'}")
    (line,) = (line for line in out.splitlines() if line.startswith("| CartPole-v1"))
    assert "475: reached by 1 of 2" in line, line


def test_numbers_of_a_report_are_those_of_its_runs(tmp_path, capsys):
    runs = [[0.0, 480.0, 400.0 + 10 * seed] for seed in range(5)]
    folder = make_bench(tmp_path / "a", runs, [SOMEBODY])
    place = tmp_path / "out"
    out = reported(capsys, folder, f"--out {place}")
    assert sorted(p.name for p in place.iterdir()) == [
        f"report.{x}" for x in ("csv", "html", "jsonl", "md", "png")
    ]
    texts = {path.suffix: path.read_text() for path in place.iterdir() if path.suffix != ".png"}
    assert texts[".md"] in out and "Somebody" in texts[".html"]

    # The row of the table
    (line,) = (line for line in out.splitlines() if line.startswith("| CartPole-v1"))
    low, high = interval([[returns[-1] for returns in runs]])
    of_published = "420 +- 15.8 | Somebody: 450 +- 20.0 | 480 [480, 480]"
    assert f"| 420 [{low:.0f}, {high:.0f}] | {of_published} |" in line
    assert "475: never (0 of 5)" in line

    # The numbers of each run, and its curve
    rows = list(csv.DictReader(texts[".csv"].splitlines()))
    assert [float(row["last"]) for row in rows] == [returns[-1] for returns in runs]
    assert {row["best_evaluation"] for row in rows} == {"480"}
    lines = [*map(json.loads, texts[".jsonl"].splitlines())]
    for seed, returns in enumerate(runs):
        mine = [x["mean"] for x in lines if x["seed"] == seed and x["kind"] == "training"]
        assert mine == returns


def labelled(folder, rows):
    "A bench of some environments; `rows` are the means of the runs of each label in each."
    make_bench(folder, [])
    (about,) = json.loads((folder / BENCH).read_text())["rows"]
    of_bench = []
    for k, (label, env, means) in enumerate(rows):
        seeds = [*range(len(means))]
        of_bench.append(dict(about, name=f"r{k}", label=label, env=env, seeds=seeds))
        for seed in seeds:
            make_run(folder / f"r{k}-s{seed}", [0.0, 0.0, means[seed]], seed, env=env)
    change_json(folder / BENCH, rows=of_bench)
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
    ((label, other, n, middle, (low, high)),) = improvements(results)
    assert (label, other, n, middle) == ("A", "B", 1, (1 + 1 + 0.5) / 4) and low < middle < high
    told = f"P(A > B) = 0.62 [{low:.2f}, {high:.2f}] over 1 environment."
    assert told in markdown(results) and "P(A &gt; B)" in page(results)
    bad = labelled(tmp_path / "b", [*rows[:2], ("B", "CartPole-v1", [20.0, math.nan])])
    assert not improvements(bad) and "P(A" not in markdown(bad).split("IQM is")[0]


def test_what_is_missing_unfinished_damaged_or_alone_is_said(tmp_path, capsys):
    "A line that was cut off is a run that is unfinished."
    complete = [0.0, 1.0, 2.0]
    folder = make_bench(tmp_path / "a", [complete, [0.0, 1.0], None, complete, complete])
    (folder / "a-s3" / "evaluations.jsonl").write_text("nonsense\n")
    path = folder / "a-s4" / "evaluations.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    out = reported(capsys, folder)
    for told in (
        "unfinished, and left out of the numbers: seed 1, 4",
        "missing, and left out of the numbers: seed 2",
        "damaged.*seed 3.*line 1",
        "one run has no interval",
        r"\| 1 of 5 \|.*\| 2.00 \| 2.00 \|",
    ):
        assert re.search(told, out), told


def test_evaluations_that_a_run_does_not_have_are_no_obstacle(tmp_path):
    "One was never evaluated, and another one only at its end."
    for seed in (0, 1):
        make_run(tmp_path / f"s{seed}", [0.0, 1.0, 2.0], seed)
    path = tmp_path / "s0" / "evaluations.jsonl"
    lines = path.read_text().splitlines(True)
    path.write_text("".join(line for line in lines if json.loads(line)["kind"] != "training"))
    (tmp_path / "s1" / "evaluations.jsonl").unlink()
    results = read_results(tmp_path)
    assert math.isnan(results.rows[0].results[0].best) and csv_text(results)
    assert "seed 1 (it has no evaluations by steps)" in " ".join(notes_of(results))


def test_a_return_that_is_not_a_number_is_shown_and_never_averaged(tmp_path, capsys):
    runs = [[0.0, 1.0, 2.0], [0.0, 1.0, math.nan], [0.0, math.nan, 3.0]]
    folder = make_bench(tmp_path / "a", runs)
    out = reported(capsys, folder)
    assert "| not a number (seed 1) | not a number (seed 1, 2) | not a number (seed 1) |" in out
    assert "+-" not in out and "so there is no mean: seed 1, 2" in out
    assert "NaN" not in (folder / "report.html").read_text()


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
    hostile = dict(env=HOSTILE, name=HOSTILE, source=f"https://example.org/{HOSTILE}")
    who = dict(SOMEBODY, mean=4.0, sd=None, of="best", **hostile)
    named = dict(label=HOSTILE, env=HOSTILE, command=HOSTILE)
    folder = make_bench(tmp_path / "a", [[0.0, 1.0, 2.0], [0.0, 1.0, 3.0]], [who], **named)
    options = {HOSTILE: HOSTILE}
    about = dict(algorithm=HOSTILE, env=HOSTILE, steps=20, eval_every="10 steps", options=options)
    write_json(folder / "a-s1" / "config.json", about)
    assert rollpipe(f"report {folder}") == 0

    # The names are shown as they are; a long label has several lines.
    text = (folder / "report.html").read_text()
    page = Page(text)
    shown = " ".join(page.text.split())
    assert page.tags.count("svg") >= 2
    assert f"{HOSTILE} (2 runs)" in shown and f"{HOSTILE}: {HOSTILE}, best" in shown

    # Nothing is run or loaded.
    assert not {"script", "img", "link", "iframe", "object", "a", "base", "form"} & set(page.tags)
    names = {name for name, _ in page.attrs}
    assert not names & {"src", "href", "action"} and not [x for x in names if x.startswith("on")]
    assert "@import" not in text and "@font-face" not in text
    assert "default-src 'none'; style-src 'unsafe-inline'\"" in text

    # References are to parts of the page.
    ids = [x for name, x in page.attrs if name == "id"]
    used = re.findall(r'(?:url\(|href=")#(.*?)[")]', text)
    assert used and len(used) == text.count("url(") + text.count("href=")
    assert len(ids) == len(set(ids)) and set(used) <= set(ids)

    # The other files have no code, either.
    markdown = (folder / "report.md").read_text().partition("Commands:")[0]
    assert "<script" not in markdown and "[a](b)" not in markdown
    rows = csv.reader((folder / "report.csv").read_text().splitlines())
    assert not [cell for cell in itertools.chain(*rows) if cell[:1] in {*"=+@"}]


def test_what_is_wider_than_a_narrow_window_scrolls_by_itself(tmp_path):
    results = read_results(make_bench(tmp_path / "a", [[0.0, 1.0, 2.0], [0.0, 1.0, 3.0]]))
    page = write_report(results, tmp_path / "b")[-1].read_text()
    depth = 0
    for part in re.split(r'(<div class="wide">|</div>)', page):
        depth += part.startswith("<div") - (part == "</div>")
        assert depth or not re.search("<svg|<table", part)

    # Paths and names break.
    style = re.search("<style>(.*?)</style>", page, re.S)[1]
    for rule in (
        r"\.wide \{ overflow-x: auto",
        r"pre \{[^}]*overflow-x: auto",
        r"body \{[^}]*overflow-wrap: anywhere",
        "max-width: 700px",
    ):
        assert re.search(rule, style), rule


def test_the_same_runs_give_the_same_bytes_and_a_gap_where_a_return_is_not_a_number(tmp_path):
    folder = make_bench(tmp_path / "a", [[0.0, 1.0, math.nan, 2.0, 3.0]], threshold=475.0, steps=40)
    once, again = (
        [path.read_bytes() for path in write_report(read_results(folder), tmp_path / name)]
        for name in "bc"
    )
    assert once == again and b"threshold 475" in once[-1]
    line = rb'<path d="M [^M]*M [^M]*" clip-path="[^"]*" style="fill: none; stroke: #1f77b4'
    assert len(re.findall(line, once[-1])) == 1


def test_a_seed_that_is_there_twice_is_said(tmp_path):
    "A copy of a run, or a fork without an edit, is no run of its own."

    def report_of(name, *seeds):
        for k, seed in enumerate(seeds):
            make_run(tmp_path / name / str(k), [5, 6], seed)
        return markdown(read_results(tmp_path / name))

    text = report_of("runs", 1, 1, 2)
    assert "counts a seed more than once, as if its runs were independent: 1." in text
    assert "--seeds 1,2\n" in text
    assert "more than once" not in report_of("other", 1, 2)


@pytest.mark.slow
def test_plain_runs_are_reported_by_what_they_differ_in(tmp_path, capsys):
    for seed in (0, 1):
        make_run(tmp_path / f"x-s{seed}", [0.0, 1.0, 2.0 + seed], seed)
    make_run(tmp_path / "y-s0", [0.0, 1.0, 9.0], options=dict(max_kl=0.5))
    out = reported(capsys, tmp_path)
    assert re.search(r"trpo, max_kl=0.01 \| 2 of 2", out)
    assert re.search(r"trpo, max_kl=0.5 \| 1 of 1", out)
    assert "What differs" in (tmp_path / "report.html").read_text()
    assert rollpipe(f"report {tmp_path}/y-s0") == 0


def test_plain_runs_of_several_environments_are_compared_over_all_of_them(tmp_path):
    "Settings that differ between environments, as presets do, do not make other experiments."
    envs = ("CartPole-v1", "Acrobot-v1")
    other = dict(name="other", algorithm="ppo", options=dict(clip=0.2))
    for k, env in enumerate(envs):
        for seed, better in ((0, 2.0), (1, 4.0)):
            about = dict(seed=seed, env=env)
            options = dict(max_kl=0.1 + k)
            make_run(
                tmp_path / f"{env}-a{seed}", [0.0, 1.0, 3.0 + better], **about, options=options
            )
            make_run(tmp_path / f"{env}-b{seed}", [0.0, 1.0, 3.0], **about, **other)
    results = read_results(tmp_path)
    found = {(row.env, row.label) for row in results.rows}
    assert found == {*itertools.product(envs, ("other", "trpo"))}
    # four pairs, all won: the exact interval begins at 0.025 ** (1 / 4)
    assert "P(trpo > other) = 1.00 [0.40, 1.00] over 2 environments." in markdown(results)


@pytest.mark.parametrize("out", ["file", "file/more"])
def test_a_report_does_not_go_where_a_file_is(tmp_path, out, capsys):
    folder = make_bench(tmp_path / "a", [[0.0, 1.0, 2.0]])
    (tmp_path / "file").write_text("mine")
    told = f"{tmp_path}/file: this is a file. Expected a folder, or a path where nothing is"
    assert told in error_of(capsys, f"report {folder} --out {tmp_path / out}")
    assert (tmp_path / "file").read_text() == "mine"


def test_runs_of_a_row_that_were_trained_otherwise_are_named(tmp_path, capsys):
    means = [0.0, 1.0, 2.0]
    folder = make_bench(tmp_path / "a", [means, None, None])
    make_run(folder / "a-s1", means, 1, options=dict(max_kl=0.5), device="cuda")
    longer = dict(steps=30, name="third", origins=dict(max_kl="preset"))
    make_run(folder / "a-s2", [*means, 3.0], 2, **longer)
    out = reported(capsys, folder)
    told = "TRPO on CartPole-v1: its runs do not have the same options: steps (20 | 30), max_kl (0.01 | 0.5), device (- | cuda)."
    assert told in out.replace("\\", "")
    assert told in Page((folder / "report.html").read_text()).text


WHY = "the mean return 500 has reached stop_at_return=450"


def test_runs_that_stopped_early_have_the_steps_that_they_made(tmp_path):
    folder = make_bench(tmp_path / "a", [None, None])
    history = [BEGAN, dict(event="stopped", at=2, why=WHY)]
    for seed in (0, 1):
        run = folder / f"a-s{seed}"
        make_run(run, [0.0, 1.0, 500.0], seed, history=history)
        change_json(run / "config.json", steps=50_000)
    results = read_results(folder)
    text = markdown(results).replace("\\", "")
    assert "| 2 of 2 | 20 |" in text
    assert {x["steps"] for x in csv.DictReader(csv_text(results).splitlines())} == {"20"}
    assert f"stopped before its last step: seed 0 ({WHY}), 1 (" in text


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
    out = reported(capsys, tmp_path)
    torchrun = "torchrun --standalone --nproc-per-node 2 -m rollpipe"
    words = f"train trpo CartPole-v1 --config {tmp_path}"
    each = [f"{torchrun} {words}/x-s{seed}/config.json --seed {seed}" for seed in (0, 1)]
    assert f"    {' && '.join(each)}\n" in out
    assert f"    rollpipe {words}/y-s3/config.json --seeds 3\n" in out


def test_runs_of_another_program_tell_their_own_command(tmp_path, capsys):
    command = "python peer.py --seed SEED"
    for seed in (0, 1):
        make_run(tmp_path / f"x-s{seed}", [0.0, 1.0, 2.0], seed, command=command)
    out = reported(capsys, tmp_path)
    assert out.count(f"    {command}\n") == 1 and "rollpipe train" not in out


CONFIG = '{"env": "CartPole-v1", "algorithm": "trpo", "steps": 3}'


OTHER_VERSION = "made by another version of rollpipe. Expected format 1, got "


NO_EVALUATIONS = "its runs have no evaluations. Expected runs of .*--eval-every 'N steps'"


OF_UPDATES = '{"env": "CartPole-v1", "algorithm": "trpo", "steps": 3, "eval_every": 10}'


BY_UPDATES = (
    r"its evaluations are by updates \(--eval-every 10\), which a report does not read. "
    ".*--eval-every 'N steps'`; `rollpipe plot .*x --y eval_return_mean`"
)


OTHER_EVALUATIONS = '{"format": 3, "kind": "last"}\n'


@pytest.mark.parametrize(
    "files, told",
    [
        ({BENCH: '{"format": 1, "rows": [{"name": "a"}]}'}, "bench.json: damaged"),
        ({"x/config.json": CONFIG}, NO_EVALUATIONS),
        ({"x/config.json": OF_UPDATES}, BY_UPDATES),
        ({"x/config.json": "?"}, "config.json: not JSON"),
        ({"x/config.json": CONFIG, "x/evaluations.jsonl": OTHER_EVALUATIONS}, f"{OTHER_VERSION}3"),
    ],
)
def test_a_folder_of_another_kind_is_refused(tmp_path, capsys, files, told):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    err = error_of(capsys, f"report {tmp_path}")
    assert re.search(told, err) and err.count("\n") == 1
    assert not (tmp_path / "report.md").exists()


NO_NUMBER = "leaf threshold: .*damaged, row 1: wrong type of value. Expected a number, got "


@pytest.mark.parametrize(
    "name, value, told",
    [
        ("title", None, "damaged: wrong type of value. Expected a text, got None"),
        ("rows", [], "damaged: has no rows"),
        ("rows", [3], "damaged: wrong type of value"),
        (
            "label",
            ["a"],
            r"leaf label: .*bench.json: damaged, row 1: wrong type of value. Expected a text, got \['a'\]",
        ),
        ("threshold", "475", f"{NO_NUMBER}'475'"),
        ("threshold", math.nan, f"{NO_NUMBER}nan"),
        ("threshold", 10**400, f"{NO_NUMBER}1000"),
        (
            "seeds",
            3,
            "leaf seeds: .*damaged, row 1: wrong type of value. Expected a list of whole numbers, got 3",
        ),
        ("published", [{}], "damaged, published 1: a key is missing. Expected algorithm"),
    ],
)
def test_what_is_wrong_in_the_file_of_a_bench_is_named(tmp_path, capsys, name, value, told):
    folder = make_bench(tmp_path / "a", [[0.0, 1.0, 2.0]])
    bench = json.loads((folder / BENCH).read_text())
    if name in bench:
        bench[name] = value
    else:
        bench["rows"][0][name] = value
    write_json(folder / BENCH, bench)
    spec = tmp_path / "spec.toml"
    spec.write_text('[[row]]\nalgorithm = "trpo"\nenv = "CartPole-v1"\nsteps = 64\n')
    for words in (f"report {folder}", f"bench {spec} --dir {folder}"):
        err = error_of(capsys, words)
        assert re.search(told, err) and "bench.json" in err and err.count("\n") == 1


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
    folder = make_bench(tmp_path / "a", [[0.0, 1.0, 2.0]], [SOMEBODY], threshold=3.0)
    run = folder / "a-s0"
    more = dict(name="n", imports=["rollpipe"], env_kwargs=dict(g=1), ranks=1)
    change_json(run / "config.json", **more)
    fork = {**BEGAN, "event": "forked", "at": 1, "run": "r", "set": dict(k=1)}
    edit = dict(event="edited", at=1, insert="m:f", kwargs=dict(k=1))
    History([fork, edit, dict(event="stopped", at=1, why="x")]).write(run)
    if not is_bench:
        (folder / BENCH).unlink()

    # Everything in the first line, or in the file, becomes something odd.
    path = folder / name
    first, *more = [path.read_text()] if name.endswith(".json") else path.read_text().splitlines()
    tree = json.loads(first)
    texts = [damaged(tree, at, odd) for at in places(tree) for odd in ODD]
    contents = ["\n".join([text, *more, ""]).encode() for text in texts]
    contents += [b"\xff\xfe\n", b"{\n", first.encode("utf-16") + b"\n"]
    refused = 0
    for content in contents:
        path.write_bytes(content)
        try:
            results = read_results(folder)
            for make in (markdown, csv_text, curves_text, page):
                make(results).encode()
        except DataError as e:
            refused += 1
            assert str(path) in str(e), content[:200]
    # A bench says in its notes which of its runs are damaged.
    assert (is_bench and name != BENCH) or refused > 10
