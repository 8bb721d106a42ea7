"The metric writer: own metrics from learners, pipes and callbacks in every sink, and sinks that fail."

import csv
import importlib.util
import json
import math

import numpy as np
import pytest
import torch

from rollpipe.agents import TRPO
from rollpipe.agents.metrics import METRICS, OF_THE_LOOP, check_metrics
from rollpipe.cli.main import main
from rollpipe.pipes import EpisodeStats, FragmentCollector, Lanes, Tap, insert_after
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.taps import Meter
from rollpipe.runs.folder import load_run, resume, start
from rollpipe.runs.logs import MetricWriter, WandB, read_metrics, read_records, wandb_run
from rollpipe.runs.plots import learning_curve
from rollpipe.runs.training import train
from rollpipe.settings.config import make_config

has = importlib.util.find_spec
needs_tensorboard = pytest.mark.skipif(not has("tensorboard"), reason="TensorBoard is an extra")
needs_wandb = pytest.mark.skipif(
    not hasattr(__import__("wandb") if has("wandb") else None, "init"),
    reason="wandb is an extra, which the "
    "developers' environment leaves out because of its size: pip install wandb",
)
SMALL = dict(n_envs=4, n_steps=32, hidden=(8,), critic_hidden=(8,))


def rows(folder):
    with open(folder / "metrics.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(folder, *records, **kwargs):
    with MetricWriter(folder, **{"tensorboard": False, **kwargs}) as writer:
        for record in records:
            writer.write(record)


def small(folder, steps=384, **kwargs):
    return start(folder, make_config("trpo", "CartPole-v1", SMALL, steps=steps, **kwargs))


def quietly(run, **kwargs):
    return train(run, progress=False, **{"tensorboard": False, **kwargs})


# -- names and values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "_step", " x", "x\n", "a\x00b", "m/" + "x" * 199, 3, None, ("a",)]
)
def test_what_cannot_be_a_name_is_refused(name, tmp_path):
    with pytest.raises(DataError, match="cannot be the name of a metric.*my/temperature"):
        write(tmp_path, {"steps": 1, name: 1.0})
    assert read_records(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["x", "my/speed", "a/b/c", 'length,with "csv" signs', "größe/m", "m/" + "x" * 198]
)
def test_other_names_come_back_from_both_files(name, tmp_path):
    write(tmp_path, {"steps": 1, name: 2.5})
    assert read_metrics(tmp_path)[name].tolist() == [2.5] and rows(tmp_path)[0][name] == "2.5"


@pytest.mark.parametrize(
    "value", [[1, 2], "0.5", b"1", None, {}, torch.zeros(2), np.zeros((2, 2)), 1j]
)
def test_what_is_not_one_number_is_refused(value, tmp_path):
    with pytest.raises(DataError, match="must be one number.*my/x|my/x.*must be one number"):
        write(tmp_path, {"steps": 1, "my/x": value})


@pytest.mark.parametrize(
    "value",
    [1, True, np.float32(1), np.ones((1, 1)), torch.ones(1), torch.ones((), dtype=torch.int64)],
)
def test_one_number_of_any_kind_is_taken(value):
    assert check_metrics({"my/x": value}, own=True) == {"my/x": 1.0}


def test_nan_and_infinite_numbers_stay_apart(tmp_path):
    write(tmp_path, {"steps": 1, "my/x": math.nan, "my/y": math.inf, "kl": -math.inf})
    assert [rows(tmp_path)[0][name] for name in ("my/x", "my/y", "kl")] == ["", "inf", "-inf"]

    def refuse(constant):
        raise AssertionError(constant)

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    found = read_metrics(tmp_path)
    assert (
        np.isnan(found["my/x"][0]) and found["my/y"][0] == math.inf and found["kl"][0] == -math.inf
    )


def test_a_name_close_to_a_known_one_is_told_once(tmp_path, caplog):
    write(
        tmp_path,
        *({"steps": k, "entrpy": 1.0, "my/entrpy": 1.0, "temperature": 1.0} for k in (1, 2)),
    )
    told = [r.getMessage() for r in caplog.records]
    assert (
        len(told) == 1
        and "'entrpy'" in told[0]
        and "'entropy'" in told[0]
        and "my/entrpy" in told[0]
    )
    assert read_metrics(tmp_path)["entrpy"].tolist() == [1, 1]


