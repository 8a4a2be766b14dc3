// One small matrix product, which every larger one here is made of: up to ROWS rows of A times 32 columns of B.
//
// B is stored by dwords of the summed dimension: row d of B holds that dword of 16 columns in a vector at b0 and of 16 more at
// b1. A row's sums are added in the order of d whatever the number of rows, so a token computes the same alone and in a batch.
#pragma once
#include "simd.h"
#if defined(__AMX_BF16__) || defined(EMULATE_AMX)
#include "amx.h"
#endif

constexpr int COLUMNS = 2 * LANES;

#if defined(__AVX512F__)
constexpr int VECTOR_ROWS = 12;  // 24 of the 32 registers are sums
#else
constexpr int VECTOR_ROWS = 3;  // a vector takes two of 16 registers (AVX2), or four of 32 (NEON)
#endif

#if defined(__AMX_BF16__) || defined(EMULATE_AMX)
constexpr int ROWS = AMX_ROWS;
#else
constexpr int ROWS = VECTOR_ROWS;
#endif

// B is often read from memory for the first time: how far ahead it is asked for, in dwords. Where a row of B takes long to use, few
// lines would be under way; the second-level cache then takes more of them.
constexpr size_t NEAR = 512, FAR = 2048;
constexpr int MANY_ROWS = 8;

template <class T, int M>
static void multiply(const uint32_t* a, size_t a_stride, const uint32_t* b0, const uint32_t* b1, size_t b_stride, size_t depth,
                     float* out, size_t out_stride, bool add) {
    F16 sums[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        sums[m][0] = add ? load<F16>(out + m * out_stride) : F16{};
        sums[m][1] = add ? load<F16>(out + m * out_stride + LANES) : F16{};
    }
    // Row m of A is found by base m / 3 and step m % 3: twelve pointers of their own would not fit in the registers.
    const uint32_t* bases[(M + 2) / 3];
#pragma GCC unroll 4
    for (int base = 0; base < (M + 2) / 3; base++) bases[base] = a + 3 * base * a_stride;
    for (size_t d = 0; d < depth; d++) {
        const size_t steps[3] = {d, d + a_stride, d + 2 * a_stride};
        const uint32_t *left_row = b0 + d * b_stride, *right_row = b1 + d * b_stride;
        __builtin_prefetch(left_row + NEAR);
        __builtin_prefetch(right_row + NEAR);
        if constexpr (M >= MANY_ROWS) {
            __builtin_prefetch(left_row + FAR, 0, 2);
            __builtin_prefetch(right_row + FAR, 0, 2);
        }
        const U16 left = load<U16>(left_row), right = load<U16>(right_row);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const U16 scalar = splat(bases[m / 3][steps[m % 3]]);
            sums[m][0] = Dot<T>::add(sums[m][0], left, scalar);
            sums[m][1] = Dot<T>::add(sums[m][1], right, scalar);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        store(out + m * out_stride, sums[m][0]);
        store(out + m * out_stride + LANES, sums[m][1]);
    }
}

template <class T, int M = VECTOR_ROWS, class... Args> static void multiply_rows(int rows, Args... args) {
    if constexpr (M == 1) multiply<T, 1>(args...);
    else if (rows == M) multiply<T, M>(args...);
    else multiply_rows<T, M - 1>(rows, args...);
}

// out[m][0..31] = (add ? out : 0) + sum over d of A[m][d] B[d][0..31], for `rows` <= ROWS rows; strides are in dwords.
template <class T>
static void product(int rows, const uint32_t* a, size_t a_stride, const uint32_t* b0, const uint32_t* b1, size_t b_stride,
                    size_t depth, float* out, size_t out_stride, bool add) {
#if defined(__AMX_BF16__) || defined(EMULATE_AMX)
    if (sizeof(T) == 2 && depth % AMX_DEPTH == 0 && amx_allowed())
        return amx_product(rows, a, a_stride, b0, b1, b_stride, depth, out, out_stride, add);
#endif
    for (int m = 0; m < rows; m += VECTOR_ROWS)
        multiply_rows<T>(rows - m < VECTOR_ROWS ? rows - m : VECTOR_ROWS, a + m * a_stride, a_stride, b0, b1, b_stride, depth,
                         out + m * out_stride, out_stride, add);
}
