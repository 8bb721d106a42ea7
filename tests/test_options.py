"What parameters mean: read from `Args:` sections as they are written at export, and from comments where there is none."

from textwrap import indent, wrap

import pytest
from fastcore.meta import delegates
from hypothesis import example, given
from hypothesis import strategies as st

from rollpipe.agents.shared_options import args_section, meanings
from rollpipe.settings.algorithms import ALGORITHMS
from rollpipe.settings.config import RunOptions
from rollpipe.settings.options import options_of, parse_value
from rollpipe.runs.plots import learning_curve

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
    with pytest.raises(ValueError, match="is not int"):
        parse_value(text, ("int",))


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
