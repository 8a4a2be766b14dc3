// Linear layers (with a norm before them and SwiGLU's gate behind them, if asked for) and embeddings over one packed weight.
//
// W [outputs][inputs] is cut into panels of COLUMNS outputs. In a panel stands, for each dword of inputs, that dword of all its
// outputs. One row of x reads a panel from memory in a single stream; more rows find it in the first-level cache, chunk by chunk.
#include "norm.h"
#include "product.h"
#include <algorithm>
#include <vector>

constexpr size_t PANEL = COLUMNS;
constexpr size_t LINE = 16;       // dwords of a cache line
constexpr size_t ROW_BLOCK = 96;  // rows of x that are kept near

static size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

// Dwords in a row of W.
template <class T> static size_t depth_of(size_t inputs) { return round_up(inputs, Dot<T>::PER_DWORD) / Dot<T>::PER_DWORD; }

// Where dword d of an output is.
static size_t place(size_t output, size_t d, size_t depth) { return output / PANEL * PANEL * depth + d * PANEL + output % PANEL; }

static INLINE Floats silu(Floats x) {
    const Floats small = exp_negative(x < 0.0f ? x : -x);  // exp(-|x|): never too large
    return x * (x < 0.0f ? small : splat(1.0f)) / (small + 1.0f);
}

// A panel's results in `count` rows of out: vector v of row m is value(m, v). Of the last panel perhaps only the first `columns`.
template <class Out, class Value>
static INLINE void store_panel(Out* out, size_t stride, size_t count, size_t columns, Value value) {
    if (columns == PANEL) {
        for (size_t m = 0; m < count; m++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) store_floats(out + m * stride + v * LANES, value(m, v));
        return;
    }
    std::vector<Out> row(PANEL);  // not an array: a test demands that loops leave no vector on the stack
    for (size_t m = 0; m < count; m++) {
        for (int v = 0; v < WIDE; v++) store_floats(row.data() + v * LANES, value(m, v));
        std::copy_n(row.data(), columns, out + m * stride);
    }
}

// The input of a linear layer: x [rows][inputs], or its norm; see rms_norm for the residual.
template <class T> struct Input {
    const T* x;
    T* residual;
    const T* norm;  // the norm's weight, or null
    float eps;
    size_t rows, inputs;
};

// Some rows of an input as factors: [chunk of the inputs][row].
template <class T> struct Block {
    static constexpr size_t CHUNK = MAX_DEPTH / Dot<T>::STEPS;  // dwords

    size_t inputs, rows, depth = depth_of<T>(inputs);
    Factors<T> factors{round_up(depth, CHUNK) / CHUNK * rows};

    auto* at(size_t row, size_t d) { return factors.row(d / CHUNK * rows + row); }

    // Row `from` of the input becomes this block's row `to`.
    void take(const Input<T>& input, size_t from, size_t to) {
        const T* x = input.x + from * inputs;
        float scale = 1.0f;
        if (input.norm) {
            T* residual = input.residual ? input.residual + from * inputs : nullptr;
            scale = inverse_rms(x, residual, inputs, input.eps);
            if (residual) x = residual;
        }
        for (size_t d = 0; d < depth; d += CHUNK) {
            const size_t first = d * Dot<T>::PER_DWORD, count = std::min(CHUNK * Dot<T>::PER_DWORD, inputs - first);
            if (input.norm) scale_by(x + first, scale, input.norm + first, count, at(to, d));
            else copy_factors<T>(x + first, count, at(to, d));
            for (size_t i = count; i % Dot<T>::PER_DWORD; i++) at(to, d)[i] = {};  // an odd end is half a dword
        }
    }

    // sums[row][0..PANEL) of the first `count` rows and the outputs of a panel.
    void multiply(size_t count, const uint32_t* panel, float (*sums)[PANEL]) {
        for (size_t d = 0; d < depth; d += CHUNK)
            product<T, FROM_MEMORY>((int)count, at(0, d), columns_at(panel + d * PANEL), PANEL, std::min(CHUNK, depth - d), sums[0],
                                    PANEL, d > 0);
    }
};

// For each panel and block of rows: use(column, block, first row, number of rows).
template <class T, class Use> static void for_panels(const Input<T>& input, size_t outputs, Use use) {
    const size_t block_count = round_up(input.rows, ROW_BLOCK) / ROW_BLOCK, most = std::min(input.rows, ROW_BLOCK);
    Block<T> blocks[] = {{input.inputs, most}, {input.inputs, block_count > 1 ? most : 0}};  // one is filled, the other read
    if (input.rows == 1) blocks[0].take(input, 0, 0);  // sooner done than shared out
#pragma omp parallel
    for (size_t i = 0; i < block_count; i++) {
        Block<T>& block = blocks[i % 2];
        const size_t first = input.rows * i / block_count;  // blocks of about as many rows each
        const size_t count = input.rows * (i + 1) / block_count - first;
        if (input.rows > 1) {
#pragma omp for schedule(static)
            for (size_t row = 0; row < count; row++) block.take(input, first + row, row);
        }
#pragma omp for schedule(static) nowait
        for (size_t column = 0; column < outputs; column += PANEL) use(column, block, first, count);
    }
}

