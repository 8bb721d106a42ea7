"""What may go wrong in the pipeline of `fault_cases.py`, where, and what must come of it: the data of `test_fault_matrix.py`."""

import faulthandler
import os
import signal
import sys
import time
from typing import NamedTuple

import numpy as np
import torch

from rollpipe.pipes import ActorError, DataError, EnvError, WorkerError
from rollpipe.pipes.workers.process import WorkerDied

nan = float("nan")


# --- harm: functions of what passes the place


def raising(error):
    def boom(value):
        raise error() if callable(error) else error

    return boom


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


class Mute(Exception):
    def __str__(self):
        raise KeyError("no text")


class Stiff(Exception):
    def __reduce__(self):
        raise KeyError("no pickle")


class Frozen(Exception):
    "As a frozen dataclass: nobody may change it, but `contextlib` of the tests."

    def __setattr__(self, name, value):
        if name != "__traceback__":
            raise AttributeError("frozen")
        super().__setattr__(name, value)


class Leaves(Exception):
    "To read its pickle ends the process."

    def __reduce__(self):
        return sys.exit, (9,)


class Silent(BaseException):
    "Not an `Exception`."


def signalled(number):
    def die(value):
        faulthandler.disable()  # pytest's
        os.kill(os.getpid(), number)
        time.sleep(600)

    return die


def put(*index_and_value):
    "Put the last argument where the others lead to, through tuples and dicts."
    *path, value = index_and_value

    def inside(x, path):
        if not path:
            return value(x) if callable(value) else value
        if isinstance(x, dict):
            return {**x, path[0]: inside(x[path[0]], path[1:])}
        return tuple(inside(y, path[1:]) if k == path[0] % len(x) else y for k, y in enumerate(x))

    return lambda x: inside(x, path)


def nan_at(*index):
    "NaN for environment 1, in a tensor or an array."

    def change(x):
        x = np.array(x, copy=True) if isinstance(x, np.ndarray) else x.detach().clone()
        x[index] = nan
        return x

    return change


def cyclic(info):
    info["me"] = info
    return info


EVENTS = {
    # what is raised
    "an exception": raising(lambda: ZeroDivisionError("an accident")),
    "unpicklable exception": raising(lambda: Unpicklable(1, 2)),
    "exception without text": raising(Mute),
    "exception without pickle": raising(lambda: Stiff("an accident")),
    "exception that is frozen": raising(lambda: Frozen("of two\nlines")),
    "exception whose pickle ends": raising(lambda: Leaves("of two\nlines")),
    "no Exception": raising(lambda: Silent("of two\nlines")),
    "exception of 5 MB": raising(lambda: KeyError("begin" + "x" * 5_000_000 + "end")),
    "unpicklable of 5 MB": raising(lambda: Unpicklable("begin" + "x" * 5_000_000, "end")),
    "EOFError": raising(lambda: EOFError("a file of mine")),
    "BrokenPipeError": raising(lambda: BrokenPipeError("a pipe of mine")),
    "StopIteration": raising(lambda: StopIteration("mine")),
    "SystemExit": raising(lambda: SystemExit(5)),
    "KeyboardInterrupt": raising(lambda: KeyboardInterrupt("mine")),
    # deaths and silence
    "os._exit": lambda _: os._exit(3),
    **{
        name: signalled(getattr(signal, name))
        for name in ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGSTOP")
    },
    "a late SIGABRT": lambda _: time.sleep(1) or signalled(signal.SIGABRT)(_),
    "a hang": lambda _: time.sleep(600),
}
HARMS = EVENTS | {
    # answers of the wrong form
    "None": lambda _: None,
    "a part is missing": lambda x: x[:-1],
    # of an environment, or of a vector
    "NaN observation": put(0, "place", nan_at(-1)),
    "wrong shape": put(0, "place", np.zeros(4, np.float32)),
    "wrong dtype": put(0, "gear", lambda x: x + 0.5),
    "integer out of range": put(0, "gear", 7),
    "integer that wraps": put(0, "level", 70_000),
    "NaN reward": put(1, nan),
    "list of rewards": put(1, [1.0, 2.0]),
    "three rewards": put(1, np.ones(3)),
    "terminated NaN": put(2, nan),
    "terminated 'False'": put(2, "False"),
    "terminated [False]": put(2, [False]),
    "info None": put(-1, None),
    "info a list": put(-1, [("count", 1)]),
    "info in itself": put(-1, cyclic),
    # of an actor
    "NaN action": put(0, "push", nan_at(0, 1)),
    "action's shape": put(0, "push", torch.zeros(1, 2, 3)),
    "action's dtype": put(0, "gear", torch.zeros(1, 2)),
    "action out of range": put(0, "gear", torch.tensor([[0, 7]])),
    "memory's shape": put(1, (torch.zeros(1, 3),)),
    "report's shape": put(2, "seen", torch.zeros(1, 3)),
    "NaN logp": put("logp", nan_at(1, 1)),
    "logp's shape": put("logp", lambda x: x[:, 0]),
    # of a critic
    "NaN values": nan_at(1, 1),
    "values' shape": lambda x: x[..., None],
    # items of a pipe
    "another item": lambda _: "an item",
    "unpicklable item": lambda x: x._replace(env={"a generator": (y for y in ())}),
    "NaN rewards": lambda x: x._replace(state=x.state._replace(rew=nan_at(2, 1)(x.state.rew))),
}


