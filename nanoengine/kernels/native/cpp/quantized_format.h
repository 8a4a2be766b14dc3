// How quantized weights lie in memory, and how they are read back.
//
// W [outputs][inputs] is cut into panels of COLUMNS outputs, these into strips of 16, and inputs into cells of 32. A panel
// begins with the headers of its spans of inputs, one for each strip, which hold scales; then come its cells, one for each
// strip, too: it is read in a single stream. A cell is a few lines of 64 bytes. A line is a dword for each of the 16 outputs,
// a dword the numbers of four neighbouring inputs, as integer dot products take them:
//
//   4 bits: line j of four has dword j in the lower halves of its bytes, and dword 4 + j in the upper ones
//   2 bits: two lines, of dwords 0 to 3 and 4 to 7, two bits of each byte for every dword
//   1 bit: a line, in which bit d of byte b is that of number b of dword d
//   3, 5 and 6 bits: two of these, first the one that has the lower bits
//   8 bits: line d has dword d
//
// Numbers of 3 or 4 bits may be indices of a codebook of 16 (IQ2 to IQ4, MXFP4, NVFP4): those are bytes, as numbers
// of 8 bits are.
#pragma once
#include "panels.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

constexpr size_t CELL = 32, HALF = CELL / 2, CHUNK_CELLS = 8, CHUNK = CELL * CHUNK_CELLS;  // inputs, cells, inputs
constexpr size_t LINE_BYTES = 64, STRIPS = COLUMNS / GROUP;
constexpr int CELL_DWORDS = CELL / 4;

// Numbers of 8 bits are stored as the dot product takes them: without a sign, or with one.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr uint8_t SIGN = 0;
#else
constexpr uint8_t SIGN = 0x80;
#endif

enum ScaleType { OF_FLOAT16 = 0, OF_BFLOAT16 = 1, OF_FLOAT32 = 2 };  // as the callers number them
// What a span's scales come with: nothing; a minimum that is added; a zero point; for each cell a factor of the scale and one
// of the minimum, which is subtracted; a factor with a sign for each half of a cell, or for each cell; a factor that is a float
// of 4 bits of exponent and 3 of mantissa, without a sign, for each half of a cell; for each half of a cell a byte, with 4 bits of
// a factor of the scale and 4 of one of the minimum, which is subtracted.
enum Extra {
    PLAIN = 0, MINIMUM = 1, ZERO_POINT = 2, CELL_FACTORS = 3, HALF_CELL_FACTORS = 4, SIGNED_CELL_FACTORS = 5, HALF_CELL_FLOATS = 6,
    HALF_CELL_PAIRS = 7
};
enum Codebook { NO_CODEBOOK = 0, IQ4 = 1, E2M1 = 2, IQ3_S_SIZES = 3, IQ3_XXS_SIZES = 4, IQ2_SIZES = 5 };  // as the callers number them

// What the numbers of a panel are, where loops are compiled for each: bits, and whether they are indices of a codebook, or
// their halves of cells have separate scales.
enum Kind { BITS_OF = 15, OWN_SCALES = 16, IN_CODEBOOK = 32 };
constexpr int bits_of(int kind) { return kind & BITS_OF; }
constexpr bool has_cell_scales(int kind) { return kind & OWN_SCALES; }
constexpr bool are_bytes(int kind) { return kind == 8 || kind & IN_CODEBOOK; }

// Bytes in steps of which scales are: of ggml's IQ4 formats; twice those of floats with 2 bits of exponent and 1 of mantissa; and of
// the formats in grids, whose indices are those of sizes, and behind them of the same with a sign.
#define BYTE(x) ((uint8_t)(((x) + 128) ^ SIGN))
#define FOUR(a, b, c, d) BYTE(a), BYTE(b), BYTE(c), BYTE(d)
alignas(16) constexpr uint8_t CODEBOOKS[][16] = {
    {},
    {FOUR(-127, -104, -83, -65), FOUR(-49, -35, -22, -10), FOUR(1, 13, 25, 38), FOUR(53, 69, 89, 113)},
    {FOUR(0, 1, 2, 3), FOUR(4, 6, 8, 12), FOUR(0, -1, -2, -3), FOUR(-4, -6, -8, -12)},
    {FOUR(1, 3, 5, 7), FOUR(9, 11, 13, 15), FOUR(-1, -3, -5, -7), FOUR(-9, -11, -13, -15)},
    {FOUR(4, 12, 20, 28), FOUR(36, 44, 52, 62), FOUR(-4, -12, -20, -28), FOUR(-36, -44, -52, -62)},
    {FOUR(8, 25, 43, 0), FOUR(-8, -25, -43, 0)},
};
#undef FOUR
#undef BYTE

