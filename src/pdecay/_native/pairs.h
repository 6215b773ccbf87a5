/* The loops of update.h for the form FITTED in float, with the vector instructions of AVX-512 or AVX2.
 *
 * The power takes long chains of instructions that wait for each other. A processor fills the gaps with the next
 * iterations, but holds only three or four of them at a time. Each operation here therefore works on two vectors,
 * whose instructions alternate, and the second half of an update runs beside the first half of the next one. AVX-512
 * also has instructions that split a number into exponent and mantissa.
 *
 * Without AVX2, HAS_PAIRS (fastpow.h) is 0 and the loops of update.h run.
 *
 * The processor must flush denormals to zero (see enter_flush in step.c), which saves masks.
 */
#if HAS_PAIRS
#include <immintrin.h>

#if EXPONENT_BIAS == 0
typedef __m512 vector;
#define OP(name) _mm512_##name
#else
typedef __m256 vector;
#define OP(name) _mm256_##name
#endif

typedef struct { vector a, b; } pair;

enum { LANES = sizeof(vector) / sizeof(float), PAIR = 2 * LANES };

INLINE pair both(float x) { return (pair){ OP(set1_ps)(x), OP(set1_ps)(x) }; }
INLINE pair load(const float *x) { return (pair){ OP(loadu_ps)(x), OP(loadu_ps)(x + LANES) }; }
INLINE void store(float *to, pair x) { OP(storeu_ps)(to, x.a), OP(storeu_ps)(to + LANES, x.b); }
INLINE pair add(pair x, pair y) { return (pair){ OP(add_ps)(x.a, y.a), OP(add_ps)(x.b, y.b) }; }
INLINE pair mul(pair x, pair y) { return (pair){ OP(mul_ps)(x.a, y.a), OP(mul_ps)(x.b, y.b) }; }
INLINE pair over(pair x, pair y) { return (pair){ OP(div_ps)(x.a, y.a), OP(div_ps)(x.b, y.b) }; }
INLINE pair root(pair x) { return (pair){ OP(sqrt_ps)(x.a), OP(sqrt_ps)(x.b) }; }
INLINE pair mul_add(pair x, pair y, pair z)     /* x * y + z */
{
    return (pair){ OP(fmadd_ps)(x.a, y.a, z.a), OP(fmadd_ps)(x.b, y.b, z.b) };
}
INLINE pair mul_sub(pair x, pair y, pair z)     /* x * y - z */
{
    return (pair){ OP(fmsub_ps)(x.a, y.a, z.a), OP(fmsub_ps)(x.b, y.b, z.b) };
}

/* fitted_power_f32 in three parts: the exponent times q, the mantissa, and the product with the power of two. */
typedef struct { pair q, offset, fit0, fit1, fit2, fit3, fit4, limit; } pair_power;
typedef struct { pair x, part; } pair_exponent;

#if EXPONENT_BIAS == 0          /* AVX-512 */

#define ROUNDER 0.0f            /* an instruction rounds */

INLINE pair mantissa_of(pair w)
{
    return (pair){ _mm512_getmant_ps(w.a, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero),
                   _mm512_getmant_ps(w.b, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero) };
}

INLINE pair_exponent exponent_of(const pair_power *term, pair w)
{
    pair x = mul_add((pair){ _mm512_getexp_ps(w.a), _mm512_getexp_ps(w.b) }, term->q, term->offset);
    const int floor = _MM_FROUND_TO_NEG_INF;        /* x - floor(x) */
    return (pair_exponent){ x, { _mm512_reduce_ps(x.a, floor), _mm512_reduce_ps(x.b, floor) } };
}

INLINE pair exp2_of(pair z)     /* 0 <= z <= 1, error 2.9e-6 */
{
    pair y = mul_add(both(0.013427398f), z, both(0.052241025f));
    y = mul_add(y, z, both(0.24128112f));
    y = mul_add(y, z, both(0.69304468f));
    return mul_add(y, z, both(1.0f));
}

/* y * 2^floor(x), up to `limit`. The exponent of 0 is -inf. min returns its second operand if the first is NaN, so
 * that the factor is never NaN: 0 times an infinite denominator is, although the weight stays 0. */
INLINE pair scaled_power(const pair_power *term, pair y, pair_exponent exponent, pair w)
{
    (void)w;
    y = (pair){ _mm512_scalef_ps(y.a, exponent.x.a), _mm512_scalef_ps(y.b, exponent.x.b) };
    return (pair){ _mm512_min_ps(y.a, term->limit.a), _mm512_min_ps(y.b, term->limit.b) };
}

