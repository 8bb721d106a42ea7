"Natural-gradient parts against dense linear algebra, the exact Fisher matrix and twice back-propagated KL divergences."
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import grad

from rollpipe.agents.linearization import Linearization, assign, fisher_product, flatten, in_row_blocks, unflatten
from rollpipe.agents.trust_region import backtrack_line_search, conjugate_gradients, step_size
from rollpipe.layers.distributions import Categorical, Gaussian, GaussianParams
from rollpipe.layers.joint import Joint
from rollpipe.pipes import nested

few = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 2**31 - 1)


def spd(n, seed, log_cond=1.0):
    "Random symmetric matrix [n, n] with eigenvalues from 1 down to 10^-log_cond, and a right-hand side [n], float64."
    g = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.double))[0]
    return q @ torch.diag(torch.logspace(0, -log_cond, n, dtype=torch.double)) @ q.T, \
        torch.randn(n, generator=g, dtype=torch.double)


# ---- vectors

@few
@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4), seeds)
def test_flatten_unflatten_assign_are_inverse(shapes, seed):
    torch.manual_seed(seed)
    xs = [torch.randn(shape) for shape in shapes]
    vector = flatten(xs)
    assert all(torch.equal(a, b) for a, b in zip(unflatten(vector, xs), xs))
    ys = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    assign(ys, vector)
    assert torch.equal(flatten(ys), vector) and not flatten(ys).requires_grad


def test_flatten_takes_tensors_in_any_memory_order_and_copies():
    x = torch.arange(6.).view(2, 3).T
    vector = flatten([x])
    assert vector.tolist() == [0, 3, 1, 4, 2, 5]
    vector.zero_()
    assert x.sum() == 15
    assign([x], torch.arange(6.))
    assert x.tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match='expected a vector of 6'): assign([x], torch.zeros(2, 3))


# ---- conjugate gradients

@few
@given(st.integers(1, 12), seeds, st.floats(0, 3), st.floats(0, 1))
def test_cg_solves_like_dense(n, seed, log_cond, damping):
    A, b = spd(n, seed, log_cond)
    got = conjugate_gradients(lambda v: A @ v, b, iters=5 * n + 10, tol=1e-11, damping=damping)
    want = torch.linalg.solve(A + damping * torch.eye(n, dtype=torch.double), b)
    assert got.status == 'converged' and got.residual <= 1e-11
    torch.testing.assert_close(got.x, want, rtol=1e-6, atol=1e-7)
    assert got.undamped == pytest.approx(float(got.x @ A @ got.x), rel=1e-6)
    assert got.curvature == pytest.approx(float(got.x @ b), rel=1e-6)


@few
@given(st.integers(2, 10), seeds, st.floats(0, 3), st.integers(1, 6), st.floats(0, .1))
def test_cg_stopped_early_minimises_over_the_krylov_space(n, seed, log_cond, iters, damping):
    A, b = spd(n, seed, log_cond)
    M = A + damping * torch.eye(n, dtype=torch.double)
    got = conjugate_gradients(lambda v: A @ v, b, iters=iters, damping=damping)
    k = got.iterations
    basis = torch.linalg.qr(torch.stack([torch.linalg.matrix_power(M, i) @ b for i in range(k)], 1))[0]
    best = basis @ torch.linalg.lstsq(basis.T @ M @ basis, basis.T @ b[:, None], driver='gelsd').solution[:, 0]
    energy = lambda x: float(x @ M @ x / 2 - b @ x)
    assert energy(got.x) <= energy(best) + 1e-6 * abs(energy(best))
    assert got.residual == pytest.approx(float((b - M @ got.x).norm() / b.norm()), rel=1e-4, abs=1e-9)
    assert got.curvature == pytest.approx(float(got.x @ M @ got.x), rel=1e-5)


