// Putting weights into panels (quantized_format.h): numbers as they are; the blocks of ggml; and numbers of a byte each with the
// scales beside them.
#include "ggml_grids.h"
#include "team.h"

namespace {

constexpr size_t LINE = 16;  // dwords of a cache line

// Where dword d of an output is.
size_t offset(size_t output, size_t d, size_t depth) { return output / PANEL * PANEL * depth + d * PANEL + output % PANEL; }

// Dword d of a row, or what there is of it.
template <class T> uint32_t dword_of(const T* row, size_t d, size_t inputs) {
    const size_t first = d * Dot<T>::PER_DWORD;
    uint32_t dword = 0;
    std::memcpy(&dword, row + first, std::min<size_t>(Dot<T>::PER_DWORD, inputs - first) * sizeof(T));
    return dword;
}

// Put rows into their places as outputs [first, first + rows) of panels.
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
                uint32_t* turned = packed + offset(from, d, depth);
                for (size_t k = 0; k < LINE; k++)
                    for (size_t i = 0; i < GROUP; i++) turned[k * PANEL + i] = square[i][k];
            }
        for (; d < depth; d++)
            for (size_t output = from; output < to; output++)
                packed[offset(output, d, depth)] = dword_of(weight + (output - first) * inputs, d, inputs);
    });
}

template <class F> void pack_blocks(const Format& format, const uint8_t* blocks, uint8_t* panels, size_t rows, size_t inputs) {
    const size_t row_blocks = inputs / format.span, cells_of_block = format.span / CELL;
    const size_t header = format.header_bytes(), cell = format.cell_bytes();
    for_each(round_up(rows, GROUP) / GROUP, false, [&](size_t strip) {
        uint8_t *headers = panels + strip / STRIPS * format.panel_bytes(inputs), *cells = headers + format.cells_at(inputs);
        const size_t side = strip % STRIPS, count = std::min<size_t>(GROUP, rows - strip * GROUP);
        for (size_t i = 0; i < row_blocks; i++)
            for (size_t o = 0; o < count; o++) {
                const uint8_t* block = blocks + ((strip * GROUP + o) * row_blocks + i) * F::BYTES;
                F::header(block, headers + (i * STRIPS + side) * header, o);
                for (size_t run = 0; run < cells_of_block; run++) {
                    uint8_t numbers[CELL];
                    F::read(block, (int)run, numbers);
                    put_numbers<F::BITS>(cells + ((i * cells_of_block + run) * STRIPS + side) * cell, o, numbers);
                }
            }
    });
}

}  // namespace

extern "C" {

// Outputs of a panel.
size_t panel_width() { return PANEL; }

// Bytes that outputs take in a format; those of the padding must be zero.
size_t panels_size(int64_t code, size_t outputs, size_t inputs) {
    return round_up(outputs, PANEL) / PANEL * Format::of(code).panel_bytes(inputs);
}

// Put the row-major rows of numbers at `weight` into their places as outputs [first, first + rows).
void pack_numbers(int dtype, const void* weight, void* panels, size_t first, size_t rows, size_t inputs) {
    with_type(dtype, [&]<class T>(T*) { pack((const T*)weight, (uint32_t*)panels, first, rows, inputs); });
}

// Put `rows` rows of blocks into panels: `number` is that of their format among those of ggml, `code` says how it lies in panels.
void pack_blocks(int number, int64_t code, const uint8_t* blocks, uint8_t* panels, size_t rows, size_t inputs) {
    const Format format = Format::of(code);
    switch (number) {
        case 0: return pack_blocks<Small<4, false>>(format, blocks, panels, rows, inputs);
        case 1: return pack_blocks<Small<4, true>>(format, blocks, panels, rows, inputs);
        case 2: return pack_blocks<Small<5, false>>(format, blocks, panels, rows, inputs);
        case 3: return pack_blocks<Small<5, true>>(format, blocks, panels, rows, inputs);
        case 4: return pack_blocks<Q8_0>(format, blocks, panels, rows, inputs);
        case 5: return pack_blocks<KBlock<false>>(format, blocks, panels, rows, inputs);
        case 6: return pack_blocks<KBlock<true>>(format, blocks, panels, rows, inputs);
        case 7: return pack_blocks<Q6_K>(format, blocks, panels, rows, inputs);
        case 8: return pack_blocks<Q3_K>(format, blocks, panels, rows, inputs);
        case 9: return pack_blocks<Small<4, false>>(format, blocks, panels, rows, inputs);  // IQ4_NL: places in a codebook
        case 10: return pack_blocks<IQ4_XS>(format, blocks, panels, rows, inputs);
        case 11: return pack_blocks<MXFP4>(format, blocks, panels, rows, inputs);
        case 12: return pack_blocks<Q2_K>(format, blocks, panels, rows, inputs);
        case 13: return pack_blocks<IQ3_S>(format, blocks, panels, rows, inputs);
        case 14: return pack_blocks<IQ3_XXS>(format, blocks, panels, rows, inputs);
        case 15: return pack_blocks<IQ2_S>(format, blocks, panels, rows, inputs);
        case 16: return pack_blocks<IQ2_XS>(format, blocks, panels, rows, inputs);
        case 17: return pack_blocks<IQ2_XXS>(format, blocks, panels, rows, inputs);
    }
}

// Put numbers [rows][inputs] of 4 or 8 bits into panels, with a scale for each span [rows][inputs / span] and the bytes that come
// with it, if any: a zero point, or factors.
void pack_groups(int64_t code, const uint8_t* numbers, const uint8_t* scales, const uint8_t* extras, uint8_t* panels, size_t rows,
                           size_t inputs) {
    const Format format = Format::of(code);
    const size_t spans = round_up(inputs, format.span) / format.span, width = format.scale_bytes() / GROUP;
    const size_t each = format.header_bytes() / GROUP - width;
    for_each(rows, false, [&](size_t row) {
        uint8_t *headers = panels + row / COLUMNS * format.panel_bytes(inputs), *cells = headers + format.cells_at(inputs);
        const size_t side = row % COLUMNS / GROUP, output = row % GROUP;
        for (size_t i = 0; i < spans; i++) {
            uint8_t* header = headers + (i * STRIPS + side) * format.header_bytes();
            std::memcpy(header + output * width, scales + (row * spans + i) * width, width);
            for (size_t k = 0; k < each; k++) header[format.scale_bytes() + k * GROUP + output] = extras[(row * spans + i) * each + k];
        }
        for (size_t first = 0; first < inputs; first += CELL) {
            uint8_t cell[CELL] = {};
            std::copy_n(numbers + row * inputs + first, std::min(CELL, inputs - first), cell);
            uint8_t* to = cells + (first / CELL * STRIPS + side) * format.cell_bytes();
            if (format.bits == 4) put_numbers<4>(to, output, cell);
            else put_numbers<8>(to, output, cell);
        }
    });
}
}
