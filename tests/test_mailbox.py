"A training is edited while it runs. What it becomes is what a training becomes that is stopped, forked and resumed; the rest is refused."

import errno
import glob
import itertools
import json
import math
import os
import pathlib
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from command_line import error_of, process, rollpipe, wait_for
from gallery import check_same, config_of, gone_on, quietly, refused, updates_of

from rollpipe.pipes import AdvantageBuffer
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.graph.edits import nodes
from rollpipe.pipes.keeping import files
from rollpipe.pipes.keeping.random_states import GlobalRandomStates
from rollpipe.results.live import Live
from rollpipe.runs import Wish, fork, load_agent, open_run, replayed_run, resume, start, train
from rollpipe.runs import mailbox as module
from rollpipe.runs.commands import find_run
from rollpipe.runs.folder import load_run
from rollpipe.runs.locks import lock, unlock
from rollpipe.runs.logs import read_records
from rollpipe.runs.mailbox import Mailbox, ask, view
from rollpipe.runs.moments import diff, verify
from rollpipe.settings.config import allow_edits
from rollpipe.traces.history import History, config_at, in_words, read_request
from rollpipe.traces.journal import read_journal

N = int(os.environ.get("ROLLPIPE_EDITS", 6))  # random edits for each number of workers


WORDS = "train ppo CartPole-v1 --n-steps 16 --n-envs 2 --hidden 8 --steps 10m --no-tensorboard --quiet --out"

EDITS = """
from functools import partial
from rollpipe.pipes import FragmentCollector, Pipe, RewardScaler
from rollpipe.pipes.graph.edits import insert_after, remove

scaled = RewardScaler.inserter(after=FragmentCollector)
def clipped(pipe, clip): return insert_after(pipe, FragmentCollector, partial(RewardScaler, clip=clip))
def wrong(pipe): return 3

class Passed(Pipe):
    reads = 1
    def stream(self, items): yield from items

class Counted(Passed):
    def stream(self, items):
        kept = self.keep(n=0)
        for item in items:
            kept["n"] += 1
            yield item

passed, counted = Passed.inserter(after=FragmentCollector), Counted.inserter(after=FragmentCollector)
def without_passed(pipe): return remove(pipe, Passed)
def without_counted(pipe): return remove(pipe, Counted)
"""


@pytest.fixture(autouse=True)
def at_once(monkeypatch, tmp_path):
    "A training looks after each update, and finds a module with edits."
    monkeypatch.setattr(Mailbox, "EVERY", 0.0)
    (tmp_path / "mailbox_edits.py").write_text(EDITS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("mailbox_edits", None)


def post(folder, wish, name=None):
    "Ask, and do not wait. Returns the path of the answer."
    inbox = folder / "inbox"
    name = name or f"{random.getrandbits(128):032x}"
    inbox.mkdir(mode=0o700, exist_ok=True)
    files.write_atomically(
        inbox / f"{name}.ask", wish if isinstance(wish, bytes) else json.dumps(wish).encode()
    )
    return inbox / f"{name}.answer"


def answer(path):
    return json.loads(path.read_text())


def trained(run, plan=None, die=None):
    "Train, with wishes that are asked after given updates, unless the run knows them already. Returns the answers."
    plan = plan or {}
    asked = []

    def asks(run, record):
        n = record["updates"]
        if n == die:
            os.kill(os.getpid(), signal.SIGKILL)
        done = sum(edit["at"] == n for edit in run.history.edits)
        for k, wish in enumerate(plan.get(n, [])[done:]):
            asked.append(post(run.folder, wish, f"{n:016x}{k:016x}"))

    quietly(run, callbacks=[asks])
    return [answer(path) for path in asked]


def case(folder, name="ppo", **run):
    "A run of a case that is not trained yet."
    return start(folder, config_of(name, **run))


def killed(folder, config, plan, deaths):
    "Train in processes of their own, which are killed after these updates, until the run is complete."
    states = GlobalRandomStates()
    for die in [*deaths, None]:
        if not (pid := os.fork()):
            code = 1
            try:
                states.put()  # a forked process gets others
                trained(resume(folder) if folder.exists() else start(folder, config), plan, die=die)
                code = 0
            finally:
                os._exit(code)
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status) == (die is not None), (die, status)
        assert die is not None or not status
    return folder


