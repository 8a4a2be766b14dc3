// Causal attention of several new tokens per sequence over its K/V blocks, those of this step included.
//
// Queries are computed in blocks of about QUERY_ROWS rows (a row is one query head of one token), keys in the parts of
// attention_parts.h ("flash attention", Dao et al., 2022): scores, weights and the weighted values of a part stay in the
// second-level cache. The query heads that share a K/V head are rows of the same product. Tiles that no query of a block sees
// are left out.
#include <vector>
#include "calls.h"
#include "attention_parts.h"
#include "team.h"

namespace {

constexpr size_t QUERY_ROWS = 96;

struct Work {
    size_t sequence, head, first, last;  // queries [first, last) of the sequence's new tokens
};

// Tokens of a part that some queries of a piece of work see, and their rows.
struct Part {
    size_t start, tokens, from, rows;  // from query `from` on

    size_t padded() const { return (tokens + COLUMNS - 1) / COLUMNS * COLUMNS; }
};

static_assert(PART <= MAX_DEPTH && MAX_HEAD_DIM <= MAX_DEPTH, "a row of factors is at most one word for each token or dimension");

// What one piece of work needs, unset.
template <class S> struct Scratch {
    Factors<S> queries;
    std::unique_ptr<Rounded[]> rounded_queries;
    PartRows<S> made;  // of a part
    std::unique_ptr<float[]> part_sums, sums;
    std::unique_ptr<Softmax[]> all;

    Scratch(size_t rows, size_t dim)
        : queries(rows * PARTS<S>), rounded_queries(new Rounded[rows]), made(rows, PART * dim),
          part_sums(new float[rows * PARTS<S> * dim]), sums(new float[rows * dim]), all(new Softmax[rows]) {}
};

// One piece of work.
template <class T, class S> struct Prefill {
    const T* q;
    const S *k_cache, *v_cache;
    const int32_t* block_table;
    Work work;
    size_t history, q_heads;
    KVTiles kv;
    const AttentionSpec& spec;
    Scratch<S>& scratch;
    T* out;

    static constexpr size_t n = Dot<S>::PER_DWORD;
    PartRows<S>& made = scratch.made;
    size_t group = q_heads / kv.heads, dim = kv.head_dim, position = history + work.first, queries = work.last - work.first;
    size_t begin = spec.first_seen(position), end = position + queries;  // tokens that the queries see

    void attend() const {
        for (size_t row = 0; row < queries * group; row++) {
            scratch.rounded_queries[row] = take_query(q + offset_of(row), dim, scratch.queries, row);
            scratch.all[row] = before_parts(spec.sinks ? spec.sinks + work.head * group + row % group : nullptr);
        }
        for (size_t start = begin / STEP<S> * STEP<S>; start < end; start = (start / PART + 1) * PART) {
            const Part part = part_at(start);
            score(part);
            for (size_t i = 0; i < part.padded() / TILE; i++) copy_values(part, i);
            for (size_t row = 0; row < part.rows; row++) softmax_row(part, row);
            add(part);
            merge_rows(part);
        }
    }

private:
    // Where a row is in q, and in out.
    size_t offset_of(size_t row) const { return ((work.first + row / group) * q_heads + work.head * group + row % group) * dim; }

    Part part_at(size_t start) const {
        const size_t tokens = std::min((start / PART + 1) * PART, end) - start, from = start > position ? start - position : 0;
        size_t to = queries;  // those that see some of the part
        while (spec.first_seen(position + to - 1) >= start + tokens) to--;
        return {start, tokens, from, (to - from) * group};
    }

    const S* tile(const S* cache, const Part& part, size_t i) const {  // the first and the last that is seen stand for those around them
        const size_t last = (part.tokens - 1) / TILE, at = std::max(part.start + std::min(i, last) * TILE, begin / TILE * TILE);
        return cache + kv.tile(block_table, at, work.head);
    }

    void score(const Part& part) const {
        for (size_t t = 0; t < part.tokens; t += COLUMNS) {
            Columns keys;
            for (size_t i = 0; i < COLUMNS / TILE; i++) keys.groups[i] = dwords(tile(k_cache, part, t / TILE + i));
            product<S, FROM_CACHE>((int)(part.rows * PARTS<S>), scratch.queries.row(part.from * group * PARTS<S>), keys, TILE, dim / n,
                                   made.scores.row(0) + t, A_STRIDE, false);
        }
    }

    void copy_values(const Part& part, size_t i) const {
        const S* values = tile(v_cache, part, i);
        const size_t hidden = begin > part.start ? begin - part.start : 0;
        copy_seen(values, dim, i * TILE, hidden, part.tokens, made.values.get() + i * TILE * dim);
        made.take_scales(tile(k_cache, part, i), values, dim, i * TILE);
    }

    void softmax_row(const Part& part, size_t row) const {
        const size_t at = position + part.from + row / group, first = spec.first_seen(at);
        const size_t hidden = first > part.start ? first - part.start : 0, seen = std::min(at + 1 - part.start, part.tokens);
        const Rounded query = scratch.rounded_queries[part.from * group + row];
        made.softmax_row(row, query, hidden, seen, part.padded(), spec);
    }

    void add(const Part& part) const {
        for (size_t d = 0; d < dim; d += COLUMNS)
            product<S, FROM_CACHE>((int)(part.rows * PARTS<S>), made.weights.row(0), columns_at(dwords(made.values.get()) + d), dim,
                                   part.padded() / n, scratch.part_sums.get() + d, dim, false);
    }

    // Values of a part that are added up, to those of the parts before. What a row's last part makes of them goes to out.
    void merge_rows(const Part& part) const {
        float* part_sums = scratch.part_sums.get();
        if constexpr (PARTS<S> == 2)
            for (size_t row = 0; row < part.rows; row++) {
                const float* both = part_sums + 2 * row * dim;
                join(both, both + dim, dim, made.rounded[row], part_sums + row * dim);
            }
        for (size_t row = 0; row < part.rows; row++) {
            const size_t out_row = part.from * group + row, token = position + part.from + row / group;
            const bool is_first = spec.first_seen(token) >= part.start, is_last = token < part.start + part.tokens;
            const Rescaling rescaling = merge(scratch.all[out_row], made.softmaxes[row]);
            const float *from = part_sums + row * dim, total = scratch.all[out_row].total;
            float* sums = scratch.sums.get() + out_row * dim;
            T* result = out + offset_of(out_row);
            for (size_t d = 0; d < dim; d += LANES) {
                const Floats all = merged(is_first ? Floats{} : load<Floats>(sums + d), load<Floats>(from + d), rescaling);
                if (is_last) store_floats(result + d, all / total);
                else store(sums + d, all);
            }
        }
    }
};

}  // namespace

