/* The inner loop of the sparse layers: keep a strip of an output in registers and iterate over its non-zeros.
 *
 *   out[o][l][x] = start[o] + sum_i value[i] * in[at[i] + l * line + x],   row[o] <= i < row[o + 1]
 *
 * A strip has 1 to STRIP vectors: lines of one or two vectors, `line` elements apart. A non-zero costs two loads and,
 * for each vector, one fused multiply-add with a memory operand. Vectors are a compiler extension (vector_size), as
 * wide as the target's registers.
 *
 * Included once for REAL = float and once for REAL = double (see sparse_conv.c): NAME(x) is x_f32 or x_f64.
 */

typedef REAL NAME(vector) __attribute__((vector_size(VECTOR_BYTES)));
typedef REAL NAME(loose) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef INTEGER NAME(bits) __attribute__((vector_size(VECTOR_BYTES)));
typedef INTEGER NAME(loose_bits) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

INLINE NAME(vector) NAME(load)(const REAL *from) { return *(const NAME(loose) *)from; }
INLINE void NAME(store)(REAL *to, NAME(vector) x) { *(NAME(loose) *)to = x; }
INLINE NAME(vector) NAME(only)(NAME(vector) x, NAME(bits) keep) { return (NAME(vector))((NAME(bits))x & keep); }

/* The non-zeros of all outputs. */
typedef struct {
    const int64_t *row;         /* first non-zero of each output, and the end */
    const int32_t *at;
    const REAL *value;
    const REAL *start;          /* the bias; NULL: continue from the current outputs */
    int relu;                   /* whether to apply a ReLU at the end */
} NAME(terms);

/* The memory of the strips. */
typedef struct {
    const REAL *in;
    REAL *out;                  /* the first output; the others follow at a distance of out_pitch elements */
    int64_t line, out_line, out_pitch;
} NAME(strips);

/* A short strip adds several non-zeros to independent sums: in a single chain, each multiply-add would wait for the
 * previous one. */
INLINE void NAME(walk)(const int lines, const int width, const int chains, const NAME(terms) *terms,
                       const NAME(strips) *strips, int64_t first, int64_t end)
{
    const int32_t *restrict at = terms->at;
    const REAL *restrict value = terms->value, *restrict in = strips->in;
    const int64_t line = strips->line, out_line = strips->out_line;
    REAL *restrict out = strips->out;
    for (int64_t o = first; o < end; o++, out += strips->out_pitch) {
        NAME(vector) sum[CHAINS][STRIP];
        EACH(k, chains) EACH(v, lines * width) sum[k][v] = (NAME(vector)){ 0 };
        if (terms->start) { EACH(v, lines * width) sum[0][v] += terms->start[o]; }
        else { EACH(v, lines * width) sum[0][v] = NAME(load)(out + v / width * out_line + v % width * LANES); }

        int64_t i = terms->row[o];
        const int64_t last = terms->row[o + 1];
        for (; i + chains <= last; i += chains) {
            EACH(k, chains) {
                const REAL *from = in + at[i + k], by = value[i + k];
                EACH(v, lines * width) sum[k][v] += by * NAME(load)(from + v / width * line + v % width * LANES);
            }
        }
        for (; chains > 1 && i < last; i++) {
            const REAL *from = in + at[i], by = value[i];
            EACH(v, lines * width) sum[0][v] += by * NAME(load)(from + v / width * line + v % width * LANES);
        }
        EACH(k, chains) { if (k > 0) { EACH(v, lines * width) sum[0][v] += sum[k][v]; } }
        if (terms->relu) {      /* by a mask, so that NaN stays NaN */
            EACH(v, lines * width) sum[0][v] = NAME(only)(sum[0][v], ~(sum[0][v] < 0));
        }
        EACH(v, lines * width) NAME(store)(out + v / width * out_line + v % width * LANES, sum[0][v]);
    }
}

/* One function for each size of a strip. */
typedef void NAME(walker)(const NAME(terms) *, const NAME(strips) *, int64_t, int64_t);
#define WALKER(lines, width, chains) \
    static void NAME(walk_##lines##x##width)(const NAME(terms) *terms, const NAME(strips) *strips, int64_t first, \
                                             int64_t end) \
    { \
        NAME(walk)(lines, width, chains, terms, strips, first, end); \
    }
WALKER(1, 1, 4) WALKER(2, 1, 4) WALKER(3, 1, 2) WALKER(4, 1, 2) WALKER(5, 1, 1) WALKER(6, 1, 1) WALKER(7, 1, 1)
WALKER(8, 1, 1) WALKER(1, 2, 4) WALKER(2, 2, 2) WALKER(3, 2, 1) WALKER(4, 2, 1)
#undef WALKER
static NAME(walker) *const NAME(walkers)[3][STRIP + 1] = {
    [1] = { NULL, NAME(walk_1x1), NAME(walk_2x1), NAME(walk_3x1), NAME(walk_4x1), NAME(walk_5x1), NAME(walk_6x1),
            NAME(walk_7x1), NAME(walk_8x1) },
    [2] = { NULL, NAME(walk_1x2), NAME(walk_2x2), NAME(walk_3x2), NAME(walk_4x2) },
};

/* Outputs with a single element: dot products with x, where at[i] is an index into x. */
typedef REAL NAME(four) __attribute__((vector_size(4 * sizeof(REAL))));
typedef REAL NAME(loose_four) __attribute__((vector_size(4 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));

SCALAR static void NAME(dots)(const NAME(terms) *terms, const REAL *restrict x, int64_t first, int64_t end,
                              REAL *restrict out)
{
    const REAL *restrict value = terms->value;
    for (int64_t o = first; o < end; o++) {
        int64_t i = terms->row[o];
        const int64_t last = terms->row[o + 1];
        NAME(four) sums = { 0 };
        for (; i + 4 <= last; i += 4) {
            const int32_t *at = terms->at + i;
            sums += *(const NAME(loose_four) *)(value + i) * (NAME(four)){ x[at[0]], x[at[1]], x[at[2]], x[at[3]] };
        }
        REAL sum = terms->start[o];
        for (; i < last; i++) sum += value[i] * x[terms->at[i]];
        sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
        out[o] = terms->relu && sum < 0 ? 0 : sum;
    }
}
