// Linear layers (with a norm before them and a gate behind them, where there are some) and mixtures of experts, over weights in panels.
#include "calls.h"
#include "experts.h"
#include "team.h"

namespace {

// For each of the first `panels` panels and each block of rows: use(panel, rows, first row, number of rows).
template <class T, class Use> void for_panels(const Input<T>& input, int64_t kinds, size_t panels, Use use) {
    const size_t at_once = row_block<T>(input.inputs), most = std::min(input.rows, at_once);
    const size_t block_count = round_up(input.rows, at_once) / at_once;
    Rows<T> blocks[] = {{kinds, input.inputs, most}, {kinds, input.inputs, block_count > 1 ? most : 0}};  // one is filled, the other read
    if (input.rows == 1) blocks[0].take(input, 0, 0);  // one row is not worth a division
    const auto start = [&](size_t i) { return std::min(round_up(input.rows * i / block_count, AMX_ROWS), input.rows); };
    parallel([&](Member member) {
        const TileRegion region;
        for (size_t i = 0; i < block_count; i++) {
            Rows<T>& block = blocks[i % 2];
            const size_t first = start(i), count = start(i + 1) - first;  // blocks of about as many rows each
            if (input.rows > 1) {
                member.static_for(count, [&](size_t row) { block.take(input, first + row, row); });
                member.barrier();
            }
            member.static_for(panels, [&](size_t panel) { use(panel, block, first, count); });
        }
    });
}

template <class T, class Out> void product_of(const Input<T>& input, const Weight& weight, const T* bias, Out* out) {
    for_panels(input, weight.kinds, weight.panels, [&](size_t i, Rows<T>& block, size_t first, size_t count) {
        const Panel& panel = weight.panel(i);
        alignas(64) float sums[MOST_ROW_BLOCK<T>][PANEL], biases[PANEL] = {};
        for (int64_t c = 0; bias && c < panel.columns; c++) biases[c] = to_float(bias[panel.first + c]);
        block.multiply(0, count, panel, sums);
        store_panel(out + first * weight.outputs + panel.first, weight.outputs, count, panel.columns,
                    input.rows * weight.outputs * sizeof(Out) > LARGE_OUTPUT,
                    [&](size_t m, int v) { return load<Floats>(sums[m] + v * LANES) + load<Floats>(biases + v * LANES); });
    });
}

}  // namespace

extern "C" {

// out [rows][outputs] = x [rows][inputs] W^T + bias. Null: bias, if there is none; norm [inputs], or else x is first replaced
// as by rms_norm, with its residual, which needs a norm. out_dtype: that of x, or float32.
void linear(int dtype, int out_dtype, const void* x, void* residual, const float* norm, float eps, const Weight* weight, const void* bias,
            void* out, size_t rows) {
    with_type(dtype, [&]<class T>(T*) {
        const Input<T> input{(const T*)x, (T*)residual, norm, eps, rows, (size_t)weight->inputs};
        if (out_dtype == FLOAT32) product_of(input, *weight, (const T*)bias, (f32*)out);
        else product_of(input, *weight, (const T*)bias, (T*)out);
    });
}

// out [rows][size] = gated(x G^T, x U^T), where W is G [size][inputs] and under it U, cut into panels in the same way. x as
// for linear.
void gated_linear(int dtype, int activation, const void* x, void* residual, const float* norm, float eps, const Weight* weight, void* out,
                  size_t rows) {
    with_type(dtype, [&]<class T>(T*) {
        const Input<T> input{(const T*)x, (T*)residual, norm, eps, rows, (size_t)weight->inputs};
        const size_t size = weight->outputs / 2, half = weight->panels / 2;
        for_panels(input, weight->kinds, half, [&](size_t i, Rows<T>& block, size_t first, size_t count) {
            const Panel& panel = weight->panel(i);
            multiply_gated(block, {(Activation)activation, nullptr, nullptr}, 0, count, panel, weight->panel(half + i),
                           (T*)out + first * size + panel.first, size, rows * size * sizeof(T) > LARGE_OUTPUT);
        });
    });
}

// out [rows][size] = what the gates, the first half of each row of x [rows][2 * size], make of the values in the second.
void gate(int dtype, int activation, const void* x, void* out, size_t rows, size_t size) {
    with_type(dtype, [&]<class T>(T*) {
        with_activation(activation, [&]<Activation ACTIVATION>() {
            for_each(rows, rows <= 4, [&](size_t row) {
                const T* gates = (const T*)x + 2 * row * size;
                gate_pairs<ACTIVATION>(gates, gates + size, size, (T*)out + row * size);
            });
        });
    });
}

// gated [rows * per_row][size] = gated(G_e x, U_e x), where e = chosen[row][j] is one of `count` experts: G and U
// [size][hidden] of each in separate panels, one behind the other, and what their biases [count][size] add, or both are
// null. Rows are sorted by expert. Nothing is computed, and 0 is the result, if a choice is no expert.
int gate_experts(int dtype, int activation, const void* x, const Weight* gate, const Weight* up, const float* gate_bias,
                 const float* up_bias, const int64_t* chosen, void* gated, size_t rows, size_t per_row, size_t count) {
    const Choices choices{chosen, nullptr, rows, per_row, count};
    if (!choices.are_experts()) return 0;
    with_type(dtype, [&]<class T>(T*) {
        gated_of_experts((Activation)activation, choices, (const T*)x, *gate, *up, gate_bias, up_bias, (T*)gated);
    });
    return 1;
}

// out [rows][hidden] = sum over j of factors[row][j] * (D_e gated), of such rows and as many choices: D [hidden][size] of each
// expert, and what its bias [count][hidden] adds, or null.
void add_up_experts(int dtype, const void* gated, const Weight* down, const float* bias, const int64_t* chosen, const float* factors,
                    void* out, size_t rows, size_t per_row, size_t count) {
    with_type(dtype, [&]<class T>(T*) {
        sums_of_experts(Choices{chosen, factors, rows, per_row, count}, (const T*)gated, *down, bias, (T*)out);
    });
}

// What whole numbers are multiplied with, for people.
const char* quantized_instruction() { return DOT_OF_BYTES; }

// Whether products are in AMX tiles, whose sums have another order: Linux may not grant this process those that the
// CPU has.
int uses_tiles() {
#if defined(TILES_OF_AMX)
    return amx_allowed();
#else
    return 0;
#endif
}
}
RECORDABLE(linear)
RECORDABLE(gated_linear)
RECORDABLE(gate)
RECORDABLE(gate_experts)
RECORDABLE(add_up_experts)
