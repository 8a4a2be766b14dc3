// Causal attention of several new tokens per sequence over its K/V blocks, those of this step included.
//
// Queries are taken in blocks of about QUERY_ROWS rows (a row is one query head of one token), keys in the parts of
// attention_parts.h ("flash attention", Dao et al., 2022): scores, weights and the weighted values of a part stay in the
// second-level cache. The query heads that share a K/V head are rows of the same product. Tiles that no query of a block sees
// are left out. Where products are in tiles of AMX, vectors make weights of one part while tiles make scores of the next.
#include <vector>
#include "calls.h"
#include "attention_parts.h"
#include "team.h"

namespace {

constexpr size_t QUERY_ROWS = 96;

// Whether scores of a part are computed beside the weights of the part before it. A block of scores is few instructions that
// take long: a CPU begins those that follow, which are vectors' and need nothing of it, before it is done.
constexpr bool PIPELINED = true;
template <class S> constexpr bool BESIDE_TILES = PIPELINED && IN_TILES<S>;

struct Work {
    size_t sequence, head, first, last;  // queries [first, last) of the sequence's new tokens
};

// Tokens of a part that some queries of a piece of work see, their rows, and the scores of those [rows * PARTS][PART].
struct Part {
    size_t start, tokens, from, rows;  // from query `from` on; no tokens: behind the last part
    float* scores;
};

static_assert(PART <= MAX_DEPTH && MAX_HEAD_DIM <= MAX_DEPTH, "a row of factors is at most one word for each token or dimension");

// What one piece of work needs, unset.
template <class S> struct Scratch {
    Factors<S> queries, weights;
    std::unique_ptr<S[]> values;
    TokenScales scales;                                         // of a cache of bytes, like the next
    std::unique_ptr<Rounded[]> rounded_queries, rounded_weights;
    std::unique_ptr<float[]> scores, part_sums, sums;
    std::unique_ptr<Softmax[]> parts, all;

    Scratch(size_t rows, size_t dim)
        : queries(rows * PARTS<S>), weights(rows * PARTS<S>), values(new S[PART * dim]), rounded_queries(new Rounded[rows]),
          rounded_weights(new Rounded[rows]), scores(new float[(1 + BESIDE_TILES<S>) * rows * PARTS<S> * PART]), part_sums(new float[rows * PARTS<S> * dim]),
          sums(new float[rows * PARTS<S> * dim]), parts(new Softmax[rows]), all(new Softmax[rows]) {}
};

template <class T, class S>
void attend(const T* q, const S* k_cache, const S* v_cache, const int32_t* block_table, const Work& work, size_t history,
                   size_t q_heads, KVTiles kv, const AttentionSpec& spec, Scratch<S>& scratch, T* out) {
    constexpr size_t n = Dot<S>::PER_DWORD;
    const size_t group = q_heads / kv.heads, dim = kv.head_dim, position = history + work.first, queries = work.last - work.first;
    const size_t begin = spec.first_seen(position), end = position + queries;  // tokens that the queries see
    for (size_t row = 0; row < queries * group; row++) {
        const size_t head = work.head * group + row % group;
        const T* query = q + ((work.first + row / group) * q_heads + head) * dim;
        scratch.rounded_queries[row] = take_query(query, dim, scratch.queries, row);
        scratch.all[row] = before_parts(spec.sinks ? spec.sinks + head : nullptr);
    }

    const auto part_at = [&](size_t start, size_t place) {
        if (start >= end) return Part{};
        const size_t tokens = std::min((start / PART + 1) * PART, end) - start, from = start > position ? start - position : 0;
        size_t to = queries;  // those that see some of the part
        while (spec.first_seen(position + to - 1) >= start + tokens) to--;
        return Part{start, tokens, from, (to - from) * group, scratch.scores.get() + place * queries * group * PART};
    };
    const auto tile = [&](const S* cache, const Part& part, size_t i) {  // the first and the last that is seen stand for those around them
        const size_t last = (part.tokens - 1) / TILE, at = std::max(part.start + std::min(i, last) * TILE, begin / TILE * TILE);
        return cache + kv.tile(block_table, at, work.head);
    };
    // Scores are computed in blocks of COLUMNS tokens, and where other work is to be beside them, of as many rows as tiles have.
    const auto row_blocks = [](const Part& part) { return BESIDE_TILES<S> ? (part.rows + AMX_ROWS - 1) / AMX_ROWS : 1; };
    const auto score_blocks = [&](const Part& part) { return (part.tokens + COLUMNS - 1) / COLUMNS * row_blocks(part); };
    const auto score = [&](const Part& part, size_t block) {
        const size_t i = block / row_blocks(part) * (COLUMNS / TILE), row = block % row_blocks(part) * AMX_ROWS;
        const size_t rows = BESIDE_TILES<S> ? std::min<size_t>(AMX_ROWS, part.rows - row) : part.rows * PARTS<S>;
        Columns keys;
        for (size_t group = 0; group < COLUMNS / TILE; group++) keys.groups[group] = dwords(tile(k_cache, part, i + group));
        product<S, FROM_CACHE>((int)rows, scratch.queries.row(part.from * group * PARTS<S> + row), keys, TILE, dim / n,
                               part.scores + row * PART + i * TILE, PART, false);
    };
    const auto copy_values = [&](const Part& part, size_t i) {
        std::copy_n(tile(v_cache, part, i), TILE * dim, scratch.values.get() + i * TILE * dim);
        if constexpr (PARTS<S> == 2) {
            copy_scales(tile(k_cache, part, i), dim, scratch.scales.keys + i * TILE);
            copy_scales(tile(v_cache, part, i), dim, scratch.scales.values + i * TILE);
        }
    };
    const auto weigh_row = [&](const Part& part, size_t row) {
        const size_t own = position + part.from + row / group, first = spec.first_seen(own);
        const size_t hidden = first > part.start ? first - part.start : 0, seen = std::min(own + 1 - part.start, part.tokens);
        const size_t count = (part.tokens + COLUMNS - 1) / COLUMNS * COLUMNS;
        float* scores = part.scores + row * PARTS<S> * PART;
        if constexpr (PARTS<S> == 1) scratch.parts[row] = weigh(scores, hidden, seen, count, spec, scratch.weights.row(row));
        else
            scratch.parts[row] = weigh_bytes(scores, scratch.rounded_queries[part.from * group + row], scratch.scales, hidden, seen, count,
                                             spec, {scratch.weights.row(2 * row), scratch.weights.row(2 * row + 1)},
                                             scratch.rounded_weights[row]);
    };
    // Share i of `shares` of what vectors do for a part before its values are added: values are copied, then rows weighed.
    const auto prepare = [&](const Part& part, size_t i, size_t shares) {
        const size_t tiles = (part.tokens + TILE - 1) / TILE, all = tiles + part.rows;
        for (size_t at = all * i / shares; at < all * (i + 1) / shares; at++)
            if (at < tiles) copy_values(part, at);
            else weigh_row(part, at - tiles);
    };

    Part part = part_at(begin / STEP<S> * STEP<S>, 0), next;
    if constexpr (BESIDE_TILES<S>)
        for (size_t block = 0; block < score_blocks(part); block++) score(part, block);
    for (size_t number = 1; part.tokens; part = next, number++) {
        next = part_at((part.start / PART + 1) * PART, BESIDE_TILES<S> ? number % 2 : 0);
        const Part& scored = BESIDE_TILES<S> ? next : part;
        const size_t blocks = score_blocks(scored);
        for (size_t block = 0; block < blocks; block++) {
            score(scored, block);
            if (BESIDE_TILES<S>) prepare(part, block, blocks);
        }
        if (!BESIDE_TILES<S> || !blocks) prepare(part, 0, 1);
        const size_t start = part.start, tokens = part.tokens, count = (tokens + COLUMNS - 1) / COLUMNS * COLUMNS;
        const size_t first_row = part.from * group, rows = part.rows;
        // Values are zero where nothing was written or is seen: a weight of 0 does not make up for NaN, but for any byte.
        auto clear = [&](size_t from, size_t to) {
            for (size_t t = from; t < to; t++)
                for (size_t d = 0; d < dim; d++) scratch.values[(t / n * dim + d) * n + t % n] = S{};
        };
        clear(0, begin > start ? begin - start : 0);
        clear(tokens, count);
        const bool merging = start > begin || spec.sinks;  // the first part is merged with nothing
        float* part_sums = (merging ? scratch.part_sums : scratch.sums).get();
        for (size_t d = 0; d < dim; d += COLUMNS)
            product<S, FROM_CACHE>((int)rows * PARTS<S>, scratch.weights.row(0), columns_at(dwords(scratch.values.get()) + d), dim,
                                   count / n, part_sums + d, dim, false);
        if constexpr (PARTS<S> == 2)
            for (size_t row = 0; row < rows; row++) {
                const float* both = part_sums + 2 * row * dim;
                join(both, both + dim, dim, scratch.rounded_weights[row], part_sums + row * dim);
            }
        if (start <= begin) {
            const size_t there = merging ? 0 : rows;
            std::fill_n(scratch.sums.get() + there * dim, (queries * group - there) * dim, 0.0f);
        }
        for (size_t row = 0; row < rows; row++) {
            const Shares shares = merge(scratch.all[first_row + row], scratch.parts[row]);
            if (!merging) continue;
            const float* part = part_sums + row * dim;
            float* sums = scratch.sums.get() + (first_row + row) * dim;
            for (size_t d = 0; d < dim; d += LANES) store(sums + d, merged(load<Floats>(sums + d), load<Floats>(part + d), shares));
        }
    }
    for (size_t row = 0; row < queries * group; row++) {
        T* to = out + ((work.first + row / group) * q_heads + work.head * group + row % group) * dim;
        const float* sums = scratch.sums.get() + row * dim;
        for (size_t d = 0; d < dim; d += LANES) store_floats(to + d, load<Floats>(sums + d) / scratch.all[row].total);
    }
}

template <class T, class S>
void prefill(const T* q, const S* k_cache, const S* v_cache, const int32_t* block_tables, size_t table_stride,
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
    std::atomic<size_t> next{0};
    together([&](Member member) {
        const TileRegion region;
        Scratch<S> scratch(queries * group, kv.head_dim);
        member.take(next, works.size(), 1, [&](size_t i) {
            const size_t sequence = works[i].sequence, start = query_start[sequence] * q_heads * kv.head_dim;
            attend(q + start, k_cache, v_cache, block_tables + sequence * table_stride, works[i], history(sequence), q_heads, kv,
                   spec, scratch, out + start);
        });
    });
}

}  // namespace

// q, out [tokens][q_heads][head_dim]; query_start [sequences + 1]; block_tables [sequences][table_stride].
extern "C" void attention_prefill(int dtype, int cache_dtype, const void* q, const void* k_cache, const void* v_cache, const int32_t* block_tables,
                                  size_t table_stride, const int32_t* query_start, const int32_t* seq_lens, void* out,
                                  size_t sequences, size_t q_heads, size_t kv_heads, size_t head_dim, size_t block_size,
                                  size_t block_stride, float scale, float soft_cap, int64_t window, const float* sinks) {
    const AttentionSpec spec{scale, soft_cap, window, sinks};
    with_types(dtype, cache_dtype, [&]<class T, class S>(T*, S*) {
        const KVTiles kv{kv_heads, head_dim, block_size, block_stride, SCALE_SIZE<S>};
        prefill((const T*)q, (const S*)k_cache, (const S*)v_cache, block_tables, table_stride, query_start, seq_lens, (T*)out,
                sequences, q_heads, kv, spec);
    });
}
RECORDABLE(attention_prefill)
