// Ranks of a group gather parts of rows, in memory that their processes share.
#include "calls.h"
#include "ranks.h"

extern "C" {

// out [rows][sum of widths] = each rank's part [rows][widths[rank]], side by side; widths are in bytes, and a slot holds the
// widest row. Nothing more is gathered once a rank did not come in time: `lost_rank` names it.
void gather(void* memory, size_t rank, size_t count, size_t slot_bytes, float seconds, const int64_t* widths, const void* part, void* out,
            size_t rows) {
    const Ranks ranks{memory, rank, count, slot_bytes, seconds};
    size_t total = 0, widest = 1;
    for (size_t r = 0; r < count; r++) {
        total += widths[r];
        widest = std::max(widest, (size_t)widths[r]);
    }
    const size_t most = slot_bytes / widest, width = widths[rank];
    for (size_t first = 0; first < rows; first += most) {
        const size_t num_rows = std::min(most, rows - first);
        const uint64_t number = ranks.next();
        std::memcpy(ranks.slot(rank, number), (const uint8_t*)part + first * width, num_rows * width);
        ranks.publish(number);
        for (size_t i = 0; i < count; i++) {  // this rank's first, which is there
            const size_t r = (rank + i) % count;
            if (!ranks.arrives(r, number)) return;
            const uint8_t* from = ranks.slot(r, number);
            uint8_t* to = (uint8_t*)out + first * total;
            for (size_t before = 0; before < r; before++) to += widths[before];
            for (size_t row = 0; row < num_rows; row++) std::memcpy(to + row * total, from + row * widths[r], widths[r]);
        }
    }
}

// The rank that this one has waited for in vain; -1 if there is none.
int lost_rank(const void* memory, size_t rank) {
    return (int)static_cast<const RankSeat*>(memory)[rank].lost.load(std::memory_order_relaxed) - 1;
}
}
RECORDABLE(gather)
