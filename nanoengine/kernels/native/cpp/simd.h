// Vectors of 32-bit lanes, as wide as a register of the target: AVX-512, AVX2, NEON or SSE. The compiler's vector types are
// enough for that, as long as they are no wider: a wider one is stored in memory.
//
// The kernels see memory as dwords. A dword holds one float32 or two neighbouring bfloat16 of a dot product, so that one loop
// serves both.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Dwords __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

typedef float f32;
struct bf16 {
    uint16_t bits;
};

enum Dtype { FLOAT32 = 0, BFLOAT16 = 1 };  // as the callers number them

// f((T*)nullptr) for the type of a dtype.
template <class F> static void with_type(int dtype, F f) {
    if (dtype == FLOAT32) f((f32*)nullptr);
    else f((bf16*)nullptr);
}

#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))  // a loop that needs all registers: not beside what its callers keep in them

template <class V, class P> INLINE V load(const P* from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
}

template <class V, class P> INLINE void store(P* to, V value) { std::memcpy(to, &value, sizeof(V)); }

INLINE Floats splat(float value) { return value - Floats{}; }  // 0 + value would have to be computed: -0 becomes 0
INLINE Dwords splat(uint32_t value) { return Dwords{} + value; }
INLINE Floats as_float(Dwords bits) { return (Floats)bits; }
INLINE Dwords as_bits(Floats value) { return (Dwords)value; }
INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }
INLINE Ints max(Ints a, Ints b) { return a > b ? a : b; }

// a * b + c. Rounded once where the CPU can, and twice elsewhere: never by the compiler's choice, which differs from loop to loop
// (compiler.py forbids it), so that two loops that add up the same get the same.
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// factors[0] x^(N - 1) + ... + factors[N - 1] (Horner).
template <int N> INLINE Floats polynomial(Floats x, const float (&factors)[N]) {
    Floats sum = splat(factors[0]);
#pragma GCC unroll 16
    for (int i = 1; i < N; i++) sum = multiply_add(sum, x, splat(factors[i]));
    return sum;
}

// first, first + 1, ...
INLINE Ints count_from(int32_t first) {
    static constexpr int32_t LANE[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load<Ints>(LANE) + first;
}

// Lanes of a, and behind them those of b.
template <int... LANE> INLINE Dwords shuffled(Dwords a, Dwords b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, LANE...);
#else
    return __builtin_shuffle(a, b, Ints{LANE...});
#endif
}

// All lanes as one, by halves and always in the same order: lane i and lane i + LANES / 2, and so on.
template <int HALF = LANES / 2, class V, class Op> INLINE auto by_halves(V v, Op op) {
    const V both = [&]<int... LANE>(std::integer_sequence<int, LANE...>) {
        return op(v, (V)shuffled<(LANE ^ HALF)...>((Dwords)v, (Dwords)v));
    }(std::make_integer_sequence<int, LANES>());
    if constexpr (HALF > 1) return by_halves<HALF / 2>(both, op);
    else return both[0];
}

template <class V> INLINE auto sum(V v) {
    return by_halves(v, [](auto a, auto b) { return a + b; });
}

template <class V> INLINE auto largest(V v) {
    return by_halves(v, [](auto a, auto b) { return a > b ? a : b; });
}

// The first `count` lanes of a, the rest of b.
INLINE Floats first_lanes(size_t count, Floats a, Floats b) { return count_from(0) < (int32_t)count ? a : b; }

// ---- elements in memory <-> float lanes

INLINE Floats load_floats(const f32* from) { return load<Floats>(from); }
INLINE Floats load_floats(const bf16* from) {
    return as_float(__builtin_convertvector(load<Halves>(from), Dwords) << 16);
}

INLINE void store_floats(f32* to, Floats value) { store(to, value); }
INLINE void store_floats(bf16* to, Floats value) {
#if defined(__AVX512BF16__)
    store(to, _mm512_cvtneps_pbh((__m512)value));
#else
    const Dwords bits = as_bits(value);
    const Dwords rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    const Dwords quiet = (bits >> 16) | 0x40;                           // a NaN must not be rounded into infinity
    store(to, __builtin_convertvector(value == value ? rounded : quiet, Halves));
#endif
}

// Some lanes from memory, the rest 0; and to memory.
template <class T> INLINE Floats load_some(const T* from, size_t count) {
    if (count >= LANES) return load_floats(from);
    T all[LANES] = {};
    std::copy_n(from, count, all);
    return load_floats(all);
}
template <class T> INLINE void store_some(T* to, Floats value, size_t count) {
    if (count >= LANES) return store_floats(to, value);
    T all[LANES];
    store_floats(all, value);
    std::copy_n(all, count, to);
}

// f(i, LANES) for each whole vector of [0, count), and f(i, how many) for what is left.
template <class F> INLINE void for_vectors(size_t count, F f) {
    const size_t whole = count / LANES * LANES;
    for (size_t i = 0; i < whole; i += LANES) f(i, std::integral_constant<size_t, LANES>());
    if (whole < count) f(whole, count - whole);
}

// Rows with other columns beside them.
template <class T> struct Strided {
    const T* at;
    size_t stride;

    const T* row(size_t i) const { return at + i * stride; }
};

