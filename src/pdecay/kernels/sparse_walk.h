/* The inner loop of the sparse layers: a strip of each output in registers, while its non-zeros are walked.
 *
 *   out[o][l][x] = start[o] + sum_i value[i] * in[at[i] + l * line + x],   row[o] <= i < row[o + 1],  0 <= x < LANES
 *
 * A strip is 1 to STRIP lines of one vector each, `line` numbers apart. A non-zero costs two loads of its own and,
 * for each line, one fused multiply-add that takes its input from memory. Vectors are the compiler's
 * (vector_size), as wide as the target's registers.
 *
 * Included once for REAL = float and once for REAL = double (see sparse_conv.c): NAME(x) is x_f32 or x_f64.
 */

typedef REAL NAME(vector) __attribute__((vector_size(VECTOR_BYTES)));
typedef REAL NAME(loose) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef INTEGER NAME(bits) __attribute__((vector_size(VECTOR_BYTES)));

INLINE NAME(vector) NAME(load)(const REAL *from) { return *(const NAME(loose) *)from; }
INLINE void NAME(store)(REAL *to, NAME(vector) x) { *(NAME(loose) *)to = x; }
INLINE NAME(vector) NAME(only)(NAME(vector) x, NAME(bits) keep) { return (NAME(vector))((NAME(bits))x & keep); }

/* The non-zeros of all outputs. */
typedef struct {
    const int64_t *row;         /* where those of each output begin; one more at the end */
    const int32_t *at;
    const REAL *value;
    const REAL *start;          /* the bias, or NULL: the strips go on from what they hold */
    int relu;                   /* whether negative numbers become 0 at the end */
} NAME(terms);

/* A short strip takes several non-zeros at once, into sums of their own: in one chain of sums, each multiply-add
 * would wait for the one before. */
INLINE void NAME(walk)(const int lines, const int chains, const NAME(terms) *terms, const REAL *restrict in,
                       int64_t line, int64_t first, int64_t end, REAL *restrict out, int64_t out_line,
                       int64_t out_pitch)
{
    const int32_t *restrict at = terms->at;
    const REAL *restrict value = terms->value;
    for (int64_t o = first; o < end; o++, out += out_pitch) {
        NAME(vector) sum[CHAINS][STRIP];
        EACH(k, chains) EACH(l, lines) sum[k][l] = (NAME(vector)){ 0 };
        if (terms->start) { EACH(l, lines) sum[0][l] += terms->start[o]; }
        else { EACH(l, lines) sum[0][l] = NAME(load)(out + l * out_line); }

        int64_t i = terms->row[o];
        const int64_t last = terms->row[o + 1];
        for (; i + chains <= last; i += chains) {
            EACH(k, chains) {
                const REAL *from = in + at[i + k], by = value[i + k];
                EACH(l, lines) sum[k][l] += by * NAME(load)(from + l * line);
            }
        }
        for (; chains > 1 && i < last; i++) {
            const REAL *from = in + at[i], by = value[i];
            EACH(l, lines) sum[0][l] += by * NAME(load)(from + l * line);
        }
        EACH(k, chains) { if (k > 0) { EACH(l, lines) sum[0][l] += sum[k][l]; } }
        if (terms->relu) { EACH(l, lines) sum[0][l] = NAME(only)(sum[0][l], ~(sum[0][l] < 0)); }       /* NaN stays */
        EACH(l, lines) NAME(store)(out + l * out_line, sum[0][l]);
    }
}

/* A function for each length of a strip. */
typedef void NAME(walker)(const NAME(terms) *, const REAL *, int64_t, int64_t, int64_t, REAL *, int64_t, int64_t);
#define WALKER(lines, chains) \
    static void NAME(walk_##lines)(const NAME(terms) *terms, const REAL *in, int64_t line, int64_t first, \
                                   int64_t end, REAL *out, int64_t out_line, int64_t out_pitch) \
    { \
        NAME(walk)(lines, chains, terms, in, line, first, end, out, out_line, out_pitch); \
    }
WALKER(1, 4) WALKER(2, 4) WALKER(3, 2) WALKER(4, 2) WALKER(5, 1) WALKER(6, 1) WALKER(7, 1) WALKER(8, 1)
#undef WALKER
static NAME(walker) *const NAME(walkers)[STRIP + 1] = {
    NULL, NAME(walk_1), NAME(walk_2), NAME(walk_3), NAME(walk_4), NAME(walk_5), NAME(walk_6), NAME(walk_7), NAME(walk_8),
};

/* Outputs of one number each: dot products with x, where at[i] is an index into x. */
SCALAR static void NAME(dots)(const NAME(terms) *terms, const REAL *restrict x, int64_t first, int64_t end,
                              REAL *restrict out)
{
    const int32_t *restrict at = terms->at;
    const REAL *restrict value = terms->value;
    for (int64_t o = first; o < end; o++) {
        int64_t i = terms->row[o];
        const int64_t last = terms->row[o + 1];
        REAL sum[CHAINS] = { 0 };
        for (; i + CHAINS <= last; i += CHAINS) { EACH(k, CHAINS) sum[k] += value[i + k] * x[at[i + k]]; }
        for (; i < last; i++) sum[0] += value[i] * x[at[i]];
        REAL total = terms->start[o];
        EACH(k, CHAINS) total += sum[k];
        out[o] = terms->relu && total < 0 ? 0 : total;
    }
}
