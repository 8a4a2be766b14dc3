// Attention of one new token per sequence, or of a few, over its K/V blocks ("flash decoding", Dao et al., 2023).
//
// A long sequence is cut into parts of PART tokens, each a piece of work for a thread; the parts are put together by their
// largest scores. The query heads that share a K/V head are computed together: each tile of K/V is read once from memory. Tiles
// are far apart, which the CPU does not foresee: the tiles after the next are asked for while these are computed. The parts begin with
// the first tile that is seen and do not depend on the batch, so neither does a token. The new tokens of a sequence that begin with the
// same tile have their parts in common, and so do all sequences the parts that they share: read once, with the query heads of all those
// tokens beside each other. What one of them sees and another does not is added to each alone.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>
#include "attention_spec.h"
#include "kv_int8.h"

constexpr size_t PART = 512;    // tokens
constexpr size_t TOGETHER = 4;  // heads whose sums are held in registers at once
constexpr size_t SHARING = 32;  // heads that are computed with a shared part by one thread: there may be more threads than parts

constexpr size_t AHEAD = 4 * TILE;  // tokens: how far ahead V is asked for
constexpr int LEAST_WIDTH = TILE / LANES;  // vectors of a tile's tokens

// Vectors of sums for each of `heads`: no more than there are registers for, and enough that additions do not wait for each other.
constexpr int width_for(int heads) {
    const int width = LANES == 16 ? 4 : heads <= 2 ? REGISTERS / 4 : REGISTERS / 8;
    return width < LEAST_WIDTH ? LEAST_WIDTH : width;
}

struct Part {
    size_t sequence, head;   // whose K/V they are
    size_t first, last;      // tokens [first, last), from the start of a tile
    size_t query, count;     // the new tokens that see some of them, counted over all
    size_t position;         // of the first of them; the others follow it, or like it come after the part
    size_t result;           // of the first of them; those of the others follow
};

// The results of a new token in the parts that its sequence shares with no other.
struct Own {
    size_t first, step, count;
};

// scores[h][tile * 16 + i] = q[h] . K of token i of a tile, for H heads and TILES tiles; `next` are read after these.
template <class T, int H, int TILES>
static NOINLINE void score(const uint32_t* q, size_t depth, const uint32_t* const* tiles, const uint32_t* const* next, float scale,
                           float* scores) {
    constexpr int W = TILES * LEAST_WIDTH;
    Floats sums[H][W] = {};
    for (size_t d = 0; d < depth; d++) {
        add_products<T>(sums, q + d * Dot<T>::STEPS, MAX_HEAD_DIM, [&](int w) {
            if (w % LEAST_WIDTH == 0) __builtin_prefetch(next[w / LEAST_WIDTH] + d * TILE, 0, 2);
            return load<Dwords>(tiles[w / LEAST_WIDTH] + d * TILE + w % LEAST_WIDTH * LANES);
        });
    }
    for (int h = 0; h < H; h++)
        for (int w = 0; w < W; w++) store(scores + h * PART + w * LANES, sums[h][w] * scale);
}

// W vectors of V at a time: out[h][0..head_dim) += weights[h] V, over the first `tokens` tokens of a tile. What follows them may be
// NaN.
template <class T, int H, int W>
static NOINLINE void add_values(const uint32_t* weights, const uint32_t* tile, const uint32_t* next, size_t head_dim, size_t tokens,
                                float* out) {
    constexpr size_t n = Dot<T>::PER_DWORD;
    for (size_t d = 0; d < head_dim; d += W * LANES) {
        Floats sums[H][W];
        for (int h = 0; h < H; h++)
            for (int w = 0; w < W; w++) sums[h][w] = load<Floats>(out + h * head_dim + d + w * LANES);
        auto add_row = [&](size_t i, uint32_t kept) {
            add_products<T>(sums, weights + i * Dot<T>::STEPS, PART / n * Dot<T>::STEPS, [&](int w) {
                const size_t at = i * head_dim + d + w * LANES;
                if (w * LANES % TILE == 0) __builtin_prefetch(next + at, 0, 2);
                return load<Dwords>(tile + at) & kept;
            });
        };
        for (size_t i = 0; i < tokens / n; i++) add_row(i, ~0u);
        if (tokens % n) add_row(tokens / n, 0xffff);  // of the last dword only its first token
        for (int h = 0; h < H; h++)
            for (int w = 0; w < W; w++) store(out + h * head_dim + d + w * LANES, sums[h][w]);
    }
}

