"A training is edited while it runs. What it becomes is what a training becomes that is stopped, forked and resumed; the rest is refused."

import errno
import glob
import json
import math
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from command_line import process, rollpipe, wait_for
from test_crash import CASES, POLE, config_of
from test_fork import check_same

from rollpipe.agents import PPO
from rollpipe.pipes import AdvantageBuffer
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.graph.edits import nodes
from rollpipe.pipes.keeping import files
from rollpipe.pipes.keeping.random_states import GlobalRandomStates
from rollpipe.results.live import Live
from rollpipe.runs import Wish, fork, load_agent, open_run, replayed_run, resume, start, train
from rollpipe.runs import mailbox as module
from rollpipe.runs.asking import view
from rollpipe.runs.commands import find_run
from rollpipe.runs.folder import load_run
from rollpipe.runs.locks import lock, unlock
from rollpipe.runs.logs import read_records
from rollpipe.runs.mailbox import Mailbox, ask
from rollpipe.runs.moments import diff, verify
from rollpipe.settings.config import allow_edits
from rollpipe.traces.history import History, config_at, in_words, read_request
from rollpipe.traces.journal import read_journal

N = int(os.environ.get("ROLLPIPE_EDITS", 6))  # random edits for each number of workers
CASES["pair"] = PPO, POLE, dict(CASES["ppo"][2], lanes=2, decay_steps=4000)
WORDS = "train ppo CartPole-v1 --n-steps 16 --n-envs 2 --hidden 8 --steps 10m --no-tensorboard --quiet --out".split()
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


def trained(run, plan, answers=None, die=None):
    "Train, with wishes that are asked after given updates, unless the run knows them already."

    def asks(run, record):
        n = record["updates"]
        if n == die:
            os.kill(os.getpid(), signal.SIGKILL)
        done = sum(edit["at"] == n for edit in run.history.edits)
        for k, wish in enumerate(plan.get(n, [])[done:]):
            path = post(run.folder, wish, f"{n:016x}{k:016x}")
            if answers is not None:
                answers.append(path)

    train(run, progress=False, tensorboard=False, callbacks=[asks])
    return run


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
        assert os.WIFSIGNALED(status) == (die is not None) and not (die is None and status), (
            die,
            status,
        )
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
        if values.get(name) == (x := rng.choice(POOL[name])):
            continue
        wish = dict(set={name: x})
        if not inserted and rng.random() < 0.1:
            wish = dict(insert="mailbox_edits:clipped", kwargs=dict(clip=5.0))
            inserted = True
        else:
            values[name] = x
        plan.setdefault(rng.randrange(1, n_updates), []).append(wish)
    return dict(sorted(plan.items()))


@pytest.mark.slow
@pytest.mark.timeout(60 + 20 * N)
@pytest.mark.parametrize("workers", [0, 2])
def test_random_edits_repeat_bit_for_bit(workers, tmp_path):
    "A training that is killed and resumed equals one that is not; and both repeat from their journal, from any place."
    allow_edits("mailbox_edits")  # a resumed run, and a repeated one, need it
    made = 0
    for seed in range(10**6):
        if made >= N:
            break
        rng = random.Random(f"{seed} {workers}")
        n = rng.randrange(8, 24)
        plan = plan_of(rng, rng.randrange(1, min(20, N - made) + 1), n)
        config = config_of("pair", steps=64 * n, workers=workers, seed=seed)
        with GlobalRandomStates():
            twin = trained(
                start(tmp_path / f"twin{seed}", config), plan
            )  # the other one begins from them, too
        deaths = sorted(rng.sample(range(2, n), rng.randrange(1, 3)))
        folder = killed(tmp_path / f"run{seed}", config, plan, deaths)
        edits = load_run(folder).history.edits
        assert (
            edits
            == load_run(twin.folder).history.edits
            == [edit for e in lines(folder).values() for edit in e]
        )
        check_same(twin.folder, folder)
        found = verify(folder, n)
        assert found.is_equal and found.common == n, found
        made += len(edits)
        if seed % 4:
            continue
        at = rng.randrange(1, n)
        out = fork(folder, tmp_path / f"fork{seed}", at)
        assert read_request(out) == {
            **config_at(folder, at),
            "steps": load_run(out).config["steps"],
        }
        with replayed_run(folder, at + 1) as moment:
            moment.outcome(moment.agent.update(moment.batch))
        assert not (folder / "inbox").exists() or not list((folder / "inbox").glob("*.ask"))