#else                           /* AVX2 */

typedef __m256i integers;
INLINE vector masked(vector x, int32_t mask) { return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(mask))); }
INLINE vector mantissa_vector(vector w) { return _mm256_or_ps(masked(w, 0x007fffff), _mm256_set1_ps(1)); }
INLINE vector exponent_vector(vector w) { return _mm256_cvtepi32_ps(_mm256_castps_si256(masked(w, 0x7f800000))); }
INLINE vector zero_where_zero(vector x, vector w)       /* denormal numbers are equal to 0 */
{
    return _mm256_and_ps(x, _mm256_cmp_ps(w, _mm256_setzero_ps(), _CMP_NEQ_UQ));
}

INLINE pair mantissa_of(pair w) { return (pair){ mantissa_vector(w.a), mantissa_vector(w.b) }; }

/* Adding ROUNDER rounds to eighths and leaves them, plus 127 wholes, in the low bits; see power_of_f32. */
#define ROUNDER (0x1.8p20f + 127.0f)
enum { ROUNDER_BITS = 0x49c00000 };         /* of 1.5 * 2^20 */

INLINE pair_exponent exponent_of(const pair_power *term, pair w)
{
    pair exponent = { exponent_vector(w.a), exponent_vector(w.b) };
    pair x = mul_add(exponent, term->q, term->offset);          /* rounded */
    pair rest = { _mm256_sub_ps(term->offset.a, x.a), _mm256_sub_ps(term->offset.b, x.b) };
    return (pair_exponent){ x, mul_add(exponent, term->q, rest) };
}

INLINE pair exp2_of(pair z)     /* |z| <= 1/16, error 3.4e-6 */
{
    return mul_add(mul_add(both(0.2402265f), z, both(0.6933098f)), z, both(1.0f));
}

/* 2^x for the rounded x: its wholes are the exponent, and a table has the mantissas of the eighths. */
INLINE vector power_of_2(vector x)
{
    /* The mantissas of 2^(k / 8), less the bits that k has in their place. */
    const integers mantissas = _mm256_setr_epi32(
        0, 0x0b95c2 - (1 << 20), 0x1837f0 - (2 << 20), 0x25fed7 - (3 << 20), 0x3504f3 - (4 << 20),
        0x45672a - (5 << 20), 0x5744fd - (6 << 20), 0x6ac0c7 - (7 << 20));
    const integers low = _mm256_set1_epi32(ROUNDER_BITS), high = _mm256_set1_epi32(ROUNDER_BITS + 8 * 158);
    integers bits = _mm256_min_epi32(_mm256_max_epi32(_mm256_castps_si256(x), low), high);
    integers of_eighths = _mm256_permutevar8x32_epi32(mantissas, bits);      /* takes the low three bits */
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(bits, 20), of_eighths));
}

INLINE pair scaled_power(const pair_power *term, pair y, pair_exponent exponent, pair w)
{
    (void)term;
    y = mul(y, (pair){ power_of_2(exponent.x.a), power_of_2(exponent.x.b) });
    return (pair){ zero_where_zero(y.a, w.a), zero_where_zero(y.b, w.b) };
}

#endif

INLINE pair_power as_pairs(fitted_f32 term)
{
    return (pair_power){ both(EXPONENT_BIAS ? term.q_of_bits : term.q_of_bits * 0x1p23f), both(term.offset + ROUNDER),
                         both(term.fit0), both(term.fit1), both(term.fit2), both(term.fit3), both(term.fit4),
                         both(0x1p31f) };
}

INLINE pair power_pair(const pair_power *term, pair w)
{
    pair_exponent exponent = exponent_of(term, w);
    pair mantissa = mantissa_of(w);
    pair fit = mul_add(term->fit4, mantissa, term->fit3);
    fit = mul_add(fit, mantissa, term->fit2);
    fit = mul_add(fit, mantissa, term->fit1);
    fit = mul_add(fit, mantissa, term->fit0);
    return scaled_power(term, mul(fit, exp2_of(exponent.part)), exponent, w);
}

/* w_tilde * t / (t + 1) with t = |old|^(2 - p) / c, as in decay.h. Results below the smallest normal number are 0. */
INLINE pair decayed(pair w_tilde, pair t)
{
    return add(mul(w_tilde, over(t, add(t, both(1)))), both(0));       /* -0.0 + 0.0 is 0.0 */
}