template <size_t H = TOGETHER, class Body> static void for_heads(size_t heads, Body body) {
    if constexpr (H == 1) body.template operator()<1>();
    else if (heads >= H) body.template operator()<H>();
    else for_heads<H - 1>(heads, body);
}

// V of a tile, with zeros for its first `hidden` tokens: a weight of 0 does not make up for NaN.
template <class T> static void copy_seen(const T* tile, size_t head_dim, size_t hidden, T* to) {
    constexpr size_t n = Dot<T>::PER_DWORD;
    std::copy_n(tile, TILE * head_dim, to);
    for (size_t t = 0; t < hidden; t++)
        for (size_t d = 0; d < head_dim; d++) to[(t / n * head_dim + d) * n + t % n] = T{};
}

// One part: out[count][group][head_dim] sums of weighted values, and for each head its largest score and the sum of its weights.
// Its tiles are dequantized first, K and V, PART tokens of each.
template <class T, class S>
static void attend(const T* q, const S* k_cache, const S* v_cache, const int32_t* block_table, const Part& part, size_t q_heads,
                   KVTiles kv, const AttentionSpec& spec, T* dequantized, float* out, float* most, float* total) {
    const size_t group = q_heads / kv.heads, rows = part.count * group;
    using Factor = typename Dot<T>::Factor;
    const size_t depth = kv.head_dim / Dot<T>::PER_DWORD, whole = (part.last - part.first + TILE - 1) / TILE * TILE;
    auto stored = [&](const S* cache, size_t t) {
        return cache + kv.tile(block_table, part.first + std::min(t, whole - TILE), part.head);
    };
    if constexpr (!std::is_same_v<S, T>)
        for (size_t t = 0; t < whole; t += TILE) {
            const S *next_keys = stored(k_cache, t + AHEAD), *next_values = stored(v_cache, t + AHEAD);
            for (size_t i = 0; i < TILE * (kv.head_dim + kv.scale_size); i += 64) {
                __builtin_prefetch(next_keys + i, 0, 2);
                __builtin_prefetch(next_values + i, 0, 2);
            }
            dequantize_keys(stored(k_cache, t), kv.head_dim, dequantized + t * kv.head_dim);
            dequantize_values(stored(v_cache, t), kv.head_dim, dequantized + (PART + t) * kv.head_dim);
        }
    auto tile = [&](const S* cache, size_t t) {
        if constexpr (std::is_same_v<S, T>) return reinterpret_cast<const uint32_t*>(stored(cache, t));
        else {
            const size_t first = cache == k_cache ? 0 : PART;
            return reinterpret_cast<const uint32_t*>(dequantized + (first + std::min(t, whole - TILE)) * kv.head_dim);
        }
    };
    alignas(64) uint32_t queries[TOGETHER][MAX_HEAD_DIM];
    alignas(64) float scores[TOGETHER][PART];
    alignas(64) Factor weights[TOGETHER][PART];
    alignas(64) T first_values[TILE * MAX_HEAD_DIM];  // but for the first `cleared` tokens
    size_t cleared = 0, query = 0, member = 0;  // the query of the next row, and which of its heads it is
    for (size_t start = 0; start < rows; start += TOGETHER) {
        const size_t heads = std::min(TOGETHER, rows - start);
        size_t hidden[TOGETHER], seen[TOGETHER];  // each row sees tokens [hidden, seen) of the part
        for (size_t h = 0; h < heads; h++) {
            const size_t position = part.position + query, first = spec.first_seen(position);
            hidden[h] = first > part.first ? first - part.first : 0;
            seen[h] = std::min(position + 1, part.last) - part.first;
            const size_t head = (part.query + query) * q_heads + part.head * group + member;
            copy_elements(q + head * kv.head_dim, kv.head_dim, reinterpret_cast<Factor*>(queries[h]));
            if (++member == group) member = 0, query++;
        }
        for_heads(heads, [&]<size_t H>() {
            constexpr int TILES = width_for(H) / LEAST_WIDTH;
            for (size_t t = 0; t < whole; t += TILES * TILE) {  // beyond the last tile it is computed again: nobody looks
                const uint32_t *tiles[TILES], *next[TILES];
                for (int i = 0; i < TILES; i++) {
                    tiles[i] = tile(k_cache, t + i * TILE);
                    next[i] = t + TILES * TILE < whole ? tile(k_cache, t + (TILES + i) * TILE) : tile(v_cache, i * TILE);
                }
                score<T, H, TILES>(queries[0], depth, tiles, next, spec.scale, scores[0] + t);
            }
        });
        for (size_t h = 0; h < heads; h++) {
            float* row = scores[h];
            if (spec.soft_cap) spec.cap(row, whole);
            std::fill_n(row, hidden[h], -std::numeric_limits<float>::infinity());
            std::fill(row + seen[h], row + whole, -std::numeric_limits<float>::infinity());  // later ones, or never written
            Floats highest = load<Floats>(row);
            for (size_t t = LANES; t < whole; t += LANES) highest = max(highest, load<Floats>(row + t));
            most[start + h] = largest(highest);
            Floats sums{};
            for (size_t t = 0; t < whole; t += LANES) {
                const Floats weight = exp_negative(load<Floats>(row + t) - most[start + h]);
                sums += weight;
                store_floats(weights[h] + t, weight);
            }
            total[start + h] = sum(sums);
        }
        float* sums = out + start * kv.head_dim;
        std::fill_n(sums, heads * kv.head_dim, 0.0f);
        for (size_t t = 0; t < seen[heads - 1]; t += TILE) {
            const bool all = t >= hidden[heads - 1] && t + TILE <= seen[0];  // everyone sees all of the tile
            for (size_t h = 0, next; h < heads; h = next) {
                for (next = all ? heads : h + 1; next < heads && hidden[next] == hidden[h] && seen[next] == seen[h];) next++;
                if (t >= seen[h]) continue;
                const uint32_t* values = tile(v_cache, t);
                if (t < hidden[h]) {
                    if (hidden[h] != cleared)
                        copy_seen(reinterpret_cast<const T*>(values), kv.head_dim, cleared = hidden[h], first_values);
                    values = reinterpret_cast<const uint32_t*>(first_values);
                }
                for_heads(next - h, [&]<size_t H>() {
                    constexpr int WIDE = width_for(H), NARROW = std::min<int>(WIDE, 2 * TILE / LANES);  // 32 dimensions divide a head
                    const auto add = kv.head_dim % (WIDE * LANES) == 0 ? add_values<T, H, WIDE> : add_values<T, H, NARROW>;
                    add(reinterpret_cast<const uint32_t*>(weights[h] + t), values, tile(v_cache, t + AHEAD), kv.head_dim,
                        std::min(TILE, seen[h] - t), sums + h * kv.head_dim);
                });
            }
        }
    }
}

