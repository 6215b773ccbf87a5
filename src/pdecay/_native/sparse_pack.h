/* Packing: copy torch's images to the planes that sparse_walk.h reads, and strips of outputs back to images.
 *
 * For a weight at a position of the convolution kernel, neighbouring output pixels read inputs that are `stride` apart,
 * some of them in the zero padding. Packing copies the inputs of each position into a plane without gaps:
 *
 *   plane[q][image][x] = input[(site.y + q) * stride_y + phase][x * stride_x + shift],   0 outside of the input
 *
 * There is one plane for each channel, shift and phase. The images of a group are side by side in a row. A weight then
 * reads the inputs of all pixels at one offset into the planes, for any stride, dilation and padding. The rows of a
 * linear layer are images with a single pixel; they form a matrix, which is transposed.
 *
 * Include this file after sparse_walk.h. Each plane has space for one more vector, because the last write of a row may
 * extend beyond the row. The next row or plane overwrites these elements.
 */

/* Set n elements to zero, in whole vectors. */
INLINE void NAME(zero)(REAL *to, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) {
        NAME(store)(to + i, (NAME(vector)){ 0 });
        __asm__ volatile("");           /* else the compiler calls memset, which is slow for one or two vectors */
    }
}

/* Return from[0], from[2], from[4], ... */
INLINE NAME(vector) NAME(every_other)(const REAL *from)
{
#ifdef __clang__
    NAME(vector) x;
    EACH(i, LANES) x[i] = from[2 * i];
    return x;
#else       /* __builtin_shuffle is gcc's */
    NAME(bits) even;
    EACH(i, LANES) even[i] = 2 * i;
    return __builtin_shuffle(NAME(load)(from), NAME(load)(from + LANES), even);
#endif
}

/* Copy n elements that are `step` apart; write zeros where the mask is zero. Only begin .. end may be read. */
INLINE void NAME(copy)(REAL *to, const REAL *from, int64_t step, const INTEGER *mask, int64_t n, const REAL *begin,
                       const REAL *end)
{
    const int inside = from >= begin && from + step * (n + LANES) <= end;
    if (inside && step == 1) {
        for (int64_t i = 0; i < n; i += LANES)
            NAME(store)(to + i, NAME(only)(NAME(load)(from + i), *(const NAME(loose_bits) *)(mask + i)));
    } else if (inside && step == 2) {
        for (int64_t i = 0; i < n; i += LANES)
            NAME(store)(to + i, NAME(only)(NAME(every_other)(from + 2 * i), *(const NAME(loose_bits) *)(mask + i)));
    } else {
        for (int64_t i = 0; i < n; i++) to[i] = mask[i] ? from[i * step] : 0;
    }
}

/* Pack the planes of one block of channels for one site: a group of images and a band of rows. */
static void NAME(pack)(const plan *plan, const REAL *x, site site, int64_t block, REAL *planes)
{
    const int64_t channel = plan->height * plan->width, image = plan->in_channels * channel;
    const int64_t row = plan->group * plan->line, first = block * plan->per_block;
    const int64_t channels = smaller(plan->channels - first, plan->per_block);
    const REAL *end = x + plan->images * image;
    for (int64_t f = 0; f < plan->phases; f++) {
        /* The rows begin .. until are inside the image. The mask of a whole image has zeros in the other rows. */
        const int64_t y = site.y * plan->stride_y + plan->phase[f];
        int64_t until = smaller(plan->rows, larger(0, ceiling(plan->height - y, plan->stride_y)));
        int64_t begin = smaller(until, larger(0, ceiling(-y, plan->stride_y)));
        if (plan->whole_image) begin = 0, until = plan->rows;
        const REAL *corner = x + site.image * image + (y + begin * plan->stride_y) * plan->width;
        for (int64_t e = 0; e < plan->shifts; e++) {
            const INTEGER *mask = (const INTEGER *)plan->mask + e * plan->mask_pitch;
            REAL *to = planes + (e * plan->phases + f) * plan->plane;
            for (int64_t c = 0; c < channels; c++, to += plan->shifts * plan->phases * plan->plane) {
                const REAL *from = corner + plan->channel[first + c] * channel + plan->shift[e];
                NAME(zero)(to, begin * row);
                if (plan->whole_rows || plan->whole_image) {
                    NAME(copy)(to + begin * row, from, 1, mask, (until - begin) * row, x, end);
                } else {
                    for (int64_t q = begin; q < until; q++, from += plan->stride_y * plan->width)
                        for (int64_t b = 0; b < site.images; b++)
                            NAME(copy)(to + q * row + b * plan->line, from + b * image, plan->stride_x, mask,
                                       plan->line, x, end);
                }
                NAME(zero)(to + until * row, (plan->rows - until) * row);
            }
        }
    }
}

/* Copy a strip of output channel o to the output. The strip has the images of a group side by side. */
static void NAME(unpack)(const plan *plan, site site, int64_t o, const REAL *strip, REAL *out)
{
    const int64_t width = plan->out_width, channel = plan->out_height * width;
    for (int64_t y = 0; y < site.rows; y++) {
        REAL *to = out + (site.image * plan->out_channels + o) * channel + (site.y + y) * width;
        const REAL *from = strip + y * plan->group * width;
        for (int64_t b = 0; b < site.images; b++, from += width, to += plan->out_channels * channel) {
            if (width == 8) memcpy(to, from, 8 * sizeof *to);
            else if (width == 4) memcpy(to, from, 4 * sizeof *to);
            else for (int64_t i = 0; i < width; i++) to[i] = from[i];
        }
    }
}

#ifndef __clang__
/* Transpose a square of LANES x LANES elements. Each round interleaves the first half of the rows with the second. */
INLINE void NAME(transpose_square)(const REAL *from, int64_t pitch, REAL *to, int64_t to_pitch)
{
    NAME(vector) row[LANES], next[LANES];
    NAME(bits) low, high;
    EACH(i, LANES) low[i] = i / 2 + i % 2 * LANES;
    EACH(i, LANES) high[i] = low[i] + LANES / 2;
    EACH(i, LANES) row[i] = NAME(load)(from + i * pitch);
    EACH(round, LOG2_LANES) {
        EACH(i, LANES / 2) {
            next[2 * i] = __builtin_shuffle(row[i], row[i + LANES / 2], low);
            next[2 * i + 1] = __builtin_shuffle(row[i], row[i + LANES / 2], high);
        }
        EACH(i, LANES) row[i] = next[i];
    }
    EACH(i, LANES) NAME(store)(to + i * to_pitch, row[i]);
}
#endif

/* Transpose a matrix: squares of LANES x LANES by transpose_square, the rest element by element. */
static void NAME(transpose)(const REAL *from, int64_t pitch, int64_t rows, int64_t columns, REAL *to, int64_t to_pitch)
{
    for (int64_t r = 0; r < rows; r += LANES) {
        for (int64_t c = 0; c < columns; c += LANES) {
            const int64_t r_end = smaller(rows, r + LANES), c_end = smaller(columns, c + LANES);
#ifndef __clang__
            if (r_end - r == LANES && c_end - c == LANES) {
                NAME(transpose_square)(from + r * pitch + c, pitch, to + c * to_pitch + r, to_pitch);
                continue;
            }
#endif
            for (int64_t i = r; i < r_end; i++)
                for (int64_t j = c; j < c_end; j++) to[j * to_pitch + i] = from[i * pitch + j];
        }
    }
}
