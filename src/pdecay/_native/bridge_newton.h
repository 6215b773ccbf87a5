/* Products with X and linear systems for Newton's method (p > 1), included by bridge.c.
 *
 * bridge_pack, bridge_packed and bridge_solve store X in 16 bits a number, because the time to read it limits the linear
 * systems, and a copy with a relative error of about 1e-4 is enough for them. All functions use one thread: with two, a fit took more
 * than ten times as long while other processes used the processor, because an iteration waits for both.
 */
enum { LINE = 16 };         /* single-precision numbers in a cache line */

/* u = X' t and result = X (base + weights * u), for an X in column order that is read once. */
void bridge_through(int64_t n, int64_t d, const double *x, const double *t, const double *base, const double *weights,
                    double *u, double *result)
{
    int64_t j = 0, whole = n - n % BLOCK;
    for (int64_t i = 0; i < n; i++) result[i] = 0;
    for (; j + 2 <= d; j += 2) {        /* two columns at a time, so that t and the result are loaded less often */
        const double *a = x + j * n, *b = a + n;
        double sum_a = 0, sum_b = 0;
#pragma omp simd reduction(+ : sum_a, sum_b)
        for (int64_t i = 0; i < n; i++) {
            sum_a += a[i] * t[i];
            sum_b += b[i] * t[i];
        }
        u[j] = sum_a;
        u[j + 1] = sum_b;
        sum_a = base[j] + weights[j] * sum_a;
        sum_b = base[j + 1] + weights[j + 1] * sum_b;
        for (int64_t line = 0; line < whole; line += BLOCK) {
            __builtin_prefetch(b + n + line);       /* the next columns */
            __builtin_prefetch(b + 2 * n + line);
#pragma omp simd
            for (int64_t i = line; i < line + BLOCK; i++) result[i] += sum_a * a[i] + sum_b * b[i];
        }
        for (int64_t i = whole; i < n; i++) result[i] += sum_a * a[i] + sum_b * b[i];
    }
    for (; j < d; j++) {
        u[j] = dot(n, x + j * n, t);
        subtract(n, -(base[j] + weights[j] * u[j]), x + j * n, result);
    }
}

static float dot_single(int64_t n, const float *a, const float *b)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* The numbers of a pair, times 2^16. The first one is the whole word: bridge_pack compensates for the second one, which is
 * in its low half. */
static inline float first(uint32_t pair) { return (float)(int32_t)pair; }

static inline float second(uint32_t pair) { return (float)(int32_t)(pair << 16); }

/* Return the multiplier of a column that makes its largest number 32767; 0 for a column of zeros, or nearly. */
static double units(int64_t n, const double *a)
{
    double most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < n; i++) most = fabs(a[i]) > most ? fabs(a[i]) : most;
    return 32767 / most <= DBL_MAX ? 32767 / most : 0;
}

/* Store pairs of columns of factor * X as pairs of 16-bit integers, which are multiples of 2^16 * scales[j]. A column of
 * pairs has `rows` >= n of them. The caller has set `packed` and `scales` to zero. */
void bridge_pack(int64_t n, int64_t d, const double *x, double factor, int64_t rows, uint32_t *packed, float *scales)
{
    for (int64_t j = 0; j < d; j += 2) {
        const double *a = x + j * n, *b = j + 1 < d ? a + n : a;
        const double per_a = units(n, a), per_b = j + 1 < d ? units(n, b) : 0;
        uint32_t *pairs = packed + j / 2 * rows;
        if (per_a) scales[j] = (float)(factor / per_a / 65536);
        if (per_b) scales[j + 1] = (float)(factor / per_b / 65536);
        for (int64_t i = 0; i < n; i++) {
            uint32_t low = (uint32_t)(int32_t)(b[i] * per_b + (b[i] < 0 ? -0.5 : 0.5)) & 0xffffu;
            double rest = a[i] * per_a - low / 65536.0;
            pairs[i] = (uint32_t)(int32_t)(rest + (rest < 0 ? -0.5 : 0.5)) << 16 | low;
        }
    }
}

/* Unless u is null, sums = X' u; unless result is null, result = X (weights * sums), for a packed X whose numbers of
 * rows and columns are multiples of 16 and 8. Eight columns at a time, so that u and the result are loaded less often. */
