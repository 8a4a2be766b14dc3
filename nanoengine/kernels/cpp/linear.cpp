// Linear layers (with a norm before them and a gate behind them, if asked for), embeddings and mixtures of experts, over
// weights that are packed in panels (panels.h).
#include "experts.h"
#include "linear.h"

namespace {

constexpr size_t LINE = 16;  // dwords of a cache line

// Dword d of a row of a checkpoint's W, or what there is of it.
template <class T> uint32_t dword_of(const T* row, size_t d, size_t inputs) {
    const size_t first = d * Dot<T>::PER_DWORD;
    uint32_t dword = 0;
    std::memcpy(&dword, row + first, std::min<size_t>(Dot<T>::PER_DWORD, inputs - first) * sizeof(T));
    return dword;
}

template <class T> void pack(const T* weight, uint32_t* packed, size_t first, size_t rows, size_t inputs) {
    const size_t depth = depth_of<T>(inputs), whole = inputs / Dot<T>::PER_DWORD / LINE * LINE;
    const size_t first_group = first / GROUP;
    for_each(round_up(first + rows, GROUP) / GROUP - first_group, false, [&](size_t i) {
        const size_t group = first_group + i;
        const size_t from = std::max<size_t>(first, group * GROUP), to = std::min<size_t>(first + rows, (group + 1) * GROUP);
        size_t d = 0;
        if (to - from == GROUP)  // squares of known size: they are turned in the first-level cache
            for (; d < whole; d += LINE) {
                uint32_t square[GROUP][LINE];
                for (size_t i = 0; i < GROUP; i++)
                    std::memcpy(square[i], weight + (from - first + i) * inputs + d * Dot<T>::PER_DWORD, sizeof(square[i]));
                uint32_t* turned = packed + place(from, d, depth);
                for (size_t k = 0; k < LINE; k++)
                    for (size_t i = 0; i < GROUP; i++) turned[k * PANEL + i] = square[i][k];
            }
        for (; d < depth; d++)
            for (size_t output = from; output < to; output++)
                packed[place(output, d, depth)] = dword_of(weight + (output - first) * inputs, d, inputs);
    });
}

template <class T> void embed(const int64_t* ids, const uint32_t* packed, T* out, size_t rows, size_t inputs) {
    const size_t depth = depth_of<T>(inputs);
    for_each(rows, rows <= 16, [&](size_t m) {
        for (size_t d = 0; d < depth; d++) {
            const uint32_t dword = packed[place(ids[m], d, depth)];
            const size_t i = d * Dot<T>::PER_DWORD;
            std::memcpy(out + m * inputs + i, &dword, i + Dot<T>::PER_DWORD <= inputs ? 4 : sizeof(T));
        }
    });
}

template <Activation ACTIVATION, class T> void gate(const T* x, T* out, size_t rows, size_t size) {
    const size_t whole = size / LANES * LANES;
    for_each(rows, rows <= 4, [&](size_t row) {
        const T *gates = x + 2 * row * size, *ups = gates + size;
        T* to = out + row * size;
        for (size_t i = 0; i < whole; i += LANES) store_floats(to + i, gated<ACTIVATION>(load_floats(gates + i), load_floats(ups + i)));
        if (whole == size) return;
        T ends[2][LANES] = {}, end[LANES];  // the same for all: no element is computed in another way than others
        std::copy(gates + whole, gates + size, ends[0]);
        std::copy(ups + whole, ups + size, ends[1]);
        store_floats(end, gated<ACTIVATION>(load_floats(ends[0]), load_floats(ends[1])));
        std::copy_n(end, size - whole, to + whole);
    });
}

}  // namespace

