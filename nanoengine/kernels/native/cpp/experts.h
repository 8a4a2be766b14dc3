// A mixture of experts. Every choice of an expert by a row of x is a row of that expert's products: choices are sorted by expert,
// and the rows of an expert are one product, so that its weights are read once.
#pragma once
#include "panel_product.h"
#include "team.h"
#include <functional>
#include <span>

constexpr size_t WAVE = 256;  // rows that are copied as factors before some of them are multiplied, of all experts

// Row i of x chose the experts [i][0..per_row) of `count`, and weighs what they say by factors [i][0..per_row).
struct Choices {
    const int64_t* experts;
    const float* factors;
    size_t rows, per_row, count;

    bool are_experts() const {
        return std::all_of(experts, experts + rows * per_row, [&](int64_t e) { return e >= 0 && e < (int64_t)count; });
    }
};

// Some of the sorted choices, [first, first + count), all of one expert.
struct Run {
    size_t expert, first, count;
};

// Choices by expert, and of one expert in the order of rows; cut into runs of at most `most`, and these into waves.
struct Sorted {
    std::vector<size_t> choices;
    std::vector<Run> runs;
    std::vector<std::span<const Run>> waves;

    Sorted(const Choices& all, size_t most) : choices(all.rows * all.per_row) {
        const size_t experts = all.count;
        std::vector<size_t> starts(experts + 1);
        for (size_t i = 0; i < choices.size(); i++) starts[all.experts[i] + 1]++;
        for (size_t e = 0; e < experts; e++) {
            const size_t count = starts[e + 1], pieces = round_up(count, most) / most;
            for (size_t i = 0; i < pieces; i++) {  // of about as many rows each
                const size_t first = count * i / pieces, end = count * (i + 1) / pieces;
                runs.push_back({e, starts[e] + first, end - first});
            }
            starts[e + 1] += starts[e];
        }
        for (size_t i = 0; i < choices.size(); i++) choices[starts[all.experts[i]]++] = i;
        for (size_t first = 0, end = 0; first < runs.size(); first = end) {
            while (end < runs.size() && runs[end].first + runs[end].count <= runs[first].first + WAVE) end++;
            waves.emplace_back(&runs[first], end - first);
        }
    }
};

// For each wave, by all threads: work(member, next, block, runs), where `next` is for Member::take, and the block holds
// row_of(i) of x for each sorted choice i of the wave.
template <class T, class RowOf, class Work>
static void for_waves(const Sorted& sorted, int64_t kinds, const T* x, size_t inputs, RowOf row_of, Work work) {
    const size_t most = std::min(sorted.choices.size(), WAVE);
    const Input<T> input{x, nullptr, nullptr, 0.0f, 0, inputs};
    Rows<T> blocks[] = {{kinds, inputs, most}, {kinds, inputs, sorted.waves.size() > 1 ? most : 0}};  // one is filled, the other read
    std::vector<std::atomic<size_t>> next(sorted.waves.size());
    parallel([&](Member member) {
        const TileRegion region;
        for (size_t i = 0; i < sorted.waves.size(); i++) {
            const std::span<const Run> runs = sorted.waves[i];
            const size_t first = runs.front().first, count = runs.back().first + runs.back().count - first;
            member.static_for(count, [&](size_t choice) { blocks[i % 2].take(input, row_of(first + choice), choice); });
            member.barrier();
            work(member, next[i], blocks[i % 2], runs);
        }
    });
}

// gated [sorted choices][size] = gated(G_e x, U_e x + their biases [experts][size], if not null), where G and U [size][hidden]
// of all experts are one weight, each from another panel on.
template <class T>
static void gated_of_experts(Activation activation, const Choices& all, const T* x, const Weight& gates, const Weight& ups,
                         const float* gate_bias, const float* up_bias, T* gated) {
    const size_t size = gates.outputs / all.count, panels = round_up(size, PANEL) / PANEL;
    const Sorted sorted(all, std::min(row_block<T>(gates.inputs), WAVE));
    const auto row_of_choice = [&](size_t i) { return sorted.choices[i] / all.per_row; };
    for_waves(sorted, gates.kinds | ups.kinds, x, gates.inputs, row_of_choice,
              [&](Member member, std::atomic<size_t>& next, Rows<T>& block, std::span<const Run> runs) {
        member.dynamic_for(next, runs.size() * panels, 1, [&](size_t i) {  // runs differ in length
            const Run& run = runs[i / panels];
            const size_t p = i % panels;
            const size_t panel = run.expert * panels + p, column = p * PANEL, bias = run.expert * size + column;
            const Gate gate = gate_bias ? Gate{activation, gate_bias + bias, up_bias + bias} : Gate{activation, nullptr, nullptr};
            multiply_gated(block, gate, run.first - runs[0].first, run.count, gates.panel(panel), ups.panel(panel),
                           gated + run.first * size + column, size, sorted.choices.size() * size * sizeof(T) > LARGE_OUTPUT);
        });
    });
}

// out [rows][hidden] = the sum over each row's choices of factor * (D_e gated + bias), D [hidden][size].
template <class T>
static void sums_of_experts(const Choices& all, const T* gated, const Weight& downs, const float* bias, T* out) {
    const size_t hidden = downs.outputs / all.count, hidden_panels = round_up(hidden, PANEL) / PANEL;
    const Sorted sorted(all, std::min(row_block<T>(downs.inputs), WAVE));

    // Each thread adds up other columns, expert after expert: without waiting, and in an order that no other row changes.
    const size_t width = hidden_panels * PANEL;
    std::vector<float> totals(all.rows * width);
    for_waves(sorted, downs.kinds, gated, downs.inputs, std::identity(),
              [&](Member member, std::atomic<size_t>&, Rows<T>& block, std::span<const Run> runs) {
        for (const Run& run : runs)
            member.static_for(hidden_panels, [&](size_t p) {
                alignas(64) float sums[MOST_ROW_BLOCK<T>][PANEL];
                const size_t column = p * PANEL;
                const Panel& panel = downs.panel(run.expert * hidden_panels + p);
                block.multiply(run.first - runs[0].first, run.count, panel, sums);
                if (bias) add_bias(sums, run.count, bias + run.expert * hidden + column, panel.columns);
                for (size_t m = 0; m < run.count; m++) {
                    const size_t choice = sorted.choices[run.first + m];
                    float* total = totals.data() + choice / all.per_row * width + column;
#pragma GCC unroll 4
                    for (int v = 0; v < WIDE; v++)
                        store(total + v * LANES,
                              load<Floats>(total + v * LANES) + load<Floats>(sums[m] + v * LANES) * all.factors[choice]);
                }
            });
    });
    for_each(all.rows, all.rows <= 16, [&](size_t row) { copy_elements(totals.data() + row * width, hidden, out + row * hidden); });
}
