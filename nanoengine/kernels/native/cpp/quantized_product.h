// The product of quantized weights (Q4_0 to Q8_0, Q2_K to Q6_K, IQ, int8) and quantized activations, in whole numbers.
//
// Activations, the rows of an input, are rounded to 8 bits, or to 16 in two parts (bytes.h); 16 of them, half a cell, share a scale: with 32 they
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

// A value that is known before what comes next: else the compiler moves sums, or makes trees of them, whose parts find no registers.
template <class V> static INLINE void in_order([[maybe_unused]] V& value) {
#if defined(__x86_64__)
    asm volatile("" : "+v"(value));
#endif
}

// A sum of products of numbers of so many bits with bytes of x, of half a cell.
#if defined(HAS_DOT_OF_BYTES)
template <int BITS> struct Products {
    Ints total{};
    INLINE void add(int, Dwords numbers, uint32_t x) { total = dot_bytes(total, numbers, splat(x)); }
};
#else
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

// The same for words of 16 bits.
template <> struct Products<16> {
    Ints total{};
    INLINE void add(int d, Dwords numbers, uint32_t x) {
        const Ints product = multiply_words((Shorts)numbers, (Shorts)splat(x));
        total = d ? total + product : product;
        in_order(total);
    }
};
#endif

// Whether unpacked numbers and rows are words of 16 bits: where a sum of 16 bits has room for one product of bytes, two
// products of words take fewer operations, and a word has both parts of x.
#if defined(HAS_DOT_OF_BYTES)
template <int KIND, bool PACKED, int PARTS> constexpr bool IN_WORDS = false;
#else
template <int KIND, bool PACKED, int PARTS> constexpr bool IN_WORDS = !PACKED && (are_bytes(KIND) || PARTS == 2);
#endif

// Rows whose sums find registers; for more, numbers are unpacked first.
template <int PARTS> constexpr int MOST_ROWS = (LANES == 8 ? 3 : REGISTERS == 32 ? 4 : 2) / PARTS;

// A chunk of a row: bytes; of each half of a cell their scale, what they add up to, and what they stand for in sum; the last of a
// cell.
template <int PARTS> struct alignas(64) RowChunk {
    uint32_t bytes[PARTS][CHUNK / 4];
#if !defined(HAS_DOT_OF_BYTES)
    uint32_t words[2][CHUNK / 4];  // words_of the bytes, of all parts
#endif
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
    bool has_zero, has_minimums;
    float* out;
    bool add;
};

// sums = the products of half a cell and M rows of x; words have all parts of x in the first.
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
    if constexpr (IN_WORDS<KIND, PACKED, PARTS>) {
        Products<16> products[M][WIDE];
#pragma GCC unroll 8
        for (int w = 0; w < 2 * DEPTH; w++) {
            Dwords numbers[WIDE];
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) numbers[v] = cells.load_numbers(2 * cell + half, w, v);
            EACH_SUM products[m][v].add(w, numbers[v], x[m].words[w % 2][at + w / 2]);
        }
        EACH_SUM sums[0][m][v] = products[m][v].total;
        return;
    }
    Products<are_bytes(KIND) ? 8 : bits_of(KIND)> products[PARTS][M][WIDE];
#pragma GCC unroll 8
    for (int d = 0; d < DEPTH; d++) {
        Dwords numbers[WIDE];
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) numbers[v] = cells.load_numbers(cell, half * DEPTH + d, v);
        EACH_SUM
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++) products[part][m][v].add(d, numbers[v], x[m].bytes[part][at + d]);
    }
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) EACH_SUM sums[part][m][v] = products[part][m][v].total;
}

