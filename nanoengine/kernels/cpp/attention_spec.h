// What a layer asks of attention, beside its shape.
#pragma once
#include "simd.h"

struct AttentionSpec {
    float scale, soft_cap;   // of scores; a soft cap of 0 is none
    size_t window;           // tokens; 0 is none
    const float* sinks;      // [q_heads]: each head's score that no token has; null: there are none

    // The first token that the one at a position sees.
    INLINE size_t first_seen(size_t position) const {
        return window && position >= window ? position + 1 - window : 0;
    }

    // Scores that are scaled already; `count` is a multiple of LANES.
    NOINLINE void cap(float* scores, size_t count) const {
        for (size_t t = 0; t < count; t += LANES) store(scores + t, soft_cap * tanh(load<Floats>(scores + t) / soft_cap));
    }
};