struct Format {
    int bits;
    ScaleType scale;
    Extra extra;
    size_t span;  // inputs that share scales
    Codebook codebook = NO_CODEBOOK;

    // As callers pass it.
    static Format of(int64_t code) {
        return {(int)(code & 0xff), (ScaleType)(code >> 8 & 0xff), (Extra)(code >> 16 & 0xff), (size_t)(code >> 32),
                (Codebook)(code >> 24 & 0xff)};
    }
    size_t scale_bytes() const { return GROUP * (scale == OF_FLOAT32 ? 4 : 2); }
    size_t cell_bytes() const { return bits * LINE_BYTES; }
    size_t header_bytes() const {  // of a span and a strip
        const size_t cells = span / CELL;
        switch (extra) {
            case MINIMUM: return 2 * scale_bytes();
            case ZERO_POINT: return scale_bytes() + GROUP;
            case CELL_FACTORS:
            case HALF_CELL_PAIRS: return 2 * scale_bytes() + 2 * cells * GROUP;
            case HALF_CELL_FACTORS:
            case HALF_CELL_FLOATS: return scale_bytes() + 2 * cells * GROUP;
            case SIGNED_CELL_FACTORS: return scale_bytes() + cells * GROUP;
            default: return scale_bytes();
        }
    }
    // Where in a panel the cells begin, and where the panel ends.
    size_t cells_at(size_t inputs) const { return round_up(round_up(inputs, span) / span * STRIPS * header_bytes(), LINE_BYTES); }
    size_t panel_bytes(size_t inputs) const {
        if (bits >= 16) return round_up(inputs, 32 / bits) / (32 / bits) * COLUMNS * 4;  // numbers as they are
        return cells_at(inputs) + round_up(inputs, CELL) / CELL * STRIPS * cell_bytes();
    }
    bool has_minimums() const {
        return extra == MINIMUM || extra == ZERO_POINT || extra == CELL_FACTORS || extra == HALF_CELL_PAIRS;
    }
    // What is subtracted from all numbers.
    int zero() const {
        const int size = codebook ? 8 : bits;
        return has_minimums() || (size == 8 && SIGN) ? 0 : 1 << (size - 1);
    }
    int kind() const {
        const bool cell_scales = extra == HALF_CELL_FACTORS || extra == HALF_CELL_FLOATS || extra == HALF_CELL_PAIRS;
        return bits | (cell_scales ? OWN_SCALES : 0) | (codebook ? IN_CODEBOOK : 0);
    }
};

// LANES numbers of 16 bits as floats.
static INLINE Floats load_halves(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#else
    const Dwords bits = __builtin_convertvector(load<Halves>(from), Dwords);
    const Dwords magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
    const Dwords endless = (Dwords)(magnitude >= 0x0f800000) & 0x7f800000;
    return as_float(as_bits(as_float(magnitude) * 0x1p112f) | endless | sign);  // exponents as float32 has them
#endif
}

static INLINE Floats load_scales(ScaleType type, const uint8_t* from, size_t first) {
    if (type == OF_FLOAT32) return load<Floats>(from + 4 * first);
    if (type == OF_FLOAT16) return load_halves(from + 2 * first);
    return load_floats(reinterpret_cast<const bf16*>(from) + first);
}

typedef uint8_t Bytes __attribute__((vector_size(LANES)));