# -- random edits ------------------------------------------------------------------------------------------------------

POOL = dict(
    lr=[1e-2, 3e-3, 1e-3, 1e-4],
    clip=[0.1, 0.2, 0.3],
    epochs=[1, 2, 3],
    c_entropy=[0.0, 0.01, 0.1],
    gamma=[0.9, 0.99],
    lam=[0.8, 0.95, 1.0],
    max_grad_norm=[0.5, 1.0],
    keep=[0, 2],
    checkpoint_every=[1, 5, 50],
    workers=[0, 1, 2],
    threads=[1],
)


def plan_of(rng, n_edits, n_updates):
    "Update -> wishes: options, a pipe once, and some that are refused."
    plan = {}
    inserted = False
    values = {}
    while sum(map(len, plan.values())) < n_edits:
        name = rng.choice(list(POOL))
        value = rng.choice(POOL[name])
        if values.get(name) == value:
            continue
        if not inserted and rng.random() < 0.1:
            wish = pipe_of("clipped", clip=5.0)
            inserted = True
        else:
            wish = options(**{name: value})
            values[name] = value
        plan.setdefault(rng.randrange(1, n_updates), []).append(wish)
    return dict(sorted(plan.items()))


@pytest.mark.slow
@pytest.mark.timeout(60 + 20 * N)
@pytest.mark.parametrize("workers", [0, 2])
def test_random_edits_repeat_bit_for_bit(workers, tmp_path):
    "A training that is killed and resumed equals one that is not; and both repeat from their journal, from any place."
    allow_edits("mailbox_edits")  # a resumed run, and a repeated one, need it
    made = 0
    for seed in itertools.count():
        if made >= N:
            break
        rng = random.Random(f"{seed} {workers}")
        n = rng.randrange(8, 24)
        plan = plan_of(rng, rng.randrange(1, min(20, N - made) + 1), n)
        config = config_of("pair", steps=64 * n, workers=workers, seed=seed)
        twin = tmp_path / f"twin{seed}"
        with GlobalRandomStates():
            trained(start(twin, config), plan)  # the other one begins from them, too
        deaths = sorted(rng.sample(range(2, n), rng.randrange(1, 3)))
        folder = killed(tmp_path / f"run{seed}", config, plan, deaths)

        # The same edits, in both runs and in the journal, and the same numbers
        edits = load_run(folder).history.edits
        assert edits == load_run(twin).history.edits
        assert edits == [edit for each in updates_with_edits(folder).values() for edit in each]
        check_same(twin, folder)
        found = verify(folder, n)
        assert found.is_equal and found.common == n, found
        made += len(edits)
        if seed % 4:
            continue

        # It can be forked and repeated at any update.
        at = rng.randrange(1, n)
        out = fork(folder, tmp_path / f"fork{seed}", at)
        steps = load_run(out).config["steps"]
        assert read_request(out) == {**config_at(folder, at), "steps": steps}
        again(folder, at + 1)
        assert not list(folder.glob("inbox/*.ask"))


def again(folder, update):
    "Make an update of a run again."
    with replayed_run(folder, update) as moment:
        moment.outcome(moment.agent.update(moment.batch))


# -- edits -------------------------------------------------------------------------------------------------------------

SCHEDULES = dict(clip="linear:.4:.1", lr="cosine:1e-2:1e-3")


