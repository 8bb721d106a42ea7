"Two worker processes that are forked."

from . import workers


def hybrid():
    yield from workers.hybrid("fork", 0)


def hybrid_lag_1():
    yield from workers.hybrid("fork", 1)


def images():
    yield from workers.images("fork", 0)


def images_lag_1():
    yield from workers.images("fork", 1)


def images_not_joined():
    yield from workers.images_not_joined("fork", 1)


def recurrent():
    yield from workers.recurrent("fork", 0)


def recurrent_lag_1():
    yield from workers.recurrent("fork", 1)


def seed_of_the_loader():
    yield from workers.seed_of_the_loader("fork", 0)


def episodes():
    yield from workers.episodes("fork", 0)


def ppo():
    yield from workers.ppo("fork", 0)


def ppo_lag_1():
    yield from workers.ppo("fork", 1)


def vtrace_lag_1():
    yield from workers.vtrace("fork", 1)


def fault():
    yield from workers.fault("fork")


def evaluations():
    yield from workers.evaluations("fork")
