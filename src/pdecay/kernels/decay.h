/* The factor 1 / (1 + sum_k c_k |w|^(p_k - 2)) of a block of weights, c_k = lr * lam_k > 0.
 *
 * Included once for REAL = float and once for REAL = double (see step.c): NAME(x) is x_f32 or x_f64.
 *
 * The terms with p = 2 are a constant and are taken out first: `flat` = 1 / (1 + sum c of p = 2), with which
 * the other c are multiplied, so that an elastic pair (p, 2) costs no more than p alone. What is left is
 *   nothing                   factor = flat
 *   one of p = 0, 1/2, 1, 3/2 factor = flat * t / (t + 1), t = (|w| / knee)^(2 - p), knee = c^(1/(2 - p)):
 *                             the weight that the decay halves; t takes a product and a square root at most
 *   anything else             factor = flat / (1 + sum_k 2^(log2 c_k + (p_k - 2) log2 |w|)), see fastpow.h
 *
 * Weights below the smallest normal number count as zero. The factor is within 0 .. 1 for every w but NaN.
 */

typedef struct NAME(decay) NAME(decay);
struct NAME(decay) {
    void (*factor)(const NAME(decay) *, const REAL *restrict w, REAL *restrict factor, int64_t n);
    REAL flat;
    REAL at_zero;           /* the factor of w = 0: 0 where a p is below 2, else flat */
    REAL per_knee;          /* 1 / knee */
    int64_t powers;
    const NAME(power) *power;
};

static void NAME(factor_flat)(const NAME(decay) *decay, const REAL *restrict w, REAL *restrict factor, int64_t n)
{
    (void)w;
    for (int64_t i = 0; i < n; i++) factor[i] = decay->flat;
}

/* y = |w| / knee, stopped where t + 1 == t for all four powers and none of them overflows. */
#define KNEE_FACTOR(p_name, t_of_y)                                                                            \
    static void NAME(factor_##p_name)(const NAME(decay) *decay, const REAL *restrict w, REAL *restrict factor, \
                                      int64_t n)                                                               \
    {                                                                                                          \
        const REAL flat = decay->flat, per_knee = decay->per_knee;                                             \
        for (int64_t i = 0; i < n; i++) {                                                                      \
            REAL y = FABS(w[i]) * per_knee;                                                                    \
            y = y < KNEE_LIMIT ? y : KNEE_LIMIT;                                                               \
            REAL t = t_of_y;                                                                                   \
            factor[i] = flat * t / (t + 1);                                                                    \
        }                                                                                                      \
    }

KNEE_FACTOR(p_0, y * y)
KNEE_FACTOR(p_half, y * SQRT(y))
KNEE_FACTOR(p_1, y)
KNEE_FACTOR(p_three_halves, SQRT(y))
#undef KNEE_FACTOR

static inline void NAME(factor_powers)(const NAME(decay) *decay, const REAL *restrict w, REAL *restrict factor,
                                       int64_t n, int terms)
{
    const REAL flat = decay->flat, at_zero = decay->at_zero;
    const NAME(power) first = decay->power[0], second = decay->power[terms - 1];
    for (int64_t i = 0; i < n; i++) {
        REAL x = FABS(w[i]);
        NAME(log2) log = NAME(log2_parts)(x);
        REAL sum = 1 + NAME(power_of)(log, first);
        if (terms == 2) sum += NAME(power_of)(log, second);
        factor[i] = (x < SMALLEST ? at_zero : flat) / sum;
    }
}

static void NAME(factor_power)(const NAME(decay) *decay, const REAL *restrict w, REAL *restrict factor, int64_t n)
{
    NAME(factor_powers)(decay, w, factor, n, 1);
}

static void NAME(factor_two_powers)(const NAME(decay) *decay, const REAL *restrict w, REAL *restrict factor,
                                    int64_t n)
{
    NAME(factor_powers)(decay, w, factor, n, 2);
}

/* Any number: the block stays in the cache, so one loop a term is no second pass over memory. */
static void NAME(factor_many_powers)(const NAME(decay) *decay, const REAL *restrict w, REAL *restrict factor,
                                     int64_t n)
{
    for (int64_t i = 0; i < n; i++) factor[i] = 1;
    for (int64_t k = 0; k < decay->powers; k++) {
        const NAME(power) term = decay->power[k];
        for (int64_t i = 0; i < n; i++) factor[i] += NAME(power_of)(NAME(log2_parts)(FABS(w[i])), term);
    }
    for (int64_t i = 0; i < n; i++)
        factor[i] = (FABS(w[i]) < SMALLEST ? decay->at_zero : decay->flat) / factor[i];
}

/* c has to stay a normal number: at c = 0 (underflow) a zero weight would be 0 / 0. */
static double NAME(normal)(double c)
{
    return c < SMALLEST ? SMALLEST : c > LARGEST ? LARGEST : c;
}

/* Chooses the form. `power` has room for `terms` powers; all c are above 0. */
static NAME(decay) NAME(plan_decay)(int64_t terms, const double *p, const double *c, NAME(power) *power)
{
    double flat = 1;
    for (int64_t k = 0; k < terms; k++)
        if (p[k] == 2) flat += c[k];
    flat = 1 / flat;

    NAME(decay) decay = { .factor = NAME(factor_flat), .flat = (REAL)flat, .at_zero = (REAL)flat, .power = power };
    double last_p = 2, last_c = 0;
    for (int64_t k = 0; k < terms; k++) {
        if (p[k] == 2) continue;
        last_p = p[k];
        last_c = NAME(normal)(c[k] * flat);
        if (last_p < 2) decay.at_zero = 0;
        double whole = rint(log2(last_c));
        power[decay.powers++] = (NAME(power)){ (REAL)(last_p - 2), (REAL)whole, (REAL)(log2(last_c) - whole) };
    }
    if (decay.powers == 1 && last_p < 2)
        decay.per_knee = (REAL)NAME(normal)(pow(last_c, 1 / (last_p - 2)));
    if (decay.powers == 1)
        decay.factor = last_p == 0     ? NAME(factor_p_0)
                       : last_p == 0.5 ? NAME(factor_p_half)
                       : last_p == 1   ? NAME(factor_p_1)
                       : last_p == 1.5 ? NAME(factor_p_three_halves)
                                       : NAME(factor_power);
    else if (decay.powers == 2)
        decay.factor = NAME(factor_two_powers);
    else if (decay.powers > 2)
        decay.factor = NAME(factor_many_powers);
    return decay;
}