void bridge_packed(int64_t n, int64_t d, const uint32_t *x, const float *scales, const float *weights, const float *u,
                   float *sums, float *result)
{
    for (int64_t i = 0; result && i < n; i++) result[i] = 0;
    for (int64_t j = 0; j < d; j += 8) {
        const uint32_t *a = x + j / 2 * n, *b = a + n, *c = b + n, *e = c + n;
        const float *unit = scales + j;
        float *s = sums + j;
        if (u) {
            float s0 = 0, s1 = 0, s2 = 0, s3 = 0, s4 = 0, s5 = 0, s6 = 0, s7 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3, s4, s5, s6, s7)
            for (int64_t i = 0; i < n; i++) {
                s0 += first(a[i]) * u[i];
                s1 += second(a[i]) * u[i];
                s2 += first(b[i]) * u[i];
                s3 += second(b[i]) * u[i];
                s4 += first(c[i]) * u[i];
                s5 += second(c[i]) * u[i];
                s6 += first(e[i]) * u[i];
                s7 += second(e[i]) * u[i];
            }
            s[0] = s0, s[1] = s1, s[2] = s2, s[3] = s3, s[4] = s4, s[5] = s5, s[6] = s6, s[7] = s7;
            for (int k = 0; k < 8; k++) s[k] *= unit[k];
        }
        if (!result) continue;
        float w[8];
        for (int k = 0; k < 8; k++) w[k] = weights[j + k] * s[k] * unit[k];
        for (int64_t line = 0; line < n; line += LINE) {
            for (int k = 4; k < 8; k++) __builtin_prefetch(a + k * n + line);   /* the next columns */
#pragma omp simd
            for (int64_t i = line; i < line + LINE; i++)
                result[i] += w[0] * first(a[i]) + w[1] * second(a[i]) + w[2] * first(b[i]) + w[3] * second(b[i])
                           + w[4] * first(c[i]) + w[5] * second(c[i]) + w[6] * first(e[i]) + w[7] * second(e[i]);
        }
    }
}

/* result = the m columns of X with the given indices. */
void bridge_columns(int64_t n, int64_t rows, const uint32_t *x, const float *scales, int64_t m, const int64_t *indices,
                    float *result)
{
    for (int64_t k = 0; k < m; k++) {
        const int64_t j = indices[k];
        const uint32_t *pairs = x + j / 2 * rows;
        float *column = result + k * n;
        if (j % 2) for (int64_t i = 0; i < n; i++) column[i] = scales[j] * second(pairs[i]);
        else for (int64_t i = 0; i < n; i++) column[i] = scales[j] * first(pairs[i]);
    }
}

/* z = (r - H K H' r) / rest for an n x m matrix H in column order and an m x m matrix K. r and z have `rows` >= n
 * numbers, `work` has m. */
static void precondition(int64_t rows, int64_t n, int64_t m, const float *h, const float *k, double rest,
                         const float *r, float *z, float *work)
{
    float per_rest = (float)(1 / rest);
    for (int64_t i = 0; i < rows; i++) z[i] = r[i];
    for (int64_t j = 0; j < m; j++) work[j] = dot_single(n, h + j * n, r);
    for (int64_t j = 0; j < m; j++) {
        const float *a = h + j * n;
        float sum = dot_single(m, k + j * m, work);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) z[i] -= sum * a[i];
    }
    for (int64_t i = 0; i < rows; i++) z[i] *= per_rest;
}

/* Solve (I + X diag(weights) X') solution = r for a packed X by conjugate gradients, until the residual, which
 * replaces r, is at most `accuracy`; products = X' solution. The preconditioner is (I - H K H') / rest, with m columns
 * in H, which has a row for each of the samples that the n rows contain. `work` has room for 3 n + d + m numbers.
 * Returns the number of iterations, or -1 without convergence. */
int64_t bridge_solve(int64_t n, int64_t d, const uint32_t *x, const float *scales, const float *weights, int64_t samples,
                     int64_t m, const float *h, const float *k, double rest, double accuracy, int64_t most, float *r,
                     float *solution, float *products, float *work)
{
    float *direction = work, *image = direction + n, *z = image + n, *sums = z + n;
    double product = 0;
    for (int64_t i = 0; i < n; i++) solution[i] = direction[i] = 0;
    for (int64_t j = 0; j < d; j++) products[j] = 0;
    for (int64_t iteration = 1; iteration <= most; iteration++) {
        double before = product;
        precondition(n, samples, m, h, k, rest, r, z, sums + d);
        product = dot_single(n, r, z);
        if (!(product > 0)) return -1;      /* rounding errors, or overflow */
        float share = before > 0 ? (float)(product / before) : 0;
        for (int64_t i = 0; i < n; i++) direction[i] = z[i] + share * direction[i];
        bridge_packed(n, d, x, scales, weights, direction, sums, image);
        for (int64_t i = 0; i < n; i++) image[i] += direction[i];
        double curvature = dot_single(n, direction, image);
        float length = (float)(product / (curvature > 0 ? curvature : 1));
        for (int64_t i = 0; i < n; i++) {
            solution[i] += length * direction[i];
            r[i] -= length * image[i];
        }
        for (int64_t j = 0; j < d; j++) products[j] += length * sums[j];
        if (sqrt(dot_single(n, r, r)) <= accuracy) return iteration;
    }
    return -1;
}
