/* Conversion of bfloat16 and float16 blocks to float and back. Steps compute in float. Older compilers have no
 * float16. */
#ifdef __FLT16_MAX__
enum { HAS_FLOAT16 = 1 };
#else
enum { HAS_FLOAT16 = 0 };
#endif

static void widen(int dtype, const void *from, float *to, int64_t n)
{
    if (dtype == BFLOAT16) {
        const uint16_t *half = from;
        for (int64_t i = 0; i < n; i++) to[i] = float_of((int32_t)((uint32_t)half[i] << 16));
    }
#ifdef __FLT16_MAX__
    else {
        const _Float16 *half = from;
        for (int64_t i = 0; i < n; i++) to[i] = half[i];
    }
#endif
}

static void narrow(int dtype, const float *from, void *to, int64_t n)
{
    if (dtype == BFLOAT16) {
        uint16_t *half = to;
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits = (uint32_t)bits_f32(from[i]);
            uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;      /* to nearest, ties to even */
            half[i] = from[i] == from[i] ? (uint16_t)rounded : 0x7fc0;        /* a NaN must not round to inf */
        }
    }
#ifdef __FLT16_MAX__
    else {
        _Float16 *half = to;
        for (int64_t i = 0; i < n; i++) half[i] = (_Float16)from[i];
    }
#endif
}
