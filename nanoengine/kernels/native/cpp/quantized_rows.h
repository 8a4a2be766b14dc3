// Rows of an input times quantized panels, in whole numbers.
//
// Activations are rounded to 8 bits, or to 16 in two parts (bytes.h); 16 of them, half a cell, share a scale: with 32 they
// would lose twice as much. A half's dot product is a sum of whole numbers, and no rounding: with w = scale * (number - zero)
// + minimum and x = s * q, where q of two parts is LOW * first + second,
//
//   sum w x = scale * s * (sum number * q - zero * sum q) + minimum * s * sum q
//
// Sums over halves are float32, added in the order of the inputs whatever the number of rows, so a token computes the same
// alone and in a batch.
#pragma once
#include "bytes.h"
#include "quantized_format.h"

// A sum of products of numbers of so many bits with bytes of x, of half a cell.
#if defined(HAS_DOT_OF_BYTES)
template <int BITS> struct Products {
    Ints total{};
    INLINE void add(int, Dwords numbers, uint32_t x) { total = dot_bytes(total, numbers, splat(x)); }
};
#else
// A sum that is known before what comes next: else the compiler makes trees of sums, whose parts find no registers.
template <class V> static INLINE void in_order(V& sum) { asm volatile("" : "+v"(sum)); }

template <int BITS> struct Products {
    static constexpr int MOST = BITS <= 5 ? 4 : BITS == 6 ? 2 : 1;  // 4 * 2 * 31 * 127 < 2^15, and 2 * 2 * 63 * 127
    static_assert(CELL_DWORDS / 2 % MOST == 0);                     // a half of a cell is added up
    Ints total{};
    Shorts some{};

    INLINE void add(int d, Dwords numbers, uint32_t x) {
        Dwords factors = splat(x);
        if (BITS == 8) {  // these have a sign, which moves to x
            factors = negate_where_negative(factors, numbers);
            numbers = magnitudes(numbers);
        }
        const Shorts products = multiply_bytes(numbers, factors);
        some = d % MOST == 0 ? products : some + products;
        in_order(some);
        if (d % MOST == MOST - 1) {
            const Ints sums = add_pairs(some);
            total = d < MOST ? sums : total + sums;
            in_order(total);
        }
    }
};
#endif

// Rows whose sums find registers; for more, numbers are unpacked first.
template <int PARTS> constexpr int MOST_ROWS = (LANES == 8 ? 3 : REGISTERS == 32 ? 4 : 2) / PARTS;

// A chunk of a row: bytes; of each half of a cell their scale, what they add up to, and what they stand for in sum; the last of a
// cell.
template <int PARTS> struct alignas(64) RowChunk {
    uint32_t bytes[PARTS][CHUNK / 4];
    float scales[2 * CHUNK_CELLS];
    int32_t totals[2 * CHUNK_CELLS];
    float half_sums[2 * CHUNK_CELLS], sums[CHUNK_CELLS];
};

// Half a cell of x as bytes.
template <int PARTS> static INLINE void round_half(const float* x, RowChunk<PARTS>& chunk, size_t half) {
    int8_t* parts[PARTS];
    for (int part = 0; part < PARTS; part++) parts[part] = reinterpret_cast<int8_t*>(chunk.bytes[part]) + half * HALF;
    const Rounded rounded = round_to_bytes<PARTS>(x, HALF, parts);
    chunk.scales[half] = rounded.scale;
    chunk.totals[half] = rounded.total;
    chunk.half_sums[half] = rounded.scale * rounded.total;
}

// x [CELL] as bytes.
template <int PARTS> static INLINE void round_cell(const float* x, RowChunk<PARTS>& chunk, size_t cell) {
    for (size_t half = 2 * cell; half < 2 * cell + 2; half++) round_half(x + half % 2 * HALF, chunk, half);
    chunk.sums[cell] = chunk.half_sums[2 * cell] + chunk.half_sums[2 * cell + 1];
}

constexpr size_t AHEAD = 8192;  // bytes that are asked for ahead, into the second-level cache: into the first one, few come at a time

