// The blocks of ggml, whose layouts are in its ggml-common.h, as panels take them: numbers and headers (quantized_format.h).
#pragma once
#include "quantized_format.h"

// What a block of each format has: bytes of the numbers of 32 inputs (its cell `run`), and a header, which goes to where output 0 of
// the strip has its scale.
static INLINE void put16(uint8_t* header, size_t index, size_t output, const uint8_t* half) {
    std::memcpy(header + index * 2 * GROUP + 2 * output, half, 2);
}

static INLINE void halves_of_bytes(const uint8_t* from, uint8_t* numbers) {
    for (int i = 0; i < 16; i++) numbers[i] = from[i] & 15, numbers[16 + i] = from[i] >> 4;
}

// Run `run` of numbers of two bits, four runs of which are in 32 bytes.
static INLINE void pairs_of_bytes(const uint8_t* from, int run, uint8_t* numbers) {
    for (int i = 0; i < 32; i++) numbers[i] = from[run / 4 * 32 + i] >> run % 4 * 2 & 3;
}

// Q4_0, Q4_1, Q5_0 and Q5_1: a scale, perhaps a minimum, perhaps fifth bits, and the other four of each number.
template <int NUMBER_BITS, bool HAS_MINIMUM> struct Small {
    static constexpr int BITS = NUMBER_BITS, HALVES = 2 + 2 * HAS_MINIMUM + 4 * (BITS == 5), BYTES = HALVES + 16;
    static INLINE void read(const uint8_t* block, int, uint8_t* numbers) {
        halves_of_bytes(block + HALVES, numbers);
        for (int i = 0; BITS == 5 && i < 4; i++) {  // eight at a time: bit k stays in byte k, and what is not zero there becomes 16
            const uint64_t fifths = block[HALVES - 4 + i] * 0x0101010101010101u & 0x8040201008040201u;
            uint64_t eight;
            std::memcpy(&eight, numbers + 8 * i, 8);
            eight |= (fifths + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
            std::memcpy(numbers + 8 * i, &eight, 8);
        }
    }
    static INLINE void header(const uint8_t* block, uint8_t* to, size_t output) {
        put16(to, 0, output, block);
        if (HAS_MINIMUM) put16(to, 1, output, block + 2);
    }
};

struct Q8_0 {
    static constexpr int BITS = 8, BYTES = 34;
    static INLINE void read(const uint8_t* block, int, uint8_t* numbers) {
        for (int i = 0; i < 32; i++) numbers[i] = block[2 + i] ^ 0x80;
    }
    static INLINE void header(const uint8_t* block, uint8_t* to, size_t output) { put16(to, 0, output, block); }
};

// Q4_K and Q5_K: eight runs of 32 numbers, two of them in 32 bytes. Each has a scale and a minimum of six bits, in twelve bytes: four hold the
// first four scales, four the first four minimums, and four the lower halves of the other four scales and minimums, whose upper two
// bits top the first eight bytes.
template <bool FIFTH> struct KBlock {
    static constexpr int BITS = FIFTH ? 5 : 4, BYTES = FIFTH ? 176 : 144;
    static INLINE void read(const uint8_t* block, int run, uint8_t* numbers) {
        const uint8_t* halves = block + (FIFTH ? 48 : 16) + run / 2 * 32;
        for (int i = 0; i < 32; i++) numbers[i] = halves[i] >> run % 2 * 4 & 15;
        if (FIFTH)
            for (int i = 0; i < 32; i++) numbers[i] |= (block[16 + i] >> run & 1) << 4;
    }
    static INLINE void header(const uint8_t* block, uint8_t* to, size_t output) {
        put16(to, 0, output, block);
        put16(to, 1, output, block + 2);
        uint8_t* factors = to + 4 * GROUP + output;
        for (int run = 0; run < 8; run++) {
            const uint8_t *first = block + 4 + run % 4, *second = first + 4, *rest = first + 8;
            factors[run * GROUP] = run < 4 ? *first & 63 : (*rest & 15) | (*first >> 2 & 48);
            factors[(8 + run) * GROUP] = run < 4 ? *second & 63 : *rest >> 4 | (*second >> 2 & 48);
        }
    }
};

struct Q6_K {
    static constexpr int BITS = 6, BYTES = 210;
    static INLINE void read(const uint8_t* block, int run, uint8_t* numbers) {
        const uint8_t *lower = block + run / 4 * 64 + run % 2 * 32, *upper = block + 128 + run / 4 * 32;
        for (int i = 0; i < 32; i++)
            numbers[i] = (lower[i] >> run / 2 % 2 * 4 & 15) | (upper[i] >> run % 4 * 2 & 3) << 4;
    }
    static INLINE void header(const uint8_t* block, uint8_t* to, size_t output) {
        put16(to, 0, output, block + 208);
        for (int run = 0; run < 16; run++) to[2 * GROUP + run * GROUP + output] = block[192 + run];
    }
};

// Two bits of each number, the third bits before them.
struct Q3_K {
    static constexpr int BITS = 3, BYTES = 110;
    static INLINE void read(const uint8_t* block, int run, uint8_t* numbers) {
        pairs_of_bytes(block + 32, run, numbers);
        for (int i = 0; i < 32; i++) numbers[i] |= (block[i] >> run & 1) << 2;
    }
    static INLINE void header(const uint8_t* block, uint8_t* to, size_t output) {
        put16(to, 0, output, block + 108);
        const uint8_t* factors = block + 96;  // lower halves of bytes, then upper ones, then two bits of each
        for (int half = 0; half < 16; half++)
            to[2 * GROUP + half * GROUP + output] =
                (factors[half % 8] >> half / 8 * 4 & 15 | (factors[8 + half % 4] >> half / 4 * 2 & 3) << 4) - 32;
    }
};

// Two factors of 4 bits for each half of a run, then the numbers.
struct Q2_K {
    static constexpr int BITS = 2, BYTES = 84;
    static INLINE void read(const uint8_t* block, int run, uint8_t* numbers) { pairs_of_bytes(block + 16, run, numbers); }
    static INLINE void header(const uint8_t* block, uint8_t* to, size_t output) {
        put16(to, 0, output, block + 80);
        put16(to, 1, output, block + 82);
        for (int half = 0; half < 16; half++) to[4 * GROUP + half * GROUP + output] = block[half];
    }
};

struct IQ4_XS {
    static constexpr int BITS = 4, BYTES = 136;
    static INLINE void read(const uint8_t* block, int run, uint8_t* numbers) { halves_of_bytes(block + 8 + 16 * run, numbers); }
    static INLINE void header(const uint8_t* block, uint8_t* to, size_t output) {
        put16(to, 0, output, block);
        for (int run = 0; run < 8; run++)
            to[2 * GROUP + run * GROUP + output] =
                (block[4 + run / 2] >> run % 2 * 4 & 15 | (block[2 + run / 4] >> run % 4 * 2 & 3) << 4) - 32;
    }
};

// The scale is a power of two: its exponent, halved, as the codebook has twice the numbers.
struct MXFP4 {
    static constexpr int BITS = 4, BYTES = 17;
    static INLINE void read(const uint8_t* block, int, uint8_t* numbers) { halves_of_bytes(block + 1, numbers); }
    static INLINE void header(const uint8_t* block, uint8_t* to, size_t output) {
        const uint16_t half = block[0] < 2 ? 0x20 << block[0] : (block[0] - 1) << 7;  // as a bfloat16
        put16(to, 0, output, reinterpret_cast<const uint8_t*>(&half));
    }
};
