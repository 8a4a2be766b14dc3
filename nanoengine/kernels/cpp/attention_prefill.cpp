// Causal attention of several new tokens per sequence over its K/V blocks, those of this step included.
//
// Queries are taken in blocks of about QUERY_ROWS rows (a row is one query head of one token), keys in chunks of CHUNK tokens
// with a running maximum ("flash attention", Dao et al., 2022): scores, their exponentials and the weighted values of a chunk
// stay in the second-level cache. The query heads that share a K/V head are rows of the same product. Tiles that no query of a block
// sees are left out. Chunks end where they would without that, so that a token does not depend on the queries beside it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>
#include "attention_spec.h"
#include "kv_int8.h"
#include "product.h"

constexpr size_t QUERY_ROWS = 96;
constexpr size_t CHUNK = 256;  // tokens

struct Work {
    size_t sequence, head, first, last;  // queries [first, last) of the sequence's new tokens
};

static_assert(CHUNK <= MAX_DEPTH && MAX_HEAD_DIM <= MAX_DEPTH, "a row of factors is at most one word for each token or dimension");

// What one piece of work needs, unset.
template <class T, class S> struct Scratch {
    Factors<T> queries, weights;
    std::unique_ptr<T[]> values;
    Dequantized<T, S> keys;
    std::unique_ptr<float[]> scores, sums, most, totals;

    Scratch(size_t rows, size_t dim)
        : queries(rows), weights(rows), values(new T[CHUNK * dim]), keys(CHUNK * dim), scores(new float[rows * CHUNK]),
          sums(new float[rows * dim]), most(new float[rows]), totals(new float[rows]) {}
};

template <class T> static const uint32_t* dwords(const T* elements) { return reinterpret_cast<const uint32_t*>(elements); }

// Scores of one row as they count: scaled and capped, the first `hidden` ones none.
static void finish_scores(float* scores, size_t hidden, size_t count, const AttentionSpec& spec) {
    for (size_t t = 0; t < count; t += LANES) store(scores + t, load<Floats>(scores + t) * spec.scale);
    if (spec.soft_cap) spec.cap(scores, count);
    std::fill_n(scores, hidden, -std::numeric_limits<float>::infinity());
}

// Scores of one row become weights: exp(score - maximum) for those that the row sees, 0 for the rest. What was summed so far
// is scaled to the new maximum.
template <class Factor>
static void softmax_row(const float* scores, size_t visible, size_t count, float scale, Factor* weights, float& most, float& total,
                        float* sums, size_t dim) {
    const Floats unseen = splat(-std::numeric_limits<float>::infinity());
    Floats highs = splat(most);
    auto score = [&](size_t t) {
        const Floats scaled = load<Floats>(scores + t) * scale;
        return t + LANES <= visible ? scaled : first_lanes(visible - t, scaled, unseen);
    };
    for (size_t t = 0; t < visible; t += LANES) highs = max(highs, score(t));
    const float highest = largest(highs);
    if (highest > most) {
        const float factor = std::exp(most - highest);
        for (size_t d = 0; d < dim; d++) sums[d] *= factor;
        total *= factor;
        most = highest;
    }
    Floats added{};
    for (size_t t = 0; t < count; t += LANES) {
        const Floats weight = t < visible ? exp_negative(score(t) - highest) : Floats{};
        added += weight;
        store_floats(weights + t, weight);
    }
    total += sum(added);
}