// Where the numbers of some cells are: in a panel, or unpacked: line d of a cell has dword d of all COLUMNS outputs.
template <int KIND, bool PACKED> struct Cells {
    const uint8_t* at;
    const uint8_t* codebook = nullptr;
    const uint8_t* next = nullptr;  // of unpacked cells: what is asked for while they are multiplied, so many bytes with each
    size_t share = 0;

    INLINE Dwords load_numbers(size_t cell, int d, int v) const {
        if (PACKED) return numbers<KIND>(at + (cell * STRIPS + strip_of(v)) * bits_of(KIND) * LINE_BYTES, d, at_of(v), codebook);
        return load<Dwords>(at + ((cell * CELL_DWORDS + d) * WIDE + v) * sizeof(Dwords));
    }
    INLINE void ask_for(size_t cell) const {  // some cells ahead of those that are read
        if (!PACKED) {
            for (size_t line = 0; line < share; line += LINE_BYTES) __builtin_prefetch(next + cell * share + line, 0, 2);
            return;
        }
        constexpr size_t BYTES = STRIPS * bits_of(KIND) * LINE_BYTES;
#pragma GCC unroll 16
        for (size_t line = 0; line < BYTES; line += LINE_BYTES) __builtin_prefetch(at + cell * BYTES + AHEAD + line, 0, 2);
    }
};
// A chunk of some rows times `count` cells of a panel: out[m][column] = (add ? out : 0) + their products.
template <int KIND, bool PACKED, int PARTS> struct Task {
    const RowChunk<PARTS>* x;
    Cells<KIND, PACKED> cells;
    size_t count;
    const Scales& scales;
    int zero;
    bool has_minimums;
    float* out;
    bool add;
};

// sums = the products of half a cell and M rows of x.
template <int KIND, bool PACKED, int PARTS, int M>
static INLINE void multiply_half(const Cells<KIND, PACKED>& cells, const RowChunk<PARTS>* x, size_t cell, int half,
                                 Ints (&sums)[PARTS][M][WIDE]) {
    constexpr int DEPTH = CELL_DWORDS / 2;  // dwords
    const size_t at = cell * CELL_DWORDS + half * DEPTH;
    if constexpr (IN_BLOCKS<int8_t> && M > 1) {
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            for (auto& row : sums[part]) std::fill_n(row, WIDE, Ints{});
            Blocks<int8_t, M, WIDE> blocks(sums[part]);
#pragma GCC unroll 8
            for (int d = 0; d < DEPTH; d += 2)
                blocks.add([&](int m) { return x[m].bytes[part] + at + d; },
                           [&](int v, int i) { return cells.load_numbers(cell, half * DEPTH + d + i, v); });
            blocks.store_rows(sums[part]);
        }
        return;
    }
    Products<are_bytes(KIND) ? 8 : bits_of(KIND)> products[PARTS][M][WIDE];
#pragma GCC unroll 8
    for (int d = 0; d < DEPTH; d++) {
        Dwords numbers[WIDE];
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) numbers[v] = cells.load_numbers(cell, half * DEPTH + d, v);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++)
#pragma GCC unroll 2
                for (int part = 0; part < PARTS; part++) products[part][m][v].add(d, numbers[v], x[m].bytes[part][at + d]);
    }
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++)
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) sums[part][m][v] = products[part][m][v].total;
}

template <int KIND, bool PACKED, int PARTS, int M> static NOINLINE void multiply_cells(const Task<KIND, PACKED, PARTS>& task) {
    const RowChunk<PARTS>* x = task.x;
    const Cells<KIND, PACKED> cells = task.cells;
    const size_t count = task.count;
    const Scales& scales = task.scales;
    float* out = task.out;
    constexpr bool HELD = (2 + PARTS) * M * WIDE + 4 <= REGISTERS;       // the sums find registers, too
    Floats held[HELD ? M : 1][WIDE];
    auto row = [&](int m, int v) { return out + m * COLUMNS + v * LANES; };
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) {
            if (HELD) held[m][v] = task.add ? load<Floats>(row(m, v)) : Floats{};
            else if (!task.add) store(row(m, v), Floats{});
        }
    for (size_t cell = 0; cell < count; cell++) {
        cells.ask_for(cell);
        Floats both[M][WIDE];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            Ints sums[PARTS][M][WIDE];
            multiply_half<KIND>(cells, x, cell, half, sums);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++)
#pragma GCC unroll 4
                for (int v = 0; v < WIDE; v++) {
                    Ints numbers = sums[0][m][v];
                    if (PARTS == 2) numbers = numbers * LOW + sums[PARTS - 1][m][v];
                    Floats total = __builtin_convertvector(numbers - task.zero * x[m].totals[2 * cell + half], Floats);
                    if (has_own_scales(KIND)) total *= load<Floats>(scales.scales[2 * cell + half] + v * LANES);
                    const Floats scale = splat(x[m].scales[2 * cell + half]);
                    both[m][v] = half ? multiply_add(total, scale, both[m][v]) : total * scale;
                }
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) {
                const Floats before = HELD ? held[m][v] : load<Floats>(row(m, v));
                const Floats sum = has_own_scales(KIND) ? before + both[m][v]
                                              : multiply_add(both[m][v], load<Floats>(scales.scales[cell] + v * LANES), before);
                if (HELD) held[m][v] = sum;
                else store(row(m, v), sum);
            }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) {
            Floats sum = HELD ? held[m][v] : load<Floats>(row(m, v));
            const float* sums = has_own_scales(KIND) ? x[m].half_sums : x[m].sums;
            for (size_t i = 0; task.has_minimums && i < (has_own_scales(KIND) ? 2 : 1) * count; i++)
                sum = multiply_add(load<Floats>(scales.offsets[i] + v * LANES), splat(sums[i]), sum);
            store(row(m, v), sum);
        }
}

