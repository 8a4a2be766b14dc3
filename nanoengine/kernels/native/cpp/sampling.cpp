// Drawing a token per row by the Gumbel-max trick: the highest of logit + noise, where the noise is a hash of (key, token id):
// the same numbers as core/sampling.py makes them, up to the rounding of the logarithms, in one pass over the logits. And what
// probabilities are divided by. A row is cut at multiples of PART, whatever there is beside it and however long it is.
#include <algorithm>
#include <cmath>
#include <vector>
#include "simd.h"
#include "team.h"

namespace {

typedef uint64_t Longs __attribute__((vector_size(4 * LANES)));

constexpr uint64_t GAMMA = 0x9e3779b97f4a7c15u;

template <class L> INLINE L mix(L x) {  // of SplitMix64 (Steele, Lea, Flood, 2014)
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Numbers in (0, 1) of 40 bits, for token ids first, first + 1, ...
INLINE Floats uniform(uint64_t key, uint64_t first) {
    const Longs number = (Longs)(Ints)count_from(0);  // a lane of 64 bits holds the numbers of two lanes of 32
    const Longs even = (number & 0xffffffffu) + (first + 1), odd = (number >> 32) + (first + 1);
    const Longs left = mix(even * GAMMA + key) >> 24, right = mix(odd * GAMMA + key) >> 24;
    // The sum of both, 20 bits at a time: these are exact as floats, and their sum is rounded once.
    const Ints high = (Ints)(left >> 20 | right >> 20 << 32), low = (Ints)((left & 0xfffff) | (right & 0xfffff) << 32);
    const Floats whole = __builtin_convertvector(high, Floats) * 0x1p20f + __builtin_convertvector(low, Floats);
    const Floats u = (whole + 0.5f) * 0x1p-40f;
    return u < 1.0f - 0x1p-24f ? u : splat(1.0f - 0x1p-24f);
}

// ln(x) of positive normal numbers: an exponent and a polynomial on [sqrt(1/2), sqrt(2)) (Cephes; error below 2e-7).
INLINE Floats logarithm(Floats x) {
    const Ints bits = (Ints)x - 0x3f3504f3;  // of sqrt(1/2)
    const Floats exponent = __builtin_convertvector(bits >> 23, Floats);
    const Floats m = (Floats)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
    static constexpr float FACTORS[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,  -1.2420140846e-1f, 1.4249322787e-1f,
                                        -1.6668057665e-1f, 2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
    const Floats p = polynomial(m, FACTORS);
    const Floats square = m * m;
    return m + (p * m * square - 0.5f * square) + exponent * 0.693147181f;
}

INLINE Floats gumbel(Floats u) {
    const Floats rest = 1.0f - u, rounded = 1.0f - rest;
    const Floats exact = -logarithm(rest) * (u / rounded);  // -ln(1 - u), without the rounding of 1 - u
    return -logarithm(rounded == 0.0f ? u : exact);
}

constexpr float INFINITE = __builtin_inff();

// Of a row of `count` logits, those from i on; behind the end -inf.
INLINE Floats logits_at(const float* logits, size_t i, size_t count) {
    if (i + LANES <= count) return load<Floats>(logits + i);
    return first_lanes(count - i, load_some(logits + i, count - i), splat(-INFINITE));
}

struct Best {
    float value = -INFINITE;
    int64_t token = 0;
    bool broken = false, left = false;  // whether a logit is NaN or infinite; whether one is not -inf

    Best and_later(const Best& other) const {
        Best all = other.value > value ? other : *this;
        all.broken = broken || other.broken, all.left = left || other.left;
        return all;
    }
};

constexpr size_t CHUNK = 1024;  // tokens whose noise is in the first-level cache

// Of tokens first, first + 1, ...; up to the end of the last vector.
void make_noise(uint64_t key, size_t first, size_t count, float* noise) {
    for (size_t i = 0; i < count; i += LANES) store(noise + i, uniform(key, first + i));
    for (size_t i = 0; i < count; i += LANES) store(noise + i, gumbel(load<Floats>(noise + i)));
}

// The best of the tokens [start, end) of a row; of equal ones the first.
Best best_of(const float* logits, float temperature, uint64_t key, size_t start, size_t end) {
    alignas(64) float noise[CHUNK];
    Floats best = splat(-INFINITE);
    Ints tokens = count_from((int32_t)start), broken = {}, left = {};
    for (size_t first = start; first < end; first += CHUNK) {
        const size_t count = std::min(CHUNK, end - first);
        if (temperature > 0) make_noise(key, first, count, noise);
        for (size_t i = 0; i < count; i += LANES) {
            Floats value = logits_at(logits + first, i, count);
            broken |= ~(Ints)(value < INFINITE), left |= (Ints)(value > -INFINITE);
            if (temperature > 0) value = value / temperature + load<Floats>(noise + i);
            const Ints better = value > best;
            best = better ? value : best;
            tokens = better ? count_from((int32_t)(first + i)) : tokens;
        }
    }
    Best all;
    for (int i = 0; i < LANES; i++) {
        const bool better = best[i] > all.value || (best[i] == all.value && tokens[i] < all.token);
        if (!i || better) all.value = best[i], all.token = tokens[i];
        all.broken |= broken[i] != 0, all.left |= left[i] != 0;
    }
    return all;
}

constexpr size_t PART = 1 << 14;  // tokens: one row is work for several threads
enum { NOT_FINITE = -1, NONE_LEFT = -2 };  // as sampling.py has them

// The largest of some logits, and the sum of exp(logit - largest).
void sum_exp(const float* logits, size_t count, float& most, float& total) {
    Floats highest = splat(-INFINITE), sums{};
    for (size_t i = 0; i < count; i += LANES) highest = max(highest, logits_at(logits, i, count));
    most = largest(highest);
    for (size_t i = 0; i < count; i += LANES) sums += exp_negative(logits_at(logits, i, count) - most);
    total = most == -INFINITE ? 0.0f : sum(sums);
}

}  // namespace

extern "C" {

// tokens[row] = the token drawn from softmax(logits[row][0..count) / temperatures[row]); the likeliest where that is 0.
// NOT_FINITE if a logit is NaN or infinite, NONE_LEFT if all are -inf.
void draw_tokens(const float* logits, const int64_t* keys, const float* temperatures, int64_t* tokens, size_t rows, size_t count) {
    const size_t parts = (count + PART - 1) / PART;
    std::vector<Best> bests(rows * parts);
    for_each(rows * parts, rows * parts <= 1, [&](size_t i) {
        const size_t row = i / parts, start = i % parts * PART;
        bests[i] = best_of(logits + row * count, temperatures[row], (uint64_t)keys[row], start, std::min(count, start + PART));
    });
    for (size_t row = 0; row < rows; row++) {
        Best all;
        for (size_t i = 0; i < parts; i++) all = all.and_later(bests[row * parts + i]);
        tokens[row] = all.broken ? NOT_FINITE : all.left ? all.token : NONE_LEFT;
    }
}

// tokens[row] as Kernels.choose_tokens has it, also in last_tokens[entries[row]]; null: last_tokens. The columns of the
// sampling table are [entries of the table]. Nothing is done, and 0 is the result, if tokens of a row are filtered before one
// is drawn.
int choose_tokens(const float* logits, const int32_t* entries, const int32_t* positions, const float* temperature, const int32_t* top_k,
                  const float* top_p, const float* min_p, const int64_t* seeds, float least_temperature, int64_t* tokens,
                  int64_t* last_tokens, size_t rows, size_t count) {
    std::vector<int64_t> keys(rows);
    std::vector<float> temperatures(rows);
    for (size_t row = 0; row < rows; row++) {
        const size_t entry = entries[row];
        const bool is_random = temperature[entry] > 0;
        if (is_random && (top_k[entry] > 0 || top_p[entry] < 1 || min_p[entry] > 0)) return 0;
        keys[row] = (int64_t)mix((uint64_t)seeds[entry] + ((uint64_t)positions[row] + 1) * GAMMA);
        temperatures[row] = is_random ? std::max(temperature[entry], least_temperature) : 0.0f;
    }
    draw_tokens(logits, keys.data(), temperatures.data(), tokens, rows, count);
    for (size_t row = 0; last_tokens && row < rows; row++) last_tokens[entries[row]] = tokens[row];
    return 1;
}

// out[row] = ln(sum of exp(logits[row][0..count))). Logits of -inf at the end of a row change nothing.
void log_sum_exp(const float* logits, float* out, size_t rows, size_t count) {
    const size_t parts = (count + PART - 1) / PART;
    std::vector<float> most(rows * parts), totals(rows * parts);
    for_each(rows * parts, rows * parts <= 1, [&](size_t i) {
        const size_t start = i % parts * PART;
        sum_exp(logits + i / parts * count + start, std::min(PART, count - start), most[i], totals[i]);
    });
    for (size_t row = 0; row < rows; row++) {
        const float* maxima = most.data() + row * parts;
        const float highest = *std::max_element(maxima, maxima + parts);
        float total = 0;
        for (size_t i = 0; i < parts; i++) total += totals[row * parts + i] * (maxima[i] == highest ? 1.0f : std::exp(maxima[i] - highest));
        out[row] = highest + std::log(total);
    }
}
}
