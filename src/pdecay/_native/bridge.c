/* Coordinate descent for least squares with a penalty R(w) = sum_k (lam_k / p_k) * sum_j |w_j|^p_k.
 *
 *   minimise over w:   ||y - X w||^2 / 2 + R(w)
 *
 * One step minimises the objective over one coordinate exactly. With the squared column norm L_j it is
 *
 *   w_j <- prox(w_j + x_j' r / L_j),   prox(x) = argmin_u R(u) / L_j + (u - x)^2 / 2,   r = y - X w.
 *
 * bridge_gram keeps X' r for a small set of columns by their Gram matrix: a coordinate that stays 0 costs a
 * comparison. bridge_dense and bridge_sparse keep the residual r. All three stop when the largest step,
 * measured as sqrt(L_j) * |change of w_j|, is at most `tol`, and return the number of sweeps.
 *
 * bridge_scale prepares X. bridge_newton.h has the functions for p > 1.
 *
 * The callers in pdecay/sklearn have checked shapes, dtypes and layouts.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>

/* The terms with p = 0, 1, 2 are l0, l1, l2; the `count` others are in p and lam (all lam > 0). For a single
 * other term with p < 1, `ratio` is the smallest non-zero prox(x) / x and `limit` the largest lam * x^(p-2)
 * with a non-zero result. */
typedef struct {
    double l0, l1, l2, ratio, limit;
    int64_t count;
    const double *p, *lam;
} penalty;

enum { MOST_STEPS = 100 };
enum { BLOCK = 8 };                         /* double-precision numbers in a cache line */
static const double STEP_LIMIT = 1e-9;      /* Newton's method converges quadratically: the next step is exact */

static double dot(int64_t n, const double *a, const double *b)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static void subtract(int64_t n, double factor, const double *a, double *b)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) b[i] -= factor * a[i];
}

/* The larger root of r + a * r^(p-1) = 1 for p < 1, where it is at least `ratio`. The left side is convex. */
static double root_below_1(double a, double p, double ratio, double r)
{
    if (p == 0.5) {         /* a cubic in sqrt(r) */
        double c = cos(acos(-sqrt(27.0) / 2 * a) / 3);
        return 4.0 / 3 * c * c;
    }
    if (p == 2.0 / 3) {     /* a quartic in r^(1/3) */
        double k = cbrt(1.0 / 16 + sqrt(1.0 / 256 - a * a * a / 27));
        double n = sqrt(2 * k + 2 * a / (3 * k));
        double z = (n + sqrt(2 / n - n * n)) / 2;
        return z * z * z;
    }
    if (!(r >= ratio && r <= 1)) r = 1;
    for (int i = 0; i < MOST_STEPS; i++) {
        double power = a * pow(r, p - 1);
        double step = r * (r + power - 1) / (r + (p - 1) * power);
        r -= step;
        if (fabs(step) <= STEP_LIMIT * r) break;
    }
    return r;
}

/* The root of r + a * r^(p-1) = 1 for p > 2. The left side is convex. */
static double root_above_2(double a, double p, double r)
{
    double most = fmin(1, pow(a, 1 / (1 - p)));     /* neither term is above 1 */
    if (!(r > 0 && r < most)) r = most;
    for (int i = 0; i < MOST_STEPS; i++) {
        double power = a * pow(r, p - 2);
        double step = (r + r * power - 1) / (1 + (p - 1) * power);
        r -= step;
        if (fabs(step) <= STEP_LIMIT * r) break;
    }
    return r;
}

/* The largest u with u + sum_k lam_k * u^(p_k - 1) = x, or 0 where there is none. Newton's method in log u:
 * the logarithm of the left side is then convex. `gain` gets the decrease of the objective in units of x^2. */
static double largest_root(const penalty *pen, double x, double scale, double start, double *gain)
{
    double most = x;        /* no term can be above x, so the root is below all these bounds */
    for (int64_t k = 0; k < pen->count; k++) {
        if (pen->p[k] <= 1) continue;
        double bound = pow(x / (pen->lam[k] * scale), 1 / (pen->p[k] - 1));
        if (bound < most) most = bound;
    }
    double t = 1, total = 0;
    if (start > 0 && start < most) t = start / most;
    for (int i = 0; i < MOST_STEPS; i++) {
        double slope = most / x * t, value = 0;
        total = slope;
        for (int64_t k = 0; k < pen->count; k++) {
            double q = pen->p[k] - 1, power = pen->lam[k] * scale / x * pow(most * t, q);
            total += power;
            slope += q * power;
            value += power / pen->p[k];
        }
        double r = most / x * t;
        *gain = r * (1 - r / 2 - value);
        if (!(slope > 0)) {
            if (t == 1 || start <= 0) return 0;
            t = 1;          /* the start was left of the root: begin again at the right */
            start = 0;
            continue;
        }
        double change = -total / slope * log(total), before = t;
        t *= exp(change);
        if (!(t < 1)) t = 1;
        if (fabs(t - before) <= STEP_LIMIT * t) break;
    }
    return most * t;
}

