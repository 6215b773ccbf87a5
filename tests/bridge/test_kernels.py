"""The C kernels against the exact prox of pdecay.prox and against their Python twins."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

from pdecay import KernelUnavailable, Lp
from pdecay.prox import lp, penalty_prox
from pdecay.sklearn import BridgeClassifier, BridgeRegressor
from pdecay.sklearn import _kernels as module
from pdecay.sklearn._kernels import CompiledKernels
from pdecay.sklearn._python_kernels import Inverse, PythonKernels
from pdecay.sklearn._terms import Terms, entry_strength

from .problems import classification, regression

NORMS = [0, 0.01, 0.1, 0.3, 0.5, 2 / 3, 0.9, 0.99, 1, 1.01, 1.1, 1.3, 1.5, 1.9, 2, 2.5, 3, 4, 10]
SUMS = [
    Lp(0.5, 1) + Lp(2, 1),
    Lp(1, 0.3) + Lp(2, 0.5),
    Lp(0.5, 0.3) + Lp(1, 0.2) + Lp(2, 0.1),
    Lp(0.3, 0.3) + Lp(0.7, 0.2) + Lp(0, 0.1),
    Lp(1.3, 0.3) + Lp(3.5, 0.2),
    Lp(0.5, 0.2) + Lp(1.5, 3),
    Lp(0, 0.1) + Lp(0.5, 0.2) + Lp(2, 0.1),
    Lp(0, 1) + Lp(1, 0.1),
]


@pytest.fixture(params=["c", "python"])
def kernels(request):
    if request.param == "python":
        return PythonKernels()
    try:
        return CompiledKernels()
    except KernelUnavailable as reason:
        pytest.skip(str(reason))


def magnitudes(size=400):
    rng = np.random.default_rng(0)
    return rng.standard_normal(size) * 10.0 ** rng.uniform(-6, 6, size)


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("lam", [1e-3, 0.1, 1.0, 30.0])
def test_prox_equals_the_exact_prox(kernels, p, lam):
    x = magnitudes()
    found = kernels.prox(Terms(Lp(p, lam)), x, np.ones_like(x))
    np.testing.assert_allclose(found, lp(x, p, lam), rtol=1e-13, atol=0)


@pytest.mark.parametrize("penalty", SUMS, ids=str)
def test_prox_of_a_sum_equals_the_exact_prox(kernels, penalty):
    x = magnitudes()
    rate = 0.7
    found = kernels.prox(Terms(penalty), x, np.full_like(x, rate))
    np.testing.assert_allclose(found, penalty_prox(penalty, x, rate), rtol=1e-13, atol=0)


@pytest.mark.parametrize("p", [0.3, 0.5, 1.1, 2.5, 4])
def test_prox_does_not_depend_on_the_guess(kernels, p):
    x, ones = magnitudes(), np.ones(400)
    exact = kernels.prox(Terms(Lp(p, 0.1)), x, ones)
    for guess in (exact, x, 1e-3 * x, -x):
        found = kernels.prox(Terms(Lp(p, 0.1)), x, ones, guess)
        np.testing.assert_allclose(found, exact, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    "penalty",
    [
        Lp(1.5, 0.3) + Lp(2, 2),
        Lp(1.2, 3) + Lp(4, 0.01),
        Lp(1, 1) + Lp(1.3, 0.1) + Lp(2.5, 1) + Lp(6, 1),
    ],
    ids=str,
)
def test_slope_of_the_conjugate_inverts_the_slope(penalty):
    terms, u = Terms(penalty), magnitudes()
    t = terms.conjugate_slope(u)
    inside = np.abs(u) <= terms.l1
    assert not t[inside].any()
    np.testing.assert_allclose(terms.slope(t)[~inside], u[~inside], rtol=1e-9)


@pytest.mark.parametrize("penalty", [*(Lp(p, 0.3) for p in NORMS), *SUMS], ids=str)
def test_prox_is_zero_up_to_the_cut(kernels, penalty):
    norms = np.geomspace(1e-3, 1e3, 50)
    cut = Terms(penalty).cut(norms)
    assert not kernels.prox(Terms(penalty), cut, 1 / norms).any()


@pytest.mark.parametrize("p", [0, 0.2, 0.5, 1])
def test_entry_strength_is_where_the_prox_becomes_zero(kernels, p):
    x, norm = np.array([1.7]), np.array([0.6])
    lam = entry_strength(p, norm, norm * x)[0]
    assert kernels.prox(Terms(Lp(p, lam * 1.0001)), x, 1 / norm) == 0
    assert kernels.prox(Terms(Lp(p, lam * 0.9999)), x, 1 / norm) > 0


@pytest.mark.parametrize("penalty", [Lp(0.4, 0.1), Lp(1, 0.1), Lp(1.4, 0.1), SUMS[2]], ids=str)
def test_c_and_python_sweeps_agree(needs_native, penalty):
    x, y, _ = regression(n=40, d=15)
    x, y = np.asfortranarray((x - x.mean(0)) / 40**0.5), (y - y.mean()) / 40**0.5
    terms, norms = Terms(penalty), (x**2).sum(axis=0)
    cut, columns = terms.cut(norms), np.arange(15)
    results = []
    for kernels in (CompiledKernels(), PythonKernels()):
        w, q = np.zeros(15), x.T @ y
        kernels.gram(terms, x.T @ x, cut, w, q, 7, 0.0)
        v, r = np.zeros(15), y.copy()
        _, largest = kernels.dense(terms, x, columns, norms, cut, v, r, 7, 0.0)
        u, s, shift = np.zeros(15), y.copy(), np.zeros(1)
        raw = sparse.csc_array(x + 0.2)
        raw.indices, raw.indptr = raw.indices.astype(np.int32), raw.indptr.astype(np.int32)
        means, total = np.full(15, 0.2), 40.0
        kernels.sparse(terms, raw, means, total, columns, norms, cut, u, s, shift, 7, 0.0)
        np.testing.assert_allclose(v, w, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(u, w, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(r, y - x @ w, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(s + shift, y - x @ w, rtol=1e-9, atol=1e-12)
        steps = kernels.steps(terms, norms, cut, w, x.T @ (y - x @ w))
        assert steps.max() <= max(largest, 1e-15)
        results.append((w, steps))
    for c, python in zip(*results, strict=True):
        np.testing.assert_allclose(c, python, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("d", [1, 4, 7, 200])
@pytest.mark.parametrize("m", [0, 1, 6])
def test_conjugate_gradients_solve_the_system(kernels, d, m):
    rng = np.random.default_rng(0)
    x = np.asfortranarray(rng.uniform(-1, 1, (35, d)))
    weights, right = rng.random(d).astype(np.float32), rng.random(35).astype(np.float32)
    h = np.asfortranarray(np.linalg.qr(rng.standard_normal((35, m)))[0], dtype=np.float32)
    inverse = Inverse(h, np.diag(rng.uniform(0.5, 0.9, m)).astype(np.float32), 3.0)
    before = right.copy()
    packed = kernels.pack(x, 1.0)
    found, products, converged = kernels.solve(packed, weights, inverse, right, 1e-5, 100)
    exact = np.linalg.solve(np.eye(35) + (x * weights) @ x.T, right)
    assert converged
    assert (right == before).all()
    np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(products, x.T @ exact, rtol=1e-3, atol=1e-3)


def test_conjugate_gradients_report_that_they_stopped_early(kernels):
    rng = np.random.default_rng(0)
    x = np.asfortranarray(rng.uniform(-1, 1, (35, 50)))
    packed = kernels.pack(x, 1.0)
    weights, right = np.full(50, 9.0, np.float32), np.ones(35, np.float32)
    none = Inverse(np.empty((35, 0), np.float32, order="F"), np.empty((0, 0), np.float32), 1.0)
    found, products, converged = kernels.solve(packed, weights, none, right, 1e-5, 3)
    assert not converged
    np.testing.assert_allclose(products, x.T @ found, rtol=1e-3, atol=1e-3)
    bad = none._replace(rest=float("nan"))
    assert not kernels.solve(packed, weights, bad, right, 1e-5, 3)[2]


@pytest.mark.parametrize("shape", [(1, 1), (16, 8), (35, 7), (40, 19)])
def test_products_with_a_packed_matrix(kernels, shape):
    rng = np.random.default_rng(0)
    x = np.asfortranarray(rng.uniform(-1, 1, shape))
    w, r = (rng.standard_normal(size).astype(np.float32) for size in shape[::-1])
    packed = kernels.pack(x, 0.5)
    np.testing.assert_allclose(kernels.packed_times(packed, w), x @ w / 2, atol=1e-4)
    np.testing.assert_allclose(kernels.packed_correlate(packed, r), x.T @ r / 2, atol=1e-4)
    some = np.arange(shape[1])[::-3].copy()
    np.testing.assert_allclose(kernels.packed_columns(packed, some), x[:, some] / 2, atol=1e-5)


def test_packed_columns_have_their_own_scale(kernels):
    x = np.array([[1.0, 1 + 1e-3, -3.14159, 0.0, 1e30, 1e-30, 1 + 2**-8 + 2**-20]])
    rounded = [
        float(kernels.packed_times(kernels.pack(x, 1.0), np.eye(7, dtype=np.float32)[j])[0])
        for j in range(7)
    ]
    np.testing.assert_allclose(rounded, x[0], rtol=2e-5)
    assert rounded[3] == 0


def test_packed_numbers_are_accurate_relative_to_the_largest_of_their_column(kernels):
    rng = np.random.default_rng(0)
    x = np.asfortranarray(rng.standard_normal((50, 9)) * 10.0 ** np.arange(-4, 5))
    packed = kernels.pack(x, 1.0)
    columns = [kernels.packed_times(packed, one) for one in np.eye(9, dtype=np.float32)]
    errors = np.abs(np.stack(columns, axis=1) - x).max(axis=0)
    assert (errors <= 0.51 / 32767 * np.abs(x).max(axis=0)).all()


@pytest.mark.parametrize("shape", [(1, 1), (7, 2), (30, 9)])
def test_through_reads_the_matrix_in_both_directions(kernels, shape):
    rng = np.random.default_rng(0)
    x = np.asfortranarray(rng.standard_normal(shape))
    t, base, weights = (rng.standard_normal(size) for size in (*shape, shape[1]))
    u, product = kernels.through(x, t, base, weights)
    np.testing.assert_allclose(u, x.T @ t, atol=1e-13)
    np.testing.assert_allclose(product, x @ (base + weights * u), atol=1e-13)


@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (30, 8), (30, 19)])
@pytest.mark.parametrize("layout", ["C", "F", "strided"])
@pytest.mark.parametrize("centred", [False, True])
def test_scaled_copy_equals_numpy(kernels, shape, layout, centred):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2 * shape[0], shape[1]))[::2] + 3
    x = x if layout == "strided" else np.array(x, order=layout)
    roots, means = rng.random(shape[0]), x.mean(axis=0)
    before = x.copy()
    scaled, norms = kernels.scale(x, roots, means if centred else None)
    expected = (x - means if centred else x) * roots[:, None]
    assert scaled.flags.f_contiguous
    assert (x == before).all()
    np.testing.assert_allclose(scaled, expected, rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(norms, (expected**2).sum(axis=0), rtol=1e-13, atol=1e-14)


def test_sparse_products_equal_dense_ones(kernels):
    x = sparse.random_array((40, 12), density=0.3, format="csc", rng=0)
    x.indices, x.indptr = x.indices.astype(np.int32), x.indptr.astype(np.int32)
    dense, r = x.toarray(), np.random.default_rng(1).standard_normal(40)
    rows, columns = np.array([3, 0, 11]), np.array([5, 3, 3, 7])
    products = kernels.sparse_products(x, x.data**2, r)
    np.testing.assert_allclose(products, (dense**2).T @ r, atol=1e-14)
    gram = kernels.sparse_gram(x, rows, columns)
    np.testing.assert_allclose(gram, dense[:, rows].T @ dense[:, columns], atol=1e-14)


def test_estimators_give_the_same_without_a_compiler(monkeypatch):
    x, y, _ = regression(n=60, d=30)
    labels = classification(60, 30)[1]

    def fit():
        return [
            BridgeRegressor(0.5, 0.1).fit(x, y),
            BridgeRegressor(1.5, 0.1).fit(sparse.csr_array(x), y),
            BridgeClassifier(0.5, 0.02).fit(x, labels),
        ]

    def fail(name, threads):
        raise KernelUnavailable("no compiler here")

    fast = fit()
    monkeypatch.setattr(module, "load", fail)
    module.kernels.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="no compiler here"):
            slow = fit()
    finally:
        module.kernels.cache_clear()
    for one, other in zip(fast, slow, strict=True):
        np.testing.assert_allclose(one.coef_, other.coef_, rtol=1e-6, atol=1e-9)