def test_cg_does_not_lose_its_way_on_a_badly_conditioned_matrix():
    A, b = spd(30, 0, log_cond=10)
    residuals = []
    for iters in (1, 10, 100):
        got = conjugate_gradients(lambda v: A.float() @ v, b.float(), iters=iters, damping=1e-3)
        assert got.x.isfinite().all() and got.x.dtype == torch.float32 and got.status in ('iterations', 'converged')
        residuals.append(float((b - A @ got.x.double() - 1e-3 * got.x.double()).norm() / b.norm()))
    assert residuals[2] < 1e-3 < residuals[0]


def test_cg_tolerance_is_relative_to_b():
    A, b = spd(8, 3)
    counts = {conjugate_gradients(lambda v: A @ v, b * s, iters=50, tol=.1).iterations for s in (1e-12, 1., 1e12)}
    assert len(counts) == 1 and counts.pop() < 8
    got = conjugate_gradients(lambda v: A @ v, b * 1e-12, iters=50, tol=.1)
    assert got.status == 'converged' and got.residual <= .1


def test_cg_in_float32_does_not_take_rounding_for_curvature():
    got = conjugate_gradients(lambda v: v * torch.tensor([3., 1.]), torch.tensor([1., 1.]), iters=1000, tol=0.)
    assert got.status == 'converged' and got.iterations < 10
    torch.testing.assert_close(got.x, torch.tensor([1 / 3, 1.]))


@few
@given(st.integers(2, 8), seeds)
def test_cg_on_an_indefinite_matrix_returns_a_finite_descent_point(n, seed):
    A, b = spd(n, seed)
    A = A - 0.5 * torch.eye(n, dtype=torch.double)
    got = conjugate_gradients(lambda v: A @ v, b, iters=100)
    assert got.status in ('non-positive curvature', 'converged', 'iterations') and got.x.isfinite().all()
    assert float(got.x @ b) >= 0 and got.curvature >= -1e-9
    if got.iterations == 0: assert not got.x.any() and got.residual == 1. and got.curvature == 0.


def test_cg_on_a_singular_matrix_stops_where_the_curvature_ends():
    A = torch.diag(torch.tensor([2., 0.]))
    assert conjugate_gradients(lambda v: A @ v, torch.tensor([0., 1.])).status == 'non-positive curvature'
    got = conjugate_gradients(lambda v: A @ v, torch.tensor([4., 0.]))
    assert got.x.tolist() == [2., 0.] and got.status == 'converged'


@pytest.mark.parametrize('bad', [math.nan, math.inf])
@pytest.mark.parametrize('when', [0, 2])
def test_cg_keeps_the_last_good_x_when_a_product_breaks(bad, when):
    A, b = spd(6, 1)
    calls = iter(range(100))
    got = conjugate_gradients(lambda v: A @ v * (bad if next(calls) == when else 1), b)
    assert (got.status, got.iterations) == ('non-finite', when)
    torch.testing.assert_close(got.x, conjugate_gradients(lambda v: A @ v, b, iters=when).x if when else 0 * b)


@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_cg_with_a_bad_right_hand_side(bad):
    got = conjugate_gradients(lambda v: v, torch.tensor([1., bad]))
    assert got.status == 'non-finite' and got.x.tolist() == [0., 0.] and got.iterations == 0


def test_cg_refuses_bad_arguments():
    b, one = torch.ones(2), lambda v: v
    for kw in (dict(iters=0), dict(tol=-1.), dict(damping=-1.)):
        with pytest.raises(ValueError, match='expected iters >= 1'): conjugate_gradients(one, b, **kw)
    with pytest.raises(ValueError, match='expected a vector'): conjugate_gradients(one, b[:, None])


def test_cg_asks_for_one_product_per_iteration_and_leaves_b_alone():
    A, b = spd(20, 2, 4)
    seen, copy = [], b.clone()
    got = conjugate_gradients(lambda v: (seen.append(v), A @ v)[1], b, iters=7)
    assert got.iterations == len(seen) == 7 and torch.equal(b, copy)


# ---- Fisher-vector products

