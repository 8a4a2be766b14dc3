// RMSNorm, alone or with the residual addition before it.
#include "calls.h"
#include "norm.h"
#include "team.h"

namespace {

template <class T>
void norm(const T* x, T* residual, const float* weight, T* out, size_t rows, size_t size, float eps) {
    for_each(rows, rows <= 4, [&](size_t row) {
        const size_t first = row * size;
        T* total = residual ? residual + first : nullptr;
        const float scale = inverse_rms(x + first, total, size, eps);
        scale_by(total ? total : x + first, scale, weight, size, out + first);
    });
}

}  // namespace

// out = norm(x) * weight; with a residual (else null): residual += x, out = norm(residual) * weight. All [rows][size], but for
// the weight, [size], which is float32 so that it may be 1 + a small number.
extern "C" void rms_norm(int dtype, const void* x, void* residual, const float* weight, void* out, size_t rows, size_t size,
                         float eps) {
    with_type(dtype, [&]<class T>(T*) { norm((const T*)x, (T*)residual, weight, (T*)out, rows, size, eps); });
}
RECORDABLE(rms_norm)
