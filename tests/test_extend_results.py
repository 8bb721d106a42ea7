"Reports that are made again from their own numbers, with further runs."

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_report import make_run

from rollpipe.pipes.data.errors import DataError
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


@pytest.fixture
def made(tmp_path, monkeypatch):
    "A specification and a report of its runs, two of them complete, as somebody else has made it."
    monkeypatch.chdir(tmp_path)
    Path("some.toml").write_text(SPEC)
    for name, seed, means in (
        ("TRPO", 0, [1.0, 3.0, 5.0]),
        ("TRPO", 1, [2.0, 4.0]),
        ("NPG", 2, [0.0, 9.0, float("nan")]),
    ):
        make_run(
            Path("runs/some", f"{name}-CartPole-v1-s{seed}"), means, seed, algorithm=name.lower()
        )
    assert extend(Path("some.toml"), Path("runs/some"), Path("results")) == [
        "TRPO-CartPole-v1-s0",
        "NPG-CartPole-v1-s2",
    ]
    Path("runs").rename("elsewhere")
    return {name: Path("results", name).read_bytes() for name in FILES}


def states(folder):
    "(label, seed) -> state and return of the last policy."
    with open(Path(folder, "report.csv"), newline="") as f:
        rows = list(csv.DictReader(f))
    return {(row["label"], row["seed"]): (row["state"], row["last"]) for row in rows}


@pytest.mark.slow
def test_a_report_without_new_runs_stays_as_it_is(made):
    assert b"runs/some/TRPO-CartPole-v1" in made["report.md"] and b"Somebody" in made["report.md"]
    assert extend(Path("some.toml"), Path("runs/some"), Path("results")) == []
    assert {name: Path("results", name).read_bytes() for name in FILES} == made
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
    for seed, means in ((0, [1.0, 2.0, 8.0]), (1, [2.0, 3.0, 4.0]), (7, [0.0, 0.0, 6.0])):
        make_run(Path("runs/some", f"TRPO-CartPole-v1-s{seed}"), means, seed)
    make_run(Path("runs/some/NPG-CartPole-v1-s2"), [0.0, 1.0], 2)
    new = extend(Path("some.toml"), Path("runs/some"), Path("results"))
    assert new == [f"TRPO-CartPole-v1-s{seed}" for seed in (0, 1, 7)]
    found = states("results")
    assert [found["TRPO", seed] for seed in "017"] == [
        ("complete", "8"),
        ("complete", "4"),
        ("complete", "6"),
    ]
    assert found["NPG", "2"] == ("complete", "nan")  # an unfinished run takes nothing away
    assert found["TRPO", "2"][0] == "missing"
    assert "options" not in Path("results/report.md").read_text()


def test_a_row_that_would_be_lost_is_an_error(made):
    Path("some.toml").write_text(SPEC.replace('"NPG"', '"Natural"'))
    with pytest.raises(
        DataError, match="rows that the specification does not have.*'CartPole-v1', 'NPG'"
    ):
        extend(Path("some.toml"), Path("runs/some"), Path("results"))
    assert {name: Path("results", name).read_bytes() for name in FILES} == made


@pytest.mark.parametrize(
    "other, told",
    [
        (dict(options=dict(max_kl=0.02)), ("leaf max_kl:", "Expected 0.01, got 0.02.")),
        (dict(algorithm="npg"), ("leaf algorithm:", "Expected trpo, got npg.")),
    ],
)
def test_a_run_with_other_settings_is_an_error(made, other, told):
    make_run(Path("runs/some/TRPO-CartPole-v1-s1"), [2.0, 3.0, 4.0], 1, **other)
    with pytest.raises(DataError) as e:
        extend(Path("some.toml"), Path("runs/some"), Path("results"))
    assert all(
        part in str(e.value) for part in ("runs/some/TRPO-CartPole-v1-s1 has other settings", *told)
    )
    assert {name: Path("results", name).read_bytes() for name in FILES} == made


@pytest.mark.slow
def test_what_auto_has_become_and_versions_may_differ(made):
    run = dict(options=dict(max_kl=0.01), engine="onnxruntime", versions=dict(torch="1.0"))
    make_run(Path("runs/some/TRPO-CartPole-v1-s1"), [2.0, 3.0, 4.0], 1, **run)
    assert extend(Path("some.toml"), Path("runs/some"), Path("results")) == ["TRPO-CartPole-v1-s1"]


@pytest.mark.parametrize("name", ["config.json", "evaluations.jsonl"])
def test_a_damaged_run_is_an_error(made, name):
    make_run(run := Path("runs/some/TRPO-CartPole-v1-s0"), [2.0, 3.0, 4.0])
    (run / name).write_text('{"format": 1, ' + "\n" + "{}")
    with pytest.raises(DataError, match="TRPO-CartPole-v1-s0 is damaged: "):
        extend(Path("some.toml"), Path("runs/some"), Path("results"))
    assert {name: Path("results", name).read_bytes() for name in FILES} == made


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