class Net(nn.Module):
    "Nested distribution parameters of a small network, with a parameter, a buffer and a head that play no part."
    def __init__(self, head, width=5):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.logits, self.mean, self.std = nn.Linear(width, 4), nn.Linear(width, 2), nn.Linear(width, 2)
        self.log_std = nn.Parameter(torch.tensor([-.3, .2]))
        self.value = nn.Linear(width, 1)
        self.register_buffer('count', torch.zeros(()))
        self.head = head
        self.double()

    def forward(self, x):
        h = self.body(x)
        mean = self.mean(h)
        free = GaussianParams(mean, self.log_std.expand_as(mean))
        return {'categorical': lambda: self.logits(h), 'free': lambda: free,
                'fixed': lambda: GaussianParams(mean, torch.zeros_like(mean)),
                'state': lambda: GaussianParams(mean, nn.functional.softplus(self.std(h)).clamp(.3, 10).log()),
                'nested': lambda: {'move': free, 'jump': (self.logits(h), [self.logits(h.sin())])}}[self.head]()


DISTS = {'categorical': Categorical(4), 'free': Gaussian((2,)), 'fixed': Gaussian((2,)), 'state': Gaussian((2,)),
         'nested': Joint({'move': Gaussian((2,)), 'jump': (Categorical(4), [Categorical(4)])})}


def problem(head, seed, n=7):
    torch.manual_seed(seed)
    net, x = Net(head), torch.randn(n, 3, dtype=torch.double)
    weights = torch.rand(n, dtype=torch.double)
    params = list(net.parameters())
    return net, x, weights / weights.sum(), params, Linearization(net(x), params)


def dense(product, size):
    return torch.stack([product(e) for e in torch.eye(size, dtype=torch.double)])


@pytest.mark.parametrize('head', DISTS)
def test_product_is_the_hessian_of_the_kl(head):
    net, x, weights, params, lin = problem(head, 0)
    fisher = fisher_product(lin, DISTS[head].fisher, weights)
    old = nested.map(torch.Tensor.detach, net(x))
    kl = (weights * DISTS[head].kl(old, net(x))).sum()
    slope = [g for g in grad(kl, params, create_graph=True, allow_unused=True)]
    for seed in range(4):
        v = torch.randn(flatten(params).numel(), generator=torch.Generator().manual_seed(seed), dtype=torch.double)
        gv = sum((g * d).sum() for g, d in zip(slope, unflatten(v, params)) if g is not None)
        hv = grad(gv, params, retain_graph=True, allow_unused=True)
        want = flatten([torch.zeros_like(p) if h is None else h for p, h in zip(params, hv)])
        torch.testing.assert_close(fisher(v), want, rtol=1e-9, atol=1e-12)


def test_product_is_the_expected_outer_product_of_scores():
    net, x, weights, params, lin = problem('categorical', 1)
    size = flatten(params).numel()
    logp = net(x).log_softmax(-1)
    F = torch.zeros(size, size, dtype=torch.double)
    for n in range(len(x)):
        for a in range(4):
            score = grad(logp[n, a], params, retain_graph=True, allow_unused=True)
            score = flatten([torch.zeros_like(p) if s is None else s for p, s in zip(params, score)])
            F += weights[n] * logp[n, a].exp().detach() * torch.outer(score, score)
    torch.testing.assert_close(dense(fisher_product(lin, DISTS['categorical'].fisher, weights), size), F)


@pytest.mark.parametrize('head', DISTS)
def test_product_is_linear_symmetric_and_semidefinite(head):
    _, _, weights, params, lin = problem(head, 2)
    product = fisher_product(lin, DISTS[head].fisher, weights)
    F = dense(product, flatten(params).numel())
    torch.testing.assert_close(F, F.T, rtol=1e-10, atol=1e-13)
    assert torch.linalg.eigvalsh(F).min() > -1e-12 and F.abs().max() > 0
    v = torch.randn(len(F), dtype=torch.double)
    torch.testing.assert_close(product(3 * v), 3 * F @ v)