// LANES bytes as whole numbers: with intrinsics, where compilers take the lanes one by one.
static INLINE Ints load_bytes_as_ints(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(load<__m128i>(from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    return __builtin_convertvector(load<Bytes>(from), Ints);
#endif
}

static INLINE Floats load_bytes(const uint8_t* from) { return __builtin_convertvector(load_bytes_as_ints(from), Floats); }

// The same with a sign.
static INLINE Floats load_signed_bytes(const uint8_t* from) {
    const Floats value = load_bytes(from);
    return value < 128.0f ? value : value - 256.0f;
}

// The same, floats of 4 bits of exponent and 3 of mantissa, without a sign.
static INLINE Floats load_e4m3(const uint8_t* from) {
    const Floats value = load_bytes(from);
    const Dwords bits = (Dwords)__builtin_convertvector(value, Ints);
    return value < 8.0f ? value * 0x1p-9f : as_float((bits << 20) + (120u << 23));
}

// The scales of a chunk as floats, [cell, or half of one][output], and what is added to the scaled numbers, the same.
struct Scales {
    alignas(64) float scales[2 * CHUNK_CELLS][COLUMNS], offsets[2 * CHUNK_CELLS][COLUMNS];

    // Of the cells [first, first + count) of a panel.
    void read(const Format& format, const uint8_t* panel, size_t first, size_t count) {
        switch (format.extra) {
            case PLAIN: return read_as<PLAIN>(format, panel, first, count);
            case MINIMUM: return read_as<MINIMUM>(format, panel, first, count);
            case ZERO_POINT: return read_as<ZERO_POINT>(format, panel, first, count);
            case CELL_FACTORS: return read_as<CELL_FACTORS>(format, panel, first, count);
            case HALF_CELL_FACTORS: return read_as<HALF_CELL_FACTORS>(format, panel, first, count);
            case SIGNED_CELL_FACTORS: return read_as<SIGNED_CELL_FACTORS>(format, panel, first, count);
            case HALF_CELL_FLOATS: return read_as<HALF_CELL_FLOATS>(format, panel, first, count);
            case HALF_CELL_PAIRS: return read_as<HALF_CELL_PAIRS>(format, panel, first, count);
        }
    }

private:
    template <Extra EXTRA>
    NOINLINE void read_as(const Format& format, const uint8_t* panel, size_t first, size_t count) {
        const size_t cells = format.span / CELL, header = format.header_bytes(), width = format.scale_bytes();
        const float byte_zero = format.bits == 8 ? SIGN : 0;
        constexpr bool FLOAT_FACTORS = EXTRA == HALF_CELL_FLOATS;
        constexpr size_t PER_CELL = EXTRA == HALF_CELL_FACTORS || EXTRA == HALF_CELL_PAIRS || FLOAT_FACTORS ? 2 : 1;
        for (size_t strip = 0; strip < STRIPS; strip++) {
            const uint8_t* at = panel + (first / cells * STRIPS + strip) * header;
            for (size_t i = 0, within = first % cells; i < count; i++) {
                if (within == cells) within = 0, at += STRIPS * header;
                const uint8_t *second = at + width, *factors = at + 2 * width;
#pragma GCC unroll 4
                for (size_t o = 0; o < GROUP; o += LANES) {
                    const Floats scale = load_scales(format.scale, at, o);
                    float *to = scales[i * PER_CELL] + strip * GROUP + o, *minimum = offsets[i * PER_CELL] + strip * GROUP + o;
                    if (EXTRA == HALF_CELL_FACTORS || EXTRA == SIGNED_CELL_FACTORS || FLOAT_FACTORS) {
                        for (size_t part = 0; part < PER_CELL; part++) {
                            const uint8_t* factor = second + (within * PER_CELL + part) * GROUP + o;
                            store(to + part * COLUMNS, scale * (FLOAT_FACTORS ? load_e4m3(factor) : load_signed_bytes(factor)));
                        }
                        continue;
                    }
                    if (EXTRA == HALF_CELL_PAIRS) {
                        const Floats step = load_scales(format.scale, second, o);
                        for (size_t part = 0; part < PER_CELL; part++) {
                            const Ints pair = load_bytes_as_ints(factors + (within * PER_CELL + part) * GROUP + o);
                            store(to + part * COLUMNS, scale * __builtin_convertvector(pair & 15, Floats));
                            store(minimum + part * COLUMNS, step * -__builtin_convertvector(pair >> 4, Floats));
                        }
                        continue;
                    }
                    store(to, EXTRA == CELL_FACTORS ? scale * load_bytes(factors + within * GROUP + o) : scale);
                    if (EXTRA == MINIMUM) store(minimum, load_scales(format.scale, second, o));
                    if (EXTRA == ZERO_POINT) store(minimum, (byte_zero - load_bytes(second + o)) * scale);
                    if (EXTRA == CELL_FACTORS)
                        store(minimum, load_scales(format.scale, second, o) * -load_bytes(factors + (cells + within) * GROUP + o));
                }
                within++;
            }
        }
    }
};

// What a codebook has at the indices that the bytes of some dwords say.
static INLINE Dwords look_up(const uint8_t* codebook, Dwords indices) {
#if defined(__AVX512BW__)
    return (Dwords)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(codebook)), (__m512i)indices);
#elif defined(__AVX2__)
    return (Dwords)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(codebook)), (__m256i)indices);
