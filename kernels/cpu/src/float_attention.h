// Attention's products in float32: a tile's keys are made floats, side by side, and its values are read where they lie. To be included
// behind vectors.
#pragma once
#include "attention_head.h"

namespace {

constexpr int TILE = PART;  // keys: with 64 numbers each, K as it lies and side by side and V stay in the smallest cache
template <class Number>
using FloatTile = Tile<Number, TILE>;

// (size, TILE): the keys of a tile, side by side; behind the last one it is repeated. Fetches the values.
template <class Number>
void put_side_by_side(const baton::HeadAttention& work, const FloatTile<Number>& tile, float* to) {
    for (int64_t key = 0; key < TILE; key += LANES)
        for (int64_t d = 0; d < work.size; d += LANES) {
            Floats lines[LANES];
            for (int i = 0; i < LANES; ++i) {
                lines[i] = load(tile.keys[key + i] + d);
                fetch(tile.values[key + i] + d);
            }
            if (work.scales != nullptr)
                for (int i = 0; i < LANES; ++i) lines[i] = times(lines[i], all(tile.key_scales[key + i]));
            transpose(lines);
            for (int i = 0; i < LANES; ++i) store(to + (d + i) * TILE + key, lines[i]);
        }
}

template <int ROWS>
void float_scores(const float* q, int64_t size, const float* keys, float* scores) {
    constexpr int VECTORS = float_vectors(ROWS);
    for (int first = 0; first < TILE; first += VECTORS * LANES) {
        Floats sums[ROWS][VECTORS];
        for (auto& row : sums)
            for (auto& sum : row) sum = none();
        for (int64_t d = 0; d < size; ++d) {
            Floats numbers[VECTORS];
            for (int v = 0; v < VECTORS; ++v) numbers[v] = load(keys + d * TILE + first + v * LANES);
            for (int row = 0; row < ROWS; ++row) {
                const Floats one = all(q[row * size + d]);
                for (int v = 0; v < VECTORS; ++v) sums[row][v] = fma(one, numbers[v], sums[row][v]);
            }
        }
        for (int row = 0; row < ROWS; ++row)
            for (int v = 0; v < VECTORS; ++v) store(scores + row * TILE + first + v * LANES, sums[row][v]);
    }
}

// sums = sums * factors + weights (ROWS, TILE) x values, over the tile's keys that some row sees. Fetches the next one's keys.
template <class Number, int ROWS, int VECTORS>
void add_values(const FloatTile<Number>& tile, const FloatTile<Number>& next, const Span& seen, int64_t d, int64_t size,
                const float* weights, const float* factors, float* sums) {
    Floats kept[ROWS][VECTORS];
    for (int row = 0; row < ROWS; ++row)
        for (int v = 0; v < VECTORS; ++v)
            kept[row][v] = times(load(sums + row * size + d + v * LANES), all(factors[row]));
    for (int64_t key = seen.from; key < seen.end; ++key) {
        Floats numbers[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
            numbers[v] = load(tile.values[key] + d + v * LANES);
            fetch(next.keys[key] + d + v * LANES);
        }
        for (int row = 0; row < ROWS; ++row) {
            const Floats weight = all(weights[row * TILE + key]);
            for (int v = 0; v < VECTORS; ++v) kept[row][v] = fma(weight, numbers[v], kept[row][v]);
        }
    }
    for (int row = 0; row < ROWS; ++row)
        for (int v = 0; v < VECTORS; ++v) store(sums + row * size + d + v * LANES, kept[row][v]);
}

template <class Kept>
class FloatProducts {
  public:
    using Number = Kept;
    static constexpr int KEYS = TILE, ROWS = FLOAT_ROWS;
    static constexpr bool HAS_ANY_ROWS = false;
    static constexpr float UNIT = 1.0f;

    void prepare(const baton::HeadAttention& work) {
        q_.resize(work.rows * work.size);
        keys_.resize(work.size * TILE);
        const Floats scale = all(work.scale);
        for (int64_t row = 0; row < work.rows; ++row)
            for (int64_t d = 0; d < work.size; d += LANES)
                store(q_.data() + row * work.size + d, times(load(work.q[row] + d), scale));
    }

    void lay_out(const baton::HeadAttention& work, const FloatTile<Number>& tile, const FloatTile<Number>&) {
        put_side_by_side(work, tile, keys_.data());
    }

    static Floats weights_of(Floats x) { return exp_of(x); }

    template <int COUNT>
    void score(int64_t row, int, int64_t size, const Span&, float* scores) const {
        float_scores<COUNT>(q_.data() + row * size, size, keys_.data(), scores);
    }

    template <int COUNT>
    void add(const FloatTile<Number>& tile, const FloatTile<Number>& next, const Span& seen, int, int64_t size, const float* weights,
             const float* factors, float* sums) const {
        int64_t d = 0;
        constexpr int VECTORS = float_vectors(COUNT);
        for (; d + VECTORS * LANES <= size; d += VECTORS * LANES)
            add_values<Number, COUNT, VECTORS>(tile, next, seen, d, size, weights, factors, sums);
        for (; d < size; d += LANES) add_values<Number, COUNT, 1>(tile, next, seen, d, size, weights, factors, sums);
    }

  private:
    std::vector<float> q_;     // (rows, size), scaled
    std::vector<float> keys_;  // (size, TILE)
};

}  // namespace
