// The gated delta rule and the scan of Mamba 2, token by token, and the norm behind them.
//
// Both have a state S of depth x width numbers for each head, in which columns do not know each other, and do with a token
//     S = fade S + key change^T,  out = S^T query,
// where the change of Mamba 2 is its input, and that of the delta rule what the input differs from what S says of the key.
#include <cmath>
#include "calls.h"
#include "panels.h"
#include "states.h"
#include "team.h"

namespace {

constexpr size_t MAX_DEPTH_OF_STATE = 256;
constexpr size_t VECTORS = REGISTERS == 32 ? 4 : 2, BLOCK = VECTORS * LANES;  // columns of a block

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Elements as floats, and zeros behind them up to a whole vector.
template <class T> void as_floats(const T* from, size_t count, float* to) {
    for (size_t i = 0; i < count; i += LANES) store_floats(to + i, load_some(from + i, count - i));
}

// x / |x| * factor
void normalize(float* x, size_t count, float factor) {
    Floats squares{};
    for (size_t i = 0; i < count; i += LANES) squares = multiply_add(load<Floats>(x + i), load<Floats>(x + i), squares);
    const float scale = factor / std::sqrt(sum(squares) + 1e-6f);
    for (size_t i = 0; i < count; i += LANES) store(x + i, load<Floats>(x + i) * scale);
}

// What differs between the two.
template <class T> struct Projected {
    Strided<T> query, key, value;  // of the first head
    Strided<T> fading, beta;       // [tokens][heads]; beta is null for Mamba 2
    const float *log_rate, *bias, *skip;  // [heads]; skip is null for the delta rule
    size_t heads, groups, depth, width;   // a group of heads has one query and key
    bool tiled;                           // whether head i is of group i % groups, and not one behind the other
};

// One token in V vectors of columns of a state.
template <int V>
INLINE void step(float* state, size_t stride, size_t depth, const float* query, const float* key, float fade, const float* beta,
                 Floats (&change)[V], Floats (&out)[V]) {
    if (beta) {
        Floats even[V]{}, odd[V]{};
        for (size_t i = 0; i < depth; i += 2)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                even[v] = multiply_add(load<Floats>(state + i * stride + v * LANES), splat(key[i]), even[v]);
                odd[v] = multiply_add(load<Floats>(state + (i + 1) * stride + v * LANES), splat(key[i + 1]), odd[v]);
            }
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) change[v] = (change[v] - (even[v] + odd[v]) * fade) * *beta;
    }
    Floats even[V]{}, odd[V]{};
    for (size_t i = 0; i < depth; i += 2)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            float *first = state + i * stride + v * LANES, *second = first + stride;
            const Floats a = multiply_add(splat(key[i]), change[v], load<Floats>(first) * fade);
            const Floats b = multiply_add(splat(key[i + 1]), change[v], load<Floats>(second) * fade);
            store(first, a);
            store(second, b);
            even[v] = multiply_add(a, splat(query[i]), even[v]);
            odd[v] = multiply_add(b, splat(query[i + 1]), odd[v]);
        }
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) out[v] = even[v] + odd[v];
}

// A run of tokens in some columns of the state of a head. It is computed in place, unless it is stored elsewhere, or
// does not fill whole vectors.
template <class T, int V>
void columns(const Projected<T>& p, const StateRuns& runs, size_t run, size_t head, size_t column, float* states, size_t slot_stride,
             float* out) {
    alignas(64) float room[MAX_DEPTH_OF_STATE * V * LANES], query[MAX_DEPTH_OF_STATE], key[MAX_DEPTH_OF_STATE];
    const size_t offset = head * p.depth * p.width + column, count = std::min(p.width - column, (size_t)V * LANES);
    const bool copied = runs.store_starts || count % LANES || p.depth % 2;
    const size_t stride = copied ? V * LANES : p.width, depth = (p.depth + 1) / 2 * 2;
    float* state = room;
    const auto copy = [&](const float* from, size_t from_stride, float* to, size_t to_stride) {
        for (size_t i = 0; i < p.depth; i++) std::memcpy(to + i * to_stride, from + i * from_stride, count * sizeof(float));
    };
    if (copied) std::fill_n(room, depth * stride, 0.0f);
    const float rate = -std::exp(p.log_rate[head]);
    const size_t group = p.tiled ? head % p.groups : head / (p.heads / p.groups);
    runs.for_each_run(
        run,
        [&](size_t slot) {
            float* stored = states + slot * slot_stride + offset;
            if (copied) copy(stored, p.width, room, stride);
            else state = stored;
        },
        [&](size_t t) {
            as_floats(p.query.row(t) + group * p.depth, p.depth, query);
            as_floats(p.key.row(t) + group * p.depth, p.depth, key);
            const float time = softplus(to_float(p.fading.row(t)[head]) + p.bias[head]);
            const float fade = std::exp(rate * time);
            float beta = 0;
            if (p.beta.at) {
                normalize(query, p.depth, 1.0f / std::sqrt((float)p.depth));
                normalize(key, p.depth, 1.0f);
                beta = 1.0f / (1.0f + std::exp(-to_float(p.beta.row(t)[head])));
            }
            Floats value[V], change[V], sums[V];
            for (int v = 0; v < V; v++) {
                value[v] = load_some(p.value.row(t) + head * p.width + column + v * LANES, count - v * LANES);
                change[v] = p.beta.at ? value[v] : value[v] * time;
            }
            step<V>(state, stride, depth, query, key, fade, p.beta.at ? &beta : nullptr, change, sums);
            for (int v = 0; v < V; v++) {
                if (p.skip) sums[v] = multiply_add(splat(p.skip[head]), value[v], sums[v]);
                store_some(out + (t * p.heads + head) * p.width + column + v * LANES, sums[v], count - v * LANES);
            }
        },
        [&](size_t slot) {
            if (copied) copy(room, stride, states + slot * slot_stride + offset, p.width);
        });
}

