"Conjugate gradients, a natural step and the line search against dense linear algebra and by hand."

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_linearization import few, seeds
from torch import nn

from rollpipe.agents.linearization import assign, flat_vector
from rollpipe.agents.natural_gradient import backtrack_line_search, conjugate_gradients


def spd(n, seed, log_cond=1.0):
    "Random symmetric matrix [n, n] with eigenvalues from 1 down to 10^-log_cond, and a right-hand side [n], float64."
    g = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.double))[0]
    return q @ torch.diag(torch.logspace(0, -log_cond, n, dtype=torch.double)) @ q.T, torch.randn(
        n, generator=g, dtype=torch.double
    )


# ---- conjugate gradients


@few
@given(st.integers(1, 12), seeds, st.floats(0, 3), st.floats(0, 1), st.none() | st.floats(0, 2))
def test_cg_solves_like_dense(n, seed, log_cond, damping, log_cond_of_it):
    "With a preconditioner of that condition, or without one."
    (A, b) = spd(n, seed, log_cond)
    M = None if log_cond_of_it is None else spd(n, seed + 1, log_cond_of_it)[0]
    got = conjugate_gradients(
        lambda v: A @ v,
        b,
        iters=20 * n + 20,
        tol=1e-11,
        damping=damping,
        preconditioner=M if M is None else M.mv,
    )
    want = torch.linalg.solve(A + damping * torch.eye(n, dtype=torch.double), b)
    assert got.status == "converged" and got.residual <= 1e-11
    torch.testing.assert_close(got.x, want, rtol=1e-6, atol=1e-7)
    assert got.curvature == pytest.approx(float(got.x @ b), rel=1e-6)


@few
@given(
    st.integers(2, 10), seeds, st.floats(0, 3), st.integers(1, 6), st.floats(0, 0.1), st.booleans()
)
def test_cg_stopped_early_minimises_over_its_krylov_space(
    n, seed, log_cond, iters, damping, is_preconditioned
):
    (A, b) = spd(n, seed, log_cond)
    M = spd(n, seed + 1)[0] if is_preconditioned else torch.eye(n, dtype=torch.double)
    damped = A + damping * torch.eye(n, dtype=torch.double)
    v = M @ b
    space = []
    got = conjugate_gradients(
        lambda v: A @ v,
        b,
        iters=min(iters, n),
        damping=damping,
        preconditioner=M.mv if is_preconditioned else None,
    )
    for _ in range(got.iterations):
        space.append(v / v.norm())
        v = M @ (damped @ space[-1])
    basis = torch.linalg.qr(torch.stack(space, 1))[0]
    best = (
        basis
        @ torch.linalg.lstsq(
            basis.T @ damped @ basis, basis.T @ b[:, None], driver="gelsd"
        ).solution[:, 0]
    )

    def energy(x):
        return float(x @ damped @ x / 2 - x @ b)

    assert energy(got.x) <= energy(best) + 1e-6 * abs(energy(best)) + 1e-9
    assert got.residual == pytest.approx(
        float((b - damped @ got.x).norm() / b.norm()), rel=1e-4, abs=1e-9
    )
    assert got.curvature == pytest.approx(float(got.x @ damped @ got.x), rel=1e-5)


def test_cg_does_not_lose_its_way_on_a_badly_conditioned_matrix():
    A, b = spd(30, 0, log_cond=10)
    residuals = []
    for iters in (1, 10, 100):
        got = conjugate_gradients(lambda v: A.float() @ v, b.float(), iters=iters, damping=1e-3)
        assert (
            got.x.isfinite().all()
            and got.x.dtype == torch.float32
            and got.status in ("iterations", "converged")
        )
        residuals.append(float((b - A @ got.x.double() - 1e-3 * got.x.double()).norm() / b.norm()))
    assert residuals[2] < 1e-3 < residuals[0]


def test_cg_tolerance_is_relative_to_b():
    A, b = spd(8, 3)
    counts = {
        conjugate_gradients(lambda v: A @ v, b * s, iters=50, tol=0.1).iterations
        for s in (1e-12, 1.0, 1e12)
    }
    assert len(counts) == 1 and counts.pop() < 8
    got = conjugate_gradients(lambda v: A @ v, b * 1e-12, iters=50, tol=0.1)
    assert got.status == "converged" and got.residual <= 0.1


