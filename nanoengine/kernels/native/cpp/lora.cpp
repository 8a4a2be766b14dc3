// Low-rank adapters: what they add to the product of a linear layer, and the rest of that layer, in one call.
//
// A product comes as sums in float32. Rows with an adapter get scale * B (A x) added, in float32; then all rows get the bias,
// or go through the gate, and are rounded. So the other rows have the bits that linear() and gated_linear() give them.
//
// One sum adds up x and a row of A, lane by lane, and one each output of B, rank by rank: neither depends on the rows beside it.
#include "calls.h"
#include "panels.h"
#include "team.h"

namespace {

// A and B of one projection: outputs [first, first + count) of the layer. Both are in numbers of as many bits as `bits` says.
struct Piece {
    int64_t first, count, rank, bits;
    const void *a, *b;  // a [rank][inputs, to a multiple of A_GROUP]; b [groups of outputs][rank][GROUP]: what is missing is 0
    double scale;
};

// What an adapter does to a layer.
struct Adapter {
    int64_t num_pieces;

    const Piece& piece(size_t i) const { return reinterpret_cast<const Piece*>(this + 1)[i]; }
};

// Rows with the same adapter: rows[first .. first + count) of the step's list, ascending.
struct Group {
    int64_t adapter, first, count;
};

// The rows of a step that have adapters. Its memory is the caller's, who changes it from step to step.
struct Step {
    int64_t num_groups;

    const Group& group(size_t i) const { return reinterpret_cast<const Group*>(this + 1)[i]; }
};

// A piece of work on A: some of the step's rows, and some ranks.
struct Unit {
    const Piece* piece;
    float* inner;  // of the first of these rows: scale * A x, [row][rank]
    size_t row, count, first, last;
};

// Rows with the same adapter and one of its pieces.
struct Addition {
    const Piece* piece;
    const float* inner;  // [row][rank]
    const int64_t* rows;
    size_t count;
};

constexpr size_t A_GROUP = 32;  // inputs
constexpr size_t ROWS_OF_A_UNIT = 32, RANKS = 8;

// The sum of products of some lanes.
template <class T, class W> struct Lanes {
    static constexpr size_t COUNT = LANES;
    typedef Floats Values;
    static INLINE Values read(const T* from) { return load_floats(from); }
    static INLINE Values read_weights(const W* from) { return load_floats(from); }
    static INLINE Floats add(Values x, Values a, Floats sum) { return multiply_add(x, a, sum); }
};

#if defined(__AVX512BF16__)
template <> struct Lanes<bf16, bf16> {  // pairs, as in other products of this CPU
    static constexpr size_t COUNT = 2 * LANES;
    typedef Dwords Values;
    static INLINE Values read(const bf16* from) { return load<Dwords>(from); }
    static INLINE Values read_weights(const bf16* from) { return load<Dwords>(from); }
    static INLINE Floats add(Values x, Values a, Floats sum) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)a);
    }
};
#endif

// inner[m][r] = scale * (A x)[r] of M rows and R ranks.
template <int M, int R, class T, class W>
INLINE void shrink(const T* const (&x)[M], const W* a, size_t a_stride, size_t inputs, float scale, float* inner, size_t stride) {
    typedef Lanes<T, W> L;
    const size_t whole = inputs / L::COUNT * L::COUNT;
    Floats sums[M][R] = {};
    auto add = [&](auto read, size_t i) {
        typename L::Values xs[M];
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) xs[m] = read(m);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const auto row = L::read_weights(a + r * a_stride + i);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) sums[m][r] = L::add(xs[m], row, sums[m][r]);
        }
    };
    for (size_t i = 0; i < whole; i += L::COUNT) add([&](int m) { return L::read(x[m] + i); }, i);
    if (whole < inputs) {
        std::vector<T> end(L::COUNT);
        add([&](int m) {
            std::copy(x[m] + whole, x[m] + inputs, end.data());
            return L::read(end.data());
        }, whole);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) inner[m * stride + r] = sum(sums[m][r]) * scale;
}

// The same for rows m.. of a unit and all of its ranks.
template <int M, int R, class T, class W, class RowOf> NOINLINE void shrink_rows(const Unit& unit, size_t m, size_t inputs, RowOf row_of) {
    const size_t a_stride = round_up(inputs, A_GROUP), stride = unit.piece->rank;
    const W* a = (const W*)unit.piece->a;
    const float scale = (float)unit.piece->scale;
    const T* x[M];
    for (int i = 0; i < M; i++) x[i] = row_of(unit.row + m + i);
    float* inner = unit.inner + m * stride;
    size_t r = unit.first;
    for (; r + R <= unit.last; r += R) shrink<M, R>(x, a + r * a_stride, a_stride, inputs, scale, inner + r, stride);
    for (; r < unit.last; r++) shrink<M, 1>(x, a + r * a_stride, a_stride, inputs, scale, inner + r, stride);
}