# --- what must come of it


class Outcome(NamedTuple):
    "What must come of a harm. `{lane}`, `{worker}` and `{lanes}`, those of the worker, stand for numbers in the texts."

    word: str  # for the table
    error: type | None = None
    parts: tuple = ()  # of the error's message, in that order
    log: tuple = ()  # for each line of the log its parts
    is_remote: bool = True  # if the harm is done in a worker, is the error raised there too?


def raises(error, *parts, **kwargs):
    return Outcome(error.__name__, error, parts, **kwargs)


def below(error, *parts):
    return raises(error, *parts, is_remote=False)


def warns(*parts):
    return Outcome("warned", log=(parts,))


def dies(how, **kwargs):
    return raises(
        WorkerDied,
        "lane {lanes}: worker {worker} (pid ",
        f") {how} while it collected lane ",
        **kwargs,
    )


def silent(where=""):
    return below(
        WorkerError,
        "lane {lane}: worker {worker} (pid ",
        "has been silent for",
        "it is here:",
        where,
    )


FINE = Outcome("fine")
AGAIN = Outcome("restarted", log=(("Its lanes start anew (restart 1 of 1)",),))
WHO = "EnvStepper, lane {lane}, environment 1 (touchy)"
VEC = "EnvStepper, lane {lane}, environment "
ACTOR = "EnvStepper, lane {lane}"
WORKER = "worker {worker} (pid "
ACCIDENT = "ZeroDivisionError: an accident"


class Row(NamedTuple):
    harm: str
    place: str
    here: Outcome | None  # None: this process would end, or hang
    workers: Outcome
    only: str | None  # the one start method by which it can happen
    options: dict  # of `run`


def row(harm, places, here, workers=None, only=None, **options):
    "Add a row for each of the places, which are divided by commas. `workers` is the outcome there, if it is another one."
    ROWS.extend(
        Row(harm, place, here, workers or here, only, options) for place in places.split(", ")
    )


def env_error(*parts):
    return raises(EnvError, WHO, *parts)


def env_data(*parts):
    return raises(DataError, WHO, *parts)


def vec_error(*parts):
    return raises(EnvError, VEC, *parts)


def vec_data(*parts):
    return raises(DataError, VEC, *parts)


def actor_error(*parts):
    return raises(ActorError, ACTOR, *parts)


ROWS = []

# an exception, at every place
row("an exception", "factory", env_error("could not be made", ACCIDENT))
row("an exception", "reset", env_error("reset() raised", ACCIDENT))
row("an exception", "step", env_error("step() raised", ACCIDENT))
row("an exception", "close", warns(WHO, "close() raised", ACCIDENT))
row("an exception", "vector factory", vec_error("could not be made", ACCIDENT))
row("an exception", "vector reset", vec_error("reset() raised", ACCIDENT))
row("an exception", "vector step", vec_error("step() raised", ACCIDENT))
row("an exception", "vector close", warns(VEC, "close() raised", ACCIDENT))
row("an exception", "actor", actor_error("TouchyActor.step raised", ACCIDENT))
row("an exception", "actor reset", actor_error("TouchyActor.reset raised", ACCIDENT))
row("an exception", "actor complete", actor_error("TouchyActor.complete raised", ACCIDENT))
row(
    "an exception",
    "critic",
    raises(DataError, "AdvantageBuffer, lane 0", "the critic raised", ACCIDENT),
)
row("an exception", "pipe above, tap, pipe below, loop", raises(ZeroDivisionError, "an accident"))
row(
    "an exception",
    "end of pipe above",
    warns("ignored: ", ACCIDENT),
    raises(ZeroDivisionError, "an accident"),
)
row("an exception", "end of pipe below", warns("ignored: ", ACCIDENT))
row(
    "an exception",
    "pickling",
    FINE,
    raises(WorkerError, "TouchyActor cannot be sent to a worker", ACCIDENT),
    at=None,
    only="spawn",
)
row("an exception", "unpickling", FINE, raises(ZeroDivisionError, "an accident"), only="spawn")

