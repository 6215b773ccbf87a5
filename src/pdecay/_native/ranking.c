/* Passes over weights for pdecay/_sparsity: scores, histograms of bit patterns, zeroing.
 *
 * All arrays are contiguous float32. The bits of a non-negative float, read as an integer, grow with the number.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 1 << 16, BLOCK = 4096, GROUP = 16 };      /* a block of scores fits into the L1 cache */

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline uint32_t pattern_of(float x) { return bits_of(x) & 0x7fffffff; }

/* scores = |w| * v^(1/4), with v at least `smallest`; 0 where w is 0. */
static inline void score_block(const float *w, const float *v, float *restrict scores, int64_t n, float smallest)
{
    for (int64_t i = 0; i < n; i++) {
        float square = v[i] < smallest ? smallest : v[i];        /* NaN is kept */
        float score = fabsf(w[i]) * sqrtf(sqrtf(square));
        scores[i] = w[i] == 0 ? 0 : score;                       /* 0 * inf is NaN */
    }
}

void pdecay_scores(const float *w, const float *v, float *scores, int64_t n, float smallest, int threads)
{
    #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n > CHUNK)
    for (int64_t begin = 0; begin < n; begin += BLOCK)
        score_block(w + begin, v + begin, scores + begin, n - begin < BLOCK ? n - begin : BLOCK, smallest);
}

/* The numbers to rank by: x, or with v the scores of the weights x. They are computed again in each pass: storing them
 * would take longer, because new memory is slow at first use. */
typedef struct { const float *x, *v; float smallest; int64_t n; } ranked;

static inline int64_t block_size(const ranked *of, int64_t begin) { return of->n - begin < BLOCK ? of->n - begin : BLOCK; }

static inline const float *block_at(const ranked *of, int64_t begin, float *buffer)
{
    if (!of->v) return of->x + begin;
    score_block(of->x + begin, of->v + begin, buffer, block_size(of, begin), of->smallest);
    return buffer;
}

/* Copy the patterns that begin with `prefix`; return how many. There is no branch, which would often be mispredicted. */
static int64_t select_patterns(const float *x, int64_t n, uint32_t prefix, int known, uint32_t *selected)
{
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        selected[found] = pattern_of(x[i]);
        found += selected[found] >> known == prefix;
    }
    return found;
}

/* Add to counts[digit] the number of patterns with pattern >> known == prefix, by their digit of known - shift bits.
 * Only every `every`-th block is read. */
int pdecay_histogram(const float *x, const float *v, float smallest, int64_t n, int64_t every, uint32_t prefix,
                     int known, int shift, int64_t *counts, int threads)
{
    /* Neighbours use different histograms: equal digits in a row, which are frequent, would wait for each other. */
    enum { HISTOGRAMS = 4 };
    const ranked of = { x, v, smallest, n };
    const uint32_t bins = 1u << (known - shift);
    int failed = 0;
    #pragma omp parallel num_threads(threads) if (threads > 1 && n > CHUNK)
    {
        int64_t *own = calloc((size_t)HISTOGRAMS * bins, sizeof *own);
        if (!own) {
            #pragma omp atomic write
            failed = 1;
        }
        #pragma omp for schedule(static)
        for (int64_t begin = 0; begin < n; begin += every * BLOCK) {
            float buffer[BLOCK];
            uint32_t selected[BLOCK];
            const float *block = block_at(&of, begin, buffer);
            int64_t found = block_size(&of, begin);
            if (known == 31) for (int64_t i = 0; i < found; i++) selected[i] = pattern_of(block[i]);    /* all */
            else found = select_patterns(block, found, prefix, known, selected);
            for (int64_t i = 0; own && i < found; i++)
                own[(i % HISTOGRAMS) * bins + (selected[i] >> shift & (bins - 1))]++;
        }
        #pragma omp critical
        for (uint32_t k = 0; own && k < HISTOGRAMS * bins; k++) counts[k % bins] += own[k];
        free(own);
    }
    return failed;
}

