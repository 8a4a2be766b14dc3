// Many rows of an input times quantized panels in AMX tiles of bytes.
//
// The results are those of vectors (quantized_rows.h), to the bit: a tile adds up the 16 products of a half of a cell, as a whole number,
// and what becomes of that is computed in the same order. So a row of A has 4 dwords where a tile has room for 16: the next half has
// another scale.
#pragma once
#include "bytes.h"
#include "quantized_format.h"

#if defined(TILES_OF_AMX)
// Whether so many rows are multiplied in tiles.
static bool fill_tiles(size_t rows) { return rows >= AMX_ROWS && amx_allowed(); }

// What the tiles of some cells leave: 16 KB for each part of x.
constexpr size_t TILED_CELLS = 2;
template <int PARTS> struct HalfSums {
    alignas(64) int32_t sums[PARTS][2 * TILED_CELLS][AMX_ROWS][COLUMNS];
};

// Half a cell of `rows` rows of x, times that of COLUMNS outputs: numbers with a sign, or without.
template <bool HAS_SIGN> static void tile_half(int rows, const uint32_t* x, size_t x_bytes, int32_t (*sums)[COLUMNS]) {
    const bool low = rows > 16;
    constexpr size_t BYTES = sizeof(*sums);
    _tile_loadd(A_TOP, x, x_bytes);
    _tile_zero(TOP_LEFT);
    _tile_zero(TOP_RIGHT);
    if (low) {
        _tile_loadd(A_LOW, reinterpret_cast<const uint8_t*>(x) + 16 * x_bytes, x_bytes);
        _tile_zero(LOW_LEFT);
        _tile_zero(LOW_RIGHT);
    }
    if constexpr (HAS_SIGN) {
        _tile_dpbssd(TOP_LEFT, A_TOP, B_LEFT);
        _tile_dpbssd(TOP_RIGHT, A_TOP, B_RIGHT);
        if (low) {
            _tile_dpbssd(LOW_LEFT, A_LOW, B_LEFT);
            _tile_dpbssd(LOW_RIGHT, A_LOW, B_RIGHT);
        }
    } else {
        _tile_dpbsud(TOP_LEFT, A_TOP, B_LEFT);
        _tile_dpbsud(TOP_RIGHT, A_TOP, B_RIGHT);
        if (low) {
            _tile_dpbsud(LOW_LEFT, A_LOW, B_LEFT);
            _tile_dpbsud(LOW_RIGHT, A_LOW, B_RIGHT);
        }
    }
    _tile_stored(TOP_LEFT, sums, BYTES);
    _tile_stored(TOP_RIGHT, sums[0] + 16, BYTES);
    if (low) {
        _tile_stored(LOW_LEFT, sums[16], BYTES);
        _tile_stored(LOW_RIGHT, sums[16] + 16, BYTES);
    }
}

// out [rows][COLUMNS] (+)= the half sums of cells [first, first + cells) of a task with their scales; after the last one, its minimums.
template <int KIND, int PARTS, class Task>
static NOINLINE void add_half_sums(int rows, const Task& task, const HalfSums<PARTS>& halves, size_t first, size_t cells) {
    const Scales& scales = task.scales;
    const bool add = task.add || first, is_last = first + cells == task.count;
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) {
            const auto& x = task.x[m];
            float* out = task.out + m * COLUMNS + v * LANES;
            Floats sum = add ? load<Floats>(out) : Floats{};
            for (size_t cell = first; cell < first + cells; cell++) {
                Floats both;
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    const size_t at = 2 * (cell - first) + half;
                    Ints numbers = load<Ints>(halves.sums[0][at][m] + v * LANES);
                    if (PARTS == 2) numbers = numbers * LOW + load<Ints>(halves.sums[PARTS - 1][at][m] + v * LANES);
                    Floats total = __builtin_convertvector(numbers, Floats);
                    if (has_own_scales(KIND)) total *= load<Floats>(scales.scales[2 * cell + half] + v * LANES);
                    const Floats scale = splat(x.scales[2 * cell + half]);
                    both = half ? multiply_add(total, scale, both) : total * scale;
                }
                sum = has_own_scales(KIND) ? sum + both : multiply_add(both, load<Floats>(scales.scales[cell] + v * LANES), sum);
            }
            for (size_t i = 0; is_last && task.has_minimums && i < task.count; i++)
                sum = multiply_add(load<Floats>(scales.offsets[i] + v * LANES), splat(x.sums[i]), sum);
            store(out, sum);
        }
}

// `rows` rows of a task, at most AMX_ROWS, whose cells are unpacked and have no zero.
template <bool HAS_SIGN, int KIND, int PARTS, class Task> static void multiply_tiles(int rows, const Task& task) {
    constexpr int DEPTH = CELL_DWORDS / 2;
    constexpr size_t LINE = COLUMNS * 4;  // bytes: a dword of all outputs
    const TileRegion region;
    HalfSums<PARTS> halves;
    shape_tiles(rows, DEPTH);
    for (size_t first = 0; first < task.count; first += TILED_CELLS) {
        const size_t cells = std::min(TILED_CELLS, task.count - first);
        MEMORY_BARRIER;
        for (size_t half = 0; half < 2 * cells; half++) {
            if (half % 2 == 0) task.cells.ask_for(first + half / 2);
            const size_t d = (2 * first + half) * DEPTH;
            const uint8_t* b = task.cells.at + d * LINE;
            _tile_loadd(B_LEFT, b, LINE);
            _tile_loadd(B_RIGHT, b + LINE / 2, LINE);
            for (int part = 0; part < PARTS; part++)
                tile_half<HAS_SIGN>(rows, task.x[0].bytes[part] + d, sizeof(task.x[0]), halves.sums[part][half]);
        }
        MEMORY_BARRIER;
        add_half_sums<KIND>(rows, task, halves, first, cells);
    }
}
#else
static bool fill_tiles(size_t) { return false; }
template <bool HAS_SIGN, int KIND, int PARTS, class Task> static void multiply_tiles(int, const Task&) {}
#endif
