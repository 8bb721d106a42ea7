"Two worker processes that are spawned."

from . import workers


def hybrid():
    yield from workers.hybrid("spawn", 0)


def images_lag_1():
    yield from workers.images("spawn", 1)


def vtrace_lag_1():
    yield from workers.vtrace("spawn", 1)
