// Products of rows of 8 bits and panels of 8 and 4: exact within a group of inputs, in float32 over groups. To be included behind
// vectors.
#pragma once
#include "tiles.h"

namespace {

// The scales of LANES outputs, from the `number`-th on.
inline Floats load_scales(baton::Format format, const uint8_t* scales, int64_t number) {
    switch (format) {
        case baton::Format::f32: return load(reinterpret_cast<const float*>(scales) + number);
        case baton::Format::bf16: return load(reinterpret_cast<const baton::Bfloat16*>(scales) + number);
        default: return load(reinterpret_cast<const baton::Float16*>(scales) + number);
    }
}

// Lines of 8 bits: 4 inputs of each output.
struct Lines8 {
    static constexpr int INPUTS = 4;
    static constexpr int vectors(int rows) { return int8_vectors(rows); }

    template <int ROWS, int VECTORS>
    static void add(Sums (&sums)[ROWS][VECTORS], const uint8_t* w, const int32_t* x) {
        Bytes weights[VECTORS];
        for (int v = 0; v < VECTORS; ++v) weights[v] = load_weights(w + v * LANES * 4);
        for (int row = 0; row < ROWS; ++row) {
            const Ints four = all(x[row]);
            for (int v = 0; v < VECTORS; ++v) sums[row][v] = dot_bytes(sums[row][v], weights[v], four);
        }
    }

    static constexpr bool HAS_ZEROS_OF_BYTES = false;
};

template <int ROWS, int VECTORS>
inline void add_halves(Sums (&sums)[ROWS][VECTORS], const Ints (&halves)[VECTORS], const int32_t* x) {
    for (int row = 0; row < ROWS; ++row) {
        const Ints four = all(x[row]);
        for (int v = 0; v < VECTORS; ++v) sums[row][v] = dot_halves(sums[row][v], halves[v], four);
    }
}

// Lines of 4 bits: 8 inputs of each output.
struct Lines4 {
    static constexpr int INPUTS = 8;
    static constexpr int vectors(int rows) { return int4_vectors(rows); }

    template <int ROWS, int VECTORS>
    static void add(Sums (&sums)[ROWS][VECTORS], const uint8_t* w, const int32_t* x) {
        Ints bytes[VECTORS], halves[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
            bytes[v] = load_ints(w + v * LANES * 4);
            halves[v] = low_halves(bytes[v]);
        }
        add_halves(sums, halves, x);
        for (int v = 0; v < VECTORS; ++v) halves[v] = high_halves(bytes[v]);
        add_halves(sums, halves, x + ROWS);
    }

    static constexpr bool HAS_ZEROS_OF_BYTES = true;
};

// The same in a byte each, as `widen` writes them.
struct WidenedLines4 {
    static constexpr int INPUTS = 4;
    static constexpr int vectors(int rows) { return int4_vectors(rows); }

    template <int ROWS, int VECTORS>
    static void add(Sums (&sums)[ROWS][VECTORS], const uint8_t* w, const int32_t* x) {
        Ints halves[VECTORS];
        for (int v = 0; v < VECTORS; ++v) halves[v] = load_ints(w + v * LANES * 4);
        add_halves(sums, halves, x);
    }

    static constexpr bool HAS_ZEROS_OF_BYTES = true;
};

// A panel's scales and zero points.
struct PanelScales {
    baton::Format format;
    int64_t zero_bytes;
    const uint8_t *scales, *zeros;

    explicit PanelScales(const baton::PanelProduct& work)
        : format(work.layout->scales),
          zero_bytes(work.layout->zero_bytes),
          scales(work.panel + work.layout->scales_at()),
          zeros(work.panel + work.layout->zeros_at()) {}
};

// The zero points of LANES outputs, from the `number`-th on.
template <class Lines>
inline Floats load_zeros(const PanelScales& panel, int64_t number) {
    if (Lines::HAS_ZEROS_OF_BYTES && panel.zero_bytes == 1) return load_bytes(panel.zeros + number);
    return load(reinterpret_cast<const baton::Float16*>(panel.zeros) + number);
}

// What a group's sums are multiplied with, of LANES outputs from the `number`-th scale on.
template <class Lines, bool HAS_ZEROS>
struct GroupScale {
    Floats scale, offset;

    GroupScale(const PanelScales& panel, int64_t number)
        : scale(load_scales(panel.format, panel.scales, number)),
          offset(HAS_ZEROS ? times(scale, load_zeros<Lines>(panel, number)) : none()) {}

