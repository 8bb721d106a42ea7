"What parameters mean: read from `Args:` sections as they are written at export, and from comments where there is none."

from textwrap import indent, wrap

import pytest
from fastcore.meta import delegates
from gallery import refused
from hypothesis import example, given
from hypothesis import strategies as st

from rollpipe.agents import A2C
from rollpipe.agents.shared_options import args_section, meanings
from rollpipe.layers import (
    ActionCritic,
    CategoricalPolicy,
    Critic,
    MemoryCritic,
    MLPPolicy,
    QPolicy,
    RecurrentPolicy,
    SquashedPolicy,
)
from rollpipe.pipes import DataError, on_policy
from rollpipe.runs.plots import learning_curve
from rollpipe.settings.algorithms import ALGORITHMS, Algorithm, options_for, register_algorithm
from rollpipe.settings.config import RunOptions, build, make_config
from rollpipe.settings.options import options_of, parse_value

words = st.lists(
    st.text("abcXYZ019:`'()[]*,.%", min_size=1, max_size=12), min_size=1, max_size=40
).map(" ".join)
sections = st.dictionaries(
    st.from_regex(r"[a-z_]\w{0,9}", fullmatch=True).filter(str.isascii), words, max_size=6
)


@given(
    found=sections,
    head=words,
    width=st.integers(30, 140),
    depth=st.integers(1, 3),
    after=st.sampled_from(["", "Raises:\n    ValueError: no: never"]),
)
def test_what_is_written_is_read(found, head, width, depth, after):
    "However long the lines are, whatever follows, and however deep the function is."
    entries = [
        "\n".join(
            wrap(
                f"{k}: {v}",
                width,
                initial_indent=" " * 4,
                subsequent_indent=" " * 8,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
        for k, v in found.items()
    ]
    body = "\n\n".join(filter(None, ["Args:\n" + "\n".join(entries) if entries else "", after]))
    assert args_section(f"{head}\n\n" + indent(body, " " * 4 * depth)) == found


@example(n=161, digits=1, unit="k")
@given(n=st.integers(0, 10**9), digits=st.integers(0, 3), unit=st.sampled_from("kM"))
def test_a_number_with_a_unit_is_exact(n, digits, unit):
    "16.1 * 1000 is not whole in floats."
    text = f"{n // 10**digits}.{n % 10**digits:0{digits}}" if digits else str(n)
    assert parse_value(text + unit, ("int",)) == n * dict(k=1000, M=10**6)[unit] // 10**digits


@pytest.mark.parametrize("text", ["1.2345k", "k", "1kk", "infk", "nank", "1e400m"])
def test_what_is_no_number_with_a_unit(text):
    refused("is not int", parse_value, text, ("int",), error=ValueError)


@pytest.mark.parametrize(
    "docstring",
    [
        None,
        "",
        "One line.",
        "Args: what they are",
        "One line.\n\n    Returns:\n        x: what it is",
    ],
)
def test_without_a_section_nothing_is_known(docstring):
    assert args_section(docstring) == {}


def documented(a, b=1, c=2):
    """Do it.

    Args:
        a: what it is done to
        b: how often,
            at least once
    """


class Described:
    """A thing.

    Args:
        a: of the class
    """

    def __init__(self, a=0, b=1):
        """Make it.

        Args:
            b: of its `__init__`
        """


class Inherits(Described):
    """Another thing, made in the same way.

    Args:
        b: of another thing
    """


@pytest.mark.parametrize(
    "function, expected",
    [
        (documented, dict(a="what it is done to", b="how often, at least once")),
        (Described, dict(a="of the class", b="of its `__init__`")),
        (Inherits, dict(a="of the class", b="of another thing")),
        (
            delegates(documented)(lambda d=3, **kwargs: None),
            dict(a="what it is done to", b="how often, at least once"),
        ),
    ],
)
def test_the_nearest_docstring_counts(function, expected):
    assert meanings(function) == expected


def test_every_part_of_every_algorithm_says_what_its_options_mean():
    parts = [part for algorithm in ALGORITHMS.values() for part in algorithm.parts.values()] + [
        RunOptions,
        learning_curve,
    ]
    for part in parts:
        assert all(
            option.help
            for option in options_of(dict(part=part))
            if option.name not in ("options", "env_kwargs")
        ), part


def passing_on(base, **fixed):
    "A subclass that takes what its base takes as `**options`, and sets the `fixed` ones."

    class Own(base):
        def __init__(self, *args, own: int = 3, **options):
            super().__init__(*args, **fixed, **options)

    return Own


def offered(cls):
    return {x.param: (x.default, x.kinds, x.help) for x in options_of(dict(part=cls))}


@pytest.mark.parametrize(
    "base",
    [
        MLPPolicy,
        CategoricalPolicy,
        RecurrentPolicy,
        SquashedPolicy,
        QPolicy,
        Critic,
        MemoryCritic,
        ActionCritic,
        A2C,
    ],
)
def test_options_that_are_passed_on_are_those_of_the_base(base):
    "All of them, through several classes, beside those of the class itself."
    own = passing_on(base)
    assert offered(own) == offered(base) | {"own": (3, ("int",), "")}
    assert offered(passing_on(own)) == offered(own)

    class Without(base):
        def __init__(self, observation_space, action_space=None, hidden=(8,)):
            pass

    assert {*offered(Without)} == {"action_space", "hidden"}


@pytest.fixture
def register(monkeypatch):
    def one(policy=MLPPolicy, critic=Critic, learner=A2C):
        monkeypatch.delitem(ALGORITHMS, "passing", raising=False)
        register_algorithm("passing", Algorithm(learner, on_policy, policy, critic))

    before = dict(ALGORITHMS)
    yield one
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


def test_options_reach_the_classes_that_pass_them_on(register):
    register(passing_on(MLPPolicy), passing_on(Critic), passing_on(A2C))
    names = {option.name for option in options_for("passing")}
    assert {"hidden", "std", "log_std", "action_mask", "critic_hidden", "lr"} < names
    options = dict(hidden=(7,), critic_hidden=(5,), std="fixed", log_std=-1.0, lr=0.125)
    agent, _ = build(make_config("passing", "Pendulum-v1", options))
    shapes = [[*next(x.parameters()).shape] for x in (agent.actor.trunk, agent.critic.net)]
    assert shapes == [[7, 3], [5, 3]]
    assert "head.log_std" not in dict(agent.actor.named_parameters())
    assert agent.lr == 0.125


@pytest.mark.parametrize(
    "parts, leaf",
    [
        (dict(policy=passing_on(MLPPolicy, hidden=(8,))), "hidden"),
        (dict(critic=passing_on(Critic, normalize=False)), "normalize"),
        (dict(learner=passing_on(A2C, lr=0.5)), "lr"),
    ],
)
def test_an_option_that_the_class_sets_itself_is_refused(parts, leaf, register):
    register(**parts)
    with pytest.raises(DataError, match=f"Own, leaf {leaf}: .*`{leaf}` in the signature"):
        build(make_config("passing", "CartPole-v1", {}))
