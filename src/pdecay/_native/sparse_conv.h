/* A sparse convolution: for each block of channels, pack the input and add its non-zeros to all outputs.
 *
 * Included after sparse_pack.h.
 */

/* Add one block of channels to the outputs first .. end of a site. `sums` holds partial sums between blocks if they
 * cannot be kept in `out`. */
static void NAME(outputs)(const plan *plan, site site, int64_t block, int64_t first, int64_t end, const REAL *in,
                          int relu, REAL *sums, REAL *out)
{
    const int64_t width = plan->out_width, channel = plan->out_height * width;
    const int64_t numbers = plan->pixels ? site.images : site.rows * plan->group * width;
    const int is_last = block == plan->blocks - 1;
    const NAME(terms) terms = {
        .row = plan->row + block * (plan->out_channels + 1), .at = plan->at, .value = plan->value,
        .start = block == 0 ? plan->bias : NULL, .relu = is_last && relu,
    };
    REAL *place = out + (site.image * plan->out_channels + first) * channel + site.y * width;

    if (plan->line != width) {          /* lines are image rows, in pieces of one or two vectors */
        const int vectors = width % (2 * LANES) ? 1 : 2, most = STRIP / vectors;
        for (int64_t y = 0; y < site.rows; y += most) {
            for (int64_t x = 0; x < width; x += vectors * LANES) {
                const NAME(strips) strips = {
                    in + y * plan->line + x, place + y * width + x, plan->line, width, channel,
                };
                NAME(walkers)[vectors][smaller(most, site.rows - y)](&terms, &strips, first, end);
            }
        }
        return;
    }
    const int64_t vectors = ceiling(numbers, LANES), strip = ceiling(vectors, ceiling(vectors, STRIP));
    for (int64_t v = 0; v < vectors; v += strip) {      /* lines are adjacent */
        const int64_t lines = smaller(strip, vectors - v), from = v * LANES, n = smaller(lines * LANES, numbers - from);
        NAME(walker) *walk = NAME(walkers)[1][lines];
        NAME(strips) strips = { in + from, place + from, LANES, LANES, channel };
        if (plan->group == 1 && n == lines * LANES) {
            walk(&terms, &strips, first, end);
            continue;
        }
        REAL here[LANES * STRIP * LANES];
        strips.out_pitch = plan->blocks > 1 ? plan->sums_pitch : lines * LANES;
        for (int64_t o = first; o < end; o += LANES) {
            const int64_t o_end = smaller(end, o + LANES);
            strips.out = plan->blocks > 1 ? sums + o * strips.out_pitch + from : here;
            walk(&terms, &strips, o, o_end);
            if (!is_last) continue;
            if (plan->pixels)
                NAME(transpose)(strips.out, strips.out_pitch, o_end - o, n,
                                out + (site.image + from) * plan->out_channels + o, plan->out_channels);
            else if (plan->group > 1)
                for (int64_t k = 0; k < o_end - o; k++)
                    NAME(unpack)(plan, site, o + k, strips.out + k * strips.out_pitch, out);
            else
                for (int64_t k = 0; k < o_end - o; k++)
                    memcpy(place + (o + k - first) * channel + from, strips.out + k * strips.out_pitch,
                           (size_t)n * sizeof *out);
        }
    }
}

INLINE void NAME(add_run)(REAL *restrict to, const REAL *restrict more, int64_t n, int relu)
{
    for (int64_t i = 0; i < n; i++) {
        const REAL sum = to[i] + more[i];
        to[i] = relu && sum < 0 ? 0 : sum;
    }
}

/* Add another tensor to the outputs first .. end of a site while they are in the cache. */
static void NAME(add)(const plan *plan, site site, int64_t first, int64_t end, const REAL *more, REAL *out)
{
    const int64_t channel = plan->out_height * plan->out_width, outputs = plan->out_channels;
    for (int64_t b = site.image; b < site.image + site.images; b++) {
        if (plan->pixels) {
            const int64_t at = b * outputs + first;
            NAME(add_run)(out + at, more + at, end - first, plan->relu != 0);
            continue;
        }
        for (int64_t o = first; o < end; o++) {
            const int64_t at = (b * outputs + o) * channel + site.y * plan->out_width;
            NAME(add_run)(out + at, more + at, site.rows * plan->out_width, plan->relu != 0);
        }
    }
}

