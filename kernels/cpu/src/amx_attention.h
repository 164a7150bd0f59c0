// Attention's products by tiles, over K and V of bfloat16, as `dot_attention.h` lays them out. To be included behind vectors and the
// intrinsics of tiles.
//
// One row goes this way as many do: tiles add up in another order than vectors. Keys are multiplied 32 at a time, so that what a row
// does not see has a weight of 0 there.
#pragma once
#include <algorithm>

#include "amx_tiles.h"
#include "dot_attention.h"

namespace {

class TileProducts : public DotProducts {
  public:
    static constexpr int ROWS = baton::AMX_ROWS;
    static constexpr bool HAS_ANY_ROWS = true;

    void prepare(const baton::HeadAttention& work) {
        const int64_t units = work.size / 2;
        q_.resize(work.rows * units);
        for (int64_t row = 0; row < work.rows; ++row) round_query(work, row, q_.data() + row * units);
        keys_.resize(units * KEYS);
        values_.resize(units * KEYS);
    }

    // What lies before a window may be anything: it is made 0, which a weight of 0 multiplies to 0.
    void lay_out(const baton::HeadAttention& work, const Keys& tile, const Keys& next) {
        DotProducts::lay_out(work, tile, next);
        const int64_t unseen = work.window > 0 ? work.first_position - work.window + 1 - tile.first : 0;
        if (unseen > 1) std::fill_n(values_.data(), unseen / 2 * work.size, 0);
    }

    template <int>
    void score(int64_t row, int rows, int64_t size, const Span& parts, float* scores) const {
        const int64_t units = size / 2;
        for (int64_t key = parts.from; key < parts.end; key += PART)
            multiply_tiles<PairTiles>({bytes_of(q_, row * units), rows, 4 * units, bytes_of(keys_, key * units), 4 * PART,
                                       size / DOT_SIZE, TILE_BYTES, scores + key, 4 * KEYS, false, nullptr, 0});
    }

    template <int>
    void add(const Keys&, const Keys&, const Span& seen, int rows, int64_t size, const float* weights, const float* factors,
             float* sums) const {
        alignas(64) int32_t rounded[ROWS * KEYS / 2];
        const Span parts = seen.in_parts<KEYS>();
        round_weights(rows, parts, weights, rounded);
        for (int r = 0; r < rows; ++r)
            for (int64_t d = r * size; d < (r + 1) * size; d += LANES) store(sums + d, times(load(sums + d), all(factors[r])));
        keep_in_memory(rounded);
        const auto* const x = reinterpret_cast<const uint8_t*>(rounded + parts.from / 2);
        for (int64_t d = 0; d < size; d += PART)
            multiply_tiles<PairTiles>({x, rows, 2 * KEYS, bytes_of(values_, parts.from / 2 * size + d), 4 * size,
                                       (parts.end - parts.from) / PART, TILE_BYTES, sums + d, 4 * size, true, nullptr, 0});
    }

  private:
    static const uint8_t* bytes_of(const LineMemory& pairs, int64_t at) {
        return reinterpret_cast<const uint8_t*>(pairs.data() + at);
    }
};

void attend_by_tiles(const baton::HeadAttention& work) {
    attend<TileProducts>(work);
    release_tiles();
}

}  // namespace