# exceptions that are hard to tell
row("unpicklable exception", "step", env_error("step() raised Unpicklable: 1 and 2"))
row(
    "unpicklable exception",
    "pipe above",
    raises(Unpicklable, "1 and 2"),
    raises(WorkerError, "Unpicklable: 1 and 2"),
)
row("exception without text", "factory", env_error("Mute: (its text cannot be made"))
row("exception without text", "step", env_error("step() raised Mute: (its text cannot be made"))
row("exception without text", "close", warns(WHO, "close() raised Mute: (its text cannot be made"))
row("exception without text", "pipe above", raises(Mute))
row("exception without pickle", "step", env_error("step() raised Stiff: an accident"))
row(
    "exception without pickle",
    "pipe above",
    raises(Stiff, "an accident"),
    raises(WorkerError, "Stiff: an accident"),
)
row("exception that is frozen", "pipe above", raises(Frozen, "of two\nlines"))
row(
    "exception that is frozen",
    "end of pipe above",
    warns("ignored: Frozen: of two\nlines"),
    raises(Frozen, "of two\nlines"),
)
row(
    "exception whose pickle ends",
    "pipe above",
    raises(Leaves, "of two\nlines"),
    raises(WorkerError, "Leaves: of two\nlines"),
)
row(
    "exception whose pickle ends",
    "end of pipe above",
    warns("ignored: Leaves: of two\nlines"),
    raises(WorkerError, "Leaves: of two\nlines"),
)
row("no Exception", "pipe above", raises(Silent, "of two\nlines"))
row(
    "no Exception",
    "end of pipe above",
    warns("ignored: Silent: of two\nlines"),
    raises(Silent, "of two\nlines"),
)
row(
    "exception of 5 MB",
    "step",
    env_error("step() raised KeyError: 'begin", "characters are left out", "end'"),
)
row("exception of 5 MB", "pipe above", raises(KeyError, "begin", "end"))
row(
    "unpicklable of 5 MB",
    "pipe above",
    raises(Unpicklable, "begin", "and end"),
    raises(WorkerError, "Unpicklable: begin", "characters are left out", "and end"),
)
row("EOFError", "step", env_error("step() raised EOFError: a file of mine"))
row(
    "EOFError",
    "actor complete",
    actor_error("TouchyActor.complete raised EOFError: a file of mine"),
)
row("EOFError", "pipe above", raises(EOFError, "a file of mine"))
row("BrokenPipeError", "step", env_error("step() raised BrokenPipeError: a pipe of mine"))
row("BrokenPipeError", "pipe above", raises(BrokenPipeError, "a pipe of mine"))
row(
    "BrokenPipeError",
    "end of pipe above",
    warns("ignored: BrokenPipeError"),
    raises(BrokenPipeError, "a pipe of mine"),
)
row("StopIteration", "step", env_error("step() raised StopIteration: mine"))
row("StopIteration", "actor reset", actor_error("TouchyActor.reset raised StopIteration: mine"))
row("StopIteration", "pipe above", raises(RuntimeError, "generator raised StopIteration"))

# exceptions that are meant to end the process
row(
    "KeyboardInterrupt",
    "factory, reset, step, actor, pipe above, tap, pipe below, loop",
    raises(KeyboardInterrupt, "mine"),
)
row(
    "KeyboardInterrupt",
    "close",
    warns("ignored: KeyboardInterrupt: mine"),
    raises(KeyboardInterrupt, "mine"),
)
row(
    "SystemExit",
    "factory, reset, step, actor, pipe above",
    raises(SystemExit, "5"),
    dies("ended with exit code 5", log=(("in worker {worker}", "Traceback", "SystemExit: 5"),)),
)
row("SystemExit", "tap, pipe below, loop", raises(SystemExit, "5"))
row(
    "SystemExit",
    "close",
    warns("ignored: SystemExit: 5"),
    warns("in worker {worker}, lane {lane}, EnvStepper:", "Traceback", "SystemExit: 5"),
)

