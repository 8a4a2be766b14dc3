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
static_assert(TILED_CELLS == 2, "an odd one is left alone");
template <int PARTS> struct HalfSums {
    alignas(64) int32_t sums[PARTS][2 * TILED_CELLS][AMX_ROWS + 1][COLUMNS];  // one more: all halves would compete for one set of the cache
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

// out [rows][COLUMNS] (+)= the half sums of cells [first, first + CELLS) of a task, with their scales.
template <int KIND, int CELLS, int PARTS, class Task>
static NOINLINE void add_half_sums(int rows, const Task& task, const HalfSums<PARTS>& halves, size_t first) {
    const bool add = task.add || first;
    for (size_t at = 0; at < COLUMNS; at += LANES) {
        Floats scales[2 * CELLS];
#pragma GCC unroll 4
        for (int i = 0; i < 2 * CELLS; i++)
            scales[i] = load<Floats>(task.scales.scales[has_own_scales(KIND) ? 2 * first + i : first + i / 2] + at);
        for (int m = 0; m < rows; m++) {
            float* out = task.out + m * COLUMNS + at;
            const float* x = task.x[m].scales + 2 * first;
            Floats sum = add ? load<Floats>(out) : Floats{};
#pragma GCC unroll 4
            for (int i = 0; i < 2 * CELLS; i += 2) {
                const auto total = [&](int i) {
                    Ints numbers = load<Ints>(halves.sums[0][i][m] + at);
                    if (PARTS == 2) numbers = numbers * LOW + load<Ints>(halves.sums[PARTS - 1][i][m] + at);
                    const Floats total = __builtin_convertvector(numbers, Floats);
                    return has_own_scales(KIND) ? total * scales[i] : total;
                };
                const Floats both = multiply_add(total(i + 1), splat(x[i + 1]), total(i) * splat(x[i]));
                sum = has_own_scales(KIND) ? sum + both : multiply_add(both, scales[i], sum);
            }
            store(out, sum);
        }
    }
}

template <class Task> static NOINLINE void add_minimums(int rows, const Task& task) {
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) {
            float* out = task.out + m * COLUMNS + v * LANES;
            Floats sum = load<Floats>(out);
            for (size_t i = 0; i < task.count; i++)
                sum = multiply_add(load<Floats>(task.scales.offsets[i] + v * LANES), splat(task.x[m].sums[i]), sum);
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
        if (cells == TILED_CELLS) add_half_sums<KIND, TILED_CELLS>(rows, task, halves, first);
        else add_half_sums<KIND, 1>(rows, task, halves, first);
    }
    if (task.has_minimums) add_minimums(rows, task);
}
#else
static bool fill_tiles(size_t) { return false; }
template <bool HAS_SIGN, int KIND, int PARTS, class Task> static void multiply_tiles(int, const Task&) {}
#endif
