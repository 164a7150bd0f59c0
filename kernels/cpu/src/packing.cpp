#include "packing.h"

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "thread_pool.h"

namespace baton {
namespace {

__attribute__((target("f16c"))) uint16_t to_float16(float x) { return _cvtss_sh(x, 0); }
__attribute__((target("f16c"))) float from_float16(uint16_t x) { return _cvtsh_ss(x); }

float from_bfloat16(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}

uint16_t to_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (std::isnan(x)) return static_cast<uint16_t>(bits >> 16 | 64);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A row of `count` numbers as float32: where it lies, or in `own`.
const float* as_floats(Format numbers, const uint8_t* row, int64_t count, std::vector<float>& own) {
    if (numbers == Format::f32) return reinterpret_cast<const float*>(row);
    own.resize(static_cast<size_t>(count));
    for (int64_t k = 0; k < count; ++k) {
        uint16_t half;
        std::memcpy(&half, row + 2 * k, 2);  // in a file it may begin anywhere
        own[static_cast<size_t>(k)] = numbers == Format::bf16 ? from_bfloat16(half) : from_float16(half);
    }
    return own.data();
}

// Larger pages: a step reads all panels, and would look up each page of 4 KiB.
void ask_for_large_pages(uint8_t* memory, int64_t bytes) {
    constexpr uintptr_t PAGE = 4096;
    const auto from = (reinterpret_cast<uintptr_t>(memory) + PAGE - 1) / PAGE * PAGE;
    const auto end = reinterpret_cast<uintptr_t>(memory) + bytes;
    if (end > from) madvise(reinterpret_cast<void*>(from), end - from, MADV_HUGEPAGE);
}

// pack_output(output, its place in the panel, the panel)
template <class PackOutput>
void by_panels(const Layout& layout, uint8_t* panels, int threads, PackOutput pack_output) {
    const int64_t bytes = layout.panel_bytes();
    ask_for_large_pages(panels, bytes * layout.num_panels());
    auto panel_of = [&](int64_t number) {
        uint8_t* panel = panels + number * bytes;
        std::memset(panel, 0, bytes);
        for (int64_t place = 0; place < std::min(PANEL, layout.outputs - number * PANEL); ++place)
            pack_output(number * PANEL + place, place, panel);
    };
    run(threads, layout.num_panels(), panel_of);
}

// `SIDE` inputs of an output lie side by side.
template <class Number, int SIDE, class Convert>
void put_floats(const Layout& layout, const float* row, int64_t place, uint8_t* panel, Convert convert) {
    auto* to = reinterpret_cast<Number*>(panel) + place * SIDE;
    for (int64_t k = 0; k < layout.inputs; ++k) to[k / SIDE * SIDE * PANEL + k % SIDE] = convert(row[k]);
}

void put_byte(uint8_t* panel, int64_t k, int64_t place, int number) {
    panel[k / 4 * (PANEL * 4) + place * 4 + k % 4] = static_cast<uint8_t>(number + 128);
}

// An output's `bytes` for each group, in a table from `start` on that has a line for each group.
void put_column(uint8_t* start, const uint8_t* column, int64_t bytes, int64_t groups, int64_t place) {
    for (int64_t group = 0; group < groups; ++group)
        std::memcpy(start + (group * PANEL + place) * bytes, column + group * bytes, bytes);
}

void round_to_int8(const Layout& layout, const float* row, int64_t place, uint8_t* panel) {
    auto* scales = reinterpret_cast<float*>(panel + layout.scales_at()) + place;
    for (int64_t group = 0; group < layout.num_groups(); ++group) {
        const int64_t first = group * layout.group, end = std::min(layout.inputs, first + layout.group);
        float most = 0;
        for (int64_t k = first; k < end; ++k) most = std::max(most, std::fabs(row[k]));
        const float scale = most > 0 ? most / 127.0f : 1.0f;
        scales[group * PANEL] = scale;
        for (int64_t k = first; k < end; ++k)
            put_byte(panel, k, place, static_cast<int>(std::nearbyint(row[k] / scale)));
    }
}

void put_half(uint8_t* panel, int64_t k, int64_t place, uint8_t half) {
    panel[k / 8 * (PANEL * 4) + place * 4 + k % 4] |= static_cast<uint8_t>(half << (k / 4 % 2 * 4));
}

uint16_t* scale_of(const Layout& layout, uint8_t* panel, int64_t group, int64_t place) {
    return reinterpret_cast<uint16_t*>(panel + layout.scales_at()) + group * PANEL + place;
}

void round_to_int4(const Layout& layout, const float* row, int64_t place, uint8_t* panel) {
    for (int64_t group = 0; group < layout.num_groups(); ++group) {
        const int64_t first = group * layout.group, end = std::min(layout.inputs, first + layout.group);
        float most = 0;
        for (int64_t k = first; k < end; ++k)
            if (std::fabs(row[k]) > std::fabs(most)) most = row[k];
        const uint16_t stored = to_float16(most / -8.0f);
        const float scale = from_float16(stored);
        *scale_of(layout, panel, group, place) = stored;
        for (int64_t k = first; k < end; ++k) {
            const float number = scale == 0 ? 0 : std::nearbyint(row[k] / scale);
            put_half(panel, k, place, static_cast<uint8_t>(std::min(std::max(number + 8, 0.0f), 15.0f)));
        }
    }
}

}  // namespace

void pack_floats(const Layout& layout, Format numbers, const uint8_t* matrix, uint8_t* panels, int threads) {
    const int64_t width = layout.inputs * (numbers == Format::f32 ? 4 : 2);
    by_panels(layout, panels, threads, [&](int64_t output, int64_t place, uint8_t* panel) {
        thread_local std::vector<float> own;
        const float* row = as_floats(numbers, matrix + output * width, layout.inputs, own);
        switch (layout.format) {
            case Format::f32: return put_floats<float, 1>(layout, row, place, panel, [](float x) { return x; });
            case Format::bf16: return put_floats<uint16_t, 2>(layout, row, place, panel, to_bfloat16);
            case Format::f16: return put_floats<uint16_t, 1>(layout, row, place, panel, to_float16);
            case Format::int8: return round_to_int8(layout, row, place, panel);
            case Format::int4: return round_to_int4(layout, row, place, panel);
        }
    });
}

void pack_whole(const Layout& layout, const uint8_t* values, const uint8_t* scales, const uint8_t* zeros,
                uint8_t* panels, int threads) {
    const int64_t groups = layout.num_groups(), width = layout.scale_bytes(), zero_width = layout.zero_bytes();
    by_panels(layout, panels, threads, [&](int64_t output, int64_t place, uint8_t* panel) {
        const uint8_t* row = values + output * layout.inputs;
        for (int64_t k = 0; k < layout.inputs; ++k)
            if (layout.format == Format::int8)
                put_byte(panel, k, place, static_cast<int8_t>(row[k]));
            else
                put_half(panel, k, place, row[k]);
        put_column(panel + layout.scales_at(), scales + output * groups * width, width, groups, place);
        if (zeros != nullptr)
            put_column(panel + layout.zeros_at(), zeros + output * groups * zero_width, zero_width, groups, place);
    });
}

}  // namespace baton