def lines(folder):
    return {e.updates: e.edits for e in read_journal(folder / "journal.jsonl") if e.edits}


# -- edits -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_edit_takes_effect_is_told_and_can_be_undone(tmp_path, caplog):
    config = config_of("ppo", steps=640, keep=3, checkpoint_every=2)
    answers = []
    run = start(tmp_path / "run", config)
    trained(
        run,
        {
            5: [dict(set=dict(clip=0.5, lr=1e-4))],
            9: [dict(set=dict(steps=800)), dict(set=dict(c_entropy=0.1))],
        },
        answers,
    )
    assert [answer(path)["text"] for path in answers] == [
        f"{run.folder} has {text}"
        for text in (
            "clip=0.5, lr=0.0001 after update 5",
            "steps=800 after update 9",
            "c_entropy=0.1 after update 9",
        )
    ]
    assert (
        run.counters["steps"] == 800 and run.config["options"]["clip"] == 0.5
    )  # what the caller has is what was learned
    assert (run.agent.steps, {g["lr"] for g in run.agent.optimizer.param_groups}) == (800, {1e-4})
    assert [*map(in_words, lines(run.folder)[9])] == ["steps=800", "c_entropy=0.1"] and [
        *lines(run.folder)
    ] == [5, 9]
    assert f"{run.folder} was edited after update 5: clip=0.5, lr=0.0001" in str(
        verify(run.folder, 25)
    )
    assert json.loads((run.folder / "config.json").read_text())["options"]["clip"] == 0.2
    assert config_at(run.folder, math.inf)["options"]["clip"] == 0.5
    assert [r["updates"] for r in read_records(run.folder)] == [*range(1, 26)]
    assert (
        find_run(run.folder, config_of("ppo", steps=800, keep=3, checkpoint_every=2)).counters[
            "steps"
        ]
        == 800
    )
    undone = trained(resume(fork(run.folder, tmp_path / "undone", 4)), {})
    plain = trained(start(tmp_path / "plain", config), {})
    check_same(plain.folder, undone.folder)
    parting = diff(plain.folder, run.folder).parting
    assert (parting.after, parting.by) == (4, 6)  # updates with checkpoints have lines in both


@pytest.mark.slow
def test_edits_are_made_again_if_a_run_goes_back(tmp_path):
    plan = {6: [dict(set=dict(clip=0.5))], 9: [dict(set=dict(lr=1e-4))]}
    run = trained(
        start(tmp_path / "run", config_of("ppo", steps=480, keep=20, checkpoint_every=1)), plan
    )
    twin = trained(
        start(tmp_path / "twin", config_of("ppo", steps=480, keep=20, checkpoint_every=1)), plan
    )
    back = run.folder / "checkpoints" / "checkpoint-000000128.safetensors"
    pid = os.fork()
    if not pid:
        trained(resume(back), {}, die=7)
    os.waitpid(pid, 0)
    history = History.read(run.folder)
    assert [(x["event"], x["at"]) for x in history if x["event"] in ("edited", "due")] == [
        ("edited", 6),
        ("due", 9),
    ]
    # What is due does not hold yet.
    assert config_at(run.folder, math.inf)["options"]["lr"] != 1e-4
    assert [edit["at"] for edit in load_run(run.folder).history.edits] == [6]
    trained(resume(run.folder), {})
    check_same(twin.folder, run.folder)
    assert load_run(run.folder).history.edits == load_run(twin.folder).history.edits
    assert lines(run.folder) == lines(twin.folder)
    undone = trained(
        resume(fork(run.folder, tmp_path / "undone", 5)), {}
    )  # from a checkpoint that knows the edits to come
    plain = trained(start(tmp_path / "plain", config_of("ppo", steps=480)), {})
    check_same(plain.folder, undone.folder)


def test_an_edit_waits_for_the_evaluation_under_way(tmp_path):
    run = trained(
        start(tmp_path / "run", config_of("ppo", steps=320, eval_every=4, eval_episodes=40)),
        {5: [dict(set=dict(clip=0.5))]},
    )
    assert run.history.edits[0]["at"] == 5 and 4 in [
        r["eval_version"] for r in read_records(run.folder) if "eval_version" in r
    ]


