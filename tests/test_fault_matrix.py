"""Whatever goes wrong, wherever, by whatever start method and lag: it is told, by name, and nothing is left behind.

Each row of `fault_rows.py` is one harm at one place, with what must come of it; a column is a way to run lanes, and a lag. Each row is run
in this process and by the crew without processes of `local_crew.py`, and what ends or stops a process by forked workers. A selection
shows that spawn and forkserver do the same: see `spawned` and `served`.
`python tests/test_fault_matrix.py` prints the table, and so does `pytest -s` at the end.
"""

import gc
import shlex
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import forked
import pytest
import torch
from command_line import SMALL, lines, process, rollpipe, script, wait_for
from conftest import started_by
from fault_cases import IN_PARENT, Left, run
from fault_rows import EVENTS, HARMS, ROWS, Unpicklable
from local_crew import LocalReading
from reference import assert_same, snapshot
from toys import Counting, Plain
from worker_cases import gone, slack

from rollpipe.layers import CategoricalPolicy, Critic, MLPPolicy
from rollpipe.pipes import (
    AdvantageBuffer,
    EnvStepper,
    FragmentCollector,
    GraphError,
    Lanes,
)
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.workers.process import WorkerDied
from rollpipe.runs.folder import load_run
from rollpipe.runs.locks import lock, unlock
from rollpipe.runs.logs import read_metrics

pytestmark = pytest.mark.timeout(120)


class Column(NamedTuple):
    method: str | None
    lag: int

    def __str__(self):
        return "here" if self.method is None else f"{self.method} {self.lag}"


HERE = Column(None, 0)
LOCAL, FORK, SPAWN, SERVER = (
    [Column(method, lag) for lag in (0, 1)] for method in ("local", "fork", "spawn", "forkserver")
)
COLUMNS = [HERE, *LOCAL, *FORK, *SPAWN, *SERVER]
AT = {
    "step": 3,
    "vector step": 3,
    "actor": 3,
    "pipe below": 2,
    "tap": 2,
    "loop": 2,
}  # the call that is harmed, else 1
PLACES_OF_SPAWN = {row.place for row in ROWS if row.only == "spawn"}
TABLE = {}  # (harm, place) -> {text of a column: word}


@pytest.fixture(autouse=True, scope="module")
def table():
    gc.collect()
    gc.freeze()  # looking for what is left collects garbage often
    forked.ensure_running()
    run(
        lambda x: x, "nowhere", "fork"
    )  # whatever is started once and lives as long as this process
    yield
    gc.unfreeze()
    print("\n" + in_columns(TABLE))


def here():
    "Every row that does not end or stop its process: in this one, and by workers that are no processes, with one of the lags in turn."
    rows = [row for row in ROWS if row.here and row.only is None]
    return [(row, column) for k, row in enumerate(rows) for column in (HERE, LOCAL[k % 2])]


def fatal():
    "Every other row, by forked workers."
    rows = [row for row in ROWS if not row.here and row.only in (None, "fork")]
    return [(row, FORK[k % 2]) for k, row in enumerate(rows)]


def covering(columns, *wanted):
    "Cells of these columns in turn, in which each of the harms and places that are `wanted` occurs at least once."
    left = set().union(*wanted)
    found = []
    for row in sorted(
        ROWS, key=lambda row: row.only is None
    ):  # what can happen nowhere else comes first
        if row.only not in (None, columns[0].method) or not {row.harm, row.place} & left:
            continue
        left -= {row.harm, row.place}
        found.append((row, columns[len(found) % len(columns)]))
    assert not left, left
    return found


OF_SPAWN = {"an exception", "os._exit", "SIGKILL", "SIGTERM", "a hang"}


def spawned():
    "Harms of each kind (raised, deadly, silent), and the places that only these workers have. Otherwise they are as those of a server."
    return covering(SPAWN, OF_SPAWN, PLACES_OF_SPAWN)


def served():
    """Each event and each place, by the server that starts quickly. Its workers get the same pickle as spawned ones.

    Answers of the wrong form, one at each place at least, are noticed by the same code as here and in forked workers.
    """
    return covering(SERVER, set(EVENTS), {row.place for row in ROWS} - PLACES_OF_SPAWN)


def parameters(cells):
    return [
        pytest.param(*cell, id=f"{cell[0].harm} at {cell[0].place} {cell[1]}") for cell in cells
    ]


