"""Write the report of a bench again, with the runs that were added since.

    rollpipe bench benchmarks/specs/NAME.toml --seeds 3-4
    python benchmarks/extend_results.py NAME [--import MODULE ...]

The new runs are those in `runs/NAME` that are complete. All others of the specification, and of the seeds that the report has, are taken
from `benchmarks/results/NAME`, where the report is written, too. So it needs no folders of earlier runs, which may be on another machine.
The page `report.html` is not written, and options that differ are told for new runs only, because the report has only the returns of
earlier ones. A new run needs the settings of the specification. If these have changed, as with a preset, all seeds of the row have to be
made again.
"""

import argparse
import csv
import json
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from rollpipe.pipes.data.errors import DataError
from rollpipe.results.bench import BENCH, Job, bench_file, jobs_of, read_spec
from rollpipe.results.collect import Result, RowResult, flat_config, read_result, read_results
from rollpipe.results.report import write_report
from rollpipe.runs.evaluations import write_evaluations

HERE = Path(__file__).resolve().parent


def earlier_runs(report: Path) -> dict:
    "(environment, label, seed) -> the evaluations of a complete run, as far as the report has them."
    if not (report / "report.csv").exists():
        return {}
    with open(report / "report.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    runs = {
        (r["environment"], r["label"], int(r["seed"])): (r, [])
        for r in rows
        if r["state"] == "complete"
    }
    for line in map(json.loads, (report / "report.jsonl").read_text().splitlines()):
        row, records = runs.get((line["environment"], line["label"], line["seed"]), ({}, []))
        known = {name: line[name] for name in ("kind", "steps", "seconds", "mean", "std")}
        records.append(
            dict(
                known, updates=0, returns=[], lengths=[], seed=0, resumes=int(row.get("resumes", 0))
            )
        )
    return {key: records for key, (_, records) in runs.items()}


def check_settings(job: Job, run: Result) -> None:
    "Raise `DataError` if a run has other settings than the specification. A run tells what `auto` has become, and versions may differ."
    wanted = flat_config(job.config)
    got = flat_config(run.config)
    other = [
        name
        for name, x in wanted.items()
        if x != "auto" and not name.startswith("versions ") and got.get(name, x) != x
    ]
    if other:
        raise DataError(
            f"{run.folder} has other settings than the specification",
            leaf=", ".join(other),
            expected=", ".join(wanted[name] for name in other),
            got=", ".join(got[name] for name in other),
        )


def with_one_configuration(row: RowResult) -> RowResult:
    "Earlier runs have the configuration of a new one, if there is one: that of the specification lacks what a run adds to it."
    new = next((run.config for run in row.results if run.folder.is_symlink()), None)
    if new is None:
        return row
    return row._replace(
        results=[
            run if run.folder.is_symlink() or not run.config else run._replace(config=new)
            for run in row.results
        ]
    )


def extend(spec_file: Path, runs: Path, report: Path, imports: tuple = ()) -> list:
    "Write the report; returns the names of the new runs. Raises `DataError` if a row would be lost, or for a damaged or foreign run."
    spec = read_spec(spec_file)
    earlier = earlier_runs(report)
    new = []
    lost = {key[:2] for key in earlier} - {(row.env, row.label) for row in spec.rows}
    if lost:
        raise DataError(
            f"{report} has rows that the specification does not have",
            leaf=str(spec_file),
            got=str(sorted(lost)),
        )
    seeds = {
        row.name: {seed for env, label, seed in earlier if (env, label) == (row.env, row.label)}
        for row in spec.rows
    }
    for row in spec.rows:
        seeds[row.name] |= {
            int(path.name.rpartition("-s")[2]) for path in runs.glob(f"{row.name}-s*")
        }
    spec = spec._replace(
        rows=[row._replace(seeds=sorted({*row.seeds, *seeds[row.name]})) for row in spec.rows]
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        jobs = jobs_of(spec.rows, folder, imports)
        (folder / BENCH).write_text(json.dumps(bench_file(spec, jobs, None)))
        for job in jobs:
            key = (job.row.env, job.row.label, job.seed)
            there = runs.resolve() / job.name
            run = read_result(there, job.seed)
            if run.state == "damaged":
                raise DataError(f"{there} is damaged: {run.problem}")
            if run.state == "complete":
                check_settings(job, run)
                job.folder.symlink_to(there)
                new.append(job.name)
            elif key in earlier:
                job.folder.mkdir()
                (job.folder / "config.json").write_text(json.dumps(job.config))
                write_evaluations(job.folder, earlier[key])
        results = read_results(folder)
        *paths, page = write_report(
            results._replace(rows=list(map(with_one_configuration, results.rows))), report
        )
    page.unlink()
    paths[0].write_text(
        paths[0].read_text().replace(place, f"runs/{spec_file.stem}")
    )  # the commands name this folder
    return new


def main():
    args = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    args.add_argument("name", help="of a file in benchmarks/specs")
    args.add_argument("--runs", type=Path, help="folder of the bench [runs/NAME]")
    args.add_argument(
        "--import",
        dest="imports",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="as for `rollpipe bench`",
    )
    args = args.parse_args()
    sys.path.append(
        os.getcwd()
    )  # as for `rollpipe bench`; by itself a script only finds what stands beside it
    for module in args.imports:
        import_module(module)
    runs = args.runs or Path("runs", args.name)
    report = HERE / "results" / args.name
    for name in extend(HERE / "specs" / f"{args.name}.toml", runs, report, tuple(args.imports)):
        print(f"{name}: new")
    print((report / "report.md").read_text())


if __name__ == "__main__":
    main()
