// Rounding a row to 8 bits, reading memory as fast as it comes, and multiplying as fast as it goes. To be included behind vectors.
#pragma once
#include "kernels.h"

namespace {

inline float largest_magnitude(const float* x, int64_t count) {
    Floats most[4] = {none(), none(), none(), none()};
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int64_t j = 0; j < 4; ++j) most[j] = larger(most[j], magnitude(load(x + i + j * LANES)));
    for (; i < count; i += LANES) most[0] = larger(most[0], magnitude(load_some(x + i, count - i)));
    float each[LANES], found = 0;
    store(each, larger(larger(most[0], most[1]), larger(most[2], most[3])));
    for (float one : each) found = one > found ? one : found;
    return found;
}

// A row's scale, and quotients by it, found by products as division rounds them: the first product's error is known exactly. Where
// that would be no normal number, there is division, which is slower.
struct Divisor {
    float scale, inverse;
    bool by_products;

    explicit Divisor(float scale) : scale(scale), inverse(1.0f / scale), by_products(scale > 1e-20f && scale < 1e20f) {}

    Floats quotients(Floats x) const {
        if (!by_products) return over(x, all(scale));
        const Floats about = times(x, all(inverse));
        return fma(minus_product(x, about, all(scale)), all(inverse), about);
    }
};

// The row's largest magnitude becomes 127; a row of zeros has the scale 1.
void round_row(const baton::RowRounding& work) {
    const float most = largest_magnitude(work.x, work.inputs);
    const Divisor divisor(most > 0 ? most / 127.0f : 1.0f);
    int64_t k = 0;
    for (; k + LANES <= work.inputs; k += LANES) store_nearest(work.out + k, divisor.quotients(load(work.x + k)));
    for (; k < work.inputs; ++k) work.out[k] = static_cast<int8_t>(nearest(work.x[k] / divisor.scale));
    for (; k < work.padded_inputs; ++k) work.out[k] = 0;
    *work.scale = divisor.scale;
}

// The rows of a block at once, a lane each.
void sum_groups(const baton::GroupSums& work) {
    const Ints ones = all(0x01010101);
    const uint32_t* x = work.x;
    for (int64_t group = 0; group < work.groups; ++group) {
        Sums sums = all_sums(0);
        for (int64_t i = 0; i < work.length; ++i, x += work.rows)
            sums = dot_halves(sums, ones, as_ints(load_some(x, work.rows)));
        store_some(work.starts + group * work.rows, as_floats(sums * -work.offset), work.rows);
        if (work.sums != nullptr) store_some(work.sums + group * work.rows, to_floats(sums), work.rows);
    }
}

uint64_t read_memory(const uint8_t* from, int64_t bytes) {
    Ints found[4] = {no_ints(), no_ints(), no_ints(), no_ints()};
    constexpr int64_t STEP = LANES * 4;
    for (int64_t at = 0; at + 4 * STEP <= bytes; at += 4 * STEP) {
        prefetch(from + at);
        for (int i = 0; i < 4; ++i) found[i] = both(found[i], load_ints(from + at + i * STEP));
    }
    int32_t each[4 * LANES];
    for (int i = 0; i < 4; ++i) store(each + i * LANES, found[i]);
    uint64_t all_bits = 0;
    for (int32_t one : each) all_bits ^= static_cast<uint32_t>(one);
    return all_bits;
}

int64_t spin(baton::Format format, int64_t rounds) {
    if (format >= baton::Format::int8) {
        Ints one = no_ints();
        Sums sums[SPINNING];
        for (auto& sum : sums) sum = all_sums(0);
        for (int64_t i = 0; i < rounds; ++i) {
            hide(one);
            for (auto& sum : sums) sum = dot_halves(sum, one, one);
        }
        for (auto& sum : sums) hide(sum);
        return rounds * SPINNING * LANES * 4;
    }
    Floats one = all(1.0f), sums[SPINNING];
    for (auto& sum : sums) sum = none();
    for (int64_t i = 0; i < rounds; ++i) {
        hide(one);
        for (auto& sum : sums) sum = fma(sum, one, one);
    }
    for (auto& sum : sums) hide(sum);
    return rounds * SPINNING * LANES;
}

}  // namespace
