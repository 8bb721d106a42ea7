"""What `rollpipe/pipes/loading/datapipes.py` would hold if torch had no datapipes: a stand-in, in place of the import from torch."""

from collections.abc import Iterator


class Valid(Iterator):
    "An iterator of a pipe, until the pipe has a newer one."

    def __init__(self, pipe, items):
        self.pipe = pipe
        self.items = items
        self.number = pipe._valid_iterator_id

    def __next__(self):
        if self.pipe._valid_iterator_id != self.number:
            self.close()
            raise RuntimeError(
                f"This iterator has been invalidated: {self.pipe!r} has a newer one."
            )
        return next(self.items)

    def close(self):
        getattr(self.items, "close", lambda: None)()

    def __getattr__(self, name):
        return getattr(vars(self)["items"], name)


class MapDataPipe:
    def __getitem__(self, index):
        raise NotImplementedError

    def __repr__(self):
        return type(self).__name__

    def __getstate__(self):
        return vars(self)


class IterDataPipe:
    functions = {}  # methods that `fluent` registers
    _valid_iterator_id = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "__iter__" not in vars(cls):
            return
        own = cls.__iter__

        def __iter__(self):
            self._valid_iterator_id = (
                -1 if self._valid_iterator_id is None else self._valid_iterator_id
            ) + 1
            return Valid(self, iter(own(self)))

        cls.__iter__ = __iter__

    def __repr__(self):
        return type(self).__name__

    def __getstate__(self):
        return vars(self)


class IterableWrapper(IterDataPipe):
    def __init__(self, iterable, deepcopy=True):
        self.iterable = iterable

    def __iter__(self):
        yield from self.iterable


class Mapper(IterDataPipe):
    def __init__(self, datapipe, fn, input_col=None, output_col=None):
        self.datapipe, self.fn = datapipe, fn

    def __iter__(self):
        return map(self.fn, self.datapipe)

    def __len__(self):
        return len(self.datapipe)


class ShardingFilter(IterDataPipe):
    pass


def traverse_dps(pipe):
    from rollpipe.pipes.graph.edits import inputs

    return {
        id(pipe): (
            pipe,
            {key: row for source in inputs(pipe) for key, row in traverse_dps(source).items()},
        )
    }