OF_A_MEMORY = {7: dict(lr=1e-2), 15: dict(gamma=0.9)}


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "name, run, edits, deaths",
    [
        ("ppo", dict(intrinsic=0.1), {5: dict(clip=0.1)}, []),
        ("ppo", {}, {5: SCHEDULES, 9: dict(lr=1e-4)}, [8]),
        ("dqn", {}, OF_A_MEMORY, [12]),
        ("sac", {}, OF_A_MEMORY, [12]),
        ("trpo", {}, {7: dict(max_kl=0.05), 9: dict(gamma=0.9)}, [8]),
    ],
)
def test_an_edit_gives_what_a_fork_gives_also_if_the_run_is_killed(
    name, run, edits, deaths, tmp_path
):
    "The value of a schedule depends on the steps of the learner alone, from the start."
    config = config_of(name, steps=320, **run)
    plan = {at: [options(**values)] for at, values in edits.items()}
    with GlobalRandomStates():
        answers = trained(start(tmp_path / "run", config), plan)
    assert len(answers) == len(edits) and all(x["made"] for x in answers), answers
    folder = quietly(start(tmp_path / "plain", config)).folder
    for at, values in edits.items():
        folder = gone_on(fork(folder, tmp_path / f"fork{at}", at, **values)).folder
    check_same(folder, tmp_path / "run")
    if deaths:
        assert verify(tmp_path / "run", 40).is_equal
        check_same(killed(tmp_path / "killed", config, plan, deaths), tmp_path / "run")


@pytest.mark.slow
def test_an_edit_takes_effect_is_told_and_can_be_undone(tmp_path):
    about = dict(keep=3, checkpoint_every=2)
    run = case(tmp_path / "run", steps=640, **about)
    folder = run.folder
    plan = {
        5: [options(clip=0.5, lr=1e-4)],
        9: [options(steps=800), options(c_entropy=0.1)],
    }
    told = ["clip=0.5, lr=0.0001 after update 5"]
    told += ["steps=800 after update 9", "c_entropy=0.1 after update 9"]
    assert [x["text"] for x in trained(run, plan)] == [f"{folder} has {text}" for text in told]

    # What the caller has is what was learned.
    assert run.counters["steps"] == 800 and run.config["options"]["clip"] == 0.5
    assert (run.agent.steps, {g["lr"] for g in run.agent.optimizer.param_groups}) == (800, {1e-4})

    # The journal, the records and the history have them; what was asked for stays.
    lines = updates_with_edits(folder)
    assert [*lines] == [5, 9] and [*map(in_words, lines[9])] == ["steps=800", "c_entropy=0.1"]
    assert f"{folder} was edited after update 5: clip=0.5, lr=0.0001" in str(verify(folder, 25))
    assert json.loads((folder / "config.json").read_text())["options"]["clip"] == 0.2
    assert config_at(folder, math.inf)["options"]["clip"] == 0.5
    assert [r["updates"] for r in read_records(folder)] == [*range(1, 26)]
    assert find_run(folder, config_of("ppo", steps=800, **about)).counters["steps"] == 800

    # A fork from before them has none.
    undone = gone_on(fork(folder, tmp_path / "undone", 4)).folder
    plain = quietly(case(tmp_path / "plain", steps=640, **about)).folder
    check_same(plain, undone)
    parting = diff(plain, folder).parting
    assert (parting.after, parting.by) == (4, 6)  # updates with checkpoints have lines in both


@pytest.mark.slow
def test_edits_are_made_again_if_a_run_goes_back(tmp_path):
    plan = {6: [options(clip=0.5)], 9: [options(lr=1e-4)]}
    folder, twin = tmp_path / "run", tmp_path / "twin"
    for place in (folder, twin):
        trained(case(place, steps=480, keep=20, checkpoint_every=1), plan)
    back = folder / "checkpoints" / "checkpoint-000000128.safetensors"
    pid = os.fork()
    if not pid:
        trained(resume(back), die=7)
    os.waitpid(pid, 0)

    # What is due does not hold yet.
    events = [(x["event"], x["at"]) for x in History.read(folder)]
    assert [x for x in events if x[0] in ("edited", "due")] == [("edited", 6), ("due", 9)]
    assert config_at(folder, math.inf)["options"]["lr"] != 1e-4
    assert [edit["at"] for edit in load_run(folder).history.edits] == [6]
    gone_on(folder)
    check_same(twin, folder)
    assert load_run(folder).history.edits == load_run(twin).history.edits
    assert updates_with_edits(folder) == updates_with_edits(twin)

    # A fork from a checkpoint that knows the edits to come
    undone = gone_on(fork(folder, tmp_path / "undone", 5)).folder
    check_same(quietly(case(tmp_path / "plain", steps=480)).folder, undone)


