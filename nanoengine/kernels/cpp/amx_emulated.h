// What the AMX instructions do, in plain loops (Intel, Instruction Set Extensions Programming Reference): for tests only.
#pragma once
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

static void emulated_dot(int to, int a, int b) {
    const TileShapes& shapes = tiles.shapes;
    if (shapes.rows[to] != shapes.rows[a] || shapes.row_bytes[a] / 4 != shapes.rows[b]) std::abort();
    for (int m = 0; m < shapes.rows[a]; m++)
        for (int k = 0; k < shapes.row_bytes[a] / 4; k++)
            for (int n = 0; n < shapes.row_bytes[b] / 4; n++) {
                bf16 left[2], right[2];
                std::memcpy(left, &tiles.data[a][m][k], 4);
                std::memcpy(right, &tiles.data[b][k][n], 4);
                float sum;
                std::memcpy(&sum, &tiles.data[to][m][n], 4);
                sum += to_float(left[0]) * to_float(right[0]);
                sum += to_float(left[1]) * to_float(right[1]);
                std::memcpy(&tiles.data[to][m][n], &sum, 4);
            }
}