template <class T>
void recur(const Projected<T>& p, const StateRuns& runs, size_t num_runs, float* states, size_t slot_stride, float* out) {
    const size_t blocks = (p.width + BLOCK - 1) / BLOCK;
    for_each(num_runs * p.heads * blocks, false, [&](size_t item) {
        const size_t run = item / blocks / p.heads, head = item / blocks % p.heads, column = item % blocks * BLOCK;
        const auto call = [&](auto f) { f(p, runs, run, head, column, states, slot_stride, out); };
        switch ((std::min(p.width - column, BLOCK) + LANES - 1) / LANES) {
            case 1: return call(columns<T, 1>);
            case 2: return call(columns<T, 2>);
            case 3: return call(columns<T, std::min<int>(3, VECTORS)>);
            default: return call(columns<T, VECTORS>);
        }
    });
}

}  // namespace

extern "C" {

// qkv [tokens][stride]: queries and keys of k_heads, [depth] each, then values of all heads, [width] each. a and b have
// strides between tokens. states [slots][heads][depth][width] with a stride between slots; out [tokens][heads][width]. Tiled:
// head i has query and key i % k_heads.
void delta_rule(int dtype, const void* qkv, size_t stride, const void* a, size_t a_stride, const void* b, size_t b_stride,
                const float* log_rate, const float* bias, float* states, size_t slot_stride, const int32_t* rows,
                const int32_t* starts, const int32_t* store_starts, const int32_t* store_tokens, const int32_t* store_slots,
                float* out, size_t runs, size_t k_heads, size_t heads, size_t depth, size_t width, int tiled) {
    const StateRuns state_runs{rows, starts, store_starts, store_tokens, store_slots};
    with_type(dtype, [&]<class T>(T*) {
        const T *query = (const T*)qkv, *key = query + k_heads * depth, *value = key + k_heads * depth;
        recur<T>({{query, stride}, {key, stride}, {value, stride}, {(const T*)a, a_stride}, {(const T*)b, b_stride}, log_rate, bias, nullptr,
                  heads, k_heads, depth, width, tiled != 0},
                 state_runs, runs, states, slot_stride, out);
    });
}

// xbc [tokens][stride]: inputs of all heads, [width] each, then keys (B) and queries (C) of each group of heads, [depth] each.
// The rest as above.
void mamba2(int dtype, const void* xbc, size_t stride, const void* dt, size_t dt_stride, const float* log_rate,
            const float* bias, const float* skip, float* states, size_t slot_stride, const int32_t* rows, const int32_t* starts,
            const int32_t* store_starts, const int32_t* store_tokens, const int32_t* store_slots, float* out, size_t runs,
            size_t groups, size_t heads, size_t depth, size_t width) {
    const StateRuns state_runs{rows, starts, store_starts, store_tokens, store_slots};
    with_type(dtype, [&]<class T>(T*) {
        const T *value = (const T*)xbc, *key = value + heads * width, *query = key + groups * depth;
        recur<T>({{query, stride}, {key, stride}, {value, stride}, {(const T*)dt, dt_stride}, {nullptr, 0}, log_rate, bias, skip, heads,
                  groups, depth, width, false},
                 state_runs, runs, states, slot_stride, out);
    });
}

// The norm of groups of columns, with a gate before or behind it. x [rows][width]; gate has a stride between rows; of the weight,
// [weights], repeats. out [rows][width] as gate is.
void gated_norm(int dtype, const float* x, const void* gate, size_t gate_stride, const float* weight, size_t weights, void* out,
                size_t rows, size_t width, size_t group, float eps, int gate_first) {
    with_type(dtype, [&]<class T>(T*) {
        const Strided<T> gates{(const T*)gate, gate_stride};
        const size_t groups = width / group;
        for_each(rows * groups, rows * width < 8192, [&](size_t item) {
            const size_t row = item / groups, first = item % groups * group;
            const float* from = x + row * width + first;
            const T* by = gates.row(row) + first;
            const auto input = [&](size_t i) {
                const Floats value = load_some(from + i, group - i), factor = load_some(by + i, group - i);
                return gate_first ? value * times_sigmoid(factor, factor) : value;
            };
            Floats squares{};
            for (size_t i = 0; i < group; i += LANES) squares = multiply_add(input(i), input(i), squares);
            const float scale = 1.0f / std::sqrt(sum(squares) / group + eps);
            for (size_t i = 0; i < group; i += LANES) {
                Floats value = input(i) * scale * load_some(weight + (first + i) % weights, group - i);
                const Floats factor = load_some(by + i, group - i);
                if (!gate_first) value *= times_sigmoid(factor, factor);
                store_some((T*)out + row * width + first + i, value, group - i);
            }
        });
    });
}
}
RECORDABLE(delta_rule)
RECORDABLE(mamba2)
RECORDABLE(gated_norm)
