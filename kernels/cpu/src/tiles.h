// What products by panels have in common: a tile of sums that `out` gives and takes, lines that are fetched ahead, and a choice by
// the number of rows.
#pragma once
#include "kernels.h"

// Sums go by reference to what reads and writes a tile, and stay in registers only where that is within the loop's function. ARM's are
// pairs of registers: there the compiler would not put it there by itself.
#if defined(__aarch64__)
#define BATON_WITHIN __attribute__((always_inline)) inline
#else
#define BATON_WITHIN inline
#endif

namespace {

// Bytes ahead of what is multiplied: what memory gives a core in the time that it takes to answer, and a page more than what a core
// fetches by itself.
constexpr int AHEAD = 4096;

// Sums in registers that do not wait for each other: enough for two products begun at once that take five cycles each.
constexpr int SPINNING = 12;

inline void prefetch(const void* at) {
    __builtin_prefetch(static_cast<const char*>(at) + AHEAD, 0, 3);
}

// What is at `at` is read from memory behind this, and written before it: the compiler would keep it in registers.
inline void keep_in_memory(const void* at) { asm volatile("" : : "r"(at) : "memory"); }

// Fetches what is multiplied next into the second cache, a little with each of `steps`.
struct Ahead {
    const uint8_t* at;
    int64_t step;

    Ahead(const baton::PanelProduct& work, int64_t steps)
        : at(work.ahead), step(steps > 0 ? (work.ahead_bytes + steps - 1) / steps : 0) {}

    void fetch() {
        __builtin_prefetch(at, 0, 2);
        at += step;
    }
};

// LANES numbers of a row of `columns`, from the `first`-th on; zeros behind its end.
inline Floats load_columns(const float* row, int64_t first, int64_t columns) {
    const int64_t left = columns - first;
    return left >= LANES ? load(row + first) : left > 0 ? load_some(row + first, left) : none();
}

inline void store_columns(float* row, int64_t first, int64_t columns, Floats x) {
    const int64_t left = columns - first;
    if (left >= LANES)
        store(row + first, x);
    else if (left > 0)
        store_some(row + first, x, left);
}

inline Floats load_bias(const baton::PanelProduct& work, int64_t first) {
    return work.bias == nullptr ? none() : load_columns(work.bias, first, work.columns);
}

// What the sums of a tile begin with, from the `first`-th column of the panel on.
template <int ROWS, int VECTORS>
BATON_WITHIN void read_tile(const baton::PanelProduct& work, int first, Floats (&sums)[ROWS][VECTORS]) {
    for (auto& row : sums)
        for (auto& sum : row) sum = none();
    if (!work.goes_on) return;
    const float* out = work.out + first;
    const int64_t stride = work.stride, columns = work.columns - first;
    for (int row = 0; row < ROWS; ++row, out += stride)
        for (int v = 0; v < VECTORS; ++v) sums[row][v] = load_columns(out, v * LANES, columns);
}

// made(row, vector, bias) of the whole tile. Nearly all tiles have all their columns: these need no look at each vector's end.
template <int ROWS, int VECTORS, class Make>
BATON_WITHIN void write_tile(const baton::PanelProduct& work, int first, Make made) {
    float* out = work.out + first;
    const int64_t stride = work.stride, columns = work.columns - first;
    Floats bias[VECTORS];
    for (int v = 0; v < VECTORS; ++v) bias[v] = load_bias(work, first + v * LANES);
    if (columns >= VECTORS * LANES) {
        for (int row = 0; row < ROWS; ++row, out += stride)
            for (int v = 0; v < VECTORS; ++v) store(out + v * LANES, made(row, v, bias[v]));
        return;
    }
    for (int row = 0; row < ROWS; ++row, out += stride)
        for (int v = 0; v < VECTORS; ++v) store_columns(out, v * LANES, columns, made(row, v, bias[v]));
}

template <int ROWS, int VECTORS>
BATON_WITHIN void write_tile(const baton::PanelProduct& work, int first, const Floats (&sums)[ROWS][VECTORS]) {
    write_tile<ROWS, VECTORS>(work, first, [&](int row, int v, Floats bias) { return plus(sums[row][v], bias); });
}

inline void interleave(const baton::Interleaving& work) {
    for (int64_t at = 0; at < work.length; at += LANES) {
        const int64_t left = work.length - at < LANES ? work.length - at : LANES;
        Floats lines[LANES];
        for (int64_t row = 0; row < LANES; ++row)
            lines[row] = row < work.count ? load_some(work.rows + row * work.length + at, left) : none();
        transpose(lines);
        for (int64_t i = 0; i < left; ++i) store_some(work.out + (at + i) * work.count, lines[i], work.count);
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
