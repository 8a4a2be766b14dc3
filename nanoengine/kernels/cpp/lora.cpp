// Low-rank adapters: what they add to the product of a linear layer, and the rest of that layer, in one call.
//
// A product comes as sums in float32. Rows with an adapter get scale * B (A x) added, in float32; then all rows get the bias, or go
// through the gate, and are rounded. So the other rows have the bits that linear() and gated_linear() give them.
//
// One sum adds up x and a row of A, lane by lane, and one each output of B, rank by rank: neither depends on the rows beside it.
#include "calls.h"
#include "panels.h"
#include "team.h"

namespace {

// A and B of one projection: outputs [first, first + count) of the layer. Both are in numbers of as many bits as `bits` says.
struct Piece {
    int64_t first, count, rank, bits;
    const void *a, *b;  // a [rank][inputs, to whole groups]; b [groups of outputs][rank][GROUP]: what is missing of a group is 0
    double scale;
};

// What an adapter does to a layer.
struct Adapter {
    int64_t num_pieces;

    const Piece& piece(size_t i) const { return reinterpret_cast<const Piece*>(this + 1)[i]; }
};

// Rows with the same adapter: rows[first .. first + count) of the step's list.
struct Group {
    int64_t adapter, first, count;
};

// The rows of a step that have adapters. Its memory is the caller's, who changes it from step to step.
struct Step {
    int64_t num_groups;

    const Group& group(size_t i) const { return reinterpret_cast<const Group*>(this + 1)[i]; }
};

// A piece of work: some rows, and some ranks (of A) or groups of outputs (of B).
struct Unit {
    const Piece* piece;
    float* inner;  // of the first of these rows: A x, [row][rank]
    const int64_t* rows;
    size_t count, first, last;
};

constexpr size_t ROWS_OF_A_UNIT = 32, RANKS = 8, ROWS_OF_B_UNIT = 64, GROUPS_OF_B_UNIT = 32;

// inner[m][r] = scale * (A x)[r] of M rows and R ranks.
template <int M, int R, class T, class W>
INLINE void shrink(const T* const (&x)[M], const W* a, size_t inputs, float scale, float* inner, size_t stride) {
    const size_t a_stride = round_up(inputs, GROUP), whole = inputs / LANES * LANES;
    Floats sums[M][R] = {};
    auto add = [&](auto load_x, size_t i) {
        Floats xs[M];
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) xs[m] = load_x(m);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const Floats row = load_floats(a + r * a_stride + i);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) sums[m][r] = multiply_add(xs[m], row, sums[m][r]);
        }
    };
    for (size_t i = 0; i < whole; i += LANES) add([&](int m) { return load_floats(x[m] + i); }, i);
    if (whole < inputs)
        add([&](int m) {
            T end[LANES] = {};
            std::copy(x[m] + whole, x[m] + inputs, end);
            return load_floats(end);
        }, whole);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) inner[m * stride + r] = sum(sums[m][r]) * scale;
}

template <class T, class W> NOINLINE void shrink_unit(const Unit& unit, const T* x, size_t inputs) {
    const size_t a_stride = round_up(inputs, GROUP), stride = unit.piece->rank;
    const W* a = (const W*)unit.piece->a;
    const float scale = (float)unit.piece->scale;
    size_t m = 0;
    for (; m + 4 <= unit.count; m += 4) {
        const T* rows[4];
        for (int i = 0; i < 4; i++) rows[i] = x + unit.rows[m + i] * inputs;
        float* inner = unit.inner + m * stride;
        size_t r = unit.first;
        for (; r + 4 <= unit.last; r += 4) shrink<4, 4>(rows, a + r * a_stride, inputs, scale, inner + r, stride);
        for (; r < unit.last; r++) shrink<4, 1>(rows, a + r * a_stride, inputs, scale, inner + r, stride);
    }
    for (; m < unit.count; m++) {
        const T* rows[1] = {x + unit.rows[m] * inputs};
        float* inner = unit.inner + m * stride;
        size_t r = unit.first;
        for (; r + 8 <= unit.last; r += 8) shrink<1, 8>(rows, a + r * a_stride, inputs, scale, inner + r, stride);
        for (; r < unit.last; r++) shrink<1, 1>(rows, a + r * a_stride, inputs, scale, inner + r, stride);
    }
}