@pytest.mark.slow
def test_an_edit_waits_for_the_evaluation_under_way(tmp_path):
    run = case(tmp_path / "run", steps=320, eval_every=4, eval_episodes=40)
    trained(run, {5: [options(clip=0.5)]})
    assert run.history.edits[0]["at"] == 5
    assert 4 in [r.get("eval_version") for r in read_records(run.folder)]


def test_the_best_checkpoint_from_before_an_edit_of_its_update_is_refused_and_nothing_is_lost(
    tmp_path,
):
    evaluated = dict(eval_every="128 steps", eval_episodes=20, final_episodes=1)
    run = case(tmp_path / "run", steps=192, keep=9, **evaluated)
    trained(run, {4: [options(clip=0.5)]})
    assert run.history.edits[0]["at"] == load_run(run.folder, best=True).counters["updates"] == 4
    before = run.checkpoint.read_bytes()
    refused("lacks an edit of its update", resume, run.best)
    assert run.checkpoint.read_bytes() == before


@pytest.mark.slow
def test_steps_that_are_edited_and_set_by_a_resume(tmp_path):
    "A repetition goes past the end that the edit has set, and a fork from before the edit has the steps from before it."
    run = case(tmp_path / "run", steps=320)
    trained(run, {3: [options(steps=480)]})
    trained(resume(run.folder, 640), {18: [options(clip=0.5)]})
    assert verify(run.folder, 20).common == 20
    for at, steps in ((2, 320), (4, 640), (15, 640), (19, 640)):
        assert load_run(fork(run.folder, tmp_path / str(at), at)).config["steps"] == steps


@pytest.mark.slow
def test_an_edit_and_a_stop_in_one_look_leave_a_line(tmp_path):
    "The run that goes on does not write it once more."
    run = case(tmp_path / "run", steps=320)
    made = [dict(clip=0.1), dict(lr=1e-4)]
    wishes = [*(dict(set=x) for x in made), dict(do="stop")]
    refused("", trained, run, {5: wishes}, error=KeyboardInterrupt)
    for _ in range(2):
        lines = updates_with_edits(run.folder)
        assert [*lines] == [5] and [x["set"] for x in lines[5]] == made
        if updates_of(run.folder) == 5:
            gone_on(run.folder)
    assert verify(run.folder, 10).is_equal


def test_a_run_that_stops_is_not_edited(tmp_path):
    asked = []

    def callback(run, record):
        if record["updates"] != 5:
            return None
        asked.append(post(run.folder, options(clip=0.5)))
        return Wish(stop="enough")

    run = quietly(case(tmp_path / "run", steps=640), callbacks=[callback])
    assert run.counters["updates"] == 5
    assert "the training has ended" in answer(asked[0])["text"]
    assert load_run(run.folder).history.stopped == "enough"
    assert not updates_with_edits(run.folder)


@pytest.mark.slow
def test_an_edit_may_stop_a_run(tmp_path):
    run = case(tmp_path / "edited", steps=640, keep=9)
    folder = run.folder
    (reply,) = trained(run, {5: [options(stop_after="0.001 s")]})
    assert reply["made"], reply
    assert updates_of(folder) == 5
    assert run.history.stopped == "0.001 s of training have passed"
    assert [*updates_with_edits(folder)] == [5] and load_run(folder).history.stopped
    assert verify(folder, 5).is_equal
    refused("is complete", resume, folder)

    # It goes on from where it stopped, without the rule.
    run = gone_on(folder, steps=640)
    plain = quietly(case(tmp_path / "plain", steps=640)).folder
    assert diff(plain, folder).is_equal and run.config["stop_after"] is None
    again(folder, 7)
    assert load_run(fork(folder, tmp_path / "fork", 7)).config["stop_after"] is None


