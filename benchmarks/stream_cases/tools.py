"What cases share: the first batches of a pipeline, and the course of a training."

import inspect

from rollpipe.pipes import DataLoader2

from . import RENAMED


def named(function, **options) -> dict:
    "The options by the names that `function` has for them: the old ones (see `RENAMED`) if it does not know the new ones."
    known = inspect.signature(function).parameters
    old = {new: old for old, new in RENAMED.items()}
    return {name if name in known else old.get(name, name): x for name, x in options.items()}


def first(pipe, n=3, service=None, seed=0):
    "The first `n` items of a pipeline; `seed` is for pipelines that have none, and asks for a reading service."
    with DataLoader2(pipe, reading_service=service) as loader:
        loader.seed(seed)
        for k, item in zip(range(n), loader):
            yield f"batch {k}", item


def trained(agent, pipe, n=3, service=None, data=lambda batch: batch):
    "The first `n` batches, or what `data` takes from them; the metrics of the updates from them; all state of the agent after each one."
    with DataLoader2(pipe, reading_service=service) as loader:
        for k, batch in zip(range(n), loader):
            yield f"batch {k}", data(batch)
            metrics = agent.update(batch)
            yield (
                f"metrics {k}",
                {name: x for name, x in metrics.items() if not name.startswith("seconds")},
            )
            yield f"weights {k}", agent.state_dict()
