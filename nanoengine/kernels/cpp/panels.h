// A packed weight, and how rows are multiplied with it.
//
// W [outputs][inputs] is cut into panels of COLUMNS outputs. In a panel stands, for each dword of inputs, that dword of all its
// outputs. One row of x reads a panel from memory in a single stream; more rows find it in the first-level cache, chunk by chunk.
#pragma once
#include "norm.h"
#include "product.h"
#include <algorithm>
#include <vector>

constexpr size_t PANEL = COLUMNS;
constexpr size_t ROW_BLOCK = 96;  // rows of x that are kept near

static size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

// Dwords in a row of W.
template <class T> static size_t depth_of(size_t inputs) { return round_up(inputs, Dot<T>::PER_DWORD) / Dot<T>::PER_DWORD; }

// Where dword d of an output is.
static size_t place(size_t output, size_t d, size_t depth) { return output / PANEL * PANEL * depth + d * PANEL + output % PANEL; }

enum Activation { SILU = 0, GELU_TANH = 1, CLAMPED = 2 };  // as the callers number them

// factor / (1 + exp(-x)).
static INLINE Floats times_sigmoid(Floats factor, Floats x) {
    const Floats small = exp_negative(x < 0.0f ? x : -x);  // exp(-|x|): never too large
    return factor * (x < 0.0f ? small : splat(1.0f)) / (small + 1.0f);
}

// What a gate makes of the value beside it (gates.py).
template <Activation ACTIVATION> static INLINE Floats gated(Floats gate, Floats up) {
    if (ACTIVATION == SILU) return times_sigmoid(gate, gate) * up;
    if (ACTIVATION == GELU_TANH)  // (1 + tanh(y)) / 2 is the sigmoid of 2 y; sqrt(8 / pi) is 1.59576912
        return times_sigmoid(gate, gate * (gate * gate * 0.044715f + 1.0f) * 1.59576912f) * up;
    gate = gate > 7.0f ? splat(7.0f) : gate;
    up = up > 7.0f ? splat(7.0f) : up < -7.0f ? splat(-7.0f) : up;
    return times_sigmoid(gate, gate * 1.702f) * (up + 1.0f);
}

// A kind of gate, and the biases of a panel of gates and of the values beside them; null: none.
struct Gate {
    Activation activation;
    const float *bias, *up_bias;
};

// Gates become what they make of the values beside them.
template <Activation ACTIVATION>
static NOINLINE void gate_rows(float (*gates)[PANEL], const float (*ups)[PANEL], size_t count) {
    for (size_t m = 0; m < count; m++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++)
            store(gates[m] + v * LANES,
                  gated<ACTIVATION>(load<Floats>(gates[m] + v * LANES), load<Floats>(ups[m] + v * LANES)));
}

// Add a bias of the first `columns` outputs to each row.
static NOINLINE void add_bias(float (*sums)[PANEL], size_t count, const float* bias, size_t columns) {
    for (size_t m = 0; m < count; m++)
        for (size_t c = 0; c < columns; c++) sums[m][c] += bias[c];
}

// A panel's results in `count` rows of out: vector v of row m is value(m, v). Of the last panel perhaps only the first `columns`.
template <class Out, class Value>
static INLINE void store_panel(Out* out, size_t stride, size_t count, size_t columns, Value value) {
    if (columns == PANEL) {
        for (size_t m = 0; m < count; m++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) store_floats(out + m * stride + v * LANES, value(m, v));
        return;
    }
    std::vector<Out> row(PANEL);  // not an array: a test demands that loops leave no vector on the stack
    for (size_t m = 0; m < count; m++) {
        for (int v = 0; v < WIDE; v++) store_floats(row.data() + v * LANES, value(m, v));
        std::copy_n(row.data(), columns, out + m * stride);
    }
}

