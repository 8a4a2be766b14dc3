// The product of some rows of an input and panels of any format: each format takes rows as floats (float_product.h), or rounded
// (quantized_product.h).
#pragma once
#include "float_product.h"

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

// out [count][stride] = gated(x G^T + bias, x U^T + bias) of some rows and the outputs of a panel of G and one of U.
template <class T>
static void multiply_gated(Rows<T>& rows, const Gate& gate, size_t first, size_t count, const Panel& panel, const Panel& up_panel, T* out,
                           size_t stride, bool is_large) {
    alignas(64) float gates[MOST_ROW_BLOCK<T>][PANEL], ups[MOST_ROW_BLOCK<T>][PANEL];
    rows.multiply(first, count, panel, gates);
    rows.multiply(first, count, up_panel, ups);
    if (gate.bias) {
        add_bias(gates, count, gate.bias, panel.columns);
        add_bias(ups, count, gate.up_bias, panel.columns);
    }
    with_activation(gate.activation, [&]<Activation ACTIVATION>() {
        gate_pairs<ACTIVATION>(gates[0], ups[0], count * PANEL, gates[0]);
    });
    store_panel(out, stride, count, panel.columns, is_large, [&](size_t m, int v) { return load<Floats>(gates[m] + v * LANES); });
}