# deaths
for harm, how in {
    "os._exit": "ended with exit code 3",
    "SIGKILL": "was killed by SIGKILL",
    "SIGSEGV": "was killed by SIGSEGV",
    "SIGABRT": "was killed by SIGABRT",
}.items():
    row(harm, "factory, step, actor, pipe above", None, dies(how))
    row(harm, "close, end of pipe above", None, warns(WORKER, f") {how} while it was closing"))
row(
    "a late SIGABRT", "close", None, warns(WORKER, ") was killed by SIGABRT while it was closing")
)  # it has had SIGTERM by then
row("SIGTERM", "step", None, dies("ended with exit code 0"))
row(
    "os._exit",
    "unpickling",
    FINE,
    raises(WorkerDied, "lane 0, 1: worker 0 (pid ", ") ended with exit code 3"),
    only="spawn",
)
row(
    "SIGKILL",
    "unpickling",
    FINE,
    raises(WorkerDied, "lane 0, 1: worker 0 (pid ", ") was killed by SIGKILL"),
    only="spawn",
)

# deaths that are survived, and not
row("os._exit", "factory, step, pipe above", None, AGAIN, restart=1, once=True)
row("SIGKILL", "factory, step, pipe above", None, AGAIN, restart=1, once=True)
row("SIGKILL", "actor", None, dies("was killed by SIGKILL", log=AGAIN.log), restart=1)
row("an exception", "step", env_error("step() raised", ACCIDENT), restart=1, once=True)

# silence
row(
    "a hang",
    "factory, reset, actor complete",
    None,
    silent("in __call__"),
    only="fork",
    on_silence="raise",
    silence=0.5,
)
row("a hang", "step, actor", None, silent("in __call__"), on_silence="raise", at=9)
row("a hang", "pipe above", None, silent("in __call__"), on_silence="raise", at=3)
row("SIGSTOP", "step", None, silent("(no answer)"), on_silence="raise", at=9, grace=0.5)
row("a hang", "close", None, warns(WORKER, "while it was closing"), grace=0.5)
row("SIGSTOP", "close", None, warns(WORKER, "while it was closing"), grace=0.5)

# answers of environments
row("None", "reset", env_error("reset()", "NoneType"))
row("None", "step", env_error("step()", "NoneType"))
row("a part is missing", "reset", env_error("reset()", "expected 2, got 1"))
row("a part is missing", "step", env_error("step()", "expected 5, got 4"))
row(
    "NaN observation",
    "reset, step",
    env_error("leaf obs['place']: non-finite value. Expected finite numbers, got"),
)
row(
    "wrong shape",
    "reset, step",
    env_data("leaf obs['place']: wrong shape. Expected float32 [3], got float32 [4]"),
)
row(
    "wrong dtype",
    "reset, step",
    env_data("leaf obs['gear']: wrong dtype. Expected int64", "got float64"),
)
row(
    "integer out of range",
    "reset, step",
    env_error("leaf obs['gear']: out of range. Expected as in Discrete(4), got 7"),
)
row(
    "integer that wraps",
    "reset, step",
    env_error("leaf obs['level']", "does not fit", "int16", "got 70000"),
)
row("NaN reward", "step", env_error("leaf rew: non-finite value. Expected finite numbers, got nan"))
row(
    "list of rewards",
    "step",
    env_error("leaf rew: the reward is no scalar. Expected one number, got [1.0, 2.0]"),
)
row(
    "three rewards",
    "step",
    env_error("leaf rew: the reward is no scalar. Expected one number, got float64 [3]"),
)
row("terminated NaN", "step", env_error("leaf terminated", "Expected True or False, got nan"))
row(
    "terminated 'False'",
    "step",
    env_error("leaf terminated", "Expected True or False, got 'False'"),
)
row(
    "terminated [False]",
    "step",
    env_error("leaf terminated", "Expected True or False, got [False]"),
)
row("info None", "step", env_error("leaf info: the info is no dict. Expected a dict, got None"))
row("info a list", "step", env_error("leaf info: the info is no dict. Expected a dict, got ["))
row("info in itself", "step", env_error("leaf info['me']: an info contains itself"), at=1)

