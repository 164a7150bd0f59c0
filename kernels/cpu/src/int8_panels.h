// Products of rows and panels of 8 bits: exact within a group of inputs, in float32 over groups. To be included behind vectors.
#pragma once
#include "tiles.h"

namespace {

struct Int8Panels {
    template <int ROWS>
    static void multiply(const baton::PanelProduct& work) {
        constexpr int VECTORS = int8_vectors(ROWS);
        float tile[ROWS * baton::PANEL];
        for (int first = 0; first < baton::PANEL; first += VECTORS * LANES) {
            float* totals = tile + first;
            if (work.layout->has_zeros)
                add_groups<ROWS, VECTORS, true>(work, first, totals);
            else
                add_groups<ROWS, VECTORS, false>(work, first, totals);
            for (int row = 0; row < ROWS; ++row)
                for (int v = 0; v < VECTORS; ++v) {
                    float* total = totals + row * baton::PANEL + v * LANES;
                    store(total, times(load(total), all(work.x_scales[row])));
                }
        }
        write_tile(work, tile);
    }

  private:
    // Totals over groups are in memory: sums within a group need the registers.
    template <int ROWS, int VECTORS, bool HAS_ZEROS>
    static void add_groups(const baton::PanelProduct& work, int first, float* totals) {
        const auto* x = static_cast<const int32_t*>(work.x);
        const baton::Layout& layout = *work.layout;
        const auto* zeros = reinterpret_cast<const baton::Float16*>(work.panel + layout.zeros_at()) + first;
        const uint8_t* w = work.panel + first * 4;
        const int64_t groups = layout.num_groups(), steps = layout.group / 4;
        for (int row = 0; row < ROWS; ++row)
            for (int v = 0; v < VECTORS; ++v) store(totals + row * baton::PANEL + v * LANES, none());
        for (int64_t group = 0; group < groups; ++group) {
            Ints sums[ROWS][VECTORS];
            for (auto& row : sums)
                for (auto& sum : row) sum = no_ints();
            for (int64_t k = 0; k < steps; ++k, w += baton::PANEL * 4, x += ROWS) {
                prefetch(w);
                prefetch(w + 64);
                Bytes weights[VECTORS];
                for (int v = 0; v < VECTORS; ++v) weights[v] = load_weights(w + v * LANES * 4);
                for (int row = 0; row < ROWS; ++row) {
                    const Ints four = all(x[row]);
                    for (int v = 0; v < VECTORS; ++v) sums[row][v] = dot_bytes(sums[row][v], weights[v], four);
                }
            }
            const float* x_sums = work.x_sums + group * ROWS;
            for (int v = 0; v < VECTORS; ++v) {
                const Floats scale = load_scales(work, group * baton::PANEL + first + v * LANES);
                const Floats zero = HAS_ZEROS ? load(zeros + group * baton::PANEL + v * LANES) : none();
                for (int row = 0; row < ROWS; ++row) {
                    float* at = totals + row * baton::PANEL + v * LANES;
                    // Whole numbers: 128 times a sum of many inputs has no room in a float.
                    const Ints sum = minus(sums[row][v], all(OFFSET * static_cast<int32_t>(x_sums[row])));
                    Floats total = fma(to_floats(sum), scale, load(at));
                    if (HAS_ZEROS) total = minus_product(total, all(x_sums[row]), times(scale, zero));
                    store(at, total);
                }
            }
        }
    }
};

}  // namespace
