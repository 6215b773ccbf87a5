/* The fused steps: an optimizer's own update and the decay, for a list of tensors, in one pass over memory and
 * one parallel region. Plain C on raw pointers; without PyTorch headers there is no ABI to match.
 *
 *   w <- w_tilde / (1 + sum_k c_k |w_old|^(p_k - 2)),   c_k = lr * lam_k
 *
 * A stream is the array of all weights, of all gradients, or of one kind of optimizer state. Each thread takes a part
 * of each tensor, the same as in torch's own loops: weights and state stay in the cache of one core. decay.h computes
 * the factor, update.h updates, fastpow.h the power. Blocks of half-precision numbers are converted to float and back.
 * The loops are plain C that compilers vectorise; build.py explains the compiler flags.
 *
 * The only caller, native.py, checks devices, dtypes and layouts.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#if defined(__AVX__)
#include <immintrin.h>
typedef __m256i chunk;
#define LOAD _mm256_loadu_si256
#define STREAM _mm256_stream_si256
#elif defined(__SSE2__)
#include <emmintrin.h>
typedef __m128i chunk;
#define LOAD _mm_loadu_si128
#define STREAM _mm_stream_si128
#endif

#include "fastpow.h"

enum { STREAMS = 5, BLOCK = 1024 };                /* 1024 weights: 4 kB a stream in float */
enum { FEW = 1 << 14 };                            /* weights that one thread updates alone */
enum { RUN = 64 * BLOCK };                         /* weights in order; backwards passes go from run to run */
enum { CACHE_LINE = 64 };                          /* bytes */
enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };      /* as in native.py */
enum { DONE, BAD_DTYPE, NO_MEMORY };
enum { WEIGHT_ITSELF, LENGTH, SQUARED_LENGTH };       /* see update.h */
/* Traits of an update: the decay acts on lengths in Adam's metric; the processor flushes denormals of decayed tensors
 * to zero; it takes a square root for each weight. */
enum { ADAPTIVE = 1, FLUSHES = 2, TAKES_ROOT = 4 };
enum { FLAT, P_0, P_HALF, P_1, P_3_2, FITTED, POWER, TWO_POWERS, POWERS, READY, LATER };     /* see decay.h, update.h */

/* The streams of each step. */
enum { WEIGHT, GRADIENT, AVERAGE, SQUARE, LARGEST_SQUARE };     /* Adam */
enum { BUFFER = 2 };                                            /* SGD: weight, gradient, momentum buffer */
enum { OLD_WEIGHT = 1 };                                        /* decay: weight, weight before the update */

typedef struct { double lr, beta1, beta2, eps, weight_decay, per_mean; int maximize; } adam_settings;
typedef struct { double lr, momentum, dampening, weight_decay; int nesterov, maximize; } sgd_settings;

/* Weights that decay to zero pass through denormal numbers, and so do the averages of dead units. On x86,
 * arithmetic with denormals is a hundred times slower. Flush them to zero there, in this thread only, from
 * enter_flush to leave_flush. */
#if defined(__SSE2_MATH__)
static unsigned enter_flush(int flushes)
{
    unsigned before = __builtin_ia32_stmxcsr();
    if (flushes) __builtin_ia32_ldmxcsr(before | 0x8040);        /* flush to zero, denormals are zero */
    return before;
}
static void leave_flush(unsigned before) { __builtin_ia32_ldmxcsr(before); }
#else
static unsigned enter_flush(int flushes) { return (unsigned)flushes; }
static void leave_flush(unsigned before) { (void)before; }
#endif

/* Copy past the cache: an ordinary store first reads the memory that it overwrites. */
static void stream(void *to, const void *from, size_t bytes)
{
    size_t done = 0;
#ifdef STREAM
    if ((uintptr_t)to % sizeof(chunk) == 0) {
        for (; done + sizeof(chunk) <= bytes; done += sizeof(chunk))
            STREAM((chunk *)((char *)to + done), LOAD((const chunk *)((const char *)from + done)));
        _mm_sfence();       /* waits for all stores: call this function for long arrays */
    }
#endif
    memcpy((char *)to + done, (const char *)from + done, bytes - done);
}

/* Keeps the squares of small weights above the smallest normal number. */
#define SQUARE_SCALE 0x1p20f

#define REAL float
#define NAME(x) x##_f32
#define FABS fabsf
#define SQRT sqrtf
#define SMALLEST FLT_MIN
#define LARGEST FLT_MAX
#define T_LIMIT 0x1p30f
#define EXPONENT_STEP 0x1p23
#define IS_FLOAT 1
#include "decay.h"
#include "pairs.h"
#include "update.h"
#undef REAL
#undef NAME
#undef FABS
#undef SQRT
#undef SMALLEST
#undef LARGEST
#undef T_LIMIT
#undef EXPONENT_STEP
#undef IS_FLOAT

