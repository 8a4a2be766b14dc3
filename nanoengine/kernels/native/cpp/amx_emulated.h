// What the AMX instructions do, in plain loops (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2): for
// tests only.
#pragma once
#include <cmath>
#include <cstdlib>
#include "simd.h"

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
        char* place = static_cast<char*>(memory) + row * stride;
        if (is_load) std::memcpy(tiles.data[tile][row], place, tiles.shapes.row_bytes[tile]);
        else std::memcpy(place, tiles.data[tile][row], tiles.shapes.row_bytes[tile]);
    }
}

static NOINLINE void emulated_sums(int to, int a, int b) {
    const TileShapes& shapes = tiles.shapes;
    if (shapes.rows[to] != shapes.rows[a] || shapes.row_bytes[a] / 4 != shapes.rows[b]) std::abort();
    for (int m = 0; m < shapes.rows[a]; m++) {
        float parts[2][16] = {};  // of the first and of the second elements of all pairs: sums that begin at zero
        for (int k = 0; k < shapes.row_bytes[a] / 4; k++)
            for (int i = 0; i < 2; i++) {
                const float left = to_float(bf16{(uint16_t)(tiles.data[a][m][k] >> 16 * i)});
                for (int n = 0; n < shapes.row_bytes[b] / 4; n++) {
                    const float right = to_float(bf16{(uint16_t)(tiles.data[b][k][n] >> 16 * i)});
                    parts[i][n] = std::fma(left, right, parts[i][n]);
                }
            }
        for (int n = 0; n < shapes.row_bytes[b] / 4; n++) {
            float sum;
            std::memcpy(&sum, &tiles.data[to][m][n], 4);
            sum += parts[0][n] + parts[1][n];
            std::memcpy(&tiles.data[to][m][n], &sum, 4);
        }
    }
}

static void emulated_dot(int to, int a, int b) {
    const DenormalsAre0 scope;
    emulated_sums(to, a, b);
}