@pytest.mark.slow
def test_a_pipe_is_inserted(tmp_path, capsys):
    run = case(tmp_path / "run", steps=640)
    wishes = [pipe_of(name) for name in ("gone", "wrong", "scaled", "scaled")]
    absent = dict(insert="no_module_of_this_name:x", kwargs={})
    found = trained(run, {5: wishes, 6: [absent]})
    assert [x["made"] for x in found] == [False, False, True, False, False]
    texts = (
        "there is no edit 'mailbox_edits:gone'",
        "is no edit. Expected a function",
        "has mailbox_edits:scaled()",
        "their states have one name",
        "No module named",
    )
    assert [text for x, text in zip(found, texts) if text not in x["text"]] == []
    assert load_run(run.folder).config["imports"] == ["mailbox_edits"]
    assert "RewardScaler" in str(diff(run.folder, run.folder))
    assert verify(run.folder, 20).is_equal
    sys.modules.pop("mailbox_edits")
    told = error_of(capsys, f"verify {run.folder}")
    assert f"{run.folder}: its edit 'mailbox_edits:scaled' needs the module" in told
    assert "Expected --import mailbox_edits" in told
    assert rollpipe(f"verify {run.folder} --import mailbox_edits") == 0


@pytest.mark.slow
def test_a_pipe_of_the_lanes_is_taken_out_unless_it_keeps_something(tmp_path):
    run = case(tmp_path / "run", steps=640)
    names = ("passed", "without_passed", "counted", "without_counted")
    found = trained(run, {n: [pipe_of(name)] for n, name in enumerate(names, 3)})
    assert [x["made"] for x in found] == [True, True, True, False]
    assert "lacks pipes that kept something. Expected Counted, got " in found[3]["text"]
    assert run.counters["steps"] >= 640 and verify(run.folder, 20).is_equal


def test_a_refused_edit_leaves_no_trace(gallery, tmp_path):
    "Neither in the numbers nor in the files."
    impossible = [
        dict(n_envs=3),
        dict(clip="a"),
        dict(clip=-1.0),
        dict(clips=0.1),
        dict(hidden=[4]),
        dict(steps=3),
        dict(seed=1),
        dict(clip=0.2),
        dict(workers=2),
        dict(lr=1e-2, lanes=2),
    ]
    nonsense = [b"[" * 5000, b"\xff", b"{}", b'{"do": "rm -rf"}']
    nonsense += [b'{"set": {"clip": 1e999}}', b" " * 10**6]
    run = case(tmp_path / "run", steps=320, keep=2)
    answers = trained(run, {4: [dict(set=x) for x in impossible], 5: nonsense})
    assert not any(x["made"] for x in answers) and len(answers) == 16
    assert "cannot have another n_envs" in answers[0]["text"]
    assert "it changes nothing" in answers[7]["text"]

    # Only answers that nobody read are left.
    plain = gallery.original("ppo")
    check_same(plain, run.folder)
    assert not load_run(run.folder).history.edits and not updates_with_edits(run.folder)
    assert {*os.listdir(run.folder)} - {*os.listdir(plain)} == {"inbox"}


def test_what_python_has_edited_and_what_is_inexact_is_refused(tmp_path):
    import mailbox_edits

    from rollpipe.runs.states import edited

    python = edited(case(tmp_path / "a", steps=320), mailbox_edits.scaled)
    (reply,) = trained(python, {3: [options(clip=0.1)]})
    assert "Python has edited" in reply["text"]
    inexact = case(tmp_path / "b", "dqn", steps=320, workers=1, lag=None)
    replies = trained(inexact, {3: [options(lr=0.1), dict(do="save")]})
    assert "got lag=None" in replies[0]["text"]
    assert "is saved after update 3" in replies[1]["text"]


# -- pause, save, stop -------------------------------------------------------------------------------------------------


