#include "packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "fours.h"
#include "thread_pool.h"

namespace baton {
namespace {

constexpr int64_t TILE = 128;  // inputs

void to_bfloat16(const float* from, int64_t count, uint16_t* to) {
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, from + i, 4);
        const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
        const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
        to[i] = static_cast<uint16_t>((is_nan ? bits | 64 << 16 : rounded) >> 16);
    }
}

void from_bfloat16(const uint8_t* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) {
        uint16_t half;
        std::memcpy(&half, from + 2 * i, 2);
        const uint32_t bits = static_cast<uint32_t>(half) << 16;
        std::memcpy(to + i, &bits, 4);
    }
}

// `row` by `scale`, each to the nearest whole number.
void divide(const float* row, int64_t count, float scale, int32_t* to) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) store_quotients(to + i, load_four(row + i), four(scale));
    for (; i < count; ++i) to[i] = quotient(row[i], scale);
}

// The least and the greatest of numbers and 0.
struct Extremes {
    float least = 0, greatest = 0;

    void see(const float* row, int64_t count) {
        Four low = four(least), high = four(greatest);
        int64_t i = 0;
        for (; i + 4 <= count; i += 4) {
            low = lesser(load_four(row + i), low);
            high = greater(load_four(row + i), high);
        }
        for (; i < count; ++i) {
            low = lesser(four(row[i]), low);
            high = greater(four(row[i]), high);
        }
        float lows[4], highs[4];
        store_four(lows, low);
        store_four(highs, high);
        least = *std::min_element(lows, lows + 4);
        greatest = *std::max_element(highs, highs + 4);
    }

    float magnitude() const { return std::max(greatest, -least); }
    float largest() const { return greatest >= -least ? greatest : least; }  // with its sign
};

// A row of a matrix of the format `numbers`.
struct Row {
    Format numbers;
    const uint8_t* at;

    // `count` numbers from `first` on, at most TILE, as float32: where they lie, or in `own`.
    const float* floats(int64_t first, int64_t count, float* own) const {
        if (numbers == Format::f32) return reinterpret_cast<const float*>(at) + first;
        if (numbers == Format::bf16)
            from_bfloat16(at + 2 * first, count, own);
        else
            from_float16(at + 2 * first, count, own);
        return own;
    }

    // see(numbers, how many) of each piece, in their order.
    template <class See>
    void by_pieces(int64_t first, int64_t end, See see) const {
        float own[TILE];
        for (; first < end; first += TILE) {
            const int64_t count = std::min(TILE, end - first);
            see(floats(first, count, own), count);
        }
    }
};

struct Output {
    int64_t number;
    int64_t place;  // in its panel
    uint8_t* panel;
};

// begin(output) for each output of a panel; then pack(output, first, count) for each tile of TILE inputs of them. An output's
// numbers lie between those of 31 others, so that a tile is written 32 times: it stays in the first cache meanwhile.
template <class Begin, class Pack>
void by_tiles(const Layout& layout, uint8_t* panels, int threads, Begin begin, Pack pack) {
    const int64_t bytes = layout.panel_bytes();
    auto panel_of = [&](int64_t number) {
        uint8_t* panel = panels + number * bytes;
        const int64_t outputs = std::min(PANEL, layout.outputs - number * PANEL);
        auto each = [&](auto body) {
            for (int64_t place = 0; place < outputs; ++place) body(Output{number * PANEL + place, place, panel});
        };
        std::memset(panel, 0, bytes);
        each(begin);
        for (int64_t first = 0; first < layout.inputs; first += TILE) {
            const int64_t length = std::min(TILE, layout.inputs - first);
            each([&](const Output& output) { pack(output, first, length); });
        }
    };
    run(threads, layout.num_panels(), panel_of);
}

// `count` words of `BYTES` each, in which an output's inputs lie side by side; the panel's word `first` is the first of them.
template <int BYTES>
void put(const Output& output, const void* words, int64_t first, int64_t count) {
    const auto* from = static_cast<const uint8_t*>(words);
    uint8_t* to = output.panel + (first * PANEL + output.place) * BYTES;
    for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * PANEL * BYTES, from + i * BYTES, BYTES);
}

