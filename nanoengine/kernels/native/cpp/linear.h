// Linear layers, with a norm before them and a gate behind them where there are some.
#pragma once
#include "panel_product.h"
#include "team.h"

// For each of the first `panels` panels and each block of rows: use(panel, rows, first row, number of rows).
template <class T, class Use> static void for_panels(const Input<T>& input, int64_t kinds, size_t panels, Use use) {
    const size_t at_once = row_block<T>(input.inputs), most = std::min(input.rows, at_once);
    const size_t block_count = round_up(input.rows, at_once) / at_once;
    Rows<T> blocks[] = {{kinds, input.inputs, most}, {kinds, input.inputs, block_count > 1 ? most : 0}};  // one is filled, the other read
    if (input.rows == 1) blocks[0].take(input, 0, 0);  // one row is not worth a division
    const auto start = [&](size_t i) { return std::min(round_up(input.rows * i / block_count, AMX_ROWS), input.rows); };
    parallel([&](Member member) {
        const TileRegion region;
        for (size_t i = 0; i < block_count; i++) {
            Rows<T>& block = blocks[i % 2];
            const size_t first = start(i), count = start(i + 1) - first;  // blocks of about as many rows each
            if (input.rows > 1) {
                member.static_for(count, [&](size_t row) { block.take(input, first + row, row); });
                member.barrier();
            }
            member.static_for(panels, [&](size_t panel) { use(panel, block, first, count); });
        }
    });
}

template <class T, class Out> static void product_of(const Input<T>& input, const Weight& weight, const T* bias, Out* out) {
    for_panels(input, weight.kinds, weight.panels, [&](size_t i, Rows<T>& block, size_t first, size_t count) {
        const Panel& panel = weight.panel(i);
        alignas(64) float sums[MOST_ROW_BLOCK<T>][PANEL], biases[PANEL] = {};
        for (int64_t c = 0; bias && c < panel.columns; c++) biases[c] = to_float(bias[panel.first + c]);
        block.multiply(0, count, panel, sums);
        store_panel(out + first * weight.outputs + panel.first, weight.outputs, count, panel.columns,
                    input.rows * weight.outputs * sizeof(Out) > LARGE_OUTPUT,
                    [&](size_t m, int v) { return load<Floats>(sums[m] + v * LANES) + load<Floats>(biases + v * LANES); });
    });
}

// The first half of W makes gates, the second, in as many panels with as many outputs each, the values that they gate.
template <class T> static void gated_product_of(Activation activation, const Input<T>& input, const Weight& weight, T* out) {
    const size_t size = weight.outputs / 2, half = weight.panels / 2;
    for_panels(input, weight.kinds, half, [&](size_t i, Rows<T>& block, size_t first, size_t count) {
        const Panel& panel = weight.panel(i);
        multiply_gated(block, {activation, nullptr, nullptr}, 0, count, panel, weight.panel(half + i),
                       out + first * size + panel.first, size, input.rows * size * sizeof(T) > LARGE_OUTPUT);
    });
}