template <class T, class S>
static void attend(const T* q, const S* k_cache, const S* v_cache, const int32_t* block_table, const Work& work, size_t history,
                   size_t q_heads, KVTiles kv, const AttentionSpec& spec, Scratch<T, S>& scratch, T* out) {
    constexpr size_t n = Dot<T>::PER_DWORD;
    const size_t group = q_heads / kv.heads, dim = kv.head_dim, rows = (work.last - work.first) * group;
    const size_t begin = spec.first_seen(history + work.first), end = history + work.last;  // tokens that the queries see
    for (size_t row = 0; row < rows; row++)
        copy_elements(q + ((work.first + row / group) * q_heads + work.head * group + row % group) * dim, dim,
                        scratch.queries.row(row));
    std::fill_n(scratch.sums.get(), rows * dim, 0.0f);
    for (size_t row = 0; row < rows; row++) {  // a sink is the first score
        scratch.most[row] = spec.sinks ? spec.sinks[work.head * group + row % group] : -std::numeric_limits<float>::infinity();
        scratch.totals[row] = spec.sinks ? 1.0f : 0.0f;
    }

    for (size_t start = begin / TILE * TILE, next; start < end; start = next) {
        next = (start / CHUNK + 1) * CHUNK;
        const size_t tokens = std::min(next, end) - start, tiles = (tokens + TILE - 1) / TILE;
        const size_t count = (tokens + COLUMNS - 1) / COLUMNS * COLUMNS;
        auto tile = [&](const S* cache, size_t i) {
            return cache + kv.tile(block_table, start + std::min(i, tiles - 1) * TILE, work.head);
        };
        auto key_tile = [&](size_t i) {
            if constexpr (std::is_same_v<S, T>) return tile(k_cache, i);
            else return scratch.keys.get() + std::min(i, tiles - 1) * TILE * dim;
        };
        if constexpr (!std::is_same_v<S, T>)
            for (size_t i = 0; i < tiles; i++) dequantize_keys(tile(k_cache, i), dim, scratch.keys.get() + i * TILE * dim);
        for (size_t i = 0; i < tiles; i += COLUMNS / TILE) {
            Columns keys;
            for (size_t group = 0; group < COLUMNS / TILE; group++) keys.groups[group] = dwords(key_tile(i + group));
            product<T, FROM_CACHE>((int)rows, scratch.queries.row(0), keys, TILE, dim / n, scratch.scores.get() + i * TILE, CHUNK,
                                   false);
        }
        for (size_t row = 0; row < rows; row++) {
            const size_t position = history + work.first + row / group, first = spec.first_seen(position);
            if (position < start || first >= start + tokens) {
                std::fill_n(scratch.weights.row(row), count, typename Dot<T>::Factor{});
                continue;
            }
            float* scores = scratch.scores.get() + row * CHUNK;
            const size_t hidden = first > start ? first - start : 0;
            const bool finished = hidden || spec.soft_cap;
            if (finished) finish_scores(scores, hidden, count, spec);
            softmax_row(scores, std::min(position + 1 - start, tokens), count, finished ? 1.0f : spec.scale,
                        scratch.weights.row(row), scratch.most[row], scratch.totals[row], scratch.sums.get() + row * dim, dim);
        }
        // Values in one piece, zero where nothing was written or is seen: a weight of 0 does not make up for NaN.
        for (size_t i = 0; i < tiles; i++) {
            T* to = scratch.values.get() + i * TILE * dim;
            if constexpr (std::is_same_v<S, T>) std::copy_n(tile(v_cache, i), TILE * dim, to);
            else dequantize_values(tile(v_cache, i), dim, to);
        }
        auto clear = [&](size_t from, size_t to) {
            for (size_t t = from; t < to; t++)
                for (size_t d = 0; d < dim; d++) scratch.values[(t / n * dim + d) * n + t % n] = T{};
        };
        clear(0, begin > start ? begin - start : 0);
        clear(tokens, count);
        for (size_t d = 0; d < dim; d += COLUMNS)
            product<T, FROM_CACHE>((int)rows, scratch.weights.row(0), columns_at(dwords(scratch.values.get()) + d), dim, count / n,
                                   scratch.sums.get() + d, dim, true);
    }
    for (size_t row = 0; row < rows; row++) {
        T* to = out + ((work.first + row / group) * q_heads + work.head * group + row % group) * dim;
        const float* sums = scratch.sums.get() + row * dim;
        for (size_t d = 0; d < dim; d += LANES) store_floats(to + d, load<Floats>(sums + d) / scratch.totals[row]);
    }
}

template <class T, class S>
static void prefill(const T* q, const S* k_cache, const S* v_cache, const int32_t* block_tables, size_t table_stride,
                    const int32_t* query_start, const int32_t* seq_lens, T* out, size_t sequences, size_t q_heads, KVTiles kv,
                    const AttentionSpec& spec) {
    const size_t group = q_heads / kv.heads, queries = std::max<size_t>(1, QUERY_ROWS / group);
    std::vector<Work> works;
    for (size_t sequence = 0; sequence < sequences; sequence++) {
        const size_t count = query_start[sequence + 1] - query_start[sequence];
        for (size_t first = 0; first < count; first += queries)
            for (size_t head = 0; head < kv.heads; head++)
                works.push_back({sequence, head, first, std::min(count, first + queries)});
    }
    // The longest first: the last ones to be taken should be short.
    auto history = [&](size_t sequence) { return seq_lens[sequence] - (query_start[sequence + 1] - query_start[sequence]); };
    auto sees = [&](const Work& work) {
        return history(work.sequence) + work.last - spec.first_seen(history(work.sequence) + work.first);
    };
    std::stable_sort(works.begin(), works.end(), [&](const Work& a, const Work& b) { return sees(a) > sees(b); });
#pragma omp parallel
    {
        Scratch<T, S> scratch(queries * group, kv.head_dim);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < works.size(); i++) {
            const size_t sequence = works[i].sequence, start = query_start[sequence] * q_heads * kv.head_dim;
            attend(q + start, k_cache, v_cache, block_tables + sequence * table_stride, works[i], history(sequence), q_heads, kv,
                   spec, scratch, out + start);
        }
    }
}

// q, out [tokens][q_heads][head_dim]; query_start [sequences + 1]; block_tables [sequences][table_stride].
extern "C" void attention_prefill(int dtype, int cache_dtype, const void* q, const void* k_cache, const void* v_cache, const int32_t* block_tables,
                                  size_t table_stride, const int32_t* query_start, const int32_t* seq_lens, void* out,
                                  size_t sequences, size_t q_heads, size_t kv_heads, size_t head_dim, size_t block_size,
                                  size_t block_stride, float scale, float soft_cap, size_t window, size_t chunk,
                                  const float* sinks) {
    const AttentionSpec spec{scale, soft_cap, window, chunk, sinks};
    with_types(dtype, cache_dtype, [&]<class T, class S>(T*, S*) {
        const KVTiles kv{kv_heads, head_dim, block_size, block_stride, SCALE_SIZE<S>};
        prefill((const T*)q, (const S*)k_cache, (const S*)v_cache, block_tables, table_stride, query_start, seq_lens, (T*)out,
                sequences, q_heads, kv, spec);
    });
}
