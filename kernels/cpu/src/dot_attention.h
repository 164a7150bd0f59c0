// Attention's products by the instruction for bfloat16, over K and V of it: queries and weights are rounded, and sums are float32. To
// be included behind vectors.
//
// A weight is 0 where a row does not see a key: that changes no bit of its sums, so that pairs of keys are the same for all rows.
#pragma once
#include "attention_head.h"
#include "dot_panels.h"

namespace {

// Numbers of a head, of which a size must be a multiple.
constexpr int DOT_SIZE = 2 * LANES;

class DotProducts {
  public:
    using Number = baton::Bfloat16;

    void prepare(const baton::HeadAttention& work) {
        q_.resize(work.rows * work.size / 2);
        keys_.resize(work.size / 2 * TILE);
        values_.resize(TILE / 2 * work.size);
        const Floats scale = all(work.scale);
        int32_t* to = q_.data();
        for (int64_t row = 0; row < work.rows; ++row)
            for (int64_t d = 0; d < work.size; d += DOT_SIZE, to += LANES)
                store_rounded(to, times(load(work.q[row] + d), scale), times(load(work.q[row] + d + LANES), scale));
    }

    // Fetches the tile's values, and then the next one's keys.
    void lay_out(const baton::HeadAttention& work, const Tile<Number>& tile, const Tile<Number>& next) {
        const int64_t size = work.size, units = size / 2;
        for (int64_t key = 0; key < TILE; key += LANES)
            for (int64_t unit = 0; unit < units; unit += LANES) {
                Floats lines[LANES];
                for (int i = 0; i < LANES; ++i) {
                    lines[i] = load(reinterpret_cast<const float*>(tile.keys[key + i]) + unit);
                    fetch(tile.values[key + i] + 2 * unit);
                }
                transpose(lines);
                for (int i = 0; i < LANES; ++i) store(reinterpret_cast<float*>(keys_.data() + (unit + i) * TILE + key), lines[i]);
            }
        int32_t* to = values_.data();
        for (int64_t key = 0; key < TILE; key += 2)
            for (int64_t d = 0; d < size; d += DOT_SIZE, to += 2 * LANES) {
                const Ints first = _mm512_loadu_si512(tile.values[key] + d), second = _mm512_loadu_si512(tile.values[key + 1] + d);
                fetch(next.keys[key] + d);
                fetch(next.keys[key + 1] + d);
                store(to, _mm512_permutex2var_epi16(first, pairs_from(0), second));
                store(to + LANES, _mm512_permutex2var_epi16(first, pairs_from(LANES), second));
            }
    }

    // e to the power of x, for x of at most 0, as near as numbers of bfloat16 need it: 2 to the power of the rest is a polynomial with
    // an error of 3e-6. What is far below becomes 0.
    static Floats weights_of(Floats x) {
        // In this order a NaN stays one.
        const Floats doublings = times(larger(all(-150.0f), x), all(1.44269504f));
        const Floats power = nearest(doublings), rest = less(doublings, power);
        Floats sum = all(9.60013e-3f);
        sum = fma(sum, rest, all(5.591516e-2f));
        sum = fma(sum, rest, all(2.4023715e-1f));
        sum = fma(sum, rest, all(6.931222e-1f));
        return times_power(fma(sum, rest, all(1.0f)), power);
    }

    template <int ROWS>
    void score(int64_t row, int64_t size, float* scores) const {
        const int64_t units = size / 2;
        const int32_t* q = q_.data() + row * units;
        Floats sums[ROWS][VECTORS];
        for (auto& own : sums)
            for (auto& sum : own) sum = none();
        for (int64_t unit = 0; unit < units; ++unit) add_pairs(sums, keys_.data() + unit * TILE, q + unit, units);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) store(scores + r * TILE + v * LANES, sums[r][v]);
    }

    template <int ROWS>
    void add(const Tile<Number>&, const Tile<Number>&, int64_t from, int64_t end, int64_t size, const float* weights,
             const float* factors, float* sums) const {
        alignas(64) int32_t rounded[ROWS * TILE / 2];
        for (int i = 0; i < ROWS * TILE; i += 2 * LANES) store_rounded(rounded + i / 2, load(weights + i), load(weights + i + LANES));
        for (int64_t d = 0; d < size; d += VECTORS * LANES) {
            Floats kept[ROWS][VECTORS];
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < VECTORS; ++v) kept[r][v] = times(load(sums + r * size + d + v * LANES), all(factors[r]));
            for (int64_t pair = from / 2; pair < (end + 1) / 2; ++pair)
                add_pairs(kept, values_.data() + pair * size + d, rounded + pair, TILE / 2);
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < VECTORS; ++v) store(sums + r * size + d + v * LANES, kept[r][v]);
        }
    }

  private:
    static constexpr int VECTORS = 2;
    static_assert(TILE == VECTORS * LANES && DOT_SIZE == VECTORS * LANES);

    // The numbers of two vectors, in their order.
    static void store_rounded(int32_t* to, Floats first, Floats second) {
        store(to, reinterpret_cast<Ints>(_mm512_cvtne2ps_pbh(second, first)));
    }

    // Which of 2 * 32 numbers lie in pairs of one of each, from the `first`-th pair on.
    static Ints pairs_from(int first) {
        const Ints numbers = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), all(first));
        return _mm512_or_si512(numbers, _mm512_slli_epi32(_mm512_add_epi32(numbers, all(2 * LANES)), 16));
    }

    // Row r's pair is x[r * stride].
    template <int ROWS>
    static void add_pairs(Floats (&sums)[ROWS][VECTORS], const int32_t* numbers, const int32_t* x, int64_t stride) {
        __m512bh pairs[VECTORS];
        for (int v = 0; v < VECTORS; ++v) pairs[v] = load_pairs(numbers + v * LANES);
        for (int r = 0; r < ROWS; ++r) {
            const __m512bh one = all_pairs(x[r * stride]);
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], one, pairs[v]);
        }
    }

    std::vector<int32_t> q_;       // (rows, size / 2) of pairs, scaled
    std::vector<int32_t> keys_;    // (size / 2, TILE) of pairs
    std::vector<int32_t> values_;  // (TILE / 2, size) of pairs
};

}  // namespace
