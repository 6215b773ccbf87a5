/* A fast |w|^q: q * log2 |w| by a polynomial, 2^that by another, no table and no branch, so that the
 * compiler turns a loop over it into vector code on any machine.
 *
 * What makes it accurate over all normal numbers, and not only near 1, is that the exponent of |w| is
 * kept apart from its mantissa: log2 |w| = whole + part, with `whole` an exact integer. A sum that is
 * rounded once as a large number (log2 |w| is up to 128, where a float has an ulp of 1e-5) would lose
 * what a fused multiply-add of the parts keeps.
 *
 * Largest relative error for |q| <= 2: float 6e-6 (5e-6 of it is q rounded to a float, met only near the
 * ends of the range; 1e-6 for 1e-6 < |w| < 1e6), double 1e-12. tests/kernels/test_fastpow.py walks the range.
 */
#ifndef PDECAY_FASTPOW_H
#define PDECAY_FASTPOW_H

#include <float.h>
#include <stdint.h>
#include <string.h>

/* What a loop over these functions is told about log2 of a term: c * |w|^q = 2^(q * log2|w| + whole + part). */
typedef struct { float q, whole, part; } power_f32;
typedef struct { double q, whole, part; } power_f64;

typedef struct { float whole, part; } log2_f32;
typedef struct { double whole, part; } log2_f64;

static inline int32_t bits_f32(float x) { int32_t i; memcpy(&i, &x, sizeof i); return i; }
static inline float float_of(int32_t i) { float x; memcpy(&x, &i, sizeof x); return x; }
static inline int64_t bits_f64(double x) { int64_t i; memcpy(&i, &x, sizeof i); return i; }
static inline double double_of(int64_t i) { double x; memcpy(&x, &i, sizeof x); return x; }

/* "log2 of zero": so low that any power of it, times any q, leaves the range at the right end. */
#define LOG2_OF_ZERO (-1e30f)

/* log2 of x >= 0; numbers below the smallest normal one are zero. */
static inline log2_f32 log2_parts_f32(float x)
{
    const int32_t half_root = 0x3f3504f3;              /* sqrt(1/2): centres the mantissa on 1 */
    int32_t exponent = (bits_f32(x) - half_root) >> 23;
    float z = float_of(bits_f32(x) - (exponent << 23)) - 1.0f;      /* in [sqrt(1/2), sqrt(2)) - 1 */
    /* minimax on that interval, error 3e-7 */
    float y = 0.17063453793525696f;
    y = y * z - 0.2726980447769165f;
    y = y * z + 0.29726260900497437f;
    y = y * z - 0.3589618504047394f;
    y = y * z + 0.48046502470970154f;
    y = y * z - 0.7213758826255798f;
    y = y * z + 1.442699670791626f;
    return (log2_f32){ x < FLT_MIN ? LOG2_OF_ZERO : (float)exponent, y * z };
}

static inline log2_f64 log2_parts_f64(double x)
{
    const int64_t half_root = 0x3fe6a09e667f3bcd;
    int64_t exponent = (bits_f64(x) - half_root) >> 52;
    double z = double_of(bits_f64(x) - (exponent << 52)) - 1.0;
    /* log m = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.172: nine terms of its series reach 1e-15 */
    double s = z / (z + 2.0), t = s * s;
    double y = 1.0 / 17.0;
    y = y * t + 1.0 / 15.0;
    y = y * t + 1.0 / 13.0;
    y = y * t + 1.0 / 11.0;
    y = y * t + 1.0 / 9.0;
    y = y * t + 1.0 / 7.0;
    y = y * t + 1.0 / 5.0;
    y = y * t + 1.0 / 3.0;
    y = y * t + 1.0;
    return (log2_f64){ x < DBL_MIN ? LOG2_OF_ZERO : (double)exponent, 2.8853900817779268 * s * y };
}

/* c * |w|^q from log2 |w|. Kept within 2^-126 .. 2^126 (double: 2^-1022 .. 2^1022): never inf, never NaN.
 *
 * Adding 1.5 * 2^23 rounds to the nearest integer and leaves that integer in the low bits, from where a
 * shift puts it into the exponent of the result. (It is why this file must not see -fassociative-math.) */
static inline float power_of_f32(log2_f32 x, power_f32 term)
{
    const float rounder = 12582912.0f;
    float small = term.q * x.part + term.part;
    float guess = (term.q * x.whole + term.whole) + small;
    guess = guess < -126.0f ? -126.0f : guess;
    guess = guess > 126.0f ? 126.0f : guess;
    float rounded = guess + rounder;
    float z = (term.q * x.whole + (term.whole - (rounded - rounder))) + small;
    z = z < -0.5f ? -0.5f : z;                          /* matters only where guess was clamped */
    z = z > 0.5f ? 0.5f : z;
    /* minimax on [-1/2, 1/2], relative error 8e-8 */
    float y = 0.0013276472454890609f;
    y = y * z + 0.009675541892647743f;
    y = y * z + 0.05550713092088699f;
    y = y * z + 0.24022120237350464f;
    y = y * z + 0.6931469440460205f;
    y = y * z + 1.0f;
    return y * float_of((int32_t)((uint32_t)(bits_f32(rounded) + 127) << 23));
}

static inline double power_of_f64(log2_f64 x, power_f64 term)
{
    const double rounder = 6755399441055744.0;         /* 1.5 * 2^52 */
    double small = term.q * x.part + term.part;
    double guess = (term.q * x.whole + term.whole) + small;
    guess = guess < -1022.0 ? -1022.0 : guess;
    guess = guess > 1022.0 ? 1022.0 : guess;
    double rounded = guess + rounder;
    double z = (term.q * x.whole + (term.whole - (rounded - rounder))) + small;
    z = z < -0.5 ? -0.5 : z;
    z = z > 0.5 ? 0.5 : z;
    /* the series of exp(z log 2), (log 2)^k / k!; the first term left out is 2e-16 */
    double y = 2.5678435993488206e-11;
    y = y * z + 4.4455382718708116e-10;
    y = y * z + 7.0549116208011234e-09;
    y = y * z + 1.0178086009239699e-07;
    y = y * z + 1.3215486790144307e-06;
    y = y * z + 1.5252733804059840e-05;
    y = y * z + 1.5403530393381609e-04;
    y = y * z + 1.3333558146428443e-03;
    y = y * z + 9.6181291076284772e-03;
    y = y * z + 5.5504108664821580e-02;
    y = y * z + 2.4022650695910072e-01;
    y = y * z + 6.9314718055994531e-01;
    y = y * z + 1.0;
    return y * double_of((int64_t)((uint64_t)(bits_f64(rounded) + 1023) << 52));
}

#endif
