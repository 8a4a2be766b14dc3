// The matrix product that every larger one here is made of: some rows of A times COLUMNS columns of B.
//
// B is stored by dwords of the summed dimension: row d of B holds that dword of 16 columns side by side. A's rows are factors
// (simd.h) at a fixed distance: each row's word is then one address away from the first's. A row's sums are added in the order
// of d whatever the number of rows, so a token computes the same alone and in a batch.
#pragma once
#include <memory>
#include "neon_blocks.h"
#if defined(__AMX_BF16__) || defined(EMULATE_AMX)
#define TILES_OF_AMX
#include "amx.h"
#endif

// Whether products of T are computed in tiles.
#if defined(TILES_OF_AMX)
template <class T> constexpr bool IN_TILES = Dot<T>::PER_DWORD == 2 && Dot<T>::STEPS == 1;  // pairs of bfloat16, as tiles read them
#else
constexpr int AMX_DEPTH = 0, AMX_ROWS = 1;
struct TileRegion {};  // amx.h
template <class T> constexpr bool IN_TILES = false;
#endif

constexpr int GROUP = 16;                                // columns of B that lie side by side
#if defined(__AVX512F__) || defined(TILES_OF_AMX)
constexpr int COLUMNS = 2 * GROUP;
#else
constexpr int COLUMNS = GROUP;
#endif
constexpr int WIDE = COLUMNS / LANES;                    // vectors in a row of sums
constexpr int ROWS = LANES == 16 ? 12 : LANES == 8 || IN_BLOCKS<bf16> ? 6 : REGISTERS == 32 ? 5 : 2;  // their sums leave registers for a row of B

constexpr size_t MAX_DEPTH = 512;            // words in a row of A
constexpr size_t A_STRIDE = MAX_DEPTH + 16;  // between two rows: no power of two, or all would compete for one set of the cache

// Rows of A, unset; each begins a cache line.
template <class T> class Factors {
    struct alignas(64) Line {
        uint32_t words[16];
    };
    std::unique_ptr<Line[]> lines;

public:
    using Factor = typename Dot<T>::Factor;

    explicit Factors(size_t rows) : lines(new Line[rows * A_STRIDE / 16]) {}
    Factor* row(size_t i) { return reinterpret_cast<Factor*>(lines[i * A_STRIDE / 16].words); }
};

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

// How many calls multiply with the same B, if it comes from memory. How it is best asked for differs (measured): a single call
// asks for it a little ahead, and if it has many rows, which leave few lines under way, further ahead too: for few rows that
// is slower. Two calls fill the second-level cache, more the first.
enum Calls { CACHED, ONE, TWO, MANY };

// Memory that is asked for ahead of time: the line at `at` first, then `step` bytes on with every row of B.
struct Ahead {
    const char* at;
    size_t step;
};
constexpr size_t NEAR = 2048, FAR = 8192;  // bytes before a row of B

// For row m and vector v of the sums of M rows: a macro, since the compiler keeps sums in memory to which a lambda refers.
#define EACH_SUM                                         \
    _Pragma("GCC unroll 16") for (int m = 0; m < M; m++) \
    _Pragma("GCC unroll 4") for (int v = 0; v < WIDE; v++)

template <class T, Calls CALLS, int M>
static void multiply(const uint32_t* a, Columns b, size_t b_stride, size_t depth, float* out, size_t out_stride, bool add,
                     Ahead ahead) {
    Floats sums[M][WIDE];
    EACH_SUM sums[m][v] = add ? load<Floats>(out + m * out_stride + v * LANES) : Floats{};
    const auto row = [&](size_t d, int v) {
        const char* line = ahead.at + d * ahead.step + v * sizeof(Dwords);
        if constexpr (CALLS == MANY) {
            if (v == 0) __builtin_prefetch(line);
        } else if (CALLS != CACHED && v * LANES % GROUP == 0) {
            __builtin_prefetch(line, 0, CALLS == TWO ? 2 : 3);
            if constexpr (CALLS == ONE && M >= ROWS * 2 / 3) __builtin_prefetch(line + FAR - NEAR, 0, 2);
        }
        return load<Dwords>(b.vector(v) + d * b_stride);
    };
    size_t d = 0;
    if constexpr (IN_BLOCKS<T> && M > 1) {
        Blocks<T, M, WIDE> blocks(sums);
        for (; d + 2 <= depth; d += 2)
            blocks.add([&](int m) { return a + m * A_STRIDE + d; }, [&](int v, int i) { return row(d + i, v); });
        blocks.store_rows(sums);
    }
    for (; d < depth; d++) add_products<T>(sums, a + d * Dot<T>::STEPS, A_STRIDE, [&](int v) { return row(d, v); });
    EACH_SUM store(out + m * out_stride + v * LANES, sums[m][v]);
}

template <class T, Calls CALLS, int M = ROWS, class... Args> static void multiply_rows(int rows, Args... args) {
    constexpr int LEAST = CALLS == TWO ? ROWS / 2 : CALLS == MANY ? ROWS * 2 / 3 : 1;  // that can come
    if (M <= LEAST || rows == M) multiply<T, CALLS, M>(args...);
    else if constexpr (M > LEAST) multiply_rows<T, CALLS, M - 1>(rows, args...);
}

enum Source { FROM_CACHE, FROM_MEMORY };  // of B, which then is a piece of a longer stream

// out[m][column] = (add ? out : 0) + sum over d of A[m][d] B[d][column] for COLUMNS columns; `depth` and strides are in
// dwords, a row of A is at most MAX_DEPTH words.
template <class T, Source SOURCE>
static void product(int rows, const typename Dot<T>::Factor* factors, Columns b, size_t b_stride, size_t depth, float* out,
                    size_t out_stride, bool add) {
    const uint32_t* a = reinterpret_cast<const uint32_t*>(factors);
#if defined(TILES_OF_AMX)
    if constexpr (IN_TILES<T>)
        if (depth % AMX_DEPTH == 0 && amx_allowed()) {
            amx_product(rows, a, A_STRIDE, b.groups[0], b.groups[1], b_stride, depth, out, out_stride, add, SOURCE == FROM_MEMORY);
            return;
        }
#endif
    const int calls = (rows + ROWS - 1) / ROWS;  // of about as many rows each: few rows are slow ones
    const char* start = reinterpret_cast<const char*>(b.groups[0]);
    const size_t row_bytes = 4 * b_stride, next = depth * row_bytes;  // where the next piece of B is
    for (int i = 0, first = 0; i < calls; i++) {
        const int count = (rows - first + calls - i - 1) / (calls - i);
        auto call = [&]<Calls CALLS>(Ahead ahead) {
            multiply_rows<T, CALLS>(count, a + first * A_STRIDE, b, b_stride, depth, out + first * out_stride, out_stride, add,
                                    ahead);
        };
        if constexpr (SOURCE == FROM_CACHE) call.template operator()<CACHED>({start, 0});
        else if (calls == 1) call.template operator()<ONE>({start + NEAR, row_bytes});
        else if (calls == 2) call.template operator()<TWO>({start + (i ? next : NEAR), row_bytes});
        else call.template operator()<MANY>({start + next + i * next / calls, row_bytes / calls});  // each its share
        first += count;
    }
}