/* Count patterns below `low`, and from `low` to `high`. Callers pass a constant n where they can. */
static inline __attribute__((always_inline)) void count_group(const float *x, int64_t n, uint32_t low, uint32_t high,
                                                              int32_t *below, int32_t *inside)
{
    int32_t smaller = 0, matches = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = pattern_of(x[i]);
        smaller += bits < low;
        matches += bits - low < high - low;
    }
    *below = smaller;
    *inside = matches;
}

/* Count weights that are not 0 and have scores below `pattern`. */
static inline __attribute__((always_inline)) int32_t count_changes(const float *w, const float *scores, int64_t n,
                                                                   uint32_t pattern)
{
    int32_t changes = 0;
    for (int64_t i = 0; i < n; i++) changes += (pattern_of(scores[i]) < pattern) & (bits_of(w[i]) != 0);
    return changes;
}

/* Copy the numbers whose patterns are at least `low` and below `high`, in any order; count them and those below. Numbers
 * beyond the capacity are counted only. Few groups contain one if the range is narrow: the others take no branch. */
void pdecay_between(const float *x, const float *v, float smallest, int64_t n, uint32_t low, uint32_t high,
                    float *selected, int64_t capacity, int64_t *inside, int64_t *below, int threads)
{
    const ranked of = { x, v, smallest, n };
    int64_t all_inside = *inside, all_below = *below;
    #pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : all_below) if (threads > 1 && n > CHUNK)
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        float buffer[BLOCK], found[BLOCK];
        const float *block = block_at(&of, begin, buffer);
        const int64_t size = block_size(&of, begin);
        int64_t count = 0, place;
        for (int64_t i = 0; i < size; i += GROUP) {
            const int64_t end = i + GROUP < size ? i + GROUP : size;
            int32_t smaller, matches;
            if (end == i + GROUP) count_group(block + i, GROUP, low, high, &smaller, &matches);
            else count_group(block + i, end - i, low, high, &smaller, &matches);
            all_below += smaller;
            for (int64_t j = i; matches && j < end; j++)
                if (pattern_of(block[j]) - low < high - low) found[count++] = fabsf(block[j]);
        }
        #pragma omp atomic capture
        { place = all_inside; all_inside += count; }
        if (place + count <= capacity) memcpy(selected + place, found, (size_t)count * sizeof *found);
    }
    *inside = all_inside;
    *below = all_below;
}

/* Set weights to 0 whose scores are below `pattern`, and the first `tied` with a score equal to it; return how many
 * were equal and set. The scores may be the weights, or with v are computed from them. */
int64_t pdecay_zero(float *w, const float *scores, const float *v, float smallest, int64_t n, uint32_t pattern,
                    int64_t tied, int threads)
{
    const ranked of = { scores, v, smallest, n };
    int64_t set = 0;
    for (int64_t begin = 0; begin < n && set < tied; begin += BLOCK) {      /* first: the scores may be the weights */
        float buffer[BLOCK];
        const float *block = block_at(&of, begin, buffer);
        for (int64_t i = 0; i < block_size(&of, begin) && set < tied; i++)
            if (pattern_of(block[i]) == pattern) {
                w[begin + i] = 0;
                set++;
            }
    }
    #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n > CHUNK)
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        float buffer[BLOCK];
        const float *block = block_at(&of, begin, buffer);
        const int64_t size = block_size(&of, begin);
        for (int64_t i = 0; i < size; i += GROUP) {         /* write to memory only where a weight changes */
            const int64_t end = i + GROUP < size ? i + GROUP : size;
            const int32_t changes = end == i + GROUP ? count_changes(w + begin + i, block + i, GROUP, pattern)
                                                     : count_changes(w + begin + i, block + i, end - i, pattern);
            for (int64_t j = i; changes && j < end; j++)
                w[begin + j] = pattern_of(block[j]) < pattern ? 0 : w[begin + j];
        }
    }
    return set;
}
