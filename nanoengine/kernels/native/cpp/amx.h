// The product of product.h in AMX tiles of bfloat16: 16 rows of A, 16 dwords of the summed dimension, 16 columns of B.
//
// With EMULATE_AMX the tile instructions are plain loops (tests/kernels/amx_emulated.h): the order of tiles is tested on any CPU.
#pragma once
#include <algorithm>
#include <initializer_list>
#include "simd.h"

constexpr int AMX_ROWS = 32;       // two tiles of A
constexpr int AMX_DEPTH = 16;      // dwords in a row of a tile
constexpr size_t AMX_CHUNK = 128;  // dwords of the summed dimension after which sums leave the tiles: 16 KB of B, which stay in L1

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

// Rows of A that this thread's tiles are shaped for; 0: they have no shape.
struct TileState {
    int rows = 0, regions = 0;
};
static thread_local TileState tile_state;

// While it lives, the tiles of its thread keep their shape from product to product: to give them one empties them all, and is
// slow. At the end they are released, for other libraries of the process shape the same registers, and what was written past
// the caches is there for all threads. Regions may be nested.
struct TileRegion {
    TileRegion() { tile_state.regions++; }
    TileRegion(const TileRegion&) = delete;
    ~TileRegion() {
        if (--tile_state.regions) return;
        _mm_sfence();
        if (tile_state.rows) _tile_release();
        tile_state.rows = 0;
    }
};

// In a region: tiles for `rows` rows of A, at most AMX_ROWS.
static void shape_tiles(int rows) {
    if (tile_state.rows == rows) return;
    const int top = rows < 16 ? rows : 16, low = rows - top;
    TileShapes shapes;
    auto set = [&](int tile, int rows) {
        if (rows) shapes.rows[tile] = rows, shapes.row_bytes[tile] = 64;
    };
    for (int tile : {TOP_LEFT, TOP_RIGHT, A_TOP}) set(tile, top);
    for (int tile : {LOW_LEFT, LOW_RIGHT, A_LOW}) set(tile, low);
    for (int tile : {B_LEFT, B_RIGHT}) set(tile, AMX_DEPTH);
    MEMORY_BARRIER;
    _tile_loadconfig(&shapes);
    tile_state.rows = rows;
}

// At most AMX_ROWS rows and AMX_CHUNK dwords of a product. With each step so many cache lines from `ahead` on are prefetched,
// into L2.
static void amx_block(int rows, const uint32_t* a, size_t a_stride, const uint32_t* b0, const uint32_t* b1, size_t b_stride,
                      size_t depth, float* out, size_t out_stride, bool add, const char* ahead, size_t lines) {
    const TileRegion region;
    const int low = rows - 16;
    shape_tiles(rows);
    MEMORY_BARRIER;
    const size_t a_bytes = a_stride * 4, b_bytes = b_stride * 4, out_bytes = out_stride * 4;
    const uint32_t* a_low = a + 16 * a_stride;
    float* out_low = out + 16 * out_stride;
    if (add) {
        _tile_loadd(TOP_LEFT, out, out_bytes);
        _tile_loadd(TOP_RIGHT, out + 16, out_bytes);
        if (low > 0) {
            _tile_loadd(LOW_LEFT, out_low, out_bytes);
            _tile_loadd(LOW_RIGHT, out_low + 16, out_bytes);
        }
    } else {
        _tile_zero(TOP_LEFT);
        _tile_zero(TOP_RIGHT);
        if (low > 0) {
            _tile_zero(LOW_LEFT);
            _tile_zero(LOW_RIGHT);
        }
    }
    MEMORY_BARRIER;
    for (size_t d = 0; d < depth; d += AMX_DEPTH) {
        const uint32_t *left = b0 + d * b_stride, *right = b1 + d * b_stride;
        for (size_t line = 0; line < lines; line++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        _tile_loadd(B_LEFT, left, b_bytes);
        _tile_loadd(B_RIGHT, right, b_bytes);
        _tile_loadd(A_TOP, a + d, a_bytes);
        _tile_dpbf16ps(TOP_LEFT, A_TOP, B_LEFT);
        _tile_dpbf16ps(TOP_RIGHT, A_TOP, B_RIGHT);
        if (low > 0) {
            _tile_loadd(A_LOW, a_low + d, a_bytes);
            _tile_dpbf16ps(LOW_LEFT, A_LOW, B_LEFT);
            _tile_dpbf16ps(LOW_RIGHT, A_LOW, B_RIGHT);
        }
    }
    _tile_stored(TOP_LEFT, out, out_bytes);
    _tile_stored(TOP_RIGHT, out + 16, out_bytes);
    if (low > 0) {
        _tile_stored(LOW_LEFT, out_low, out_bytes);
        _tile_stored(LOW_RIGHT, out_low + 16, out_bytes);
    }
    MEMORY_BARRIER;
}

// The product of product.h, chunk by chunk of B, which is multiplied with all rows while it is in L1. If B comes from memory,
// its next chunk is prefetched meanwhile, in equal parts: tiles are loaded from L2 fast enough, and lines that are prefetched
// into L1 evict others.
static void amx_product(int rows, const uint32_t* a, size_t a_stride, const uint32_t* b0, const uint32_t* b1, size_t b_stride,
                        size_t depth, float* out, size_t out_stride, bool add, bool from_memory) {
    const size_t blocks = (rows + AMX_ROWS - 1) / AMX_ROWS, lines = from_memory ? (2 * AMX_DEPTH + blocks - 1) / blocks : 0;
    for (size_t d = 0; d < depth; d += AMX_CHUNK) {
        const size_t count = std::min(AMX_CHUNK, depth - d), at = d * b_stride;
        const char* ahead = reinterpret_cast<const char*>(b0 + at + AMX_CHUNK * b_stride);
        for (int m = 0; m < rows; m += AMX_ROWS, ahead += count / AMX_DEPTH * lines * 64)
            amx_block(std::min(rows - m, AMX_ROWS), a + m * a_stride + d, a_stride, b0 + at, b1 + at, b_stride, count,
                      out + m * out_stride, out_stride, add || d, ahead, lines);
    }
}
