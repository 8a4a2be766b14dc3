// What happens to q, k and v of new tokens between their projection and attention: norms and rotation of the heads of q and k,
// and the write of K and V into the cache. Norms, rotation and q may each be missing.
#include <algorithm>
#include <vector>
#include "calls.h"
#include "kv_int8.h"
#include "norm.h"
#include "team.h"

namespace {

// x / rms(x) * weight, then the rotation of the pairs (x[i], x[i + head_dim / 2]) by the token's angles; what is null is left
// out.
template <class T>
void norm_and_rotate(const T* x, const float* weight, float eps, const float* cosine, const float* sine, size_t head_dim,
                            T* out) {
    if (!weight && !cosine) {
        std::copy_n(x, head_dim, out);
        return;
    }
    const size_t half = head_dim / 2;
    const float scale = weight ? inverse_rms<T>(x, nullptr, head_dim, eps) : 1.0f;
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

// Elements of a row of a head as the cache has them; they may be put into `room`. A scale goes to its slot in the tile.
template <class T, class S> const S* stored(const T* row, const KVTiles& kv, size_t offset, S* tile, S* room) {
    if constexpr (std::is_same_v<S, T>) {
        return row;
    } else {
        store(tile + TILE * kv.head_dim + offset * sizeof(float), quantize(row, kv.head_dim, room));
        return room;
    }
}

// Lane l of row i becomes lane i of row l.
template <int STEP = LANES / 2, int... LANE>
INLINE void transpose(Dwords (&rows)[LANES], std::integer_sequence<int, LANE...> lanes) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & STEP)) {
            const Dwords a = rows[i], b = rows[i + STEP];
            rows[i] = shuffled<(LANE & STEP ? LANES + LANE - STEP : LANE)...>(a, b);
            rows[i + STEP] = shuffled<(LANE & STEP ? LANES + LANE : LANE + STEP)...>(a, b);
        }
    if constexpr (STEP > 1) transpose<STEP / 2>(rows, lanes);
}

// K and V of a whole tile from rows of its tokens: transposed in registers and written by lines, not by dwords of K and
// elements of V.
template <class T>
NOINLINE void write_tile(const T* keys, size_t k_stride, const T* values, size_t v_stride, size_t dim, T* k_tile, T* v_tile) {
    constexpr size_t n = Dot<T>::PER_DWORD;
    for (size_t d = 0; d < dim; d += LANES * n)
        for (size_t token = 0; token < TILE; token += LANES) {
            Dwords rows[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) rows[i] = load<Dwords>(keys + (token + i) * k_stride + d);
            transpose(rows, std::make_integer_sequence<int, LANES>());
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) store(k_tile + (d + i * n) * TILE + token * n, rows[i]);
        }
    for (size_t token = 0; token < TILE; token += n)
        for (size_t d = 0; d < dim; d += LANES) {
            const T* value = values + token * v_stride + d;
            if constexpr (n == 1) store(v_tile + token * dim + d, load<Dwords>(value));
            else {
                const auto wide = [](const T* from) { return __builtin_convertvector(load<Halves>(from), Dwords); };
                store(v_tile + token * dim + d * n, wide(value) | wide(value + v_stride) << 16);
            }
        }
}

// Where runs of tokens begin that one thread writes one after the other, and where the last one ends: neighbours write the
// same lines of a tile, so a run ends with its tile. Few tokens are shared out one by one.
std::vector<size_t> runs_of(const int64_t* slots, size_t tokens) {
    std::vector<size_t> starts;
    starts.reserve(tokens + 1);
    for (size_t token = 0; token < tokens; token++) {
        const bool begins_tile = slots[token] >= 0 && slots[token] % TILE == 0;
        if (begins_tile || tokens < 4 * TILE || !token || token - starts.back() == TILE) starts.push_back(token);
    }
    starts.push_back(tokens);
    return starts;
}

// Whether a run is all tokens of a tile: 16 that follow one another would have been cut where another tile begins.
bool is_tile(const int64_t* slots, size_t tokens) {
    for (size_t i = 1; i < tokens; i++)
        if (slots[i] != slots[0] + (int64_t)i) return false;
    return tokens == TILE && slots[0] >= 0;
}

}  // namespace

