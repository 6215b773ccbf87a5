/* The factor 1 / (1 + sum_k c_k |w|^(p_k - 2)) of a weight, c_k = lr * lam_k > 0.
 *
 * Included once for REAL = float and once for REAL = double (see step.c): NAME(x) is x_f32 or x_f64.
 *
 * Terms with p = 2 are constant and are factored out: flat = 1 / (1 + sum of c with p = 2). The other c are
 * multiplied by flat, so that the pair (p, 2) costs no more than p alone. The rest, factor / flat, depends on the
 * other terms:
 *   FLAT                       none: 1
 *   P_0, P_HALF, P_1, P_3_2    t / (t + 1), t = (|w| / knee)^(2 - p). knee = c^(1 / (2 - p)) is the weight that the
 *                              decay halves. t needs at most a product and a square root.
 *   FITTED                     the same with t = |w|^(2 - p) / c from fitted_power, for 0 < p < 2 in float
 *   POWER, TWO_POWERS, POWERS  1 / (1 + sum_k c_k |w|^(p_k - 2)), with power_of
 *
 * Weights below the smallest normal number count as zero. The factor is in [0, 1] for every w except NaN.
 */

typedef struct {
    int form;
    REAL flat;
    REAL at_zero;               /* factor / flat at w = 0: 0 if a p is below 2, else 1 */
    REAL tiny;                  /* results below it become 0: the smallest normal number; 0 without decay */
    REAL per_knee;              /* 1 / knee */
    fitted_f32 fitted;
    int64_t powers;
    NAME(power) first, second;  /* by value: through a pointer, the compiler would reload them after each store */
    const NAME(power) *power;   /* all powers */
} NAME(decay);

/* t for the forms P_0 to P_3_2, limited to the point where t + 1 == t. */
INLINE REAL NAME(knee_power)(const NAME(decay) *decay, int form, REAL w)
{
    REAL y = FABS(w) * decay->per_knee;
    REAL t = form == P_0 ? y * y : form == P_HALF ? y * SQRT(y) : form == P_1 ? y : SQRT(y);
    return t < T_LIMIT ? t : T_LIMIT;
}

/* factor / flat. Callers pass a constant `form`, so that each loop is compiled for one form. */
INLINE REAL NAME(factor_of)(const NAME(decay) *decay, int form, REAL w)
{
    if (form == FLAT) return 1;
    if (form == POWER || form == TWO_POWERS) {
        NAME(log2) log = NAME(log2_parts)(FABS(w));
        REAL sum = 1 + decay->first.mantissa * NAME(power_of)(log, decay->first);
        if (form == TWO_POWERS) sum += decay->second.mantissa * NAME(power_of)(log, decay->second);
        return FABS(w) < SMALLEST ? decay->at_zero : 1 / sum;
    }
    REAL t = form == FITTED ? (REAL)fitted_power_f32(decay->fitted, (float)w) : NAME(knee_power)(decay, form, w);
    return t / (t + 1);
}

/* Any number of powers, one loop for each: the block is in the L1 cache, so memory is still read once. */
static void NAME(factor_of_powers)(const NAME(decay) *decay, const REAL *restrict w, REAL *restrict factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++) factor[i] = 1;
    for (int64_t k = 0; k < decay->powers; k++) {
        const NAME(power) term = decay->power[k];
        for (int64_t i = 0; i < n; i++)
            factor[i] += term.mantissa * NAME(power_of)(NAME(log2_parts)(FABS(w[i])), term);
    }
    for (int64_t i = 0; i < n; i++)
        factor[i] = decay->flat * (FABS(w[i]) < SMALLEST ? decay->at_zero : 1 / factor[i]);
}

static void NAME(factor_block)(const NAME(decay) *rule, const REAL *restrict w, REAL *restrict factor, int64_t n)
{
    const NAME(decay) decay = *rule;
#define ALL_OF(FORM) for (int64_t i = 0; i < n; i++) factor[i] = decay.flat * NAME(factor_of)(&decay, FORM, w[i])
    switch (decay.form) {
    case FLAT: ALL_OF(FLAT); break;
    case P_0: ALL_OF(P_0); break;
    case P_HALF: ALL_OF(P_HALF); break;
    case P_1: ALL_OF(P_1); break;
    case P_3_2: ALL_OF(P_3_2); break;
    case FITTED: ALL_OF(FITTED); break;
    case POWER: ALL_OF(POWER); break;
    case TWO_POWERS: ALL_OF(TWO_POWERS); break;
    default: NAME(factor_of_powers)(rule, w, factor, n);
    }
#undef ALL_OF
}

