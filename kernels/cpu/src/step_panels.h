// Products of rows of 8 bits and panels of steps4: exact within a span, in float32 over spans. To be included behind vectors.
#pragma once
#include <cstring>

#include "whole_panels.h"

namespace {

// What is left of a panel's inputs may be less than a span.
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

struct StepPanels {
    template <int ROWS>
    static void multiply(const baton::PanelProduct& work) {
        constexpr int VECTORS = step_vectors(ROWS), COLUMNS = VECTORS * LANES;
        for (int first = 0; first < baton::PANEL; first += COLUMNS) {
            alignas(64) float totals[ROWS * COLUMNS];
            add_spans<ROWS, VECTORS>(work, first, totals);
            write_totals<ROWS, VECTORS>(work, first, totals);
        }
    }

  private:
    static constexpr int LINES = baton::STEP_INPUTS / 8;

    template <int ROWS, int VECTORS>
    static void add_spans(const baton::PanelProduct& work, int first, float* totals) {
        const baton::Layout& layout = *work.layout;
        const auto* x = static_cast<const int32_t*>(work.x);
        const int32_t* starts = work.x_starts;
        int64_t left = layout.padded_inputs() / baton::STEP_INPUTS;
        Ahead ahead(work, left * LINES);
        for (int i = 0; i < ROWS * VECTORS; ++i) store(totals + i * LANES, none());
        for (const uint8_t* span = work.panel; left > 0; span += layout.span_bytes()) {
            const int64_t groups = least(left, layout.group / baton::STEP_INPUTS);
            left -= groups;
            alignas(64) int32_t sums[ROWS * VECTORS * LANES];
            for (int i = 0; i < ROWS * VECTORS; ++i) store(sums + i * LANES, no_ints());
            for (int64_t at = 0; at < layout.numbers_at(); at += 64) prefetch(span + at);
            const uint8_t *steps = span + layout.steps_at() + first, *w = span + layout.numbers_at() + first * 4;
            for (int64_t group = 0; group < groups; ++group) {
                add_group<ROWS, VECTORS>(sums, steps, w, x, starts, ahead);
                steps += baton::PANEL;
                w += LINES * baton::PANEL * 4;
                x += ROWS * LINES * 2;
                starts += ROWS;
            }
            for (int v = 0; v < VECTORS; ++v) {
                const Floats scale = load(reinterpret_cast<const baton::Bfloat16*>(span) + first + v * LANES);
                for (int i = v; i < ROWS * VECTORS; i += VECTORS) {
                    float* const at = totals + i * LANES;
                    store(at, fma(to_floats(load_sums(sums + i * LANES)), scale, load(at)));
                }
            }
        }
    }

    // The group's sums need the registers, so the span's are in memory.
    template <int ROWS, int VECTORS>
    static void add_group(int32_t* in_span, const uint8_t* steps, const uint8_t* w, const int32_t* x,
                          const int32_t* starts, Ahead& ahead) {
        keep_in_memory(in_span);
        Sums sums[ROWS][VECTORS];
        for (int row = 0; row < ROWS; ++row)
            for (auto& sum : sums[row]) sum = all_sums(starts[row]);
        for (int line = 0; line < LINES; ++line, w += baton::PANEL * 4, x += ROWS * 2) {
            prefetch(w);
            prefetch(w + 64);
            ahead.fetch();
            Ints bytes[VECTORS], halves[VECTORS];
            for (int v = 0; v < VECTORS; ++v) {
                bytes[v] = load_ints(w + v * LANES * 4);
                halves[v] = low_halves(bytes[v]);
            }
            add_line(sums, halves, x);
            for (int v = 0; v < VECTORS; ++v) halves[v] = high_halves(bytes[v]);
            add_line(sums, halves, x + ROWS);
        }
        for (int v = 0; v < VECTORS; ++v) {
            const Ints step = load_steps(steps + v * LANES);
            for (int row = 0; row < ROWS; ++row) {
                int32_t* const at = in_span + (row * VECTORS + v) * LANES;
                store(at, as_ints(add_steps(load_sums(at), sums[row][v], step)));
            }
        }
    }

    template <int ROWS, int VECTORS>
    static void add_line(Sums (&sums)[ROWS][VECTORS], const Ints (&halves)[VECTORS], const int32_t* x) {
        for (int row = 0; row < ROWS; ++row) {
            const Ints four = all(x[row]);
            for (int v = 0; v < VECTORS; ++v) sums[row][v] = dot_in_group(sums[row][v], halves[v], four);
        }
    }
};

// What the sums of a group of STEP_INPUTS begin with, in each row of a block: 8 times the inputs are to be taken off.
void sum_steps(const baton::GroupSums& work) {
    const Ints ones = all(0x01010101);
    const uint32_t* x = work.x;
    for (int64_t group = 0; group < work.groups; ++group) {
        Sums sums = all_sums(0);
        for (int64_t i = 0; i < work.length; ++i, x += work.rows)
            sums = dot_in_group(sums, ones, as_ints(load_some(x, work.rows)));
        store_some(work.starts + group * work.rows, as_floats(minus_eight_times(sums)), work.rows);
    }
}

// Two bytes are multiplied and added to at once: no result is below 0 or above 255, so that none carries into its neighbour.
void widen_steps(const baton::Layout& layout, const uint8_t* panel, uint8_t* out) {
    constexpr int64_t LINE = baton::PANEL * 4, LINES = baton::STEP_INPUTS / 8;
    uint8_t* scales = out + layout.widened().scales_at();
    int64_t left = layout.padded_inputs() / baton::STEP_INPUTS;
    for (; left > 0; panel += layout.span_bytes(), scales += layout.steps_at()) {
        const int64_t groups = least(left, layout.group / baton::STEP_INPUTS);
        left -= groups;
        std::memcpy(scales, panel, static_cast<size_t>(layout.steps_at()));
        const uint8_t *steps = panel + layout.steps_at(), *lines = panel + layout.numbers_at();
        for (int64_t group = 0; group < groups; ++group, steps += baton::PANEL, lines += LINES * LINE, out += 2 * LINES * LINE)
            for (int64_t place = 0; place < baton::PANEL; place += LANES) {
                const Ints step = load_step_pairs(steps + place);
                const Ints offset = plus_16(times_16(step, all_16(-8 * 257)), all_16(128 * 257));
                for (int64_t line = 0; line < LINES; ++line) {
                    const Ints pairs = load_ints(lines + line * LINE + place * 4);
                    auto* to = reinterpret_cast<int32_t*>(out + 2 * line * LINE) + place;
                    store(to, plus_16(times_16(low_halves(pairs), step), offset));
                    store(to + baton::PANEL, plus_16(times_16(high_halves(pairs), step), offset));
                }
            }
    }
}

}  // namespace
