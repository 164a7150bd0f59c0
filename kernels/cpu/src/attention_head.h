// Attention to one KV head in tiles of keys, with an online softmax (Milakov and Gimelshein, 2018). To be included behind vectors.
// What multiplies is `Products`: `float_attention.h` has those of float32, `dot_attention.h` those of bfloat16, `amx_attention.h`
// those by tiles.
//
// Tiles begin at multiples of their size, whatever the blocks of the pool, and a row's sums are made in the order of the keys: its
// result has the same bits whatever other rows come with it. A tile that a row does not see changes no bit of it. What a block of rows
// sees of a tile is computed in parts, so that a large tile costs a short context nothing.
#pragma once
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "kernels.h"

namespace {

constexpr int PART = 32;  // keys
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
inline void fetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// Where the tokens of a tile lie; behind the last one, where that does.
template <class Number, int KEYS>
struct Tile {
    const Number* keys[KEYS];
    const Number* values[KEYS];
    float key_scales[KEYS];
    float value_scales[KEYS];
    int64_t first, count;

    // The tokens from `first` on, as many as are before `end`.
    Tile(const baton::HeadAttention& work, int64_t first, int64_t end)
        : first(first), count(end - first < KEYS ? end - first : KEYS) {
        const int64_t* block = work.table + first / work.block_size;
        int64_t place = first % work.block_size;
        for (int64_t i = 0; i < KEYS; ++i) {
            const auto* at = work.kv + *block * work.block_bytes + place * work.size * int64_t{sizeof(Number)};
            keys[i] = reinterpret_cast<const Number*>(at);
            values[i] = reinterpret_cast<const Number*>(at + work.values_at);
            if (work.scales != nullptr) {
                const float* scale = work.scales + *block * work.block_scales + place;
                key_scales[i] = *scale;
                value_scales[i] = scale[work.value_scales_at];
            }
            if (i + 1 < count && ++place == work.block_size) ++block, place = 0;
        }
    }
};

template <class Products>
using TileOf = Tile<typename Products::Number, Products::KEYS>;

// What a row has seen so far: the largest score, and the sum of weights relative to it.
struct Seen {
    float largest;
    float total[LANES];
};

// Keys of a tile: all from the first on that are before `end`.
struct Span {
    int64_t from, end;

    Span(int64_t from, int64_t end) : from(from), end(end) {}

    // Those that a position sees.
    Span(const baton::HeadAttention& work, int64_t position, int64_t first, int64_t count) {
        const int64_t earliest = work.window > 0 ? position - work.window + 1 : 0;
        const int64_t seen = (work.end > 0 ? work.end : position + 1) - first;
        end = seen < count ? seen : count;
        from = earliest > first ? earliest - first : 0;
    }

    bool is_empty() const { return from >= end; }

