// Products with panels of floats, made float32 in registers and added up in float32. To be included behind vectors.
#pragma once
#include "tiles.h"

namespace {

// The inputs of an output that lie side by side.
template <class Number>
constexpr int SIDE = 1;
template <>
constexpr int SIDE<baton::Bfloat16> = 2;

// The `number`-th of each lane's inputs.
template <int number, class Number>
inline Floats load_input(const Number* at) {
    if constexpr (SIDE<Number> == 1)
        return load(at);
    else
        return number == 0 ? load_first_of_pairs(at) : load_second_of_pairs(at);
}

// One input more: numbers[number] of each output times x (ROWS,).
template <int number, class Number, int ROWS, int VECTORS>
inline void add_input(Floats (&sums)[ROWS][VECTORS], const Number* w, const float* x) {
    Floats numbers[VECTORS];
    for (int v = 0; v < VECTORS; ++v) numbers[v] = load_input<number>(w + v * LANES * SIDE<Number>);
    for (int row = 0; row < ROWS; ++row) {
        const Floats one = all(x[row]);
        for (int v = 0; v < VECTORS; ++v) sums[row][v] = fma(one, numbers[v], sums[row][v]);
    }
}

template <class Number>
struct FloatPanels {
    template <int ROWS>
    static void multiply(const baton::PanelProduct& work) {
        constexpr int VECTORS = float_vectors(ROWS), COLUMNS = VECTORS * LANES, STEP = baton::PANEL * SIDE<Number>;
        for (int first = 0; first < baton::PANEL; first += COLUMNS) {
            const auto* x = static_cast<const float*>(work.x);
            const auto* w = reinterpret_cast<const Number*>(work.numbers) + first * SIDE<Number>;
            Floats sums[ROWS][VECTORS];
            read_tile(work, first, sums);
            Ahead ahead(work, work.inputs / SIDE<Number>);
            int64_t k = 0;
            for (; k + SIDE<Number> <= work.inputs; k += SIDE<Number>, w += STEP, x += ROWS * SIDE<Number>) {
                for (int at = 0; at < STEP; at += 64 / static_cast<int>(sizeof(Number))) prefetch(w + at);
                ahead.fetch();
                add_input<0>(sums, w, x);
                if constexpr (SIDE<Number> == 2) add_input<1>(sums, w, x + ROWS);
            }
            if (k < work.inputs) add_input<0>(sums, w, x);
            write_tile(work, first, sums);
        }
    }
};

}  // namespace
