// What products by panels have in common: a tile of sums that is written out, and a choice by the number of rows.
#pragma once
#include "kernels.h"

namespace {

// Bytes ahead of what is multiplied: a few lines more than what a core fetches by itself.
constexpr int AHEAD = 1024;

// Sums in registers that do not wait for each other: enough for two products begun at once that take five cycles each.
constexpr int SPINNING = 12;

inline void prefetch(const void* at) {
    _mm_prefetch(static_cast<const char*>(at) + AHEAD, _MM_HINT_T0);
}

// The scales of LANES outputs, from the `number`-th of the panel on.
inline Floats load_scales(const baton::PanelProduct& work, int64_t number) {
    const uint8_t* scales = work.panel + work.layout->scales_at();
    switch (work.layout->scales) {
        case baton::Format::f32: return load(reinterpret_cast<const float*>(scales) + number);
        case baton::Format::bf16: return load(reinterpret_cast<const baton::Bfloat16*>(scales) + number);
        default: return load(reinterpret_cast<const baton::Float16*>(scales) + number);
    }
}

// What the sums of a tile begin with.
inline void read_tile(const baton::PanelProduct& work, float* tile) {
    for (int64_t row = 0; row < work.rows; ++row)
        for (int64_t n = 0; n < baton::PANEL; ++n)
            tile[row * baton::PANEL + n] = work.goes_on && n < work.columns ? work.out[row * work.stride + n] : 0.0f;
}

inline void write_tile(const baton::PanelProduct& work, const float* tile) {
    for (int64_t row = 0; row < work.rows; ++row) {
        float* out = work.out + row * work.stride;
        const float* sums = tile + row * baton::PANEL;
        if (work.bias == nullptr)
            for (int64_t n = 0; n < work.columns; ++n) out[n] = sums[n];
        else
            for (int64_t n = 0; n < work.columns; ++n) out[n] = sums[n] + work.bias[n];
    }
}

// `Panels::multiply<ROWS>` for work.rows, which are at most MOST.
template <class Panels, int MOST>
void by_rows(const baton::PanelProduct& work) {
    if constexpr (MOST > 1) {
        if (work.rows < MOST) return by_rows<Panels, MOST - 1>(work);
    }
    Panels::template multiply<MOST>(work);
}

}  // namespace
