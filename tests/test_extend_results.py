"Reports that are made again from their own numbers, with further runs."

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from gallery import refused
from test_report import make_run

from rollpipe.results.bench import BENCH, bench_file, jobs_of, read_spec
from rollpipe.results.collect import read_results
from rollpipe.results.report import write_report

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from extend_results import extend

FILES = "report.md", "report.csv", "report.jsonl", "report.png"

SPEC = """
title = "A bench"
steps = 20
every = 10
seeds = "0-2"

[[row]]
label = "TRPO"
algorithm = "trpo"
env = "CartPole-v1"

[[row]]
label = "NPG"
algorithm = "npg"
env = "CartPole-v1"

[[published]]
algorithm = "npg"
env = "CartPole-v1"
name = "Somebody"
mean = 12.5
source = "a paper"
"""


NAMES = ("TRPO-CartPole-v1-s0", "NPG-CartPole-v1-s2")


RUN = Path("runs/some")


def extended():
    return extend(Path("some.toml"), RUN, Path("results"))


def contents():
    return {name: Path("results", name).read_bytes() for name in FILES}


@pytest.fixture
def made(tmp_path, monkeypatch):
    "A specification and a report of its runs, two of them complete, as somebody else has made it."
    monkeypatch.chdir(tmp_path)
    Path("some.toml").write_text(SPEC)
    make_run(RUN / NAMES[0], [1.0, 3.0, 5.0], 0)
    make_run(RUN / "TRPO-CartPole-v1-s1", [2.0, 4.0], 1)
    make_run(RUN / NAMES[1], [0.0, 9.0, float("nan")], 2, algorithm="npg")
    assert extended() == [*NAMES]
    Path("runs").rename("elsewhere")
    return contents()


def states(folder):
    "(label, seed) -> state and return of the last policy."
    rows = csv.DictReader(Path(folder, "report.csv").read_text().splitlines())
    return {(row["label"], row["seed"]): (row["state"], row["last"]) for row in rows}


@pytest.mark.slow
def test_a_report_without_new_runs_stays_as_it_is(made):
    assert b"runs/some/TRPO-CartPole-v1" in made["report.md"] and b"Somebody" in made["report.md"]
    assert extended() == [] and contents() == made
    assert not Path("results/report.html").exists()


@pytest.mark.slow
def test_complete_runs_have_the_numbers_of_the_bench(made):
    "As `rollpipe report` writes them for the folder with all runs."
    spec = read_spec("some.toml")
    bench = Path("elsewhere/some")
    (bench / BENCH).write_text(json.dumps(bench_file(spec, jobs_of(spec.rows, bench), None)))
    write_report(read_results(bench), "whole")
    assert states("results") == {
        key: ("missing", "nan") if x[0] == "unfinished" else x for key, x in states("whole").items()
    }
    curves = [
        line
        for line in Path("whole/report.jsonl").read_text().splitlines()
        if json.loads(line)["seed"] != 1
    ]
    assert curves == made["report.jsonl"].decode().splitlines()


@pytest.mark.slow
def test_new_runs_are_added_and_replace_earlier_ones(made):
    "An unfinished run takes nothing away."
    for seed, means in {0: [1.0, 2.0, 8.0], 1: [2.0, 3.0, 4.0], 7: [0.0, 0.0, 6.0]}.items():
        make_run(RUN / f"TRPO-CartPole-v1-s{seed}", means, seed)
    make_run(RUN / NAMES[1], [0.0, 1.0], 2)
    assert extended() == [f"TRPO-CartPole-v1-s{seed}" for seed in (0, 1, 7)]
    found = states("results")
    for seed, last in {"0": "8", "1": "4", "7": "6"}.items():
        assert found["TRPO", seed] == ("complete", last)
    assert found["NPG", "2"] == ("complete", "nan") and found["TRPO", "2"][0] == "missing"
    assert "options" not in Path("results/report.md").read_text()


@pytest.mark.slow
def test_a_row_that_would_be_lost_is_an_error(made):
    Path("some.toml").write_text(SPEC.replace('"NPG"', '"Natural"'))
    told = "rows that the specification does not have.*'CartPole-v1', 'NPG'"
    refused(told, extended)
    assert contents() == made


@pytest.mark.parametrize(
    "other, told",
    [
        (dict(options=dict(max_kl=0.02)), "leaf max_kl:.*Expected 0.01, got 0.02."),
        (dict(algorithm="npg"), "leaf algorithm:.*Expected trpo, got npg."),
    ],
)
def test_a_run_with_other_settings_is_an_error(made, other, told):
    make_run(RUN / "TRPO-CartPole-v1-s1", [2.0, 3.0, 4.0], 1, **other)
    error = refused(told, extended)
    assert "runs/some/TRPO-CartPole-v1-s1 has other settings" in str(error)
    assert contents() == made


@pytest.mark.slow
def test_what_auto_has_become_and_versions_may_differ(made):
    run = dict(engine="onnxruntime", versions=dict(torch="1.0"))
    make_run(RUN / "TRPO-CartPole-v1-s1", [2.0, 3.0, 4.0], 1, **run)
    assert extended() == ["TRPO-CartPole-v1-s1"]


@pytest.mark.slow_but_one
@pytest.mark.parametrize("name", ["config.json", "evaluations.jsonl"])
def test_a_damaged_run_is_an_error(made, name):
    make_run(RUN / NAMES[0], [2.0, 3.0, 4.0])
    (RUN / NAMES[0] / name).write_text('{"format": 1, \n{}')
    refused(f"{NAMES[0]} is damaged: ", extended)
    assert contents() == made


@pytest.mark.slow
def test_modules_are_imported_from_the_folder_of_the_call(tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit('mine was found')")
    script = Path(__file__).resolve().parent.parent / "benchmarks" / "extend_results.py"
    run = subprocess.run(
        [sys.executable, script, "classic", "--import", "mine"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 1 and run.stderr.splitlines()[-1] == "mine was found"