#elif defined(__aarch64__)
    return (Dwords)vqtbl1q_u8(load<uint8x16_t>(codebook), (uint8x16_t)indices);
#else
    Dwords result{};
    for (int lane = 0; lane < LANES; lane++)
        for (int b = 0; b < 32; b += 8) result[lane] |= (uint32_t)codebook[indices[lane] >> b & 15] << b;
    return result;
#endif
}

// Bits of bytes, moved down, or up if `by` is negative, and all but those that `mask` has in each byte left out.
static INLINE Dwords moved(Dwords bits, int by, uint32_t mask) { return (by < 0 ? bits << -by : bits >> by) & mask * 0x01010101u; }

// Dword d of some outputs, whose dwords are at byte `at` of each line; 0 <= d < 8 is a constant. As many lines are before the upper
// bits as lower bits there are.
template <int KIND> static INLINE Dwords numbers(const uint8_t* cell, int d, size_t at, const uint8_t* codebook) {
    constexpr int BITS = bits_of(KIND), PAIR = BITS & 4, SINGLE = BITS & 6;
    const auto line = [&](int i) { return load<Dwords>(cell + i * LINE_BYTES + at); };
    if (BITS == 8) return line(d);
    Dwords result{};
    if (BITS & 4) result = moved(line(d % 4), d / 4 * 4, 15);
    if (BITS & 2) result |= moved(line(PAIR + d / 4), d % 4 * 2 - PAIR, 3 << PAIR);
    if (BITS & 1) result |= moved(line(SINGLE), d - SINGLE, 1 << SINGLE);
    if (KIND & IN_CODEBOOK) return look_up(codebook, result);
    return result;
}

// Where vector v of a panel's dwords is: bytes before it in each line, and the strip.
static INLINE constexpr size_t at_of(int v) { return v * sizeof(Dwords) % LINE_BYTES; }
static INLINE constexpr size_t strip_of(int v) { return v * sizeof(Dwords) / LINE_BYTES; }

// Numbers of a cell of 32, as bytes, become those of an output of a strip: four neighbours at a time, in a dword.
template <int BITS> static INLINE void put_numbers(uint8_t* cell, size_t output, const uint8_t* numbers) {
    uint32_t dwords[CELL_DWORDS];
    std::memcpy(dwords, numbers, sizeof(dwords));
    const auto put = [&](int line, uint32_t dword) { std::memcpy(cell + line * LINE_BYTES + output * 4, &dword, 4); };
    const auto bits = [&](int d, int first, uint32_t mask) { return dwords[d] >> first & mask * 0x01010101u; };
    if (BITS == 8)
        for (int d = 0; d < CELL_DWORDS; d++) put(d, dwords[d] ^ SIGN * 0x01010101u);
    constexpr int PAIR = BITS & 4, SINGLE = BITS & 6;
    for (int j = 0; j < PAIR; j++) put(j, bits(j, 0, 15) | bits(4 + j, 0, 15) << 4);
    for (int half = 0; half < 2 && BITS & 2; half++) {
        uint32_t pairs = 0;
        for (int d = 0; d < 4; d++) pairs |= bits(4 * half + d, PAIR, 3) << 2 * d;
        put(PAIR + half, pairs);
    }
    if (BITS & 1) {
        uint32_t singles = 0;
        for (int d = 0; d < CELL_DWORDS; d++) singles |= bits(d, SINGLE, 1) << d;
        put(SINGLE, singles);
    }
}

// f.template operator()<KIND>() for the kind of a format.
template <class F> static INLINE void with_kind(int kind, F f) {
    switch (kind) {
        case 2 | OWN_SCALES: return f.template operator()<2 | OWN_SCALES>();
        case 3 | OWN_SCALES: return f.template operator()<3 | OWN_SCALES>();
        case 3 | OWN_SCALES | IN_CODEBOOK: return f.template operator()<3 | OWN_SCALES | IN_CODEBOOK>();
        case 4: return f.template operator()<4>();
        case 4 | IN_CODEBOOK: return f.template operator()<4 | IN_CODEBOOK>();
        case 4 | OWN_SCALES | IN_CODEBOOK: return f.template operator()<4 | OWN_SCALES | IN_CODEBOOK>();
        case 5: return f.template operator()<5>();
        case 6 | OWN_SCALES: return f.template operator()<6 | OWN_SCALES>();
        case 8: return f.template operator()<8>();
    }
}
