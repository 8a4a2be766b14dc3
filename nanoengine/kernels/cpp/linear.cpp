// Linear layers (with SwiGLU's gate, if asked for) and embeddings over one packed weight.
//
// W [outputs][inputs] is cut into panels of 32 outputs. In a panel stands, for each dword of inputs, that dword of all 32
// outputs (128 bytes). One row of x reads a panel from memory in a single stream; more rows find it in the cache.
#include "product.h"
#include <algorithm>
#include <vector>

constexpr size_t PANEL = COLUMNS;
constexpr size_t ROW_BLOCK = 96;  // rows of x, a multiple of ROWS, that stay in the second-level cache

static size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

// Dwords in a row of W.
template <class T> static size_t depth_of(size_t inputs) { return round_up(inputs, Dot<T>::per_dword) / Dot<T>::per_dword; }

// Where dword d of an output is.
static size_t place(size_t output, size_t d, size_t depth) { return output / PANEL * PANEL * depth + d * PANEL + output % PANEL; }

static INLINE F16 silu(F16 x) {
    const F16 small = exp_negative(x < 0.0f ? x : -x);  // exp(-|x|): never too large
    return x * (x < 0.0f ? small : splat(1.0f)) / (small + 1.0f);
}

template <class Out> static INLINE void store_row(F16 left, F16 right, Out* out, int columns) {
    if (columns == COLUMNS) {
        store_floats(out, left);
        store_floats(out + LANES, right);
    } else {
        Out all[COLUMNS];
        store_floats(all, left);
        store_floats(all + LANES, right);
        std::copy_n(all, columns, out);
    }
}

// x as dwords; copied with its odd end filled up, if it has one.
template <class T> static const uint32_t* dwords_of(const T* x, size_t rows, size_t inputs, std::vector<T>& padded) {
    if (inputs % Dot<T>::per_dword) {
        const size_t stride = depth_of<T>(inputs) * Dot<T>::per_dword;
        padded.assign(rows * stride, T{});
        for (size_t m = 0; m < rows; m++) std::copy_n(x + m * inputs, inputs, padded.data() + m * stride);
        x = padded.data();
    }
    return reinterpret_cast<const uint32_t*>(x);
}

// For each panel and ROWS rows of x: use(column, first row, number of rows).
template <class Use> static void for_tiles(size_t rows, size_t outputs, Use use) {
#pragma omp parallel
    for (size_t block = 0; block < rows; block += ROW_BLOCK) {
#pragma omp for schedule(static) nowait
        for (size_t column = 0; column < outputs; column += PANEL)
            for (size_t first = block; first < std::min(rows, block + ROW_BLOCK); first += ROWS)
                use(column, first, (int)std::min<size_t>(ROWS, std::min(rows, block + ROW_BLOCK) - first));
    }
}

template <class T, class Out>
static void linear(const T* x, const uint32_t* packed, const T* bias, Out* out, size_t rows, size_t outputs, size_t inputs) {
    const size_t depth = depth_of<T>(inputs);
    std::vector<T> padded;
    const uint32_t* a = dwords_of(x, rows, inputs, padded);
    for_tiles(rows, outputs, [&](size_t column, size_t first, int count) {
        const int columns = (int)std::min(PANEL, outputs - column);
        const uint32_t* panel = packed + column * depth;
        float sums[ROWS][PANEL], biases[PANEL] = {};
        for (int c = 0; bias && c < columns; c++) biases[c] = to_float(bias[column + c]);
        product<T>(count, a + first * depth, depth, panel, panel + LANES, PANEL, depth, sums[0], PANEL, false);
        for (int m = 0; m < count; m++)
            store_row(load<F16>(sums[m]) + load<F16>(biases), load<F16>(sums[m] + LANES) + load<F16>(biases + LANES),
                      out + (first + m) * outputs + column, columns);
    });
}