def test_the_best_checkpoint_from_before_an_edit_of_its_update_is_refused_and_nothing_is_lost(
    tmp_path,
):
    config = config_of(
        "ppo", steps=192, keep=9, eval_every="128 steps", eval_episodes=20, final_episodes=1
    )
    run = trained(start(tmp_path / "run", config), {4: [dict(set=dict(clip=0.5))]})
    assert run.history.edits[0]["at"] == load_run(run.folder, best=True).counters["updates"] == 4
    before = (run.folder / "checkpoint.safetensors").read_bytes()
    with pytest.raises(DataError, match="lacks an edit of its update"):
        resume(run.best)
    assert (run.folder / "checkpoint.safetensors").read_bytes() == before


@pytest.mark.slow
def test_steps_that_are_edited_and_set_by_a_resume(tmp_path):
    "A repetition goes past the end that the edit has set, and a fork from before the edit has the steps from before it."
    run = trained(
        start(tmp_path / "run", config_of("ppo", steps=320)), {3: [dict(set=dict(steps=480))]}
    )
    trained(resume(run.folder, 640), {18: [dict(set=dict(clip=0.5))]})
    assert verify(run.folder, 20).common == 20
    for at, steps in ((2, 320), (4, 640), (15, 640), (19, 640)):
        assert load_run(fork(run.folder, tmp_path / str(at), at)).config["steps"] == steps


@pytest.mark.slow
def test_an_edit_of_a_schedule_gives_what_a_fork_gives(tmp_path):
    "The value depends on the steps of the learner alone, from the start."
    config = config_of("ppo", steps=640)
    new = dict(clip="linear:.4:.1", lr="cosine:1e-2:1e-3")
    answers: list = []
    run = trained(
        start(tmp_path / "run", config), {5: [dict(set=new)], 9: [dict(set=dict(lr=1e-4))]}, answers
    )
    assert (
        all(answer(path)["made"] for path in answers)
        and run.config["options"]["clip"] == "linear:0.4:0.1:640"
    )
    plain = trained(start(tmp_path / "plain", config), {})
    first = trained(resume(fork(plain.folder, tmp_path / "first", 5, **new)), {})
    second = trained(resume(fork(first.folder, tmp_path / "second", 9, lr=1e-4)), {})
    check_same(second.folder, run.folder)
    assert verify(run.folder, 20).is_equal


def test_a_run_that_rewards_novelty_is_edited_as_its_fork_is(tmp_path):
    "Its pipe takes options by any name, so all of its attributes count, but for those of an iteration."
    config = config_of("ppo", steps=640, intrinsic=0.1)
    answers: list = []
    edits = {5: [dict(set=dict(clip=0.1))]}
    run = trained(start(tmp_path / "run", config), edits, answers)
    assert [answer(path)["made"] for path in answers] == [True], answer(answers[0])
    plain = trained(start(tmp_path / "plain", config), {})
    forked = trained(resume(fork(plain.folder, tmp_path / "fork", 5, clip=0.1)), {})
    check_same(forked.folder, run.folder)


def test_an_edit_and_a_stop_in_one_look_leave_a_line(tmp_path):
    "The run that goes on does not write it once more."
    run = start(tmp_path / "run", config_of("ppo", steps=320))
    made = [dict(clip=0.1), dict(lr=1e-4)]
    with pytest.raises(KeyboardInterrupt):
        trained(run, {5: [*(dict(set=x) for x in made), dict(do="stop")]})
    for _ in range(2):
        assert [
            (e.updates, [x["set"] for x in e.edits])
            for e in read_journal(run.folder / "journal.jsonl")
            if e.edits
        ] == [(5, made)]
        if load_run(run.folder).counters["updates"] == 5:
            trained(resume(run.folder), {})
    assert verify(run.folder, 10).is_equal


