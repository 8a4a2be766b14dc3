// The team of this process: its threads are made when they are first needed, and stay.
#include "team.h"
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <new>
#include <thread>
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

typedef std::atomic<uint32_t> Word;
typedef std::chrono::steady_clock Clock;

constexpr size_t MOST = 1024;                             // members
constexpr auto BETWEEN = std::chrono::microseconds(500);  // how long one spins for the next kernel: Python seldom works longer
constexpr auto WITHIN = std::chrono::microseconds(100);   // and for other members: who takes longer has no CPU
constexpr uint64_t TURN = 100'000;                        // nanoseconds

constexpr int UNKNOWN = -1, AWAKE = -1;

struct alignas(64) Seat {
    Word job{0};  // how many jobs it got
    std::atomic<bool> working{false};
    std::atomic<int> cpu{UNKNOWN};   // where it began to work
    std::atomic<int> asleep{AWAKE};  // the number of its thread while that sleeps, or is about to
};

// How this thread rounds, and whether it knows denormal numbers: all members must compute as whoever calls does.
unsigned this_mode() {
#if defined(__x86_64__)
    return _mm_getcsr();
#elif defined(__aarch64__)
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return (unsigned)mode;
#else
    return 0;
#endif
}

void use_mode(unsigned mode) {
#if defined(__x86_64__)
    _mm_setcsr(mode);
#elif defined(__aarch64__)
    asm volatile("msr fpcr, %0" : : "r"((uint64_t)mode));
#endif
}

#if defined(__linux__)
int this_cpu() { return sched_getcpu(); }
int this_thread() { return (int)syscall(SYS_gettid); }

// Since version 6.12 Linux lets a thread say how long its turns should be. One with short turns gets its CPU soon after it
// wakes, where it would otherwise wait for the end of a busy process's turn; its share stays the same. Older versions do not
// heed it.
void ask_for_short_turns() {
#if defined(SYS_sched_getattr)
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
        uint32_t least, most;
    } how{};
    if (syscall(SYS_sched_getattr, 0, &how, sizeof how, 0) || how.policy != SCHED_OTHER) return;
    how.runtime = TURN;
    syscall(SYS_sched_setattr, 0, &how, 0);
#endif
}

// While it lives, a member's thread is not woken on the CPU of the caller, if there is another that it may use. Linux likes to
// wake a thread where the one that wakes it works: there it would wait for the end of that work. Once it runs, it may have any
// CPU again.
class WokenElsewhere {
    int thread;
    bool is_held = false;
    cpu_set_t allowed;

public:
    explicit WokenElsewhere(int thread) : thread(thread) {
        if (!sched_getaffinity(thread, sizeof allowed, &allowed)) {
            cpu_set_t others = allowed;
            CPU_CLR(this_cpu(), &others);
            is_held = CPU_COUNT(&others) && !sched_setaffinity(thread, sizeof others, &others);
        }
    }
    ~WokenElsewhere() {
        if (is_held) sched_setaffinity(thread, sizeof allowed, &allowed);
    }
};
#else
int this_cpu() { return UNKNOWN; }
int this_thread() { return 0; }
void ask_for_short_turns() {}
struct WokenElsewhere {
    explicit WokenElsewhere(int) {}
};
#endif

struct Team {
    std::atomic<size_t> size{std::clamp<size_t>(std::thread::hardware_concurrency(), 1, MOST)};
    std::atomic_flag is_busy = ATOMIC_FLAG_INIT;
    size_t made = 1;  // seats with a thread; the first is whoever calls
    Seat seats[MOST];
    void (*work)(const void*, Member) = nullptr;
    const void* context = nullptr;
    unsigned mode = 0;
    std::atomic<size_t> count{1};
    alignas(64) Word left{0};  // members who have not done their part
    std::atomic<bool> held{false};  // the caller's thread, while it is woken
    alignas(64) Word arrived{0}, met{0};

    // Whether a CPU is needed by a member who works, other than this one, as far as one can see.
    bool is_needed(int cpu, size_t index) const {
        for (size_t i = 0; cpu != UNKNOWN && i < count.load(std::memory_order_relaxed); i++)
            if (i != index && seats[i].working.load(std::memory_order_relaxed) && seats[i].cpu.load(std::memory_order_relaxed) == cpu)
                return true;
        return false;
    }

