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

// Memory that is asked for ahead of time: the line at `at` first, then `step` bytes on with every row of B.
struct Ahead {
    const char* at;
    size_t step;
};
constexpr size_t NEAR = 2048, FAR = 8192;  // bytes before a row of B

// M rows in one of `CALLS` calls for the same B (3 are any more). How B is best asked for differs (measured): a single call takes less time than
// B takes from memory, and wants lines under way at two distances; two fill the second-level cache, more of them the first.
template <class T, int CALLS, int M>
static void multiply(const uint32_t* a, Columns b, size_t b_stride, size_t depth, float* out, size_t out_stride, bool add,
                     Ahead ahead) {
    Floats sums[M][WIDE];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) sums[m][v] = add ? load<Floats>(out + m * out_stride + v * LANES) : Floats{};
    for (size_t d = 0; d < depth; d++) {
        add_products<T>(sums, a + d * Dot<T>::STEPS, A_STRIDE, [&](int v) {
            if (v * LANES % GROUP == 0) {
                const char* line = ahead.at + d * ahead.step + v * sizeof(Dwords);
                __builtin_prefetch(line, 0, CALLS == 2 ? 2 : 3);
                if constexpr (CALLS == 1) __builtin_prefetch(line + FAR - NEAR, 0, 2);
            }
            return load<Dwords>(b.vector(v) + d * b_stride);
        });
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) store(out + m * out_stride + v * LANES, sums[m][v]);
}

template <class T, int CALLS, int M = ROWS, class... Args> static void multiply_rows(int rows, Args... args) {
    constexpr int LEAST = CALLS == 1 ? 1 : CALLS == 2 ? ROWS / 2 : ROWS * 2 / 3;  // that can come
    if (M <= LEAST || rows == M) multiply<T, CALLS, M>(args...);
    else if constexpr (M > LEAST) multiply_rows<T, CALLS, M - 1>(rows, args...);
}

// out[m][column] = (add ? out : 0) + sum over d of A[m][d] B[d][column] for COLUMNS columns; `depth` and strides are in dwords, a row
// of A is at most MAX_DEPTH words. B is a piece of a longer stream from memory, or not.
template <class T>
static void product(int rows, const typename Dot<T>::Factor* factors, Columns b, size_t b_stride, size_t depth, float* out,
                    size_t out_stride, bool add, bool stream) {
    const uint32_t* a = reinterpret_cast<const uint32_t*>(factors);
#if defined(TILES_OF_AMX)
    if (sizeof(T) == 2 && depth % AMX_DEPTH == 0 && amx_allowed()) {
        for (int m = 0; m < rows; m += AMX_ROWS)
            amx_product(rows - m < AMX_ROWS ? rows - m : AMX_ROWS, a + m * A_STRIDE, A_STRIDE, b.groups[0], b.groups[1], b_stride,
                        depth, out + m * out_stride, out_stride, add);
        return;
    }
#endif
    const int calls = (rows + ROWS - 1) / ROWS;  // of about as many rows each: few rows are slow ones
    const char* start = reinterpret_cast<const char*>(b.groups[0]);
    const size_t row_bytes = stream ? 4 * b_stride : 0, next = depth * row_bytes;  // where the next piece of B is
    for (int i = 0, first = 0; i < calls; i++) {
        const int count = (rows - first + calls - i - 1) / (calls - i);
        const uint32_t* a_rows = a + first * A_STRIDE;
        float* out_rows = out + first * out_stride;
        if (calls == 1)
            multiply_rows<T, 1>(count, a_rows, b, b_stride, depth, out_rows, out_stride, add, Ahead{start + NEAR, row_bytes});
        else if (calls == 2)
            multiply_rows<T, 2>(count, a_rows, b, b_stride, depth, out_rows, out_stride, add, Ahead{start + (i ? next : NEAR), row_bytes});
        else  // each call asks for its share of the next piece
            multiply_rows<T, 3>(count, a_rows, b, b_stride, depth, out_rows, out_stride, add,
                                Ahead{start + next + i * next / calls, row_bytes / calls});
        first += count;
    }
}
