"The list of observers of a training: when each is called, what becomes of what it returns, and how it ends."

import signal
import threading

import pytest
from gallery import refused

from rollpipe import PPO, Critic, MLPPolicy, on_policy
from rollpipe.pipes.data.errors import DataError
from rollpipe.runs import MetricFiles, Observer, Wish, observed, resume, start, train, training
from rollpipe.runs.folder import load_run
from rollpipe.runs.logs import read_records
from rollpipe.runs.mailbox import Mailbox, ask
from rollpipe.settings.config import make_config


def small(folder, updates=4, **run):
    options = dict(n_envs=2, n_steps=16, hidden=(8,), critic_hidden=(8,), epochs=1, engine="torch")
    return start(folder, make_config("ppo", "CartPole-v1", options, steps=32 * updates, **run))


def quietly(run, *callbacks):
    train(run, progress=False, tensorboard=False, callbacks=callbacks)
    return run


class Told(Observer):
    "Writes down each call."

    def __init__(self, events, when="update", name=None, act=None):
        self.events = events
        self.when = when
        self.name = name or when
        self.act = act

    def begin(self, run):
        self.events.append(f"{self.name} begins")

    def after(self, record):
        self.events.append(f"{self.name} {record['updates']:.0f}")
        return self.act(record) if self.act else None

    def end(self):
        self.events.append(f"{self.name} ends")

    def close(self):
        self.events.append(f"{self.name} is closed")


def test_observers_are_called_by_stage_and_then_in_the_order_of_the_list(tmp_path):
    events = []
    names = ("saved", "record", "update", "update")
    callbacks = [Told(events, when, f"{when}{k}") for k, when in enumerate(names)]
    quietly(small(tmp_path / "run", updates=2), *callbacks)
    update = ["update2 {}", "update3 {}", "record1 {}", "saved0 {}"]
    assert events == [
        *("saved0 begins", "update2 begins", "update3 begins", "record1 begins"),
        *[text.format(n) for n in (1, 2) for text in update],
        *("saved0 ends", "record1 ends", "update2 ends", "update3 ends"),
        *("record1 is closed", "update3 is closed", "update2 is closed", "saved0 is closed"),
    ]


def test_a_record_is_written_and_then_saved_before_the_observers_of_the_last_stage_look(tmp_path):
    folder = tmp_path / "run"
    seen = []

    def look(record):
        seen.append((len(read_records(folder)), load_run(folder).counters["updates"]))

    run = small(folder, updates=3, checkpoint_every=1)
    quietly(run, Told([], "update", act=look), Told([], "saved", act=look))
    assert seen == [(0, 0), (1, 1), (1, 1), (2, 2), (2, 2), (3, 3)]


def test_each_callback_sees_the_metrics_of_those_before_it(tmp_path):
    run = quietly(
        small(tmp_path / "run", updates=2),
        lambda run, record: {"my/a": record["steps"]},
        lambda run, record: {"my/b": record["my/a"] + 1},
    )
    assert [(r["my/a"], r["my/b"]) for r in read_records(run.folder)] == [(32, 33), (64, 65)]


def test_later_metrics_are_in_the_next_record_and_the_last_ones_in_records_of_their_own(tmp_path):
    class Late(Observer):
        when = "saved"

        def begin(self, run):
            return {"my/late": 0.5}

        def after(self, record):
            return {"my/late": record["updates"]}

        def end(self):
            yield {"my/end": 1.0}
            yield {"my/end": 2.0}

    run = quietly(small(tmp_path / "run", updates=2), Late())
    found = [(r["updates"], r.get("my/late"), r.get("my/end")) for r in read_records(run.folder)]
    assert found == [(1, 0.5, None), (2, 1, None), (2, 2, None), (2, None, 1), (2, None, 2)]


def test_the_time_of_the_last_stage_does_not_count(tmp_path, monkeypatch):
    now = [0.0]

    def tick():
        now[0] += 0.25
        return now[0]

    def take_long(record):
        now[0] += 1000

    monkeypatch.setattr(training, "perf_counter", tick)
    run = quietly(small(tmp_path / "saved"), Told([], "saved", act=take_long))
    assert 0 < run.counters["seconds"] < 100
    run = quietly(small(tmp_path / "update"), Told([], "update", act=take_long))
    assert run.counters["seconds"] > 3000  # the time after the last update is no time of an update


def test_a_wish_of_the_last_stage_is_granted(tmp_path):
    def wish(record):
        return Wish(save=record["updates"] == 1, stop="three" if record["updates"] == 3 else None)

    saved = []

    def look(run, record):
        saved.append(load_run(run.folder).counters["updates"])

    run = quietly(small(tmp_path / "run", 9), Told([], "saved", act=wish), look)
    assert run.history.stopped == "three" and load_run(run.folder).counters["updates"] == 3
    assert saved == [0, 0, 2]  # with the next update


def test_the_first_reason_to_stop_counts(tmp_path):
    first = lambda run, record: Wish(stop="first")
    run = quietly(small(tmp_path / "run"), first, lambda run, record: Wish(stop="second"))
    assert run.history.stopped == "first" and run.counters["updates"] == 1