// The input of a linear layer: x [rows][inputs], or its norm; see rms_norm for the residual.
template <class T> struct Input {
    const T* x;
    T* residual;
    const float* norm;  // the norm's weight, or null
    float eps;
    size_t rows, inputs;
};

// What row `row` of an input is scaled by before its norm's weights, 1 without a norm; x becomes the residual, if there is one.
template <class T> static float normalize(const Input<T>& input, size_t row, const T*& x) {
    if (!input.norm) return 1.0f;
    T* residual = input.residual ? input.residual + row * input.inputs : nullptr;
    const float scale = inverse_rms(x, residual, input.inputs, input.eps);
    if (residual) x = residual;
    return scale;
}

// Some rows of an input as factors: [chunk of the inputs][row].
template <class T> struct Block {
    static constexpr size_t CHUNK = MAX_DEPTH / Dot<T>::STEPS;  // dwords

    size_t inputs, rows, depth = depth_of<T>(inputs);
    Factors<T> factors{round_up(depth, CHUNK) / CHUNK * rows};

    auto* at(size_t row, size_t d) { return factors.row(d / CHUNK * rows + row); }

    // Row `from` of the input becomes this block's row `to`.
    void take(const Input<T>& input, size_t from, size_t to) {
        const T* x = input.x + from * inputs;
        const float scale = normalize(input, from, x);
        for (size_t d = 0; d < depth; d += CHUNK) {
            const size_t first = d * Dot<T>::PER_DWORD, count = std::min(CHUNK * Dot<T>::PER_DWORD, inputs - first);
            if (input.norm) scale_by(x + first, scale, input.norm + first, count, at(to, d));
            else copy_elements(x + first, count, at(to, d));
            for (size_t i = count; i % Dot<T>::PER_DWORD; i++) at(to, d)[i] = {};  // an odd end is half a dword
        }
    }

    // sums[i][0..PANEL) of the rows [first, first + count) and the outputs of a panel.
    void multiply(size_t first, size_t count, const uint32_t* panel, float (*sums)[PANEL]) {
        for (size_t d = 0; d < depth; d += CHUNK)
            product<T, FROM_MEMORY>((int)count, at(first, d), columns_at(panel + d * PANEL), PANEL, std::min(CHUNK, depth - d), sums[0],
                                    PANEL, d > 0);
    }
};

// A packed weight of numbers.
template <class T> struct Dense {
    typedef Block<T> Rows;
    typedef const uint32_t* Panel;
    const uint32_t* packed;
    size_t outputs, inputs;

    size_t panels() const { return round_up(outputs, PANEL) / PANEL; }
    Panel panel(size_t i) const { return packed + i * PANEL * depth_of<T>(inputs); }
    size_t first(size_t i) const { return i * PANEL; }  // of the panel's outputs
    size_t columns(size_t i) const { return std::min(PANEL, outputs - first(i)); }
};

// out [count][stride] = gated(x G^T + bias, x U^T + bias) of some rows and the outputs of a panel of G and one of U.
template <class Rows, class Panel, class T>
static void multiply_gated(Rows& rows, const Gate& gate, size_t first, size_t count, Panel panel, Panel up_panel, T* out, size_t stride,
                           size_t columns) {
    alignas(64) float gates[ROW_BLOCK][PANEL], ups[ROW_BLOCK][PANEL];
    rows.multiply(first, count, panel, gates);
    rows.multiply(first, count, up_panel, ups);
    if (gate.bias) add_bias(gates, count, gate.bias, columns);
    if (gate.up_bias) add_bias(ups, count, gate.up_bias, columns);
    if (gate.activation == SILU) gate_rows<SILU>(gates, ups, count);
    else if (gate.activation == GELU_TANH) gate_rows<GELU_TANH>(gates, ups, count);
    else gate_rows<CLAMPED>(gates, ups, count);
    store_panel(out, stride, count, columns, [&](size_t m, int v) { return load<Floats>(gates[m] + v * LANES); });
}
