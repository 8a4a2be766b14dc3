// RMSNorm, alone or with the residual addition before it.
#include "calls.h"
#include "norm.h"
#include "team.h"

// out = norm(x) * weight; with a residual (else null): residual += x, out = norm(residual) * weight. All [rows][size], but for
// the weight, [size], which is float32 so that it may be 1 + a small number.
extern "C" void rms_norm(int dtype, const void* x, void* residual, const float* weight, void* out, size_t rows, size_t size,
                         float eps) {
    with_type(dtype, [&]<class T>(T*) {
        for_each(rows, rows <= 4, [&](size_t row) {
            const T* inputs = (const T*)x + row * size;
            T* total = residual ? (T*)residual + row * size : nullptr;
            const float scale = inverse_rms(inputs, total, size, eps);
            scale_by(total ? total : inputs, scale, weight, size, (T*)out + row * size);
        });
    });
}
RECORDABLE(rms_norm)