template <class T, class W, class RowOf> void shrink_unit(const Unit& unit, size_t inputs, RowOf row_of) {
    constexpr int M = REGISTERS == 32 ? 4 : 2;
    size_t m = 0;
    for (; m + M <= unit.count; m += M) shrink_rows<M, 4, T, W>(unit, m, inputs, row_of);
    for (; m < unit.count; m++) shrink_rows<1, 4, T, W>(unit, m, inputs, row_of);
}

// out[m][first .. last) += inner[m] B of M rows and a group of outputs.
template <int M, class W>
INLINE void expand(const float* const (&inner)[M], const W* b, size_t rank, float* const (&out)[M], size_t first, size_t last) {
    constexpr int VECTORS = GROUP / LANES;
    Floats sums[M][VECTORS] = {};
    for (size_t r = 0; r < rank; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const Floats row = load_floats(b + r * GROUP + v * LANES);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) sums[m][v] = multiply_add(row, splat(inner[m][r]), sums[m][v]);
        }
    if (last - first == GROUP) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) store(out[m] + v * LANES, load<Floats>(out[m] + v * LANES) + sums[m][v]);
        return;
    }
    std::vector<float> part(M * GROUP);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(part.data() + m * GROUP + v * LANES, sums[m][v]);
    for (int m = 0; m < M; m++)
        for (size_t i = first; i < last; i++) out[m][i] += part[m * GROUP + i];
}

// sums [rows][outputs] += what an addition adds to the outputs [from, to).
template <int M, class W> NOINLINE void expand_rows(const Addition& addition, size_t m, float* sums, size_t outputs, size_t from, size_t to) {
    const size_t first = addition.piece->first, rank = addition.piece->rank;
    const float* inner[M];
    float* out[M];
    for (size_t group = (from - first) / GROUP; first + group * GROUP < to; group++) {
        const size_t start = first + group * GROUP;
        for (int i = 0; i < M; i++) inner[i] = addition.inner + (m + i) * rank, out[i] = sums + addition.rows[m + i] * outputs + start;
        expand<M>(inner, (const W*)addition.piece->b + group * rank * GROUP, rank, out, std::max(from, start) - start,
                  std::min(to, start + GROUP) - start);
    }
}

template <class W> void expand_to(const Addition& addition, size_t m, size_t end, float* sums, size_t outputs, size_t from, size_t to) {
    constexpr int M = LANES == 16 ? 8 : LANES == 8 || REGISTERS == 32 ? 4 : 2;
    for (; m + M <= end; m += M) expand_rows<M, W>(addition, m, sums, outputs, from, to);
    for (; m < end; m++) expand_rows<1, W>(addition, m, sums, outputs, from, to);
}

// Some rows and columns of a result, of one unit of work: for few rows they are cut so that all threads have some.
struct Block {
    size_t row, last_row, first, last;
};
constexpr size_t ROWS_AT_ONCE = 32, FEW_OUTPUTS = 64, MANY_OUTPUTS = 512;

// The input of a layer, and its product with the weights.
template <class T> struct LayerInput {
    const T *x, *residual;  // [rows][inputs]; the residual is the sum already, if there is one (else null)
    const float* norm;      // [inputs]: the layer computes with the norm of that; null: with x itself
    float eps;
    float* sums;  // [rows][outputs]
    size_t rows, inputs, outputs;
};