    Floats add(Floats total, Sums sum, float x_sum) const {
        total = fma(to_floats(sum), scale, total);
        return HAS_ZEROS ? minus_product(total, all(x_sum), offset) : total;
    }
};

// Sums over groups times the rows' scales, and the bias.
template <int ROWS, int VECTORS>
inline void write_totals(const baton::PanelProduct& work, int first, const float* totals) {
    const float* scales = work.x_scales;
    write_tile<ROWS, VECTORS>(work, first, [=](int row, int v, Floats bias) {
        return fma(load(totals + (row * VECTORS + v) * LANES), all(scales[row]), bias);
    });
}

template <class Lines>
struct WholePanels {
    template <int ROWS>
    static void multiply(const baton::PanelProduct& work) {
        constexpr int VECTORS = Lines::vectors(ROWS), COLUMNS = VECTORS * LANES;
        for (int first = 0; first < baton::PANEL; first += COLUMNS) {
            if (work.layout->num_groups() == 1 && !work.layout->has_zeros()) {
                multiply_group<ROWS, VECTORS>(work, first);
                continue;
            }
            alignas(64) float totals[ROWS * COLUMNS];
            if (work.layout->has_zeros())
                add_groups<ROWS, VECTORS, true>(work, first, totals);
            else
                add_groups<ROWS, VECTORS, false>(work, first, totals);
            write_totals<ROWS, VECTORS>(work, first, totals);
        }
    }

  private:
    template <int ROWS, int VECTORS>
    static void begin(Sums (&sums)[ROWS][VECTORS], const int32_t* starts) {
        for (int row = 0; row < ROWS; ++row)
            for (auto& sum : sums[row]) sum = all_sums(starts[row]);
    }

    template <int ROWS, int VECTORS>
    static void add_lines(Sums (&sums)[ROWS][VECTORS], const uint8_t*& w, const int32_t*& x, int64_t count, Ahead& ahead) {
        do {
            prefetch(w);
            prefetch(w + 64);
            ahead.fetch();
            Lines::add(sums, w, x);
            w += baton::PANEL * 4;
            x += ROWS * Lines::INPUTS / 4;
        } while (--count > 0);
    }

    // Where all inputs share a scale, what becomes of their sums stays in registers: with the bits of a total of one group.
    template <int ROWS, int VECTORS>
    static void multiply_group(const baton::PanelProduct& work, int first) {
        const baton::Layout& layout = *work.layout;
        const auto* x = static_cast<const int32_t*>(work.x);
        const uint8_t* w = work.numbers + first * 4;
        const int64_t lines = layout.padded_inputs() / Lines::INPUTS;
        Ahead ahead(work, lines);
        Sums sums[ROWS][VECTORS];
        begin(sums, work.x_starts);
        add_lines(sums, w, x, lines, ahead);
        Floats scales[VECTORS];
        for (int v = 0; v < VECTORS; ++v)
            scales[v] = load_scales(layout.scales, work.panel + layout.scales_at(), first + v * LANES);
        const float* x_scales = work.x_scales;
        write_tile<ROWS, VECTORS>(work, first, [&](int row, int v, Floats bias) {
            return fma(times(to_floats(sums[row][v]), scales[v]), all(x_scales[row]), bias);
        });
    }

    template <int ROWS, int VECTORS, bool HAS_ZEROS>
    static void add_groups(const baton::PanelProduct& work, int first, float* totals) {
        const baton::Layout& layout = *work.layout;
        const auto* x = static_cast<const int32_t*>(work.x);
        const int32_t* starts = work.x_starts;
        const float* x_sums = work.x_sums;
        const uint8_t* w = work.numbers + first * 4;
        const PanelScales scales(work);
        const int64_t groups = layout.num_groups(), steps = layout.group / Lines::INPUTS;
        int64_t all_steps = layout.padded_inputs() / Lines::INPUTS;
        Ahead ahead(work, all_steps);
        for (int i = 0; i < ROWS * VECTORS; ++i) store(totals + i * LANES, none());
        for (int64_t group = 0; group < groups; ++group, starts += ROWS, x_sums += HAS_ZEROS ? ROWS : 0) {
            keep_in_memory(totals);  // The sums of a group need the registers.
            Sums sums[ROWS][VECTORS];
            begin(sums, starts);
            const int64_t lines = steps < all_steps ? steps : all_steps;  // The last group may be shorter.
            all_steps -= lines;
            add_lines(sums, w, x, lines, ahead);
            for (int v = 0; v < VECTORS; ++v) {
                const GroupScale<Lines, HAS_ZEROS> scale(scales, group * baton::PANEL + first + v * LANES);
                for (int row = 0; row < ROWS; ++row) {
                    float* at = totals + (row * VECTORS + v) * LANES;
                    store(at, scale.add(load(at), sums[row][v], HAS_ZEROS ? x_sums[row] : 0.0f));
                }
            }
        }
    }
};

// Lines of 4 bits become twice as many of bytes, in the order of the inputs.
inline void widen(const uint8_t* lines, int64_t bytes, int32_t* out) {
    for (const uint8_t* end = lines + bytes; lines < end; lines += baton::PANEL * 4, out += 2 * baton::PANEL)
        for (int64_t place = 0; place < baton::PANEL; place += LANES) {
            const Ints pairs = load_ints(lines + place * 4);
            store(out + place, low_halves(pairs));
            store(out + baton::PANEL + place, high_halves(pairs));
        }
}

}  // namespace
