"""Accuracy of the fast power over all normal numbers."""

import ctypes

import numpy as np
import pytest

from pdecay._optim.kernels import native

pytestmark = pytest.mark.usefixtures("needs_native")

QS = [p - 2 for p in (0, 0.05, 0.1, 0.3, 0.5, 0.7, 0.8, 0.95, 1, 1.2, 1.5, 1.7, 1.9, 1.99)]
QS += [-q for q in QS] + [0.0, 1 / 3, -4 / 3, 1e-4]


def power(x, q):
    name = "pdecay_power_f32" if x.dtype == np.float32 else "pdecay_power_f64"
    function = getattr(native.c_library(), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_double]
    result = np.empty_like(x)
    function(x.ctypes.data, result.ctypes.data, x.size, q)
    return result


def normal_numbers(dtype, count=200_000):
    """Return numbers with all exponents, the ends of the range and of every binade."""
    info = np.finfo(dtype)
    low, high = np.log2(float(info.tiny)), np.log2(float(info.max))
    spread = 2.0 ** np.random.default_rng(0).uniform(low, high, count)
    binades = np.ldexp(1.0, np.arange(int(low), int(high)))
    below = np.nextafter(binades[1:].astype(dtype), dtype(0))
    roots = binades * np.sqrt(0.5)
    parts = [spread, binades, below, roots, [info.tiny, info.max, 1.0]]
    x = np.concatenate(parts).astype(dtype)
    return x[(x >= info.tiny) & (x <= info.max)]


@pytest.mark.parametrize("q", QS)
def test_float32_error_is_below_1e_5_over_all_normal_numbers(q):
    x = normal_numbers(np.float32)
    exact = x.astype(np.float64) ** q
    inside = (exact > 2.0**-126) & (exact < 2.0**126)
    error = np.abs(power(x, q)[inside] / exact[inside] - 1)
    assert inside.sum() > x.size / 3
    assert error.max() < 1e-5


@pytest.mark.parametrize("p", [4.3, 5, 6, 8.1, 10, 12.7, 20, 40, 100])
def test_float32_error_grows_with_large_p_as_documented(p):
    x = normal_numbers(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        exact = x.astype(np.float64) ** (p - 2)
    inside = (exact > 2.0**-126) & (exact < 2.0**126)
    error = np.abs(power(x, p - 2)[inside] / exact[inside] - 1)
    assert error.max() < max(1e-5, 2e-6 * p)


@pytest.mark.parametrize("q", QS)
def test_float32_error_is_below_5e_6_for_usual_weights(q):
    x = np.float32(2.0) ** np.random.default_rng(1).uniform(-24, 4, 100_000).astype(np.float32)
    assert np.abs(power(x, q) / x.astype(np.float64) ** q - 1).max() < 5e-6


@pytest.fixture(params=["fitted", "paired"])
def fitted_power(request):
    """Return the function of plain C, or the same with vector instructions (``pairs.h``)."""
    function = getattr(native.c_library(), f"pdecay_{request.param}_power_f32")
    function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] + [ctypes.c_double] * 2

    def power(x, q, c):
        result = np.full_like(x, np.nan)
        found = function(x.ctypes.data, result.ctypes.data, x.size, q, c)
        if request.param == "paired" and not found:
            pytest.skip("this processor has neither AVX-512 nor AVX2")
        return result

    return power


FITTED_QS = [0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 0.9, 1.05, 1.2, 1.25, 1.4, 1.7]
FITTED_QS += [1.9, 1.95, 1.99, 1.999]
FITTED_ERROR = 2e-5


@pytest.mark.parametrize("c", [1.0, 3e-7, 1e5])
@pytest.mark.parametrize("q", FITTED_QS)
def test_fitted_power_error_is_below_2e_5_over_all_normal_numbers(fitted_power, q, c):
    x = normal_numbers(np.float32)
    exact = c * x.astype(np.float64) ** q
    inside = (exact > 2.0**-122) & (exact < 2.0**30)
    error = np.abs(fitted_power(x, q, c)[inside] / exact[inside] - 1)
    assert inside.sum() > 20
    assert error.max() < FITTED_ERROR


@pytest.mark.parametrize("c", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("q", [0.01, 0.5, 1.2, 1.99])
def test_fitted_power_grows_and_is_clamped(fitted_power, q, c):
    x = np.sort(normal_numbers(np.float32, 5000))
    result = fitted_power(np.concatenate([x, -x]), q, c)
    assert np.array_equal(result[: x.size], result[x.size :])
    assert np.isfinite(result).all()
    exact = c * x.astype(np.float64) ** q
    # Around the smallest normal number, 2^-126, the result is near it or zero.
    normal = (exact > 2.0**-125) & (exact < 2.0**29)
    growing = result[: x.size][normal].astype(np.float64)
    assert (np.diff(growing) >= -2 * FITTED_ERROR * growing[1:]).all()
    assert (result[: x.size][exact <= 2.0**-125] < 2.0**-124).all()
    assert (result[: x.size][exact >= 2.0**29] >= 2.0**28).all()  # t / (t + 1) is 1 from 2^25 on


@pytest.mark.parametrize("q", [0.01, 0.5, 1.2, 1.99])
def test_fitted_power_of_zero_and_subnormal_numbers_is_zero(fitted_power, q):
    x = np.array([0.0, -0.0, 1e-45, -1e-39], dtype=np.float32)
    assert (fitted_power(x, q, 1e30) == 0).all()


@pytest.mark.parametrize("q", QS)
def test_float64_error_is_below_1e_12_over_all_normal_numbers(q):
    x = normal_numbers(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        exact = x.astype(np.longdouble) ** np.longdouble(q)
    inside = (exact > 2.0**-1021) & (exact < 2.0**1021)
    error = np.abs(power(x, q)[inside] / exact[inside] - 1)
    assert inside.sum() > x.size / 3
    assert error.max() < 1e-12


@pytest.mark.parametrize("q", [-2, -0.1, 0.1, 2, 50])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_power_out_of_range_is_clamped(q, dtype):
    x = normal_numbers(dtype, 1000)
    result = power(x, q)
    assert np.isfinite(result).all()
    assert (result > 0).all()


@pytest.mark.parametrize("tail", range(1, 40))
def test_any_array_length_is_computed(fitted_power, tail):
    x = np.linspace(0.1, 2, tail, dtype=np.float32)
    assert np.allclose(power(x, -1.2), x**-1.2, rtol=1e-5)
    assert np.allclose(fitted_power(x, 1.2, 1.0), x**1.2, rtol=1e-5)
