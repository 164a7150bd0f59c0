// Products with panels of floats, made float32 in registers and added up in float32. To be included behind vectors.
#pragma once
#include "tiles.h"

namespace {

template <class Number, int ROWS>
void multiply_floats(const baton::PanelProduct& work) {
    constexpr int VECTORS = float_vectors(ROWS);
    const auto* x = static_cast<const float*>(work.x);
    const int64_t inputs = work.layout->inputs;
    float tile[ROWS * baton::PANEL];
    for (int first = 0; first < baton::PANEL; first += VECTORS * LANES) {
        const Number* w = reinterpret_cast<const Number*>(work.panel) + first;
        Floats sums[ROWS][VECTORS];
        for (auto& row : sums)
            for (auto& sum : row) sum = none();
        for (int64_t k = 0; k < inputs; ++k, w += baton::PANEL) {
            prefetch(w);
            Floats numbers[VECTORS];
            for (int v = 0; v < VECTORS; ++v) numbers[v] = load(w + v * LANES);
            for (int row = 0; row < ROWS; ++row) {
                const Floats one = all(x[k * ROWS + row]);
                for (int v = 0; v < VECTORS; ++v) sums[row][v] = fma(one, numbers[v], sums[row][v]);
            }
        }
        for (int row = 0; row < ROWS; ++row)
            for (int v = 0; v < VECTORS; ++v)
                store(tile + row * baton::PANEL + first + v * LANES, sums[row][v]);
    }
    write_tile(work, tile);
}

template <class Number>
struct FloatPanels {
    template <int ROWS>
    static void multiply(const baton::PanelProduct& work) {
        multiply_floats<Number, ROWS>(work);
    }
};

}  // namespace