template <int KIND, bool PACKED, int PARTS, int M, bool HAS_ZERO>
static NOINLINE void multiply_cells(const Task<KIND, PACKED, PARTS>& task) {
    const RowChunk<PARTS>* x = task.x;
    const Cells<KIND, PACKED> cells = task.cells;
    const size_t count = task.count;
    const Scales& scales = task.scales;
    float* out = task.out;
    constexpr bool HELD = (2 + PARTS) * M * WIDE + 4 <= REGISTERS;  // the sums find registers, too
    constexpr int ZERO_BIT = (are_bytes(KIND) ? 8 : bits_of(KIND)) - 1;
    Floats held[M][WIDE];
    auto row = [&](int m, int v) { return out + m * COLUMNS + v * LANES; };
    EACH_SUM {
        if (HELD) held[m][v] = task.add ? load<Floats>(row(m, v)) : Floats{};
        else if (!task.add) store(row(m, v), Floats{});
    }
    for (size_t cell = 0; cell < count; cell++) {
        cells.ask_for(cell);
        Floats both[M][WIDE];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            Ints sums[PARTS][M][WIDE];
            multiply_half(cells, x, cell, half, sums);
            EACH_SUM {
                Ints numbers = sums[0][m][v];
                if (PARTS == 2 && !IN_WORDS<KIND, PACKED, PARTS>) numbers = numbers * LOW + sums[PARTS - 1][m][v];
                if (HAS_ZERO) numbers -= (Ints)splat((uint32_t)x[m].totals[2 * cell + half]) << ZERO_BIT;
                Floats total = __builtin_convertvector(numbers, Floats);
                if (has_cell_scales(KIND)) total *= load<Floats>(scales.scales[2 * cell + half] + v * LANES);
                const Floats scale = splat(x[m].scales[2 * cell + half]);
                both[m][v] = half ? multiply_add(total, scale, both[m][v]) : total * scale;
                if (!half && M > 1 && !has_cell_scales(KIND)) in_order(both[m][v]);
            }
        }
        EACH_SUM {
            const Floats before = HELD ? held[m][v] : load<Floats>(row(m, v));
            const Floats sum = has_cell_scales(KIND) ? before + both[m][v]
                                                    : multiply_add(both[m][v], load<Floats>(scales.scales[cell] + v * LANES), before);
            if (HELD) held[m][v] = sum;
            else store(row(m, v), sum);
        }
        if (!HELD) asm("" : "+r"(out));  // read again from there: else the compiler keeps a copy on the stack
    }
    if (!HELD) EACH_SUM held[m][v] = load<Floats>(row(m, v));
    for (size_t i = 0; task.has_minimums && i < (has_cell_scales(KIND) ? 2 : 1) * count; i++)
        EACH_SUM {
            const float* sums = has_cell_scales(KIND) ? x[m].half_sums : x[m].sums;
            held[m][v] = multiply_add(load<Floats>(scales.offsets[i] + v * LANES), splat(sums[i]), held[m][v]);
        }
    EACH_SUM store(row(m, v), held[m][v]);
}

template <int KIND, bool PACKED, int PARTS, int M = MOST_ROWS<IN_WORDS<KIND, PACKED, PARTS> ? 1 : PARTS>>
static void multiply_rows(int rows, const Task<KIND, PACKED, PARTS>& task) {
    if (M > 1 && rows < M) return multiply_rows<KIND, PACKED, PARTS, std::max(1, M - 1)>(rows, task);
    if (task.has_zero) multiply_cells<KIND, PACKED, PARTS, M, !(are_bytes(KIND) && SIGN)>(task);  // bytes with a sign have none
    else multiply_cells<KIND, PACKED, PARTS, M, false>(task);
}

// The numbers of some cells of a panel, as Cells<KIND, false> has them.
template <int KIND, int PARTS> static NOINLINE void unpack(Cells<KIND, true> cells, size_t count, uint8_t* to) {
    for (size_t cell = 0; cell < count; cell++) {
        cells.ask_for(cell);
#pragma GCC unroll 8
        for (int d = 0; d < CELL_DWORDS; d++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) {
                const auto put = [&](size_t line, auto numbers) { store(to + (line * WIDE + v) * sizeof(Dwords), numbers); };
                const size_t line = cell * CELL_DWORDS + d;
                const Dwords numbers = cells.load_numbers(cell, d, v);
                if constexpr (IN_WORDS<KIND, false, PARTS>) put(2 * line, words_of(numbers, 0)), put(2 * line + 1, words_of(numbers, 1));
                else put(line, numbers);
            }
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
            RowChunk<PARTS>& rounded = data[chunk * rows + to];
            for (size_t i = 0; i < count; i += CELL) round_cell(values + i, rounded, i / CELL);
#if !defined(HAS_DOT_OF_BYTES)
            for (size_t d = 0; d < count / 4; d += LANES)
                for (int odd = 0; odd < 2; odd++) {
                    Shorts words = words_of(load<Dwords>(rounded.bytes[0] + d), odd);
                    if (PARTS == 2) words = words * LOW + words_of(load<Dwords>(rounded.bytes[PARTS - 1] + d), odd);
                    store(rounded.words[odd] + d, words);
                }
#endif
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
                return Task<KIND, PACKED, PARTS>{x + row, from, cells, scales, format.zero() != 0, format.has_minimums(), sums[row], chunk > 0};
            };
            if (count <= MOST_ROWS<PARTS>) {
                multiply_rows((int)count, task(packed, 0));
                continue;
            }
            constexpr bool WORDS = IN_WORDS<KIND, false, PARTS>;
            constexpr size_t MOST = MOST_ROWS<WORDS ? 1 : PARTS>;
            alignas(64) uint8_t numbers[CHUNK * COLUMNS * (WORDS ? 2 : 1)];
            unpack<KIND, PARTS>(packed, cells, numbers);
            const size_t calls = round_up(count, MOST) / MOST;
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
