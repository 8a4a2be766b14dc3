// A team of threads that compute a kernel, as OpenMP's: the difference is how they wait.
//
// A member that waits spins, since a thread that sleeps takes longer to wake than most kernels take to compute. OpenMP's
// threads spin even while the one that they wait for has no CPU: beside busy processes a kernel then takes up to a hundred
// times as long. Members of this team do not spin on a CPU that another member needs, and they ask Linux for short turns,
// which it grants the sooner (team.cpp). No result depends on how many they are or on who computes what.
#pragma once
#include <atomic>
#include <cstddef>

// In a loop that waits for another thread.
static inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Member {
    size_t index, count;  // 0 <= index < count

    // A barrier: wait until all members have called it. Each member must call it as often as the others.
    void barrier() const;

    // f(i) for this member's static part of [0, n).
    template <class F> void static_for(size_t n, F f) const {
        for (size_t i = n * index / count; i < n * (index + 1) / count; i++) f(i);
    }

    // f(i) for some i of [0, n), scheduled dynamically: `run` in a row at a time, by the member that is free. `next` is 0 at
    // first, and of this loop alone.
    template <class F> void dynamic_for(std::atomic<size_t>& next, size_t n, size_t run, F f) const {
        for (size_t first; (first = next.fetch_add(run, std::memory_order_relaxed)) < n;)
            for (size_t i = first; i < n && i < first + run; i++) f(i);
    }
};

void run_parallel(void (*work)(const void*, Member), const void* context) noexcept;

// work(member) by every member. One that calls it while the team is at work is a team of one.
template <class Work> static void parallel(const Work& work) {
    run_parallel([](const void* context, Member member) { (*static_cast<const Work*>(context))(member); }, &work);
}

// f(i) for i in [0, n): by all members, or by the caller if they are so few that dividing them would take longer.
template <class F> static void for_each(size_t n, bool few, F f) {
    if (few)
        for (size_t i = 0; i < n; i++) f(i);
    else parallel([&](Member member) { member.static_for(n, f); });
}
