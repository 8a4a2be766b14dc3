// From the projected q, k and v of new tokens: norm and rotate q and k per head, write K and V into the cache.
#include <algorithm>
#include <cmath>
#include "kv_tiles.h"

// x / rms(x) * weight, then the rotation of the pairs (x[i], x[i + head_dim / 2]) by the token's angles.
template <class T>
static void norm_and_rotate(const T* x, const T* weight, float eps, const float* cosine, const float* sine, size_t head_dim, T* out) {
    const size_t half = head_dim / 2;
    F16 squares{};
    for (size_t i = 0; i < head_dim; i += LANES) {
        const F16 value = load_floats(x + i);
        squares += value * value;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / head_dim + eps);
    for (size_t i = 0; i < half; i += LANES) {
        const F16 first = load_floats(x + i) * scale * load_floats(weight + i);
        const F16 second = load_floats(x + half + i) * scale * load_floats(weight + half + i);
        const F16 cos = load<F16>(cosine + i), sin = load<F16>(sine + i);
        store_floats(out + i, first * cos - second * sin);
        store_floats(out + half + i, second * cos + first * sin);
    }
}

template <class T>
static void write(const T* qkv, const T* q_weight, const T* k_weight, float eps, const float* cosines, const float* sines,
                  const int64_t* slots, T* q_out, T* k_cache, T* v_cache, size_t tokens, size_t q_heads, KVTiles kv) {
    constexpr size_t n = Dot<T>::per_dword;
    const size_t dim = kv.head_dim, group = q_heads / kv.heads, row = (q_heads + 2 * kv.heads) * dim;
    const size_t run = tokens < 4 * LANES ? 1 : LANES;  // neighbouring tokens write the same lines of a tile
#pragma omp parallel for schedule(static)
    for (size_t item = 0; item < (tokens + run - 1) / run * kv.heads; item++) {
        const size_t head = item % kv.heads, first = item / kv.heads * run;
        for (size_t token = first; token < std::min(tokens, first + run); token++) {
            const bool written = slots[token] >= 0;
            const size_t slot = written ? slots[token] : 0, offset = slot % LANES;
            const size_t tile = kv.tile(slot / kv.block_size, slot % kv.block_size, head);
            T *k_tile = k_cache + tile, *v_tile = v_cache + tile;
            T* v_row = v_tile + offset / n * dim * n;
            if (written) {  // a token's K is in many lines: ask for all of them before the first is written
                for (size_t i = 0; i < dim / n; i++) __builtin_prefetch(k_tile + i * LANES * n, 1);
                for (size_t i = 0; i < dim / LANES; i++) __builtin_prefetch(v_row + i * LANES * n, 1);
            }
            const T *q = qkv + token * row, *k = q + (q_heads + head) * dim, *v = k + kv.heads * dim;
            const float *cosine = cosines + token * dim / 2, *sine = sines + token * dim / 2;
            for (size_t h = head * group; h < (head + 1) * group; h++)
                norm_and_rotate(q + h * dim, q_weight, eps, cosine, sine, dim, q_out + (token * q_heads + h) * dim);
            if (!written) continue;
            T rotated[MAX_HEAD_DIM];
            norm_and_rotate(k, k_weight, eps, cosine, sine, dim, rotated);
            for (size_t i = 0; i < dim; i += n) std::memcpy(k_tile + (i / n * LANES + offset) * n, rotated + i, 4);
            for (size_t i = 0; i < dim; i++) v_row[i * n + offset % n] = v[i];
        }
    }
}

extern "C" void attention_write(int dtype, const void* qkv, const void* q_weight, const void* k_weight, float eps,
                                const float* cosines, const float* sines, const int64_t* slots, void* q_out, void* k_cache,
                                void* v_cache, size_t tokens, size_t q_heads, size_t kv_heads, size_t head_dim,
                                size_t block_size, size_t block_stride) {
    const KVTiles kv{kv_heads, head_dim, block_size, block_stride};
    if (dtype == FLOAT32)
        write((const f32*)qkv, (const f32*)q_weight, (const f32*)k_weight, eps, cosines, sines, slots, (f32*)q_out,
              (f32*)k_cache, (f32*)v_cache, tokens, q_heads, kv);
    else
        write((const bf16*)qkv, (const bf16*)q_weight, (const bf16*)k_weight, eps, cosines, sines, slots, (bf16*)q_out,
              (bf16*)k_cache, (bf16*)v_cache, tokens, q_heads, kv);
}
