// Causal convolutions of each channel over a few tokens, whose last inputs are the state of a sequence.
#include "calls.h"
#include "panels.h"
#include "states.h"
#include "team.h"

namespace {

constexpr size_t MAX_TAPS = 8, VECTORS = 4, BLOCK = VECTORS * LANES;

}  // namespace

extern "C" {

// x, before and after (or null) have strides between tokens; weight [taps][channels], states [slots][taps - 1][channels] with a
// stride between slots; out [tokens][channels].
void short_conv(int dtype, const void* x, size_t x_stride, const void* before, size_t before_stride, const void* after,
                size_t after_stride, const float* weight, const float* bias, size_t taps, int silu, float* states,
                size_t slot_stride, const int32_t* rows, const int32_t* starts, const int32_t* store_starts,
                const int32_t* store_tokens, const int32_t* store_slots, void* out, size_t runs, size_t tokens,
                size_t channels) {
    const StateRuns state_runs{rows, starts, store_starts, store_tokens, store_slots};
    with_type(dtype, [&]<class T>(T*) {
        const Strided<T> inputs{(const T*)x, x_stride}, gates_before{(const T*)before, before_stride}, gates_after{(const T*)after, after_stride};
        const size_t blocks = (channels + BLOCK - 1) / BLOCK;
        for_each(runs * blocks, tokens * channels < 8192, [&](size_t item) {
            const size_t first = item % blocks * BLOCK;
            Floats past[MAX_TAPS][VECTORS];
            const auto each = [&](auto f) {
                for (size_t v = 0; v < VECTORS && first + v * LANES < channels; v++)
                    f(v, first + v * LANES, channels - first - v * LANES);
            };
            state_runs.for_each_run(
                item / blocks,
                [&](size_t slot) {
                    for (size_t tap = 0; tap + 1 < taps; tap++)
                        each([&](size_t v, size_t c, size_t count) {
                            past[tap][v] = load_some(states + slot * slot_stride + tap * channels + c, count);
                        });
                },
                [&](size_t t) {
                    each([&](size_t v, size_t c, size_t count) {
                        Floats value = load_some(inputs.row(t) + c, count);
                        if (gates_before.at) value *= load_some(gates_before.row(t) + c, count);
                        Floats total = bias ? load_some(bias + c, count) : Floats{};
                        for (size_t tap = 0; tap + 1 < taps; tap++) {
                            total = multiply_add(load_some(weight + tap * channels + c, count), past[tap][v], total);
                            past[tap][v] = tap + 2 < taps ? past[tap + 1][v] : value;
                        }
                        total = multiply_add(load_some(weight + (taps - 1) * channels + c, count), value, total);
                        if (silu) total = times_sigmoid(total, total);
                        if (gates_after.at) total *= load_some(gates_after.row(t) + c, count);
                        store_some((T*)out + t * channels + c, total, count);
                    });
                },
                [&](size_t slot) {
                    for (size_t tap = 0; tap + 1 < taps; tap++)
                        each([&](size_t v, size_t c, size_t count) {
                            store_some(states + slot * slot_stride + tap * channels + c, past[tap][v], count);
                        });
                });
        });
    });
}

// out = x * sigmoid(gate). x and gate have strides between tokens, gate one column if gate_width is 1; out [rows][width].
void sigmoid_gate(int dtype, const void* x, size_t x_stride, const void* gate, size_t gate_stride, size_t gate_width, void* out,
                  size_t rows, size_t width) {
    with_type(dtype, [&]<class T>(T*) {
        const Strided<T> inputs{(const T*)x, x_stride}, gates{(const T*)gate, gate_stride};
        for_each(rows, rows * width < 16384, [&](size_t row) {
            for (size_t c = 0; c < width; c += LANES) {
                const Floats by = gate_width == 1 ? splat(to_float(*gates.row(row))) : load_some(gates.row(row) + c, width - c);
                store_some((T*)out + row * width + c, times_sigmoid(load_some(inputs.row(row) + c, width - c), by), width - c);
            }
        });
    });
}
}
RECORDABLE(short_conv)
RECORDABLE(sigmoid_gate)
