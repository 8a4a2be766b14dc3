// Sixteen lanes of 32 bits at a time, on any CPU: the compiler turns its vector types into AVX-512, AVX2 or NEON.
//
// The kernels see memory as dwords. A dword holds one float32 or two neighbouring bfloat16 of a dot product, so that one loop
// serves both: `dot` multiplies and adds as many products per lane as a dword holds, always into float32.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;
typedef float F16 __attribute__((vector_size(4 * LANES)));
typedef uint32_t U16 __attribute__((vector_size(4 * LANES)));
typedef int32_t I16 __attribute__((vector_size(4 * LANES)));
typedef uint16_t H16 __attribute__((vector_size(2 * LANES)));

typedef float f32;
struct bf16 {
    uint16_t bits;
};

enum Dtype { FLOAT32 = 0, BFLOAT16 = 1 };  // as the callers number them

#define INLINE inline __attribute__((always_inline))

template <class V, class P> INLINE V load(const P* from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
}

template <class V, class P> INLINE void store(P* to, V value) { std::memcpy(to, &value, sizeof(V)); }

INLINE F16 splat(float value) { return F16{} + value; }
INLINE U16 splat(uint32_t value) { return U16{} + value; }
INLINE F16 as_float(U16 bits) { return (F16)bits; }
INLINE U16 as_bits(F16 value) { return (U16)value; }
INLINE F16 max(F16 a, F16 b) { return a > b ? a : b; }

// By halves, always in the same order.
INLINE float sum(F16 v) {
    float lanes[LANES];
    store(lanes, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

INLINE float largest(F16 v) {
    float lanes[LANES];
    store(lanes, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}

// The first `count` lanes of a, the rest of b.
INLINE F16 first_lanes(size_t count, F16 a, F16 b) {
    const U16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return lane < splat((uint32_t)count) ? a : b;
}

// ---- elements in memory <-> float lanes

INLINE F16 load_floats(const f32* from) { return load<F16>(from); }
INLINE F16 load_floats(const bf16* from) {
    return as_float(__builtin_convertvector(load<H16>(from), U16) << 16);
}

INLINE void store_floats(f32* to, F16 value) { store(to, value); }
INLINE void store_floats(bf16* to, F16 value) {
#if defined(__AVX512BF16__)
    store(to, _mm512_cvtneps_pbh((__m512)value));
#else
    const U16 bits = as_bits(value);
    const U16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    const U16 quiet = (bits >> 16) | 0x40;                           // a NaN must not be rounded into infinity
    store(to, __builtin_convertvector(value == value ? rounded : quiet, H16));
#endif
}

INLINE float to_float(f32 value) { return value; }
INLINE float to_float(bf16 value) {
    const uint32_t bits = (uint32_t)value.bits << 16;
    return load<float>(&bits);
}

INLINE void from_float(f32* to, float value) { *to = value; }
INLINE void from_float(bf16* to, float value) {
    bf16 all[LANES];
    store_floats(all, splat(value));
    *to = all[0];
}

// ---- dot products of dwords

template <class T> struct Dot;

template <> struct Dot<f32> {
    static constexpr int per_dword = 1;
    static INLINE F16 add(F16 sum, U16 b, U16 a) { return sum + as_float(b) * as_float(a); }  // contracted to an FMA
};

template <> struct Dot<bf16> {
    static constexpr int per_dword = 2;
    static INLINE F16 add(F16 sum, U16 b, U16 a) {
#if defined(__AVX512BF16__)
        return (F16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)a);
#else
        const U16 high = splat(0xffff0000u);
        sum += as_float(b << 16) * as_float(a << 16);
        return sum + as_float(b & high) * as_float(a & high);
#endif
    }
};

// exp(x) for x <= 0: x is split into a power of two and a rest within ln(2)/2 of zero, whose exponential is a polynomial.
// The relative error is below 2e-7; below -87 the result is 0.
INLINE F16 exp_negative(F16 x) {
    const F16 scaled = x * 1.44269504f;
    const F16 shifted = scaled + 12582912.0f;  // 1.5 * 2^23: the sum is rounded to an integer
    const F16 whole = shifted - 12582912.0f;
    const F16 rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln(2) in two parts
    F16 p = splat(1.9875691500e-4f);
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    const I16 power = (__builtin_convertvector(whole, I16) + 127) << 23;
    const F16 result = p * (F16)power;
    return x < -87.0f ? splat(0.0f) : result;
}
