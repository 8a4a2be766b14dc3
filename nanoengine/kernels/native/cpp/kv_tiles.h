// Where K and V of a token are. The cache is made of tiles of 16 tokens of one K/V head, `head_dim` x 16 elements each:
//
//   K: [head_dim / n][16 tokens][n]   the same dword of 16 tokens side by side: scores come out side by side
//   V: [16 tokens / n][head_dim][n]   n neighbouring tokens of all dimensions: values are added by dimensions
//
// with n elements to a dword. A block of the cache is [block_size / 16][heads] of tiles.
#pragma once
#include "simd.h"

constexpr size_t TILE = 16;  // tokens
constexpr size_t MAX_HEAD_DIM = 512;

struct KVTiles {
    size_t heads, head_dim, block_size;
    size_t block_stride;  // in elements: other layers may lie between two blocks
    size_t scale_size;    // elements of a tile for each of its tokens, behind those of `head_dim`

    // Elements before the tile with tokens [offset, offset + 16) of a block.
    INLINE size_t tile(size_t block, size_t offset, size_t head) const {
        return block * block_stride + (offset / TILE * heads + head) * TILE * (head_dim + scale_size);
    }

    // The same for the tile that starts with a sequence's token `position`.
    INLINE size_t tile(const int32_t* block_table, size_t position, size_t head) const {
        return tile(block_table[position / block_size], position % block_size, head);
    }
};
