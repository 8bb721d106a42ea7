"The page of runs that train, in a real browser, and its server."

import contextlib
import socket
import struct
import threading
import time
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from browser import WHY_NONE, browser
from command_line import wait_for
from gallery import quietly

from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.graph.edits import nodes
from rollpipe.pipes.profiling.report import LEARNER, Profile
from rollpipe.results.live import Live
from rollpipe.runs import Wish, open_run, start
from rollpipe.runs.folder import load_run
from rollpipe.runs.mailbox import Mailbox, view
from rollpipe.settings.config import make_config

LONG = "a <run> whose name is so long that a narrow window has to break it"


@contextlib.contextmanager
def serving(*runs):
    with Live([run.folder for run in runs]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def over(gallery, tmp_path):
    "A run that has ended."
    return open_run(gallery.copy("pole_trpo", tmp_path / "over"))


@pytest.fixture
def going(tmp_path, monkeypatch):
    "A run that trains in a thread."
    monkeypatch.setattr(Mailbox, "EVERY", 0.0)
    options = dict(n_envs=2, n_steps=32, hidden=(8,), engine="torch")
    run = start(tmp_path / LONG, make_config("ppo", "CartPole-v1", options, steps=10**9))
    enough = threading.Event()
    stop = lambda run, record: Wish(stop="enough" if enough.is_set() else None)
    training = threading.Thread(target=quietly, args=(run,), kwargs=dict(callbacks=[stop]))
    training.start()
    try:
        wait_for(lambda: run.counters["updates"] > 2)
        yield run
    finally:
        enough.set()
        with contextlib.suppress(DataError):
            open_run(run.folder).ask("go_on")
        training.join()


@pytest.fixture(scope="module")
def page():
    if WHY_NONE:
        pytest.skip(WHY_NONE)
    with browser() as found:
        yield found


def is_narrow(page):
    return page.script("return document.documentElement.scrollWidth <= innerWidth")


def test_the_buttons_ask_a_training(going, over, page):
    records = going.folder / "metrics.jsonl"
    with serving(going, over) as server:

        def has_said(text):
            with contextlib.suppress(HTTPError):
                return text in page.script(
                    "return document.querySelector('[role=status]').textContent"
                )

        def click(button, answer, k=1):
            page.click(f"form:nth-of-type({k}) {button}")
            wait_for(lambda: has_said(answer))

        page.open(server.url)
        assert page.script("return document.querySelectorAll('form').length") == 2
        click("[value=pause]", "is paused after update")
        size = records.stat().st_size
        assert "a process trains it, and is paused" in view(going.folder)
        page.type("form:nth-of-type(1) input[name=set]", "clip=0.05")
        click("button:not([value])", "has clip=0.05 after update")
        assert records.stat().st_size == size
        click("[value=save]", "is saved")
        assert load_run(going.folder).config["options"]["clip"] == 0.05
        click("[value=go_on]", "goes on")
        wait_for(lambda: records.stat().st_size > size)
        click("[value=save]", f"no training in {over.folder}", 2)
        page.frame("iframe")
        text = page.script("return document.body.textContent")
        for word in (
            "ppo on CartPole-v1",
            "a process trains it",
            "estimated KL",
            "clip=0.05",
            "trpo on CartPole-v1",
            "no process trains it",
            "share of steps that the line search kept",
        ):
            assert word in text, word


def test_the_field_sets_options_and_nothing_else(going, monkeypatch):
    with serving(going) as server:

        def said(**form):
            return (server.ask(dict(form, run="0")), server.last_answer)[1]

        for word in ("insert=rollpipe.testing:check_pipe", "do=stop", "timeout=3"):
            assert f"there is no option '{word.partition('=')[0]}'" in said(set=word)
        assert "has clip=0.05" in said(set="clip=0.05")

        # The buttons need no module of the run.
        monkeypatch.setattr("rollpipe.runs.changes.load_run", lambda *args: 1 / 0)
        assert "is saved after update" in said(do="save")


@pytest.mark.parametrize("width", [320, 400, 1280])
def test_a_window_of_any_width_has_no_sideways_scrolling(over, page, width):
    with serving(over, over) as server:
        page.size(width, 700)
        page.open(server.url)
        assert is_narrow(page)
        page.frame("iframe")
        assert (
            is_narrow(page) and page.script("return document.querySelectorAll('svg').length") >= 8
        )


def test_the_page_asks_nobody_else(over, page):
    "It has no script, and what somebody would insert into it is not loaded."
    with serving(over) as server, serving(over) as other:
        page.seen()
        page.open(server.url)
        asked = [url for url in page.seen() if not url.startswith(("chrome", "data:"))]
        assert (
            set(asked) <= {server.url, f"{server.url}view", f"http://{server.host}/favicon.ico"}
            and f"{server.url}view" in asked
        )
        assert (
            page.script(
                "return document.scripts.length + document.querySelectorAll('[src]:not(iframe)').length"
            )
            == 0
        )
        page.logs("browser")
        page.script(f"let x = new Image(); x.src = '{other.url}view'; document.body.append(x)")
        wait_for(
            lambda: any(
                "Content Security Policy" in line["message"] for line in page.logs("browser")
            ),
            seconds=20,
        )
        page.open(f"http://{server.host}/wrong/")
        assert page.script(
            "return document.querySelector('form')"
        ) is None and "403" in page.script("return document.body.textContent")
        page.open(
            server.url.replace("127.0.0.1", "localhost")
        )  # another name of the same address, as of a page that rebinds its own
        assert page.script("return document.querySelector('form')") is None


@pytest.mark.slow
def test_a_silent_connection_keeps_nobody_waiting(over):
    with serving(over) as server, contextlib.ExitStack() as stack:
        for _ in range(20):
            connection = socket.create_connection(("127.0.0.1", server.server_port))
            stack.enter_context(connection).sendall(b"GET / HT")
        with urlopen(server.url, timeout=4) as page:
            assert b"<form" in page.read()


def test_a_connection_has_an_end(over, monkeypatch):
    "Also one that sends a byte now and then."
    monkeypatch.setattr("rollpipe.results.live._LONGEST", 0.5)
    with (
        serving(over) as server,
        socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection,
    ):

        def is_cut():
            with contextlib.suppress(OSError):
                connection.sendall(b"x")
                return False
            return True

        wait_for(is_cut)


def test_a_late_answer_arrives(over, monkeypatch, capfd):
    "A training may need longer for an answer than a request may take to arrive. A browser that has gone leaves no traceback."
    monkeypatch.setattr("rollpipe.results.live._LONGEST", 0.3)
    answered = threading.Event()

    def late(server, form):
        time.sleep(1)
        server.last_answer = "late, but there"
        answered.set()

    monkeypatch.setattr(Live, "ask", late)
    with serving(over) as server:
        with urlopen(f"{server.url}ask", data=b"run=0&do=save", timeout=20) as page:
            assert b"late, but there" in page.read()

        # The end of this connection resets it.
        answered.clear()
        head = f"POST /{server.token}/ask HTTP/1.1\r\nHost: {server.host}\r\nContent-Length: 1\r\n\r\nx"
        with socket.create_connection(("127.0.0.1", server.server_port)) as gone:
            gone.sendall(head.encode())
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert answered.wait(20)
        time.sleep(0.2)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("size", [4097, 100_000])
def test_a_long_request_is_refused(over, size):
    with serving(over) as server, pytest.raises(HTTPError, match="404") as refused:
        urlopen(f"{server.url}ask", data=b"x" * size, timeout=20)
    refused.value.close()


@pytest.mark.slow_but_one
@pytest.mark.parametrize("algorithm, workers", [("dqn", 0), ("ppo", 0), ("ppo", 2)])
def test_a_training_writes_what_its_stages_cost(tmp_path, algorithm, workers):
    "Without workers the shares of all stages, of the learner and of the rest are the whole time."
    options = dict(n_envs=2, n_steps=32, lanes=2, hidden=(8,), engine="torch")
    if algorithm == "dqn":
        options["warmup"] = 64
    config = make_config(algorithm, "CartPole-v1", options, steps=1280, workers=workers)
    run = quietly(start(tmp_path / "run", config))
    found = Profile.load(run.folder / "costs.json")
    assert found.stages[-1].label == LEARNER and found.steps_per_s > 0
    assert found.n_items == run.counters["updates"] - 1
    assert not any("timer" in vars(pipe) for pipe in nodes(run.pipe))
    shares = [stage.share for stage in found.stages if stage.place != "workers"]
    assert sum(shares) + found.other == pytest.approx(1, abs=0.02)
    assert len(found.workers) == workers and all(0 < x.busy <= 1 for x in found.workers)
    shown = view(run.folder)
    texts = ["the learner", "items/s", *(f"worker {k}: busy" for k in range(workers))]
    assert all(text in shown for text in texts)


@pytest.mark.slow
def test_a_notebook_draws_a_run_until_it_ends(going, monkeypatch):
    display = pytest.importorskip("IPython.display")
    shown = []
    cleared = []
    monkeypatch.setattr(display, "display", lambda x: shown.append(x.data))
    monkeypatch.setattr(display, "clear_output", lambda wait: cleared.append(wait))

    def interrupt(seconds):
        if len(shown) == 2:
            raise KeyboardInterrupt

    run = open_run(going.folder)
    with monkeypatch.context() as patched:
        patched.setattr("rollpipe.runs.mailbox.sleep", interrupt)
        run.live()
    assert len(shown) == len(cleared) == 2
    assert all("a process trains it" in x and "<svg" in x for x in shown)
    run.ask(steps=going.counters["steps"] + 6400)
    wait_for(lambda: not (going.folder / "lock").exists())
    run.live()
    assert "no process trains it" in shown[2] and len(shown) == 3
