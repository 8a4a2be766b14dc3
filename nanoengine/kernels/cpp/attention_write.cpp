// What happens to q, k and v of new tokens between their projection and attention: norms and rotation of the heads of q and k, and
// the write of K and V into the cache. Norms, rotation and q may each be missing.
#include <algorithm>
#include <cmath>
#include "calls.h"
#include "kv_int8.h"
#include "team.h"

namespace {

// x / rms(x) * weight, then the rotation of the pairs (x[i], x[i + head_dim / 2]) by the token's angles; what is null is left out.
template <class T>
void norm_and_rotate(const T* x, const float* weight, float eps, const float* cosine, const float* sine, size_t head_dim,
                            T* out) {
    if (!weight && !cosine) {
        std::copy_n(x, head_dim, out);
        return;
    }
    const size_t half = head_dim / 2;
    float scale = 1.0f;
    if (weight) {
        Floats squares{};
        for (size_t i = 0; i < head_dim; i += LANES) {
            const Floats value = load_floats(x + i);
            squares += value * value;
        }
        scale = 1.0f / std::sqrt(sum(squares) / head_dim + eps);
    }
    for (size_t i = 0; i < half; i += LANES) {
        Floats first = load_floats(x + i), second = load_floats(x + half + i);
        if (weight) {
            first = first * scale * load_floats(weight + i);
            second = second * scale * load_floats(weight + half + i);
        }
        const Floats cos = cosine ? load<Floats>(cosine + i) : splat(1.0f), sin = cosine ? load<Floats>(sine + i) : Floats{};
        store_floats(out + i, first * cos - second * sin);
        store_floats(out + half + i, second * cos + first * sin);
    }
}

// Heads of all tokens; `stride` elements lie between one token and the next.
template <class T> struct Projected {
    const T* heads;
    size_t stride;
};

// Elements of a row of a head as the cache has them; they may be put into `room`. A scale goes to its place in the tile.
template <class T, class S> const S* stored(const T* row, const KVTiles& kv, size_t offset, S* tile, S* room) {
    if constexpr (std::is_same_v<S, T>) {
        return row;
    } else {
        store(tile + TILE * kv.head_dim + offset * sizeof(float), quantize(row, kv.head_dim, room));
        return room;
    }
}

template <class T, class S>
void write(Projected<T> q, Projected<T> k, Projected<T> v, const float* q_weight, const float* k_weight, float eps,
                  const float* cosines, const float* sines, size_t angle_stride, const int64_t* slots, T* q_out, S* k_cache,
                  S* v_cache, size_t tokens, size_t q_heads, KVTiles kv) {
    constexpr size_t n = Dot<S>::PER_DWORD;
    const size_t dim = kv.head_dim, group = q_heads / kv.heads;
    const size_t run = tokens < 4 * TILE ? 1 : TILE;  // neighbouring tokens write the same lines of a tile
    for_each((tokens + run - 1) / run * kv.heads, false, [&](size_t item) {
        const size_t head = item % kv.heads, first = item / kv.heads * run;
        for (size_t token = first; token < std::min(tokens, first + run); token++) {
            const bool written = slots[token] >= 0;
            const size_t slot = written ? slots[token] : 0, offset = slot % TILE;
            const size_t tile = kv.tile(slot / kv.block_size, slot % kv.block_size, head);
            S *k_tile = k_cache + tile, *v_tile = v_cache + tile;
            S* v_row = v_tile + offset / n * dim * n;
            if (written) {  // a token's K is in many lines: ask for all of them before the first is written
                for (size_t i = 0; i < dim / n; i++) __builtin_prefetch(k_tile + i * TILE * n, 1);
                for (size_t i = 0; i < dim / TILE; i++) __builtin_prefetch(v_row + i * TILE * n, 1);
            }
            const float* cosine = cosines ? cosines + token * angle_stride : nullptr;
            const float* sine = sines ? sines + token * angle_stride : nullptr;
            for (size_t h = head * group; h < (head + 1) * group; h++)
                norm_and_rotate(q.heads + token * q.stride + h * dim, q_weight, eps, cosine, sine, dim,
                                q_out + (token * q_heads + h) * dim);
            if (!written) continue;
            T rotated[MAX_HEAD_DIM];
            S room[MAX_HEAD_DIM];
            norm_and_rotate(k.heads + token * k.stride + head * dim, k_weight, eps, cosine, sine, dim, rotated);
            const S* key = stored(rotated, kv, offset, k_tile, room);
            for (size_t i = 0; i < dim; i += n) std::memcpy(k_tile + (i / n * TILE + offset) * n, key + i, n * sizeof(S));
            const S* value = stored(v.heads + token * v.stride + head * dim, kv, offset, v_tile, room);
            for (size_t i = 0; i < dim; i++) v_row[i * n + offset % n] = value[i];
        }
    });
}

}  // namespace

// q [tokens][q_heads][head_dim] and k, v [tokens][kv_heads][head_dim], with strides between tokens; q_out has none. Null: q_weight
// and k_weight, then nothing is normed; cosines and sines [tokens][head_dim / 2] with a stride, then nothing is rotated; q, if q_heads
// is 0.
extern "C" void attention_write(int dtype, int cache_dtype, const void* q, size_t q_stride, const void* k, size_t k_stride, const void* v,
                                size_t v_stride, const float* q_weight, const float* k_weight, float eps, const float* cosines,
                                const float* sines, size_t angle_stride, const int64_t* slots, void* q_out, void* k_cache,
                                void* v_cache, size_t tokens, size_t q_heads, size_t kv_heads, size_t head_dim, size_t block_size,
                                size_t block_stride) {
    with_types(dtype, cache_dtype, [&]<class T, class S>(T*, S*) {
        const KVTiles kv{kv_heads, head_dim, block_size, block_stride, SCALE_SIZE<S>};
        write<T, S>({(const T*)q, q_stride}, {(const T*)k, k_stride}, {(const T*)v, v_stride}, q_weight, k_weight,
                    eps, cosines, sines, angle_stride, slots, (T*)q_out, (S*)k_cache, (S*)v_cache, tokens, q_heads, kv);
    });
}
RECORDABLE(attention_write)