/* argmin_u R(u) * t + (u - x)^2 / 2 for x >= 0; `start` is a guess of the result (0: none). */
static double prox(const penalty *pen, double x, double t, double start)
{
    double scale = t / (1 + t * pen->l2), gain = 0.5, u;
    x = (x - t * pen->l1) / (1 + t * pen->l2);
    if (!(x > 0)) return 0;
    if (pen->count == 0)
        u = x;
    else if (pen->count > 1) {
        u = largest_root(pen, x, scale, start, &gain);
        if (gain <= 0) return 0;
    } else {
        double p = pen->p[0], lam = pen->lam[0] * scale;
        if (p < 1) {
            double a = lam / x * pow(x, p - 1);
            if (!(a < pen->limit)) return 0;
            u = x * root_below_1(a, p, pen->ratio, start / x);
        } else if (p == 1.5) {
            double root = 2 * x / (lam + hypot(lam, 2 * sqrt(x)));
            u = root * root;
        } else if (p == 3)
            u = 2 * x / (1 + hypot(1, 2 * sqrt(lam) * sqrt(x)));
        else if (p > 2)
            u = x * root_above_2(lam / x * pow(x, p - 1), p, start / x);
        else
            u = largest_root(pen, x, scale, start, &gain);
        double r = u / x;
        gain = r * (1 - r / 2 - (1 - r) / p);
    }
    if (pen->l0 > 0 && !(x * sqrt(2 * gain) > sqrt(2 * pen->l0 * scale))) return 0;
    return u >= DBL_MIN ? fmin(u, x) : 0;
}

/* The minimiser over one coordinate. Up to `cut` the result is known to be 0. */
static double minimiser(const penalty *pen, double x, double t, double cut, double w)
{
    double size = fabs(x);
    return size <= cut ? 0.0 : copysign(prox(pen, size, t, fabs(w)), x);
}

/* `result` has guesses of the results, or zeros. */
void bridge_prox(int64_t n, const double *x, const double *t, const penalty *pen, double *result)
{
    for (int64_t i = 0; i < n; i++) result[i] = minimiser(pen, x[i], t[i], 0, result[i]);
}

/* steps[j] = sqrt(L_j) * |change of w_j by one coordinate step|; q = X' r. */
void bridge_steps(int64_t d, const double *norms, const double *cut, const penalty *pen, const double *w,
                  const double *q, double *steps)
{
    for (int64_t j = 0; j < d; j++) {
        double t = 1 / norms[j];
        steps[j] = norms[j] > 0
            ? sqrt(norms[j]) * fabs(minimiser(pen, w[j] + q[j] * t, t, cut[j], w[j]) - w[j]) : 0;
    }
}

int64_t bridge_gram(int64_t m, int64_t stride, const double *gram, const double *cut, const penalty *pen,
                    double *w, double *q, int64_t most_sweeps, double tol, double *largest)
{
    int64_t sweep = 0;
    *largest = 0;
    while (sweep < most_sweeps) {
        *largest = 0;
        for (int64_t j = 0; j < m; j++) {
            const double *column = gram + j * stride;
            double norm = column[j];
            if (!(norm > 0)) continue;
            double change = minimiser(pen, w[j] + q[j] / norm, 1 / norm, cut[j], w[j]) - w[j];
            if (change == 0) continue;
            w[j] += change;
            subtract(m, change, column, q);
            *largest = fmax(*largest, sqrt(norm) * fabs(change));
        }
        sweep++;
        if (*largest <= tol) break;
    }
    return sweep;
}

