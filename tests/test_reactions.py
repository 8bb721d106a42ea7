"""How an actor is asked: its random numbers, what it is shown, which answers are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_same

from rollpipe.pipes import ActorError
from rollpipe.pipes.engines.reactions import AnswerCheck, SeededActor, as_input

fast = settings(deadline=None, max_examples=50)


class Draws:
    "Draws from torch's global generator."

    def step(self, *seen, hx, virtual):
        return torch.rand(1, 2), (), {}


class Noisy(Draws):
    "Answers the noise that it is given."

    nested = False

    def draw_noise(self, lead, generator):
        noise = torch.rand(*lead, 3, generator=generator)
        return {"a": noise, "b": (noise[..., 0],)} if self.nested else noise

    def step(self, *seen, hx, virtual, noise):
        return noise, (), {}


class NestedNoise(Noisy):
    nested = True


def answers(actor, asked, seed=0, explore=True):
    "What is answered to reactions, of which `asked` says whether they are virtual, while others draw numbers too."
    seeded = SeededActor(actor, 2, np.random.SeedSequence(seed), explore)
    found = []
    for virtual in asked:
        torch.rand(3)
        found.append((virtual, seeded.step((), (), virtual)[0]))
    return found


@fast
@given(asked=st.lists(st.booleans(), max_size=12), chunk=st.integers(1, 4))
@pytest.mark.parametrize("kind", [Draws, Noisy, NestedNoise])
def test_virtual_reactions_spend_no_random_numbers(kind, asked, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SeededActor, "CHUNK", chunk)
        some = [x for virtual, x in answers(kind(), asked) if not virtual]
        assert_same(some, [x for _, x in answers(kind(), [False] * len(some))])


def test_noise_is_drawn_for_many_steps_at_once_and_each_row_is_used_once(monkeypatch):
    monkeypatch.setattr(SeededActor, "CHUNK", 4)
    rows = [x for _, x in answers(Noisy(), [False] * 10)]
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence(0).generate_state(1)[0]))
    assert_same(
        torch.cat(rows),
        torch.cat([torch.rand(4, 2, 3, generator=generator) for _ in range(3)])[:10],
    )


@pytest.mark.parametrize("kind", [Draws, Noisy])
def test_the_global_generator_is_left_as_it_was(kind):
    seeded = SeededActor(kind(), 2, np.random.SeedSequence(0), True)
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    for _ in range(3):
        seeded.step((), (), False)
    assert_same(torch.rand(4), expected)


def test_without_exploration_there_is_no_noise():
    assert [x for _, x in answers(Noisy(), [False, True], explore=False)] == [None, None]


@fast
@given(
    shape=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    dtype=st.sampled_from(["f4", "f8", "i8", "u1", "?"]),
)
def test_inputs_are_aliases(shape, dtype):
    "But for float64, which is shown as float32."
    x = np.ones(shape, dtype)
    y = as_input({"x": (x,)})["x"][0]
    assert y.shape == (1, *shape) and y.dtype == (
        torch.float32 if dtype == "f8" else torch.from_numpy(x).dtype
    )
    if x.size:
        assert np.shares_memory(x, y.numpy()) == (dtype != "f8")


# --- answers


class Envs:
    action_space = "a space"

    def __len__(self):
        return 2

    def actions(self, array):
        pass


leaf = st.lists(st.integers(1, 2), max_size=2)
tree = st.dictionaries(st.sampled_from("abc"), leaf, max_size=3)


def tensors(shapes, first, n):
    return {k: torch.zeros(first, n, *shape) for k, shape in shapes.items()}


@fast
@given(act=leaf, infos=st.tuples(tree, tree), memories=st.tuples(tree, tree), n=st.integers(1, 2))
def test_later_answers_must_have_the_form_of_the_first(act, infos, memories, n):
    "The leaves of a recurrent state may have any first size, as long as it stays."
    check = AnswerCheck(Draws(), Envs(), {})

    def answer(k, n):
        return torch.zeros(1, n, *act), tensors(memories[k], 3, n) or (), tensors(infos[k], 1, n)

    check.check(*answer(0, 2), 2)
    check.check(*answer(0, n), n)
    if infos[0] == infos[1] and memories[0] == memories[1]:
        return check.check(*answer(1, n), n)
    with pytest.raises(ActorError, match="Draws.step (changed|gave)"):
        check.check(*answer(1, n), n)
    check.check(*answer(0, n), n)  # an answer that was refused changes nothing


@pytest.mark.parametrize("answer", [None, (), (1, 2), [torch.zeros(1, 2), (), {}], (1, 2, 3, 4)])
def test_an_answer_is_a_triple(answer):
    with pytest.raises(
        ActorError, match=r"lane 3: Draws.step gave no triple. Expected \(act, hx, info\)"
    ):
        AnswerCheck(Draws(), Envs(), {"lane": 3}).triple(answer)


def test_the_first_answer_is_for_all_environments():
    for wrong in (torch.zeros(1, 1), torch.zeros(2, 2), torch.zeros(2), np.zeros((1, 2))):
        with pytest.raises(ActorError, match=r"leaf act: .* a tensor of shape \[1, 2, ...\]"):
            AnswerCheck(Draws(), Envs(), {}).check(wrong, (), {}, 2)
    AnswerCheck(Draws(), Envs(), {}).check(
        torch.zeros(1, 2), (), {"a parameter": torch.nn.Parameter(torch.zeros(1, 2))}, 2
    )
