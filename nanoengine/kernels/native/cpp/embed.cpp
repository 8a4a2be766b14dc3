// Rows of a weight in panels, back as numbers: some, for embeddings, or all.
#include "calls.h"
#include "factor_rows.h"
#include "team.h"

namespace {

// The numbers of one output in a cell; the dwords of the others in its lines are left alone.
template <int KIND>
NOINLINE void read_output(const uint8_t* lines, size_t at, const uint8_t* codebook, const float (*scales)[COLUMNS], const float* offset,
                          int zero, float* to) {
#pragma GCC unroll 8
    for (int d = 0; d < CELL_DWORDS; d++) {
        const uint32_t packed = numbers<KIND, uint32_t>(lines, d, at, codebook);
        const float scale = scales[has_own_scales(KIND) ? d / 4 : 0][0];
        for (int b = 0; b < 4; b++) {
            const int byte = packed >> 8 * b & 0xff, number = are_bytes(KIND) && SIGN ? (int8_t)byte : byte;
            const float value = (float)(number - zero) * scale;
            to[4 * d + b] = offset ? value + *offset : value;
        }
    }
}

template <class T> void read_quantized(const Panel& panel, size_t output, size_t inputs, T* out) {
    const Format format = Format::of(panel.code);
    const size_t side = output / GROUP, cells = round_up(inputs, CELL) / CELL;
    const uint8_t* lines = panel.at + format.cells_at(inputs) + side * format.cell_bytes();
    Scales scales;
    std::vector<float> values(CELL);
    for (size_t cell = 0; cell < cells; cell++) {
        const size_t i = cell % CHUNK_CELLS;
        if (i == 0) scales.read(format, panel.at, cell, std::min(CHUNK_CELLS, cells - cell));
        with_kind(format.kind(), [&]<int KIND>() {
            const auto* scale = reinterpret_cast<const float(*)[COLUMNS]>(&scales.scales[i * format.scales_per_cell()][output]);
            const float* offset = format.has_minimums() ? &scales.offsets[i][output] : nullptr;
            read_output<KIND>(lines + cell * STRIPS * format.cell_bytes(), output % GROUP * 4, CODEBOOKS[format.codebook], scale, offset,
                              format.zero(), values.data());
        });
        copy_elements(values.data(), std::min(CELL, inputs - cell * CELL), out + cell * CELL);
    }
}

template <class T> void read_numbers(const Panel& panel, size_t output, size_t inputs, T* out) {
    const uint32_t* dwords = reinterpret_cast<const uint32_t*>(panel.at) + output;
    for (size_t i = 0; i < inputs; i += Dot<T>::PER_DWORD, dwords += PANEL)
        std::memcpy(out + i, dwords, std::min<size_t>(Dot<T>::PER_DWORD, inputs - i) * sizeof(T));
}

template <class T> void embed_rows(const int64_t* ids, const Weight& weight, T* out, size_t rows) {
    const size_t inputs = weight.inputs;
    for_each(rows, rows <= 4, [&](size_t m) {
        size_t i = ids[m] / PANEL;  // or a later one: panels have at most so many outputs
        while (weight.panel(i).first + weight.panel(i).columns <= ids[m]) i++;
        const Panel& panel = weight.panel(i);
        const auto read = panel.is_quantized() ? read_quantized<T> : read_numbers<T>;
        read(panel, ids[m] - panel.first, inputs, out + m * inputs);
    });
}

// All outputs of a quantized panel.
template <class T> void read_panel(const Panel& panel, size_t inputs, T* out) {
    const size_t cells = round_up(inputs, CELL) / CELL;
    for (size_t cell = 0; cell < cells; cell += CHUNK_CELLS) {
        alignas(64) float values[CHUNK * COLUMNS], row[CHUNK];
        dequantize_panel<f32>(panel, inputs, cell, std::min(CHUNK_CELLS, cells - cell), reinterpret_cast<uint32_t*>(values));
        const size_t first = cell * CELL, count = std::min(CHUNK, inputs - first);
        for (int64_t output = 0; output < panel.columns; output++) {
            for (size_t i = 0; i < count; i++) row[i] = values[i * COLUMNS + output];
            copy_elements(row, count, out + output * inputs + first);
        }
    }
}

}  // namespace

extern "C" {

// out [rows][inputs] = the rows of W at `ids`.
void embed(int dtype, const int64_t* ids, const Weight* weight, void* out, size_t rows) {
    with_type(dtype, [&]<class T>(T*) { embed_rows(ids, *weight, (T*)out, rows); });
}

// out [outputs][inputs] = W, all of whose panels are quantized.
void unpack(int dtype, const Weight* weight, void* out) {
    with_type(dtype, [&]<class T>(T*) {
        for_each(weight->panels, false, [&](size_t i) {
            const Panel& panel = weight->panel(i);
            read_panel(panel, weight->inputs, (T*)out + panel.first * weight->inputs);
        });
    });
}
}
RECORDABLE(embed)
