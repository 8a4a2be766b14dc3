// Products of two rows and two columns at once, where Arm has them: BFMMLA for bfloat16, SMMLA for bytes.
//
// Their bits are those of products of single rows, which BFDOT and SDOT compute: by Arm's manual BFMMLA is two BFDOTs, one
// after the other, and sums of whole numbers are exact. So any number of rows may come in blocks.
#pragma once
#include "simd.h"

template <class T> constexpr bool IN_BLOCKS = false;

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <> constexpr bool IN_BLOCKS<bf16> = true;
static INLINE Dwords add_block(bf16, Dwords sum, Dwords a, Dwords b) {
    return (Dwords)vbfmmlaq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
template <> constexpr bool IN_BLOCKS<int8_t> = true;
static INLINE Dwords add_block(int8_t, Dwords sum, Dwords a, Dwords b) {
    return (Dwords)vmmlaq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b);
}
#endif

// The sums of M rows and V vectors of columns.
template <class T, int M, int V> class Blocks {
#if defined(__aarch64__)
    static constexpr int PAIRS = (M + 1) / 2;
    Dwords sums[PAIRS][2 * V];  // [row][column] of two rows and two columns each

    static INLINE Dwords lower(Dwords a, Dwords b) { return (Dwords)vzip1q_u64((uint64x2_t)a, (uint64x2_t)b); }
    static INLINE Dwords upper(Dwords a, Dwords b) { return (Dwords)vzip2q_u64((uint64x2_t)a, (uint64x2_t)b); }
    static constexpr int second(int pair) { return 2 * pair + 1 < M ? 2 * pair + 1 : M - 1; }  // the last row may be a pair with itself

public:
    template <class Sums> INLINE explicit Blocks(const Sums (&rows)[M][V]) {
#pragma GCC unroll 4
        for (int p = 0; p < PAIRS; p++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                const Dwords first = (Dwords)rows[2 * p][v], next = (Dwords)rows[second(p)][v];
                sums[p][2 * v] = lower(first, next), sums[p][2 * v + 1] = upper(first, next);
            }
    }

    // += the two dwords of row m at a(m) times those of the columns, where dword i of vector v is b(v, i).
    INLINE void add(auto a, auto b) {
        Dwords factors[PAIRS];
#pragma GCC unroll 4
        for (int p = 0; p < PAIRS; p++)
            factors[p] = (Dwords)vcombine_u32(vld1_u32(a(2 * p)), vld1_u32(a(second(p))));
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            const uint32x4_t first = (uint32x4_t)b(v, 0), next = (uint32x4_t)b(v, 1);
            const Dwords left = (Dwords)vzip1q_u32(first, next), right = (Dwords)vzip2q_u32(first, next);
#pragma GCC unroll 4
            for (int p = 0; p < PAIRS; p++) {
                sums[p][2 * v] = add_block(T{}, sums[p][2 * v], factors[p], left);
                sums[p][2 * v + 1] = add_block(T{}, sums[p][2 * v + 1], factors[p], right);
            }
        }
    }

    template <class Sums> INLINE void store_rows(Sums (&rows)[M][V]) const {
#pragma GCC unroll 4
        for (int p = 0; p < PAIRS; p++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                rows[2 * p][v] = (Sums)lower(sums[p][2 * v], sums[p][2 * v + 1]);
                if (2 * p + 1 < M) rows[second(p)][v] = (Sums)upper(sums[p][2 * v], sums[p][2 * v + 1]);
            }
    }
#endif
};
