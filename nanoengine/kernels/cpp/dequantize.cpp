// The block formats of ggml, back into numbers. Layouts: ggml-common.h of ggml. Every product is exact, or is all that rounds, so
// that an FMA gives the same; nanoengine/gguf/quants.py has the same in torch.
#include "simd.h"
#include "team.h"

namespace {

typedef uint8_t Bytes __attribute__((vector_size(LANES)));

INLINE Ints load_ints(const uint8_t* from) { return __builtin_convertvector(load<Bytes>(from), Ints); }
INLINE Floats real(Ints numbers) { return __builtin_convertvector(numbers, Floats); }

INLINE float half(const uint8_t* from) {
    const uint32_t bits = load<uint16_t>(from), magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
    const uint32_t endless = magnitude >= 0x0f800000 ? 0x7f800000 : 0;  // infinity and NaN
    const float value = load<float>(&magnitude) * 0x1p112f;              // exponents as float32 has them, of subnormal ones too
    const uint32_t result = load<uint32_t>(&value) | endless | sign;
    return load<float>(&result);
}

struct Q4_0 {
    static constexpr int VALUES = 32, BYTES = 18;
    template <class T> static INLINE void read(const uint8_t* block, T* out) {
        const Floats scale = splat(half(block));
        for (int i = 0; i < 16; i += LANES) {
            const Ints packed = load_ints(block + 2 + i);
            store_floats(out + i, real((packed & 15) - 8) * scale);
            store_floats(out + 16 + i, real((packed >> 4) - 8) * scale);
        }
    }
};

struct Q4_1 {
    static constexpr int VALUES = 32, BYTES = 20;
    template <class T> static INLINE void read(const uint8_t* block, T* out) {
        const Floats scale = splat(half(block)), minimum = splat(half(block + 2));
        for (int i = 0; i < 16; i += LANES) {
            const Ints packed = load_ints(block + 4 + i);
            store_floats(out + i, real(packed & 15) * scale + minimum);
            store_floats(out + 16 + i, real(packed >> 4) * scale + minimum);
        }
    }
};

// Bits first, first + 1, ... of the word at `from`, each as the fifth of a number.
INLINE Ints fifth_bits(const uint8_t* from, int first) {
    return ((Ints{} + load<int32_t>(from)) >> count_from(first) & 1) << 4;
}

struct Q5_0 {
    static constexpr int VALUES = 32, BYTES = 22;
    template <class T> static INLINE void read(const uint8_t* block, T* out) {
        const Floats scale = splat(half(block));
        for (int i = 0; i < 16; i += LANES) {
            const Ints packed = load_ints(block + 6 + i);
            store_floats(out + i, real((packed & 15 | fifth_bits(block + 2, i)) - 16) * scale);
            store_floats(out + 16 + i, real((packed >> 4 | fifth_bits(block + 2, 16 + i)) - 16) * scale);
        }
    }
};

struct Q5_1 {
    static constexpr int VALUES = 32, BYTES = 24;
    template <class T> static INLINE void read(const uint8_t* block, T* out) {
        const Floats scale = splat(half(block)), minimum = splat(half(block + 2));
        for (int i = 0; i < 16; i += LANES) {
            const Ints packed = load_ints(block + 8 + i);
            store_floats(out + i, real(packed & 15 | fifth_bits(block + 4, i)) * scale + minimum);
            store_floats(out + 16 + i, real(packed >> 4 | fifth_bits(block + 4, 16 + i)) * scale + minimum);
        }
    }
};

struct Q8_0 {
    static constexpr int VALUES = 32, BYTES = 34;
    template <class T> static INLINE void read(const uint8_t* block, T* out) {
        const Floats scale = splat(half(block));
        for (int i = 0; i < 32; i += LANES) store_floats(out + i, real(load_ints(block + 2 + i) << 24 >> 24) * scale);
    }
};

// Eight runs of 32 numbers, two of them in 32 bytes; each has a scale and a minimum of 6 bits. FIFTH: a bit more of each number.
template <bool FIFTH> struct Runs {
    static constexpr int VALUES = 256, BYTES = FIFTH ? 176 : 144;

    // Scale and minimum `run`: the first four are the lower six bits of a byte each; the others are a half each of the last
    // four bytes, below the upper two bits of the first eight.
    static INLINE void scales(const uint8_t* packed, int run, int& scale, int& minimum) {
        const uint8_t *first = packed + run % 4, *second = first + 4, *rest = first + 8;
        scale = run < 4 ? *first & 63 : *rest & 15 | *first >> 2 & 48;
        minimum = run < 4 ? *second & 63 : *rest >> 4 | *second >> 2 & 48;
    }

    template <class T> static INLINE void read(const uint8_t* block, T* out) {
        const float all_scales = half(block), all_minimums = half(block + 2);
        const uint8_t *fifth = block + 16, *numbers = FIFTH ? block + 48 : block + 16;
        for (int run = 0; run < 8; run++) {
            int scale, minimum;
            scales(block + 4, run, scale, minimum);
            const Floats by = splat(all_scales * scale), less = splat(all_minimums * minimum);
            for (int i = 0; i < 32; i += LANES) {
                Ints number = load_ints(numbers + run / 2 * 32 + i) >> run % 2 * 4 & 15;
                if (FIFTH) number |= (load_ints(fifth + i) >> run & 1) << 4;
                store_floats(out + run * 32 + i, real(number) * by - less);
            }
        }
    }
};

struct Q6_K {
    static constexpr int VALUES = 256, BYTES = 210;
    template <class T> static INLINE void read(const uint8_t* block, T* out) {
        const float all_scales = half(block + 208);
        for (int run = 0; run < 8; run++)  // of 32: four, from 64 bytes of lower halves and 32 of upper bits, then four more
            for (int i = 0; i < 32; i += LANES) {
                const Ints lower = load_ints(block + run / 4 * 64 + run % 2 * 32 + i) >> run / 2 % 2 * 4 & 15;
                const Ints upper = (load_ints(block + 128 + run / 4 * 32 + i) >> run % 4 * 2 & 3) << 4;
                const int8_t scale = (int8_t)block[192 + run * 2 + i / 16];
                store_floats(out + run * 32 + i, real((lower | upper) - 32) * splat(all_scales * scale));
            }
    }
};

template <class F, class T> void read_all(const uint8_t* blocks, T* out, size_t count) {
    for_each(count, count * F::VALUES <= 32768, [&](size_t i) { F::read(blocks + i * F::BYTES, out + i * F::VALUES); });
}

template <class T> void read_format(int format, const uint8_t* blocks, T* out, size_t count) {
    switch (format) {
        case 0: return read_all<Q4_0>(blocks, out, count);
        case 1: return read_all<Q4_1>(blocks, out, count);
        case 2: return read_all<Q5_0>(blocks, out, count);
        case 3: return read_all<Q5_1>(blocks, out, count);
        case 4: return read_all<Q8_0>(blocks, out, count);
        case 5: return read_all<Runs<false>>(blocks, out, count);
        case 6: return read_all<Runs<true>>(blocks, out, count);
        case 7: return read_all<Q6_K>(blocks, out, count);
    }
}

}  // namespace

// out[i] = the numbers of block i, for `count` blocks of the format that the caller numbers so.
extern "C" void dequantize(int format, int dtype, const void* blocks, void* out, size_t count) {
    if (dtype == FLOAT32) read_format(format, (const uint8_t*)blocks, (f32*)out, count);
    else read_format(format, (const uint8_t*)blocks, (bf16*)out, count);
}
