// The product of product.h in AMX tiles of bfloat16: 16 rows of A, 16 dwords of the summed dimension, 16 columns of B.
//
// With EMULATE_AMX the tile instructions are plain loops, so that the order of tiles can be tested on any CPU.
#pragma once
#include <initializer_list>
#include "simd.h"

constexpr int AMX_ROWS = 32;   // two tiles of A
constexpr int AMX_DEPTH = 16;  // dwords in a row of a tile
constexpr size_t AMX_AHEAD = 1024;  // dwords: B is often read from memory for the first time

struct __attribute__((packed)) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

#if defined(EMULATE_AMX)
#include "amx_emulated.h"
static bool amx_allowed() { return true; }
#else
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
// Linux gives the tile registers to a process that asks for them: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
static bool amx_allowed() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return allowed;
}
#endif

// Tile registers; macros, because the intrinsics put their names into assembly.
#define TOP_LEFT 0
#define TOP_RIGHT 1
#define LOW_LEFT 2
#define LOW_RIGHT 3
#define A_TOP 4
#define A_LOW 5
#define B_LEFT 6
#define B_RIGHT 7

// GCC 12's intrinsics do not say that they read memory: what was stored before must be there.
#define MEMORY_BARRIER asm volatile("" ::: "memory")

static void amx_product(int rows, const uint32_t* a, size_t a_stride, const uint32_t* b0, const uint32_t* b1, size_t b_stride,
                        size_t depth, float* out, size_t out_stride, bool add) {
    const int top = rows < 16 ? rows : 16, low = rows - top;
    TileShapes shapes;
    for (int tile : {TOP_LEFT, TOP_RIGHT, A_TOP}) shapes.rows[tile] = top, shapes.row_bytes[tile] = 64;
    for (int tile : {B_LEFT, B_RIGHT}) shapes.rows[tile] = 16, shapes.row_bytes[tile] = 64;
    if (low)
        for (int tile : {LOW_LEFT, LOW_RIGHT, A_LOW}) shapes.rows[tile] = low, shapes.row_bytes[tile] = 64;
    MEMORY_BARRIER;
    _tile_loadconfig(&shapes);  // each time: other libraries of the process shape the same registers

    const size_t a_bytes = a_stride * 4, b_bytes = b_stride * 4, out_bytes = out_stride * 4;
    const uint32_t* a_low = a + 16 * a_stride;
    float* out_low = out + 16 * out_stride;
    if (add) {
        _tile_loadd(TOP_LEFT, out, out_bytes);
        _tile_loadd(TOP_RIGHT, out + 16, out_bytes);
        if (low) {
            _tile_loadd(LOW_LEFT, out_low, out_bytes);
            _tile_loadd(LOW_RIGHT, out_low + 16, out_bytes);
        }
    } else {
        _tile_zero(TOP_LEFT);
        _tile_zero(TOP_RIGHT);
        if (low) {
            _tile_zero(LOW_LEFT);
            _tile_zero(LOW_RIGHT);
        }
    }
    MEMORY_BARRIER;
    for (size_t d = 0; d < depth; d += AMX_DEPTH) {
        const uint32_t *left = b0 + d * b_stride, *right = b1 + d * b_stride;
        for (int row = 0; row < AMX_DEPTH; row++) {
            __builtin_prefetch(left + row * b_stride + AMX_AHEAD);
            __builtin_prefetch(right + row * b_stride + AMX_AHEAD);
        }
        _tile_loadd(B_LEFT, left, b_bytes);
        _tile_loadd(B_RIGHT, right, b_bytes);
        _tile_loadd(A_TOP, a + d, a_bytes);
        _tile_dpbf16ps(TOP_LEFT, A_TOP, B_LEFT);
        _tile_dpbf16ps(TOP_RIGHT, A_TOP, B_RIGHT);
        if (low) {
            _tile_loadd(A_LOW, a_low + d, a_bytes);
            _tile_dpbf16ps(LOW_LEFT, A_LOW, B_LEFT);
            _tile_dpbf16ps(LOW_RIGHT, A_LOW, B_RIGHT);
        }
    }
    _tile_stored(TOP_LEFT, out, out_bytes);
    _tile_stored(TOP_RIGHT, out + 16, out_bytes);
    if (low) {
        _tile_stored(LOW_LEFT, out_low, out_bytes);
        _tile_stored(LOW_RIGHT, out_low + 16, out_bytes);
    }
    _tile_release();
    MEMORY_BARRIER;
}
