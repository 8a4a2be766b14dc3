// K and V in 8 bits: whole numbers from -127 to 127, and one float32 scale for each token of a head, max |x| / 127. A number times its
// scale is what is read. A row that is not finite has a scale of NaN, and so is nothing but NaN.
//
// A tile is that of kv_tiles.h with numbers in place of elements; behind them are the scales of its 16 tokens.
#pragma once
#include <memory>
#include <type_traits>
#include "kv_tiles.h"

typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));

enum { INT8 = 2 };  // the Dtype of a cache alone: nothing is computed in it

// Elements of a cache beside each token's numbers.
template <class S> constexpr size_t SCALE_SIZE = std::is_same_v<S, int8_t> ? sizeof(float) : 0;

// body(element, stored): null pointers to what the kernels compute with, and to what the cache holds.
template <class Body> static void with_types(int dtype, int cache_dtype, Body body) {
    auto with = [&]<class T>(T* element) {
        if (cache_dtype == INT8) body(element, (int8_t*)nullptr);
        else body(element, element);
    };
    if (dtype == FLOAT32) with((f32*)nullptr);
    else with((bf16*)nullptr);
}

// In steps that are one instruction each: the compiler would take larger ones lane by lane.
INLINE Floats numbers_at(const int8_t* from) {
    const Shorts numbers = __builtin_convertvector(load<Bytes>(from), Shorts);
    return __builtin_convertvector(__builtin_convertvector(numbers, Ints), Floats);
}

// The lowest bits of each lane.
INLINE void store_numbers(int8_t* to, Dwords lanes) {
    const Shorts numbers = __builtin_convertvector((Ints)lanes, Shorts);
    store(to, __builtin_convertvector(numbers, Bytes));
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

// Scales of a tile from token `first` on, each n times, in lanes.
template <size_t n> INLINE Floats scales_at(const int8_t* tile, size_t head_dim, size_t first) {
    const int8_t* scales = tile + TILE * head_dim;
    if constexpr (n == 1) return load<Floats>(scales + first * sizeof(float));
    float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = load<float>(scales + (first + i / n) * sizeof(float));
    return load<Floats>(lanes);
}

// A tile of K as a cache of T has it.
template <class T> static NOINLINE void dequantize_keys(const int8_t* tile, size_t head_dim, T* to) {
    constexpr size_t n = Dot<T>::PER_DWORD;
    constexpr int VECTORS = TILE * n / LANES;
    Floats scales[VECTORS];
    for (int v = 0; v < VECTORS; v++) scales[v] = scales_at<n>(tile, head_dim, v * LANES / n);
    for (size_t d = 0; d < TILE * head_dim; d += TILE * n)
        for (int v = 0; v < VECTORS; v++)
            store_floats(to + d + v * LANES, numbers_at(tile + d + v * LANES) * scales[v]);
}

// The same of V.
template <class T> static NOINLINE void dequantize_values(const int8_t* tile, size_t head_dim, T* to) {
    constexpr size_t n = Dot<T>::PER_DWORD;
    for (size_t token = 0; token < TILE; token += n) {
        float scales[LANES];
        for (int i = 0; i < LANES; i++) scales[i] = load<float>(tile + TILE * head_dim + (token + i % n) * sizeof(float));
        const Floats scale = load<Floats>(scales);
        for (size_t d = token * head_dim; d < (token + n) * head_dim; d += LANES)
            store_floats(to + d, numbers_at(tile + d) * scale);
    }
}

// Room for dequantized tiles, unset; it begins a cache line. None is taken for a cache of T.
template <class T, class S> class Dequantized {
    struct alignas(64) Line {
        char bytes[64];
    };
    std::unique_ptr<Line[]> lines;

public:
    explicit Dequantized(size_t elements) {
        if constexpr (SCALE_SIZE<S> != 0) lines.reset(new Line[(elements * sizeof(T) + 63) / 64]);
    }
    T* get() { return reinterpret_cast<T*>(lines.get()); }
};