    // Until a word is no longer what it was.
    void wait(const Word& word, uint32_t before, size_t index, std::chrono::microseconds patience) {
        const auto changed = [&] { return word.load() != before; };
        for (Clock::time_point end{}; !changed();) {
            for (int i = 0; i < 64 && !changed(); i++) pause_cpu();
            if (changed()) break;
            const auto now = Clock::now();
            if (end == Clock::time_point{}) end = now + patience;
            if (now < end && !is_needed(this_cpu(), index)) continue;
            seats[index].asleep = this_thread();  // before the word is looked at again, so that whoever changes it sees one of the two
            word.wait(before);
            seats[index].asleep = AWAKE;
        }
    }

    void start(Seat& seat) {
        seat.cpu.store(this_cpu(), std::memory_order_relaxed);
        seat.working.store(true, std::memory_order_relaxed);
    }

    void serve(size_t index) {
        ask_for_short_turns();
        Seat& seat = seats[index];
        for (uint32_t done = 0;; done++) {
            wait(seat.job, done, index, BETWEEN);
            use_mode(mode);
            start(seat);
            work(context, {index, count});
            seat.working.store(false, std::memory_order_relaxed);
            if (left == 1 && seats[0].asleep != AWAKE) wake_caller();
            else if (left.fetch_sub(1) == 1 && seats[0].asleep != AWAKE) left.notify_one();
        }
    }

    void run(void (*some_work)(const void*, Member), const void* its_context) {
        thread_local const bool done = (ask_for_short_turns(), true);
        (void)done;
        grow();
        work = some_work, context = its_context, mode = this_mode(), count = std::min(size.load(std::memory_order_relaxed), made);
        left.store(count - 1, std::memory_order_relaxed);
        start(seats[0]);
        for (size_t i = 1; i < count; i++) call(seats[i]);
        work(context, {0, count});
        seats[0].working.store(false, std::memory_order_relaxed);
        for (uint32_t others; (others = left);) wait(left, others, 0, WITHIN);
        while (held) std::this_thread::yield();
        start(seats[0]);
    }

    void grow() {
        try {
            for (; made < size.load(std::memory_order_relaxed); made++) std::thread([this, index = made] { serve(index); }).detach();
        } catch (const std::exception&) {  // no more threads for this process: so many have to do
            size.store(made, std::memory_order_relaxed);
        }
    }

    // By the last to do its part. The caller goes on when it may have any CPU again: nobody shall find its thread held.
    void wake_caller() {
        held = true;
        {
            const WokenElsewhere elsewhere(seats[0].asleep);
            left--;
            left.notify_one();
        }
        held = false;
    }

    void call(Seat& seat) {
        seat.working.store(true, std::memory_order_relaxed);
        if (seat.job.fetch_add(1); seat.asleep == AWAKE) return;
        const WokenElsewhere elsewhere(seat.asleep);
        seat.job.notify_one();
    }

    void barrier(size_t index) {
        const uint32_t before = met;
        if (arrived.fetch_add(1) + 1 == count) {
            arrived = 0;
            for (size_t i = 0; i < count; i++) seats[i].working.store(true, std::memory_order_relaxed);
            met++;
            met.notify_all();
            return;
        }
        seats[index].working.store(false, std::memory_order_relaxed);
        wait(met, before, index, WITHIN);
        start(seats[index]);
    }
};

Team* const TEAM = new Team;  // its threads outlive whatever is destroyed when the process ends

// The child of a fork has one thread, and makes others when it needs them.
void begin_anew() {
    const size_t size = TEAM->size;
    new (TEAM) Team;
    TEAM->size = size;
}

#if defined(__unix__) || defined(__APPLE__)
const int HANDLED = pthread_atfork(nullptr, nullptr, begin_anew);
#endif

}  // namespace

void Member::barrier() const {
    if (count > 1) TEAM->barrier(index);
}

void run_parallel(void (*work)(const void*, Member), const void* context) noexcept {
    if (TEAM->size.load(std::memory_order_relaxed) == 1 || TEAM->is_busy.test_and_set(std::memory_order_acquire))
        return work(context, {0, 1});
    TEAM->run(work, context);
    TEAM->is_busy.clear(std::memory_order_release);
}

// How many members there are from the next kernel on.
extern "C" void set_num_threads(size_t count) { TEAM->size.store(std::clamp<size_t>(count, 1, MOST), std::memory_order_relaxed); }
