// What the ranks of a group share: memory in which each has a seat, and two slots that it uses in turn.
//
// A seat counts what its rank has written. A rank writes into one of its slots, counts, and reads each other's slot as soon as
// that rank has counted as far. Two slots are enough, and one wait: who has counted n has read all of n - 1, so nobody still
// reads what n + 1 overwrites.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include "team.h"

struct alignas(64) RankSeat {
    std::atomic<uint64_t> written;
    std::atomic<uint64_t> lost;  // 1 + the rank that this one has waited for in vain
};

struct Ranks {
    void* memory;  // zeros at first
    size_t rank, count, slot_bytes;
    float seconds;  // how long one waits for another

    RankSeat& seat(size_t of) const { return static_cast<RankSeat*>(memory)[of]; }

    uint8_t* slot(size_t of, uint64_t number) const {
        constexpr size_t PAGE = 4096;
        const size_t seats = (count * sizeof(RankSeat) + PAGE - 1) / PAGE * PAGE;
        return static_cast<uint8_t*>(memory) + seats + (2 * of + number % 2) * slot_bytes;
    }

    // The number of what this rank writes next.
    uint64_t next() const { return seat(rank).written.load(std::memory_order_relaxed) + 1; }

    void publish(uint64_t number) const { seat(rank).written.store(number, std::memory_order_release); }

    // Whether another rank has published this number in time: by spinning, then in turns with whoever else wants this CPU,
    // then asleep. Once one was late, nobody is waited for any more.
    bool arrives(size_t other, uint64_t number) const {
        typedef std::chrono::steady_clock Clock;
        constexpr int SPINS = 4000;                           // about as long as another rank's share of a product
        constexpr auto AWAKE = std::chrono::milliseconds(2);  // then it sleeps
        constexpr auto NAP = std::chrono::microseconds(100);
        const std::atomic<uint64_t>& written = seat(other).written;
        if (is_lost()) return false;
        for (int i = 0; i < SPINS; i++) {
            if (written.load(std::memory_order_acquire) >= number) return true;
            pause_cpu();
        }
        const auto start = Clock::now();
        const auto end = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<float>(seconds));
        while (written.load(std::memory_order_acquire) < number) {
            const auto now = Clock::now();
            if (now > end) {
                seat(rank).lost.store(other + 1, std::memory_order_relaxed);
                return false;
            }
            if (now < start + AWAKE) std::this_thread::yield();
            else std::this_thread::sleep_for(NAP);
        }
        return true;
    }

    bool is_lost() const { return seat(rank).lost.load(std::memory_order_relaxed) != 0; }
};