// The adapters of a step, on one layer.
template <class T> struct Layer {
    LayerInput<T> input;
    const int64_t* rows;  // of the step
    size_t num_rows = 0;
    std::vector<Unit> units;
    std::vector<Addition> additions;
    std::unique_ptr<float[]> inner;
    std::unique_ptr<T[]> normed;  // of these rows

    Layer(const LayerInput<T>& input, const Step& step, const int64_t* rows, const Adapter* const* adapters) : input(input), rows(rows) {
        size_t size = 0;
        for (int64_t i = 0; i < step.num_groups; i++) {
            const Group& group = step.group(i);
            const Adapter* adapter = adapters[group.adapter];
            num_rows += group.count;
            for (int64_t p = 0; adapter && p < adapter->num_pieces; p++) {
                additions.push_back({&adapter->piece(p), nullptr, rows + group.first, (size_t)group.count});
                size += group.count * adapter->piece(p).rank;
            }
        }
        inner.reset(new float[size]);
        if (input.norm) normed.reset(new T[num_rows * input.inputs]);
        float* at = inner.get();
        for (Addition& addition : additions) {
            const size_t rank = addition.piece->rank;
            addition.inner = at;
            for (size_t m = 0; m < addition.count; m += ROWS_OF_A_UNIT)
                for (size_t r = 0; r < rank; r += RANKS)
                    units.push_back({addition.piece, at + m * rank, addition.rows - rows + m, std::min(ROWS_OF_A_UNIT, addition.count - m), r,
                                     std::min(r + RANKS, rank)});
            at += addition.count * rank;
        }
    }

    void normalize(size_t i) const {
        const size_t size = input.inputs;
        const T* x = (input.residual ? input.residual : input.x) + rows[i] * size;
        scale_by(x, inverse_rms<T>(x, nullptr, size, input.eps), input.norm, size, normed.get() + i * size);
    }

    // Add to the outputs [from, to) of some rows.
    void add(Block block, size_t from, size_t to) const {
        for (const Addition& addition : additions) {
            const size_t first = std::max<size_t>(from, addition.piece->first), last = std::min<size_t>(to, addition.piece->first + addition.piece->count);
            const auto index_of = [&](size_t row) { return std::lower_bound(addition.rows, addition.rows + addition.count, (int64_t)row) - addition.rows; };
            const size_t m = index_of(block.row), end = index_of(block.last_row);
            if (first >= last || m == end) continue;
            if (addition.piece->bits == 16) expand_to<bf16>(addition, m, end, input.sums, input.outputs, first, last);
            else expand_to<f32>(addition, m, end, input.sums, input.outputs, first, last);
        }
    }

    // finish(block) for all blocks of `columns`, when all of A x is there.
    template <class Finish> void compute(size_t columns, Finish finish) const {
        const auto row_of = [&](size_t i) { return normed ? normed.get() + i * input.inputs : input.x + rows[i] * input.inputs; };
        parallel([&](Member member) {
            if (normed) {
                member.static_for(num_rows, [&](size_t i) { normalize(i); });
                member.barrier();
            }
            member.static_for(units.size(), [&](size_t i) {
                if (units[i].piece->bits == 16) shrink_unit<T, bf16>(units[i], input.inputs, row_of);
                else shrink_unit<T, f32>(units[i], input.inputs, row_of);
            });
            member.barrier();
            const size_t wide = input.rows > ROWS_AT_ONCE ? MANY_OUTPUTS : FEW_OUTPUTS, across = (columns + wide - 1) / wide;
            member.static_for((input.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * across, [&](size_t i) {
                const size_t row = i / across * ROWS_AT_ONCE, first = i % across * wide;
                finish(Block{row, std::min(row + ROWS_AT_ONCE, input.rows), first, std::min(first + wide, columns)});
            });
        });
    }
};

template <class T> void add_bias_and_round(const float* sums, const T* bias, T* out, size_t size) {
    for_vectors(size, [&](size_t i, auto some) {
        store_some(out + i, load_some(sums + i, some) + (bias ? load_some(bias + i, some) : Floats{}), some);
    });
}

}  // namespace

extern "C" {

// out [rows][outputs] = sums + what adapters add to some rows + bias (null: none). `sums` is the product of linear() with the
// same x [rows][inputs], residual and norm, in float32, and is overwritten. step_rows are the rows that the groups of the step
// name, and adapters[i] is what adapter i does to this layer (null: nothing).
void adapted_linear(int dtype, const void* x, const void* residual, const float* norm, float eps, void* sums, const void* bias, void* out,
                    size_t rows, size_t inputs, size_t outputs, const Step* step, const int64_t* step_rows,
                    const Adapter* const* adapters) {
    with_type(dtype, [&]<class T>(T*) {
        const LayerInput<T> input{(const T*)x, (const T*)residual, norm, eps, (float*)sums, rows, inputs, outputs};
        const Layer<T> layer(input, *step, step_rows, adapters);
        layer.compute(outputs, [&](Block block) {
            const size_t first = block.first, size = block.last - first;
            layer.add(block, first, block.last);
            for (size_t row = block.row; row < block.last_row; row++)
                add_bias_and_round(input.sums + row * outputs + first, bias ? (const T*)bias + first : nullptr,
                                   (T*)out + row * outputs + first, size);
        });
    });
}

// The same with a gate instead of the bias: out [rows][outputs / 2].
void adapted_gated_linear(int dtype, int activation, const void* x, const void* residual, const float* norm, float eps,
                          void* sums, void* out, size_t rows, size_t inputs, size_t outputs, const Step* step, const int64_t* step_rows,
                          const Adapter* const* adapters) {
    with_type(dtype, [&]<class T>(T*) {
        const size_t half = outputs / 2;
        const LayerInput<T> input{(const T*)x, (const T*)residual, norm, eps, (float*)sums, rows, inputs, outputs};
        const Layer<T> layer(input, *step, step_rows, adapters);
        layer.compute(half, [&](Block block) {
            const size_t first = block.first, size = block.last - first;
            layer.add(block, first, block.last);
            layer.add(block, half + first, half + block.last);
            with_activation(activation, [&]<Activation ACTIVATION>() {
                for (size_t row = block.row; row < block.last_row; row++) {
                    const float* gates = input.sums + row * outputs + first;
                    gate_pairs<ACTIVATION>(gates, gates + half, size, (T*)out + row * half + first);
                }
            });
        });
    });
}
}
RECORDABLE(adapted_linear)
RECORDABLE(adapted_gated_linear)
