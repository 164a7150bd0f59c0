// Attention to one KV head in tiles of keys, with an online softmax (Milakov and Gimelshein, 2018). To be included behind vectors.
// What multiplies is `Products`: `float_attention.h` has those of float32, `dot_attention.h` those of bfloat16.
//
// Tiles begin at multiples of TILE, whatever the blocks of the pool, and a row's sums are made in the order of the keys: its result
// has the same bits whatever other rows come with it. A tile that a row does not see changes no bit of it.
#pragma once
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "kernels.h"

namespace {

constexpr int TILE = 32;  // keys: with 64 numbers each, K as it lies and side by side and V stay in the smallest cache
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// e to the power of x, for x of at most 0; below -87 it is 0. Cephes' polynomial (Moshier, 1992).
inline Floats exp_of(Floats x) {
    const Floats least = all(-87.0f);
    // In this order a NaN stays one.
    const Floats within = larger(least, x);
    const Floats power = nearest(times(within, all(1.44269504f)));
    Floats rest = minus_product(within, power, all(0.693359375f));
    rest = minus_product(rest, power, all(-2.12194440e-4f));
    Floats sum = all(1.9875691500e-4f);
    sum = fma(sum, rest, all(1.3981999507e-3f));
    sum = fma(sum, rest, all(8.3334519073e-3f));
    sum = fma(sum, rest, all(4.1665795894e-2f));
    sum = fma(sum, rest, all(1.6666665459e-1f));
    sum = fma(sum, rest, all(5.0000001201e-1f));
    sum = plus(fma(times(rest, rest), sum, rest), all(1.0f));
    return zero_below(times_power(sum, power), x, least);
}

inline float exp_of(float x) {
    float each[LANES];
    store(each, exp_of(all(x)));
    return each[0];
}

// cap * tanh(x / cap), by the exponential of what is not above 0.
inline Floats capped(Floats x, float cap) {
    const Floats magnitude = larger(x, less(none(), x));
    const Floats small = exp_of(times(magnitude, all(-2.0f / cap)));
    return with_sign(times(all(cap), over(less(all(1.0f), small), plus(all(1.0f), small))), x);
}

// A tile's lines are fetched while others are computed with: they are in no order that a processor foresees. Into the second
// cache, since the first has no room for two tiles.
inline void fetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T1); }

// Where the tokens of a tile lie; behind the last one, where that does.
template <class Number>
struct Tile {
    const Number* keys[TILE];
    const Number* values[TILE];
    float key_scales[TILE];
    float value_scales[TILE];
    int64_t first, count;

    // The tokens from `first` on, as many as are before `end`.
    Tile(const baton::HeadAttention& work, int64_t first, int64_t end)
        : first(first), count(end - first < TILE ? end - first : TILE) {
        for (int64_t i = 0; i < TILE; ++i) {
            const int64_t token = first + (i < count ? i : count - 1);
            const int64_t block = work.table[token / work.block_size], place = token % work.block_size;
            const auto* at = work.kv + block * work.block_bytes + place * work.size * int64_t{sizeof(Number)};
            keys[i] = reinterpret_cast<const Number*>(at);
            values[i] = reinterpret_cast<const Number*>(at + work.values_at);
            if (work.scales == nullptr) continue;
            const float* scale = work.scales + block * work.block_scales + place;
            key_scales[i] = *scale;
            value_scales[i] = scale[work.value_scales_at];
        }
    }
};

template <class Products>
using TileOf = Tile<typename Products::Number>;

// What a row has seen so far: the largest score, the sum of weights and of weighted values relative to it.
struct Seen {
    float largest;
    float total[LANES];
};

// Masks a row's scores, of which [from, end) are seen, and returns the largest so far.
inline float mask(float* scores, int64_t from, int64_t end, float soft_cap, float largest) {
    if (soft_cap > 0)
        for (int i = 0; i < TILE; i += LANES) store(scores + i, capped(load(scores + i), soft_cap));
    for (int64_t i = 0; i < from; ++i) scores[i] = NOTHING;
    for (int64_t i = end; i < TILE; ++i) scores[i] = NOTHING;
    Floats largest_of = all(largest);
    for (int i = 0; i < TILE; i += LANES) largest_of = larger(load(scores + i), largest_of);
    return largest_lane(largest_of);
}

// Makes weights of a row's masked scores; `factor` is that of what was added up before.
template <class Products>
inline void weigh(float* scores, float factor, Seen& seen) {
    const Floats base = all(seen.largest);
    Floats total = times(load(seen.total), all(factor));
    for (int i = 0; i < TILE; i += LANES) {
        const Floats weight = Products::weights_of(less(load(scores + i), base));
        total = plus(total, weight);
        store(scores + i, weight);
    }
    store(seen.total, total);
}

// The first and the last but one of the tile's keys that a position sees.
struct Span {
    int64_t from, end;

