/* The optimizers' own updates of a block of weights, times the factor of decay.h.
 *
 * Included once for REAL = float and once for REAL = double (see step.c). A block is small enough for the
 * first cache, so that its loops (factor, update) are together one pass over memory. `block` holds the
 * streams, the weights first.
 */

enum { WEIGHT, GRADIENT, AVERAGE, SQUARE, LARGEST_SQUARE };     /* Adam */
enum { BUFFER = 2 };                                            /* SGD: weight, gradient, momentum buffer */
enum { OLD_WEIGHT, NEW_WEIGHT };                                /* shrink */

typedef struct NAME(block) {
    REAL *stream[STREAMS];
    const REAL *factor;
    int64_t n;
} NAME(block);

/* Below the smallest normal number arithmetic is slow and a weight is as good as gone: +0.0.
 * `tiny` is 0 where nothing decays. A NaN is not below anything and stays. */
static inline REAL NAME(flush)(REAL w, REAL tiny) { return FABS(w) < tiny ? 0 : w; }

static inline void NAME(adam_loop)(const adam_settings *adam, const double *tensor, NAME(block) block, int amsgrad)
{
    const REAL beta1 = (REAL)adam->beta1, new1 = (REAL)(1 - adam->beta1);
    const REAL beta2 = (REAL)adam->beta2, new2 = (REAL)(1 - adam->beta2);
    const REAL eps = (REAL)adam->eps, sign = adam->maximize ? -1 : 1;
    const REAL keep = (REAL)(1 - adam->lr * adam->weight_decay), tiny = (REAL)adam->tiny;
    const REAL step_size = (REAL)tensor[0], per_root = (REAL)tensor[1];
    REAL *restrict w = block.stream[WEIGHT], *restrict m = block.stream[AVERAGE];
    REAL *restrict v = block.stream[SQUARE], *restrict largest = block.stream[LARGEST_SQUARE];
    const REAL *restrict grad = block.stream[GRADIENT], *restrict factor = block.factor;
    for (int64_t i = 0; i < block.n; i++) {
        REAL g = sign * grad[i];
        REAL average = beta1 * m[i] + new1 * g;
        REAL square = beta2 * v[i] + new2 * g * g;
        m[i] = average;
        v[i] = square;
        if (amsgrad) largest[i] = square = largest[i] > square ? largest[i] : square;
        REAL w_tilde = keep * w[i] - step_size * average / (SQRT(square) * per_root + eps);
        w[i] = NAME(flush)(w_tilde * factor[i], tiny);
    }
}

static void NAME(adam)(const void *settings, const double *tensor, NAME(block) block)
{
    NAME(adam_loop)(settings, tensor, block, 0);
}

static void NAME(amsgrad)(const void *settings, const double *tensor, NAME(block) block)
{
    NAME(adam_loop)(settings, tensor, block, 1);
}

static inline void NAME(sgd_loop)(const sgd_settings *sgd, NAME(block) block, int momentum, int first, int nesterov)
{
    const REAL lr = (REAL)sgd->lr, keep = (REAL)sgd->momentum, new = (REAL)(1 - sgd->dampening);
    const REAL weight_decay = (REAL)sgd->weight_decay, sign = sgd->maximize ? -1 : 1, tiny = (REAL)sgd->tiny;
    REAL *restrict w = block.stream[WEIGHT], *restrict buffer = block.stream[BUFFER];
    const REAL *restrict grad = block.stream[GRADIENT], *restrict factor = block.factor;
    for (int64_t i = 0; i < block.n; i++) {
        REAL g = sign * grad[i] + weight_decay * w[i];
        REAL move = g;
        if (momentum) {
            move = first ? g : keep * buffer[i] + new * g;      /* a fresh buffer is not read */
            buffer[i] = move;
            if (nesterov) move = g + keep * move;
        }
        w[i] = NAME(flush)((w[i] - lr * move) * factor[i], tiny);
    }
}

static void NAME(sgd)(const void *settings, const double *tensor, NAME(block) block)
{
    const sgd_settings *sgd = settings;
    const int first = tensor[0] != 0;
    if (sgd->momentum == 0) NAME(sgd_loop)(sgd, block, 0, 0, 0);
    else if (first && sgd->nesterov) NAME(sgd_loop)(sgd, block, 1, 1, 1);
    else if (first) NAME(sgd_loop)(sgd, block, 1, 1, 0);
    else if (sgd->nesterov) NAME(sgd_loop)(sgd, block, 1, 0, 1);
    else NAME(sgd_loop)(sgd, block, 1, 0, 0);
}

static void NAME(shrink)(const void *settings, const double *tensor, NAME(block) block)
{
    (void)settings, (void)tensor;
    REAL *restrict w = block.stream[NEW_WEIGHT];
    for (int64_t i = 0; i < block.n; i++) w[i] = NAME(flush)(w[i] * block.factor[i], SMALLEST);
}
