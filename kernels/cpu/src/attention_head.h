// Attention to one KV head in tiles of keys, with an online softmax (Milakov and Gimelshein, 2018). To be included behind vectors.
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

// (size, TILE): the keys of a tile, side by side; behind the last one it is repeated. Fetches the values.
template <class Number>
void put_side_by_side(const baton::HeadAttention& work, const Tile<Number>& tile, float* to) {
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
void score(const float* q, int64_t size, const float* keys, float* scores) {
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

// What a row has seen so far: the largest score, the sum of weights and of weighted values relative to it.
struct Seen {
    float largest;
    float total[LANES];
};

// Makes weights of a row's scores, of which [from, end) are seen; the factor of what was added up before.
inline float weigh(float* scores, int64_t from, int64_t end, float soft_cap, Seen& seen) {
    if (soft_cap > 0)
        for (int i = 0; i < TILE; i += LANES) store(scores + i, capped(load(scores + i), soft_cap));
    for (int64_t i = 0; i < from; ++i) scores[i] = NOTHING;
    for (int64_t i = end; i < TILE; ++i) scores[i] = NOTHING;
    Floats largest_of = all(seen.largest);
    for (int i = 0; i < TILE; i += LANES) largest_of = larger(load(scores + i), largest_of);
    const float most = largest_lane(largest_of);
    const Floats base = all(most);
    const float factor = seen.largest == NOTHING ? 0.0f : seen.largest == most ? 1.0f : exp_of(seen.largest - most);
    Floats total = times(load(seen.total), all(factor));
    for (int i = 0; i < TILE; i += LANES) {
        const Floats weight = exp_of(less(load(scores + i), base));
        total = plus(total, weight);
        store(scores + i, weight);
    }
    store(seen.total, total);
    seen.largest = most;
    return factor;
}

// sums = sums * factors + weights (ROWS, TILE) x values, over the keys [from, end) of the tile. Fetches the next one's keys.
template <class Number, int ROWS, int VECTORS>
void add_values(const Tile<Number>& tile, const Tile<Number>& next, int64_t from, int64_t end, int64_t d, int64_t size, const float* weights,
                const float* factors, float* sums) {
    Floats kept[ROWS][VECTORS];
    for (int row = 0; row < ROWS; ++row)
        for (int v = 0; v < VECTORS; ++v)
            kept[row][v] = times(load(sums + row * size + d + v * LANES), all(factors[row]));
    for (int64_t key = from; key < end; ++key) {
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

struct Scratch {
    std::vector<float> q;     // (rows, size), scaled
    std::vector<float> keys;  // (size, TILE)
    std::vector<float> sums;  // (rows, size)
    std::vector<Seen> seen;   // (rows,)

    void prepare(const baton::HeadAttention& work) {
        q.resize(work.rows * work.size);
        keys.resize(work.size * TILE);
        sums.assign(work.rows * work.size, 0.0f);
        seen.assign(work.rows, Seen{NOTHING, {}});
        const Floats scale = all(work.scale);
        for (int64_t row = 0; row < work.rows; ++row)
            for (int64_t d = 0; d < work.size; d += LANES)
                store(q.data() + row * work.size + d, times(load(work.q[row] + d), scale));
    }
};

template <class Number, int ROWS>
void add_tile(const baton::HeadAttention& work, const Tile<Number>& tile, const Tile<Number>& next, Scratch& scratch,
              int64_t row) {
    const Span early(work, work.first_position + row / work.repeats, tile.first, tile.count);
    const Span late(work, work.first_position + (row + ROWS - 1) / work.repeats, tile.first, tile.count);
    if (early.from >= late.end) return;
    float scores[ROWS * TILE], factors[ROWS];
    score<ROWS>(scratch.q.data() + row * work.size, work.size, scratch.keys.data(), scores);
    for (int r = 0; r < ROWS; ++r) {
        const Span span(work, work.first_position + (row + r) / work.repeats, tile.first, tile.count);
        float* own = scores + r * TILE;
        if (span.is_empty()) {
            factors[r] = 1.0f;
            for (int i = 0; i < TILE; ++i) own[i] = 0.0f;
            continue;
        }
        factors[r] = weigh(own, span.from, span.end, work.soft_cap, scratch.seen[row + r]);
        if (work.scales != nullptr)
            for (int64_t i = span.from; i < span.end; ++i) own[i] *= tile.value_scales[i];
    }
    float* own = scratch.sums.data() + row * work.size;
    int64_t d = 0;
    constexpr int VECTORS = float_vectors(ROWS);
    for (; d + VECTORS * LANES <= work.size; d += VECTORS * LANES)
        add_values<Number, ROWS, VECTORS>(tile, next, early.from, late.end, d, work.size, scores, factors, own);
    for (; d < work.size; d += LANES)
        add_values<Number, ROWS, 1>(tile, next, early.from, late.end, d, work.size, scores, factors, own);
}

// `add_tile` for the rows from `row` on, as many as a block has at the most.
template <class Number, int MOST>
void add_tile_to_some(const baton::HeadAttention& work, const Tile<Number>& tile, const Tile<Number>& next, Scratch& scratch,
                      int64_t row) {
    if constexpr (MOST > 1) {
        if (work.rows - row < MOST) return add_tile_to_some<Number, MOST - 1>(work, tile, next, scratch, row);
    }
    add_tile<Number, MOST>(work, tile, next, scratch, row);
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

template <class Number>
void attend(const baton::HeadAttention& work) {
    static thread_local Scratch scratch;
    scratch.prepare(work);
    const int64_t end = work.first_position + (work.rows - 1) / work.repeats + 1;
    const int64_t unseen = work.window > 0 ? work.first_position - work.window + 1 : 0;
    int64_t first = unseen > 0 ? unseen / TILE * TILE : 0;
    Tile<Number> tile(work, first, end);
    for (; first < end; first += TILE) {
        const Tile<Number> next = first + TILE < end ? Tile<Number>(work, first + TILE, end) : tile;
        put_side_by_side(work, tile, scratch.keys.data());
        for (int64_t row = 0; row < work.rows; row += FLOAT_ROWS)
            add_tile_to_some<Number, FLOAT_ROWS>(work, tile, next, scratch, row);
        tile = next;
    }
    for (int64_t row = 0; row < work.rows; ++row) write_row(work, row, scratch.seen[row], scratch.sums.data());
}

}  // namespace
