// K and V in 8 bits: whole numbers from -127 to 127, and one float32 scale for each token of a head, max |x| / 127. A number
// times its scale is what is read. A row that is not finite has a scale of NaN, and so is nothing but NaN.
//
// A tile is that of kv_tiles.h with numbers instead of elements; behind them are the scales of its 16 tokens.
#pragma once
#include <type_traits>
#include "bytes.h"
#include "kv_tiles.h"

enum { INT8 = 2 };  // the Dtype of a cache alone: nothing is computed in it

// Elements of a cache beside each token's numbers.
template <class S> constexpr size_t SCALE_SIZE = std::is_same_v<S, int8_t> ? sizeof(float) : 0;

// body(element, stored): null pointers to what the kernels compute with, and to what the cache holds.
template <class Body> static void with_types(int dtype, int cache_dtype, Body body) {
    with_type(dtype, [&]<class T>(T* element) {
        if (cache_dtype == INT8) body(element, (int8_t*)nullptr);
        else body(element, element);
    });
}

// The lowest bits of each lane, in steps that are one instruction each: the compiler would take larger ones lane by lane.
INLINE void store_numbers(int8_t* to, Dwords lanes) {
    store(to, __builtin_convertvector(__builtin_convertvector(lanes, Halves), SignedBytes));
}

// A row of a head as numbers; returns their scale. Elements below 1e-30 / 254 become 0.
template <class T> static float quantize(const T* row, size_t dim, int8_t* numbers) {
    Floats largest_sizes{}, nothing{};  // the second stays 0 unless something is infinite or NaN
    for (size_t d = 0; d < dim; d += LANES) {
        const Floats x = load_floats(row + d);
        largest_sizes = max(largest_sizes, max(x, -x));
        nothing += x * 0.0f;
    }
    const float size = largest(largest_sizes), scale = (size > 1e-30f ? size : 1e-30f) / 127.0f + sum(nothing);
    for (size_t d = 0; d < dim; d += LANES) {  // 1.5 * 2^23 more: rounded to a whole number, which the lowest bits are
        store_numbers(numbers + d, as_bits(load_floats(row + d) / scale + 12582912.0f));
    }
    return scale;
}

// The scales of a tile, for its tokens.
INLINE void copy_scales(const int8_t* tile, size_t head_dim, float* to) {
    std::memcpy(to, tile + TILE * head_dim, TILE * sizeof(float));
}