def begun(folder):
    "A process that trains, and has made an update."
    child = process(f"{WORDS} {folder}")
    wait_for(lambda: (folder / "metrics.jsonl").exists() and read_records(folder), child)
    return child


def paused(run):
    "Ask a training to pause. Returns the update after which it does."
    return int(run.ask("pause").rpartition(" ")[2])


# -- pause, save, stop -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_waits_is_edited_goes_on_and_stops(tmp_path, capsys):
    "By two who ask at the same time, in processes of their own."
    folder = tmp_path / "run"
    child = begun(folder)
    run = open_run(folder)
    n = paused(run)
    time.sleep(0.3)
    assert read_records(folder)[-1]["updates"] == n
    assert "a process trains it, and is paused;" in view(folder)

    # Four ask at once.
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda k: run.ask(clip=0.1 + k / 100), range(4))]
    assert len(found) == 4 and all(f"after update {n}" in text for text in found)
    assert [edit["at"] for edit in load_run(folder).history.edits] == [n] * 4

    # The command asks as well; `--set` sets options only.
    assert rollpipe(f"edit {folder} --set lr=1e-4 --set epochs=1 --save --go-on") == 0
    assert f"has lr=0.0001, epochs=1 after update {n}" in capsys.readouterr().out
    refusal = error_of(capsys, f"edit {folder} --set n-envs=3")
    assert "refuses. Got leaf n_envs: " in refusal
    for word in ("insert=mailbox_edits:scaled", "timeout=5", "do=stop"):
        told = f"{folder}: there is no option '{word.partition('=')[0]}'"
        assert told in error_of(capsys, f"edit {folder} --set {word}")
    assert "paused" not in view(folder)
    assert rollpipe(f"edit {folder} --stop") == 0
    assert child.wait(60) == 130
    assert "continue with: rollpipe train --resume" in child.communicate()[1]
    assert updates_of(folder) == read_records(folder)[-1]["updates"] > n
    assert not (folder / "inbox").exists()
    assert len(updates_with_edits(folder)[n]) == 5 and verify(folder, n + 3).is_equal
    assert "no training in" in error_of(capsys, f"edit {folder} --save")


def in_a_thread(run):
    "Train in a thread, until it has made some updates. Returns the thread, and where its last record will be."
    records = []
    keywords = dict(progress=False, tensorboard=False)
    thread = threading.Thread(target=lambda: records.append(train(run, **keywords)))
    thread.start()
    wait_for(lambda: run.counters["updates"] > 2)
    return thread, records


def test_a_training_in_a_thread_has_its_folder_alone_and_returns_when_it_is_asked_to_stop(tmp_path):
    "Also if the cell of a notebook is run twice. An exception would be printed with its traceback."
    run = case(tmp_path / "run", steps=10**7)
    training, records = in_a_thread(run)
    told = "this process is training in .*/run. Expected another folder, or the end"
    refused(told, start, run.folder, run.config, overwrite=True)
    refused(told, resume, run.folder)
    refused(told, train, run)
    open_run(run.folder).ask("stop")
    training.join()
    assert records == read_records(run.folder)[-1:]
    n = records[0]["updates"]
    assert n == updates_of(run.folder) == resume(run.folder).counters["updates"]


@pytest.mark.slow
def test_signals_end_a_pause_and_a_dead_training_does_not_answer(tmp_path):
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        folder = tmp_path / str(int(number))
        child = begun(folder)
        run = open_run(folder)
        n = paused(run)
        child.send_signal(number)
        child.communicate(timeout=60)
        assert child.returncode in (code, -number)
        if number == signal.SIGTERM:
            assert updates_of(folder) == n
        refused("no training in", run.ask, "save", timeout=0.2)
        assert not (folder / "inbox").exists() and "paused" not in view(folder)
    assert (folder / "paused").exists()  # it was killed
    gone_on(folder, steps=load_run(folder).counters["steps"] + 64)
    assert not (folder / "paused").exists()


