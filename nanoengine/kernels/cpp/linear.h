// Linear layers, with a norm before them and a gate behind them if asked for, over weights of any kind that say what their panels are.
#pragma once
#include "panels.h"
#include "team.h"

// For each panel and block of rows: use(panel, block, first row, number of rows).
template <class Rows, class T, class Use> static void for_panels(const Input<T>& input, size_t panels, Use use) {
    const size_t block_count = round_up(input.rows, ROW_BLOCK) / ROW_BLOCK, most = std::min(input.rows, ROW_BLOCK);
    Rows blocks[] = {{input.inputs, most}, {input.inputs, block_count > 1 ? most : 0}};  // one is filled, the other read
    if (input.rows == 1) blocks[0].take(input, 0, 0);  // sooner done than shared out
    together([&](Member member) {
        for (size_t i = 0; i < block_count; i++) {
            Rows& block = blocks[i % 2];
            const size_t first = input.rows * i / block_count;  // blocks of about as many rows each
            const size_t count = input.rows * (i + 1) / block_count - first;
            if (input.rows > 1) {
                member.share(count, [&](size_t row) { block.take(input, first + row, row); });
                member.meet();
            }
            member.share(panels, [&](size_t panel) { use(panel, block, first, count); });
        }
    });
}

template <class Weight, class T, class Out>
static void linear(const Input<T>& input, const Weight& weight, const T* bias, Out* out) {
    typedef typename Weight::Rows Rows;
    for_panels<Rows>(input, weight.panels(), [&](size_t panel, Rows& block, size_t first, size_t count) {
        const size_t column = weight.first(panel), columns = weight.columns(panel);
        alignas(64) float sums[ROW_BLOCK][PANEL], biases[PANEL] = {};
        for (size_t c = 0; bias && c < columns; c++) biases[c] = to_float(bias[column + c]);
        block.multiply(0, count, weight.panel(panel), sums);
        store_panel(out + first * weight.outputs + column, weight.outputs, count, columns,
                    [&](size_t m, int v) { return load<Floats>(sums[m] + v * LANES) + load<Floats>(biases + v * LANES); });
    });
}

// The first half of W makes gates, the second, in as many panels with as many outputs each, the values that they gate.
template <class Weight, class T> static void gated_linear(Activation activation, const Input<T>& input, const Weight& weight, T* out) {
    typedef typename Weight::Rows Rows;
    const size_t size = weight.outputs / 2, half = weight.panels() / 2;
    for_panels<Rows>(input, half, [&](size_t panel, Rows& block, size_t first, size_t count) {
        multiply_gated(block, {activation, nullptr, nullptr}, 0, count, weight.panel(panel), weight.panel(half + panel),
                       out + first * size + weight.first(panel), size, weight.columns(panel));
    });
}