// q, out [tokens][q_heads][head_dim]; query_start [sequences + 1]; block_tables [sequences][table_stride].
extern "C" void attention_prefill(int dtype, int cache_dtype, const void* q, const void* k_cache, const void* v_cache, const int32_t* block_tables,
                                  size_t table_stride, const int32_t* query_start, const int32_t* seq_lens, void* out,
                                  size_t sequences, size_t q_heads, size_t kv_heads, size_t head_dim, size_t block_size,
                                  size_t block_stride, float scale, float soft_cap, int64_t window, const float* sinks) {
    const AttentionSpec spec{scale, soft_cap, window, sinks};
    const size_t group = q_heads / kv_heads, queries = std::max<size_t>(1, QUERY_ROWS / group);
    const auto count_of = [&](size_t sequence) -> size_t { return query_start[sequence + 1] - query_start[sequence]; };
    const auto history = [&](size_t sequence) { return seq_lens[sequence] - count_of(sequence); };
    std::vector<Work> works;
    for (size_t sequence = 0; sequence < sequences; sequence++)
        for (size_t first = 0; first < count_of(sequence); first += queries)
            for (size_t head = 0; head < kv_heads; head++)
                works.push_back({sequence, head, first, std::min(count_of(sequence), first + queries)});
    // The longest first: the last ones should be short.
    const auto sees = [&](const Work& work) {
        return history(work.sequence) + work.last - spec.first_seen(history(work.sequence) + work.first);
    };
    std::stable_sort(works.begin(), works.end(), [&](const Work& a, const Work& b) { return sees(a) > sees(b); });
    std::atomic<size_t> next{0};
    with_types(dtype, cache_dtype, [&]<class T, class S>(T*, S*) {
        const KVTiles kv{kv_heads, head_dim, block_size, block_stride, SCALE_SIZE<S>};
        parallel([&](Member member) {
            const TileRegion region;
            Scratch<S> scratch(queries * group, head_dim);
            member.dynamic_for(next, works.size(), 1, [&](size_t i) {
                const size_t sequence = works[i].sequence, start = query_start[sequence] * q_heads * head_dim;
                Prefill<T, S>{(const T*)q + start, (const S*)k_cache, (const S*)v_cache, block_tables + sequence * table_stride, works[i],
                              history(sequence), q_heads, kv, spec, scratch, (T*)out + start}.attend();
            });
        });
    });
}
RECORDABLE(attention_prefill)