@few
@given(st.sampled_from(sorted(DISTS)), seeds, st.integers(1, 6))
def test_jvp_is_a_difference_quotient_and_vjp_its_transpose(head, seed, n):
    net, x, _, params, lin = problem(head, seed, n)
    g = torch.Generator().manual_seed(seed)
    v = torch.randn(flatten(params).numel(), generator=g, dtype=torch.double)
    c = nested.map(lambda y: torch.randn(y.shape, generator=g, dtype=torch.double), lin.outputs)
    got, theta, eps = lin.jvp(v), flatten(params), 1e-6
    nested.check_like(got, lin.outputs, 'jvp')
    left = sum(float((a * b).sum()) for a, b in zip(nested.leaves(c), nested.leaves(got)))
    assert left == pytest.approx(float(lin.vjp(c) @ v), rel=1e-9, abs=1e-12)
    with torch.no_grad():
        assign(params, theta + eps * v); up = nested.map(torch.clone, net(x))
        assign(params, theta - eps * v); down = nested.map(torch.clone, net(x))
    for jv, a, b in zip(*map(nested.leaves, (got, up, down))):
        torch.testing.assert_close(jv, (a - b) / (2 * eps), rtol=1e-4, atol=1e-5)


def test_number_and_row_weights_agree_on_more_leading_dimensions():
    net, _, _, params, _ = problem('nested', 3)
    x = torch.randn(4, 3, 3, dtype=torch.double)
    lin, fisher = Linearization(net(x), params), DISTS['nested'].fisher
    v = torch.randn(flatten(params).numel(), dtype=torch.double)
    rows = torch.full((4, 3), 1 / 12, dtype=torch.double)
    torch.testing.assert_close(fisher_product(lin, fisher, 1 / 12)(v), fisher_product(lin, fisher, rows)(v))
    flat = Linearization(net(x.flatten(0, 1)), params)
    torch.testing.assert_close(fisher_product(flat, fisher, 1 / 12)(v), fisher_product(lin, fisher, 1 / 12)(v))


@few
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 1), seeds)
def test_blocks_of_rows_change_nothing(n, size, dim, seed):
    net, _, _, params, _ = problem('nested', seed)
    x = torch.randn(n, 2, 3, dtype=torch.double).transpose(0, dim)
    calls = []
    def forward(rows):
        calls.append(rows['x'].shape[dim])
        return net(rows['x'])
    whole, blocks = (Linearization(y, params) for y in (net(x), in_row_blocks(forward, {'x': x}, size, dim)))
    assert sum(calls) == n and max(calls) - min(calls) <= 1 and len(calls) == max(1, round(n / size))
    nested.check_like(blocks.outputs, whole.outputs, 'outputs')
    v = torch.randn(flatten(params).numel(), dtype=torch.double)
    products = [fisher_product(lin, DISTS['nested'].fisher, 1 / n)(v) for lin in (whole, blocks)]
    torch.testing.assert_close(*products)
    gradients = [lin.gradient(lambda p: p['move'].mean.square().sum() + p['jump'][0].exp().sum())
                 for lin in (whole, blocks)]
    torch.testing.assert_close(*gradients)


def test_unused_parameters_get_zeros_and_outputs_without_a_graph_count_as_constant():
    net, x, _, params, lin = problem('fixed', 4)
    v = torch.randn(flatten(params).numel(), dtype=torch.double)
    assert not lin.jvp(v).log_std.any()
    parts = unflatten(fisher_product(lin, DISTS['fixed'].fisher, 1 / 7)(v), params)
    named = dict(zip([name for name, _ in net.named_parameters()], parts))
    assert not named['value.weight'].any() and not named['log_std'].any() and named['mean.weight'].any()


def test_outputs_that_are_linear_in_nothing_used_give_a_zero_jvp():
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    lin = Linearization([a * 2], [b])
    assert lin.jvp(torch.ones(2))[0].tolist() == [0., 0.] and lin.vjp([torch.ones(2)]).tolist() == [0., 0.]