// out[m][0 .. columns) += inner[m] B of M rows and a group of outputs.
template <int M, class W>
INLINE void expand(const float* const (&inner)[M], const W* b, size_t rank, float* const (&out)[M], size_t columns) {
    constexpr int VECTORS = GROUP / LANES;
    Floats sums[M][VECTORS] = {};
    for (size_t r = 0; r < rank; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const Floats row = load_floats(b + r * GROUP + v * LANES);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) sums[m][v] = multiply_add(row, splat(inner[m][r]), sums[m][v]);
        }
    for (int m = 0; m < M; m++) {
        float own[GROUP] = {};
        float* to = columns == GROUP ? out[m] : own;
        if (to == own) std::copy_n(out[m], columns, own);
        for (int v = 0; v < VECTORS; v++) store(to + v * LANES, load<Floats>(to + v * LANES) + sums[m][v]);
        if (to == own) std::copy_n(own, columns, out[m]);
    }
}

template <class W> NOINLINE void expand_unit(const Unit& unit, float* sums, size_t outputs) {
    const Piece& piece = *unit.piece;
    const size_t rank = piece.rank;
    const auto some = [&]<int M>(size_t m) {
        for (size_t group = unit.first; group < unit.last; group++) {
            const float* inner[M];
            float* out[M];
            for (int i = 0; i < M; i++) {
                inner[i] = unit.inner + (m + i) * rank;
                out[i] = sums + unit.rows[m + i] * outputs + piece.first + group * GROUP;
            }
            expand<M>(inner, (const W*)piece.b + group * rank * GROUP, rank, out, std::min<size_t>(GROUP, piece.count - group * GROUP));
        }
    };
    size_t m = 0;
    for (; m + 4 <= unit.count; m += 4) some.template operator()<4>(m);
    for (; m < unit.count; m++) some.template operator()<1>(m);
}

// sums [rows][outputs] += what the adapters add; then finish(row) for all rows.
template <class T, class Finish>
void add_adapters(const T* x, float* sums, size_t num_rows, size_t inputs, size_t outputs, const Step& step, const int64_t* rows,
                  const Adapter* const* adapters, Finish finish) {
    std::vector<Unit> of_a, of_b;
    size_t size = 0;
    const auto each = [&](auto use) {
        for (int64_t i = 0; i < step.num_groups; i++) {
            const Group& group = step.group(i);
            const Adapter* adapter = adapters[group.adapter];
            for (int64_t p = 0; adapter && p < adapter->num_pieces; p++) use(group, adapter->piece(p));
        }
    };
    each([&](const Group& group, const Piece& piece) { size += group.count * piece.rank; });
    const std::unique_ptr<float[]> inner(new float[size]);
    float* at = inner.get();
    each([&](const Group& group, const Piece& piece) {
        const auto cut = [&](std::vector<Unit>& units, size_t most_rows, size_t all, size_t most) {
            for (size_t m = 0; m < (size_t)group.count; m += most_rows)
                for (size_t first = 0; first < all; first += most)
                    units.push_back({&piece, at + m * piece.rank, rows + group.first + m, std::min<size_t>(most_rows, group.count - m), first,
                                     std::min(first + most, all)});
        };
        cut(of_a, ROWS_OF_A_UNIT, piece.rank, RANKS);
        cut(of_b, ROWS_OF_B_UNIT, round_up(piece.count, GROUP) / GROUP, GROUPS_OF_B_UNIT);
        at += group.count * piece.rank;
    });
    together([&](Member member) {
        member.share(of_a.size(), [&](size_t i) {
            if (of_a[i].piece->bits == 16) shrink_unit<T, bf16>(of_a[i], x, inputs);
            else shrink_unit<T, f32>(of_a[i], x, inputs);
        });
        member.meet();
        member.share(of_b.size(), [&](size_t i) {
            if (of_b[i].piece->bits == 16) expand_unit<bf16>(of_b[i], sums, outputs);
            else expand_unit<f32>(of_b[i], sums, outputs);
        });
        member.meet();
        member.share(num_rows, finish);
    });
}

