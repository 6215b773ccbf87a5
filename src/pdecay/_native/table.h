/* Read the memory of many tensors at once, through DLPack's exchange interface: a function that describes the tensor
 * of a Python object in a struct of a fixed layout. A call from Python for each property of each tensor would take
 * longer than the step of a small model. */

/* DLTensor of DLPack 1. */
typedef struct {
    void *data;
    int32_t device, device_index, dimensions;
    uint8_t kind, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t offset;
} described;

typedef int (*describer)(void *object, described *result);

static int dtype_of(const described *tensor)
{
    enum { DL_FLOAT = 2, DL_BFLOAT = 4 };
    if (tensor->kind == DL_BFLOAT && tensor->bits == 16) return BFLOAT16;
    if (tensor->kind != DL_FLOAT) return -1;
    if (tensor->bits == 16 && HAS_FLOAT16) return FLOAT16;
    return tensor->bits == 32 ? FLOAT32 : tensor->bits == 64 ? FLOAT64 : -1;
}

/* The number of elements; -1 if they are not contiguous. */
static int64_t contiguous_size(const described *tensor)
{
    int64_t size = 1;
    int contiguous = 1;
    for (int d = tensor->dimensions - 1; d >= 0; d--) {
        if (tensor->strides && tensor->shape[d] != 1 && tensor->strides[d] != size) contiguous = 0;
        size *= tensor->shape[d];
    }
    return contiguous || size == 0 ? size : -1;
}

static int have_same_shape(const described *a, const described *b)
{
    if (a->dimensions != b->dimensions) return 0;
    for (int d = 0; d < a->dimensions; d++)
        if (a->shape[d] != b->shape[d]) return 0;
    return 1;
}

/* Write the sizes of the first `tensors` objects and the addresses of all `tensors * streams`, then those of `counts`
 * objects. Return the dtype, plus 4 times that of the counts; -1 unless all are contiguous and on the CPU, the tensors
 * have one dtype and the shape of the first object with their index, and each count is one number, all of one dtype. */
int pdecay_table(describer describe, int64_t tensors, int64_t streams, int64_t counts, void *const *objects,
                 int64_t *sizes, void **data)
{
    enum { DL_CPU = 1 };
    const int64_t first_count = tensors * streams;
    int dtype = 0, dtype_of_counts = 0;
    described *weights = malloc((size_t)(tensors + 1) * sizeof *weights);
    if (!weights) return -1;
    for (int64_t i = 0; i < first_count + counts; i++) {
        described tensor;
        if (describe(objects[i], &tensor)) goto unlike;
        const int own = dtype_of(&tensor);
        const int64_t size = contiguous_size(&tensor);
        if (tensor.device != DL_CPU || tensor.lanes != 1 || own < 0 || size < 0 || (size > 0 && !tensor.data))
            goto unlike;
        if (i == 0) dtype = own;
        if (i == first_count) dtype_of_counts = own;
        if (i < tensors) {
            weights[i] = tensor;
            sizes[i] = size;
        }
        if (i < first_count ? own != dtype || !have_same_shape(&tensor, &weights[i % tensors])
                            : own != dtype_of_counts || size != 1)
            goto unlike;
        data[i] = (char *)tensor.data + tensor.offset;
    }
    free(weights);
    return dtype + 4 * dtype_of_counts;
unlike:
    free(weights);
    return -1;
}

/* ---- memory that several tensors share ---- */

typedef struct { uintptr_t begin, end; } span;

static int compare_spans(const void *a, const void *b)
{
    const uintptr_t first = ((const span *)a)->begin, second = ((const span *)b)->begin;
    return (first > second) - (first < second);
}

/* Whether some of the tensors have memory in common; also 1 if there is no memory to find out. */
static int share_memory(int64_t tensors, void *const *data, const int64_t *sizes, int64_t width)
{
    span *spans = malloc((size_t)(tensors + 1) * sizeof *spans);
    if (!spans) return 1;
    int64_t count = 0;
    int shared = 0;
    for (int64_t i = 0; i < tensors; i++)
        if (sizes[i]) spans[count++] = (span){ (uintptr_t)data[i], (uintptr_t)data[i] + (uintptr_t)(sizes[i] * width) };
    qsort(spans, (size_t)count, sizeof *spans, compare_spans);
    for (int64_t i = 1; i < count; i++) shared |= spans[i].begin < spans[i - 1].end;
    free(spans);
    return shared;
}