@pytest.mark.slow_but_one
@pytest.mark.parametrize("row, column", parameters(here()))
def test_here_and_by_workers_that_are_no_processes(row, column):
    check(row, column)


@pytest.mark.slow
@pytest.mark.parametrize("row, column", parameters(fatal()))
def test_what_ends_or_stops_a_forked_worker(row, column):
    check(row, column)


@pytest.mark.slow
@pytest.mark.parametrize("row, column", parameters(served()))
def test_in_workers_of_a_server(row, column):
    check(row, column)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_in_spawned_workers():
    "Two at a time, since starting takes its time; but garbage is collected by any thread."
    left = Left()
    is_alone = lambda cell: any("ignored" in part for text in cell[0].workers.log for part in text)
    alone = [cell for cell in spawned() if is_alone(cell)]
    others = [cell for cell in spawned() if not is_alone(cell)]
    wrong = [complaint(*cell) for cell in alone]
    with ThreadPoolExecutor(2) as pool:
        wrong += pool.map(lambda cell: complaint(*cell), others)
    assert not any(wrong), "\n".join(wrong)
    assert not left.more()


def check(row, column):
    left = Left()
    wrong = complaint(row, column)
    assert not wrong, wrong
    assert not left.more()


def complaint(row, column) -> str:
    "What is wrong with a cell; empty if nothing is."
    wanted = row.here if column.method is None else row.workers
    found = run(
        HARMS[row.harm],
        row.place,
        column.method,
        column.lag,
        **{"at": AT.get(row.place, 1), **row.options},
    )
    is_last = column.method in ("fork", "local")
    index = "1" if is_last else "0"
    names = dict(lane=index, worker=index, lanes="1" if is_last else "0, 1")
    cause = ()  # parts of the traceback from the worker, if the error was raised there
    if wanted.is_remote and column.method is not None and row.place not in IN_PARENT:
        cause = (
            f"in worker {index}" + f", lane {index}" * (row.place not in ("unpickling", "close")),
            "Traceback (most recent call last)",
            *["in boom"] * (HARMS[row.harm].__name__ == "boom"),
        )
    wrong = "".join(differences(found, wanted, names, cause))
    TABLE.setdefault((row.harm, row.place), {})[str(column)] = (
        f"WRONG, not {wanted.word}" if wrong else wanted.word
    )
    return wrong and f"{row.harm} at {row.place}, {column}: {wrong}"


def differences(found, wanted, names, cause):
    "What differs between a run and the outcome that is wanted."
    if type(found.error) is not (wanted.error or type(None)):
        yield f"raised {found.error!r:.300}. "
    for text in (
        found.text,
        *found.log,
    ):  # an error of the library tells no novel; one of the user stays as it is
        if len(text) > 50_000 and wanted.error not in (KeyError, Unpicklable):
            yield f"a text of {len(text)} characters. "
    yield from missing(found.text, wanted.parts, names)
    if len(found.log) != len(wanted.log):
        yield f"the log says {found.log!r:.500}. "
    for text, parts in zip(found.log, wanted.log):
        yield from missing(text, parts, names)
    if cause and found.error is not None and not isinstance(found.error, WorkerDied):
        told = str(found.error.__cause__)
        if len(told) > 50_000:
            yield f"a traceback of {len(told)} characters. "
        yield from missing(told, cause, names)
    if wanted.error is None and found.items != 6:
        yield f"{found.items} items. "
    anew = (
        {int(lane): 1 for lane in names["lanes"].split(", ")} if wanted.word == "restarted" else {}
    )
    if found.restarts != anew:
        yield f"the stream says that lanes began anew: {found.restarts}, not {anew}. "
    if found.seconds > 20 * slack():
        yield f"it took {found.seconds:.0f} s. "


def missing(text, parts, names):
    at = 0
    for part in parts:
        for name, value in names.items():
            part = part.replace("{" + name + "}", value)
        if part in text[at:]:
            at = text.index(part, at) + len(part)
        else:
            yield f"{part!r} is not in {text[at : at + 300]!r}. "


# --- a training run whose process is told to end

