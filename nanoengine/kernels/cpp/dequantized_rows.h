// Rows of an input, not rounded, times quantized panels whose numbers are made for each chunk of inputs: exact, and slow.
#pragma once
#include "quantized_rows.h"

// The values [input][output] of some cells of a panel.
template <int KIND>
static NOINLINE void dequantize_cells(Cells<KIND, true> cells, size_t count, const Scales& scales, int zero, bool has_minimums, float* to) {
    for (size_t cell = 0; cell < count; cell++)
#pragma GCC unroll 8
        for (int d = 0; d < CELL_DWORDS; d++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) {
                const Dwords packed = cells.load_numbers(cell, d, v);
                const Floats scale = load<Floats>(scales.scales[has_own_scales(KIND) ? 2 * cell + d / 4 : cell] + v * LANES);
                const Floats minimum = has_minimums ? load<Floats>(scales.offsets[cell] + v * LANES) : Floats{};
#pragma GCC unroll 4
                for (int b = 0; b < 4; b++) {
                    const Ints number = are_bytes(KIND) && SIGN ? (Ints)(packed << (24 - 8 * b)) >> 24 : (Ints)(packed >> 8 * b & 0xff);
                    const Floats value = __builtin_convertvector(number - zero, Floats) * scale;
                    store(to + ((cell * CELL_DWORDS + d) * 4 + b) * COLUMNS + v * LANES, has_minimums ? value + minimum : value);
                }
            }
}

// The values [input][output] of `count` cells of a panel from one on.
static void dequantize_panel(const Panel& panel, size_t inputs, size_t cell, size_t count, float* to) {
    const Format format = Format::of(panel.code);
    Scales scales;
    scales.read(format, panel.at, cell, count);
    with_kind(format.kind(), [&]<int KIND>() {
        const uint8_t* at = panel.at + format.cells_at(inputs) + cell * STRIPS * format.cell_bytes();
        const Cells<KIND, true> packed{at, CODEBOOKS[format.codebook]};
        dequantize_cells(packed, count, scales, format.zero(), format.has_minimums(), to);
    });
}

// Some rows of an input as floats: [chunk of the inputs][row].
template <class T> struct FloatRows {
    static_assert(CHUNK <= MAX_DEPTH);
    size_t inputs, rows, chunks = round_up(inputs, CHUNK) / CHUNK;
    Factors<f32> factors{chunks * rows};

    void take(const Row<T>& row, size_t to) {
        for (size_t chunk = 0; chunk < chunks; chunk++) {
            const size_t first = chunk * CHUNK, count = std::min(CHUNK, round_up(inputs - first, CELL));
            take_floats(row, first, count, inputs, factors.row(chunk * rows + to));
        }
    }

    void multiply(size_t first, size_t count, const Panel& panel, float (*sums)[PANEL]) {
        for (size_t chunk = 0; chunk < chunks; chunk++) {
            const size_t cell = chunk * CHUNK_CELLS, cells = std::min(CHUNK_CELLS, round_up(inputs, CELL) / CELL - cell);
            alignas(64) float values[CHUNK * COLUMNS];
            dequantize_panel(panel, inputs, cell, cells, values);
            product<f32, FROM_CACHE>((int)count, factors.row(chunk * rows + first), columns_at((const uint32_t*)values), COLUMNS, cells * CELL,
                                     sums[0], PANEL, chunk > 0);
        }
    }
};
