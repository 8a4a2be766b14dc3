// The product of weights and activations that are not rounded to whole numbers, in float32 or bfloat16: rows of an input as factors
// (simd.h), times panels of numbers, or of quantized weights, which become numbers of the factors' type in the cache, some cells
// at a time. The product of a quantized panel has the bits of the product of those numbers: one row and many are the same here.
#pragma once
#include <type_traits>
#include "quantized_product.h"

// Number b of each dword; 0 <= b < 4 is a constant.
template <int KIND> static INLINE Ints number_of(Dwords packed, int b) {
    return are_bytes(KIND) && SIGN ? (Ints)(packed << (24 - 8 * b)) >> 24 : (Ints)(packed >> 8 * b & 0xff);
}

// The numbers of some cells of a panel in type F, as product.h reads B: dword after dword of all COLUMNS outputs.
template <class F, int KIND>
static NOINLINE void dequantize_cells(Cells<KIND, true> cells, size_t count, const Scales& scales, int zero, bool has_minimums, uint32_t* to) {
    constexpr int PER_DWORD = Dot<F>::PER_DWORD;
    for (size_t cell = 0; cell < count; cell++) {
        cells.ask_for(cell);
#pragma GCC unroll 8
        for (int d = 0; d < CELL_DWORDS; d++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) {
                const Dwords packed = cells.load_numbers(cell, d, v);
                const size_t part = has_cell_scales(KIND) ? 2 * cell + d / 4 : cell;
                const Floats scale = load<Floats>(scales.scales[part] + v * LANES);
                const Floats minimum = has_minimums ? load<Floats>(scales.offsets[part] + v * LANES) : Floats{};
                uint32_t* line = to + (cell * CELL_DWORDS + d) * (4 / PER_DWORD) * COLUMNS + v * LANES;
                if constexpr (PER_DWORD == 1) {
#pragma GCC unroll 4
                    for (int b = 0; b < 4; b++) {
                        const Floats value = __builtin_convertvector(number_of<KIND>(packed, b) - zero, Floats) * scale;
                        store(line + b * COLUMNS, has_minimums ? value + minimum : value);
                    }
                } else {  // fused: fewer instructions, and the same bits wherever number * scale is a float32
                    const Floats offset = has_minimums ? minimum : scale * (float)-zero;
                    const auto value = [&](int b) {
                        return multiply_add(__builtin_convertvector(number_of<KIND>(packed, b), Floats), scale, offset);
                    };
                    store(line, pair_of(value(0), value(1)));
                    store(line + COLUMNS, pair_of(value(2), value(3)));
                }
            }
    }
}

// The numbers of `count` cells of a panel from one on, in type F.
template <class F> static void dequantize_panel(const Panel& panel, size_t inputs, size_t cell, size_t count, uint32_t* to) {
    const Format format = Format::of(panel.code);
    Scales scales;
    scales.read(format, panel.at, cell, count);
    with_kind(format.kind(), [&]<int KIND>() {
        const uint8_t* at = panel.at + format.cells_at(inputs) + cell * STRIPS * format.cell_bytes();
        const Cells<KIND, true> packed{at, CODEBOOKS[format.codebook]};
        dequantize_cells<F>(packed, count, scales, format.zero(), format.has_minimums(), to);
    });
}

// Some rows of an input of T, as factors of F: [ROW_DWORDS of the inputs][row]. Behind a row's end are zeros, to the end of a
// cell.
template <class T, class F> struct FactorRows {
    static constexpr size_t PER_DWORD = Dot<F>::PER_DWORD, ROW_DWORDS = MAX_DEPTH / 2 / Dot<F>::STEPS;
    static_assert(ROW_DWORDS * PER_DWORD % CHUNK == 0);

    size_t inputs, rows, depth = depth_of<F>(inputs);
    Factors<F> factors{round_up(depth, ROW_DWORDS) / ROW_DWORDS * rows};

    auto* at(size_t row, size_t d) {
        return factors.row(d / ROW_DWORDS * rows + row) + d % ROW_DWORDS * (4 * Dot<F>::STEPS / sizeof(typename Dot<F>::Factor));
    }

    void take(const Row<T>& row, size_t to) {
        for (size_t d = 0; d < depth; d += ROW_DWORDS) {
            const size_t first = d * PER_DWORD, count = std::min(ROW_DWORDS * PER_DWORD, inputs - first);
            auto* out = at(to, d);
            if (row.norm) scale_by(row.x + first, row.scale, row.norm + first, count, out);
            else copy_elements(row.x + first, count, out);
            std::fill(out + count, out + round_up(count, CELL), typename Dot<F>::Factor{});
        }
    }

    // sums[i][0..PANEL) of the rows [first, first + count) and the outputs of a panel.
    void multiply(size_t first, size_t count, const Panel& panel, float (*sums)[PANEL]) {
        if (panel.is_quantized()) return multiply_quantized(first, count, panel, sums);
        const uint32_t* numbers = reinterpret_cast<const uint32_t*>(panel.at);
        for (size_t d = 0; d < depth; d += ROW_DWORDS)
            product<F, FROM_MEMORY>((int)count, at(first, d), columns_at(numbers + d * PANEL), PANEL, std::min(ROW_DWORDS, depth - d),
                                    sums[0], PANEL, d > 0);
    }

private:
    void multiply_quantized(size_t first, size_t count, const Panel& panel, float (*sums)[PANEL]) {
        const size_t all = round_up(inputs, CELL) / CELL;
        for (size_t cell = 0; cell < all; cell += CHUNK_CELLS) {
            alignas(64) uint32_t numbers[CHUNK / PER_DWORD * COLUMNS];
            const size_t cells = std::min(CHUNK_CELLS, all - cell);
            dequantize_panel<F>(panel, inputs, cell, cells, numbers);
            product<F, FROM_CACHE>((int)count, at(first, cell * CELL / PER_DWORD), columns_at(numbers), COLUMNS, cells * CELL / PER_DWORD,
                                   sums[0], PANEL, cell > 0);
        }
    }
};
