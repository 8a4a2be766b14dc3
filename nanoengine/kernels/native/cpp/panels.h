// Weights in panels, and how rows are multiplied with panels of numbers.
//
// W [outputs][inputs] is cut into panels of COLUMNS outputs, each in one format. A panel of numbers has, for each
// dword of inputs, that dword of all its outputs; quantized_format.h describes the others. One row of x reads a panel from
// memory in a single stream; more rows find it in the first-level cache, chunk by chunk.
#pragma once
#include "norm.h"
#include "product.h"
#include <algorithm>
#include <vector>

constexpr size_t PANEL = COLUMNS;

// Rows of x that are multiplied with one panel after another. Tiles are loaded from L2 as fast as they are
// multiplied: there these rows are as many as stay in it (2 MiB on every CPU with AMX) beside panels and sums, so that panels
// come from memory the less often.
constexpr size_t LEAST_ROW_BLOCK = 96, BYTES_OF_ROWS = 800'000;
template <class T> constexpr size_t MOST_ROW_BLOCK = IN_TILES<T> ? 4 * LEAST_ROW_BLOCK : LEAST_ROW_BLOCK;
template <class T> static size_t row_block(size_t inputs) {
    return std::clamp(BYTES_OF_ROWS / (sizeof(T) * inputs) / AMX_ROWS * AMX_ROWS, LEAST_ROW_BLOCK, MOST_ROW_BLOCK<T>);
}

constexpr size_t LARGE_OUTPUT = 2 << 20;  // bytes: what is more has left L2 before it is read

static size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

// Dwords in a row of W.
template <class T> static size_t depth_of(size_t inputs) { return round_up(inputs, Dot<T>::PER_DWORD) / Dot<T>::PER_DWORD; }

// A range of outputs: where, in what format, the first of them, and how many there are.
struct Panel {
    const uint8_t* at;
    int64_t code, first, columns;  // the code's lowest byte: bits of a number; those that are not quantized have 16 or 32

    bool is_quantized() const { return (code & 0xff) < 16; }
};

// How the panels of a weight want rows of x: in the type of x (numbers do, and quantized panels may), and for quantized panels
// in whole numbers of 8 bits, in the other type of float32 and bfloat16, or in whole numbers of 16.
enum Kinds { AS_THEY_ARE = 1, ROUNDED = 2, IN_OTHER_TYPE = 4, IN_TWO_PARTS = 8 };  // as the callers number them

// A weight as callers pass it; its panels follow it, in the order of their outputs.
struct Weight {
    int64_t outputs, inputs, panels, kinds;

    const Panel& panel(size_t i) const { return reinterpret_cast<const Panel*>(this + 1)[i]; }
};

enum Activation { SILU = 0, GELU_TANH = 1, CLAMPED = 2, RELU = 3 };  // as the callers number them

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
    if (ACTIVATION == RELU) return (gate < 0.0f ? splat(0.0f) : gate) * up;  // NaN stays NaN
    gate = gate > 7.0f ? splat(7.0f) : gate;
    up = up > 7.0f ? splat(7.0f) : up < -7.0f ? splat(-7.0f) : up;
    return times_sigmoid(gate, gate * 1.702f) * (up + 1.0f);
}

// f.operator()<ACTIVATION>() for a kind of gate.
template <class F> static void with_activation(int activation, F f) {
    if (activation == SILU) f.template operator()<SILU>();
    else if (activation == GELU_TANH) f.template operator()<GELU_TANH>();
    else if (activation == CLAMPED) f.template operator()<CLAMPED>();
    else f.template operator()<RELU>();
}

// out = what gates make of the values beside them, all [size].
template <Activation ACTIVATION, class T, class Out>
static NOINLINE void gate_pairs(const T* gates, const T* ups, size_t size, Out* out) {
    for_vectors(size, [&](size_t i, auto some) {
        store_some(out + i, gated<ACTIVATION>(load_some(gates + i, some), load_some(ups + i, some)), some);
    });
}

// A kind of gate, and the biases of a panel of gates and of the values beside them; both null: none.
struct Gate {
    Activation activation;
    const float *bias, *up_bias;
};

// Add a bias of the first `columns` outputs to each row.
static NOINLINE void add_bias(float (*sums)[PANEL], size_t count, const float* bias, size_t columns) {
    for (size_t m = 0; m < count; m++)
        for (size_t c = 0; c < columns; c++) sums[m][c] += bias[c];
}

// A panel's results in `count` rows of out: vector v of row m is value(m, v). Of the last panel perhaps only the first
// `columns`. Tiles are so fast that it counts how a large output is written: past the caches, or else each line is read from
// memory first, and others leave L2.
template <class Out, class Value>
static INLINE void store_panel(Out* out, size_t stride, size_t count, size_t columns, [[maybe_unused]] bool is_large, Value value) {
#if defined(TILES_OF_AMX) && defined(__AVX512BF16__)
    if constexpr (IN_TILES<Out>)
        if (is_large && columns == PANEL && reinterpret_cast<size_t>(out) % 64 == 0 && stride % PANEL == 0) {
            for (size_t m = 0; m < count; m++)
                _mm512_stream_si512((__m512i*)(out + m * stride), (__m512i)_mm512_cvtne2ps_pbh((__m512)value(m, 1), (__m512)value(m, 0)));
            return;
        }
#endif
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

// A row of an input: x * scale * norm, or x where norm is null.
template <class T> struct Row {
    const T* x;
    const float* norm;
    float scale;
};

// Row `row` of an input. Its residual, if there is one, becomes the sum.
template <class T> static Row<T> row_of(const Input<T>& input, size_t row) {
    const T* x = input.x + row * input.inputs;
    if (!input.norm) return {x, nullptr, 1.0f};
    T* residual = input.residual ? input.residual + row * input.inputs : nullptr;
    const float scale = inverse_rms(x, residual, input.inputs, input.eps);
    return {residual ? residual : x, input.norm, scale};
}