// The other way: an output's `count` words, from the panel's first on.
template <int BYTES>
void take(const uint8_t* panel, int64_t place, int64_t count, uint8_t* words) {
    const uint8_t* from = panel + place * BYTES;
    for (int64_t i = 0; i < count; ++i) std::memcpy(words + i * BYTES, from + i * PANEL * BYTES, BYTES);
}

// Bytes of `count` inputs, of which 4 lie side by side; behind them there are zeros up to a whole word.
void put_bytes(const Output& output, const uint8_t* bytes, int64_t first, int64_t count) {
    put<4>(output, bytes, first / 4, (count + 3) / 4);
}

// The same of 4 bits, of which 8 lie side by side.
void put_halves(const Output& output, const uint8_t* halves, int64_t first, int64_t count) {
    uint8_t words[TILE / 2];
    for (int64_t word = 0; word < (count + 7) / 8; ++word)
        for (int64_t i = 0; i < 4; ++i)
            words[word * 4 + i] = static_cast<uint8_t>(halves[word * 8 + i] | halves[word * 8 + 4 + i] << 4);
    put<4>(output, words, first / 8, (count + 7) / 8);
}

// An output's `bytes` for each group, in a table from `start` on that has a line for each group.
void put_column(uint8_t* start, const uint8_t* column, int64_t bytes, int64_t groups, int64_t place) {
    for (int64_t group = 0; group < groups; ++group)
        std::memcpy(start + (group * PANEL + place) * bytes, column + group * bytes, bytes);
}

template <class Scale>
Scale& scale_of(const Layout& layout, const Output& output, int64_t group) {
    return reinterpret_cast<Scale*>(output.panel + layout.scales_at())[group * PANEL + output.place];
}

// found(number, first, end) for the part of each `size` inputs that is among `count` from `first` on.
template <class Found>
void by_groups(int64_t size, int64_t first, int64_t count, Found found) {
    for (int64_t from = first, end = first + count; from < end;) {
        const int64_t number = from / size, to = std::min(end, (number + 1) * size);
        found(number, from, to);
        from = to;
    }
}

Extremes extremes_of(const Row& row, int64_t first, int64_t end) {
    Extremes found;
    row.by_pieces(first, end, [&](const float* numbers, int64_t count) { found.see(numbers, count); });
    return found;
}

// int8: each group's largest magnitude becomes 127.
void find_scales(const Layout& layout, const Row& row, const Output& output) {
    by_groups(layout.group, 0, layout.inputs, [&](int64_t group, int64_t first, int64_t end) {
        const float most = extremes_of(row, first, end).magnitude();
        scale_of<float>(layout, output, group) = most == 0 ? 1.0f : most / 127.0f;
    });
}

// What an output has of a span of steps4.
struct Span {
    uint16_t* scale;
    int8_t* steps;  // a line apart
    Output halves;  // its panel has the span's numbers alone

    Span(const Layout& layout, const Output& output, int64_t number) : halves(output) {
        uint8_t* const span = output.panel + number * layout.span_bytes();
        scale = reinterpret_cast<uint16_t*>(span) + output.place;
        steps = reinterpret_cast<int8_t*>(span + layout.steps_at()) + output.place;
        halves.panel = span + layout.numbers_at();
    }

    float scale_as_float() const {
        float found;
        from_bfloat16(reinterpret_cast<const uint8_t*>(scale), 1, &found);
        return found;
    }

    int8_t& step(int64_t group) const { return steps[group * PANEL]; }
};

// steps4: the largest magnitude of a span would be 15 times -8. A group's step is the least with which -8 is at most half a step
// short of its largest number.
void find_steps(const Layout& layout, const Row& row, const Output& output) {
    by_groups(layout.group, 0, layout.inputs, [&](int64_t number, int64_t first, int64_t end) {
        const Span span(layout, output, number);
        const float wanted = extremes_of(row, first, end).magnitude() / 120.0f;
        to_bfloat16(&wanted, 1, span.scale);
        const float scale = span.scale_as_float();
        by_groups(STEP_INPUTS, first, end - first, [&](int64_t, int64_t from, int64_t to) {
            const float largest = scale == 0 ? 0 : extremes_of(row, from, to).largest();
            // 15 also where a matrix has infinity, whose quotient is no number
            const float step = largest == 0 ? 0 : std::min(15.0f, std::ceil(std::fabs(largest) / scale / 8.5f));
            span.step((from - first) / STEP_INPUTS) = static_cast<int8_t>(largest > 0 ? -step : step);
        });
    });
}

