/* Two fast powers, without tables and branches, so that compilers vectorise loops over them on any machine.
 *
 * fitted_power is c * |w|^q in float for one 0 < q <= 2 that is known before the loop: 2^(q * exponent) times a
 * polynomial in the mantissa, fitted to this q. It takes half the instructions of the other one, which on CPUs without
 * AVX-512 is the difference between a step bound by arithmetic and one bound by memory.
 *
 * power_of is |w|^q = 2^(q * log2 |w|) for any q, in float and double, with one polynomial for log2 and one for the
 * power of 2. To be accurate for all normal numbers and not only near 1, the exponent of |w| is kept separate from its
 * mantissa: log2 |w| = whole + part with an exact integer `whole`. In a single float, log2 |w| would have an error
 * of up to 4e-6 at |w| = 1e-30; a fused multiply-add of the two parts avoids it.
 *
 * The relative error in float is below 2e-5 for fitted_power, and below max(1e-5, 2e-6 * p) for power_of with
 * q = |p - 2|, because the error of log2 is multiplied by q. It is largest near the ends of the range, because q is
 * rounded to float. In double the error is below 1e-12. tests/optim/kernels/test_fastpow.py measures both powers over
 * the whole range.
 *
 * Clamping uses integers, one instruction each; (x < a ? a : x) on floats takes three because of NaN.
 */
#ifndef PDECAY_FASTPOW_H
#define PDECAY_FASTPOW_H

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__)
#error "powers would be wrong with -ffast-math, -Ofast or -fassociative-math: remove it from PDECAY_CFLAGS or CC"
#endif

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Required, not a hint: a loop is vectorised only if every function that it calls is inlined. */
#define INLINE static inline __attribute__((always_inline))

INLINE int32_t bits_f32(float x) { int32_t i; memcpy(&i, &x, sizeof i); return i; }
INLINE int64_t bits_f64(double x) { int64_t i; memcpy(&i, &x, sizeof i); return i; }
INLINE float float_of(int32_t i) { float x; memcpy(&x, &i, sizeof x); return x; }
INLINE double double_of(int64_t i) { double x; memcpy(&x, &i, sizeof x); return x; }

/* A term c * |w|^q, with c = mantissa * 2^whole and 0.7 < mantissa < 1.5. */
typedef struct { float q, q_of_bits, whole, mantissa; } power_f32;
typedef struct { double q, q_of_bits, whole, mantissa; } power_f64;

/* log2 of a number. `whole` is the exponent in its bit position, i.e. times 2^23 (2^52), which saves a shift;
 * q_of_bits is q divided by the same power. |part| <= 1/2. */
typedef struct { float whole, part; } log2_f32;
typedef struct { double whole, part; } log2_f64;

/* log2 of a normal number x > 0. Other values give an arbitrary finite number. */
INLINE log2_f32 log2_parts_f32(float x)
{
    const int32_t half_root = 0x3f3504f3;                            /* sqrt(1/2): centres the mantissa on 1 */
    int32_t exponent = (bits_f32(x) - half_root) & (int32_t)0xff800000;
    float z = float_of(bits_f32(x) - exponent) - 1.0f;              /* in [sqrt(1/2) - 1, sqrt(2) - 1) */
    float zz = z * z;
    float y = (1.4427135f - 0.72113186f * z)
              + zz * ((0.479348f - 0.36749f * z) + zz * (0.32215494f - 0.20659186f * z));   /* minimax: 2e-6 */
    return (log2_f32){ (float)exponent, y * z };
}

