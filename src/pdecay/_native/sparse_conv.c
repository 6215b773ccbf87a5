/* Convolutions and linear layers with mostly zero weights. Plain C on raw pointers, like step.c.
 *
 * Only non-zeros cost time. A strip of an output's pixels stays in registers while the kernel iterates over the
 * output's non-zeros (sparse_walk.h). Each non-zero is an offset into the input and a value. The input is packed
 * first (sparse_pack.h), so that strips are contiguous, in blocks of channels that fit into the cache. A linear layer
 * is a convolution of images with one pixel.
 *
 * The only caller is Python, which plans the work (deployment/layers/conv_plan.py and row_plan.py) and checks all
 * sizes.
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
#else       /* gcc would gather a few elements into a vector, at twice the cost */
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

/* Whether linear layers on few rows use tiles (sparse_tiles.h). */
#if defined(__AVX__) && !defined(__clang__)
#define TILES 1
#else
#define TILES 0
#endif

enum { STRIP = 8, CHAINS = 4 };         /* maximum vectors of a strip; independent sums of a short strip */
enum { PICKS = 4 };                     /* tiles that share a word of indices */

/* The plan of the work. It is divided into sites: a group of images and a band of output rows. Sizes count elements,
 * not bytes. */
typedef struct {
    int64_t in_channels, height, width, out_channels, out_height, out_width, stride_y, stride_x;
    int64_t relu;
    int64_t images;             /* of the input of this call */
    int64_t group;              /* images side by side; if more than one, a band is the whole image */
    int64_t band;               /* output rows */
    int64_t channels;           /* channels that any output reads */
    int64_t blocks, per_block;  /* blocks of channels, channels per block */
    int64_t shifts, phases;     /* horizontal and vertical offsets: shifts * phases planes per channel */
    int64_t rows, line, plane;  /* of a plane: rows, elements per image in a row, elements in total */
    int64_t mask_pitch;
    int64_t block_size;         /* elements of the planes of a block */
    int64_t sums_pitch;         /* pitch of partial sums kept between blocks */
    int64_t scratch_size;       /* elements of scratch memory per thread */
    int64_t in_place;           /* the input needs no packing */
    int64_t pixels;             /* images are single pixels */
    int64_t whole_rows;         /* rows of a plane are adjacent in the image */
    int64_t whole_image;        /* and the mask covers all rows */
    const int64_t *channel, *shift, *phase;
    const void *mask;           /* for each shift: the elements of a line, or of all rows, inside the image */
    const int64_t *row;         /* first non-zero of each block and output */
    const int32_t *at;
    const void *value, *bias;
    /* Tiles: outputs ordered by group, the first tile of each group, and the contents of the tiles. */
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

/* Bytes of a vector register, which Python needs to plan the work. */
int pdecay_vector_bytes(void) { return VECTOR_BYTES; }
int pdecay_has_tiles(void) { return TILES; }