#define REAL double
#define NAME(x) x##_f64
#define FABS fabs
#define SQRT sqrt
#define SMALLEST DBL_MIN
#define LARGEST DBL_MAX
#define T_LIMIT 0x1p60
#define EXPONENT_STEP 0x1p52
#define IS_FLOAT 0
#include "decay.h"
#include "update.h"

#include "scaled_updates.h"
#include "half.h"
#include "table.h"

/* The tensors and the decay of a call, as Python passes them. */
typedef struct {
    int dtype, threads;                 /* threads: torch.get_num_threads() */
    int64_t tensors, terms;
    const int64_t *sizes;
    void *const *data;                  /* data[s * tensors + i]: stream s of tensor i */
    const double *p, *c;                /* the terms, c = lr * lam */
    const double *scales;               /* for each tensor, the multiplier of all c; 0 for no decay */
} call;

/* A call, and the function that updates a block of its tensors. */
typedef struct {
    const call *call;
    int streams;
    unsigned written;                   /* bit s is set if stream s is written */
    const double *scalars;              /* two numbers for each tensor, passed to the update; or NULL */
    const void *settings;
    updater_f32 *update_f32;
    updater_f64 *update_f64;
    unsigned traits;
    int backwards;                      /* start with the last weights */
    const int64_t *plan_of;             /* for each tensor, the index of its decay */
    const decay_f32 *decay_f32;
    const decay_f64 *decay_f64;
} job;