template <int KIND, bool PACKED, int PARTS, int M = MOST_ROWS<PARTS>>
static void multiply_rows(int rows, const Task<KIND, PACKED, PARTS>& task) {
    if (M == 1 || rows == M) multiply_cells<KIND, PACKED, PARTS, M>(task);
    else if constexpr (M > 1) multiply_rows<KIND, PACKED, PARTS, M - 1>(rows, task);
}

// The numbers of some cells of a panel, as Cells<KIND, false> has them.
template <int KIND> static NOINLINE void unpack(Cells<KIND, true> cells, size_t count, uint8_t* to) {
    for (size_t cell = 0; cell < count; cell++) {
        cells.ask_for(cell);
#pragma GCC unroll 8
        for (int d = 0; d < CELL_DWORDS; d++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++)
                store(to + ((cell * CELL_DWORDS + d) * WIDE + v) * sizeof(Dwords), cells.load_numbers(cell, d, v));
    }
}

// Floats [first, first + count) of a row; those behind its end are zeros.
template <class T> static NOINLINE void take_floats(const Row<T>& row, size_t first, size_t count, size_t inputs, float* to) {
    const size_t there = std::min(count, inputs - first);
    if (row.norm) scale_by(row.x + first, row.scale, row.norm + first, there, to);
    else copy_elements(row.x + first, there, to);
    std::fill(to + there, to + count, 0.0f);
}

// Some rows of an input, rounded to 8 bits, or to 16, in two parts: [chunk of the inputs][row].
template <class T, int PARTS> struct RoundedRows {
    size_t inputs, rows, chunks = round_up(inputs, CHUNK) / CHUNK;
    std::unique_ptr<RowChunk<PARTS>[]> data{new RowChunk<PARTS>[chunks * rows]};

    void take(const Row<T>& row, size_t to) {
        for (size_t chunk = 0; chunk < chunks; chunk++) {
            alignas(64) float values[CHUNK];
            const size_t first = chunk * CHUNK, count = std::min(CHUNK, round_up(inputs - first, CELL));
            take_floats(row, first, count, inputs, values);
            for (size_t i = 0; i < count; i += CELL) round_cell(values + i, data[chunk * rows + to], i / CELL);
        }
    }

    // sums[i][0..PANEL) of the rows [first, first + count) and the outputs of a panel.
    void multiply(size_t first, size_t count, const Panel& panel, float (*sums)[PANEL]) {
        const Format format = Format::of(panel.code);
        with_kind(format.kind(), [&]<int KIND>() { multiply_by<KIND>(first, count, format, panel.at, sums); });
    }

private:
    template <int KIND>
    void multiply_by(size_t first, size_t count, const Format& format, const uint8_t* panel, float (*sums)[PANEL]) {
        Scales scales;
        for (size_t chunk = 0; chunk < chunks; chunk++) {
            const size_t cell = chunk * CHUNK_CELLS, cells = std::min(CHUNK_CELLS, round_up(inputs, CELL) / CELL - cell);
            scales.read(format, panel, cell, cells);
            const Cells<KIND, true> packed{panel + format.cells_at(inputs) + cell * STRIPS * format.cell_bytes(), CODEBOOKS[format.codebook]};
            const RowChunk<PARTS>* x = &data[chunk * rows + first];
            auto task = [&]<bool PACKED>(Cells<KIND, PACKED> from, size_t row) {
                return Task<KIND, PACKED, PARTS>{x + row, from, cells, scales, format.zero(), format.has_minimums(), sums[row], chunk > 0};
            };
            if (count <= MOST_ROWS<PARTS>) {
                multiply_rows((int)count, task(packed, 0));
                continue;
            }
            alignas(64) uint8_t numbers[CHUNK * COLUMNS];
            unpack<KIND>(packed, cells, numbers);
            const size_t calls = round_up(count, MOST_ROWS<PARTS>) / MOST_ROWS<PARTS>;
            // Memory is busy meanwhile: each call asks for its share of the next chunk.
            const size_t share = round_up(STRIPS * format.bits, calls) / calls * LINE_BYTES;
            const uint8_t* next = packed.at + cells * STRIPS * format.cell_bytes();
            for (size_t i = 0; i < calls; i++) {
                const size_t row = count * i / calls, end = count * (i + 1) / calls;  // of about as many rows each: few rows are slow ones
                multiply_rows((int)(end - row), task(Cells<KIND, false>{numbers, nullptr, next + i * cells * share, share}, row));
            }
        }
    }
};