template <class T, class S>
static void decode(const T* q, const S* k_cache, const S* v_cache, const int32_t* block_tables, size_t table_stride,
                   const int32_t* query_start, const int32_t* seq_lens, size_t num_shared, T* out, size_t sequences, size_t q_heads,
                   KVTiles kv, const AttentionSpec& spec) {
    const size_t group = q_heads / kv.heads, dim = kv.head_dim, shared = num_shared / PART;  // whole parts
    const size_t tokens = query_start[sequences], together = std::max<size_t>(1, SHARING / group);
    std::vector<Part> parts;
    for (size_t head = 0; head < kv.heads; head++)
        for (size_t i = 0; i < shared; i++)
            for (size_t token = 0; token < tokens; token += together)
                parts.push_back({0, head, i * PART, (i + 1) * PART, token, std::min(together, tokens - token), (i + 1) * PART,
                                 (head * shared + i) * tokens + token});
    size_t results = kv.heads * shared * tokens;
    std::vector<Own> own(tokens * kv.heads);
    for (size_t sequence = 0; sequence < sequences; sequence++)
        for (size_t head = 0; head < kv.heads && seq_lens[sequence]; head++) {
            const size_t last = seq_lens[sequence], history = last - (query_start[sequence + 1] - query_start[sequence]);
            auto first_tile = [&](size_t position) { return spec.first_seen(position) / TILE * TILE; };
            for (size_t begin = history, end; begin < last; begin = end) {  // positions of queries that begin with the same tile
                for (end = begin + 1; end < last && first_tile(end) == first_tile(begin);) end++;
                const size_t count = end - begin, start = std::max(shared * PART, first_tile(begin));
                const size_t query = query_start[sequence] + begin - history;
                for (size_t i = 0; i < count; i++)
                    own[(query + i) * kv.heads + head] = {results + i, count, (begin + i - start + PART) / PART};
                for (size_t first = start; first < end; first += PART, results += count) {
                    const size_t before = first > begin ? first - begin : 0;  // queries that see nothing of it
                    parts.push_back({sequence, head, first, std::min(end, first + PART), query + before, count - before,
                                     begin + before, results + before});
                }
            }
        }
    const std::unique_ptr<float[]> sums(new float[results * group * dim]);  // unset
    std::vector<float> most(results * group), totals(results * group);
#pragma omp parallel
    {
        Dequantized<T, S> dequantized(2 * PART * dim);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < parts.size(); i++) {
            const size_t at = parts[i].result * group;
            attend(q, k_cache, v_cache, block_tables + parts[i].sequence * table_stride, parts[i], q_heads, kv, spec,
                   dequantized.get(), sums.get() + at * dim, most.data() + at, totals.data() + at);
        }
#pragma omp for schedule(static)
        for (size_t i = 0; i < tokens * kv.heads; i++) {
            const size_t token = i / kv.heads, head = i % kv.heads, count = shared + own[i].count;
            if (!count) continue;
            auto result = [&](size_t p) {
                return p < shared ? (head * shared + p) * tokens + token : own[i].first + (p - shared) * own[i].step;
            };
            for (size_t h = 0; h < group; h++) {
                const float* sink = spec.sinks ? spec.sinks + head * group + h : nullptr;
                float highest = sink ? *sink : most[result(0) * group + h];
                for (size_t p = 0; p < count; p++) highest = std::max(highest, most[result(p) * group + h]);
                float total = sink ? std::exp(*sink - highest) : 0;
                for (size_t p = 0; p < count; p++) {
                    float& factor = most[result(p) * group + h];
                    factor = std::exp(factor - highest);
                    total += factor * totals[result(p) * group + h];
                }
                T* to = out + (token * q_heads + head * group + h) * dim;
                for (size_t d = 0; d < dim; d += LANES) {
                    Floats all{};
                    for (size_t p = 0; p < count; p++)
                        all += most[result(p) * group + h] * load<Floats>(sums.get() + (result(p) * group + h) * dim + d);
                    store_floats(to + d, all / total);
                }
            }
        }
    }
}

// q, out [tokens][q_heads][head_dim]; query_start [sequences + 1]; block_tables [sequences][table_stride]; seq_lens count all new
// tokens. The first num_shared tokens of all sequences, new ones not among them, are in the same blocks; with a window or a chunk it
// must be 0.
extern "C" void attention_decode(int dtype, int cache_dtype, const void* q, const void* k_cache, const void* v_cache, const int32_t* block_tables,
                                 size_t table_stride, const int32_t* query_start, const int32_t* seq_lens, size_t num_shared, void* out,
                                 size_t sequences, size_t q_heads, size_t kv_heads, size_t head_dim, size_t block_size,
                                 size_t block_stride, float scale, float soft_cap, size_t window, size_t chunk, const float* sinks) {
    const AttentionSpec spec{scale, soft_cap, window, chunk, sinks};
    with_types(dtype, cache_dtype, [&]<class T, class S>(T*, S*) {
        const KVTiles kv{kv_heads, head_dim, block_size, block_stride, SCALE_SIZE<S>};
        decode((const T*)q, (const S*)k_cache, (const S*)v_cache, block_tables, table_stride, query_start, seq_lens, num_shared,
               (T*)out, sequences, q_heads, kv, spec);
    });
}