def test_cg_in_float32_does_not_take_rounding_for_curvature():
    got = conjugate_gradients(
        lambda v: v * torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]), iters=1000, tol=0.0
    )
    assert got.status == "converged" and got.iterations < 10
    torch.testing.assert_close(got.x, torch.tensor([1 / 3, 1.0]))


@few
@given(st.integers(2, 8), seeds)
def test_cg_on_an_indefinite_matrix_returns_a_finite_descent_point(n, seed):
    A, b = spd(n, seed)
    A = A - 0.5 * torch.eye(n, dtype=torch.double)
    got = conjugate_gradients(lambda v: A @ v, b, iters=100)
    assert (
        got.status in ("non-positive curvature", "converged", "iterations")
        and got.x.isfinite().all()
    )
    assert float(got.x @ b) >= 0 and got.curvature >= -1e-9
    if got.iterations == 0:
        assert not got.x.any() and got.residual == 1.0 and got.curvature == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("when", [0, 2])
def test_cg_keeps_the_last_good_x_when_a_product_breaks(bad, when):
    A, b = spd(6, 1)
    calls = iter(range(100))
    got = conjugate_gradients(lambda v: A @ v * (bad if next(calls) == when else 1), b)
    assert (got.status, got.iterations) == ("non-finite", when)
    torch.testing.assert_close(
        got.x, conjugate_gradients(lambda v: A @ v, b, iters=when).x if when else 0 * b
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_cg_with_a_bad_right_hand_side(bad):
    got = conjugate_gradients(lambda v: v, torch.tensor([1.0, bad]))
    assert got.status == "non-finite" and got.x.tolist() == [0.0, 0.0] and got.iterations == 0


@pytest.mark.parametrize(
    "stop", [dict(iters=7), dict(iters=30, gain_tol=0.01), dict(iters=30, tol=0.1)]
)
def test_cg_preconditions_only_what_an_iteration_uses(stop):
    A, b = spd(30, 0, 2.0)
    seen = []
    got = conjugate_gradients(
        lambda v: A @ v, b, preconditioner=lambda r: (seen.append(r), r)[1], **stop
    )
    assert got.iterations == len(seen) < 30 and torch.equal(
        got.x, conjugate_gradients(lambda v: A @ v, b, **stop).x
    )


def test_cg_stops_when_an_iteration_gains_little():
    A, b = spd(30, 0, 2.0)
    runs = [conjugate_gradients(lambda v: A @ v, b, iters=n) for n in range(1, 31)]
    gains = [float(b @ (x.x - y.x)) / float(b @ x.x) for x, y in zip(runs[1:], runs)]
    for tol in (0.1, 0.01, 0.001):
        got = conjugate_gradients(lambda v: A @ v, b, iters=30, gain_tol=tol)
        assert (
            got.iterations == next(i for i, gain in enumerate(gains, 2) if gain <= tol)
            and got.status == "little gain"
        )
        assert torch.equal(got.x, runs[got.iterations - 1].x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_cg_keeps_the_last_good_x_when_the_preconditioner_breaks(bad):
    A, b = spd(5, 0)
    calls = []

    def broken(r):
        calls.append(r)
        return r * (1.0 if len(calls) < 3 else bad)

    got = conjugate_gradients(lambda v: A @ v, b, preconditioner=broken)
    assert (
        got.x.isfinite().all()
        and got.iterations == 2
        and got.status in ("non-finite", "non-positive curvature")
    )


def test_cg_refuses_bad_arguments():
    b = torch.ones(2)
    one = lambda v: v
    for kw in (dict(iters=0), dict(tol=-1.0), dict(damping=-1.0)):
        with pytest.raises(ValueError, match="expected iters >= 1"):
            conjugate_gradients(one, b, **kw)
    with pytest.raises(ValueError, match="expected a vector"):
        conjugate_gradients(one, b[:, None])


def test_cg_asks_for_one_product_per_iteration_and_leaves_b_alone():
    A, b = spd(20, 2, 4)
    seen = []
    copy = b.clone()
    got = conjugate_gradients(lambda v: (seen.append(v), A @ v)[1], b, iters=7)
    assert got.iterations == len(seen) == 7 and torch.equal(b, copy)


# ---- line search


class Search:
    "A search from theta = (0, 1) on parameters that are changed in place; counts what is evaluated."

    def __init__(self, surrogate, kl):
        self.param = nn.Parameter(torch.tensor([0.1, 1 / 3]))
        self.seen = []
        self.fns = (surrogate, kl)
        self.start = flat_vector([self.param])

    def __call__(self, step=(1.0, 0.0), rate=1.0, max_kl=1.0, **kw):
        def evaluate(theta):
            torch.testing.assert_close(
                flat_vector([self.param]), theta, rtol=0, atol=0, equal_nan=True
            )
            self.seen.append(theta)
            return tuple(fn(self.param.detach() - self.start) for fn in self.fns)

        return backtrack_line_search(
            evaluate,
            self.start,
            torch.tensor(step),
            rate,
            max_kl,
            set_params=lambda theta: assign([self.param], theta),
            **kw,
        )

    @property
    def restored(self):
        return torch.equal(self.param.detach(), self.start)


def first(d):
    return d[0]


def zero(d):
    return 0 * d[0]


def test_surrogate_at_the_start_is_evaluated_if_it_is_not_known():
    search = Search(lambda d: d[0] + 5, zero)
    got = search()
    assert len(search.seen) == 2 and got.before == 5.0 and got.accepted


@few
@given(st.floats(0.3, 0.9), st.floats(1e-3, 2.0))
def test_kl_bound_decides_the_first_length_that_fits(backtrack, max_kl):
    search = Search(first, lambda d: d[0].abs())
    got = search(max_kl=max_kl, backtrack=backtrack, max_backtracks=200, before=0.0)
    lengths = [float(theta[0] - search.start[0]) for theta in search.seen]
    assert got.accepted and got.kl <= max_kl and all(length > max_kl for length in lengths[:-1])
    assert got.backtracks == len(search.seen) - 1
    assert lengths[-1] == pytest.approx(backtrack**got.backtracks, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    "surrogate, kl, kw, status, trials",
    [
        (first, lambda d: d[0] * 0 + 2.0, {}, "KL too large", 10),
        (lambda d: -d[0], zero, {}, "no improvement", 10),
        (lambda d: d[0] * 0.05, zero, {}, "no improvement", 10),
        (lambda d: d[0] * 0, zero, dict(accept_ratio=0.0), "no improvement", 10),
        (lambda d: d[0] * math.nan, zero, {}, "non-finite", 10),
        (lambda d: d[0] * math.inf, zero, {}, "non-finite", 10),
        (first, lambda d: d[0] * math.nan, {}, "non-finite", 10),
        (first, zero, dict(rate=0.0), "no expected improvement", 0),
        (first, zero, dict(rate=-1.0), "no expected improvement", 0),
        (first, zero, dict(rate=math.nan), "no expected improvement", 0),
        (first, zero, dict(rate=math.inf), "no expected improvement", 0),
        (lambda d: -d[0], zero, dict(max_backtracks=3), "no improvement", 3),
    ],
)
def test_failure_restores_the_parameters_exactly_and_says_why(surrogate, kl, kw, status, trials):
    search = Search(surrogate, kl)
    got = search(before=0.0, **kw)
    assert (got.accepted, got.status, got.backtracks, len(search.seen)) == (
        False,
        status,
        trials,
        trials,
    )
    assert search.restored and torch.equal(got.theta, search.start)
    assert (got.before, got.surrogate, got.kl, got.ratio) == (0.0, 0.0, 0.0, 0.0)


def test_an_error_while_evaluating_restores_too():
    def fail(d):
        raise RuntimeError("broken network")

    search = Search(first, fail)
    with pytest.raises(RuntimeError, match="broken network"):
        search(before=0.0)
    assert search.restored


def test_theta_given_as_a_view_of_the_parameters_is_not_overwritten():
    param = nn.Parameter(torch.zeros(2))
    got = backtrack_line_search(
        lambda theta: (-theta[0], 0.0),
        param.detach(),
        torch.ones(2),
        1.0,
        1.0,
        before=0.0,
        set_params=lambda theta: assign([param], theta),
    )
    assert not got.accepted and not param.any()