CODES = dict(SIGINT=130, SIGTERM=143, SIGHUP=129, SIGKILL=-9)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name, code", CODES.items())
def test_a_training_run_is_told_to_end(name, code, workers, tmp_path):
    "It saves its last update, except when it is killed; its workers end; the folder is free again and can be resumed."
    folder = tmp_path / "run"
    words = f"train trpo CartPole-v1 --steps {10**8} --checkpoint-every {2**20} --lanes 2"
    words += " --workers 2 --lag 1" if workers else ""
    with process(*words.split(), "--out", folder, *SMALL, start_new_session=True) as child:
        wait_for(lambda: lines(folder / "metrics.jsonl") >= 2, child)
        started = started_by(child.pid)
        child.send_signal(getattr(signal, name))
        _, err = child.communicate(timeout=100)
    assert child.returncode == code and "Traceback" not in err, err
    assert err.strip().count("\n") == 0
    assert len(started) == (3 if workers else 0)  # two and their guard
    assert gone(started, 3 * slack()) == []

    # What was saved, and that the folder is free.
    saved = load_run(folder).counters
    if name != "SIGKILL":
        assert saved["steps"] == read_metrics(folder)["steps"][-1]
        assert f"--resume {shlex.quote(str(folder))}" in err
    lock(folder), unlock(folder)
    if name == "SIGINT":
        n = lines(folder / "metrics.jsonl")
        words = f"--steps {saved['steps'] + 1} --quiet --no-tensorboard".split()
        assert rollpipe("train", "--resume", folder, *words) == 0
        assert lines(folder / "metrics.jsonl") == n + 1
    column = str(FORK[1] if workers else HERE)
    TABLE.setdefault((name, "a training run"), {})[column] = f"exit {code}"


# --- weights, or what an actor takes for constant, change while it collects


@pytest.mark.parametrize("column", [HERE, *LOCAL], ids=str)
@pytest.mark.parametrize("place", ["above the lanes", "below everything", "without lanes"])
def test_a_thread_that_reads_ahead(place, column):
    "torchdata's `Prefetcher` would collect while the learner changes the weights."
    Prefetcher = pytest.importorskip("torchdata.datapipes.iter").Prefetcher
    actor = MLPPolicy.for_env("CartPole-v1")
    critic = Critic.for_env("CartPole-v1")
    left = Left()
    pipe = FragmentCollector(EnvStepper("CartPole-v1", actor), 8)
    if place == "above the lanes":
        pipe = Prefetcher(pipe, 2)
    if place != "without lanes":
        pipe = Lanes(pipe, 2, seed=0)
    pipe = AdvantageBuffer(pipe, critic)
    if place != "above the lanes":
        pipe = Prefetcher(pipe, 2)
    service = None if column == HERE else LocalReading(2, lag=column.lag)
    with DataLoader2(pipe, reading_service=service) as loader:
        with pytest.raises(
            GraphError,
            match=r"a `Prefetcher` below collects in a thread.*Expected `ProcessReading\(num_workers, lag=1\)`",
        ):
            next(iter(loader))
    del loader, pipe
    assert not left.more()
    TABLE.setdefault(("a Prefetcher", place), {})[str(column)] = "GraphError"


def test_a_prefetcher_of_pipes_that_ask_no_network():
    Prefetcher = pytest.importorskip("torchdata.datapipes.iter").Prefetcher
    pipe = Lanes(FragmentCollector(EnvStepper(Counting, Plain()), 4), 2, seed=0)
    came, wanted = (list(islice(DataLoader2(graph), 6)) for graph in (Prefetcher(pipe, 2), pipe))
    for x, y in zip(came, wanted, strict=True):
        assert_same(snapshot(x), snapshot(y))


class Scaled(CategoricalPolicy):
    factor = 1.0

    def params(self, *args, **kwargs):
        params, hx = super().params(*args, **kwargs)
        return params + self.factor, hx


def test_a_constant_of_the_actor_changes(caplog, monkeypatch):
    "ONNX Runtime has it in its graph; torch reads it at each step."
    pytest.importorskip("onnxruntime")
    actor = Scaled.for_env("CartPole-v1")
    streams = [
        iter(EnvStepper("CartPole-v1", actor, seed=0, engine=engine))
        for engine in ("torch", "onnxruntime")
    ]
    for factor in (1.0, 5.0):
        monkeypatch.setattr(Scaled, "factor", factor)
        wanted, came = (next(stream).actor["dist"] for stream in streams)
        torch.testing.assert_close(came, wanted)
    assert (
        "attribute factor of class Scaled changed, so ONNX Runtime has a new graph of Scaled"
        in caplog.text
    )
    TABLE[("a constant changes", "actor")] = {str(HERE): "warned"}


