// Rows of a table: of angles, by positions; of block tables, by the rows of a step.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include "calls.h"

// out [tables][count][row_bytes] = x [tables][rows][row_bytes] at index [count], whose numbers have 4 or 8 bytes; strides in
// bytes.
extern "C" void select_rows(const void* x, size_t tables, size_t table_stride, size_t row_stride, size_t row_bytes, const void* index,
                            size_t index_bytes, size_t count, void* out) {
    char* to = (char*)out;
    for (size_t table = 0; table < tables; table++)
        for (size_t i = 0; i < count; i++, to += row_bytes) {
            const int64_t row = index_bytes == 4 ? ((const int32_t*)index)[i] : ((const int64_t*)index)[i];
            std::memcpy(to, (const char*)x + table * table_stride + row * row_stride, row_bytes);
        }
}
RECORDABLE(select_rows)
