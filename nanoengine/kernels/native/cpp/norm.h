// RMSNorm of a row, in two steps: what it is scaled by, and the scaling of some of its elements.
#pragma once
#include <cmath>
#include "simd.h"

// 1 / rms of x [size]; with a residual (else null): residual += x first, and 1 / rms of that.
template <class T> static float inverse_rms(const T* x, T* residual, size_t size, float eps) {
    const size_t whole = size / LANES * LANES;
    Floats squares{};
    float rest = 0;
    for (size_t i = 0; i < whole; i += LANES) {
        if (residual) store_floats(residual + i, load_floats(residual + i) + load_floats(x + i));
        const Floats value = load_floats((residual ? residual : x) + i);
        squares += value * value;
    }
    for (size_t i = whole; i < size; i++) {
        if (residual) from_float(residual + i, to_float(residual[i]) + to_float(x[i]));
        const float value = to_float((residual ? residual : x)[i]);
        rest += value * value;
    }
    return 1.0f / std::sqrt((sum(squares) + rest) / size + eps);
}

// out = x * scale * weight, all [count].
template <class T, class Out> static void scale_by(const T* x, float scale, const float* weight, size_t count, Out* out) {
    for_vectors(count, [&](size_t i, auto some) {
        store_some(out + i, load_some(x + i, some) * scale * load_some(weight + i, some), some);
    });
}
