// RMSNorm, alone or with the residual addition before it.
#include <cmath>
#include "simd.h"

template <class T>
static void norm(const T* x, T* residual, const T* weight, T* out, size_t rows, size_t size, float eps) {
#pragma omp parallel for schedule(static) if (rows > 4)
    for (size_t row = 0; row < rows; row++) {
        const T* from = x + row * size;
        T *total = residual ? residual + row * size : nullptr, *to = out + row * size;
        const size_t whole = size / LANES * LANES;
        Floats squares{};
        float rest = 0;
        for (size_t i = 0; i < whole; i += LANES) {
            if (total) store_floats(total + i, load_floats(total + i) + load_floats(from + i));
            const Floats value = load_floats((total ? total : from) + i);
            squares += value * value;
        }
        for (size_t i = whole; i < size; i++) {
            if (total) from_float(total + i, to_float(total[i]) + to_float(from[i]));
            const float value = to_float((total ? total : from)[i]);
            rest += value * value;
        }
        const T* value = total ? total : from;
        const float scale = 1.0f / std::sqrt((sum(squares) + rest) / size + eps);
        for (size_t i = 0; i < whole; i += LANES) store_floats(to + i, load_floats(value + i) * scale * load_floats(weight + i));
        for (size_t i = whole; i < size; i++) from_float(to + i, to_float(value[i]) * scale * to_float(weight[i]));
    }
}

// out = norm(x) * weight; with a residual (else null): residual += x, out = norm(residual) * weight. All [rows][size].
extern "C" void rms_norm(int dtype, const void* x, void* residual, const void* weight, void* out, size_t rows, size_t size, float eps) {
    if (dtype == FLOAT32) norm((const f32*)x, (f32*)residual, (const f32*)weight, (f32*)out, rows, size, eps);
    else norm((const bf16*)x, (bf16*)residual, (const bf16*)weight, (bf16*)out, rows, size, eps);
}