# -- the table ---------------------------------------------------------------------------------------------------------


def test_a_column_that_appears_later_loses_no_row(tmp_path):
    rng = np.random.default_rng(0)
    names = [f"my/{k}" for k in range(12)]
    records = [
        {"steps": k, **{n: float(rng.normal()) for n in names[: k // 4] if rng.random() < 0.7}}
        for k in range(48)
    ]
    with MetricWriter(tmp_path, False) as writer:
        for k, record in enumerate(records):
            writer.write(record)
            found = rows(tmp_path)  # whole after every record
            assert len(found) == k + 1 and len({len(row) for row in found}) == 1
            for row, wanted in zip(found, records):
                assert all(
                    float(row[n]) == pytest.approx(wanted[n])
                    if n in wanted
                    else row.get(n, "") == ""
                    for n in names
                )
    before = (tmp_path / "metrics.csv").read_bytes()
    write(tmp_path)  # reopened: the same table
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_resume_keeps_own_columns_of_the_records_that_are_kept(tmp_path):
    write(tmp_path, {"steps": 1, "updates": 1, "my/a": 1}, {"steps": 2, "updates": 2, "my/b": 2})
    write(tmp_path, {"steps": 2, "updates": 2, "my/c": 3}, updates=1)
    assert [list(r)[len(METRICS) :] for r in rows(tmp_path)] == [["my/a", "my/c"]] * 2
    assert read_records(tmp_path) == [
        {"steps": 1, "updates": 1, "my/a": 1},
        {"steps": 2, "updates": 2, "my/c": 3},
    ]


# -- sinks that fail ---------------------------------------------------------------------------------------------------


class Faulty:
    name = "the faulty sink"

    def __init__(self, at):
        self.at = at
        self.got = []
        self.closed = 0

    def write(self, record):
        if record["steps"] >= self.at:
            raise ConnectionError("network is down")
        self.got.append(record["steps"])

    def close(self):
        self.closed += 1
        if self.at is math.inf:
            raise ConnectionError("no upload")


def test_a_failing_sink_is_told_once_and_nothing_else_is_lost(tmp_path, caplog):
    with MetricWriter(tmp_path, False) as writer:
        writer._sinks[:0] = [faulty := Faulty(2), good := Faulty(10)]
        for k in range(4):
            writer.write(dict(steps=k))
    assert (faulty.got, good.got, faulty.closed, good.closed) == ([0, 1], [0, 1, 2, 3], 1, 1)
    assert (
        [r["steps"] for r in read_records(tmp_path)]
        == [0, 1, 2, 3]
        == [int(r["steps"]) for r in rows(tmp_path)]
    )
    told = [r.getMessage() for r in caplog.records]
    assert (
        len(told) == 1
        and "the faulty sink failed" in told[0]
        and "metrics.jsonl" in told[0]
        and "network is down" in told[0]
    )


def test_a_sink_that_fails_at_the_end_is_told(tmp_path, caplog):
    with MetricWriter(tmp_path, False) as writer:
        writer._sinks.append(Faulty(math.inf))
        writer.write(dict(steps=1))
    assert "no upload" in caplog.text and len(rows(tmp_path)) == 1


def test_a_table_that_cannot_be_written_is_made_whole_at_the_end(tmp_path, caplog):
    with MetricWriter(tmp_path, False) as writer:
        writer.write(dict(steps=1))
        (table,) = writer._sinks
        table.path.unlink()
        table.path.mkdir()  # every write fails: there is a folder of this name
        for k in (2, 3):
            writer.write(dict(steps=k))
        assert "metrics.csv failed" in caplog.text
        table.path.rmdir()
    assert [r["steps"] for r in rows(tmp_path)] == ["1", "2", "3"]


def test_without_its_record_a_training_ends_and_says_why(tmp_path):
    run = small(tmp_path / "run", checkpoint_every=1)

    def fill(run, record):
        if record["updates"] == 2:
            writers[0]._records_file.close()
            writers[0]._records_file = open("/dev/full", "w")

    writers = []
    init = MetricWriter.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            MetricWriter,
            "__init__",
            lambda self, *a, **k: (init(self, *a, **k), writers.append(self))[0],
        )
        with pytest.raises(OSError, match="/dev/full"):
            quietly(run, callbacks=[fill])
    assert [r["updates"] for r in read_records(run.folder)] == [1] and load_run(
        run.folder
    ).counters["updates"] == 1
    quietly(resume(run.folder))
    assert read_metrics(run.folder)["updates"].tolist() == [1, 2, 3]


def test_a_training_goes_on_without_a_sink(tmp_path, monkeypatch, caplog):
    faulty = Faulty(256)

    class Fake:
        def __new__(cls, *args):
            return faulty

    monkeypatch.setattr("rollpipe.runs.logs.WandB", Fake)
    last = quietly(small(tmp_path / "run"), wandb=True)
    assert (
        last["steps"] == 384 and faulty.got == [128] and caplog.text.count("network is down") == 1
    )
    assert read_metrics(tmp_path / "run")["steps"].tolist() == [128, 256, 384]


# -- where own metrics come from ---------------------------------------------------------------------------------------


class Talkative(TRPO):
    def improve(self, batch):
        return super().improve(batch)

    def update(self, batch):
        return {**super().update(batch), "my/rows": batch.valid.sum()}


def test_from_a_learner_a_pipe_and_a_callback_to_every_file_and_picture(tmp_path):
    run = small(tmp_path / "run")
    episodes = []
    run.agent.__class__ = Talkative
    pipe = insert_after(
        run.pipe,
        FragmentCollector,
        lambda p: EpisodeStats(p, Meter(lambda end: {"my/length": end.length})),
    )
    pipe = Tap(pipe, lambda batch: episodes.append(batch.state.fin[1:].sum().item()))
    run = run._replace(
        pipe=Tap(pipe, Meter(lambda batch: {"my/speed": batch.state.obs[1:, :, 1].abs().mean()}))
    )
    quietly(
        run,
        callbacks=[
            lambda run, record: {"my/half": record["steps"] / 2} if record["updates"] > 1 else None
        ],
    )
    found = read_metrics(run.folder)
    assert (
        found["my/rows"].tolist() == [128] * 3
        and found["my/half"][1:].tolist() == [128, 192]
        and np.isnan(found["my/half"][0])
    )
    assert (found["my/speed"] > 0).all() and list(found)[-4:] == sorted(
        n for n in found if n not in METRICS
    )
    ended = np.diff(found["episodes"], prepend=0)
    assert ended.tolist() == episodes
    known = ended > 0
    np.testing.assert_allclose(found["my/length"][known], found["length_mean"][known])
    assert {"my/half", "my/speed", "my/rows", "my/length"} <= set(rows(run.folder)[0])
    assert (
        learning_curve(run.folder, y="my/rows").axes[0].lines[0].get_ydata().tolist() == [128] * 3
    )
    with pytest.raises(DataError, match="my/row.*my/rows"):
        learning_curve(run.folder, y="my/row")


@pytest.mark.parametrize(
    "name", ["steps", "return_mean", "eval_version", "seconds_collect", "my/x"]
)
def test_a_callback_cannot_replace_a_number(name, tmp_path):
    run = small(tmp_path / "run")
    run = run._replace(pipe=Tap(run.pipe, Meter(lambda batch: {"my/x": 1})))
    with pytest.raises(
        DataError,
        match=f"callback <lambda> reports a metric whose name is taken.*{name}|{name}.*callback",
    ):
        quietly(run, callbacks=[lambda run, record: {name: 0.0}])
    assert [r["my/x"] for r in read_records(run.folder)] == [1]  # what came before is kept,
    assert load_run(run.folder).counters["updates"] == 1  # and the update, too


@pytest.mark.slow_but_one
@pytest.mark.parametrize("name", sorted(OF_THE_LOOP))
def test_a_learner_cannot_replace_what_the_loop_measures(name, tmp_path):
    run = small(tmp_path / "run")
    update = run.agent.update
    run.agent.update = lambda batch: {**update(batch), name: 0.0}
    with pytest.raises(
        DataError, match=f"the learner reports a metric whose name is taken.*my/{name}|my/{name}"
    ):
        quietly(run)


def test_a_callback_cannot_change_the_record_and_must_return_metrics(tmp_path):
    def change(run, record):
        record["my/x"] = 1

    with pytest.raises(TypeError, match="item assignment"):
        quietly(small(tmp_path / "a"), callbacks=[change])
    with pytest.raises(DataError, match="the callback <lambda> reports no metrics.*dict.*5"):
        quietly(small(tmp_path / "b"), callbacks=[lambda *_: 5])


def test_a_meter_reports_means_in_workers_as_well(tmp_path):
    def lengths(workers):
        run = small(tmp_path / str(workers), workers=workers)
        run = run._replace(
            pipe=insert_after(
                run.pipe, Lanes, lambda p: Tap(p, Meter(lambda f: {"my/x": f.state.obs.mean()}))
            )
        )
        quietly(run)
        return read_metrics(run.folder)["my/x"].tolist()

    assert lengths(0) == lengths(1) != [0] * 3


# -- TensorBoard and Weights & Biases ----------------------------------------------------------------------------------


@needs_tensorboard
def test_tensorboard_has_own_metrics_under_their_group(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(
        tmp_path, {"steps": 8, "my/x": 0.5}, {"steps": 16, "my/x": 0.25, "kl": 1}, tensorboard=True
    )
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("my/x")] == [(8, 0.5), (16, 0.25)]
    assert set(events.Tags()["scalars"]) == {"steps", "my/x", "kl"}


def test_a_missing_wandb_names_the_command_before_the_training_begins(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    words = "train trpo CartPole-v1 --steps 128 --n-envs 4 --n-steps 32 --quiet --no-tensorboard --wandb=mine --out".split()
    assert main([*words, str(tmp_path / "run")]) == 2
    assert (
        "pip install 'rollpipe[wandb]'" in capsys.readouterr().err
        and not (tmp_path / "run").exists()
    )


def test_the_folder_of_wandb_in_the_working_directory_is_not_taken_for_it(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    with pytest.raises(ImportError, match=r"rollpipe\[wandb\]"):
        WandB(tmp_path)


def test_a_damaged_id_is_named(tmp_path):
    (tmp_path / "wandb.json").write_text('{"id": 3')
    with pytest.raises(DataError, match="wandb.json: damaged"):
        wandb_run(tmp_path)


def blocks(data):
    "The records of a file of wandb: after 7 bytes, blocks of 32 KiB in the format of LevelDB's log."
    at = 7
    parts = []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        kind = data[at + 6]
        if kind == 0:
            return
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def logged(folder):
    "The id and the history of each file that wandb has left, from the oldest on."
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime):
        history = []
        ident = None
        for data in blocks(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ident = record.run.run_id, record.run.project
            if record.HasField("history"):
                history.append(
                    {
                        "/".join(x.nested_key) or x.key: json.loads(x.value_json)
                        for x in record.history.item
                    }
                )
        found.append((ident, history))
    return found


@pytest.fixture
def offline(monkeypatch):
    "Keep wandb from the network, and end its service afterwards, which would live as long as this process."
    for name, value in dict(WANDB_MODE="offline", WANDB_SILENT="true").items():
        monkeypatch.setenv(name, value)
    yield
    __import__("wandb").teardown()


@needs_wandb
@pytest.mark.filterwarnings("default")
def test_wandb_offline_has_the_same_numbers_and_a_resumed_run_goes_on_there(tmp_path, offline):
    run = small(tmp_path / "run", steps=256)
    quietly(run, wandb="carts", callbacks=[lambda run, record: {"my/half": record["steps"] / 2}])
    quietly(resume(run.folder, steps=384))  # without being asked again
    (ident, first), (again, second) = logged(run.folder)
    assert ident == again == (json.loads((run.folder / "wandb.json").read_text())["id"], "carts")
    records = read_records(run.folder)
    for item, record in zip(first + second, records):
        assert {k: v for k, v in item.items() if not k.startswith("_")} == pytest.approx(
            record, nan_ok=True
        )
    assert len(first + second) == len(records) == 3 and first[1]["my/half"] == 128
    quietly(resume(run.folder, steps=512), wandb=False)
    assert len(logged(run.folder)) == 2
    with pytest.raises(DataError, match="another project.*carts.*poles"):
        quietly(resume(run.folder, steps=640), wandb="poles")


@needs_wandb
@pytest.mark.filterwarnings("default")
def test_wandb_beside_workers(tmp_path, offline):
    run = small(tmp_path / "run", workers=1)
    quietly(run, wandb=True)
    assert [item["steps"] for _, history in logged(run.folder) for item in history] == [
        128,
        256,
        384,
    ]
