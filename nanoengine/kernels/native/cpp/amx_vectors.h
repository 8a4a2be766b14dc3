// The product of amx.h for few rows, by vectors that add as tiles do, to the bit. Few rows wait for B, which comes from
// memory, and loads of tiles ask for fewer lines of it at once than those of vectors do.
//
// A tile product makes two sums for an output, from zero on: of the first and of the second elements of 16 dwords. Then it
// adds one to the other, and both to the sum so far. A product and a sum are rounded once, and what is denormal counts as 0.
#pragma once
#include "amx.h"

constexpr int VECTOR_ROWS = 4;             // up to so many rows read B from memory by vectors, more by tiles; 0: all by tiles
constexpr size_t VECTORS_AHEAD = 512;      // dwords

template <int M>
static NOINLINE void add_as_tiles(const uint32_t* a, size_t a_stride, const uint32_t* b0, const uint32_t* b1, size_t b_stride, size_t depth,
                                  float* out, size_t out_stride, bool add) {
    constexpr int GROUP_VECTORS = 16 / LANES, VECTORS = 2 * GROUP_VECTORS;
    Floats sums[M][VECTORS];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[m][v] = add ? load<Floats>(out + m * out_stride + v * LANES) : Floats{};
    for (size_t first = 0; first < depth; first += AMX_DEPTH) {
        Floats parts[2][M][VECTORS] = {};
        for (size_t d = first; d < first + AMX_DEPTH; d++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                const uint32_t* line = (v < GROUP_VECTORS ? b0 : b1) + d * b_stride + v % GROUP_VECTORS * LANES;
                if (v % GROUP_VECTORS == 0) __builtin_prefetch(line + VECTORS_AHEAD);
                const Dwords b = load<Dwords>(line);
#pragma GCC unroll 4
                for (int m = 0; m < M; m++) {
                    const uint32_t factors = a[m * a_stride + d];
                    parts[0][m][v] = Dot<f32>::add(parts[0][m][v], b << 16, factors << 16);
                    parts[1][m][v] = Dot<f32>::add(parts[1][m][v], b & 0xffff0000u, factors & 0xffff0000u);
                }
            }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) sums[m][v] += parts[0][m][v] + parts[1][m][v];
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) store(out + m * out_stride + v * LANES, sums[m][v]);
}

// As amx_product, for at most M rows.
template <int M = VECTOR_ROWS, class... Args> static void vector_product(int rows, Args... args) {
    if constexpr (M > 0) {
        if (rows < M) return vector_product<M - 1>(rows, args...);
        const DenormalsAre0 scope;
        add_as_tiles<M>(args...);
    }
}