@pytest.mark.slow
def test_a_run_that_stops_is_not_edited_and_an_edit_may_stop_it(tmp_path):
    answers: list = []

    def callback(run, record):
        if record["updates"] != 5:
            return None
        answers.append(post(run.folder, dict(set=dict(clip=0.5))))
        return Wish(stop="enough")

    run = start(tmp_path / "run", config_of("ppo", steps=640))
    assert train(run, progress=False, tensorboard=False, callbacks=[callback])["updates"] == 5
    assert "the training has ended" in answer(answers[0])["text"]
    assert load_run(run.folder).history.stopped == "enough" and not lines(run.folder)

    run = start(tmp_path / "edited", config_of("ppo", steps=640, keep=9))

    def asks(run, record):
        if record["updates"] == 5:
            answers.append(post(run.folder, dict(set=dict(stop_after="0.001 s"))))

    record = train(run, progress=False, tensorboard=False, callbacks=[asks])
    assert answer(answers[1])["made"], answer(answers[1])
    assert record["updates"] == 5 and run.history.stopped == "0.001 s of training have passed"
    assert (
        [*lines(run.folder)] == [5]
        and load_run(run.folder).history.stopped
        and verify(run.folder, 5).is_equal
    )
    with pytest.raises(DataError, match="is complete"):
        resume(run.folder)
    again = trained(resume(run.folder, 640), {})
    plain = trained(start(tmp_path / "plain", config_of("ppo", steps=640)), {})
    assert diff(plain.folder, again.folder).is_equal and again.config["stop_after"] is None
    with replayed_run(run.folder, 7) as moment:
        moment.outcome(moment.agent.update(moment.batch))  # from where it stopped
    assert load_run(fork(run.folder, tmp_path / "fork", 7)).config["stop_after"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn", "sac", "trpo"])
def test_learners_with_and_without_a_memory(name, tmp_path):
    plan = {
        7: [dict(set=dict(lr=1e-2) if name != "trpo" else dict(max_kl=0.05))],
        20 if name != "trpo" else 9: [dict(set=dict(gamma=0.9))],
    }
    config = config_of(name, steps=320 if name != "trpo" else 480)
    answers: list = []
    with GlobalRandomStates():
        twin = trained(start(tmp_path / "twin", config), plan, answers)
    assert any(answer(path)["made"] for path in answers), [answer(path) for path in answers]
    folder = killed(tmp_path / "run", config, plan, [12])
    check_same(twin.folder, folder)
    assert verify(folder, 40).is_equal
    assert not (set((folder / "replay").glob("*")) if name == "trpo" else set()) and load_run(
        folder
    )


@pytest.mark.slow
def test_a_pipe_is_inserted(tmp_path, capsys):
    run = start(tmp_path / "run", config_of("ppo", steps=640))
    answers = []
    wishes = [
        dict(insert=f"mailbox_edits:{name}", kwargs={})
        for name in ("gone", "wrong", "scaled", "scaled")
    ]
    trained(run, {5: wishes, 6: [dict(insert="no_module_of_this_name:x", kwargs={})]}, answers)
    found = [answer(path) for path in answers]
    assert [x["made"] for x in found] == [False, False, True, False, False]
    for x, text in zip(
        found,
        (
            "there is no edit 'mailbox_edits:gone'",
            "is no edit. Expected a function",
            "has mailbox_edits:scaled()",
            "their states have one name",
            "No module named",
        ),
    ):
        assert text in x["text"]
    assert load_run(run.folder).config["imports"] == ["mailbox_edits"] and "RewardScaler" in str(
        diff(run.folder, run.folder)
    )
    assert verify(run.folder, 20).is_equal
    sys.modules.pop("mailbox_edits")
    assert (
        rollpipe("verify", run.folder) == 2
        and "Expected --import mailbox_edits" in capsys.readouterr().err
    )
    assert rollpipe("verify", run.folder, "--import", "mailbox_edits") == 0


@pytest.mark.slow
def test_a_pipe_of_the_lanes_is_taken_out_unless_it_keeps_something(tmp_path):
    run = start(tmp_path / "run", config_of("ppo", steps=640))
    answers = []
    names = ("passed", "without_passed", "counted", "without_counted")
    trained(
        run,
        {n: [dict(insert=f"mailbox_edits:{name}", kwargs={})] for n, name in enumerate(names, 3)},
        answers,
    )
    found = [answer(path) for path in answers]
    assert [x["made"] for x in found] == [True, True, True, False]
    assert "lacks pipes that kept something. Expected Counted, got " in found[3]["text"]
    assert run.counters["steps"] >= 640 and verify(run.folder, 20).is_equal


def test_a_refused_edit_leaves_no_trace(tmp_path):
    "Neither in the numbers nor in the files."
    wishes = [
        dict(set=dict(x))
        for x in (
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
        )
    ]
    answers = []
    run = start(tmp_path / "run", config_of("ppo", steps=480))
    trained(
        run,
        {
            4: wishes,
            5: [
                b"[" * 5000,
                b"\xff",
                b"{}",
                b'{"do": "rm -rf"}',
                b'{"set": {"clip": 1e999}}',
                b" " * 10**6,
            ],
        },
        answers,
    )
    plain = trained(start(tmp_path / "plain", config_of("ppo", steps=480)), {})
    assert not any(answer(path)["made"] for path in answers) and len(answers) == 16
    assert (
        "cannot have another n_envs" in answer(answers[0])["text"]
        and "it changes nothing" in answer(answers[7])["text"]
    )
    check_same(plain.folder, run.folder)
    assert not load_run(run.folder).history.edits and not lines(run.folder)
    assert {p.name for p in run.folder.iterdir()} - {p.name for p in plain.folder.iterdir()} == {
        "inbox"
    }  # answers that nobody read


def test_what_python_has_edited_and_what_is_inexact_is_refused(tmp_path):
    import mailbox_edits

    from rollpipe.runs.states import edited

    answers: list = []
    trained(
        edited(start(tmp_path / "a", config_of("ppo", steps=320)), mailbox_edits.scaled),
        {3: [dict(set=dict(clip=0.1))]},
        answers,
    )
    trained(
        start(tmp_path / "b", config_of("dqn", steps=320, workers=1, lag=None)),
        {3: [dict(set=dict(lr=0.1)), dict(do="save")]},
        answers,
    )
    texts = [answer(path)["text"] for path in answers]
    assert (
        "Python has edited" in texts[0]
        and "got lag=None" in texts[1]
        and "is saved after update 3" in texts[2]
    )


# -- pause, save, stop -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_waits_is_edited_goes_on_and_stops(tmp_path, capsys):
    "By two who ask at the same time, in processes of their own."
    folder = tmp_path / "run"
    child = process(*WORDS, folder)
    wait_for(lambda: (folder / "metrics.jsonl").exists() and read_records(folder), child)
    run = open_run(folder)
    text = run.ask("pause")
    n = int(text.rpartition(" ")[2])
    time.sleep(0.3)
    assert read_records(folder)[-1][
        "updates"
    ] == n and "a process trains it, and is paused;" in view(folder)
    found: list = []
    threads = [
        threading.Thread(target=lambda k=k: found.append(run.ask(clip=0.1 + k / 100)))
        for k in range(4)
    ]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    assert len(found) == 4 and all(f"after update {n}" in text for text in found)
    assert [edit["at"] for edit in load_run(folder).history.edits] == [n] * 4
    assert (
        rollpipe("edit", folder, "--set", "lr=1e-4", "--set", "epochs=1", "--save", "--go-on") == 0
    )
    assert f"has lr=0.0001, epochs=1 after update {n}" in capsys.readouterr().out
    assert (
        rollpipe("edit", folder, "--set", "n-envs=3") == 2
        and "refuses. Got leaf n_envs: " in capsys.readouterr().err
    )
    for word in (
        "insert=mailbox_edits:scaled",
        "timeout=5",
        "do=stop",
    ):  # `--set` sets options only
        assert rollpipe("edit", folder, "--set", word) == 2
        assert f"{folder}: there is no option '{word.partition('=')[0]}'" in capsys.readouterr().err
    assert "paused" not in view(folder)
    assert rollpipe("edit", folder, "--stop") == 0
    assert (
        child.wait(60) == 130 and "continue with: rollpipe train --resume" in child.communicate()[1]
    )
    assert (
        load_run(folder).counters["updates"] == read_records(folder)[-1]["updates"] > n
        and not (folder / "inbox").exists()
    )
    assert len(lines(folder)[n]) == 5 and verify(folder, n + 3).is_equal
    assert rollpipe("edit", folder, "--save") == 2 and "no training in" in capsys.readouterr().err


def test_a_training_in_a_thread_has_its_folder_alone_and_returns_when_it_is_asked_to_stop(tmp_path):
    "Also if the cell of a notebook is run twice. An exception would be printed with its traceback."
    run = start(tmp_path / "run", config_of("ppo", steps=10**7))
    found = []
    training = threading.Thread(
        target=lambda: found.append(train(run, progress=False, tensorboard=False))
    )
    training.start()
    wait_for(lambda: run.counters["updates"] > 2)
    for again in (
        lambda: start(run.folder, run.config, overwrite=True),
        lambda: resume(run.folder),
        lambda: train(run),
    ):
        with pytest.raises(
            DataError,
            match="this process is training in .*/run. Expected another folder, or the end",
        ):
            again()
    open_run(run.folder).ask("stop")
    training.join()
    assert (
        found == read_records(run.folder)[-1:]
        and found[0]["updates"] == load_run(run.folder).counters["updates"]
    )
    assert resume(run.folder).counters["updates"] == found[0]["updates"]


@pytest.mark.slow
def test_signals_end_a_pause_and_a_dead_training_does_not_answer(tmp_path):
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        folder = tmp_path / str(int(number))
        child = process(*WORDS, folder)
        wait_for(
            lambda folder=folder: (folder / "metrics.jsonl").exists() and read_records(folder),
            child,
        )
        run = open_run(folder)
        n = int(run.ask("pause").rpartition(" ")[2])
        child.send_signal(number)
        child.communicate(timeout=60)
        assert child.returncode in (code, -number)
        if number == signal.SIGTERM:
            assert load_run(folder).counters["updates"] == n
        with pytest.raises(DataError, match="no training in"):
            run.ask("save", timeout=0.2)
        assert not (folder / "inbox").exists() and "paused" not in view(folder)
    assert (folder / "paused").exists()  # it was killed
    train(
        resume(folder, steps=load_run(folder).counters["steps"] + 64),
        progress=False,
        tensorboard=False,
    )
    assert not (folder / "paused").exists()


def test_what_was_asked_before_a_start_or_in_the_end_is_refused(tmp_path):
    run = start(tmp_path / "run", config_of("ppo", steps=160))
    unlock(run.folder)
    old = post(run.folder, dict(set=dict(clip=0.1)))
    time.sleep(0.05)
    run = resume(run.folder)
    answers = []
    new = post(
        run.folder, dict(set=dict(clip=0.3))
    )  # its process has the lock, and does not look yet
    trained(run, {5: [dict(do="save")]}, answers)  # after the last update
    assert answer(old)["text"] == "it was asked before this training began"
    assert "the training has ended" in answer(answers[0])["text"]
    assert answer(new)["made"] and [edit["set"] for edit in load_run(run.folder).history.edits] == [
        dict(clip=0.3)
    ]


def test_an_ask_that_nobody_answers_leaves_the_lock(tmp_path):
    "A process that closes any descriptor of a file loses its locks on it."
    run = start(tmp_path / "run", config_of("ppo"))
    with pytest.raises(DataError, match=f"process {os.getpid()}: it may be dead"):
        ask(run.folder, dict(do="save"), timeout=0.01)
    if not (pid := os.fork()):
        try:
            lock(run.folder)
        except DataError:
            os._exit(3)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    unlock(run.folder)


# -- hostile files, full disks -----------------------------------------------------------------------------------------


def test_what_is_no_wish_is_refused(tmp_path):
    run = start(tmp_path / "run", config_of("ppo", steps=320))
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

    train(run, progress=False, tensorboard=False, callbacks=[plant])
    answers = [answer(path) for path in inbox.glob("*.answer")]
    assert len(answers) == 4 and not any(x["made"] for x in answers)
    assert not load_run(run.folder).history.edits and secret.read_text() == "not JSON"


def test_a_full_disk_refuses_an_edit_and_the_training_goes_on(tmp_path, monkeypatch, caplog):
    run, plain = (
        start(tmp_path / name, config_of("ppo", steps=480, keep=2)) for name in ("run", "plain")
    )
    trained(plain, {})

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device", "checkpoint.safetensors")

    with monkeypatch.context() as patched:
        write = files.write_atomically
        answers = []

        def perhaps_full(path, data):
            full() if path.name.startswith("checkpoint") and run.counters[
                "updates"
            ] == 7 else write(path, data)

        patched.setattr(sys.modules["rollpipe.runs.folder"].files, "write_atomically", perhaps_full)
        trained(run, {7: [dict(set=dict(clip=0.1)), dict(do="save")]}, answers)
    assert ["No space left on device" in answer(path)["text"] for path in answers] == [True, True]
    check_same(plain.folder, run.folder)
    run = start(tmp_path / "other", config_of("ppo", steps=480))
    monkeypatch.setattr(module, "write_atomically", full)  # no room for an answer

    def asks(run, record):
        if record["updates"] != 4:
            return
        (run.folder / "inbox").mkdir(mode=0o700)
        (run.folder / "inbox" / f"{1:032x}.ask").write_text(json.dumps(dict(set=dict(clip=0.1))))

    train(run, progress=False, tensorboard=False, callbacks=[asks])
    assert [edit["at"] for edit in load_run(run.folder).history.edits] == [
        4
    ] and "could not be written" in caplog.text


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
    run = start(tmp_path / "run", config_of("ppo", steps=10**7))
    found = []
    training = threading.Thread(
        target=train, args=(run,), kwargs=dict(progress=False, tensorboard=False)
    )
    training.start()
    wait_for(lambda: run.counters["updates"] > 2)
    with Live([run.folder]) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        options = "clip=0.1", "n_envs=3", "steps=9k", "nothing"
        for form in (dict(do="pause"), *(dict(set=x) for x in options), dict(do="go_on")):
            data = urlencode(dict(run=0, **form)).encode()
            with urlopen(f"{server.url}ask", data, timeout=60) as page:
                found.append(page.read().decode())
        with urlopen(f"{server.url}view", timeout=60) as page:
            found.append(page.read().decode())
        server.shutdown()
        serving.join()
    training.join()
    texts = (
        "is paused after",
        "has clip=0.1 after",
        "cannot have another n_envs",
        "has steps=9000",
        "NAME=VALUE",
        "goes on",
        "<svg",
    )
    assert [text in page for text, page in zip(texts, found)] == [True] * 7
    assert run.counters["steps"] >= 9000 and run.config["options"]["clip"] == 0.1


def test_the_configuration_of_a_stranger_calls_nothing(tmp_path, monkeypatch):
    "It names any function, and modules that are imported anyway. Only the user names modules whose functions are called."
    called = []
    module = ModuleType("anything")
    monkeypatch.setitem(sys.modules, "anything", module)

    def touch(pipe, **kwargs):
        called.append(kwargs)

    touch.__module__, module.touch = "anything", touch
    train(
        run := start(tmp_path / "run", config_of("ppo", steps=320)),
        progress=False,
        tensorboard=False,
    )
    found = load_run(run.folder)
    inserts = [dict(insert="anything:touch", kwargs=dict(x=1))]
    config = {**found.config, "steps": 10**6, "imports": ["anything"], "inserts": inserts}
    files.write_atomically(
        run.folder / "checkpoint.safetensors",
        found._replace(config=config, pipes=None, stream=None).data(),
    )
    load_agent(run.folder)
    with pytest.raises(
        DataError, match="the edit 'anything:touch' needs its module. Expected --import anything"
    ):
        resume(run.folder)
    assert rollpipe("pack", run.folder, "--episodes", 1) == 0 and not called


def test_a_folder_of_questions_that_goes_while_it_is_read_ends_no_training(tmp_path, monkeypatch):
    "Whoever asks removes the folder with his answer, perhaps between two calls of the training."
    (tmp_path / "inbox").mkdir()
    scandir = os.scandir

    def removed_before(path="."):
        if Path(path).name == "inbox":
            os.rmdir(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removed_before)
    if sys.version_info >= (3, 13):  # there pathlib has a reference of its own
        monkeypatch.setattr(glob._StringGlobber, "scandir", staticmethod(removed_before))
    assert list(Mailbox(tmp_path).take()) == []
    assert not (tmp_path / "inbox").exists()


def test_a_pipe_that_python_has_changed_in_place_is_told_and_not_lost(tmp_path):
    "The run that goes on with an edit is built from the configuration, which does not know the change."
    run = start(tmp_path / "run", config_of("ppo", steps=320))
    (buffer,) = (pipe for pipe in nodes(run.pipe) if isinstance(pipe, AdvantageBuffer))
    buffer.gamma = 0.5
    answers: list = []
    trained(run, {5: [dict(set=dict(clip=0.1))]}, answers)
    reply = answer(answers[0])
    assert not reply["made"]
    assert "that Python has edited" in reply["text"] and "gamma: 0.99 != 0.5" in reply["text"]
    assert buffer.gamma == 0.5 and not run.history.edits