# answers of vector environments
row("None", "vector reset", vec_error("reset() gave no tuple of 2", "got None"))
row("None", "vector step", vec_error("step() gave no tuple of 5", "got None"))
row("a part is missing", "vector reset", vec_error("reset() gave no tuple of 2", "got ("))
row("a part is missing", "vector step", vec_error("step() gave no tuple of 5", "got ("))
row(
    "NaN observation",
    "vector reset, vector step",
    vec_error("1 (vector), leaf obs['place']: non-finite value"),
)
row(
    "wrong shape",
    "vector step",
    vec_data("leaf obs['place']", "wrong shape", "Expected float32 [2, 3], got float32 [4]"),
)
row("wrong dtype", "vector step", vec_data("leaf obs['gear']", "wrong dtype"))
row(
    "NaN reward",
    "vector step",
    vec_error("there must be one reward for each environment. Expected numbers [2], got"),
)
row(
    "three rewards",
    "vector step",
    vec_error(
        "there must be one reward for each environment. Expected numbers [2], got float64 [3]"
    ),
)
for harm in ("terminated NaN", "terminated 'False'", "terminated [False]"):
    row(
        harm,
        "vector step",
        vec_error("there must be one termination for each environment. Expected bool [2], got"),
    )
row(
    "info None",
    "vector step",
    vec_error("leaf infos: the infos are no dict. Expected a dict, got None"),
)
row(
    "info a list",
    "vector step",
    vec_error("leaf infos: the infos are no dict. Expected a dict, got ["),
)
row("info in itself", "vector step", vec_error("leaf info['me']: an info contains itself"), at=1)

# answers of actors
row(
    "None",
    "actor",
    actor_error("TouchyActor.step gave no triple. Expected (act, hx, info), got None"),
)
row(
    "a part is missing",
    "actor",
    actor_error("TouchyActor.step gave no triple. Expected (act, hx, info), got ("),
)
row(
    "NaN action",
    "actor",
    actor_error(
        "environment 1 (touchy), leaf act['push']: non-finite action. Expected finite numbers, got"
    ),
)
row(
    "action's shape",
    "actor",
    actor_error("leaf act['push']", "Expected a tensor float32 [1, 2, 2]", "got float32 [1, 2, 3]"),
)
row("action's dtype", "actor", actor_error("leaf act['gear']", "Discrete(3)", "got float32 [2]"))
row(
    "action out of range",
    "actor",
    actor_error("environment 1 (touchy), leaf act['gear']", "Discrete(3)", "got 7"),
)
row(
    "memory's shape",
    "actor",
    actor_error(
        "leaf hx[0]",
        "TouchyActor.step changed the form of its answer: wrong shape",
        "Expected a tensor float32 [1, 2], got float32 [1, 3]",
    ),
)
row(
    "report's shape",
    "actor",
    actor_error("leaf info['seen']", "Expected a tensor float32 [1, 2]", "got float32 [1, 3]"),
)
row(
    "None",
    "actor reset",
    actor_error(
        "TouchyActor.reset changed",
        "hx has the wrong structure: missing hx[0]",
        "Expected (*,), got None",
    ),
)
row(
    "a part is missing",
    "actor reset",
    actor_error(
        "TouchyActor.reset changed",
        "hx has the wrong structure: missing hx[0]",
        "Expected (*,), got ()",
    ),
)
row(
    "None",
    "actor complete",
    actor_error("leaf info", "TouchyActor.complete gave nothing", "got None"),
)
row(
    "logp's shape",
    "actor complete",
    actor_error("leaf info['logp']", "TouchyActor.complete", "shape [5, 2, ...], got float32 [5]"),
)
row(
    "NaN logp",
    "actor complete",
    actor_error(
        "leaf info['logp']", "TouchyActor reported what is not a number", "got NaN at [1, 1]"
    ),
)

# answers of critics, items of pipes
row(
    "None",
    "critic",
    raises(
        DataError,
        "AdvantageBuffer, lane 0: wrong shape or dtype of the values of the critic",
        "= [5, 2], got None",
    ),
)
row(
    "values' shape",
    "critic",
    raises(
        DataError,
        "AdvantageBuffer, lane 0: wrong shape or dtype of the values of the critic",
        "= [5, 2], got float32 [5, 2, 1]",
    ),
)
row(
    "NaN values",
    "critic",
    raises(
        DataError,
        "AdvantageBuffer, lane 0, environment 1, leaf adv[0, 1]: non-finite advantage",
        "value nan",
    ),
)
row("None", "pipe above", below(DataError, "AdvantageBuffer", "Expected Fragment, got NoneType"))
row("another item", "pipe above", below(DataError, "AdvantageBuffer", "Expected Fragment, got str"))
row(
    "unpicklable item",
    "pipe above",
    FINE,
    raises(DataError, "lane {lane}, leaf Fragment.env['a generator']", "cannot pickle 'generator'"),
    at=1,
)
row(
    "NaN rewards",
    "pipe above",
    below(DataError, "AdvantageBuffer, lane {lane}, environment 1, leaf adv[1, 1]", "reward nan"),
    at=1,
)