def test_a_parameter_may_be_an_output_itself():
    a = torch.ones(2, requires_grad=True)
    lin = Linearization((a, a * a), [a])
    assert [y.tolist() for y in lin.jvp(torch.tensor([1., 2.]))] == [[1., 2.], [2., 4.]]
    assert lin.vjp((torch.tensor([1., 0.]), torch.tensor([0., 1.]))).tolist() == [1., 2.]


def test_gradient_is_that_of_the_whole_graph_even_under_no_grad():
    net, x, weights, params, lin = problem('nested', 5)
    dist = DISTS['nested']
    act = dist.sample(lin.outputs, nested.map(torch.Tensor.double, dist.noise((7,), torch.Generator().manual_seed(0))))
    objective = lambda p: (weights * dist.log_prob(p, act).exp()).sum()
    with torch.no_grad(): value, got = lin.gradient(objective)
    whole = objective(net(x))
    want = grad(whole, params, allow_unused=True)
    torch.testing.assert_close(value, whole.detach())
    torch.testing.assert_close(got, flatten([torch.zeros_like(p) if g is None else g for p, g in zip(params, want)]))
    assert not got.requires_grad and all(p.grad is None for p in params)


def test_products_work_under_no_grad_and_refuse_changed_parameters():
    net, x, weights, params, lin = problem('categorical', 6)
    product = fisher_product(lin, DISTS['categorical'].fisher, weights)
    v = torch.randn(flatten(params).numel(), dtype=torch.double)
    with torch.no_grad(): assert torch.equal(product(v), product(v))
    assign(params, flatten(params) + 1)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'): product(v)


def test_outputs_stay_what_they_were_when_the_parameters_change():
    net, x, _, params, lin = problem('free', 8)
    before = nested.map(torch.clone, lin.outputs)
    assign(params, flatten(params) + 1)  # the log standard deviation is an expanded parameter
    assert all(map(torch.equal, nested.leaves(before), nested.leaves(lin.outputs)))


def test_natural_step_equals_a_dense_one_and_costs_the_kl_it_should():
    net, x, weights, params, lin = problem('free', 7)
    dist, max_kl, damping = DISTS['free'], 1e-6, 1e-3
    product = fisher_product(lin, dist.fisher, weights)
    size = flatten(params).numel()
    act, adv = torch.randn(7, 2, dtype=torch.double), torch.randn(7, dtype=torch.double)
    old, logp = lin.outputs, dist.log_prob(lin.outputs, act)
    _, g = lin.gradient(lambda p: (weights * adv * (dist.log_prob(p, act) - logp).exp()).sum())
    cg = conjugate_gradients(product, g, iters=200, tol=1e-12, damping=damping)
    F = dense(product, size)
    want = torch.linalg.solve(F + damping * torch.eye(size, dtype=torch.double), g)
    want *= math.sqrt(2 * max_kl / (want @ F @ want))
    step = step_size(max_kl, cg.undamped) * cg.x
    torch.testing.assert_close(step, want, rtol=1e-5, atol=1e-9)

    assign(params, flatten(params) + step)
    with torch.no_grad(): kl = float((weights * dist.kl(old, net(x))).sum())
    assert kl == pytest.approx(max_kl, rel=.01)


@pytest.mark.parametrize('curvature', [0., -1., math.nan, math.inf, -math.inf])
def test_step_size_without_a_curvature_is_zero(curvature):
    assert step_size(.01, curvature) == 0.


# ---- line search

class Search:
    "A search from theta = (0, 1) on parameters that are changed in place; counts what is evaluated."
    def __init__(self, surrogate, kl):
        self.param, self.seen, self.fns = nn.Parameter(torch.tensor([0.1, 1 / 3])), [], (surrogate, kl)
        self.start = flatten([self.param])

    def __call__(self, step=(1., 0.), rate=1., max_kl=1., **kw):
        def evaluate(theta):
            torch.testing.assert_close(flatten([self.param]), theta, rtol=0, atol=0, equal_nan=True)
            self.seen.append(theta)
            return tuple(fn(self.param.detach() - self.start) for fn in self.fns)
        return backtrack_line_search(evaluate, self.start, torch.tensor(step), rate, max_kl,
                                     set_params=lambda theta: assign([self.param], theta), **kw)

    @property
    def restored(self): return torch.equal(self.param.detach(), self.start)