/* Clamp c to the normal numbers: if c underflowed to 0, the factor at w = 0 would be 0 / 0. */
static double NAME(normal)(double c)
{
    return c < SMALLEST ? SMALLEST : c > LARGEST ? LARGEST : c;
}

static NAME(power) NAME(as_power)(double q, double c)
{
    double whole = rint(log2(c));
    return (NAME(power)){ (REAL)q, (REAL)(q / EXPONENT_STEP), (REAL)whole, (REAL)(c / exp2(whole)) };
}

/* Choose the form. `power` is an array with space for all terms. `traits` (step.c) is of the update: with ADAPTIVE, the
 * form FITTED takes the square of a weight's length, times the square of SQUARE_SCALE; see update.h. Without
 * FLUSHES, pairs.h cannot run it. With TAKES_ROOT, pairs.h is faster than another root. */
static NAME(decay) NAME(plan_decay)(int64_t terms, const double *p, const double *c, double scale, NAME(power) *power,
                                    unsigned traits)
{
    double flat = 1;
    int decays = 0;
    for (int64_t k = 0; k < terms; k++) {
        if (p[k] == 2) flat += scale * c[k];
        decays |= scale * c[k] != 0;
    }
    flat = 1 / flat;

    NAME(decay) decay = { .form = FLAT, .flat = (REAL)flat, .at_zero = 1, .power = power };
    decay.tiny = decays ? SMALLEST : 0;
    double last_p = 2, last_c = 1;
    for (int64_t k = 0; k < terms; k++) {
        if (p[k] == 2 || scale * c[k] == 0) continue;
        last_p = p[k];
        last_c = NAME(normal)(scale * c[k] * flat);
        power[decay.powers++] = NAME(as_power)(last_p - 2, last_c);
        if (last_p < 2) decay.at_zero = 0;
    }
    if (decay.powers > 0) decay.first = power[0];
    if (decay.powers > 1) decay.second = power[1];
    if (decay.powers == 1) {
        const int adaptive = (traits & ADAPTIVE) != 0;
        const int fits = last_p < 2 && IS_FLOAT && (traits & FLUSHES || !HAS_PAIRS);
        const int slow_root = (last_p == 0.5 || last_p == 1.5) && HAS_PAIRS && traits & TAKES_ROOT;
        decay.form = fits && (adaptive || slow_root) ? FITTED
                     : last_p == 0   ? P_0
                     : last_p == 0.5 ? P_HALF
                     : last_p == 1   ? P_1
                     : last_p == 1.5 ? P_3_2
                     : fits          ? FITTED
                                     : POWER;
        const double q = 2 - last_p;
        if (decay.form == FITTED)
            decay.fitted = adaptive ? fit_power_f32(q / 2, pow(SQUARE_SCALE, -q) / last_c) : fit_power_f32(q, 1 / last_c);
        decay.per_knee = (REAL)NAME(normal)(pow(last_c, 1 / (last_p - 2)));
    } else if (decay.powers > 1) {
        decay.form = decay.powers == 2 ? TWO_POWERS : POWERS;
    }
    return decay;
}

/* Plan the decay of each scale, in memory for the caller to free; NULL if there is none. */
static NAME(decay) *NAME(plan_decays)(int64_t terms, const double *p, const double *c, int64_t scales,
                                      const double *scale, unsigned traits)
{
    NAME(decay) *decay = malloc((size_t)(scales + 1) * (sizeof *decay + (size_t)terms * sizeof(NAME(power))));
    if (!decay) return NULL;
    NAME(power) *powers = (NAME(power) *)(decay + scales + 1);
    for (int64_t k = 0; k < scales; k++)
        decay[k] = NAME(plan_decay)(terms, p, c, scale[k], powers + k * terms, traits);
    return decay;
}
