// RMSNorm of a row, in two steps: what it is scaled by, and the scaling of some of its elements.
#pragma once
#include <cmath>
#include "simd.h"

// 1 / rms of x [size]; with a residual (else null): residual += x first, and 1 / rms of that.
template <class T> static float inverse_rms(const T* x, T* residual, size_t size, float eps) {
    Floats squares{};
    float rest = 0;
    for_vectors(size, [&](size_t i, auto some) {
        if (residual) store_some(residual + i, load_some(residual + i, some) + load_some(x + i, some), some);
        const Floats value = load_some((residual ? residual : x) + i, some), square = value * value;
        if (some == LANES) squares += square;
        else for (size_t lane = 0; lane < some; lane++) rest += square[lane];
    });
    return 1.0f / std::sqrt((sum(squares) + rest) / size + eps);
}

// out = x * scale * weight, all [count].
template <class T, class Out> static void scale_by(const T* x, float scale, const float* weight, size_t count, Out* out) {
    for_vectors(count, [&](size_t i, auto some) {
        store_some(out + i, load_some(x + i, some) * scale * load_some(weight + i, some), some);
    });
}