// A dword of each: the first rounded to bfloat16 in its lower half, the second in its upper half.
INLINE Dwords pair_of(Floats first, Floats second) {
#if defined(__AVX512BF16__)
    alignas(64) static constexpr uint16_t IN_TURN[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (Dwords)_mm512_permutexvar_epi16(load<__m512i>(IN_TURN), (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    bf16 lower[LANES], upper[LANES];
    store_floats(lower, first);
    store_floats(upper, second);
    return __builtin_convertvector(load<Halves>(lower), Dwords) | __builtin_convertvector(load<Halves>(upper), Dwords) << 16;
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

// ---- dot products

// sum += a * b, where b is a vector of dwords, and a the same dword for all lanes. A dword of b is used in STEPS products,
// each with a word of a: a's elements are `Factor`s. Sums are float32.
template <class T> struct Dot;

template <> struct Dot<f32> {
    typedef f32 Factor;
    static constexpr int PER_DWORD = 1, STEPS = 1;
    static INLINE Dwords part(Dwords b, int) { return b; }
    static INLINE Floats add(Floats sum, Dwords b, uint32_t a) {
        return multiply_add(as_float(b), as_float(splat(a)), sum);
    }
};

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(EMULATE_AMX)
template <> struct Dot<bf16> {
    typedef bf16 Factor;
    static constexpr int PER_DWORD = 2, STEPS = 1;
    static INLINE Dwords part(Dwords b, int) { return b; }
    static INLINE Floats add(Floats sum, Dwords b, uint32_t a) {
#if defined(__AVX512BF16__)
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)splat(a));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
        return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)b, (bfloat16x8_t)splat(a));
#else  // pairs, as the tiles read them
        sum = Dot<f32>::add(sum, b << 16, a << 16);
        return Dot<f32>::add(sum, b & 0xffff0000u, a & 0xffff0000u);
#endif
    }
};
#else
template <> struct Dot<bf16> {
    typedef f32 Factor;  // converted once, not for each product
    static constexpr int PER_DWORD = 2, STEPS = 2;
    static INLINE Dwords part(Dwords b, int step) {
        if (step == 0) return b << 16;
        b >>= 16;
#if defined(__x86_64__)
        asm("" : "+x"(b));  // or else both shifts become a mask, for which the kernels have no register left
#endif
        return b << 16;
    }
    static INLINE Floats add(Floats sum, Dwords b, uint32_t a) { return Dot<f32>::add(sum, b, a); }
};
#endif

// sums[m] += row * the factors at a + m * stride, for one row of b. If its vectors are fewer than the rows of sums, they stay in
// registers, and the factors come and go; otherwise the other way round.
template <class T, int M, int V>
static INLINE void add_products(Floats (&sums)[M][V], const uint32_t* a, size_t stride, auto row) {
    constexpr int STEPS = Dot<T>::STEPS;
    if constexpr (V < M) {
        Dwords vectors[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) vectors[v] = row(v);
#pragma GCC unroll 2
        for (int step = 0; step < STEPS; step++) {
            Dwords parts[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) parts[v] = Dot<T>::part(vectors[v], step);
#pragma GCC unroll 16
            for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) sums[m][v] = Dot<T>::add(sums[m][v], parts[v], a[m * stride + step]);
        }
    } else {
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const Dwords vector = row(v);
#pragma GCC unroll 2
            for (int step = 0; step < STEPS; step++) {
                const Dwords part = Dot<T>::part(vector, step);
#pragma GCC unroll 16
                for (int m = 0; m < M; m++) sums[m][v] = Dot<T>::add(sums[m][v], part, a[m * stride + step]);
            }
        }
    }
}

// Elements as others.
template <class T, class Out> INLINE void copy_elements(const T* from, size_t count, Out* to) {
    if constexpr (sizeof(T) == sizeof(Out)) {
        std::memcpy(to, from, count * sizeof(T));
    } else {
        for_vectors(count, [&](size_t i, auto some) { store_some(to + i, load_some(from + i, some), some); });
    }
}

// exp(x) for x <= 0: x is split into a power of two and a rest within ln(2)/2 of zero, whose exponential is a polynomial.
// The relative error is below 2e-7; below -87 the result is 0.
INLINE Floats exp_negative(Floats x) {
    static constexpr float FACTORS[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                        4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    const Floats shifted = multiply_add(x, splat(1.44269504f), splat(12582912.0f));  // 1.5 * 2^23: rounded to an integer
    const Floats whole = shifted - 12582912.0f;
    const Floats rest = multiply_add(whole, splat(2.12194440e-4f), multiply_add(whole, splat(-0.693359375f), x));  // ln(2) in two parts
    const Floats p = multiply_add(polynomial(rest, FACTORS), rest * rest, rest + 1.0f);
    const Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
    const Floats result = p * (Floats)power;
    return x < -87.0f ? splat(0.0f) : result;
}

// tanh(x): a polynomial near zero, where 1 - exp(-2x) would lose digits. The relative error is below 3e-7.
INLINE Floats tanh(Floats x) {
    static constexpr float FACTORS[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                                        -3.33332819422e-1f};
    const Floats square = x * x, size = max(x, -x);
    const Floats small = multiply_add(polynomial(square, FACTORS) * square, x, x);
    const Floats power = exp_negative(-2.0f * size), large = (1.0f - power) / (1.0f + power);
    return size < 0.625f ? small : x < 0.0f ? -large : large;
}
