// Products of rows of 8 bits and panels of 4: exact within a group of inputs, in float32 over groups. To be included behind vectors.
#pragma once
#include "tiles.h"

namespace {

struct Int4Panels {
    template <int ROWS>
    static void multiply(const baton::PanelProduct& work) {
        constexpr int VECTORS = int4_vectors(ROWS);
        float tile[ROWS * baton::PANEL];
        for (int first = 0; first < baton::PANEL; first += VECTORS * LANES) {
            Floats totals[ROWS][VECTORS];
            if (work.layout->has_zeros)
                add_groups<ROWS, VECTORS, true>(work, first, totals);
            else
                add_groups<ROWS, VECTORS, false>(work, first, totals);
            for (int row = 0; row < ROWS; ++row)
                for (int v = 0; v < VECTORS; ++v)
                    store(tile + row * baton::PANEL + first + v * LANES,
                          times(totals[row][v], all(work.x_scales[row])));
        }
        write_tile(work, tile);
    }

  private:
    template <int ROWS, int VECTORS, bool HAS_ZEROS>
    static void add_groups(const baton::PanelProduct& work, int first, Floats (&totals)[ROWS][VECTORS]) {
        const auto* x = static_cast<const int32_t*>(work.x);
        const baton::Layout& layout = *work.layout;
        const uint8_t* zeros = work.panel + layout.zeros_at() + first;
        const uint8_t* w = work.panel + first * 4;
        const int64_t groups = layout.num_groups(), steps = layout.group / 8;
        for (auto& row : totals)
            for (auto& total : row) total = none();
        for (int64_t group = 0; group < groups; ++group) {
            Ints sums[ROWS][VECTORS];
            for (auto& row : sums)
                for (auto& sum : row) sum = no_ints();
            for (int64_t k = 0; k < steps; ++k, w += baton::PANEL * 4, x += 2 * ROWS) {
                prefetch(w);
                prefetch(w + 64);
                for (int v = 0; v < VECTORS; ++v) {
                    const Ints weights = load_ints(w + v * LANES * 4);
                    const Ints low = low_halves(weights), high = high_halves(weights);
                    for (int row = 0; row < ROWS; ++row) {
                        sums[row][v] = dot_halves(sums[row][v], low, all(x[row]));
                        sums[row][v] = dot_halves(sums[row][v], high, all(x[ROWS + row]));
                    }
                }
            }
            for (int v = 0; v < VECTORS; ++v) {
                const Floats scale = load_scales(work, group * baton::PANEL + first + v * LANES);
                const Floats zero = HAS_ZEROS ? load_bytes(zeros + group * baton::PANEL + v * LANES) : all(8.0f);
                const Floats offset = times(scale, zero);
                for (int row = 0; row < ROWS; ++row) {
                    Floats& total = totals[row][v];
                    total = fma(to_floats(sums[row][v]), scale, total);
                    total = minus_product(total, all(work.x_sums[group * ROWS + row]), offset);
                }
            }
        }
    }
};

}  // namespace