INLINE log2_f64 log2_parts_f64(double x)
{
    const int64_t half_root = 0x3fe6a09e667f3bcd;
    int64_t exponent = (bits_f64(x) - half_root) & (int64_t)0xfff0000000000000;
    double z = double_of(bits_f64(x) - exponent) - 1.0;
    double s = z / (z + 2.0), t = s * s;        /* log m = 2 artanh((m - 1) / (m + 1)), with nine terms of */
    double y = 1.0 / 17.0;                      /* the series: error 1e-15, since |s| < 0.172 */
    y = y * t + 1.0 / 15.0;
    y = y * t + 1.0 / 13.0;
    y = y * t + 1.0 / 11.0;
    y = y * t + 1.0 / 9.0;
    y = y * t + 1.0 / 7.0;
    y = y * t + 1.0 / 5.0;
    y = y * t + 1.0 / 3.0;
    y = y * t + 1.0;
    return (log2_f64){ (double)exponent, 2.8853900817779268 * s * y };
}

/* HAS_PAIRS: whether pairs.h has vector instructions for fitted_power. EXPONENT_BIAS is the number that is added to an
 * exponent there: that of floats, or 0 with AVX-512, which has an instruction for the exponent. */
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__SSE2_MATH__)
#define HAS_PAIRS 1
#define EXPONENT_BIAS 0
#elif defined(__AVX2__) && defined(__FMA__) && defined(__SSE2_MATH__)
#define HAS_PAIRS 1
#define EXPONENT_BIAS 127
#else
#define HAS_PAIRS 0
#define EXPONENT_BIAS 127
#endif

/* c * |w|^q as 2^(q_of_bits * exponent bits + offset) * fit(mantissa), with an integer offset. */
enum { FIT_DEGREE = 4 };
typedef struct { float q_of_bits, offset, fit0, fit1, fit2, fit3, fit4; } fitted_f32;

/* c * |w|^q, clamped to about 2^31; 0 for |w| below the smallest normal number. power_of explains `rounder`. */
INLINE float fitted_power_f32(fitted_f32 term, float w)
{
    const float rounder = 0x1.8p23f + 127.0f;
    const int32_t zero = 0x4b400000, bits = bits_f32(w);
    float exponent = (float)((bits & 0x7f800000) - ((127 - EXPONENT_BIAS) << 23));
    float mantissa = float_of((bits & 0x007fffff) | 0x3f800000);     /* in [1, 2) */
    float rounded = term.q_of_bits * exponent + (term.offset + rounder);
    float z = term.q_of_bits * exponent + ((term.offset + rounder) - rounded);
    float y = 0.00966637f * z + 0.05592198f;                         /* 2^z, |z| <= 1/2, error 3.5e-6 */
    y = y * z + 0.24022349f;
    y = y * z + 0.69312105f;
    y = y * z + 1.0f;
    float fit = term.fit4 * mantissa + term.fit3;       /* Horner's scheme has the fewest instructions */
    fit = fit * mantissa + term.fit2;
    fit = fit * mantissa + term.fit1;
    fit = fit * mantissa + term.fit0;
    int32_t scale = bits_f32(rounded);
    scale = scale < zero ? zero : scale;        /* the lowest becomes a factor of 0 */
    scale = scale > zero + 157 ? zero + 157 : scale;
    float power = fit * y * float_of((int32_t)((uint32_t)scale << 23));
    return fabsf(w) < FLT_MIN ? 0 : power;
}

/* Fit the polynomial to mantissa^q by interpolation: the relative error is below 1e-5 for 0 < q <= 2. The nodes are the
 * means of Chebyshev's for the mantissa and for its logarithm, with which the error is about as large at both ends. */