// `row` begins with the input `first`.
void round_to_bytes(const Layout& layout, const Output& output, const float* row, int64_t first, int64_t count) {
    uint8_t numbers[TILE] = {};
    by_groups(layout.group, first, count, [&](int64_t group, int64_t from, int64_t end) {
        int32_t whole[TILE];
        divide(row + (from - first), end - from, scale_of<float>(layout, output, group), whole);
        for (int64_t k = from; k < end; ++k) numbers[k - first] = static_cast<uint8_t>(whole[k - from] + 128);
    });
    put_bytes(output, numbers, first, count);
}

void round_to_steps(const Layout& layout, const Output& output, const float* row, int64_t first, int64_t count) {
    by_groups(layout.group, first, count, [&](int64_t number, int64_t from, int64_t end) {
        const Span span(layout, output, number);
        const int64_t span_first = number * layout.group;
        uint8_t numbers[TILE] = {};
        by_groups(STEP_INPUTS, from, end - from, [&](int64_t, int64_t begin, int64_t to) {
            int32_t whole[STEP_INPUTS];
            const float step = static_cast<float>(span.step((begin - span_first) / STEP_INPUTS)) * span.scale_as_float();
            divide(row + (begin - first), to - begin, step == 0 ? INFINITY : step, whole);
            for (int64_t k = begin; k < to; ++k)
                numbers[k - from] = static_cast<uint8_t>(std::min(std::max(whole[k - begin] + 8, 0), 15));
        });
        put_halves(span.halves, numbers, from - span_first, end - from);
    });
}

void begin_output(const Layout& layout, const Row& row, const Output& output) {
    if (layout.format == Format::int8) find_scales(layout, row, output);
    if (layout.format == Format::steps4) find_steps(layout, row, output);
}

void pack_tile(const Layout& layout, const Output& output, const float* row, int64_t first, int64_t count) {
    uint16_t halves[TILE] = {};
    switch (layout.format) {
        case Format::f32:
            return put<4>(output, row, first, count);
        case Format::bf16:
            to_bfloat16(row, count, halves);
            return put<4>(output, halves, first / 2, (count + 1) / 2);
        case Format::f16:
            to_float16(row, count, halves);
            return put<2>(output, halves, first, count);
        case Format::int8:
            return round_to_bytes(layout, output, row, first, count);
        case Format::steps4:
            return round_to_steps(layout, output, row, first, count);
        case Format::int4:
            return;  // what is rounded to 4 bits here has steps
    }
}

void to_floats(Format numbers, const uint8_t* from, int64_t count, float* to) {
    if (numbers == Format::f32) std::memcpy(to, from, 4 * count);
    if (numbers == Format::bf16) from_bfloat16(from, count, to);
    if (numbers == Format::f16) from_float16(from, count, to);
}

// The zero point of a group of int8 or int4.
float zero_of(const Layout& layout, const uint8_t* panel, int64_t at) {
    if (!layout.has_zeros()) return layout.format == Format::int8 ? 0.0f : 8.0f;
    const uint8_t* const zero = panel + layout.zeros_at() + at * layout.zero_bytes;
    if (layout.zero_bytes == 1) return *zero;
    float found;
    from_float16(zero, 1, &found);
    return found;
}

// (numbers - zero) * scale, each group's with its own; those of int8 are 128 too large.
void scale_numbers(const Layout& layout, const uint8_t* panel, int64_t place, const uint8_t* numbers, float* out) {
    const int64_t width = layout.scale_bytes();
    const float offset = layout.format == Format::int8 ? 128.0f : 0.0f;
    by_groups(layout.group, 0, layout.inputs, [&](int64_t group, int64_t first, int64_t end) {
        const int64_t at = group * PANEL + place;
        const float zero = zero_of(layout, panel, at);
        float scale;
        to_floats(layout.scales, panel + layout.scales_at() + at * width, 1, &scale);
        for (int64_t k = first; k < end; ++k) out[k] = (static_cast<float>(numbers[k]) - offset - zero) * scale;
    });
}