# --- commands that start other processes

TRAINS = "--steps 64 --n-envs 2 --n-steps 16 --hidden 4 --engine torch".split()
REPLAY = "dqn CartPole-v1 --preset none --hidden 4 --n-envs 2 --warmup 100 --capacity 1000 --batch-size 8 --steps 100m".split()
SPEC = """
[[row]]
label = "first"
algorithm = "{0}"
env = "CartPole-v1"
{1}
[[row]]
label = "second"
algorithm = "{0}"
env = "CartPole-v1"
{1}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, words",
    {
        "train by workers": "train ppo CartPole-v1 --lanes 2 --workers 2 --eval-every 1 --quiet",
        "train by Ray": "train ppo CartPole-v1 --workers 1 --reading ray --quiet",
        "train --seeds": "train ppo CartPole-v1 --seeds 0 --quiet",
    }.items(),
)
def test_files_of_the_working_folder_have_the_names_of_modules_of_python(name, words, tmp_path):
    "No process imports them, as the installed command does not. What starts the runs of `--seeds` starts those of other commands."
    if "Ray" in name:
        pytest.importorskip("ray")
    for module in ("random", "queue", "cProfile", "colorsys"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('it was imported')")
    (tmp_path / "needs.py").write_text("import random, queue, cProfile, colorsys\n" + NEEDS)
    words = words.replace("CartPole-v1", "needs:Needs-v0") + " --import needs"
    done = script(tmp_path, *words.split(), *TRAINS, "--no-tensorboard")
    assert done.returncode == 0, (done.stdout, done.stderr)
    TABLE.setdefault(("a module's name is taken", name), {})[str(HERE)] = "fine"


NEEDS = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
gymnasium.register("Needs-v0", CartPoleEnv, max_episode_steps=20)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, words",
    {
        "two of train": ["train --out a", "train --out b"],
        "train --seeds": ["train --out a --seeds 0-1 --jobs 2"],
        "bench": ["bench"],
        "tune": ["tune --jobs 2 --seeds 7"],
    }.items(),
)
def test_trainings_at_the_same_time_share_the_folder_of_their_replays(
    name, words, tmp_path, monkeypatch
):
    "Each has a file of its own in it, which does not outlive it."
    monkeypatch.chdir(tmp_path)
    quiet = ["--path", tmp_path / "steps", *["--quiet", "--no-tensorboard"] * ("train" in name)]
    options = 'steps = 100_000_000\npreset = "none"\noptions = {{ n_envs = 2, warmup = 100, capacity = 1000, batch_size = 8, path = "{}" }}'
    (tmp_path / "spec.toml").write_text(SPEC.format("dqn", options.format(tmp_path / "steps")))
    commands = (
        [[x[0], *REPLAY, *x[1:], *quiet] for x in map(str.split, words)]
        if name != "bench"
        else ["bench spec.toml --jobs 2".split()]
    )
    children = [process(*command) for command in commands]
    try:
        wait_for(lambda: len(list((tmp_path / "steps").rglob("steps.npy"))) == 2, children[0])
        for child in children:
            child.send_signal(signal.SIGINT)
        for child in children:
            assert child.wait(100) == 130, child.communicate()
        assert not list((tmp_path / "steps").rglob("steps.npy"))
    finally:
        for child in children:
            child.kill(), child.communicate()
    TABLE.setdefault(("one folder for two replays", name), {})[str(HERE)] = "fine"


# --- the table


def in_columns(table) -> str:
    "The table as text: a row for each harm at a place, a column for each start method with its lag."
    names = [
        str(column) for column in COLUMNS if any(str(column) in words for words in table.values())
    ]
    rows = [
        ["harm", "place", *names],
        *([*key, *(words.get(name, "") for name in names)] for key, words in table.items()),
    ]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in rows
    )


if __name__ == "__main__":
    for cell in [*here(), *fatal(), *served(), *spawned()]:
        if text := complaint(*cell):
            print(text, file=sys.stderr)
    print(in_columns(TABLE))