def test_an_observer_may_stand_around_the_update(tmp_path):
    class Sizes(Observer):
        def around(self, update):
            def learn(batch):
                self.size = batch.valid.numel()
                return update(batch)

            return learn

        def after(self, record):
            return {"my/size": self.size}

    run = quietly(small(tmp_path / "run", updates=2), Sizes())
    assert [r["my/size"] for r in read_records(run.folder)] == [32, 32]


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["update", "record", "saved"])
def test_after_an_error_all_are_closed_and_none_ends(when, tmp_path):
    def fail(record):
        raise ValueError("planted")

    events = []
    with pytest.raises(ValueError, match="planted"):
        quietly(small(tmp_path / "run"), Told(events, when, act=fail), Told(events, "saved", "b"))
    assert events[-2:] in (
        [f"{when} is closed", "b is closed"],
        ["b is closed", f"{when} is closed"],
    )
    assert not any("ends" in event for event in events)
    assert load_run(tmp_path / "run").counters["updates"] == (0 if when == "record" else 1)


def test_an_observer_that_cannot_begin_is_closed_and_the_folder_is_free(tmp_path):
    class Fails(Told):
        def begin(self, run):
            raise ValueError("planted")

    events = []
    run = small(tmp_path / "run")
    with pytest.raises(ValueError, match="planted"):
        quietly(run, Fails(events))
    assert events == ["update is closed"]
    assert quietly(resume(run.folder)).counters["updates"] == 4


def test_an_error_while_closing_is_raised_unless_there_is_another_one(tmp_path):
    class Fails(Observer):
        def close(self):
            raise ValueError("while closing")

    def fail(run, record):
        raise ValueError("planted")

    with pytest.raises(ValueError, match="while closing"):
        quietly(small(tmp_path / "a"), Fails())
    with pytest.raises(ValueError, match="planted"):
        quietly(small(tmp_path / "b"), Fails(), fail)


def test_a_signal_waits_for_an_update_and_not_for_the_last_stage(tmp_path):
    reached = []

    def strike(record):
        signal.raise_signal(signal.SIGINT)
        reached.append(record["updates"])

    with pytest.raises(KeyboardInterrupt):
        quietly(small(tmp_path / "a"), Told([], "update", act=strike))
    assert reached == [1] and load_run(tmp_path / "a").counters["updates"] == 1
    with pytest.raises(KeyboardInterrupt):
        quietly(small(tmp_path / "b"), Told([], "saved", act=strike))
    assert reached == [1] and load_run(tmp_path / "b").counters["updates"] == 1


def test_an_edit_ends_them_and_begins_them_with_the_run_that_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(Mailbox, "EVERY", 0.0)  # it looks after each update, however quick
    events = []

    def edit(run, record):
        if record["updates"] == 2:
            asking.start()
            while not list(run.folder.glob("inbox/*.ask")):
                pass

    run = small(tmp_path / "run", updates=3)
    asking = threading.Thread(target=ask, args=(run.folder, dict(set=dict(lr=1e-4))))
    quietly(run, edit, Told(events, "saved", "x", act=lambda record: {"my/x": record["updates"]}))
    asking.join()
    life = ["x begins", "x 1", "x 2", "x ends", "x is closed"]
    assert events == [*life, "x begins", "x 3", "x ends", "x is closed"]
    # what it reported before the edit is in the next record
    assert [r.get("my/x") for r in read_records(run.folder)] == [None, 1, 2, 3]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "callbacks, text",
    [
        (print, "callbacks. Expected a list"),
        (Told([]), "callbacks. Expected a list"),
        ([None], "this is no callback"),
        ([Told([], "later")], "Told.when. Expected one of update, record, saved, got 'later'"),
    ],
)
def test_what_is_no_list_of_observers_is_refused_before_the_training(callbacks, text, tmp_path):
    run = small(tmp_path / "run")
    refused(text, train, run, callbacks=callbacks)
    assert quietly(run).counters["updates"] == 4


@pytest.mark.parametrize("when", ["record", "saved"])
def test_later_metrics_cannot_have_a_name_that_is_taken(when, tmp_path):
    observer = Told([], when, act=lambda record: dict(kl=0.0))
    with pytest.raises(DataError, match="the observer Told reports a metric whose name is taken"):
        quietly(small(tmp_path / "run"), observer)


# -- a loop of one's own -----------------------------------------------------------------------------------------------


def test_in_a_loop_of_ones_own_they_see_what_they_see_in_a_run(tmp_path):
    def records_of_loop(*observers):
        actor = MLPPolicy.for_env("CartPole-v1", seed=0)
        critic = Critic.for_env("CartPole-v1", seed=1)
        pipe = on_policy("CartPole-v1", actor, critic, n_envs=2, n_steps=16, seed=0)
        agent = PPO(actor, critic, seed=0)
        with observed(agent, observers, pipe=pipe) as (learn, wishes):
            for batch in pipe:
                record = learn(batch)
                saves.append(wishes.save)
                if wishes.stop:
                    return record

    events = []
    saves = []
    wish = lambda run, record: Wish(
        {"my/n": run.counters["updates"]}, record["updates"] == 2, record["updates"] == 3
    )
    folder = tmp_path / "loop"
    files = MetricFiles(folder, tensorboard=False)
    last = records_of_loop(wish, Told(events, "saved", "x"), files)
    assert events == ["x begins", "x 1", "x 2", "x 3", "x ends", "x is closed"]
    assert saves == [False, True, False] and last["my/n"] == 3
    records = read_records(folder)
    assert [r["steps"] for r in records] == [32, 64, 96]
    of_a_run = read_records(quietly(small(tmp_path / "run", updates=3)).folder)
    for mine, other in zip(records, of_a_run):
        of_episodes = {name for name in {**mine, **other} if name.startswith(("return", "length"))}
        assert mine.keys() - of_episodes - {"my/n"} == other.keys() - of_episodes