// The other way than `put_halves`: `count` words of 4 bytes become 8 bytes each. Each word lies where its first 4 bytes go.
void widen_halves(uint8_t* words, int64_t count) {
    for (int64_t word = count; word-- > 0;)
        for (int64_t i = 4; i-- > 0;) {
            const uint8_t both = words[word * 4 + i];
            words[word * 8 + 4 + i] = both >> 4;
            words[word * 8 + i] = both & 15;
        }
}

// `words` has room for what the row has, rounded up to 4 bytes.
void unpack_row(const Layout& layout, const uint8_t* panels, int64_t number, uint8_t* words, float* out) {
    const uint8_t* panel = panels + number / PANEL * layout.panel_bytes();
    const int64_t place = number % PANEL, inputs = layout.inputs;
    switch (layout.format) {
        case Format::f32:
            return take<4>(panel, place, inputs, reinterpret_cast<uint8_t*>(out));
        case Format::bf16:
            take<4>(panel, place, (inputs + 1) / 2, words);
            return from_bfloat16(words, inputs, out);
        case Format::f16:
            take<2>(panel, place, inputs, words);
            return from_float16(words, inputs, out);
        case Format::int8:
            take<4>(panel, place, (inputs + 3) / 4, words);
            return scale_numbers(layout, panel, place, words, out);
        case Format::int4:
            take<4>(panel, place, (inputs + 7) / 8, words);
            widen_halves(words, (inputs + 7) / 8);
            return scale_numbers(layout, panel, place, words, out);
        case Format::steps4:
            return;  // no embedding has steps
    }
}

}  // namespace

void pack_floats(const Layout& layout, Format numbers, const uint8_t* matrix, uint8_t* panels, int threads) {
    const int64_t width = layout.inputs * (numbers == Format::f32 ? 4 : 2);
    auto row_of = [&](const Output& output) { return Row{numbers, matrix + output.number * width}; };
    auto begin = [&](const Output& output) { begin_output(layout, row_of(output), output); };
    auto pack = [&](const Output& output, int64_t first, int64_t count) {
        float own[TILE];
        pack_tile(layout, output, row_of(output).floats(first, count, own), first, count);
    };
    by_tiles(layout, panels, threads, begin, pack);
}

void pack_whole(const Layout& layout, const uint8_t* values, const uint8_t* scales, const uint8_t* zeros,
                uint8_t* panels, int threads) {
    const int64_t groups = layout.num_groups(), width = layout.scale_bytes(), zero_width = layout.zero_bytes;
    const int offset = layout.format == Format::int8 ? 128 : 0;
    auto begin = [&](const Output& output) {
        const int64_t from = output.number * groups;
        put_column(output.panel + layout.scales_at(), scales + from * width, width, groups, output.place);
        if (layout.has_zeros())
            put_column(output.panel + layout.zeros_at(), zeros + from * zero_width, zero_width, groups, output.place);
    };
    auto pack = [&](const Output& output, int64_t first, int64_t count) {
        const uint8_t* row = values + output.number * layout.inputs + first;
        uint8_t numbers[TILE] = {};
        for (int64_t i = 0; i < count; ++i) numbers[i] = static_cast<uint8_t>(row[i] + offset);
        if (layout.format == Format::int8)
            put_bytes(output, numbers, first, count);
        else
            put_halves(output, numbers, first, count);
    };
    by_tiles(layout, panels, threads, begin, pack);
}

int64_t unpack_rows(const Layout& layout, const uint8_t* panels, const int64_t* numbers, int64_t count, float* out, int threads) {
    for (int64_t i = 0; i < count; ++i)
        if (numbers[i] < 0 || numbers[i] >= layout.outputs) return i;
    auto row = [&](int64_t i) {
        std::vector<uint8_t> words(2 * layout.padded_inputs());
        unpack_row(layout, panels, numbers[i], words.data(), out + i * layout.inputs);
    };
    run_rows(threads, count, 16 * layout.inputs, row);  // each word lies in another line of the cache
    return count;
}

}  // namespace baton