def test_what_was_asked_before_a_start_or_in_the_end_is_refused(tmp_path):
    run = case(tmp_path / "run", steps=160)
    unlock(run.folder)
    old = post(run.folder, options(clip=0.1))
    time.sleep(0.05)
    run = resume(run.folder)

    # The process of the second one has the lock, and does not look yet; the third comes after the last update.
    new = post(run.folder, options(clip=0.3))
    (late,) = trained(run, {5: [dict(do="save")]})
    assert answer(old)["text"] == "it was asked before this training began"
    assert "the training has ended" in late["text"]
    assert answer(new)["made"]
    assert [edit["set"] for edit in load_run(run.folder).history.edits] == [dict(clip=0.3)]


def test_an_ask_that_nobody_answers_leaves_the_lock(tmp_path):
    "A process that closes any descriptor of a file loses its locks on it."
    folder = case(tmp_path / "run").folder
    told = f"process {os.getpid()}: it may be dead"
    refused(told, ask, folder, dict(do="save"), timeout=0.01)
    if not (pid := os.fork()):
        try:
            lock(folder)
        except DataError:
            os._exit(3)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    unlock(folder)


# -- hostile files, full disks -----------------------------------------------------------------------------------------


def test_what_is_no_wish_is_refused(tmp_path):
    run = case(tmp_path / "run", steps=320)
    secret = tmp_path / "secret"
    secret.write_text("not JSON")
    inbox = run.folder / "inbox"

    def plant(run, record):
        if record["updates"] != 3:
            return
        inbox.mkdir()
        (inbox / f"{1:032x}.ask").symlink_to(secret)
        os.mkfifo(inbox / f"{2:032x}.ask")
        (inbox / f"{3:032x}.ask").mkdir()
        (inbox / "other.ask").write_text("{}")
        (inbox / f".{5:032x}.ask.0123456789abcdef.tmp").write_text('{"do": ')  # half-written

    quietly(run, callbacks=[plant])
    answers = [answer(path) for path in inbox.glob("*.answer")]
    assert len(answers) == 4 and not any(x["made"] for x in answers)
    assert not load_run(run.folder).history.edits and secret.read_text() == "not JSON"


def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device", "checkpoint.safetensors")


def test_a_full_disk_refuses_an_edit_and_the_training_goes_on(gallery, tmp_path, monkeypatch):
    plain = gallery.original("ppo")
    run = case(tmp_path / "run", steps=320, keep=2)
    write = files.write_atomically

    def perhaps_full(path, data):
        is_full = path.name.startswith("checkpoint") and run.counters["updates"] == 7
        return full() if is_full else write(path, data)

    of_runs = sys.modules["rollpipe.runs.folder"].files
    monkeypatch.setattr(of_runs, "write_atomically", perhaps_full)
    answers = trained(run, {7: [options(clip=0.1), dict(do="save")]})
    assert len(answers) == 2 and all("No space left on device" in x["text"] for x in answers)
    check_same(plain, run.folder)


def test_an_edit_whose_answer_cannot_be_written_is_made(tmp_path, monkeypatch, caplog):
    run = case(tmp_path / "other", steps=320)
    monkeypatch.setattr(module, "write_atomically", full)

    def asks(run, record):
        if record["updates"] == 4:
            post(run.folder, options(clip=0.1))

    quietly(run, callbacks=[asks])
    assert [edit["at"] for edit in load_run(run.folder).history.edits] == [4]
    assert "could not be written" in caplog.text


def test_a_look_costs_little(tmp_path, monkeypatch):
    "At most one each 20 ms, of some microseconds: less than a thousandth of the time. The calls are counted."
    mailbox = Mailbox(tmp_path)
    mailbox.EVERY = 0.02
    looks = []
    monkeypatch.setattr(Path, "is_dir", lambda path: looks.append(path) or False)
    begun = time.monotonic()
    while time.monotonic() < begun + 0.2:
        mailbox.waits()
    most = 1 + (time.monotonic() - begun) / mailbox.EVERY
    assert 1 <= len(looks) <= most + 1 and {*looks} == {tmp_path / "inbox"}


