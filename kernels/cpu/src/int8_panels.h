// Products of rows and panels of 8 bits, exact in 32; a scale for each row and for each output. To be included behind vectors.
#pragma once
#include "tiles.h"

namespace {

struct Int8Panels {
    template <int ROWS>
    static void multiply(const baton::PanelProduct& work) {
        constexpr int VECTORS = int8_vectors(ROWS);
        const auto* x = static_cast<const int32_t*>(work.x);
        const int64_t steps = work.layout->padded_inputs() / 4;
        int32_t sums_of[ROWS * baton::PANEL];
        for (int first = 0; first < baton::PANEL; first += VECTORS * LANES) {
            const uint8_t* w = work.panel + first * 4;
            Ints sums[ROWS][VECTORS];
            for (auto& row : sums)
                for (auto& sum : row) sum = no_ints();
            for (int64_t k = 0; k < steps; ++k, w += baton::PANEL * 4) {
                prefetch(w);
                prefetch(w + 64);
                Bytes weights[VECTORS];
                for (int v = 0; v < VECTORS; ++v) weights[v] = load_weights(w + v * LANES * 4);
                for (int row = 0; row < ROWS; ++row) {
                    const Ints four = all(x[k * ROWS + row]);
                    for (int v = 0; v < VECTORS; ++v) sums[row][v] = dot_bytes(sums[row][v], weights[v], four);
                }
            }
            for (int row = 0; row < ROWS; ++row)
                for (int v = 0; v < VECTORS; ++v)
                    store(sums_of + row * baton::PANEL + first + v * LANES, sums[row][v]);
        }
        write_scaled(work, sums_of);
    }

  private:
    static void write_scaled(const baton::PanelProduct& work, const int32_t* sums) {
        const auto* scales = reinterpret_cast<const float*>(work.panel + work.layout->scales_at());
        float tile[INT8_ROWS * baton::PANEL];
        for (int64_t row = 0; row < work.rows; ++row) {
            const auto offset = static_cast<int32_t>(OFFSET * work.x_sums[row]);
            for (int64_t n = 0; n < baton::PANEL; ++n) {
                const int64_t at = row * baton::PANEL + n;
                tile[at] = static_cast<float>(sums[at] - offset) * (work.x_scales[row] * scales[n]);
            }
        }
        write_tile(work, tile);
    }
};

}  // namespace
