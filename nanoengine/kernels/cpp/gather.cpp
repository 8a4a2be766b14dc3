// Ranks of a group put parts of rows together, in memory that their processes share.
//
// The memory begins with a seat for each rank, which counts what the rank has written. Behind the seats every rank has two slots, used
// in turn. A rank writes its part into its slot, counts, and reads each other's slot as soon as that rank has counted as far. Two slots
// are enough, and one wait: who has counted n has read all of n - 1, so nobody still reads what n + 1 overwrites.
#include "calls.h"
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

typedef std::chrono::steady_clock Clock;

constexpr size_t PAGE = 4096;
constexpr int SPINS = 4000;                              // about as long as another rank's share of a product
constexpr auto AWAKE = std::chrono::milliseconds(2);     // how long a rank gives its CPU away in turns, before it sleeps
constexpr auto NAP = std::chrono::microseconds(100);

struct alignas(64) Seat {
    std::atomic<uint64_t> written;
    std::atomic<uint64_t> lost;  // 1 + the rank that this one has waited for in vain
};

struct Shared {
    uint8_t* memory;
    size_t size, slot_bytes;

    Seat& seat(size_t rank) const { return reinterpret_cast<Seat*>(memory)[rank]; }
    uint8_t* slot(size_t rank, uint64_t number) const {
        const size_t seats = (size * sizeof(Seat) + PAGE - 1) / PAGE * PAGE;
        return memory + seats + (2 * rank + number % 2) * slot_bytes;
    }
};

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether the count of another rank gets there in time: by spinning, then in turns with whoever else wants this CPU, then asleep.
bool arrives(const std::atomic<uint64_t>& written, uint64_t number, float seconds) {
    for (int i = 0; i < SPINS; i++) {
        if (written.load(std::memory_order_acquire) >= number) return true;
        pause();
    }
    const auto start = Clock::now(), end = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<float>(seconds));
    while (written.load(std::memory_order_acquire) < number) {
        const auto now = Clock::now();
        if (now > end) return false;
        if (now < start + AWAKE) std::this_thread::yield();
        else std::this_thread::sleep_for(NAP);
    }
    return true;
}

}  // namespace

extern "C" {

// out [rows][sum of widths] = each rank's part [rows][widths[rank]], side by side; widths are in bytes, and a slot holds the widest row.
// Nothing more is gathered once a rank did not come within so many seconds: `lost_rank` names it.
void gather(void* memory, size_t rank, size_t size, size_t slot_bytes, float seconds, const int64_t* widths, const void* part, void* out,
            size_t rows) {
    const Shared shared{(uint8_t*)memory, size, slot_bytes};
    Seat& own = shared.seat(rank);
    size_t total = 0, widest = 1;
    for (size_t r = 0; r < size; r++) {
        total += widths[r];
        widest = std::max(widest, (size_t)widths[r]);
    }
    const size_t most = slot_bytes / widest, width = widths[rank];
    for (size_t first = 0; first < rows; first += most) {
        if (own.lost.load(std::memory_order_relaxed)) return;
        const size_t count = std::min(most, rows - first);
        const uint64_t number = own.written.load(std::memory_order_relaxed) + 1;
        std::memcpy(shared.slot(rank, number), (const uint8_t*)part + first * width, count * width);
        own.written.store(number, std::memory_order_release);
        for (size_t i = 0; i < size; i++) {  // this rank's first, which is there
            const size_t r = (rank + i) % size;
            if (!arrives(shared.seat(r).written, number, seconds)) {
                own.lost.store(r + 1, std::memory_order_relaxed);
                return;
            }
            const uint8_t* from = shared.slot(r, number);
            uint8_t* to = (uint8_t*)out + first * total;
            for (size_t before = 0; before < r; before++) to += widths[before];
            for (size_t row = 0; row < count; row++) std::memcpy(to + row * total, from + row * widths[r], widths[r]);
        }
    }
}

// The rank that this one has waited for in vain; -1 if there is none.
int lost_rank(const void* memory, size_t rank) {
    return (int)static_cast<const Seat*>(memory)[rank].lost.load(std::memory_order_relaxed) - 1;
}
}
RECORDABLE(gather)
