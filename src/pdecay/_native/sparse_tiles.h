/* A sparse matrix times one vector without gather instructions, by tiles with one non-zero per lane.
 *
 * A tile belongs to LANES outputs, one per lane, and to a window of 2 * LANES elements of the vector, held in two
 * registers. Each lane picks one element of the window by a permutation of the registers and multiplies it by its
 * value. That takes about four instructions for up to LANES non-zeros; separate loads take more than one each.
 *
 * A lane without a non-zero in the window multiplies an arbitrary element by zero, which is correct for finite
 * elements only. Rows with other elements are computed by `dots`. The indices of PICKS tiles share a word.
 *
 * Included after sparse_walk.h. Variable permutations are a gcc extension; clang and short vectors do not use tiles.
 */

enum { NAME(window) = 2 * LANES };

/* Cut the outputs of a group into tiles. The non-zeros of each output are used in order; each window begins at the
 * first unused non-zero of the group. If `base` is NULL, only count the tiles. */
static int64_t NAME(cut_group)(int64_t outputs, int64_t inputs, const int32_t *order, const NAME(terms) *terms,
                               int32_t *base, INTEGER *pick, REAL *value)
{
    int64_t i[LANES] = { 0 }, last[LANES] = { 0 }, tiles = 0;
    for (int64_t l = 0; l < outputs; l++) i[l] = terms->row[order[l]], last[l] = terms->row[order[l] + 1];
    for (;; tiles++) {
        int64_t begin = inputs;
        for (int64_t l = 0; l < outputs; l++) if (i[l] < last[l]) begin = smaller(begin, terms->at[i[l]]);
        if (begin == inputs) break;
        begin = smaller(begin, inputs - NAME(window));
        if (base) base[tiles] = (int32_t)begin;
        for (int64_t l = 0; l < outputs; l++) {
            if (i[l] == last[l] || terms->at[i[l]] >= begin + NAME(window)) continue;
            if (base) {
                const INTEGER place = (INTEGER)(terms->at[i[l]] - begin);
                pick[tiles / PICKS * LANES + l] |= place << tiles % PICKS * 8;
                value[tiles * LANES + l] = terms->value[i[l]];
            }
            i[l]++;
        }
    }
    return ceiling(tiles, PICKS) * PICKS;       /* the remaining tiles are zero */
}

/* Cut a matrix into tiles. The first call, with `base` NULL, fills `start`. The arrays of the second must be zero. */
void NAME(pdecay_sparse_cut)(const plan *plan, int64_t *start, int32_t *base, INTEGER *pick, REAL *value)
{
    const NAME(terms) terms = { .row = plan->row, .at = plan->at, .value = plan->value };
    for (int64_t g = 0; g * LANES < plan->out_channels; g++) {
        const int64_t outputs = smaller(LANES, plan->out_channels - g * LANES), s = start[g];
        start[g + 1] = s + NAME(cut_group)(outputs, plan->in_channels, plan->order + g * LANES, &terms,
                                           base ? base + s : NULL, base ? pick + s / PICKS * LANES : NULL,
                                           base ? value + s * LANES : NULL);
    }
}

#if TILES
static int NAME(all_finite)(const REAL *x, int64_t n)
{
    NAME(vector) off = { 0 };
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) off += NAME(load)(x + i) - NAME(load)(x + i);
    REAL sum = 0;
    for (; i < n; i++) sum += x[i] - x[i];
    EACH(l, LANES) sum += off[l];
    return sum == 0;
}

/* Compute the outputs of the groups first .. end. */
static void NAME(tiles)(const plan *plan, const REAL *restrict x, const REAL *more, int64_t first, int64_t end,
                        REAL *restrict out)
{
    const INTEGER *restrict pick = plan->tile_pick;
    const REAL *restrict value = plan->tile_value, *restrict bias = plan->bias;
    for (int64_t g = first; g < end; g++) {
        NAME(vector) sum[PICKS] = { { 0 } };
        for (int64_t s = plan->tile_start[g]; s < plan->tile_start[g + 1]; s += PICKS) {
            const NAME(bits) picks = *(const NAME(loose_bits) *)(pick + s / PICKS * LANES);
            EACH(k, PICKS) {
                const REAL *from = x + plan->tile_base[s + k];
                sum[k] += NAME(load)(value + (s + k) * LANES)
                    * __builtin_shuffle(NAME(load)(from), NAME(load)(from + LANES), picks >> 8 * k);
            }
        }
        EACH(k, PICKS) { if (k > 0) sum[0] += sum[k]; }
        const int64_t outputs = smaller(LANES, plan->out_channels - g * LANES);
        for (int64_t l = 0; l < outputs; l++) {
            const int64_t o = plan->order[g * LANES + l];
            const REAL y = sum[0][l] + bias[o] + (more ? more[o] : 0);
            out[o] = plan->relu && y < 0 ? 0 : y;
        }
    }
}

/* Return the first group of a thread's share of the tiles. */
static int64_t NAME(group_at)(const plan *plan, int64_t groups, int64_t part, int64_t parts)
{
    if (part == parts) return groups;           /* the last groups may be empty */
    int64_t g = 0;
    while (plan->tile_start[g] < plan->tile_start[groups] * part / parts) g++;
    return g;
}
#endif