/* `columns` are the m columns to visit, of an X in column order. */
int64_t bridge_dense(int64_t n, const double *x, int64_t m, const int64_t *columns, const double *norms,
                     const double *cut, const penalty *pen, double *w, double *r, int64_t most_sweeps,
                     double tol, double *largest)
{
    int64_t sweep = 0;
    *largest = 0;
    while (sweep < most_sweeps) {
        *largest = 0;
        for (int64_t k = 0; k < m; k++) {
            int64_t j = columns[k];
            double norm = norms[j];
            if (!(norm > 0)) continue;
            const double *column = x + j * n;
            double change = minimiser(pen, w[j] + dot(n, column, r) / norm, 1 / norm, cut[j], w[j]) - w[j];
            if (change == 0) continue;
            w[j] += change;
            subtract(n, change, column, r);
            *largest = fmax(*largest, sqrt(norm) * fabs(change));
        }
        sweep++;
        if (*largest <= tol) break;
    }
    return sweep;
}

/* X = S - v * means' with a sparse S in column order (CSC) and a vector v of squared length `total`, chosen
 * so that v' X = 0 and v' y = 0. Then v' r = 0 as well. The true residual is r + *shift * v. */
int64_t bridge_sparse(const double *values, const int32_t *rows, const int32_t *starts, const double *means,
                      double total, int64_t m, const int64_t *columns, const double *norms, const double *cut,
                      const penalty *pen, double *w, double *r, double *shift, int64_t most_sweeps, double tol,
                      double *largest)
{
    int64_t sweep = 0;
    *largest = 0;
    while (sweep < most_sweeps) {
        *largest = 0;
        for (int64_t k = 0; k < m; k++) {
            int64_t j = columns[k];
            double norm = norms[j], sum = *shift * means[j] * total;
            if (!(norm > 0)) continue;
            for (int32_t i = starts[j]; i < starts[j + 1]; i++) sum += values[i] * r[rows[i]];
            double change = minimiser(pen, w[j] + sum / norm, 1 / norm, cut[j], w[j]) - w[j];
            if (change == 0) continue;
            w[j] += change;
            for (int32_t i = starts[j]; i < starts[j + 1]; i++) r[rows[i]] -= change * values[i];
            *shift += change * means[j];
            *largest = fmax(*largest, sqrt(norm) * fabs(change));
        }
        sweep++;
        if (*largest <= tol) break;
    }
    return sweep;
}

/* q = S' r for a sparse S in column order. */
void bridge_sparse_products(int64_t d, const double *values, const int32_t *rows, const int32_t *starts,
                            const double *r, double *q)
{
    for (int64_t j = 0; j < d; j++) {
        double sum = 0;
        for (int32_t i = starts[j]; i < starts[j + 1]; i++) sum += values[i] * r[rows[i]];
        q[j] = sum;
    }
}

/* gram = A' B for two lists of columns A and B of a sparse S, in row order. `work` has n zeros, before and after. */
void bridge_sparse_gram(const double *values, const int32_t *rows, const int32_t *starts, int64_t m,
                        const int64_t *a, int64_t k, const int64_t *b, double *work, double *gram)
{
    for (int64_t i = 0; i < m; i++) {
        for (int32_t e = starts[a[i]]; e < starts[a[i] + 1]; e++) work[rows[e]] += values[e];
        for (int64_t j = 0; j < k; j++) {
            double sum = 0;
            for (int32_t e = starts[b[j]]; e < starts[b[j] + 1]; e++) sum += values[e] * work[rows[e]];
            gram[i * k + j] = sum;
        }
        for (int32_t e = starts[a[i]]; e < starts[a[i] + 1]; e++) work[rows[e]] = 0;
    }
}

/* copy = diag(roots) (X - 1 means') in column order, and the squared norms of its columns. X has `step` numbers
 * from one row to the next and `stride` from one column to the next; one of them is 1. `means` may be null. */
void bridge_scale(int64_t n, int64_t d, const double *x, int64_t step, int64_t stride, const double *roots,
                  const double *means, double *copy, double *norms)
{
    for (int64_t first = 0; first < d; first += BLOCK) {
        int64_t last = first + BLOCK < d ? first + BLOCK : d;
        if (step != 1)      /* transpose a few columns at a time, so that each cache line is read once */
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = first; j < last; j++) copy[j * n + i] = x[i * step + j];
        for (int64_t j = first; j < last; j++) {
            double *b = copy + j * n, mean = means ? means[j] : 0, sum = 0;
            const double *a = step == 1 ? x + j * stride : b;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < n; i++) {
                double value = (a[i] - mean) * roots[i];
                b[i] = value;
                sum += value * value;
            }
            norms[j] = sum;
        }
    }
}

#include "bridge_newton.h"