extern "C" {

// Dwords that a packed weight [outputs][inputs] takes; those of the padding must be zero.
size_t packed_size(int dtype, size_t outputs, size_t inputs) {
    return round_up(outputs, PANEL) * (dtype == FLOAT32 ? depth_of<f32>(inputs) : depth_of<bf16>(inputs));
}

// Put the row-major rows at `weight` into their places as outputs [first, first + rows).
void pack(int dtype, const void* weight, uint32_t* packed, size_t first, size_t rows, size_t inputs) {
    if (dtype == FLOAT32) pack((const f32*)weight, packed, first, rows, inputs);
    else pack((const bf16*)weight, packed, first, rows, inputs);
}

// out [rows][outputs] = x [rows][inputs] W^T + bias. Null: bias, if there is none; norm [inputs], or else x is first replaced as by
// rms_norm, with its residual, which needs a norm.
void linear(int dtype, int out_dtype, const void* x, void* residual, const float* norm, float eps, const uint32_t* packed,
            const void* bias, void* out, size_t rows, size_t outputs, size_t inputs) {
    if (dtype == FLOAT32)
        return linear(Input<f32>{(const f32*)x, (f32*)residual, norm, eps, rows, inputs}, Dense<f32>{packed, outputs, inputs},
                      (const f32*)bias, (f32*)out);
    const Input<bf16> input{(const bf16*)x, (bf16*)residual, norm, eps, rows, inputs};
    const Dense<bf16> weight{packed, outputs, inputs};
    if (out_dtype == FLOAT32) linear(input, weight, (const bf16*)bias, (f32*)out);
    else linear(input, weight, (const bf16*)bias, (bf16*)out);
}

// out [rows][size] = gated(x G^T, x U^T), where W is G [size][inputs] and under it U; size is a multiple of 32. x as for linear.
void gated_linear(int dtype, int activation, const void* x, void* residual, const float* norm, float eps, const uint32_t* packed,
                  void* out, size_t rows, size_t size, size_t inputs) {
    auto gated_as = [&]<class T>(T*) {
        gated_linear((Activation)activation, Input<T>{(const T*)x, (T*)residual, norm, eps, rows, inputs},
                     Dense<T>{packed, 2 * size, inputs}, (T*)out);
    };
    if (dtype == FLOAT32) gated_as((f32*)nullptr);
    else gated_as((bf16*)nullptr);
}

// out [rows][size] = what the gates, the first half of each row of x [rows][2 * size], make of the values in the second.
void gate(int dtype, int activation, const void* x, void* out, size_t rows, size_t size) {
    auto gate_as = [&]<class T>(T*) {
        const auto function = activation == SILU ? gate<SILU, T> : activation == GELU_TANH ? gate<GELU_TANH, T> : gate<CLAMPED, T>;
        function((const T*)x, (T*)out, rows, size);
    };
    if (dtype == FLOAT32) gate_as((f32*)nullptr);
    else gate_as((bf16*)nullptr);
}

// out [rows][inputs] = the rows of W at `ids`.
void embed(int dtype, const int64_t* ids, const uint32_t* packed, void* out, size_t rows, size_t inputs) {
    if (dtype == FLOAT32) embed(ids, packed, (f32*)out, rows, inputs);
    else embed(ids, packed, (bf16*)out, rows, inputs);
}

// out [rows][hidden] = sum over j of factors[row][j] * (D_e gated(G_e x, U_e x)), where e = chosen[row][j], and there are `count`
// experts: G and U [size][hidden], D [hidden][size] of each packed for itself, one behind the other. To each of the three products
// its bias is added, [count][size] twice and [count][hidden]; or all three are null.
void experts(int dtype, int activation, const void* x, const uint32_t* gate, const uint32_t* up, const uint32_t* down,
             const float* gate_bias, const float* up_bias, const float* down_bias, const int64_t* chosen, const float* factors,
             void* out, size_t rows, size_t per_row, size_t count, size_t size, size_t hidden) {
    const ExpertBiases biases{gate_bias, up_bias, down_bias};
    auto mix = [&]<class T>(T*) {
        const size_t sizes = count * round_up(size, PANEL), hiddens = count * round_up(hidden, PANEL);
        const Dense<T> gates{gate, sizes, hidden}, ups{up, sizes, hidden}, downs{down, hiddens, size};
        experts((Activation)activation, Choices{chosen, factors, rows, per_row, count}, (const T*)x,
                Experts<Dense<T>>{gates, ups, downs, biases, size, hidden}, (T*)out);
    };
    if (dtype == FLOAT32) mix((f32*)nullptr);
    else mix((bf16*)nullptr);
}
}
