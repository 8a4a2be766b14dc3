// Linear layers (with a norm before them and a gate behind them, where there are some) and mixtures of experts, over weights in panels.
#include "calls.h"
#include "experts.h"
#include "linear.h"

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
        gated_product_of((Activation)activation, input, *weight, (T*)out);
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
