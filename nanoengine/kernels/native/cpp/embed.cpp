// Rows of a weight in panels, back as numbers: some, for embeddings, or all.
#include <algorithm>
#include "calls.h"
#include "float_product.h"
#include "team.h"

namespace {

// Outputs [first, first + count) of a quantized panel.
template <class T> void read_quantized(const Panel& panel, size_t first, size_t count, size_t inputs, T* out) {
    const size_t cells = round_up(inputs, CELL) / CELL;
    for (size_t cell = 0; cell < cells; cell += CHUNK_CELLS) {
        alignas(64) float values[CHUNK * COLUMNS], row[CHUNK];
        dequantize_panel<f32>(panel, inputs, cell, std::min(CHUNK_CELLS, cells - cell), reinterpret_cast<uint32_t*>(values));
        const size_t input = cell * CELL, some = std::min(CHUNK, inputs - input);
        for (size_t output = first; output < first + count; output++) {
            for (size_t i = 0; i < some; i++) row[i] = values[i * COLUMNS + output];
            copy_elements(row, some, out + (output - first) * inputs + input);
        }
    }
}

template <class T> void read_numbers(const Panel& panel, size_t output, size_t inputs, T* out) {
    const uint32_t* dwords = reinterpret_cast<const uint32_t*>(panel.at) + output;
    for (size_t i = 0; i < inputs; i += Dot<T>::PER_DWORD, dwords += PANEL)
        std::memcpy(out + i, dwords, std::min<size_t>(Dot<T>::PER_DWORD, inputs - i) * sizeof(T));
}

}  // namespace

extern "C" {

// out [rows][inputs] = the rows of W at `ids`. 0, and nothing is done, if W has no such row.
int embed(int dtype, const int64_t* ids, const Weight* weight, void* out, size_t rows) {
    if (std::any_of(ids, ids + rows, [&](int64_t id) { return (uint64_t)id >= weight->outputs; })) return 0;
    with_type(dtype, [&]<class T>(T*) {
        for_each(rows, rows <= 4, [&](size_t m) {
            size_t i = ids[m] / PANEL;  // or a later one: panels have at most so many outputs
            while (weight->panel(i).first + weight->panel(i).columns <= ids[m]) i++;
            const Panel& panel = weight->panel(i);
            T* row = (T*)out + m * weight->inputs;
            if (panel.is_quantized()) read_quantized(panel, ids[m] - panel.first, 1, weight->inputs, row);
            else read_numbers(panel, ids[m] - panel.first, weight->inputs, row);
        });
    });
    return 1;
}

// out [outputs][inputs] = W, all of whose panels are quantized.
void unpack(int dtype, const Weight* weight, void* out) {
    with_type(dtype, [&]<class T>(T*) {
        for_each(weight->panels, false, [&](size_t i) {
            const Panel& panel = weight->panel(i);
            read_quantized(panel, 0, panel.columns, weight->inputs, (T*)out + panel.first * weight->inputs);
        });
    });
}
}
RECORDABLE(embed)
