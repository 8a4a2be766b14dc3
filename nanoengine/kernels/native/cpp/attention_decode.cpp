// Attention of one new token per sequence, or of a few, over its K/V blocks ("flash decoding", Dao et al., 2023).
//
// The parts of attention_parts.h are pieces of work for threads, and merged when all are done. The query heads that share a
// K/V head are one product: each tile of K/V is read once from memory. Tiles are far apart, which the CPU does not
// foresee: the tiles after the next are prefetched while these are computed. The new tokens of a sequence that begin with the
// same tile have their parts in common, and so do all sequences the parts that they share: read once, with the query heads of
// all those tokens beside each other. What one of them sees and another does not is added to each alone.
//
// Ranks that share a context have every so many parts each, all of a sequence's blocks among them. They compute those,
// exchange what they have made of them, and each merges all parts in order: as if one had computed them.
#include <vector>
#include "calls.h"
#include "attention_parts.h"
#include "ranks.h"
#include "team.h"

namespace {

template <class S> constexpr size_t TOGETHER = IN_TILES<S> ? 16 : 4 / PARTS<S>;  // heads that are computed at once: a tile has 16 rows
constexpr size_t SHARING = 32;  // heads that are computed with a shared part by one thread: there may be more threads than parts

constexpr size_t AHEAD = 4 * TILE;  // tokens: how far ahead V is prefetched
constexpr int LEAST_WIDTH = TILE / LANES;  // vectors of a tile's tokens
constexpr size_t TILES_ASKED = (PART + AHEAD) / TILE;

// Vectors of sums for each of `heads`: no more than there are registers for, and enough that additions do not wait for each
// other.
constexpr int width_for(int heads) {
    const int width = LANES == 16 ? 4 : heads <= 2 ? REGISTERS / 4 : REGISTERS / 8;
    return width < LEAST_WIDTH ? LEAST_WIDTH : width;
}

struct Part {
    size_t sequence, head;   // whose K/V they are
    size_t first, last;      // tokens [first, last), from a multiple of STEP
    size_t query, count;     // the new tokens that see some of them, counted over all
    size_t position;         // of the first of them; the others follow it, or like it come after the part
    size_t result;           // of the first of them; those of the others follow
};

// The results of a new token in the parts that its sequence shares with no other.
struct QueryParts {
    size_t first, step, count;
};

// scores[h][tile * 16 + i] = q[h] . K of token i of a tile, for H rows and TILES tiles; `next` are read after these.
template <class S, int H, int TILES>
NOINLINE void score(const uint32_t* q, size_t depth, const uint32_t* const* tiles, const uint32_t* const* next, float* scores) {
    constexpr int W = TILES * LEAST_WIDTH;
    Floats sums[H][W] = {};
    for (size_t d = 0; d < depth; d++) {
        add_products<S>(sums, q + d * Dot<S>::STEPS, A_STRIDE, [&](int w) {
            if (w % LEAST_WIDTH == 0) __builtin_prefetch(next[w / LEAST_WIDTH] + d * TILE, 0, 2);
            return load<Dwords>(tiles[w / LEAST_WIDTH] + d * TILE + w % LEAST_WIDTH * LANES);
        });
    }
    for (int h = 0; h < H; h++)
        for (int w = 0; w < W; w++) store(scores + h * A_STRIDE + w * LANES, sums[h][w]);
}

// W vectors of V at a time: out[h][0..head_dim) += weights[h] V, over the first `tokens` tokens of a tile. What follows them
// may be NaN.
template <class S, int H, int W>
NOINLINE void add_values(const uint32_t* weights, const uint32_t* tile, const uint32_t* next, size_t head_dim, size_t tokens,
                                float* out) {
    constexpr size_t n = Dot<S>::PER_DWORD;
    for (size_t d = 0; d < head_dim; d += W * LANES) {
        Floats sums[H][W];
        for (int h = 0; h < H; h++)
            for (int w = 0; w < W; w++) sums[h][w] = load<Floats>(out + h * head_dim + d + w * LANES);
        auto add_row = [&](size_t i, uint32_t bits) {
            add_products<S>(sums, weights + i * Dot<S>::STEPS, A_STRIDE, [&](int w) {
                const size_t at = i * head_dim + d + w * LANES;
                if (w * LANES % TILE == 0) __builtin_prefetch(next + at, 0, 2);
                return load<Dwords>(tile + at) & bits;
            });
        };
        for (size_t i = 0; i < tokens / n; i++) add_row(i, ~0u);
        if (tokens % n) add_row(tokens / n, PARTS<S> == 1 ? 0xffff : ~0u);  // of the last dword only its first token; bytes are never NaN
        for (int h = 0; h < H; h++)
            for (int w = 0; w < W; w++) store(out + h * head_dim + d + w * LANES, sums[h][w]);
    }
}

template <size_t H, class Body> void for_heads(size_t heads, Body body) {
    if constexpr (H == 1) body.template operator()<1>();
    else if (heads >= H) body.template operator()<H>();
    else for_heads<H - 1>(heads, body);
}

// What one thread needs for a part, unset.
template <class S> struct Scratch {
    Factors<S> queries{TOGETHER<S> * PARTS<S>};
    Rounded rounded_queries[TOGETHER<S>];
    PartRows<S> rows;
    size_t hidden[TOGETHER<S>], seen[TOGETHER<S>];  // each row sees tokens [hidden, seen) of the part
    const uint32_t *keys[TILES_ASKED], *values[TILES_ASKED];  // tiles of the part, and its last one where others ask for more
    alignas(64) S first_values[TILE * MAX_HEAD_DIM];
    std::unique_ptr<float[]> byte_sums;  // of both parts of weights, for a cache of bytes

    explicit Scratch(size_t dim) : rows(TOGETHER<S>, IN_TILES<S> ? PART * dim : 0), byte_sums(PARTS<S> == 2 ? new float[TOGETHER<S> * 2 * dim] : nullptr) {}
};

// The arguments of attention_decode.
template <class T, class S> struct Decode {
    const T* q;
    const S *k_cache, *v_cache;
    const int32_t* block_tables;
    size_t table_stride;
    const int32_t *query_start, *seq_lens;
    size_t num_shared;
    T* out;
    size_t sequences, q_heads;
    KVTiles kv;
    AttentionSpec spec;
    Ranks ranks;

    size_t group = q_heads / kv.heads, dim = kv.head_dim, depth = dim / Dot<S>::PER_DWORD;

    // One part: sums [count][group][head_dim] of weighted values, and for each head what it makes of the part.
    void attend(const Part& part, Scratch<S>& scratch, float* sums, Softmax* softmax) const {
        const size_t rows = part.count * group, tokens = part.last - part.first;
        const size_t whole = (tokens + TILE - 1) / TILE * TILE, count = (tokens + COLUMNS - 1) / COLUMNS * COLUMNS;
        find_tiles(part, whole, scratch);
        for (size_t start = 0; start < rows; start += TOGETHER<S>) {
            const size_t heads = std::min(TOGETHER<S>, rows - start);
            for (size_t h = 0; h < heads; h++) {
                const size_t query = (start + h) / group, head = part.head * group + (start + h) % group;
                const size_t position = part.position + query, first = spec.first_seen(position);
                scratch.hidden[h] = first > part.first ? first - part.first : 0;
                scratch.seen[h] = std::min(position + 1, part.last) - part.first;
                scratch.rounded_queries[h] = take_query(q + ((part.query + query) * q_heads + head) * dim, dim, scratch.queries, h);
            }
            if constexpr (IN_TILES<S>) score_in_tiles(heads, whole, scratch);
            else score_rows(heads, whole, scratch);
            for (size_t h = 0; h < heads; h++)
                scratch.rows.softmax_row(h, scratch.rounded_queries[h], scratch.hidden[h], scratch.seen[h], count, spec);
            std::copy_n(scratch.rows.softmaxes.get(), heads, softmax + start);
            if constexpr (IN_TILES<S>) add_in_tiles(heads, scratch, sums + start * dim);
            else if constexpr (PARTS<S> == 2) add_bytes(heads, scratch, sums + start * dim);
            else add_rows(heads, scratch, sums + start * dim);
        }
    }

    // Where K and V of a part are.
    void find_tiles(const Part& part, size_t whole, Scratch<S>& scratch) const {
        const int32_t* table = block_tables + part.sequence * table_stride;
        const size_t seen = spec.first_seen(part.position) / TILE * TILE;
        const size_t start = part.first / PART / ranks.count * PART + part.first % PART;  // among what this rank has of the sequence
        for (size_t i = 0; i < TILES_ASKED; i++) {  // what is not seen has no blocks: the first tile that is seen stands for those before
            if (i >= whole / TILE) {
                scratch.keys[i] = scratch.keys[i - 1], scratch.values[i] = scratch.values[i - 1];
                continue;
            }
            const size_t tile = kv.tile(table, std::max(start + i * TILE, seen), part.head);
            scratch.keys[i] = dwords(k_cache + tile), scratch.values[i] = dwords(v_cache + tile);
            scratch.rows.take_scales(k_cache + tile, v_cache + tile, dim, i * TILE);
        }
    }

    void score_rows(size_t heads, size_t whole, Scratch<S>& scratch) const {
        for_heads<TOGETHER<S> * PARTS<S>>(heads * PARTS<S>, [&]<size_t H>() {
            constexpr size_t TILES = width_for(H) / LEAST_WIDTH;
            for (size_t i = 0; i < whole / TILE; i += TILES) {  // beyond the last tile it is computed again: nobody looks
                const uint32_t* const* next = i + TILES < whole / TILE ? scratch.keys + i + TILES : scratch.values;
                score<S, H, TILES>((const uint32_t*)scratch.queries.row(0), depth, scratch.keys + i, next, scratch.rows.scores.row(0) + i * TILE);
            }
        });
    }

    void score_in_tiles(size_t heads, size_t whole, Scratch<S>& scratch) const {
        for (size_t t = 0; t < whole; t += COLUMNS) {
            Columns keys;
            for (size_t group = 0; group < COLUMNS / TILE; group++) keys.groups[group] = scratch.keys[t / TILE + group];
            product<S, FROM_CACHE>((int)heads, scratch.queries.row(0), keys, TILE, depth, scratch.rows.scores.row(0) + t, A_STRIDE, false);
        }
    }

    // Weights are zeros where a row sees nothing, and bytes times them: so all rows read the same tokens.
    void add_bytes(size_t heads, Scratch<S>& scratch, float* out) const {
        const size_t first = scratch.hidden[0] / TILE * TILE, last = scratch.seen[heads - 1];
        float* sums = scratch.byte_sums.get();
        for_heads<TOGETHER<S> * PARTS<S>>(heads * PARTS<S>, [&]<size_t H>() {
            std::fill_n(sums, H * dim, 0.0f);
            for (size_t t = first; t < last; t += TILE) add_tile<H>(scratch, 0, t, last, scratch.values[t / TILE], sums);
        });
        for (size_t h = 0; h < heads; h++)
            join(sums + 2 * h * dim, sums + (2 * h + 1) * dim, dim, scratch.rows.rounded[h], out + h * dim);
    }

    // out[0..H) += the weights of H rows from `row` on times V of the tile with tokens [t, min(t + TILE, seen)).
    template <size_t H>
    void add_tile(Scratch<S>& scratch, size_t row, size_t t, size_t seen, const uint32_t* values, float* out) const {
        constexpr int WIDE = width_for(H), NARROW = std::min<int>(WIDE, 2 * TILE / LANES);  // 32 dimensions divide a head
        const auto add = dim % (WIDE * LANES) == 0 ? add_values<S, H, WIDE> : add_values<S, H, NARROW>;
        const uint32_t* weights = (const uint32_t*)scratch.rows.weights.row(row) + t / Dot<S>::PER_DWORD * Dot<S>::STEPS;
        add(weights, values, scratch.values[(t + AHEAD) / TILE], dim, std::min(TILE, seen - t), out);
    }

    void add_rows(size_t heads, Scratch<S>& scratch, float* sums) const {
        const size_t *hidden = scratch.hidden, *seen = scratch.seen;
        size_t cleared = 0;
        std::fill_n(sums, heads * dim, 0.0f);
        for (size_t t = 0; t < seen[heads - 1]; t += TILE) {
            const bool all = t >= hidden[heads - 1] && t + TILE <= seen[0];  // everyone sees all of the tile
            for (size_t h = 0, count; h < heads; h += count) {
                count = all ? heads : alike(scratch, h, heads);
                if (t >= seen[h]) continue;
                const uint32_t* values = scratch.values[t / TILE];
                if (t < hidden[h]) {
                    if (hidden[h] != cleared) copy_seen((const S*)values, dim, t, cleared = hidden[h], t + TILE, scratch.first_values);
                    values = dwords(scratch.first_values);
                }
                for_heads<TOGETHER<S>>(count, [&]<size_t H>() { add_tile<H>(scratch, h, t, seen[h], values, sums + h * dim); });
            }
        }
    }

    void add_in_tiles(size_t heads, Scratch<S>& scratch, float* sums) const {
        S* values = scratch.rows.values.get();
        for (size_t h = 0, count; h < heads; h += count) {
            count = alike(scratch, h, heads);
            const size_t hidden = scratch.hidden[h], seen = scratch.seen[h], tokens = (seen + COLUMNS - 1) / COLUMNS * COLUMNS;
            for (size_t t = 0; t < tokens; t += TILE)
                copy_seen((const S*)scratch.values[t / TILE], dim, t, hidden, seen, values + t * dim);
            for (size_t d = 0; d < dim; d += COLUMNS)
                product<S, FROM_CACHE>((int)count, scratch.rows.weights.row(h), columns_at(dwords(values) + d), dim,
                                       tokens / Dot<S>::PER_DWORD, sums + h * dim + d, dim, false);
        }
    }

    // How many rows from h on see the same.
    static size_t alike(const Scratch<S>& scratch, size_t h, size_t heads) {
        size_t end = h + 1;
        while (end < heads && scratch.hidden[end] == scratch.hidden[h] && scratch.seen[end] == scratch.seen[h]) end++;
        return end - h;
    }

    void run() const {
        const size_t shared = num_shared / PART, tokens = query_start[sequences], at_once = std::max<size_t>(1, SHARING / group);
        std::vector<Part> parts;
        for (size_t head = 0; head < kv.heads; head++)
            for (size_t i = 0; i < shared; i++)
                for (size_t token = 0; token < tokens; token += at_once)
                    parts.push_back({0, head, i * PART, (i + 1) * PART, token, std::min(at_once, tokens - token), (i + 1) * PART,
                                     (head * shared + i) * tokens + token});
        size_t results = kv.heads * shared * tokens, most_parts = 0;
        std::vector<QueryParts> query_parts(tokens * kv.heads);
        for (size_t sequence = 0; sequence < sequences; sequence++)
            for (size_t head = 0; head < kv.heads && seq_lens[sequence]; head++) {
                const size_t last = seq_lens[sequence], history = last - (query_start[sequence + 1] - query_start[sequence]);
                auto first_step = [&](size_t position) { return spec.first_seen(position) / STEP<S> * STEP<S>; };
                for (size_t begin = history, end; begin < last; begin = end) {  // positions of queries that begin with the same step
                    for (end = begin + 1; end < last && first_step(end) == first_step(begin);) end++;
                    const size_t count = end - begin, start = std::max(shared * PART, first_step(begin));
                    const size_t query = query_start[sequence] + begin - history;
                    for (size_t i = 0; i < count; i++)
                        query_parts[(query + i) * kv.heads + head] = {results + i, count, (begin + i) / PART - start / PART + 1};
                    most_parts = std::max(most_parts, shared + (end - 1) / PART - start / PART + 1);
                    for (size_t first = start, next; first < end; first = next, results += count) {
                        next = (first / PART + 1) * PART;
                        const size_t before = first > begin ? first - begin : 0;  // queries that see nothing of it
                        parts.push_back({sequence, head, first, std::min(end, next), query + before, count - before, begin + before,
                                         results + before});
                    }
                }
            }
        const bool is_shared = ranks.count > 1;
        const uint64_t number = is_shared ? ranks.next() : 0;
        const std::unique_ptr<float[]> memory(is_shared ? nullptr : new float[results * group * (dim + 2)]);  // unset
        // What a rank makes of its parts: sums [results][group][dim], and behind them a Softmax for each.
        auto made_by = [&](size_t rank) { return is_shared ? reinterpret_cast<float*>(ranks.slot(rank, number)) : memory.get(); };
        auto softmax_of = [&](float* sums) { return reinterpret_cast<Softmax*>(sums + results * group * dim); };
        if (is_shared) std::erase_if(parts, [&](const Part& part) { return part.first / PART % ranks.count != ranks.rank; });
        const size_t run = parts.size() < 8 ? 1 : 2;  // parts that follow one another, for a thread, if there are enough for all
        std::atomic<size_t> next{0};
        parallel([&](Member member) {
            const TileRegion region;
            Scratch<S> scratch(dim);
            std::vector<Rescaling> rescaling(most_parts);
            std::vector<const float*> sums(most_parts);
            member.dynamic_for(next, parts.size(), run, [&](size_t i) {
                const size_t at = parts[i].result * group;
                float* partials = made_by(ranks.rank);
                attend(parts[i], scratch, partials + at * dim, softmax_of(partials) + at);
            });
            member.barrier();
            if (is_shared) {
                if (member.index == 0) {
                    ranks.publish(number);
                    for (size_t rank = 0; rank < ranks.count && ranks.arrives(rank, number); rank++);
                }
                member.barrier();
            }
            member.static_for(tokens * kv.heads, [&](size_t i) {
                const size_t token = i / kv.heads, head = i % kv.heads, count = shared + query_parts[i].count;
                if (!count) return;
                auto result = [&](size_t p) {
                    return p < shared ? (head * shared + p) * tokens + token : query_parts[i].first + (p - shared) * query_parts[i].step;
                };
                for (size_t h = 0; h < group; h++) {
                    Softmax all = before_parts(spec.sinks ? spec.sinks + head * group + h : nullptr);
                    for (size_t p = 0; p < count; p++) {
                        float* made = made_by(is_shared ? p % ranks.count : 0);
                        const size_t at = result(p) * group + h;
                        rescaling[p] = merge(all, softmax_of(made)[at]);
                        sums[p] = made + at * dim;
                    }
                    T* to = out + (token * q_heads + head * group + h) * dim;
                    for (size_t d = 0; d < dim; d += LANES) {
                        Floats total{};
                        for (size_t p = 0; p < count; p++) total = merged(total, load<Floats>(sums[p] + d), rescaling[p]);
                        store_floats(to + d, total / all.total);
                    }
                }
            });
        });
    }
};

}  // namespace

