/* Passes over weights and scores for pdecay/_sparsity/ranking.py: scores, histograms of bit patterns, zeroing.
 *
 * All arrays are contiguous float32. The bits of a non-negative float, read as an integer, grow with the number.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 1 << 16 };

static inline uint32_t pattern_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}

/* scores = |w| * v^(1/4), with v at least `smallest`; 0 where w is 0. */
void pdecay_scores(const float *w, const float *v, float *scores, int64_t n, float smallest, int threads)
{
    #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n > CHUNK)
    for (int64_t i = 0; i < n; i++) {
        float square = v[i] < smallest ? smallest : v[i];        /* NaN is kept */
        float score = fabsf(w[i]) * sqrtf(sqrtf(square));
        scores[i] = w[i] == 0 ? 0 : score;                       /* 0 * inf is NaN */
    }
}

/* Add to counts[digit] the number of patterns with pattern >> known == prefix, by their digit of known - shift bits. */
int pdecay_histogram(const float *x, int64_t n, uint32_t prefix, int known, int shift, int64_t *counts, int threads)
{
    const uint32_t bins = 1u << (known - shift);
    int failed = 0;
    #pragma omp parallel num_threads(threads) if (threads > 1 && n > CHUNK)
    {
        /* Two histograms: equal digits in a row would wait for each other's increment. */
        int64_t *own = calloc(2 * bins, sizeof *own);
        if (!own) {
            #pragma omp atomic write
            failed = 1;
        }
        #pragma omp for schedule(static)
        for (int64_t begin = 0; begin < n; begin += CHUNK) {
            const int64_t end = begin + CHUNK < n ? begin + CHUNK : n;
            for (int64_t i = begin; own && i < end; i++) {
                const uint32_t bits = pattern_of(x[i]);
                if (bits >> known == prefix) own[(i & 1) * bins + (bits >> shift & (bins - 1))]++;
            }
        }
        #pragma omp critical
        for (uint32_t k = 0; own && k < bins; k++) counts[k] += own[k] + own[bins + k];
        free(own);
    }
    return failed;
}

/* Set weights to 0 whose scores are below `pattern`, and the first `tied` with a score equal to it; return how many
 * were equal and set. */
int64_t pdecay_zero(float *w, const float *scores, int64_t n, uint32_t pattern, int64_t tied, int threads)
{
    int64_t set = 0;
    for (int64_t i = 0; i < n && set < tied; i++)        /* before the scores change: they may be the weights */
        if (pattern_of(scores[i]) == pattern) {
            w[i] = 0;
            set++;
        }
    #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n > CHUNK)
    for (int64_t i = 0; i < n; i++) w[i] = pattern_of(scores[i]) < pattern ? 0 : w[i];
    return set;
}