template <class T, class Out>
static void linear(const Input<T>& input, const uint32_t* packed, const T* bias, Out* out, size_t outputs) {
    for_panels(input, outputs, [&](size_t column, Block<T>& block, size_t first, size_t count) {
        const size_t columns = std::min(PANEL, outputs - column);
        alignas(64) float sums[ROW_BLOCK][PANEL], biases[PANEL] = {};
        for (size_t c = 0; bias && c < columns; c++) biases[c] = to_float(bias[column + c]);
        block.multiply(count, packed + column * block.depth, sums);
        store_panel(out + first * outputs + column, outputs, count, columns,
                    [&](size_t m, int v) { return load<Floats>(sums[m] + v * LANES) + load<Floats>(biases + v * LANES); });
    });
}

// The first half of W makes gates, the second the values that they gate; `size` is a half, a multiple of PANEL.
template <class T> static void gated_linear(const Input<T>& input, const uint32_t* packed, T* out, size_t size) {
    for_panels(input, size, [&](size_t column, Block<T>& block, size_t first, size_t count) {
        alignas(64) float gates[ROW_BLOCK][PANEL], ups[ROW_BLOCK][PANEL];
        block.multiply(count, packed + column * block.depth, gates);
        block.multiply(count, packed + (size + column) * block.depth, ups);
        store_panel(out + first * size + column, size, count, PANEL, [&](size_t m, int v) {
            return silu(load<Floats>(gates[m] + v * LANES)) * load<Floats>(ups[m] + v * LANES);
        });
    });
}

// Dword d of a row of a checkpoint's W, or what there is of it.
template <class T> static uint32_t dword_of(const T* row, size_t d, size_t inputs) {
    const size_t first = d * Dot<T>::PER_DWORD;
    uint32_t dword = 0;
    std::memcpy(&dword, row + first, std::min<size_t>(Dot<T>::PER_DWORD, inputs - first) * sizeof(T));
    return dword;
}

template <class T> static void pack(const T* weight, uint32_t* packed, size_t first, size_t rows, size_t inputs) {
    const size_t depth = depth_of<T>(inputs), whole = inputs / Dot<T>::PER_DWORD / LINE * LINE;
#pragma omp parallel for schedule(static)
    for (size_t group = first / GROUP; group < round_up(first + rows, GROUP) / GROUP; group++) {
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
    }
}

template <class T> static void embed(const int64_t* ids, const uint32_t* packed, T* out, size_t rows, size_t inputs) {
    const size_t depth = depth_of<T>(inputs);
#pragma omp parallel for schedule(static) if (rows > 16)
    for (size_t m = 0; m < rows; m++)
        for (size_t d = 0; d < depth; d++) {
            const uint32_t dword = packed[place(ids[m], d, depth)];
            const size_t i = d * Dot<T>::PER_DWORD;
            std::memcpy(out + m * inputs + i, &dword, i + Dot<T>::PER_DWORD <= inputs ? 4 : sizeof(T));
        }
}

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
void linear(int dtype, int out_dtype, const void* x, void* residual, const void* norm, float eps, const uint32_t* packed,
            const void* bias, void* out, size_t rows, size_t outputs, size_t inputs) {
    if (dtype == FLOAT32)
        return linear(Input<f32>{(const f32*)x, (f32*)residual, (const f32*)norm, eps, rows, inputs}, packed, (const f32*)bias,
                      (f32*)out, outputs);
    const Input<bf16> input{(const bf16*)x, (bf16*)residual, (const bf16*)norm, eps, rows, inputs};
    if (out_dtype == FLOAT32) linear(input, packed, (const bf16*)bias, (f32*)out, outputs);
    else linear(input, packed, (const bf16*)bias, (bf16*)out, outputs);
}

// out [rows][size] = silu(x G^T) * (x U^T), where W is G [size][inputs] and under it U; size is a multiple of 32. x as for linear.
void gated_linear(int dtype, const void* x, void* residual, const void* norm, float eps, const uint32_t* packed, void* out,
                  size_t rows, size_t size, size_t inputs) {
    if (dtype == FLOAT32)
        gated_linear(Input<f32>{(const f32*)x, (f32*)residual, (const f32*)norm, eps, rows, inputs}, packed, (f32*)out, size);
    else gated_linear(Input<bf16>{(const bf16*)x, (bf16*)residual, (const bf16*)norm, eps, rows, inputs}, packed, (bf16*)out, size);
}

// out [rows][inputs] = the rows of W at `ids`.
void embed(int dtype, const int64_t* ids, const uint32_t* packed, void* out, size_t rows, size_t inputs) {
    if (dtype == FLOAT32) embed(ids, packed, (f32*)out, rows, inputs);
    else embed(ids, packed, (bf16*)out, rows, inputs);
}
}