@pytest.mark.slow
def test_the_page_asks_a_training_and_shows_what_it_says(tmp_path):
    run = case(tmp_path / "run", steps=10**7)
    training, _ = in_a_thread(run)
    pages = []
    with Live([run.folder]) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        wishes = ("clip=0.1", "n_envs=3", "steps=9k", "nothing")
        for form in (dict(do="pause"), *(dict(set=x) for x in wishes), dict(do="go_on"), None):
            data = urlencode(dict(run=0, **form)).encode() if form else None
            address = server.url + ("ask" if form else "view")
            with urlopen(address, data, timeout=60) as page:
                pages.append(page.read().decode())
        server.shutdown()
        serving.join()
    training.join()
    texts = ("is paused after", "has clip=0.1 after", "cannot have another n_envs")
    texts += ("has steps=9000", "NAME=VALUE", "goes on", "<svg")
    assert [text in page for text, page in zip(texts, pages)] == [True] * 7
    assert run.counters["steps"] >= 9000 and run.config["options"]["clip"] == 0.1


@pytest.mark.slow
def test_the_configuration_of_a_stranger_calls_nothing(gallery, tmp_path, monkeypatch):
    "It names any function, and modules that are imported anyway. Only the user names modules whose functions are called."
    called = []
    anything = ModuleType("anything")
    monkeypatch.setitem(sys.modules, "anything", anything)

    def touch(pipe, **kwargs):
        called.append(kwargs)

    touch.__module__ = "anything"
    anything.touch = touch
    folder = gallery.copy("ppo", tmp_path / "run")
    found = load_run(folder)
    inserts = [dict(insert="anything:touch", kwargs=dict(x=1))]
    config = {**found.config, "steps": 10**6, "imports": ["anything"], "inserts": inserts}
    data = found._replace(config=config, pipes=None, stream=None).data()
    files.write_atomically(folder / "checkpoint.safetensors", data)
    load_agent(folder)
    told = "the edit 'anything:touch' needs its module. Expected --import anything"
    refused(told, resume, folder)
    assert rollpipe(f"pack {folder} --episodes 1") == 0 and not called


def test_a_folder_of_questions_that_goes_while_it_is_read_ends_no_training(tmp_path, monkeypatch):
    "Whoever asks removes the folder with his answer, perhaps between two calls of the training."
    (tmp_path / "inbox").mkdir()
    scandir = os.scandir

    def removed_before(path="."):
        if Path(path).name == "inbox":
            os.rmdir(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removed_before)
    # In these versions, pathlib has a reference of its own.
    if sys.version_info >= (3, 13):
        monkeypatch.setattr(glob._StringGlobber, "scandir", staticmethod(removed_before))
    if sys.version_info < (3, 11):
        monkeypatch.setattr(pathlib._NormalAccessor, "scandir", staticmethod(removed_before))
    assert list(Mailbox(tmp_path).take()) == []
    assert not (tmp_path / "inbox").exists()


def test_a_pipe_that_python_has_changed_in_place_is_told_and_not_lost(tmp_path):
    "The run that goes on with an edit is built from the configuration, which does not know the change."
    run = case(tmp_path / "run", steps=320)
    (buffer,) = (pipe for pipe in nodes(run.pipe) if isinstance(pipe, AdvantageBuffer))
    buffer.gamma = 0.5
    (reply,) = trained(run, {5: [options(clip=0.1)]})
    assert not reply["made"]
    assert "that Python has edited" in reply["text"] and "gamma: 0.99 != 0.5" in reply["text"]
    assert buffer.gamma == 0.5 and not run.history.edits


def updates_with_edits(folder):
    return {e.updates: e.edits for e in read_journal(folder / "journal.jsonl") if e.edits}


def options(**values):
    "The wish that these options change."
    return dict(set=values)


def pipe_of(name, **kwargs):
    "The wish that a pipe of the module is inserted, or taken out."
    return dict(insert=f"mailbox_edits:{name}", kwargs=kwargs)
