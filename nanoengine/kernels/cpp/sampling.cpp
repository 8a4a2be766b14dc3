// Drawing a token per row by the Gumbel-max trick: the highest of logit + noise, where the noise is a hash of (key, token id).
//
// The same numbers as kernels/gumbel.py makes them, up to the rounding of the logarithms, in one pass over the logits.
#include <algorithm>
#include <vector>
#include "simd.h"

typedef uint64_t Longs __attribute__((vector_size(4 * LANES)));

static INLINE Longs mix(Longs x) {  // of SplitMix64 (Steele, Lea, Flood, 2014)
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Numbers in (0, 1) of 40 bits, for token ids first, first + 1, ...
static INLINE Floats uniform(uint64_t key, uint64_t first) {
    const uint64_t gamma = 0x9e3779b97f4a7c15u;
    const Longs number = (Longs)(Ints)count_from(0);  // a lane of 64 bits holds the numbers of two lanes of 32
    const Longs even = (number & 0xffffffffu) + (first + 1), odd = (number >> 32) + (first + 1);
    const Longs left = mix(even * gamma + key) >> 24, right = mix(odd * gamma + key) >> 24;
    // Both together again, 20 bits at a time: these are exact as floats, and their sum is rounded once.
    const Ints high = (Ints)(left >> 20 | right >> 20 << 32), low = (Ints)((left & 0xfffff) | (right & 0xfffff) << 32);
    const Floats whole = __builtin_convertvector(high, Floats) * 0x1p20f + __builtin_convertvector(low, Floats);
    const Floats u = (whole + 0.5f) * 0x1p-40f;
    return u < 1.0f - 0x1p-24f ? u : splat(1.0f - 0x1p-24f);
}

// ln(x) of positive normal numbers: an exponent and a polynomial on [sqrt(1/2), sqrt(2)) (Cephes; error below 2e-7).
static INLINE Floats logarithm(Floats x) {
    const Ints bits = (Ints)x - 0x3f3504f3;  // of sqrt(1/2)
    const Floats exponent = __builtin_convertvector(bits >> 23, Floats);
    const Floats m = (Floats)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
    Floats p = splat(7.0376836292e-2f);
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    const Floats square = m * m;
    return m + (p * m * square - 0.5f * square) + exponent * 0.693147181f;
}

static INLINE Floats gumbel(Floats u) {
    const Floats rest = 1.0f - u, rounded = 1.0f - rest;
    const Floats exact = -logarithm(rest) * (u / rounded);  // -ln(1 - u), without the rounding of 1 - u
    return -logarithm(rounded == 0.0f ? u : exact);
}

struct Best {
    float value;
    int64_t token;
    bool operator<(const Best& other) const { return value < other.value || (value == other.value && token > other.token); }
};

constexpr size_t CHUNK = 1024;  // tokens whose noisy logits are in the first-level cache

// noisy[i] = logit + noise of token first + i, for `count` tokens; -inf up to the end of the last vector.
static void add_noise(const float* logits, uint64_t key, size_t first, size_t count, float* noisy) {
    for (size_t i = 0; i < count; i += LANES) store(noisy + i, uniform(key, first + i));
    for (size_t i = 0; i < count; i += LANES) store(noisy + i, gumbel(load<Floats>(noisy + i)));
    for (size_t i = 0; i < count; i++) noisy[i] += logits[i];
    for (size_t i = count; i % LANES; i++) noisy[i] = -__builtin_inff();
}

// The best of the tokens [start, end) of a row.
static Best best_of(const float* logits, uint64_t key, size_t start, size_t end) {
    alignas(64) float noisy[CHUNK];
    Floats best = splat(-__builtin_inff());
    Ints found = {};
    for (size_t first = start; first < end; first += CHUNK) {
        const size_t count = std::min(CHUNK, end - first);
        add_noise(logits + first, key, first, count, noisy);
        for (size_t i = 0; i < count; i += LANES) {
            const Floats value = load<Floats>(noisy + i);
            const Ints better = value > best;
            best = better ? value : best;
            found = better ? count_from((int32_t)(first + i)) : found;
        }
    }
    Best all{best[0], found[0]};
    for (int i = 1; i < LANES; i++) all = std::max(all, Best{best[i], found[i]});
    return all;
}

constexpr size_t PART = 1 << 14;  // tokens: one row is work for several threads

// tokens[row] = the token drawn from softmax(logits[row][0..count)).
extern "C" void draw_tokens(const float* logits, const int64_t* keys, int64_t* tokens, size_t rows, size_t count) {
    const size_t parts = (count + PART - 1) / PART;
    std::vector<Best> bests(rows * parts);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < rows * parts; i++) {
        const size_t row = i / parts, start = i % parts * PART;
        bests[i] = best_of(logits + row * count, (uint64_t)keys[row], start, std::min(count, start + PART));
    }
    for (size_t row = 0; row < rows; row++)
        tokens[row] = std::max_element(bests.begin() + row * parts, bests.begin() + (row + 1) * parts)->token;
}