    Span(const baton::HeadAttention& work, int64_t position, int64_t first, int64_t count) {
        const int64_t earliest = work.window > 0 ? position - work.window + 1 : 0;
        end = position + 1 - first < count ? position + 1 - first : count;
        from = earliest > first ? earliest - first : 0;
    }

    bool is_empty() const { return from >= end; }
};

// A task's sums and softmax, over the products that its K and V are multiplied by.
template <class Products>
struct Attending {
    Products products;
    std::vector<float> sums;         // (rows, size)
    std::vector<Seen> seen;          // (rows,)
    std::vector<int64_t> positions;  // (rows,)

    void prepare(const baton::HeadAttention& work) {
        positions.clear();
        for (int64_t row = 0; row < work.rows; ++row) positions.push_back(work.first_position + row / work.repeats);
        products.prepare(work);
        sums.assign(work.rows * work.size, 0.0f);
        seen.assign(work.rows, Seen{NOTHING, {}});
    }
};

template <class Products, int ROWS>
void add_tile(const baton::HeadAttention& work, const TileOf<Products>& tile, const TileOf<Products>& next, Attending<Products>& attending,
              int64_t row) {
    const Span early(work, attending.positions[row], tile.first, tile.count);
    const Span late(work, attending.positions[row + ROWS - 1], tile.first, tile.count);
    if (early.from >= late.end) return;
    constexpr int ROUNDED_UP = (ROWS + LANES - 1) / LANES * LANES;
    float scores[ROWS * TILE], factors[ROUNDED_UP] = {};
    attending.products.template score<ROWS>(row, work.size, scores);
    // Rows wait for the largest of their scores, and for its exponential: all rows of a block do so at once.
    bool sees[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        const Span span(work, attending.positions[row + r], tile.first, tile.count);
        Seen& seen = attending.seen[row + r];
        sees[r] = !span.is_empty();
        if (!sees[r]) continue;
        const float most = mask(scores + r * TILE, span.from, span.end, work.soft_cap, seen.largest);
        factors[r] = seen.largest - most;
        seen.largest = most;
    }
    for (int r = 0; r < ROUNDED_UP; r += LANES) store(factors + r, exp_of(load(factors + r)));
    for (int r = 0; r < ROWS; ++r) {
        float* own = scores + r * TILE;
        if (!sees[r]) {
            for (int i = 0; i < TILE; ++i) own[i] = 0.0f;
            continue;
        }
        weigh<Products>(own, factors[r], attending.seen[row + r]);
        if (work.scales != nullptr)
            for (int i = 0; i < TILE; ++i) own[i] *= tile.value_scales[i];
    }
    float* own = attending.sums.data() + row * work.size;
    attending.products.template add<ROWS>(tile, next, early.from, late.end, work.size, scores, factors, own);
}

// `add_tile` for the rows from `row` on, as many as a block has at the most.
template <class Products, int MOST>
void add_tile_to_some(const baton::HeadAttention& work, const TileOf<Products>& tile, const TileOf<Products>& next,
                      Attending<Products>& attending, int64_t row) {
    if constexpr (MOST > 1) {
        if (work.rows - row < MOST) return add_tile_to_some<Products, MOST - 1>(work, tile, next, attending, row);
    }
    add_tile<Products, MOST>(work, tile, next, attending, row);
}

inline void write_row(const baton::HeadAttention& work, int64_t row, Seen& seen, const float* sums) {
    float total = 0, factor = 1;
    for (float one : seen.total) total += one;
    if (work.sinks != nullptr) {
        const float sink = *work.sinks[row];
        const float most = sink > seen.largest ? sink : seen.largest;
        factor = exp_of(seen.largest - most);
        total = total * factor + exp_of(sink - most);
    }
    const Floats scale = all(factor / total);
    for (int64_t d = 0; d < work.size; d += LANES) store(work.out[row] + d, times(load(sums + row * work.size + d), scale));
}

template <class Products>
void attend(const baton::HeadAttention& work) {
    static thread_local Attending<Products> of_thread;
    Attending<Products>* at = &of_thread;
    asm volatile("" : "+r"(at));  // the compiler would look it up for each row
    Attending<Products>& attending = *at;
    attending.prepare(work);
    const int64_t end = work.first_position + (work.rows - 1) / work.repeats + 1;
    const int64_t unseen = work.window > 0 ? work.first_position - work.window + 1 : 0;
    int64_t first = unseen > 0 ? unseen / TILE * TILE : 0;
    TileOf<Products> tile(work, first, end);
    for (; first < end; first += TILE) {
        const TileOf<Products> next = first + TILE < end ? TileOf<Products>(work, first + TILE, end) : tile;
        attending.products.lay_out(work, tile, next);
        for (int64_t row = 0; row < work.rows; row += FLOAT_ROWS)
            add_tile_to_some<Products, FLOAT_ROWS>(work, tile, next, attending, row);
        tile = next;
    }
    for (int64_t row = 0; row < work.rows; ++row) write_row(work, row, attending.seen[row], attending.sums.data());
}

}  // namespace