def first(d): return d[0]
def zero(d): return 0 * d[0]


def test_full_step_is_taken_where_the_model_is_exact():
    search = Search(first, lambda d: d[0] ** 2 / 2)
    got = search(before=0.)
    assert got.accepted and got.backtracks == 0 and len(search.seen) == 1 and got.status == 'accepted'
    assert torch.equal(search.param.detach(), got.theta) and not search.restored
    assert got.ratio == pytest.approx(1., rel=1e-5) and got.kl == pytest.approx(.5, rel=1e-5)


def test_surrogate_at_the_start_is_evaluated_if_it_is_not_known():
    search = Search(lambda d: d[0] + 5, zero)
    got = search()
    assert len(search.seen) == 2 and got.before == 5. and got.accepted


@few
@given(st.floats(.3, .9), st.floats(1e-3, 2.))
def test_kl_bound_decides_the_first_length_that_fits(backtrack, max_kl):
    search = Search(first, lambda d: d[0].abs())
    got = search(max_kl=max_kl, backtrack=backtrack, max_backtracks=200, before=0.)
    lengths = [float(theta[0] - search.start[0]) for theta in search.seen]
    assert got.accepted and got.kl <= max_kl and all(length > max_kl for length in lengths[:-1])
    assert got.backtracks == len(search.seen) - 1
    assert lengths[-1] == pytest.approx(backtrack ** got.backtracks, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize('surrogate, kl, kw, status, trials', [
    (first, lambda d: d[0] * 0 + 2., {}, 'KL too large', 10),
    (lambda d: -d[0], zero, {}, 'no improvement', 10),
    (lambda d: d[0] * .05, zero, {}, 'no improvement', 10),
    (lambda d: d[0] * 0, zero, dict(accept_ratio=0.), 'no improvement', 10),
    (lambda d: d[0] * math.nan, zero, {}, 'non-finite', 10),
    (lambda d: d[0] * math.inf, zero, {}, 'non-finite', 10),
    (first, lambda d: d[0] * math.nan, {}, 'non-finite', 10),
    (first, zero, dict(rate=0.), 'no expected improvement', 0),
    (first, zero, dict(rate=-1.), 'no expected improvement', 0),
    (first, zero, dict(rate=math.nan), 'no expected improvement', 0),
    (first, zero, dict(rate=math.inf), 'no expected improvement', 0),
    (lambda d: -d[0], zero, dict(max_backtracks=3), 'no improvement', 3)])
def test_failure_restores_the_parameters_exactly_and_says_why(surrogate, kl, kw, status, trials):
    search = Search(surrogate, kl)
    got = search(before=0., **kw)
    assert (got.accepted, got.status, got.backtracks, len(search.seen)) == (False, status, trials, trials)
    assert search.restored and torch.equal(got.theta, search.start)
    assert (got.before, got.surrogate, got.kl, got.ratio) == (0., 0., 0., 0.)


def test_an_error_while_evaluating_restores_too():
    def fail(d): raise RuntimeError('broken network')
    search = Search(first, fail)
    with pytest.raises(RuntimeError, match='broken network'): search(before=0.)
    assert search.restored


def test_a_nan_in_the_step_is_never_left_in_the_parameters():
    search = Search(first, zero)
    got = search(step=(math.nan, 0.), before=0.)
    assert not got.accepted and got.status == 'non-finite' and search.restored


def test_theta_given_as_a_view_of_the_parameters_is_not_overwritten():
    param = nn.Parameter(torch.zeros(2))
    got = backtrack_line_search(lambda theta: (-theta[0], 0.), param.detach(), torch.ones(2), 1., 1., before=0.,
                                set_params=lambda theta: assign([param], theta))
    assert not got.accepted and not param.any()
