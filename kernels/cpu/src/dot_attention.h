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

// Numbers of 4 bytes, as many as fill lines of the cache, across two of which no vector or tile lies then.
class LineMemory {
  public:
    void resize(int64_t count) { lines_.resize(static_cast<size_t>(count / LANES)); }
    int32_t* data() { return lines_.front().numbers; }
    const int32_t* data() const { return lines_.front().numbers; }

  private:
    struct alignas(64) Line {
        int32_t numbers[LANES];
    };
    std::vector<Line> lines_;
};

class DotProducts {
  public:
    using Number = baton::Bfloat16;
    static constexpr int KEYS = 128;       // of which K and V stay in the smallest cache, with 64 numbers each
    static constexpr int ROWS = FLOAT_ROWS;
    static constexpr bool HAS_ANY_ROWS = false;
    static constexpr float UNIT = 0.6931471806f;  // scores are doublings
    using Keys = Tile<Number, KEYS>;

    void prepare(const baton::HeadAttention& work) {
        const int64_t units = work.size / 2;
        q_.resize(work.rows * units);
        spare_.resize(FLOAT_ROWS * units);
        for (int64_t row = 0; row < work.rows; row += FLOAT_ROWS) {
            const int64_t count = work.rows - row < FLOAT_ROWS ? work.rows - row : FLOAT_ROWS;
            for (int64_t r = 0; r < count; ++r) round_query(work, row + r, spare_.data() + r * units);
            interleave({reinterpret_cast<const uint32_t*>(spare_.data()), count, units,
                        reinterpret_cast<uint32_t*>(q_.data() + row * units)});
        }
        keys_.resize(units * KEYS);
        values_.resize(units * KEYS);
    }

    // Fetches the tile's values, and then the next one's keys.
    void lay_out(const baton::HeadAttention& work, const Keys& tile, const Keys& next) {
        const int64_t size = work.size, units = size / 2, end = baton::rounded_up(tile.count, PART);
        for (int64_t key = 0; key < end; key += LANES)
            for (int64_t unit = 0; unit < units; unit += LANES) {
                Floats lines[LANES];
                for (int i = 0; i < LANES; ++i) {
                    lines[i] = load(reinterpret_cast<const float*>(tile.keys[key + i]) + unit);
                    fetch(tile.values[key + i] + 2 * unit);
                }
                transpose(lines);
                float* const to = reinterpret_cast<float*>(keys_.data()) + key / PART * PART * units + unit * PART + key % PART;
                for (int i = 0; i < LANES; ++i) store(to + i * PART, lines[i]);
            }
        int32_t* to = values_.data();
        for (int64_t key = 0; key < end; key += 2)
            for (int64_t d = 0; d < size; d += DOT_SIZE, to += 2 * LANES) {
                const Ints first = _mm512_loadu_si512(tile.values[key] + d), second = _mm512_loadu_si512(tile.values[key + 1] + d);
                fetch(next.keys[key] + d);
                fetch(next.keys[key + 1] + d);
                store(to, _mm512_permutex2var_epi16(first, pairs_from(0), second));
                store(to + LANES, _mm512_permutex2var_epi16(first, pairs_from(LANES), second));
            }
    }

    // 2 to the power of x, for x of at most 0, as near as numbers of bfloat16 need it: that of the fraction is a polynomial with an
    // error of 3e-6. What is far below becomes 0, and a NaN stays one.
    static Floats weights_of(Floats x) {
        const Floats fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        Floats sum = all(1.34266936e-2f);
        sum = fma(sum, fraction, all(5.22424582e-2f));
        sum = fma(sum, fraction, all(2.41280213e-1f));
        sum = fma(sum, fraction, all(6.93044844e-1f));
        return _mm512_scalef_ps(fma(sum, fraction, all(1.0f)), x);  // by the whole number below x
    }

