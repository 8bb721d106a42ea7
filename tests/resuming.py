"""A stream that is cut, and goes on in another iteration: what is compared, and how states travel. Used by several tests.

A world is a function of the number of lanes that gives `(pipeline, actor)`. The state goes through the encoding of checkpoints,
in which nothing can be executed.
"""

import json

from reference import assert_same, snapshot
from worker_cases import change

from rollpipe.pipes import find
from rollpipe.pipes.envs.sources import Acting
from rollpipe.pipes.graph.pipe import restore_stream, stream_state, unknown_states
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.keeping.files import decode, encode
from rollpipe.pipes.lanes import learning_pipes
from rollpipe.pipes.passes import keep_environments

KEEPERS = {}  # world -> how the environments of each source are kept


def encoded(state):
    "The state after a checkpoint of it was written and read."
    tensors = {}
    code = json.loads(json.dumps(encode(state, tensors), allow_nan=False))
    return decode(code, {name: x.clone() for name, x in tensors.items()})


def told(pipe):
    "The state of a stream: of its iteration, and of the pipes that learn."
    return encoded(
        (stream_state(pipe), {name: p.state_dict() for name, p in learning_pipes(pipe).items()})
    )


def part(world, n, start=0, state=None, service=None, lanes=2, states=None):
    "`n` batches from the `start`-th one on, after each of which the actor changes, and the state after them; a list `states` gets all."
    pipe, actor = world(lanes)
    if world not in KEEPERS:
        KEEPERS[world] = [*keep_environments(pipe).values()]
    for source, keeper in zip(find(pipe, Acting), KEEPERS[world]):
        source.keeper = keeper
    assert not unknown_states(pipe)
    for _ in range(start):
        change(actor)
    if state is not None:
        for name, p in learning_pipes(pipe).items():
            p.load_state_dict(state[1][name])
        restore_stream(pipe, state[0])
    found = []
    with DataLoader2(pipe, reading_service=service) as loader:
        items = iter(loader)
        for _ in range(n):
            found.append(snapshot(without_source(next(items))))
            change(actor)
            if states is not None:
                states.append(told(loader.datapipe))
        return found, told(loader.datapipe)


def without_source(x):
    return x._replace(source=None) if "source" in getattr(x, "_fields", ()) else x


def resumes(world, n=6, cuts=None, **options):
    "Compare the whole stream with what follows from its states at several cuts, and with parts of one batch each."
    whole, _ = part(world, n, **options, states=(states := []))
    for k in range(1, n) if cuts is None else cuts:
        assert_same(whole[k:], part(world, n - k, k, states[k - 1], **options)[0])
    found, state = part(world, 1, **options)
    for k in range(1, n):
        one, state = part(world, 1, k, state, **options)
        found += one
    assert_same(whole, found)