/* The numbers that an update needs, the same for all weights of a block. */
typedef struct {
    pair beta1, new1, beta2, new2, eps, per_root, per_mean, keep, step_size;
    pair_power term;
} pairs_settings;

/* Each update of PAIR weights, `at` weights after the beginning of each stream, has two halves. The first returns the
 * numbers that the second needs; those that it does not set are not used. */
typedef struct { pair t, denominator, squared_length; } begun;

INLINE begun begin_adam(const pairs_settings *s, float *const *stream, int64_t at, int squared_length)
{
    pair w = load(stream[WEIGHT] + at), g = load(stream[GRADIENT] + at);
    pair square = mul_add(s->beta2, load(stream[SQUARE] + at), mul(mul(s->new2, g), g));
    store(stream[SQUARE] + at, square);
    pair square_root = root(square);        /* early, because it takes long */
    pair average = mul_add(s->beta1, load(stream[AVERAGE] + at), mul(s->new1, g));
    store(stream[AVERAGE] + at, average);
    begun begun = { 0 };
    if (!squared_length) begun.t = power_pair(&s->term, w);
    begun.denominator = mul_add(square_root, s->per_root, s->eps);
    if (squared_length) {       /* the power would make this half much longer than the other */
        pair scaled = mul(w, both(SQUARE_SCALE));
        begun.squared_length = mul(mul(scaled, scaled), mul(begun.denominator, s->per_mean));
    }
    return begun;
}

INLINE void end_adam(const pairs_settings *s, float *const *stream, int64_t at, begun begun, int squared_length)
{
    if (squared_length) begun.t = power_pair(&s->term, begun.squared_length);
    pair move = over(mul(s->step_size, load(stream[AVERAGE] + at)), begun.denominator);
    store(stream[WEIGHT] + at, decayed(mul_sub(s->keep, load(stream[WEIGHT] + at), move), begun.t));
}

INLINE begun begin_sgd(const pairs_settings *s, float *const *stream, int64_t at, int has_weight_decay)
{
    pair w = load(stream[WEIGHT] + at), g = load(stream[GRADIENT] + at);
    pair t = power_pair(&s->term, w);
    g = has_weight_decay ? mul_add(s->new1, g, mul(s->new2, w)) : mul(s->new1, g);
    store(stream[BUFFER] + at, mul_add(s->beta1, load(stream[BUFFER] + at), g));
    return (begun){ .t = t };
}

INLINE void end_sgd(const pairs_settings *s, float *const *stream, int64_t at, begun begun)
{
    pair move = mul(s->step_size, load(stream[BUFFER] + at));
    store(stream[WEIGHT] + at, decayed(mul_sub(s->keep, load(stream[WEIGHT] + at), move), begun.t));
}

INLINE begun begin_decay(const pairs_settings *s, float *const *stream, int64_t at)
{
    return (begun){ .t = power_pair(&s->term, load(stream[OLD_WEIGHT] + at)) };
}

INLINE void end_decay(const pairs_settings *s, float *const *stream, int64_t at, begun begun)
{
    store(stream[WEIGHT] + at, decayed(mul(s->keep, load(stream[WEIGHT] + at)), begun.t));
}

/* Run `BEGIN(streams, at)` and `END(streams, at, begun)` for all weights of a block. Each END comes after the next
 * BEGIN, so that the processor works on both. The last weights, fewer than PAIR, are padded with zeros. Stream 1, the
 * gradient or the old weight, may be in memory that cannot be written. */
#define FOR_PAIRS(STREAM, COUNT, N, BEGIN, END)                                                                   \
    do {                                                                                                          \
        const int64_t whole = (N) / PAIR * PAIR;                                                                  \
        const size_t rest = (size_t)((N) - whole) * sizeof(float);                                                \
        /* Copies: a compiler would reload the pointers after each store. */                                      \
        float *const own[] = { (STREAM)[0], (STREAM)[1], COUNT > 2 ? (STREAM)[2] : 0, COUNT > 3 ? (STREAM)[3] : 0 }; \
        if (whole) {                                                                                              \
            begun next = BEGIN(own, 0);                                                                           \
            for (int64_t at = 0; at < whole; at += PAIR) {                                                        \
                begun now = next;                                                                                 \
                if (at + PAIR < whole) next = BEGIN(own, at + PAIR);                                              \
                END(own, at, now);                                                                                \
            }                                                                                                     \
        }                                                                                                         \
        if (rest) {                                                                                               \
            float padded[COUNT][PAIR] = { { 0 } }, *last[COUNT];                                                  \
            for (int k = 0; k < COUNT; k++) last[k] = memcpy(padded[k], (STREAM)[k] + whole, rest);               \
            END(last, 0, BEGIN(last, 0));                                                                         \
            for (int k = 0; k < COUNT; k++)                                                                       \
                if (k != GRADIENT) memcpy((STREAM)[k] + whole, last[k], rest);      /* which is only read */      \
        }                                                                                                         \
    } while (0)

