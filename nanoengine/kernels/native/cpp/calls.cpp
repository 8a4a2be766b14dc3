// A recorded step: all of its calls in one.
#include "calls.h"

// Each call is the number of its arguments, the address of a function that takes them as words, and the arguments.
extern "C" void run_calls(const uint64_t* words, size_t count) {
    for (const uint64_t* end = words + count; words < end; words += 2 + words[0])
        reinterpret_cast<void (*)(const uint64_t*)>(words[1])(words + 2);
}