// q, out [tokens][q_heads][head_dim]; query_start [sequences + 1]; block_tables [sequences][table_stride]; seq_lens count all new
// tokens. The first num_shared tokens of all sequences, new ones not among them, are in the same blocks; with a window it must
// be 0, and one rank alone. If there are several, the caches hold what this rank has, block_size is how much that is of a
// block, and a slot holds the results: (head_dim + 2) * q_heads floats for each new token and part.
extern "C" void attention_decode(int dtype, int cache_dtype, const void* q, const void* k_cache, const void* v_cache, const int32_t* block_tables,
                                 size_t table_stride, const int32_t* query_start, const int32_t* seq_lens, size_t num_shared,
                                 void* memory, size_t rank, size_t ranks, size_t slot_bytes, float seconds, void* out, size_t sequences,
                                 size_t q_heads, size_t kv_heads, size_t head_dim, size_t block_size,
                                 size_t block_stride, float scale, float soft_cap, int64_t window, const float* sinks) {
    const AttentionSpec spec{scale, soft_cap, window, sinks};
    with_types(dtype, cache_dtype, [&]<class T, class S>(T*, S*) {
        const KVTiles kv{kv_heads, head_dim, block_size, block_stride, SCALE_SIZE<S>};
        Decode<T, S>{(const T*)q, (const S*)k_cache, (const S*)v_cache, block_tables, table_stride, query_start, seq_lens, num_shared,
                     (T*)out, sequences, q_heads, kv, spec, {memory, rank, ranks, slot_bytes, seconds}}.run();
    });
}
RECORDABLE(attention_decode)