// q [tokens][q_heads][head_dim] and k, v [tokens][kv_heads][head_dim], with strides between tokens; q_out has none. Null:
// q_weight and k_weight, then nothing is normed; cosines and sines [tokens][head_dim / 2] with a stride, then nothing is
// rotated; q, if q_heads is 0.
extern "C" void rotate_and_write(int dtype, int cache_dtype, const void* q, size_t q_stride, const void* k, size_t k_stride, const void* v,
                                size_t v_stride, const float* q_weight, const float* k_weight, float eps, const float* cosines,
                                const float* sines, size_t angle_stride, const int64_t* slots, void* q_out, void* k_cache,
                                void* v_cache, size_t tokens, size_t q_heads, size_t kv_heads, size_t head_dim, size_t block_size,
                                size_t block_stride) {
    with_types(dtype, cache_dtype, [&]<class T, class S>(T*, S*) {
        const KVTiles kv{kv_heads, head_dim, block_size, block_stride, SCALE_SIZE<S>};
        const Strided<T> q_rows{(const T*)q, q_stride}, k_rows{(const T*)k, k_stride}, v_rows{(const T*)v, v_stride};
        constexpr size_t n = Dot<S>::PER_DWORD, LINE = 64 / sizeof(S);
        const size_t dim = kv.head_dim, group = q_heads / kv.heads;
        const std::vector<size_t> starts = runs_of(slots, tokens);
        for_each((starts.size() - 1) * kv.heads, false, [&](size_t item) {
            const size_t head = item % kv.heads, first = starts[item / kv.heads], end = starts[item / kv.heads + 1];
            const auto rotate = [&](size_t token, const T* x, const float* weight, T* out) {
                const size_t angles = token * angle_stride;
                norm_and_rotate(x, weight, eps, cosines ? cosines + angles : nullptr, sines ? sines + angles : nullptr, dim, out);
            };
            const auto rotate_q = [&](size_t token) {
                for (size_t h = head * group; h < (head + 1) * group; h++)
                    rotate(token, q_rows.row(token) + h * dim, q_weight, (T*)q_out + (token * q_heads + h) * dim);
            };
            const auto rotate_k = [&](size_t token, T* out) { rotate(token, k_rows.row(token) + head * dim, k_weight, out); };
            const auto tile_of = [&](size_t slot) { return kv.tile(slot / kv.block_size, slot % kv.block_size, head); };
            if constexpr (std::is_same_v<S, T>)
                if (is_tile(slots + first, end - first)) {
                    S *k_tile = (S*)k_cache + tile_of(slots[first]), *v_tile = (S*)v_cache + tile_of(slots[first]);
                    for (size_t i = 0; i < TILE * dim; i += LINE) __builtin_prefetch(k_tile + i, 1), __builtin_prefetch(v_tile + i, 1);
                    alignas(64) T keys[TILE][MAX_HEAD_DIM];
                    for (size_t i = 0; i < TILE; i++) rotate_q(first + i), rotate_k(first + i, keys[i]);
                    write_tile(keys[0], MAX_HEAD_DIM, v_rows.row(first) + head * dim, v_rows.stride, dim, k_tile, v_tile);
                    return;
                }
            for (size_t token = first; token < end; token++) {
                const bool written = slots[token] >= 0;
                const size_t slot = written ? slots[token] : 0, offset = slot % TILE, tile = tile_of(slot);
                S *k_tile = (S*)k_cache + tile, *v_tile = (S*)v_cache + tile;
                S* v_row = v_tile + offset / n * dim * n;
                if (written) {  // a token's K is in many lines: ask for all of them before the first is written
                    for (size_t i = 0; i < dim / n; i++) __builtin_prefetch(k_tile + i * TILE * n, 1);
                    for (size_t i = 0; i < dim / TILE; i++) __builtin_prefetch(v_row + i * TILE * n, 1);
                }
                rotate_q(token);
                if (!written) continue;
                T rotated[MAX_HEAD_DIM];
                S room[MAX_HEAD_DIM];
                rotate_k(token, rotated);
                const S* key = stored(rotated, kv, offset, k_tile, room);
                for (size_t i = 0; i < dim; i += n) std::memcpy(k_tile + (i / n * TILE + offset) * n, key + i, n * sizeof(S));
                const S* value = stored(v_rows.row(token) + head * dim, kv, offset, v_tile, room);
                for (size_t i = 0; i < dim; i++) v_row[i * n + offset % n] = value[i];
            }
        });
    });
}
RECORDABLE(rotate_and_write)