static void adam_pairs(const adam_settings *adam, const decay_f32 *decay, const double *tensor, float *const *stream,
                       int64_t n, int squared_length)
{
    const pairs_settings settings = {
        .beta1 = both((float)adam->beta1), .new1 = both((float)(adam->maximize ? adam->beta1 - 1 : 1 - adam->beta1)),
        .beta2 = both((float)adam->beta2), .new2 = both((float)(1 - adam->beta2)),
        .eps = both((float)adam->eps), .per_root = both((float)tensor[1]), .per_mean = both((float)adam->per_mean),
        .keep = both((float)((1 - adam->lr * adam->weight_decay) * decay->flat)),
        .step_size = both((float)(tensor[0] * decay->flat)), .term = as_pairs(decay->fitted),
    };
#define BEGIN_WEIGHTS(STREAM, AT) begin_adam(&settings, STREAM, AT, 0)
#define BEGIN_LENGTHS(STREAM, AT) begin_adam(&settings, STREAM, AT, 1)
#define END_WEIGHTS(STREAM, AT, BEGUN) end_adam(&settings, STREAM, AT, BEGUN, 0)
#define END_LENGTHS(STREAM, AT, BEGUN) end_adam(&settings, STREAM, AT, BEGUN, 1)
    if (squared_length) FOR_PAIRS(stream, 4, n, BEGIN_LENGTHS, END_LENGTHS);
    else FOR_PAIRS(stream, 4, n, BEGIN_WEIGHTS, END_WEIGHTS);
#undef BEGIN_WEIGHTS
#undef BEGIN_LENGTHS
#undef END_WEIGHTS
#undef END_LENGTHS
}

/* SGD with a momentum buffer that is initialised, without Nesterov's variant. */
static void sgd_pairs(const sgd_settings *sgd, const decay_f32 *decay, float *const *stream, int64_t n)
{
    const float new = (float)(1 - sgd->dampening);
    const pairs_settings settings = {
        .beta1 = both((float)sgd->momentum), .new1 = both(sgd->maximize ? -new : new),
        .new2 = both(new * (float)sgd->weight_decay), .keep = both(decay->flat),
        .step_size = both(decay->flat * (float)sgd->lr), .term = as_pairs(decay->fitted),
    };
#define BEGIN_PLAIN(STREAM, AT) begin_sgd(&settings, STREAM, AT, 0)
#define BEGIN_WITH_WEIGHT_DECAY(STREAM, AT) begin_sgd(&settings, STREAM, AT, 1)
#define END(STREAM, AT, BEGUN) end_sgd(&settings, STREAM, AT, BEGUN)
    if (sgd->weight_decay) FOR_PAIRS(stream, 3, n, BEGIN_WITH_WEIGHT_DECAY, END);
    else FOR_PAIRS(stream, 3, n, BEGIN_PLAIN, END);
#undef BEGIN_PLAIN
#undef BEGIN_WITH_WEIGHT_DECAY
#undef END
}

static void decay_pairs(const decay_f32 *decay, float *const *stream, int64_t n)
{
    const pairs_settings settings = { .keep = both(decay->flat), .term = as_pairs(decay->fitted) };
#define BEGIN(STREAM, AT) begin_decay(&settings, STREAM, AT)
#define END(STREAM, AT, BEGUN) end_decay(&settings, STREAM, AT, BEGUN)
    FOR_PAIRS(stream, 2, n, BEGIN, END);
#undef BEGIN
#undef END
}

/* fitted_power_f32 of all numbers of an array. */
static void power_pairs(fitted_f32 fitted, float *const *stream, int64_t n)
{
    const pair_power term = as_pairs(fitted);
#define BEGIN(STREAM, AT) ((begun){ .t = power_pair(&term, load((STREAM)[1] + (AT))) })
#define END(STREAM, AT, BEGUN) store((STREAM)[0] + (AT), (BEGUN).t)
    FOR_PAIRS(stream, 2, n, BEGIN, END);
#undef BEGIN
#undef END
}
#undef FOR_PAIRS
#undef OP
#undef ROUNDER

#endif
