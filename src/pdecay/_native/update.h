/* The optimizers' own updates of a block of weights, times the factor of decay.h.
 *
 * Included once for REAL = float and once for REAL = double (see step.c). A loop either computes the factor
 * itself, with `form` (see decay.h) known at compile time, or leaves it to other loops: SGD reads it from block.factor
 * (form READY), Adam writes w_tilde and block.length (form LATER). The first is faster, since arithmetic overlaps with
 * memory access. Updates of several loops run on blocks that fit into the L1 cache, so that memory is read once. Only
 * the common settings have a loop for each form, to keep the compile time short.
 */

typedef struct {
    REAL *stream[STREAMS];
    REAL *factor, *length;      /* buffers for the factors of the block and the numbers that they are computed from */
    int64_t n;
} NAME(block);

typedef void NAME(updater)(const void *settings, const NAME(decay) *decay, const double *tensor, NAME(block) block);

/* Update weights in blocks of at most BLOCK, with buffers. */
static void NAME(in_blocks)(NAME(updater) *update, const void *settings, const NAME(decay) *decay,
                            const double *tensor, NAME(block) whole)
{
    REAL factor[BLOCK], length[BLOCK];
    for (int64_t at = 0; at < whole.n; at += BLOCK) {
        const int64_t rest = whole.n - at;
        NAME(block) block = { .factor = factor, .length = length, .n = rest < BLOCK ? rest : BLOCK };
        for (int s = 0; s < STREAMS; s++)
            if (whole.stream[s]) block.stream[s] = whole.stream[s] + at;
        update(settings, decay, tensor, block);
    }
}

/* Replace weights below the smallest normal number by +0.0, since arithmetic on them is slow. NaN is kept. `tiny` is
 * 0 without decay. */
INLINE REAL NAME(flush)(REAL w, REAL tiny) { return FABS(w) < tiny ? 0 : w; }

/* `measure` is what the decay acts on: the weight, or its length in Adam's metric, |w| times the root of Adam's
 * denominator relative to the mean denominator. The form FITTED takes the square of the length, which needs no root. */
INLINE void NAME(adam_loop)(const adam_settings *adam, const NAME(decay) *rule, const double *tensor,
                            NAME(block) block, int amsgrad, int measure, int form)
{
    const NAME(decay) decay = *rule;
    const REAL beta1 = (REAL)adam->beta1, new1 = (REAL)(adam->maximize ? adam->beta1 - 1 : 1 - adam->beta1);
    const REAL beta2 = (REAL)adam->beta2, new2 = (REAL)(1 - adam->beta2);
    const REAL eps = (REAL)adam->eps, per_root = (REAL)tensor[1], per_mean = (REAL)adam->per_mean;
    const REAL tiny = decay.tiny;
    const double flat = form == LATER ? 1 : decay.flat;
    const REAL keep = (REAL)((1 - adam->lr * adam->weight_decay) * flat), step_size = (REAL)(tensor[0] * flat);
    REAL *restrict w = block.stream[WEIGHT], *restrict m = block.stream[AVERAGE];
    REAL *restrict v = block.stream[SQUARE], *restrict largest = block.stream[LARGEST_SQUARE];
    REAL *restrict length = block.length;
    const REAL *restrict grad = block.stream[GRADIENT];
    for (int64_t i = 0; i < block.n; i++) {
        REAL g = grad[i];
        REAL average = beta1 * m[i] + new1 * g;
        REAL square = beta2 * v[i] + new2 * g * g;
        m[i] = average;
        v[i] = square;
        if (amsgrad) {
            REAL before = largest[i];
            square = before > square ? before : square;
            largest[i] = square;
        }
        REAL denominator = SQRT(square) * per_root + eps;
        REAL w_tilde = keep * w[i] - step_size * average / denominator;
        REAL old = w[i], scaled = old * SQUARE_SCALE;
        if (measure == LENGTH) old *= SQRT(denominator * per_mean);
        if (measure == SQUARED_LENGTH) old = scaled * scaled * (denominator * per_mean);
        if (form == LATER) {
            length[i] = old;
            w[i] = w_tilde;
        } else {
            w[i] = NAME(flush)(w_tilde * NAME(factor_of)(&decay, form, old), tiny);
        }
    }
}

