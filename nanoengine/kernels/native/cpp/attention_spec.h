// What a layer asks of attention, beside its shape.
#pragma once
#include "simd.h"

struct AttentionSpec {
    float scale, soft_cap;   // of scores; a soft cap of 0 is none
    int64_t window;          // tokens; 0 is none, and one of less than 0 stands still: it begins at multiples of its size
    const float* sinks;      // [q_heads]: each head's score that no token has; null: there are none

    // The first token that the one at a position sees.
    INLINE size_t first_seen(size_t position) const {
        if (window < 0) return position - position % size_t(-window);
        return window && position >= size_t(window) ? position + 1 - size_t(window) : 0;
    }

    // Scores that are scaled already; `count` is a multiple of LANES.
    NOINLINE void cap(float* scores, size_t count) const {
        for (size_t t = 0; t < count; t += LANES) store(scores + t, soft_cap * tanh(load<Floats>(scores + t) / soft_cap));
    }
};
