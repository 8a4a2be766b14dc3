// The matrix product that every larger one here is made of: some rows of A times COLUMNS columns of B.
//
// B is stored by dwords of the summed dimension: row d of B holds that dword of 16 columns side by side. A's rows are factors (simd.h)
// at a fixed distance: each row's word is then one address away from the first's. A row's sums are added in the order of d whatever
// the number of rows, so a token computes the same alone and in a batch.
#pragma once
#include "simd.h"
#if defined(__AMX_BF16__) || defined(EMULATE_AMX)
#define TILES_OF_AMX
#include "amx.h"
#endif

constexpr int GROUP = 16;                                // columns of B that lie side by side
#if defined(__AVX512F__) || defined(TILES_OF_AMX)
constexpr int COLUMNS = 2 * GROUP;
#else
constexpr int COLUMNS = GROUP;
#endif
constexpr int WIDE = COLUMNS / LANES;                    // vectors in a row of sums
constexpr int ROWS = LANES == 16 ? 12 : LANES == 8 ? 6 : REGISTERS == 32 ? 5 : 2;  // their sums leave registers for a row of B

constexpr size_t MAX_DEPTH = 256;             // words in a row of A
constexpr size_t A_STRIDE = MAX_DEPTH + 16;   // words between two rows: no power of two, which would put all rows in one set of the cache

// COLUMNS columns of B: pointers to its groups of 16.
struct Columns {
    const uint32_t* groups[COLUMNS / GROUP];

    INLINE const uint32_t* vector(int v) const { return groups[v * LANES / GROUP] + v * LANES % GROUP; }
};

// COLUMNS columns that lie side by side.
INLINE Columns columns_at(const uint32_t* b) {
    Columns columns;
    for (int group = 0; group < COLUMNS / GROUP; group++) columns.groups[group] = b + group * GROUP;
    return columns;
}

// B is often read from memory for the first time: how far ahead it is asked for, in dwords. Where a row of B takes long to use, few
// lines would be under way; the second-level cache then takes more of them.
constexpr size_t NEAR = 512, FAR = 2048;
constexpr int MANY_ROWS = 8;

template <class T, int M>
static void multiply(const uint32_t* a, Columns b, size_t b_stride, size_t depth, float* out, size_t out_stride, bool add) {
    Floats sums[M][WIDE];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) sums[m][v] = add ? load<Floats>(out + m * out_stride + v * LANES) : Floats{};
    for (size_t d = 0; d < depth; d++) {
        add_products<T>(sums, a + d * Dot<T>::STEPS, A_STRIDE, [&](int v) {
            const uint32_t* from = b.vector(v) + d * b_stride;
            if (v * LANES % GROUP == 0) {
                __builtin_prefetch(from + NEAR);
                if constexpr (M >= MANY_ROWS) __builtin_prefetch(from + FAR, 0, 2);
            }
            return load<Dwords>(from);
        });
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) store(out + m * out_stride + v * LANES, sums[m][v]);
}

template <class T, int M = ROWS, class... Args> static void multiply_rows(int rows, Args... args) {
    if constexpr (M == 1) multiply<T, 1>(args...);
    else if (rows == M) multiply<T, M>(args...);
    else multiply_rows<T, M - 1>(rows, args...);
}

// out[m][column] = (add ? out : 0) + sum over d of A[m][d] B[d][column] for COLUMNS columns; `depth` and strides are in dwords, a row
// of A is at most MAX_DEPTH words.
template <class T>
static void product(int rows, const typename Dot<T>::Factor* factors, Columns b, size_t b_stride, size_t depth, float* out,
                    size_t out_stride, bool add) {
    const uint32_t* a = reinterpret_cast<const uint32_t*>(factors);
#if defined(TILES_OF_AMX)
    if (sizeof(T) == 2 && depth % AMX_DEPTH == 0 && amx_allowed()) {
        for (int m = 0; m < rows; m += AMX_ROWS)
            amx_product(rows - m < AMX_ROWS ? rows - m : AMX_ROWS, a + m * A_STRIDE, A_STRIDE, b.groups[0], b.groups[1], b_stride,
                        depth, out + m * out_stride, out_stride, add);
        return;
    }
#endif
    int first = 0;
    for (int left = (rows + ROWS - 1) / ROWS; left; left--) {  // calls, of about as many rows each: few rows are slow ones
        const int count = (rows - first + left - 1) / left;
        multiply_rows<T>(count, a + first * A_STRIDE, b, b_stride, depth, out + first * out_stride, out_stride, add);
        first += count;
    }
}
