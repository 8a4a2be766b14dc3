// How attention adds up: one rule for all kernels, so that a token gets the same bits from each of them, alone and in any batch.
//
// Tokens are cut into parts of PART, at multiples of PART from the start of the sequence. In each part the weights of a query are
// exp(score - the part's largest score), rounded as values are, and all sums begin at zero. Parts are then merged in order with a
// running maximum ("online softmax", Milakov and Gimelshein, 2018). A sink is merged before the first part. Tokens that a
// query does not see have the weight 0, which changes no sum: so parts may be cut short where nobody sees more, in steps of
// STEP.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include "attention_spec.h"
#include "kv_int8.h"
#include "product.h"

constexpr size_t PART = 256;  // tokens

template <class T> const uint32_t* dwords(const T* elements) { return reinterpret_cast<const uint32_t*>(elements); }

// Rows of factors for a row of queries or of weights, and what they are to be multiplied with: bytes of a cache want both
// parts of whole numbers, each a row.
template <class S> constexpr int PARTS = std::is_same_v<S, int8_t> ? 2 : 1;

// Tokens whose weighted values are added up at once: a product in tiles of AMX adds up what a tile holds before it adds that
// to a sum.
template <class T> constexpr size_t STEP = IN_TILES<T> ? AMX_DEPTH * Dot<T>::PER_DWORD : TILE;

// What a query has made of some tokens: its largest score, and the sum of its weights.
struct Softmax {
    float most, total;
};

static INLINE Softmax before_parts(const float* sink) {
    return sink ? Softmax{*sink, 1.0f} : Softmax{-std::numeric_limits<float>::infinity(), 0.0f};
}

// Scores of a query become its weights for the tokens of a part; it sees [hidden, seen) of them, at least one. Scores, and
// weights up to `count`, are overwritten. The first token is a multiple of STEP, `count` of LANES.
template <class Factor>
static NOINLINE Softmax softmax_part(float* scores, size_t hidden, size_t seen, size_t count, const AttentionSpec& spec, Factor* weights) {
    const size_t first = hidden / LANES * LANES, last = (seen + LANES - 1) / LANES * LANES;
    for (size_t t = first; t < last; t += LANES) store(scores + t, load<Floats>(scores + t) * spec.scale);
    if (spec.soft_cap) spec.cap(scores + first, last - first);
    std::fill(scores + first, scores + hidden, -std::numeric_limits<float>::infinity());
    std::fill(scores + seen, scores + last, -std::numeric_limits<float>::infinity());
    Floats highest = load<Floats>(scores + first), total{};
    for (size_t t = first + LANES; t < last; t += LANES) highest = max(highest, load<Floats>(scores + t));
    const float most = largest(highest);
    for (size_t t = first; t < last; t += LANES) {
        const Floats weight = exp_negative(load<Floats>(scores + t) - most);
        total += weight;  // token t in lane t % LANES
        store_floats(weights + t, weight);
    }
    std::fill(weights, weights + first, Factor{});
    std::fill(weights + last, weights + count, Factor{});
    return {most, sum(total)};
}

// A query [dim] as the factors of row `row`.
template <class T, class S> static INLINE Rounded take_query(const T* query, size_t dim, Factors<S>& queries, size_t row) {
    if constexpr (PARTS<S> == 1) {
        copy_elements(query, dim, queries.row(row));
        return {};
    } else {
        alignas(64) float elements[MAX_HEAD_DIM];
        copy_elements(query, dim, elements);
        return round_to_bytes<2>(elements, dim, {queries.row(2 * row), queries.row(2 * row + 1)});
    }
}

// Scales of some tokens of a part, as a cache of bytes has them.
struct TokenScales {
    alignas(64) float keys[PART], values[PART];
};

// The same as `softmax_part` for sums of both parts of a query, in rows `scores` and `low_scores`; weights times the scales of V become
// both parts of factors.
static NOINLINE Softmax softmax_bytes(float* scores, const float* low_scores, Rounded query, const TokenScales& scales, size_t hidden, size_t seen, size_t count,
                                    const AttentionSpec& spec, int8_t* const (&factors)[2], Rounded& rounded) {
    alignas(64) float weights[PART];
    join(scores, low_scores, count, query, scores);
    for (size_t t = 0; t < count; t += LANES) store(scores + t, load<Floats>(scores + t) * load<Floats>(scales.keys + t));
    const Softmax softmax = softmax_part(scores, hidden, seen, count, spec, weights);
    for (size_t t = 0; t < count; t += LANES) store(weights + t, load<Floats>(weights + t) * load<Floats>(scales.values + t));
    std::fill(weights, weights + hidden, 0.0f);  // their scales may be NaN
    std::fill(weights + seen, weights + count, 0.0f);
    rounded = round_to_bytes<2>(weights, count, factors);
    return softmax;
}

// What some rows (a row is one query head of one token) make of a part, unset.
template <class S> struct PartRows {
    Factors<f32> scores;
    Factors<S> weights;
    std::unique_ptr<Rounded[]> rounded;  // what weights were rounded to, for a cache of bytes
    TokenScales scales;                  // the same
    std::unique_ptr<Softmax[]> softmaxes;
    std::unique_ptr<S[]> values;  // copied V

    PartRows(size_t rows, size_t value_count)
        : scores(rows * PARTS<S>), weights(rows * PARTS<S>), rounded(PARTS<S> == 2 ? new Rounded[rows] : nullptr),
          softmaxes(new Softmax[rows]), values(value_count ? new S[value_count] : nullptr) {}

    // Scores of row `row` become its weights, as `softmax_part` has it; `query` is what its query was rounded to.
    void softmax_row(size_t row, Rounded query, size_t hidden, size_t seen, size_t count, const AttentionSpec& spec) {
        if constexpr (PARTS<S> == 1) softmaxes[row] = softmax_part(scores.row(row), hidden, seen, count, spec, weights.row(row));
        else
            softmaxes[row] = softmax_bytes(scores.row(2 * row), scores.row(2 * row + 1), query, scales, hidden, seen, count, spec,
                                         {weights.row(2 * row), weights.row(2 * row + 1)}, rounded[row]);
    }

    // Tokens from `t` on are those of these tiles of K and V.
    void take_scales(const S* k_tile, const S* v_tile, size_t head_dim, size_t t) {
        if constexpr (PARTS<S> == 2) copy_scales(k_tile, head_dim, scales.keys + t), copy_scales(v_tile, head_dim, scales.values + t);
    }
};

// V of a tile with tokens from `t` on, with zeros for those outside of [hidden, seen): a weight of 0 does not make up for NaN.
template <class S> void copy_seen(const S* tile, size_t head_dim, size_t t, size_t hidden, size_t seen, S* to) {
    constexpr size_t n = Dot<S>::PER_DWORD;
    std::copy_n(tile, TILE * head_dim, to);
    for (size_t i = 0; i < TILE; i++)
        if (t + i < hidden || t + i >= seen)
            for (size_t d = 0; d < head_dim; d++) to[(i / n * head_dim + d) * n + i % n] = S{};
}

// How much counts of the sums so far, and how much of those of a part.
struct Rescaling {
    float before, part;
};

static INLINE Rescaling merge(Softmax& all, Softmax part) {
    const float most = part.most > all.most ? part.most : all.most;
    const Rescaling rescaling{std::exp(all.most - most), std::exp(part.most - most)};
    all = {most, all.total * rescaling.before + part.total * rescaling.part};
    return rescaling;
}

static INLINE Floats merged(Floats sums, Floats part, Rescaling rescaling) {
    return multiply_add(sums, splat(rescaling.before), part * rescaling.part);
}
