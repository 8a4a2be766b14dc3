// What the AMX instructions do, in plain loops (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2): for
// tests only.
#pragma once
#include <cstdlib>
#include "simd.h"

// While it lives, what is denormal counts as 0: numbers that are read, and results that are below 2^-126 once they are rounded to
// 24 bits. The work beside it is a separate function, or the compiler may move it out.
struct DenormalsAre0 {
    const unsigned before = _mm_getcsr();
    DenormalsAre0() { _mm_setcsr(before | 0x8040); }
    ~DenormalsAre0() { _mm_setcsr(before); }
};

struct EmulatedTiles {
    TileShapes shapes;
    uint32_t data[8][16][16];
};
static thread_local EmulatedTiles tiles;

#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_release
#define _tile_loadconfig(from) emulated_loadconfig(from)
#define _tile_loadd(tile, from, stride) emulated_move(tile, const_cast<void*>(static_cast<const void*>(from)), stride, true)
#define _tile_stored(tile, to, stride) emulated_move(tile, to, stride, false)
#define _tile_zero(tile) std::memset(tiles.data[tile], 0, sizeof(tiles.data[tile]))
#define _tile_dpbf16ps(to, a, b) emulated_dot(to, a, b)
#define _tile_release() (void)(tiles.shapes = TileShapes{})

static void emulated_loadconfig(const TileShapes* shapes) {
    tiles.shapes = *shapes;
    std::memset(tiles.data, 0, sizeof(tiles.data));
}

static void emulated_move(int tile, void* memory, size_t stride, bool is_load) {
    if (!tiles.shapes.rows[tile] || !tiles.shapes.row_bytes[tile]) std::abort();  // the CPU raises an exception
    if (is_load) std::memset(tiles.data[tile], 0, sizeof(tiles.data[tile]));
    for (int row = 0; row < tiles.shapes.rows[tile]; row++) {
        char* bytes = static_cast<char*>(memory) + row * stride;
        if (is_load) std::memcpy(tiles.data[tile][row], bytes, tiles.shapes.row_bytes[tile]);
        else std::memcpy(bytes, tiles.data[tile][row], tiles.shapes.row_bytes[tile]);
    }
}

// Most of the time of a test is spent here, so it is compiled for speed where the rest is not; and tiles are not memory, which a
// sanitizer watches. Columns behind the last are never stored.
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("O3")))
#endif
__attribute__((no_sanitize_address)) static NOINLINE void emulated_sums(int to, int a, int b) {
    EmulatedTiles& all = tiles;
    if (all.shapes.rows[to] != all.shapes.rows[a] || all.shapes.row_bytes[a] / 4 != all.shapes.rows[b]) std::abort();
    for (int m = 0; m < all.shapes.rows[a]; m++) {
        float first[16] = {}, second[16] = {};  // of all pairs: sums that begin at zero
        for (int k = 0; k < all.shapes.row_bytes[a] / 4; k++) {
            const uint32_t pair = all.data[a][m][k];
            const float left = __builtin_bit_cast(float, pair << 16), right = __builtin_bit_cast(float, pair & 0xffff0000u);
            for (int n = 0; n < 16; n++) {
                const uint32_t other = all.data[b][k][n];
                first[n] = __builtin_fmaf(left, __builtin_bit_cast(float, other << 16), first[n]);
                second[n] = __builtin_fmaf(right, __builtin_bit_cast(float, other & 0xffff0000u), second[n]);
            }
        }
        for (int n = 0; n < 16; n++) {
            const float sum = __builtin_bit_cast(float, all.data[to][m][n]) + (first[n] + second[n]);
            all.data[to][m][n] = __builtin_bit_cast(uint32_t, sum);
        }
    }
}

static void emulated_dot(int to, int a, int b) {
    const DenormalsAre0 scope;
    emulated_sums(to, a, b);
}
