// Rounding a row to 8 bits, reading memory as fast as it comes, and multiplying as fast as it goes. To be included behind vectors.
#pragma once
#include "kernels.h"

namespace {

// The row's largest magnitude becomes 127; a row of zeros has the scale 1.
void round_row(const baton::RowRounding& work) {
    const float most = largest(work.x, work.inputs);
    const float scale = most > 0 ? most / 127.0f : 1.0f;
    const Floats scales = all(scale);
    int64_t k = 0;
    for (; k + LANES <= work.inputs; k += LANES) store_quotients(work.out + k, load(work.x + k), scales);
    for (; k < work.inputs; ++k) work.out[k] = static_cast<int8_t>(quotient(work.x[k], scale));
    for (; k < work.padded_inputs; ++k) work.out[k] = 0;
    for (int64_t start = 0, group = 0; start < work.padded_inputs; start += work.group, ++group) {
        const int64_t left = work.padded_inputs - start;
        int32_t sum = 0;
        for (int64_t i = 0; i < (left < work.group ? left : work.group); ++i) sum += work.out[start + i];
        work.sums[group * work.rows] = static_cast<float>(sum);
    }
    *work.scale = scale;
}

void interleave(const baton::Interleaving& work) {
    for (int64_t at = 0; at < work.length; at += LANES) {
        const int64_t left = work.length - at < LANES ? work.length - at : LANES;
        Floats lines[LANES];
        for (int64_t row = 0; row < LANES; ++row)
            lines[row] = row < work.count ? load_some(work.rows + row * work.length + at, left) : none();
        transpose(lines);
        for (int64_t i = 0; i < left; ++i) store_some(work.out + (at + i) * work.count, lines[i], work.count);
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
    if (format == baton::Format::int8 || format == baton::Format::int4) {
        const uint8_t numbers[4 * LANES] = {};
        Ints one = load_ints(numbers), sums[SPINNING];
        for (auto& sum : sums) sum = no_ints();
        for (int64_t i = 0; i < rounds; ++i) {
            asm volatile("" : "+v"(one));
            for (auto& sum : sums) sum = dot_halves(sum, one, one);
        }
        for (auto& sum : sums) asm volatile("" : : "v"(sum));
        return rounds * SPINNING * LANES * 4;
    }
    Floats one = all(1.0f), sums[SPINNING];
    for (auto& sum : sums) sum = none();
    for (int64_t i = 0; i < rounds; ++i) {
        asm volatile("" : "+v"(one));
        for (auto& sum : sums) sum = fma(sum, one, one);
    }
    for (auto& sum : sums) asm volatile("" : : "v"(sum));
    return rounds * SPINNING * LANES;
}

}  // namespace
