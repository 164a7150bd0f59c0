// Products of rows and panels by tiles, of bfloat16 and of bytes. To be included behind vectors and the intrinsics of tiles.
//
// Sums of bytes are whole numbers, and what becomes of them is what vectors make of theirs: so are the bits. Sums of bfloat16 are made
// as the instruction does, 32 inputs at a time, in the order of the inputs.
#pragma once
#include <cstring>

#include "amx_tiles.h"
#include "whole_panels.h"

namespace {

// Adds up `count` of the panel's lines, which may end within a step: the last ones are copied, with zeros behind them.
template <class Products>
void add_lines(const baton::PanelProduct& work, const uint8_t* x, const uint8_t* lines, int64_t count, void* sums, int64_t stride,
               bool goes_on) {
    const int64_t bytes = work.step_bytes, step_bytes = bytes / 4 * LINE_BYTES_OF_PANEL, steps = count / (bytes / 4);
    const int64_t rest = count % (bytes / 4) * LINE_BYTES_OF_PANEL;
    TileProduct product{x, work.rows, work.x_stride, lines, LINE_BYTES_OF_PANEL, steps, bytes, sums, stride, goes_on,
                        lines + AHEAD, step_bytes};
    if (work.ahead_bytes > 0) {
        const int64_t at = (lines - work.numbers) / LINE_BYTES_OF_PANEL, all_lines = work.lines;
        product.ahead = work.ahead + work.ahead_bytes * at / all_lines;
        product.ahead_bytes = work.ahead_bytes * (bytes / 4) / all_lines;
    }
    if (steps > 0) multiply_tiles<Products>(product);
    if (rest == 0) return;
    alignas(64) uint8_t last[TILE_LINES * LINE_BYTES_OF_PANEL] = {};
    std::memcpy(last, lines + steps * step_bytes, static_cast<size_t>(rest));
    keep_in_memory(last);
    product.x += steps * bytes;
    product.lines = last;
    product.steps = 1;
    product.goes_on = goes_on || steps > 0;
    product.ahead_bytes = 0;
    multiply_tiles<Products>(product);
}

// made(row, vector, bias) of all columns.
template <class Make>
void write_rows(const baton::PanelProduct& work, Make made) {
    for (int v = 0; v < 2; ++v) {
        const Floats bias = load_bias(work, v * LANES);
        for (int64_t row = 0; row < work.rows; ++row)
            store_columns(work.out + row * work.stride, v * LANES, work.columns, made(row, v, bias));
    }
}

// Sums go to `out` at once where it has all columns.
void multiply_pairs(const baton::PanelProduct& work) {
    alignas(64) float own[baton::AMX_ROWS * baton::PANEL];
    const bool is_whole = work.columns == baton::PANEL;
    float* const sums = is_whole ? work.out : own;
    const int64_t stride = is_whole ? work.stride : baton::PANEL;
    if (!is_whole && work.goes_on)
        for (int64_t row = 0; row < work.rows; ++row)
            for (int v = 0; v < 2; ++v)
                store(own + row * baton::PANEL + v * LANES, load_columns(work.out + row * work.stride, v * LANES, work.columns));
    add_lines<PairTiles>(work, static_cast<const uint8_t*>(work.x), work.numbers, work.lines, sums, 4 * stride, work.goes_on);
    if (is_whole && work.bias == nullptr) return;
    write_rows(work, [&](int64_t row, int v, Floats bias) { return plus(load(sums + row * stride + v * LANES), bias); });
}

template <class Lines, bool HAS_ZEROS>
void add_group(const baton::PanelProduct& work, const PanelScales& scales, int64_t group, const int32_t* sums, float* totals) {
    for (int v = 0; v < 2; ++v) {
        const GroupScale<Lines, HAS_ZEROS> scale(scales, group * baton::PANEL + v * LANES);
        for (int64_t row = 0; row < work.rows; ++row) {
            const int64_t at = row * baton::PANEL + v * LANES, number = group * work.rows + row;
            const Sums sum = load_sums(sums + at) + all_sums(work.x_starts[number]);
            store(totals + at, scale.add(load(totals + at), sum, HAS_ZEROS ? work.x_sums[number] : 0.0f));
        }
    }
}

template <class Lines>
void multiply_bytes(const baton::PanelProduct& work) {
    alignas(64) int32_t sums[baton::AMX_ROWS * baton::PANEL];
    alignas(64) float totals[baton::AMX_ROWS * baton::PANEL] = {};
    const baton::Layout& layout = *work.layout;
    const PanelScales scales(work);
    const auto* x = static_cast<const uint8_t*>(work.x);
    const int64_t groups = layout.num_groups(), in_group = layout.group / 4;
    for (int64_t group = 0, line = 0; group < groups; ++group, line += in_group) {
        const int64_t count = work.lines - line < in_group ? work.lines - line : in_group;
        add_lines<ByteTiles>(work, x + 4 * line, work.numbers + line * LINE_BYTES_OF_PANEL, count, sums, 4 * baton::PANEL, false);
        if (layout.has_zeros())
            add_group<Lines, true>(work, scales, group, sums, totals);
        else
            add_group<Lines, false>(work, scales, group, sums, totals);
    }
    write_rows(work, [&](int64_t row, int v, Floats bias) {
        return fma(load(totals + row * baton::PANEL + v * LANES), all(work.x_scales[row]), bias);
    });
}

// `sum_groups` of one row, of which a group's inputs lie side by side: what is found is `rows` numbers apart.
void sum_row(const baton::GroupSums& work) {
    const Ints ones = all(0x01010101);
    const uint32_t* x = work.x;
    for (int64_t group = 0; group < work.groups; ++group, x += work.length) {
        Sums sums = all_sums(0);
        for (int64_t i = 0; i < work.length; i += LANES)
            sums = dot_halves(sums, ones, reinterpret_cast<Ints>(load_some(x + i, work.length - i)));
        const int32_t sum = _mm512_reduce_add_epi32(reinterpret_cast<Ints>(sums));
        work.starts[group * work.rows] = sum * -work.offset;
        if (work.sums != nullptr) work.sums[group * work.rows] = static_cast<float>(sum);
    }
}

int64_t spin_tiles(baton::Format format, int64_t rounds) {
    configure(baton::AMX_ROWS, TILE_BYTES);
    for (int64_t i = 0; i < rounds; ++i) {
        if (format == baton::Format::bf16)
            PairTiles::add_first(), PairTiles::add_second();
        else
            ByteTiles::add_first(), ByteTiles::add_second();
    }
    release_tiles();
    return rounds * 4 * TILE_ROWS * TILE_ROWS * TILE_BYTES / (format == baton::Format::bf16 ? 2 : 1);
}

}  // namespace
