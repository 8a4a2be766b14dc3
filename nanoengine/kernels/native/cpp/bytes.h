// Whole numbers of 8 bits: how floats become some, and how they are multiplied.
//
// Numbers in a row share a scale, absmax / 127. Or they have 16 bits, in two parts of 8: what the first one leaves is between
// -1/2 and 1/2 of its step, so that steps of the second, LOW times smaller, make bytes of it too: x = scale * (LOW * first +
// second). Sums of products are whole numbers, and no rounding.
#pragma once
#include <limits>
#include "simd.h"

typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));

// Bytes 0 and 2 of each dword, or 1 and 3, as words of 16 bits; all with a sign.
static INLINE Shorts words_of(Dwords bytes, int odd) { return (odd ? (Shorts)bytes : (Shorts)bytes << 8) >> 8; }

#if defined(__AVX512VNNI__)
static INLINE Ints dot_bytes(Ints sum, Dwords numbers, Dwords x) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)numbers, (__m512i)x);
}
#define DOT_OF_BYTES "vpdpbusd"
#elif defined(__AVXVNNI__)
static INLINE Ints dot_bytes(Ints sum, Dwords numbers, Dwords x) {
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)numbers, (__m256i)x);
}
#define DOT_OF_BYTES "vpdpbusd"
#elif defined(__ARM_FEATURE_DOTPROD)
static INLINE Ints dot_bytes(Ints sum, Dwords numbers, Dwords x) {
    return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)numbers, (int8x16_t)x);
}
#define DOT_OF_BYTES "sdot"
#elif !defined(__AVX2__)  // one by one
static INLINE Ints dot_bytes(Ints sum, Dwords numbers, Dwords x) {
#pragma GCC unroll 4
    for (int b = 0; b < 32; b += 8) sum += ((Ints)(numbers << (24 - b)) >> 24) * ((Ints)(x << (24 - b)) >> 24);
    return sum;
}
#define DOT_OF_BYTES "products of 32 bits"
#endif
#if defined(DOT_OF_BYTES)
#define HAS_DOT_OF_BYTES
#else
#define DOT_OF_BYTES "vpmaddubsw"
// AVX2, and AVX-512 without VNNI, multiply bytes without a sign with bytes that have one, to sums of 16 bits: of as many as
// cannot overflow.
#if defined(__AVX512F__)
static INLINE Shorts multiply_bytes(Dwords a, Dwords b) { return (Shorts)_mm512_maddubs_epi16((__m512i)a, (__m512i)b); }
static INLINE Ints multiply_words(Shorts a, Shorts b) { return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
static INLINE Dwords magnitudes(Dwords bytes) { return (Dwords)_mm512_abs_epi8((__m512i)bytes); }
static INLINE Dwords negate_where_negative(Dwords x, Dwords bytes) {
    return (Dwords)_mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)bytes), __m512i{}, (__m512i)x);
}
#else
static INLINE Shorts multiply_bytes(Dwords a, Dwords b) { return (Shorts)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); }
static INLINE Ints multiply_words(Shorts a, Shorts b) { return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
static INLINE Dwords magnitudes(Dwords bytes) { return (Dwords)_mm256_abs_epi8((__m256i)bytes); }
static INLINE Dwords negate_where_negative(Dwords x, Dwords bytes) {
    return (Dwords)_mm256_sign_epi8((__m256i)x, (__m256i)bytes);
}
#endif
static INLINE Ints add_pairs(Shorts sums) { return multiply_words(sums, Shorts{} + 1); }
#endif

// vpdpbusd multiplies bytes without a sign with bytes that have one: numbers of a cache are as much larger as makes them so.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr uint32_t BIAS = 128;
#else
constexpr uint32_t BIAS = 0;
#endif

// Sums are whole numbers in the lanes of floats (simd.h): `join` makes floats of them.
template <> struct Dot<int8_t> {
    typedef int8_t Factor;
    static constexpr int PER_DWORD = 4, STEPS = 1;
    static INLINE Dwords part(Dwords b, int) { return b ^ splat(BIAS * 0x01010101u); }
    static INLINE Floats add(Floats sum, Dwords b, uint32_t a) {
#if defined(HAS_DOT_OF_BYTES)
        return (Floats)dot_bytes((Ints)sum, b, splat(a));
#else
        return (Floats)((Ints)sum + add_pairs(multiply_bytes(magnitudes(b), negate_where_negative(splat(a), b))));
#endif
    }
};

constexpr int LOW = 254;  // 256 numbers of 8 bits, without a sign, * 127 * (LOW + 1) < 2^31

// What bytes stand for: so much each; and what they add up to.
struct Rounded {
    float scale;
    int32_t total;
};

constexpr float NOTHING = 0x1p-100f;      // a row of no more than that is rounded to zeros: 127 / high could be infinite
constexpr int32_t INFINITE = 0x7f800000;  // its bits: magnitudes that are no numbers have higher ones

typedef int8_t SignedBytes __attribute__((vector_size(LANES)));

// x [count] as bytes; count is a multiple of LANES. A row with a number that is not finite has the scale NaN, so that all sums
// that it is part of are.
template <int PARTS> static INLINE Rounded round_to_bytes(const float* x, size_t count, int8_t* const (&to)[PARTS]) {
    Ints highest{}, total{};
    for (size_t i = 0; i < count; i += LANES) highest = max(highest, (Ints)(as_bits(load<Floats>(x + i)) & 0x7fffffff));
    const int32_t bits = largest(highest);
    const float high = load<float>(&bits);
    const bool sound = bits < INFINITE && high > NOTHING;
    const float inverse = sound ? 127.0f / high : 0.0f;
    for (size_t i = 0; i < count; i += LANES) {
        Floats rest = sound ? load<Floats>(x + i) * inverse : Floats{};
        Ints number{};
        for (int part = 0; part < PARTS; part++) {
            const Floats shifted = rest + 12582912.0f;  // 1.5 * 2^23: rounds
            const Ints rounded = (Ints)as_bits(shifted) - 0x4b400000;
            store(to[part] + i, __builtin_convertvector(rounded, SignedBytes));
            number = number * LOW + rounded;
            rest = (rest - (shifted - 12582912.0f)) * float(LOW);
        }
        total += number;
    }
    return {bits < INFINITE ? high / (PARTS == 1 ? 127.0f : 127.0f * LOW) : std::numeric_limits<float>::quiet_NaN(), sum(total)};
}

// out[i] = what the sums of both parts' products stand for, but for the scale of the numbers that were multiplied.
static INLINE void join(const float* first, const float* second, size_t count, Rounded factors, float* out) {
    for (size_t i = 0; i < count; i += LANES) {
        const Ints total = load<Ints>(first + i) * LOW + load<Ints>(second + i) - (int32_t)BIAS * factors.total;
        store(out + i, __builtin_convertvector(total, Floats) * factors.scale);
    }
}