static int64_t width_of(int dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

static const double *scalars_of(const job *job, int64_t tensor)
{
    return job->scalars ? job->scalars + 2 * tensor : NULL;
}

/* ---- the weights from `begin` to `end` of one tensor ---- */

static void run_f32(const job *job, int64_t tensor, int64_t begin, int64_t end)
{
    block_f32 block = { .n = end - begin };
    for (int s = 0; s < job->streams; s++)
        block.stream[s] = (float *)job->call->data[s * job->call->tensors + tensor] + begin;
    job->update_f32(job->settings, &job->decay_f32[job->plan_of[tensor]], scalars_of(job, tensor), block);
}

static void run_f64(const job *job, int64_t tensor, int64_t begin, int64_t end)
{
    block_f64 block = { .n = end - begin };
    for (int s = 0; s < job->streams; s++)
        block.stream[s] = (double *)job->call->data[s * job->call->tensors + tensor] + begin;
    job->update_f64(job->settings, &job->decay_f64[job->plan_of[tensor]], scalars_of(job, tensor), block);
}

static void run_half(const job *job, int64_t tensor, int64_t begin, int64_t end)
{
    const call *call = job->call;
    float wide[STREAMS][BLOCK];
    for (int64_t at = begin; at < end; at += BLOCK) {
        block_f32 block = { .n = end - at < BLOCK ? end - at : BLOCK };
        for (int s = 0; s < job->streams; s++) {
            block.stream[s] = wide[s];
            widen(call->dtype, (uint16_t *)call->data[s * call->tensors + tensor] + at, wide[s], block.n);
        }
        job->update_f32(job->settings, &job->decay_f32[job->plan_of[tensor]], scalars_of(job, tensor), block);
        for (int s = 0; s < job->streams; s++)
            if (job->written >> s & 1)
                narrow(call->dtype, wide[s], (uint16_t *)call->data[s * call->tensors + tensor] + at, block.n);
    }
}

static void run_copy(const job *job, int64_t tensor, int64_t begin, int64_t end)
{
    const call *call = job->call;
    const int larger_than_cache = *(const int *)job->settings;
    const size_t width = (size_t)width_of(call->dtype);
    const char *from = (const char *)call->data[WEIGHT * call->tensors + tensor] + (size_t)begin * width;
    char *to = (char *)call->data[OLD_WEIGHT * call->tensors + tensor] + (size_t)begin * width;
    if (larger_than_cache) stream(to, from, (size_t)(end - begin) * width);
    else memcpy(to, from, (size_t)(end - begin) * width);
}

/* ---- all tensors, all threads ---- */

static int64_t total_size(const call *call)
{
    int64_t total = 0;
    for (int64_t i = 0; i < call->tensors; i++) total += call->sizes[i];
    return total;
}

static void run_weights(const job *job, int64_t tensor, int64_t begin, int64_t end)
{
    if (job->written == 1u << OLD_WEIGHT) {
        run_copy(job, tensor, begin, end);
        return;
    }
    const int64_t plan = job->plan_of[tensor];
    const int decays = job->call->dtype == FLOAT64 ? job->decay_f64[plan].tiny > 0 : job->decay_f32[plan].tiny > 0;
    unsigned before = enter_flush(decays && job->traits & FLUSHES);
    if (job->call->dtype == FLOAT32) run_f32(job, tensor, begin, end);
    else if (job->call->dtype == FLOAT64) run_f64(job, tensor, begin, end);
    else run_half(job, tensor, begin, end);
    leave_flush(before);
}

/* Run one thread's part of a tensor. The parts are those of at::parallel_for over the cache lines. With others, about
 * half of the weights would be in another core's cache, and a step of torch between two passes can take four times as
 * long. */
static void run_part(const job *job, int64_t tensor, int64_t thread, int64_t threads)
{
    const int64_t size = job->call->sizes[tensor];
    const int64_t line = CACHE_LINE / width_of(job->call->dtype), lines = (size + line - 1) / line;
    const int64_t part = (lines + threads - 1) / threads * line, begin = thread * part;
    const int64_t end = begin + part < size ? begin + part : size;
    if (begin >= end) return;
    if (!job->backwards) run_weights(job, tensor, begin, end);
    else for (int64_t at = begin + (end - begin - 1) / RUN * RUN; at >= begin; at -= RUN)
        run_weights(job, tensor, at, at + RUN < end ? at + RUN : end);
}

static void run_parts(const job *job)
{
    const call *call = job->call;
    const int64_t tensors = call->tensors;
    /* Few weights: starting the threads would take longer, many times so if the other cores are busy. Weights that
     * share memory are updated in their order: two threads at once would lose updates. */
    const int alone = total_size(call) < FEW
                      || (call->threads > 1 && job->written & 1u << WEIGHT
                          && share_memory(tensors, call->data, call->sizes, width_of(call->dtype)));
    const int threads = alone ? 1 : call->threads;
    #pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (int thread = 0; thread < threads; thread++)
        for (int64_t i = 0; i < tensors; i++) run_part(job, job->backwards ? tensors - 1 - i : i, thread, threads);
}

/* Plan one decay for each distinct scale, and run the job. */
static int run(job job)
{
    const call *call = job.call;
    const int64_t tensors = call->tensors, terms = call->terms;
    if (call->dtype < FLOAT32 || call->dtype > FLOAT16) return BAD_DTYPE;
    if (call->dtype == FLOAT16 && !HAS_FLOAT16) return BAD_DTYPE;
    int64_t plans = 0;
    int64_t *plan_of = malloc((size_t)(tensors + 1) * sizeof *plan_of);
    double *scales = malloc((size_t)(tensors + 1) * sizeof *scales);
    if (!plan_of || !scales) goto no_memory;
    for (int64_t i = 0; i < tensors; i++) {
        int64_t plan = 0;
        while (plan < plans && scales[plan] != call->scales[i]) plan++;
        if (plan == plans) scales[plans++] = call->scales[i];
        plan_of[i] = plan;
    }
    job.plan_of = plan_of;
    void *decays;
    if (call->dtype == FLOAT64) {
        job.decay_f64 = decays = plan_decays_f64(terms, call->p, call->c, plans, scales, job.traits);
    } else {
        job.decay_f32 = decays = plan_decays_f32(terms, call->p, call->c, plans, scales, job.traits);
    }
    if (!decays) goto no_memory;
    run_parts(&job);
    free(decays);
    free(scales);
    free(plan_of);
    return DONE;
no_memory:
    free(scales);
    free(plan_of);
    return NO_MEMORY;
}

/* ---- the interface that native.py calls ---- */

int pdecay_has_float16(void) { return HAS_FLOAT16; }

/* `per_mean`: 1 / the mean of Adam's denominators for the decay in Adam's metric; 0 for the decay by magnitude. */
int pdecay_adam(const call *call, void *const *steps, int double_steps, double lr, double beta1, double beta2,
                double eps, double weight_decay, int amsgrad, int maximize, double per_mean)
{
    adam_settings settings = { lr, beta1, beta2, eps, weight_decay, per_mean, maximize };
    /* Flushing second moments to zero is harmless only if eps is far above the root of the smallest normal number:
     * with eps = 0, a small gradient would be divided by zero. */
    const double smallest_eps = call->dtype == FLOAT64 ? 1e-145 : 1e-15;
    double *scalars = malloc((2 * (size_t)call->tensors + 1) * sizeof *scalars);
    if (!scalars) return NO_MEMORY;
    double last = -1;
    for (int64_t i = 0; i < call->tensors; i++) {
        double step = double_steps ? ++*(double *)steps[i] : (double)++*(float *)steps[i];
        const int same = i > 0 && step == last;           /* usually all counts are equal */
        scalars[2 * i] = same ? scalars[2 * i - 2] : lr / (1 - pow(beta1, step));
        scalars[2 * i + 1] = same ? scalars[2 * i - 1] : 1 / sqrt(1 - pow(beta2, step));
        last = step;
    }
    int status = run((job){
        .call = call, .streams = amsgrad ? 5 : 4,
        .written = 1u << WEIGHT | 1u << AVERAGE | 1u << SQUARE | 1u << LARGEST_SQUARE,
        .scalars = scalars, .settings = &settings,
        .traits = TAKES_ROOT | (per_mean != 0 ? ADAPTIVE : 0) | (eps >= smallest_eps ? FLUSHES : 0),
        .update_f32 = amsgrad ? amsgrad_f32 : adam_f32, .update_f64 = amsgrad ? amsgrad_f64 : adam_f64,
    });
    free(scalars);
    return status;
}

/* `first[i]`: the momentum buffer of tensor i is uninitialised: it is written and not read. */
int pdecay_sgd(const call *call, const unsigned char *first, double lr, double momentum, double dampening,
               int nesterov, double weight_decay, int maximize)
{
    sgd_settings settings = { lr, momentum, dampening, weight_decay, nesterov, maximize };
    double *scalars = malloc((2 * (size_t)call->tensors + 1) * sizeof *scalars);
    if (!scalars) return NO_MEMORY;
    for (int64_t i = 0; i < call->tensors; i++) scalars[2 * i] = first[i];
    int status = run((job){
        .call = call, .streams = momentum ? 3 : 2, .written = 1u << WEIGHT | 1u << BUFFER,
        .scalars = scalars, .settings = &settings, .traits = FLUSHES, .update_f32 = sgd_f32, .update_f64 = sgd_f64,
    });
    free(scalars);
    return status;
}

/* Two passes around an update by other code, such as torch's own. The streams are the weights, and the memory for their
 * values before the update. Optimizers run through the weights from the first to the last. Both passes run backwards, so
 * that an update begins with weights that are still in the cache, and the second pass, too. */
int pdecay_copy(const call *given)
{
    call call = *given;
    const int64_t total = total_size(given);
    if (total < 1 << 17) call.threads = 1;         /* starting the threads would take longer */
    const int larger_than_cache = total > 1 << 21;
    return run((job){
        .call = &call, .streams = 2, .written = 1u << OLD_WEIGHT, .settings = &larger_than_cache, .backwards = 1,
    });
}

int pdecay_decay(const call *call)
{
    return run((job){
        .call = call, .streams = 2, .written = 1u << WEIGHT, .traits = FLUSHES, .backwards = 1,
        .update_f32 = decay_only_f32, .update_f64 = decay_only_f64,
    });
}

/* Scale the updates since pdecay_copy by |old|^power / mean of the tensor, at most `largest`. Zeros stay 0, and tensors
 * with a mean of 0 stay as they are. Only for float. */
int pdecay_scale_updates(const call *call, const double *means, double power, double largest)
{
    if (call->dtype != FLOAT32) return BAD_DTYPE;
    update_scale *scales = malloc((size_t)(call->tensors + 1) * sizeof *scales);
    double *scalars = malloc((2 * (size_t)call->tensors + 1) * sizeof *scalars);
    int status = NO_MEMORY;
    if (scales && scalars) {
        for (int64_t i = 0; i < call->tensors; i++) {
            if (means[i]) scales[i] = (update_scale){ fit_power_f32(power, 1 / means[i]), (float)largest };
            scalars[2 * i] = means[i] ? (double)i : -1;
        }
        status = run((job){
            .call = call, .streams = 2, .written = 1u << WEIGHT, .backwards = 1,
            .scalars = scalars, .settings = scales, .update_f32 = scale_update,
        });
    }
    free(scales);
    free(scalars);
    return status;
}

/* |x|^q, for the tests of its accuracy. */
void pdecay_fitted_power_f32(const float *x, float *power, int64_t n, double q, double c)
{
    const fitted_f32 term = fit_power_f32(q, c);
    for (int64_t i = 0; i < n; i++) power[i] = fitted_power_f32(term, x[i]);
}

/* The same with vector instructions; return 0 if there are none. */
int pdecay_paired_power_f32(const float *x, float *power, int64_t n, double q, double c)
{
#if HAS_PAIRS
    float *stream[] = { power, (float *)x };
    unsigned before = enter_flush(1);
    power_pairs(fit_power_f32(q, c), stream, n);
    leave_flush(before);
#else
    (void)x, (void)power, (void)n, (void)q, (void)c;
#endif
    return HAS_PAIRS;
}

void pdecay_power_f32(const float *x, float *power, int64_t n, double q)
{
    for (int64_t i = 0; i < n; i++)
        power[i] = power_of_f32(log2_parts_f32(fabsf(x[i])), as_power_f32(q, 1));
}

void pdecay_power_f64(const double *x, double *power, int64_t n, double q)
{
    for (int64_t i = 0; i < n; i++)
        power[i] = power_of_f64(log2_parts_f64(fabs(x[i])), as_power_f64(q, 1));
}