    // The parts of a tile of KEYS that have them.
    template <int KEYS>
    Span in_parts() const {
        return KEYS == PART ? Span(0, KEYS) : Span(from / PART * PART, baton::rounded_up(end, PART));
    }
};

// LANES scores from the `first`-th on; -inf for those that `seen` does not have.
inline Floats only_seen(Floats scores, int64_t first, const Span& seen) {
    if (seen.from <= first && first + LANES <= seen.end) return scores;
    uint32_t bits = (1u << LANES) - 1;
    if (seen.end < first + LANES) bits = seen.end > first ? bits >> (first + LANES - seen.end) : 0;
    if (seen.from > first) bits = seen.from < first + LANES ? bits >> (seen.from - first) << (seen.from - first) : 0;
    return with_bits(scores, bits);
}

// Masks a row's scores of `parts`, of which `seen` are seen, and returns the largest so far.
inline float mask(float* scores, const Span& parts, const Span& seen, float soft_cap, float largest) {
    Floats largest_of = all(largest);
    for (int64_t i = parts.from; i < parts.end; i += LANES) {
        Floats own = load(scores + i);
        if (soft_cap > 0) own = capped(own, soft_cap);
        own = only_seen(own, i, seen);
        store(scores + i, own);
        largest_of = larger(own, largest_of);
    }
    return largest_lane(largest_of);
}

// Makes weights of a row's masked scores; `factor` is that of what was added up before.
template <class Products>
inline void weigh(float* scores, const Span& parts, float factor, Seen& seen) {
    const Floats base = all(seen.largest);
    Floats total = times(load(seen.total), all(factor));
    for (int64_t i = parts.from; i < parts.end; i += LANES) {
        const Floats weight = Products::weights_of(less(load(scores + i), base));
        total = plus(total, weight);
        store(scores + i, weight);
    }
    store(seen.total, total);
}

// A task's sums and softmax, over the products that its K and V are multiplied by. These say how many keys a tile has, how many rows a
// block has at most, whether it may have fewer by their number as the program runs, and which unit scores have: e to the power of a
// score times it is the score's weight.
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
    const int rows = Products::HAS_ANY_ROWS && work.rows - row < ROWS ? static_cast<int>(work.rows - row) : ROWS;
    const Span early(work, attending.positions[row], tile.first, tile.count);
    const Span late(work, attending.positions[row + rows - 1], tile.first, tile.count);
    const Span seen_by_some(early.from, late.end);
    if (seen_by_some.is_empty()) return;
    constexpr int ROUNDED_UP = (ROWS + LANES - 1) / LANES * LANES, KEYS = Products::KEYS;
    const Span parts = seen_by_some.in_parts<KEYS>();
    alignas(64) float scores[ROWS * KEYS];
    float factors[ROUNDED_UP] = {};
    attending.products.template score<ROWS>(row, rows, work.size, parts, scores);
    // Rows wait for the largest of their scores, and for its exponential: all rows of a block do so at once.
    bool sees[ROWS];
    for (int r = 0; r < rows; ++r) {
        const Span span(work, attending.positions[row + r], tile.first, tile.count);
        Seen& seen = attending.seen[row + r];
        sees[r] = !span.is_empty();
        if (!sees[r]) continue;
        const float most = mask(scores + r * KEYS, parts, span, work.soft_cap / Products::UNIT, seen.largest);
        factors[r] = seen.largest - most;
        seen.largest = most;
    }
    for (int r = 0; r < ROUNDED_UP; r += LANES) store(factors + r, exp_of(times(load(factors + r), all(Products::UNIT))));
    for (int r = 0; r < rows; ++r) {
        float* own = scores + r * KEYS;
        if (!sees[r]) {
            for (int64_t i = parts.from; i < parts.end; ++i) own[i] = 0.0f;
            continue;
        }
        weigh<Products>(own, parts, factors[r], attending.seen[row + r]);
        if (work.scales != nullptr)
            for (int64_t i = parts.from; i < parts.end; ++i) own[i] *= tile.value_scales[i];
    }
    float* own = attending.sums.data() + row * work.size;
    attending.products.template add<ROWS>(tile, next, seen_by_some, rows, work.size, scores, factors, own);
}

// `add_tile` for the rows from `row` on, as many as a block has at the most.
template <class Products, int MOST>
void add_tile_to_some(const baton::HeadAttention& work, const TileOf<Products>& tile, const TileOf<Products>& next,
                      Attending<Products>& attending, int64_t row) {
    if constexpr (MOST > 1 && !Products::HAS_ANY_ROWS) {
        if (work.rows - row < MOST) return add_tile_to_some<Products, MOST - 1>(work, tile, next, attending, row);
    }
    add_tile<Products, MOST>(work, tile, next, attending, row);
}

// `largest`: of the row's scores.
inline void write_row(const baton::HeadAttention& work, int64_t row, const Seen& seen, float largest, const float* sums) {
    float total = 0, factor = 1;
    for (float one : seen.total) total += one;
    if (work.sinks != nullptr) {
        const float sink = *work.sinks[row];
        const float most = sink > largest ? sink : largest;
        factor = exp_of(largest - most);
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
    const int64_t end = work.end > 0 ? work.end : work.first_position + (work.rows - 1) / work.repeats + 1;
    const int64_t unseen = work.window > 0 ? work.first_position - work.window + 1 : 0;
    constexpr int KEYS = Products::KEYS;
    int64_t first = unseen > 0 ? unseen / KEYS * KEYS : 0;
    TileOf<Products> tile(work, first, end);
    for (; first < end; first += KEYS) {
        const TileOf<Products> next = first + KEYS < end ? TileOf<Products>(work, first + KEYS, end) : tile;
        attending.products.lay_out(work, tile, next);
        for (int64_t row = 0; row < work.rows; row += Products::ROWS)
            add_tile_to_some<Products, Products::ROWS>(work, tile, next, attending, row);
        tile = next;
    }
    for (int64_t row = 0; row < work.rows; ++row) {
        const Seen& seen = attending.seen[row];
        write_row(work, row, seen, seen.largest * Products::UNIT, attending.sums.data());
    }
}

}  // namespace