template <class T> void add_bias_and_round(const float* sums, const T* bias, T* out, size_t size) {
    const size_t whole = size / LANES * LANES;
    for (size_t i = 0; i < whole; i += LANES)
        store_floats(out + i, load<Floats>(sums + i) + (bias ? load_floats(bias + i) : Floats{}));
    for (size_t i = whole; i < size; i++) from_float(out + i, sums[i] + (bias ? to_float(bias[i]) : 0.0f));
}

// Some elements of a gate; `rounds`: gates and values are rounded before they meet.
template <Activation ACTIVATION, class T> INLINE void gate_lanes(const float* gates, const float* ups, bool rounds, T* out) {
    Floats gate = load<Floats>(gates), up = load<Floats>(ups);
    if (rounds) {
        T both[2][LANES];
        store_floats(both[0], gate);
        store_floats(both[1], up);
        gate = load_floats(both[0]), up = load_floats(both[1]);
    }
    store_floats(out, gated<ACTIVATION>(gate, up));
}

template <Activation ACTIVATION, class T> void gate_row(const float* gates, const float* ups, bool rounds, T* out, size_t size) {
    const size_t whole = size / LANES * LANES;
    for (size_t i = 0; i < whole; i += LANES) gate_lanes<ACTIVATION>(gates + i, ups + i, rounds, out + i);
    if (whole == size) return;
    float ends[2][LANES] = {};
    T end[LANES];
    std::copy(gates + whole, gates + size, ends[0]);
    std::copy(ups + whole, ups + size, ends[1]);
    gate_lanes<ACTIVATION>(ends[0], ends[1], rounds, end);
    std::copy_n(end, size - whole, out + whole);
}

}  // namespace

extern "C" {

// out [rows][outputs] = sums + what adapters add to some rows + bias (null: none). x [rows][inputs] is what the layer was given, and
// `sums` its product with the weights, which is overwritten; step_rows are the rows that the groups of the step name, and
// adapters[i] is what adapter i does to this layer (null: nothing).
void adapted_linear(int dtype, const void* x, void* sums, const void* bias, void* out, size_t rows, size_t inputs, size_t outputs,
                    const Step* step, const int64_t* step_rows, const Adapter* const* adapters) {
    with_type(dtype, [&]<class T>(T*) {
        add_adapters((const T*)x, (float*)sums, rows, inputs, outputs, *step, step_rows, adapters, [&](size_t row) {
            add_bias_and_round((const float*)sums + row * outputs, (const T*)bias, (T*)out + row * outputs, outputs);
        });
    });
}

// The same with a gate in place of the bias: out [rows][outputs / 2]. rounds: as `linear` and `gate` one after the other.
void adapted_gated_linear(int dtype, int activation, int rounds, const void* x, void* sums, void* out, size_t rows, size_t inputs,
                          size_t outputs, const Step* step, const int64_t* step_rows, const Adapter* const* adapters) {
    with_type(dtype, [&]<class T>(T*) {
        const auto function = activation == SILU ? gate_row<SILU, T> : activation == GELU_TANH ? gate_row<GELU_TANH, T> : gate_row<CLAMPED, T>;
        const size_t half = outputs / 2;
        add_adapters((const T*)x, (float*)sums, rows, inputs, outputs, *step, step_rows, adapters, [&](size_t row) {
            const float* gates = (const float*)sums + row * outputs;
            function(gates, gates + half, rounds, (T*)out + row * half, half);
        });
    });
}
}
RECORDABLE(adapted_linear)
RECORDABLE(adapted_gated_linear)
