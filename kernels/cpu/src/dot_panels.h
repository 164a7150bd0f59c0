// Products of rows and panels of bfloat16, added up in float32 by the processor's own instruction. To be included behind vectors.
#pragma once
#include "tiles.h"

namespace {

inline __m512bh load_pairs(const void* at) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(at)); }
inline __m512bh all_pairs(int32_t pair) { return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)); }

struct DotPanels {
    template <int ROWS>
    static void multiply(const baton::PanelProduct& work) {
        constexpr int VECTORS = baton::PANEL / LANES;
        Ahead ahead(work, (work.inputs + 1) / 2);
        Floats sums[ROWS][VECTORS];
        read_tile(work, 0, sums);
        const auto* x = static_cast<const int32_t*>(work.x);
        const uint8_t* w = work.numbers;
        for (int64_t k = 0; k < work.inputs; k += 2, w += baton::PANEL * 4, x += ROWS) {
            prefetch(w);
            prefetch(w + 64);
            ahead.fetch();
            __m512bh pairs[VECTORS];
            for (int v = 0; v < VECTORS; ++v) pairs[v] = load_pairs(w + v * LANES * 4);
            for (int row = 0; row < ROWS; ++row) {
                const __m512bh one = all_pairs(x[row]);
                for (int v = 0; v < VECTORS; ++v) sums[row][v] = _mm512_dpbf16_ps(sums[row][v], one, pairs[v]);
            }
        }
        write_tile(work, 0, sums);
    }
};

inline void round_to_bfloat16(const float* x, int64_t inputs, uint16_t* out) {
    for (int64_t k = 0; k < inputs; k += LANES) {
        const __mmask16 some = first_lanes(inputs - k);
        const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, x + k));
        _mm256_mask_storeu_epi16(out + k, some, reinterpret_cast<__m256i>(rounded));
    }
}

inline int64_t spin_dots(int64_t rounds) {
    __m512bh one = all_pairs(0x3f803f80);
    Floats sums[SPINNING];
    for (auto& sum : sums) sum = none();
    for (int64_t i = 0; i < rounds; ++i) {
        asm volatile("" : "+v"(one));
        for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, one, one);
    }
    for (auto& sum : sums) asm volatile("" : : "v"(sum));
    return rounds * SPINNING * LANES * 2;
}

}  // namespace
