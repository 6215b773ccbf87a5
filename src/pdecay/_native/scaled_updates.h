/* Updates that are scaled by a power of the weight before them; _sparsity/scaled_updates.py explains why. */

/* The scale of a tensor's updates: |old|^power / mean, at most `largest`. */
typedef struct { fitted_f32 power; float largest; } update_scale;

/* `tensor[0]`: the index of the tensor's scale; -1 for none. */
static void scale_update(const void *settings, const decay_f32 *decay, const double *tensor, block_f32 block)
{
    (void)decay;
    if (tensor[0] < 0) return;
    const update_scale by = ((const update_scale *)settings)[(int64_t)tensor[0]];
    float *restrict w = block.stream[WEIGHT];
    const float *restrict old = block.stream[OLD_WEIGHT];
    for (int64_t i = 0; i < block.n; i++) {
        float scale = fitted_power_f32(by.power, old[i]);
        scale = scale < by.largest ? scale : by.largest;
        float scaled = old[i] + scale * (w[i] - old[i]);
        w[i] = w[i] == 0 ? w[i] : scaled;
    }
}
