// Some rows of an input, in each way in which the panels of a weight want them, and their products with panels of any format.
#pragma once
#include "factor_rows.h"

template <class T> class Rows {
    int64_t kinds;
    FactorRows<T, T> factors;
    FactorRows<T, std::conditional_t<std::is_same_v<T, f32>, bf16, f32>> others;
    RoundedRows<T, 1> rounded;
    RoundedRows<T, 2> in_two_parts;

public:
    // Room for `rows` rows, for weights of these kinds.
    Rows(int64_t kinds, size_t inputs, size_t rows)
        : kinds(kinds),
          factors{inputs, kinds & AS_THEY_ARE ? rows : 0},
          others{inputs, kinds & IN_OTHER_TYPE ? rows : 0},
          rounded{inputs, kinds & ROUNDED ? rows : 0},
          in_two_parts{inputs, kinds & IN_TWO_PARTS ? rows : 0} {}

    // Row `from` of the input becomes row `to`.
    void take(const Input<T>& input, size_t from, size_t to) {
        const Row<T> row = row_of(input, from);
        if (kinds & AS_THEY_ARE) factors.take(row, to);
        if (kinds & IN_OTHER_TYPE) others.take(row, to);
        if (kinds & ROUNDED) rounded.take(row, to);
        if (kinds & IN_TWO_PARTS) in_two_parts.take(row, to);
    }

    // sums[i][0..PANEL) of the rows [first, first + count) and the outputs of a panel.
    NOINLINE void multiply(size_t first, size_t count, const Panel& panel, float (*sums)[PANEL]) {
        if (!panel.is_quantized()) factors.multiply(first, count, panel, sums);
        else if (kinds & ROUNDED) rounded.multiply(first, count, panel, sums);
        else if (kinds & IN_TWO_PARTS) in_two_parts.multiply(first, count, panel, sums);
        else if (kinds & IN_OTHER_TYPE) others.multiply(first, count, panel, sums);
        else factors.multiply(first, count, panel, sums);
    }
};

// Rows of a panel that are gated behind each block of the next panel's products, where those are in tiles; 0: a panel is gated
// before the next one is computed.
constexpr size_t GATED_BESIDE_TILES = 4;

// Panels of gates and of the values beside them, that one thread computes one after the other; all is there when it ends.
template <class T> class GatedPanels {
    static constexpr bool BESIDE = GATED_BESIDE_TILES > 0 && IN_TILES<T>;
    alignas(64) float sums[1 + BESIDE][2][MOST_ROW_BLOCK<T>][PANEL];  // of gates, and of the values beside them
    bool is_second = false;

    // Rows that are still to be gated: sums, and where they go.
    struct {
        float (*gates)[PANEL], (*ups)[PANEL];
        Gate gate;
        size_t columns, count;
        T* out;
        size_t stride;
        bool is_large;
    } left{};

    void gate_some(size_t most) {
        const size_t count = std::min(most, left.count);
        if (!count) return;
        if (left.gate.bias) add_bias(left.gates, count, left.gate.bias, left.columns), add_bias(left.ups, count, left.gate.up_bias, left.columns);
        with_activation(left.gate.activation, [&]<Activation ACTIVATION>() {
            gate_pairs<ACTIVATION>(left.gates[0], left.ups[0], count * PANEL, left.gates[0]);
        });
        store_panel(left.out, left.stride, count, left.columns, left.is_large,
                    [&](size_t m, int v) { return load<Floats>(left.gates[m] + v * LANES); });
        left.gates += count, left.ups += count, left.out += count * left.stride, left.count -= count;
    }

public:
    GatedPanels() {}
    ~GatedPanels() { gate_some(left.count); }

    // out [count][stride] = gated(x G^T + bias, x U^T + bias) of some rows and the outputs of a panel of G and one of U.
    void multiply(Rows<T>& rows, const Gate& gate, size_t first, size_t count, const Panel& panel, const Panel& up_panel, T* out,
                  size_t stride, bool is_large) {
        auto& [gates, ups] = sums[BESIDE && (is_second = !is_second)];
        {
            const BesideTiles beside([&] { gate_some(GATED_BESIDE_TILES); });
            rows.multiply(first, count, panel, gates);
            rows.multiply(first, count, up_panel, ups);
        }
        gate_some(left.count);
        left = {gates, ups, gate, (size_t)panel.columns, count, out, stride, is_large};
        if (!BESIDE) gate_some(count);
    }
};