/* Compute the outputs first .. end of a site. */
static void NAME(convolve)(const plan *plan, const REAL *x, const REAL *more, site site, int64_t first, int64_t end,
                           REAL *scratch, REAL *out)
{
    const int64_t image = plan->in_channels * plan->height * plan->width;
    for (int64_t block = 0; block < plan->blocks; block++) {
        const REAL *in = scratch;
        const int64_t c = block * plan->per_block;
        if (plan->in_place)
            in = x + site.image * image + site.y * plan->width;
        else if (plan->pixels)
            NAME(transpose)(x + site.image * image + c, image, site.images,
                            smaller(plan->channels - c, plan->per_block), scratch, plan->plane);
        else
            NAME(pack)(plan, x, site, block, scratch);
        NAME(outputs)(plan, site, block, first, end, in, plan->relu && !more, scratch + plan->block_size, out);
    }
    if (more) NAME(add)(plan, site, first, end, more, out);
}

/* Compute part i of the work: some outputs of one site. There are `parts` for each site. */
static void NAME(conv_part)(const plan *plan, const REAL *x, const REAL *more, REAL *out, REAL *scratch, int64_t parts,
                            int64_t i)
{
    const int64_t bands = ceiling(plan->out_height, plan->band), part = ceiling(plan->out_channels, parts);
    const int64_t first = i % parts * part;
    site site = { .image = i / parts / bands * plan->group, .y = i / parts % bands * plan->band };
    site.images = smaller(plan->group, plan->images - site.image);
    site.rows = smaller(plan->band, plan->out_height - site.y);
    NAME(convolve)(plan, x, more, site, first, smaller(plan->out_channels, first + part),
                   scratch + thread_number() * plan->scratch_size, out);
}

/* Compute all sites. `more` is NULL or a tensor to add before the ReLU. Each thread packs its own input: reading data
 * that another core has just written takes longer than packing it again. */
void NAME(pdecay_sparse_conv)(const plan *plan, const REAL *x, const REAL *more, REAL *out, int threads, REAL *scratch)
{
    const int64_t sites = ceiling(plan->images, plan->group) * ceiling(plan->out_height, plan->band);
    const int64_t parts = 0 < sites && sites < threads ? ceiling(threads, sites) : 1;
    if (threads == 1) {         /* OpenMP takes 0.6 us, even for one thread */
        for (int64_t i = 0; i < sites; i++) NAME(conv_part)(plan, x, more, out, scratch, 1, i);
        return;
    }
    #pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t i = 0; i < sites * parts; i++) NAME(conv_part)(plan, x, more, out, scratch, parts, i);
}

/* Compute one of several equal parts of the outputs of a linear layer, by tiles if the plan has them, else by dot
 * products. */
static void NAME(rows_part)(const plan *plan, const REAL *x, const REAL *more, REAL *out, int part, int parts)
{
    const int64_t inputs = plan->in_channels, outputs = plan->out_channels;
    const int64_t first = outputs * part / parts, end = outputs * (part + 1) / parts;
    const NAME(terms) terms = {
        .row = plan->row, .at = plan->at, .value = plan->value, .start = plan->bias, .relu = plan->relu && !more,
    };
    for (int64_t r = 0; r < plan->images; r++) {
        const REAL *from = x + r * inputs, *add = more ? more + r * outputs : NULL;
        REAL *to = out + r * outputs;
#if TILES
        if (plan->tile_start && NAME(all_finite)(from, inputs)) {
            const int64_t groups = ceiling(outputs, LANES);
            NAME(tiles)(plan, from, add, NAME(group_at)(plan, groups, part, parts),
                        NAME(group_at)(plan, groups, part + 1, parts), to);
            continue;
        }
#endif
        NAME(dots)(&terms, from, first, end, to);
        if (add) NAME(add_run)(to + first, add + first, end - first, plan->relu != 0);
    }
}

/* Compute a linear layer on few rows. */
void NAME(pdecay_sparse_rows)(const plan *plan, const REAL *x, const REAL *more, REAL *out, int threads)
{
    if (threads == 1) {         /* without OpenMP, as above */
        NAME(rows_part)(plan, x, more, out, 0, 1);
        return;
    }
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int part = 0; part < threads; part++) NAME(rows_part)(plan, x, more, out, part, threads);
}