static fitted_f32 fit_power_f32(double q, double c)
{
    double node[FIT_DEGREE + 1], value[FIT_DEGREE + 1], fit[FIT_DEGREE + 1] = { 0 };
    const float q_of_bits = (float)(q * 0x1p-23);
    /* The rounding of q is compensated at exponent -10, in the middle of usual weights. */
    double scale = log2(c) - EXPONENT_BIAS * q + (EXPONENT_BIAS - 10) * (q - q_of_bits * 0x1p23), offset = rint(scale);
    for (int i = 0; i <= FIT_DEGREE; i++) {
        double place = 0.5 + 0.5 * cos((2 * i + 1) * 3.14159265358979324 / (2 * FIT_DEGREE + 2));
        node[i] = (1 + place + exp2(place)) / 2;
        value[i] = exp2(scale - offset) * pow(node[i], q);
    }
    for (int k = 1; k <= FIT_DEGREE; k++)       /* divided differences */
        for (int i = FIT_DEGREE; i >= k; i--) value[i] = (value[i] - value[i - 1]) / (node[i] - node[i - k]);
    for (int i = FIT_DEGREE; i >= 0; i--) {     /* Newton's form to powers: fit = fit * (x - node) + value */
        for (int k = FIT_DEGREE; k > 0; k--) fit[k] = fit[k - 1] - node[i] * fit[k];
        fit[0] = value[i] - node[i] * fit[0];
    }
    return (fitted_f32){ q_of_bits, (float)offset, (float)fit[0], (float)fit[1], (float)fit[2], (float)fit[3],
                         (float)fit[4] };
}

/* |w|^q * 2^whole from log2 |w|, clamped to 2^-126 .. 2^126 (2^-1022 .. 2^1022): never inf, never NaN.
 *
 * Adding 1.5 * 2^23 (plus the exponent bias) rounds to the nearest integer and leaves that integer in the low
 * bits; a shift moves it to the exponent of the result. With -fassociative-math, a part of -ffast-math, the compiler
 * would leave out the rounding. */
INLINE float power_of_f32(log2_f32 x, power_f32 term)
{
    const float rounder = 0x1.8p23f + 127.0f;
    const int32_t zero = 0x4b400000;                                 /* the bits of 1.5 * 2^23 */
    float rounded = (term.q_of_bits * x.whole + (term.q * x.part + term.whole)) + rounder;
    float z = term.q * x.part + (term.q_of_bits * x.whole + ((term.whole + rounder) - rounded));
    float zz = z * z;
    float y = (1.0000001f + 0.69314694f * z)                         /* 2^z, |z| <= 1/2, minimax: error 8e-8 */
              + zz * ((0.2402212f + 0.05550713f * z) + zz * (0.009675542f + 0.0013276472f * z));
    int32_t exponent = bits_f32(rounded);
    exponent = exponent < zero + 1 ? zero + 1 : exponent;
    exponent = exponent > zero + 253 ? zero + 253 : exponent;
    return y * float_of((int32_t)((uint32_t)exponent << 23));
}

INLINE double power_of_f64(log2_f64 x, power_f64 term)
{
    const double rounder = 0x1.8p52 + 1023.0;
    const int64_t zero = 0x4338000000000000;
    double rounded = (term.q_of_bits * x.whole + (term.q * x.part + term.whole)) + rounder;
    double z = term.q * x.part + (term.q_of_bits * x.whole + ((term.whole + rounder) - rounded));
    double y = 2.5678435993488196e-11;          /* series of exp(z log 2), (log 2)^k / k!: error 2e-16 */
    y = y * z + 4.44553827187081e-10;
    y = y * z + 7.054911620801121e-09;
    y = y * z + 1.0178086009239696e-07;
    y = y * z + 1.3215486790144305e-06;
    y = y * z + 1.5252733804059838e-05;
    y = y * z + 0.00015403530393381606;
    y = y * z + 0.0013333558146428441;
    y = y * z + 0.009618129107628477;
    y = y * z + 0.055504108664821576;
    y = y * z + 0.2402265069591007;
    y = y * z + 0.6931471805599453;
    y = y * z + 1.0;
    int64_t exponent = bits_f64(rounded);
    exponent = exponent < zero + 1 ? zero + 1 : exponent;
    exponent = exponent > zero + 2045 ? zero + 2045 : exponent;
    return y * double_of((int64_t)((uint64_t)exponent << 52));
}

#endif
