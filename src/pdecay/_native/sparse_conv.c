/* Convolutions and linear layers whose weights are mostly zero. Plain C on raw pointers, as step.c is.
 *
 * Time goes into the non-zeros alone: a strip of an output's pixels stays in registers while its non-zeros are
 * walked (sparse_walk.h), each a distance into the input and a value. The input is packed first (sparse_pack.h) so
 * that strips are contiguous, and block by block, so that the block fits a cache close by. A linear layer is a
 * convolution of images of one pixel.
 *
 * Python decides how the work is cut (pdecay/deployment/layers_plan.py) and has checked all sizes: it is the only caller.
 */
#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#define thread_number() omp_get_thread_num()
#else
#define thread_number() 0
#endif

#define INLINE static inline __attribute__((always_inline))
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)
#ifdef __clang__
#define SCALAR
#else       /* gcc would gather a handful of numbers into a vector, at twice the cost */
#define SCALAR __attribute__((optimize("no-tree-vectorize", "no-tree-slp-vectorize", "no-prefetch-loop-arrays")))
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define LOG2_FLOATS 4
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#define LOG2_FLOATS 3
#else
#define VECTOR_BYTES 16
#define LOG2_FLOATS 2
#endif

/* Whether linear layers on few rows are cut into tiles (sparse_tiles.h). */
#if defined(__AVX__) && !defined(__clang__)
#define TILES 1
#else
#define TILES 0
#endif

enum { STRIP = 8, CHAINS = 4 };         /* vectors of a strip; sums side by side where strips are short */
enum { PICKS = 4 };                     /* tiles that share a word */

/* How the work is cut. The site of a piece of work is a group of images and a band of output rows. Counts are in
 * numbers, not bytes. */
typedef struct {
    int64_t in_channels, height, width, out_channels, out_height, out_width, stride_y, stride_x;
    int64_t relu;
    int64_t group;              /* images side by side; with more than one, a band is the whole image */
    int64_t band;               /* output rows */
    int64_t channels;           /* those that any output reads */
    int64_t blocks, per_block;  /* of channels */
    int64_t shifts, phases;     /* planes of a channel */
    int64_t rows, line, plane;  /* of a plane: its rows, the numbers of an image in a row, all numbers */
    int64_t mask_pitch;
    int64_t block_size;         /* numbers of a block's planes */
    int64_t sums_pitch;         /* strips that wait for the next block */
    int64_t scratch_size;       /* of one thread */
    int64_t in_place;           /* the input needs no packing */
    int64_t pixels;             /* images are single pixels */
    int64_t whole_rows;         /* the rows of a plane follow each other in the image, too */
    int64_t whole_image;        /* and the mask has all of them */
    const int64_t *channel, *shift, *phase;
    const void *mask;           /* for each shift: the numbers of a line, or of all rows, within the image */
    const int64_t *row;         /* the non-zeros of each block and output */
    const int32_t *at;
    const void *value, *bias;
    /* Of tiles: the outputs in the order of their groups, the first tile of each group, and what a tile has. */
    const int32_t *order;
    const int64_t *tile_start;
    const int32_t *tile_base;
    const void *tile_pick, *tile_value;
} plan;

typedef struct { int64_t image, images, y, rows; } site;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t ceiling(int64_t a, int64_t b) { return a > 0 ? (a + b - 1) / b : -(-a / b); }

#define REAL float
#define INTEGER int32_t
#define NAME(x) x##_f32
#define LANES (VECTOR_BYTES / 4)
#define LOG2_LANES LOG2_FLOATS
#include "sparse_walk.h"
#include "sparse_tiles.h"
#include "sparse_pack.h"
#include "sparse_conv.h"
#undef REAL
#undef INTEGER
#undef NAME
#undef LANES
#undef LOG2_LANES

#define REAL double
#define INTEGER int64_t
#define NAME(x) x##_f64
#define LANES (VECTOR_BYTES / 8)
#define LOG2_LANES (LOG2_FLOATS - 1)
#include "sparse_walk.h"
#include "sparse_tiles.h"
#include "sparse_pack.h"
#include "sparse_conv.h"

/* Bytes of a vector: what Python cuts the work by. */
int pdecay_vector_bytes(void) { return VECTOR_BYTES; }
int pdecay_has_tiles(void) { return TILES; }
