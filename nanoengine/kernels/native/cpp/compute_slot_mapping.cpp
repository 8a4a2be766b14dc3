// Where the new tokens of a step stand (Kernels.compute_slot_mapping).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include "calls.h"

// All as Kernels.compute_slot_mapping describes it: tables [groups][rows][blocks] with strides, the last row for padding; slots
// [groups][tokens]. 0 is the result if a row, a position or a token is outside of what there is.
extern "C" int compute_slot_mapping(const int32_t* token_ids, const int32_t* row_of, const int32_t* query_start, const int32_t* computed,
                                     const int64_t* last_tokens, const int32_t* tables, size_t group_stride, size_t row_stride,
                                     size_t groups, size_t rows, size_t sequences, size_t tokens, size_t block_size, int64_t* input_ids,
                                     int64_t* positions, int64_t* slots, int32_t* seq_lens) {
    for (size_t sequence = 0; sequence < sequences; sequence++) {
        const size_t row = row_of[sequence], first = query_start[sequence], end = query_start[sequence + 1];
        const bool is_padding = row == rows - 1;
        const int64_t length = is_padding ? 0 : (int64_t)computed[sequence] + (end - first), room = row_stride * block_size;
        if (row >= rows || end > tokens || first > end || length > room || (!is_padding && computed[sequence] < 0)) return 0;
        seq_lens[sequence] = is_padding ? 0 : computed[sequence] + (int32_t)(end - first);
        for (size_t token = first; token < end; token++) {
            const size_t position = is_padding ? 0 : computed[sequence] + token - first;  // its block table may be too short
            positions[token] = position;
            input_ids[token] = token_ids[token] < 0 ? std::max<int64_t>(last_tokens[row], 0) : token_ids[token];
            for (size_t group = 0; group < groups; group++) {
                const int32_t* table = tables + group * group_stride + row * row_stride;
                const size_t slot = (size_t)table[position / block_size] * block_size + position % block_size;
                slots[group * tokens + token] = is_padding ? -1 : (int64_t)slot;
            }
        }
    }
    return 1;
}
RECORDABLE(compute_slot_mapping)
