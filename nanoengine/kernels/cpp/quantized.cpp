// What linear.cpp does, over quantized panels (quantized_format.h): in whole numbers (quantized_rows.h), or exact (dequantized_rows.h).
#include "dequantized_rows.h"
#include "experts.h"
#include "linear.h"

namespace {

// The numbers of one output in a cell; the dwords of the others in its lines are left alone.
template <int BITS>
NOINLINE void read_output(const uint8_t* lines, size_t at, const float (*scales)[COLUMNS], const float* offset, int zero, float* to) {
#pragma GCC unroll 8
    for (int d = 0; d < CELL_DWORDS; d++) {
        const uint32_t packed = numbers<BITS, uint32_t>(lines, d, at);
        const float scale = scales[BITS == 6 ? d / 4 : 0][0];
        for (int b = 0; b < 4; b++) {
            const int byte = packed >> 8 * b & 0xff, number = BITS == 8 && SIGN ? (int8_t)byte : byte;
            const float value = (float)(number - zero) * scale;
            to[4 * d + b] = offset ? value + *offset : value;
        }
    }
}

template <class T> void embed_row(const QuantizedPanel& panel, size_t output, size_t inputs, T* out) {
    const Format format = Format::of(panel.code);
    const size_t side = output / GROUP, cells = round_up(inputs, CELL) / CELL;
    const uint8_t* lines = panel.at + format.cells_at(inputs) + side * format.cell_bytes();
    Scales scales;
    std::vector<float> values(CELL);
    for (size_t cell = 0; cell < cells; cell++) {
        const size_t i = cell % CHUNK_CELLS;
        if (i == 0) scales.read(format, panel.at, cell, std::min(CHUNK_CELLS, cells - cell));
        with_bits(format.bits, [&]<int BITS>() {
            const auto* scale = reinterpret_cast<const float(*)[COLUMNS]>(&scales.scales[i * format.scales_per_cell()][output]);
            const float* offset = format.has_minimums() ? &scales.offsets[i][output] : nullptr;
            read_output<BITS>(lines + cell * STRIPS * format.cell_bytes(), output % GROUP * 4, scale, offset, format.zero(), values.data());
        });
        copy_elements(values.data(), std::min(CELL, inputs - cell * CELL), out + cell * CELL);
    }
}

template <class T>
void embed(const int64_t* ids, const QuantizedPanel* table, size_t panels, T* out, size_t rows, size_t inputs) {
    const QuantizedPanel* end = table + panels;
    for_each(rows, rows <= 4, [&](size_t m) {
        const QuantizedPanel* next = std::upper_bound(table, end, ids[m], [](int64_t id, const QuantizedPanel& p) { return id < p.first; });
        embed_row(next[-1], ids[m] - next[-1].first, inputs, out + m * inputs);
    });
}

// f.template operator()<RowsOf, T>() for rows of a dtype, exact or not.
template <class F> void with_rows(int dtype, bool exact, F f) {
    if (exact) {
        if (dtype == FLOAT32) f.template operator()<FloatRows, f32>();
        else f.template operator()<FloatRows, bf16>();
    } else {
        if (dtype == FLOAT32) f.template operator()<RoundedRows, f32>();
        else f.template operator()<RoundedRows, bf16>();
    }
}

}  // namespace

extern "C" {

// As the functions of linear.cpp. The table has the panels of a weight, in the order of their outputs; `exact`: activations are not rounded.

void quantized_linear(int dtype, int out_dtype, int exact, const void* x, void* residual, const float* norm, float eps,
                      const QuantizedPanel* table, size_t panels, const void* bias, void* out, size_t rows, size_t outputs, size_t inputs) {
    with_rows(dtype, exact, [&]<template <class> class RowsOf, class T>() {
        const Input<T> input{(const T*)x, (T*)residual, norm, eps, rows, inputs};
        const Quantized<RowsOf, T> weight{table, panels, outputs};
        if (out_dtype == FLOAT32) linear(input, weight, (const T*)bias, (f32*)out);
        else linear(input, weight, (const T*)bias, (T*)out);
    });
}

void quantized_gated_linear(int dtype, int exact, int activation, const void* x, void* residual, const float* norm, float eps,
                            const QuantizedPanel* table, size_t panels, void* out, size_t rows, size_t size, size_t inputs) {
    with_rows(dtype, exact, [&]<template <class> class RowsOf, class T>() {
        const Input<T> input{(const T*)x, (T*)residual, norm, eps, rows, inputs};
        gated_linear((Activation)activation, input, Quantized<RowsOf, T>{table, panels, 2 * size}, (T*)out);
    });
}

// What whole numbers are multiplied with, for people.
const char* quantized_instruction() { return DOT_OF_BYTES; }

void quantized_embed(int dtype, const int64_t* ids, const QuantizedPanel* table, size_t panels, void* out, size_t rows, size_t inputs) {
    if (dtype == FLOAT32) embed(ids, table, panels, (f32*)out, rows, inputs);
    else embed(ids, table, panels, (bf16*)out, rows, inputs);
}

void quantized_experts(int dtype, int exact, int activation, const void* x, const QuantizedPanel* gate, const QuantizedPanel* up,
                       const QuantizedPanel* down, const float* gate_bias, const float* up_bias, const float* down_bias,
                       const int64_t* chosen, const float* factors, void* out, size_t rows, size_t per_row, size_t count, size_t size,
                       size_t hidden) {
    const ExpertBiases biases{gate_bias, up_bias, down_bias};
    with_rows(dtype, exact, [&]<template <class> class RowsOf, class T>() {
        const Quantized<RowsOf, T> gates{gate, 0, 0}, ups{up, 0, 0}, downs{down, 0, 0};
        experts((Activation)activation, Choices{chosen, factors, rows, per_row, count}, (const T*)x,
                Experts<Quantized<RowsOf, T>>{gates, ups, downs, biases, size, hidden}, (T*)out);
    });
}
}
