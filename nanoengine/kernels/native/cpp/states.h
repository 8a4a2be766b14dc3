// The runs of a step as layers with states see them: the slot of a state, and when it is stored.
#pragma once
#include "simd.h"

struct StateRuns {
    const int32_t *rows, *starts;                              // [runs] slot of each; [runs + 1] its first token
    const int32_t *store_starts, *store_tokens, *store_slots;  // null: a state goes back to its slot behind the last token

    // begin(slot), then token(t) for each token of a run; keep(slot) where the state behind it is stored.
    template <class Begin, class Token, class Keep> void for_each_run(size_t run, Begin begin, Token token, Keep keep) const {
        const int32_t last = starts[run + 1];
        if (starts[run] == last) return;
        begin(rows[run]);
        int32_t next = store_starts ? store_starts[run] : 0;
        const int32_t end = store_starts ? store_starts[run + 1] : 0;
        for (int32_t t = starts[run]; t < last; t++) {
            token((size_t)t);
            for (; next < end && store_tokens[next] == t; next++) keep(store_slots[next]);
        }
        if (!store_starts) keep(rows[run]);
    }
};