// The first half of W makes gates, the second the values that they gate; `size` is a half, a multiple of PANEL.
template <class T>
static void gated_linear(const T* x, const uint32_t* packed, T* out, size_t rows, size_t size, size_t inputs) {
    const size_t depth = depth_of<T>(inputs);
    std::vector<T> padded;
    const uint32_t* a = dwords_of(x, rows, inputs, padded);
    for_tiles(rows, size, [&](size_t column, size_t first, int count) {
        const uint32_t *gate = packed + column * depth, *up = gate + size * depth;
        float gates[ROWS][PANEL], ups[ROWS][PANEL];
        product<T>(count, a + first * depth, depth, gate, gate + LANES, PANEL, depth, gates[0], PANEL, false);
        product<T>(count, a + first * depth, depth, up, up + LANES, PANEL, depth, ups[0], PANEL, false);
        for (int m = 0; m < count; m++)
            store_row(silu(load<F16>(gates[m])) * load<F16>(ups[m]), silu(load<F16>(gates[m] + LANES)) * load<F16>(ups[m] + LANES),
                      out + (first + m) * size + column, COLUMNS);
    });
}

template <class T> static void pack(const T* weight, uint32_t* packed, size_t first, size_t rows, size_t inputs) {
    const size_t depth = depth_of<T>(inputs);
#pragma omp parallel for schedule(static)
    for (size_t group = first / LANES; group < round_up(first + rows, LANES) / LANES; group++) {
        const size_t from = std::max(first, group * LANES), to = std::min(first + rows, (group + 1) * LANES);
        for (size_t start = 0; start < depth; start += LANES)  // as many dwords as fit a cache line
            for (size_t output = from; output < to; output++) {
                const T* row = weight + (output - first) * inputs;
                for (size_t d = start; d < std::min(start + LANES, depth); d++) {
                    const size_t i = d * Dot<T>::per_dword;
                    uint32_t dword = 0;
                    std::memcpy(&dword, row + i, i + Dot<T>::per_dword <= inputs ? 4 : sizeof(T));
                    packed[place(output, d, depth)] = dword;
                }
            }
    }
}

template <class T> static void embed(const int64_t* ids, const uint32_t* packed, T* out, size_t rows, size_t inputs) {
    const size_t depth = depth_of<T>(inputs);
#pragma omp parallel for schedule(static) if (rows > 16)
    for (size_t m = 0; m < rows; m++)
        for (size_t d = 0; d < depth; d++) {
            const uint32_t dword = packed[place(ids[m], d, depth)];
            const size_t i = d * Dot<T>::per_dword;
            std::memcpy(out + m * inputs + i, &dword, i + Dot<T>::per_dword <= inputs ? 4 : sizeof(T));
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

// out [rows][outputs] = x [rows][inputs] W^T + bias (which may be null).
void linear(int dtype, int out_dtype, const void* x, const uint32_t* packed, const void* bias, void* out, size_t rows,
            size_t outputs, size_t inputs) {
    if (dtype == FLOAT32) linear((const f32*)x, packed, (const f32*)bias, (f32*)out, rows, outputs, inputs);
    else if (out_dtype == FLOAT32) linear((const bf16*)x, packed, (const bf16*)bias, (f32*)out, rows, outputs, inputs);
    else linear((const bf16*)x, packed, (const bf16*)bias, (bf16*)out, rows, outputs, inputs);
}

// out [rows][size] = silu(x G^T) * (x U^T), where W is G [size][inputs] and under it U; size is a multiple of 32.
void gated_linear(int dtype, const void* x, const uint32_t* packed, void* out, size_t rows, size_t size, size_t inputs) {
    if (dtype == FLOAT32) gated_linear((const f32*)x, packed, (f32*)out, rows, size, inputs);
    else gated_linear((const bf16*)x, packed, (bf16*)out, rows, size, inputs);
}

// out [rows][inputs] = the rows of W at `ids`.
void embed(int dtype, const int64_t* ids, const uint32_t* packed, void* out, size_t rows, size_t inputs) {
    if (dtype == FLOAT32) embed(ids, packed, (f32*)out, rows, inputs);
    else embed(ids, packed, (bf16*)out, rows, inputs);
}
}