INLINE void NAME(sgd_loop)(const sgd_settings *sgd, const NAME(decay) *rule, NAME(block) block, int momentum,
                           int first, int nesterov, int form)
{
    const NAME(decay) decay = *rule;
    const REAL lr = (REAL)sgd->lr, keep = (REAL)sgd->momentum, new = (REAL)(1 - sgd->dampening);
    const REAL flat = form == READY ? 1 : decay.flat;
    const REAL weight_decay = (REAL)sgd->weight_decay, sign = sgd->maximize ? -1 : 1, tiny = decay.tiny;
    REAL *restrict w = block.stream[WEIGHT], *restrict buffer = block.stream[BUFFER];
    const REAL *restrict grad = block.stream[GRADIENT], *restrict factor = block.factor;
    for (int64_t i = 0; i < block.n; i++) {
        REAL g = sign * grad[i] + (weight_decay != 0 ? weight_decay * w[i] : 0);     /* 0 * inf is NaN */
        REAL move = g;
        if (momentum) {
            move = first ? g : keep * buffer[i] + new * g;      /* do not read an uninitialised buffer */
            buffer[i] = move;
            if (nesterov) move = g + keep * move;
        }
        REAL w_tilde = flat * w[i] - flat * lr * move;
        REAL shrink = form == READY ? factor[i] : NAME(factor_of)(&decay, form, w[i]);
        w[i] = NAME(flush)(w_tilde * shrink, tiny);
    }
}

INLINE void NAME(decay_loop)(const NAME(decay) *rule, NAME(block) block, int form)
{
    const NAME(decay) decay = *rule;
    REAL *restrict w = block.stream[WEIGHT];
    const REAL *restrict old = block.stream[OLD_WEIGHT];
    for (int64_t i = 0; i < block.n; i++)
        w[i] = NAME(flush)(w[i] * (decay.flat * NAME(factor_of)(&decay, form, old[i])), decay.tiny);
}

/* Run the loop that is specialised for the decay's form and return; fall through for forms without one. */
#define RETURN_IF_SPECIALISED(LOOP)            \
    switch (decay->form) {                     \
    case FLAT: LOOP(FLAT); return;             \
    case P_0: LOOP(P_0); return;               \
    case P_HALF: LOOP(P_HALF); return;         \
    case P_1: LOOP(P_1); return;               \
    case P_3_2: LOOP(P_3_2); return;           \
    case FITTED: LOOP(FITTED); return;         \
    case POWER: LOOP(POWER); return;           \
    case TWO_POWERS: LOOP(TWO_POWERS); return; \
    }

/* Multiply updated weights by the factors of block.length. */
static void NAME(multiply)(const NAME(decay) *decay, NAME(block) block)
{
    REAL *restrict w = block.stream[WEIGHT];
    const REAL *restrict factor = block.factor;
    const REAL tiny = decay->tiny;
    NAME(factor_block)(decay, block.length, block.factor, block.n);
    for (int64_t i = 0; i < block.n; i++) w[i] = NAME(flush)(w[i] * factor[i], tiny);
}

/* The measure of the decay's form. */
static int NAME(measure)(const adam_settings *adam, const NAME(decay) *decay)
{
    return !adam->per_mean || decay->form == FLAT ? WEIGHT_ITSELF : decay->form == FITTED ? SQUARED_LENGTH : LENGTH;
}

#define ADAM_LATER(AMSGRAD, MEASURE) NAME(adam_loop)(settings, decay, tensor, block, AMSGRAD, MEASURE, LATER)

static void NAME(adam_block)(const void *settings, const NAME(decay) *decay, const double *tensor, NAME(block) block)
{
    if (NAME(measure)(settings, decay) == LENGTH) ADAM_LATER(0, LENGTH);
    else ADAM_LATER(0, WEIGHT_ITSELF);
    NAME(multiply)(decay, block);
}

