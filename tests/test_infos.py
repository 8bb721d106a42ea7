"The recorder of infos, of single and of vector environments, against a slow one that looks at one number after the other."
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpipe.pipes import nested
from rollpipe.pipes.envs.infos import SingleInfos, VectorInfos
from rollpipe.pipes.errors import EnvError

fast = settings(deadline=None, max_examples=60)
numbers = dict(int=st.integers(-9, 9), float=st.sampled_from([0., .5, -3.25, 7.]), bool=st.booleans(), text=st.sampled_from(["a", "b"]))
SILENT = dict(int=0, float=np.nan, bool=False)


@st.composite
def stories(draw, change=True):
    """Infos of some steps, `[step][environment]` a dict of numbers and texts, in which any may be missing.

    With `change`, an info that begins as an integer may go on as a float.
    """
    kinds = {key: draw(st.sampled_from(sorted(numbers))) for key in draw(st.sets(st.sampled_from("abcd"), min_size=1))}
    def value(key, step):
        kind = kinds[key]
        if change and kind == "int" and step: kind = draw(st.sampled_from(["int", "float"]))
        return draw(numbers[kind])
    n, n_steps = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return [[{key: value(key, step) for key in kinds if draw(st.integers(0, 3))} for _ in range(n)] for step in range(n_steps)]


def slow(story, keys=None):
    "key -> list of columns: the first environment that tells an info in the first step shows its kind; silence is nan for floats, else 0."
    first = {}
    for info in reversed(story[0]): first.update(info)
    if keys is None: keys = [key for key, value in first.items() if not isinstance(value, str)]
    record = []
    dtypes = {key: np.asarray(first.get(key, np.float32(np.nan))).dtype for key in keys}
    silent = {key: np.nan if dtypes[key].kind == "f" else 0 for key in keys}
    for infos in story:
        columns = {}
        for key in keys:
            values = [info.get(key, silent[key]) for info in infos]
            for info in infos:
                if key in info: dtypes[key] = np.result_type(dtypes[key], np.asarray(info[key]).dtype)
            columns[key] = np.array([float(x) for x in values]).astype(dtypes[key])
        record.append(columns)
    return record


def same(a, b):
    assert list(a) == list(b)
    for key in a:
        assert a[key].dtype == b[key].dtype and a[key].shape == b[key].shape
        np.testing.assert_array_equal(a[key], b[key])


@fast
@given(story=stories())
def test_single_environments(story):
    recorder = SingleInfos(len(story[0]))
    for infos, expected in zip(story, slow(story)): same(recorder.record(infos), expected)


@fast
@given(story=stories(), keys=st.sets(st.sampled_from("abcd")))
def test_chosen_keys(story, keys):
    keys, recorder = sorted(keys), SingleInfos(len(story[0]), sorted(keys))
    if any(isinstance(info[key], str) for info in story[0] for key in keys if key in info):
        with pytest.raises(EnvError, match="not numeric"): recorder.record(story[0])
    elif not any(isinstance(info.get(key), str) for infos in story for info in infos for key in keys):
        for infos, expected in zip(story, slow(story, keys)): same(recorder.record(infos), expected)


def gathered(infos):
    "As gymnasium's vector environments gather infos: arrays for all environments, and masks of those that said something."
    n, out = len(infos), {}
    for key in dict.fromkeys(key for info in infos for key in info):
        values = [info.get(key) for info in infos]
        kind = type(next(x for x in values if x is not None))
        out[key] = np.array([kind() if x is None else x for x in values], dtype=object if kind is str else None)
        out[f"_{key}"] = np.array([x is not None for x in values])
    return out, np.ones(n, bool)


@fast
@given(story=stories(change=False))
def test_a_vector_environment_has_the_record_of_single_ones(story):
    vector, single = VectorInfos(len(story[0])), SingleInfos(len(story[0]))
    for infos in story:
        reported, every = gathered(infos)
        a, b = vector.record(reported, ~every, every), single.record(infos)
        same(dict(sorted(a.items())), dict(sorted(b.items())))


@fast
@given(story=stories(change=False), data=st.data())
def test_the_infos_of_an_end_are_found_and_those_of_no_step_are_not(story, data):
    "SAME_STEP puts the infos of the step that ended an episode into `final_info`; what a reset says is not recorded."
    n = len(story[0])
    recorder, expected = VectorInfos(n), SingleInfos(n)
    for step, infos in enumerate(story):
        ended, valid = (np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n))) for _ in range(2))
        if not step: valid[:] = True
        now, over = ([info if bool(e) == want else {} for info, e in zip(infos, ended)] for want in (False, True))
        reported = {**gathered(now)[0], "final_info": gathered(over)[0], "final_obs": None}
        a = recorder.record(reported, ended, valid)
        b = expected.record(infos)
        assert sorted(a) == sorted(b)
        for key in a:
            assert a[key].dtype == b[key].dtype
            np.testing.assert_array_equal(a[key][valid], b[key][valid])
            np.testing.assert_array_equal(a[key][~valid], np.full((~valid).sum(), np.nan if a[key].dtype.kind == "f" else 0))


@fast
@given(values=st.lists(st.lists(st.tuples(st.integers(0, 9), st.floats(-1, 1)), min_size=2, max_size=2), min_size=1, max_size=3))
def test_nested_infos(values):
    recorder = SingleInfos(2)
    for pair in values:
        record = recorder.record([{"at": {"n": n, "x": (x,)}} for n, x in pair])
        assert record["at"]["n"].tolist() == [n for n, _ in pair] and record["at"]["x"][0].tolist() == [x for _, x in pair]
    assert np.isnan(recorder.record([{}, {}])["at"]["x"][0]).all()


def test_a_nested_info_keeps_its_wider_dtype_too():
    recorder = SingleInfos(1)
    found = [recorder.record([{"at": {"x": x}}])["at"]["x"] for x in (0, .5, 1)]
    assert [x.dtype.kind for x in found] == ["i", "f", "f"] and [x.tolist() for x in found] == [[0], [.5], [1]]


@pytest.mark.parametrize("value", [[1, 2], np.zeros(2), "text", {"x": 1}, None, object()],
                         ids=["list", "array", "text", "dict", "None", "object"])
@pytest.mark.parametrize("known", [1, {"a": 1, "b": 2.}, np.zeros(3)], ids=["number", "dict", "array"])
def test_an_info_that_changes_its_form_names_the_environment(value, known):
    recorder = SingleInfos(3)
    recorder.record([{"x": known}] * 3)
    with pytest.raises(EnvError, match=r"environment 1, leaf info\['x'\]: an info changed its form .*Expected.*got"):
        recorder.record([{"x": known}, {"x": value}, {}])


def test_the_record_has_memory_of_its_own():
    "A vector environment may use its arrays again."
    infos, every, recorder = dict(x=np.zeros(2), at=dict(y=np.zeros((2, 3)))), np.ones(2, bool), VectorInfos(2)
    first = recorder.record(infos, ~every, every)
    for x in nested.leaves(infos): x[:] = 7
    assert all((x == 0).all() for x in nested.leaves(first)) and (recorder.record(infos, ~every, every)["x"] == 7).all()