    // Of the keys in `parts`: (ROWS, KEYS).
    template <int COUNT>
    void score(int64_t row, int, int64_t size, const Span& parts, float* scores) const {
        const int64_t units = size / 2;
        for (int64_t key = parts.from; key < parts.end; key += PART) {
            const int32_t *q = q_.data() + row * units, *numbers = keys_.data() + key * units;
            Floats sums[COUNT][VECTORS];
            for (auto& own : sums)
                for (auto& sum : own) sum = none();
            for (int64_t unit = 0; unit < units; ++unit, q += COUNT, numbers += PART) add_pairs<1>(sums, numbers, q);
            for (int r = 0; r < COUNT; ++r)
                for (int v = 0; v < VECTORS; ++v) store(scores + r * KEYS + key + v * LANES, sums[r][v]);
        }
    }

    template <int COUNT>
    void add(const Keys&, const Keys&, const Span& seen, int, int64_t size, const float* weights, const float* factors, float* sums) const {
        alignas(64) int32_t rounded[COUNT * KEYS / 2];
        round_weights(COUNT, seen.in_parts<KEYS>(), weights, rounded);
        for (int64_t d = 0; d < size; d += VECTORS * LANES) {
            Floats kept[COUNT][VECTORS];
            for (int r = 0; r < COUNT; ++r)
                for (int v = 0; v < VECTORS; ++v) kept[r][v] = times(load(sums + r * size + d + v * LANES), all(factors[r]));
            for (int64_t pair = seen.from / 2; pair < (seen.end + 1) / 2; ++pair)
                add_pairs<KEYS / 2>(kept, values_.data() + pair * size + d, rounded + pair);
            for (int r = 0; r < COUNT; ++r)
                for (int v = 0; v < VECTORS; ++v) store(sums + r * size + d + v * LANES, kept[r][v]);
        }
    }

  protected:
    // A row's query times the scale, in its order.
    static void round_query(const baton::HeadAttention& work, int64_t row, int32_t* to) {
        const Floats scale = all(work.scale / UNIT);
        const float* q = work.q[row];
        for (int64_t d = 0; d < work.size; d += DOT_SIZE)
            store_rounded(to + d / 2, times(load(q + d), scale), times(load(q + d + LANES), scale));
    }

    static void round_weights(int rows, const Span& parts, const float* weights, int32_t* to) {
        for (int r = 0; r < rows; ++r)
            for (int64_t i = r * KEYS + parts.from; i < r * KEYS + parts.end; i += 2 * LANES)
                store_rounded(to + i / 2, load(weights + i), load(weights + i + LANES));
    }

    LineMemory q_;       // blocks of rows, (size / 2, rows) of pairs each, scaled
    LineMemory keys_;    // (KEYS / PART, size / 2, PART) of pairs
    LineMemory values_;  // (KEYS / 2, size) of pairs

  private:
    static constexpr int VECTORS = 2;
    static_assert(PART == VECTORS * LANES && DOT_SIZE == VECTORS * LANES);

    // The numbers of two vectors, in their order.
    static void store_rounded(int32_t* to, Floats first, Floats second) {
        store(to, reinterpret_cast<Ints>(_mm512_cvtne2ps_pbh(second, first)));
    }

    // Which of 2 * 32 numbers lie in pairs of one of each, from the `first`-th pair on.
    static Ints pairs_from(int first) {
        const Ints numbers = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), all(first));
        return _mm512_or_si512(numbers, _mm512_slli_epi32(_mm512_add_epi32(numbers, all(2 * LANES)), 16));
    }

    // Row r's pair is x[r * STRIDE].
    template <int STRIDE, int ROWS>
    static void add_pairs(Floats (&sums)[ROWS][VECTORS], const int32_t* numbers, const int32_t* x) {
        __m512bh pairs[VECTORS];
        for (int v = 0; v < VECTORS; ++v) pairs[v] = load_pairs(numbers + v * LANES);
        for (int r = 0; r < ROWS; ++r) {
            const __m512bh one = all_pairs(x[r * STRIDE]);
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], one, pairs[v]);
        }
    }

    LineMemory spare_;  // queries of a block
};

}  // namespace