static void NAME(adam)(const void *settings, const NAME(decay) *decay, const double *tensor, NAME(block) block)
{
    const int measure = NAME(measure)(settings, decay);
#if IS_FLOAT && HAS_PAIRS
    if (decay->form == FITTED) {
        adam_pairs(settings, decay, tensor, block.stream, block.n, measure == SQUARED_LENGTH);
        return;
    }
#endif
#define LOOP(FORM) NAME(adam_loop)(settings, decay, tensor, block, 0, WEIGHT_ITSELF, FORM)
    if (IS_FLOAT && measure == WEIGHT_ITSELF) RETURN_IF_SPECIALISED(LOOP)
    if (IS_FLOAT && measure == SQUARED_LENGTH) {
        NAME(adam_loop)(settings, decay, tensor, block, 0, SQUARED_LENGTH, FITTED);
        return;
    }
#undef LOOP
    NAME(in_blocks)(NAME(adam_block), settings, decay, tensor, block);
}

static void NAME(amsgrad_block)(const void *settings, const NAME(decay) *decay, const double *tensor,
                                NAME(block) block)
{
    const int measure = NAME(measure)(settings, decay);
    if (IS_FLOAT && measure == SQUARED_LENGTH) ADAM_LATER(1, SQUARED_LENGTH);
    else if (measure == LENGTH) ADAM_LATER(1, LENGTH);
    else ADAM_LATER(1, WEIGHT_ITSELF);
    NAME(multiply)(decay, block);
}
#undef ADAM_LATER

static void NAME(amsgrad)(const void *settings, const NAME(decay) *decay, const double *tensor, NAME(block) block)
{
    NAME(in_blocks)(NAME(amsgrad_block), settings, decay, tensor, block);
}

static void NAME(sgd_block)(const void *settings, const NAME(decay) *decay, const double *tensor, NAME(block) block)
{
    const sgd_settings *sgd = settings;
    const int first = tensor[0] != 0;
    NAME(factor_block)(decay, block.stream[WEIGHT], block.factor, block.n);
    if (sgd->momentum == 0) NAME(sgd_loop)(sgd, decay, block, 0, 0, 0, READY);
    else if (first && sgd->nesterov) NAME(sgd_loop)(sgd, decay, block, 1, 1, 1, READY);
    else if (first) NAME(sgd_loop)(sgd, decay, block, 1, 1, 0, READY);
    else if (sgd->nesterov) NAME(sgd_loop)(sgd, decay, block, 1, 0, 1, READY);
    else NAME(sgd_loop)(sgd, decay, block, 1, 0, 0, READY);
}

static void NAME(sgd)(const void *settings, const NAME(decay) *decay, const double *tensor, NAME(block) block)
{
    const sgd_settings *sgd = settings;
    const int common = sgd->momentum != 0 && tensor[0] == 0 && !sgd->nesterov;
#if IS_FLOAT && HAS_PAIRS
    if (decay->form == FITTED && common) {
        sgd_pairs(sgd, decay, block.stream, block.n);
        return;
    }
#endif
#define LOOP(FORM) NAME(sgd_loop)(sgd, decay, block, 1, 0, 0, FORM)
    if (IS_FLOAT && common) RETURN_IF_SPECIALISED(LOOP)
#undef LOOP
    NAME(in_blocks)(NAME(sgd_block), settings, decay, tensor, block);
}

static void NAME(decay_block)(const void *settings, const NAME(decay) *decay, const double *tensor, NAME(block) block)
{
    (void)settings, (void)tensor;
    block.length = block.stream[OLD_WEIGHT];
    NAME(multiply)(decay, block);
}

static void NAME(decay_only)(const void *settings, const NAME(decay) *decay, const double *tensor, NAME(block) block)
{
    if (!decay->tiny) return;
#if IS_FLOAT && HAS_PAIRS
    if (decay->form == FITTED) {
        decay_pairs(decay, block.stream, block.n);
        return;
    }
#endif
#define LOOP(FORM) NAME(decay_loop)(decay, block, FORM)
    if (IS_FLOAT) RETURN_IF_SPECIALISED(LOOP)
#undef LOOP
    NAME(in_blocks)(NAME(decay_block), settings, decay, tensor, block);
}
#undef RETURN_IF_SPECIALISED
