// Vectors of 8 lanes, each a pair of registers: ARMv8.2 with products of bytes (ASIMDDP). The lanes are those of AVX2, so sums are made
// in the same order. What is here has internal linkage: no other file may get code for this instruction set.
#pragma once
#include <arm_neon.h>

#include <cstring>

#include "layout.h"

namespace {

constexpr int LANES = 8;
template <class Half>
struct Pair {
    Half low, high;
};
using Floats = Pair<float32x4_t>;
using Ints = Pair<uint8x16_t>;
using Sums = Pair<int32x4_t>;

// Rows of a block, and vectors of outputs at once, by how many of the 16 pairs of registers they take.
constexpr int FLOAT_ROWS = 6, WHOLE_ROWS = 6;
constexpr int float_vectors(int rows) { return rows <= 2 ? 4 : 2; }
constexpr int int8_vectors(int rows) { return rows <= 2 ? 4 : 2; }
constexpr int int4_vectors(int rows) { return rows <= 1 ? 4 : 2; }
constexpr int step_vectors(int rows) { return rows <= 1 ? 4 : 2; }

// made(half) of both halves, and of those of two or three vectors.
template <class Make, class Half, class... Others>
inline auto halves(Make made, const Pair<Half>& first, const Pair<Others>&... others) {
    using Made = decltype(made(first.low, others.low...));
    return Pair<Made>{made(first.low, others.low...), made(first.high, others.high...)};
}

inline Floats all(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Sums all_sums(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline Ints as_ints(const Sums& x) { return {vreinterpretq_u8_s32(x.low), vreinterpretq_u8_s32(x.high)}; }
inline Ints as_ints(const Floats& x) { return {vreinterpretq_u8_f32(x.low), vreinterpretq_u8_f32(x.high)}; }
inline Sums as_sums(const Ints& x) { return {vreinterpretq_s32_u8(x.low), vreinterpretq_s32_u8(x.high)}; }
inline Floats as_floats(const Sums& x) { return {vreinterpretq_f32_s32(x.low), vreinterpretq_f32_s32(x.high)}; }
inline Ints all(int32_t x) { return as_ints(all_sums(x)); }
inline Floats none() { return all(0.0f); }
inline Ints no_ints() { return all(0); }
template <class Half>
inline void hide(Pair<Half>& x) {
    asm volatile("" : "+w"(x.low), "+w"(x.high));
}

inline Floats load(const float* at) { return {vld1q_f32(at), vld1q_f32(at + 4)}; }
inline Ints load_ints(const uint8_t* at) { return {vld1q_u8(at), vld1q_u8(at + 16)}; }
inline Sums load_sums(const int32_t* at) { return {vld1q_s32(at), vld1q_s32(at + 4)}; }
inline void store(float* at, const Floats& x) {
    vst1q_f32(at, x.low);
    vst1q_f32(at + 4, x.high);
}
inline void store(int32_t* at, const Ints& x) {
    vst1q_s32(at, as_sums(x).low);
    vst1q_s32(at + 4, as_sums(x).high);
}
inline Floats load(const baton::Bfloat16* at) {
    const uint16x8_t bits = vld1q_u16(reinterpret_cast<const uint16_t*>(at));
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16))};
}
inline Floats load(const baton::Float16* at) {
    const float16x8_t numbers = vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(at)));
    return {vcvt_f32_f16(vget_low_f16(numbers)), vcvt_high_f32_f16(numbers)};
}
// The first `count` lanes of 4.
inline float32x4_t load_some_of_4(const float* at, int64_t count) {
    if (count >= 4) return vld1q_f32(at);
    if (count <= 0) return vdupq_n_f32(0.0f);
    if (count == 1) return vld1q_lane_f32(at, vdupq_n_f32(0.0f), 0);
    const float32x4_t two = vcombine_f32(vld1_f32(at), vdup_n_f32(0.0f));
    return count == 2 ? two : vld1q_lane_f32(at + 2, two, 2);
}
inline void store_some_of_4(float* at, float32x4_t x, int64_t count) {
    if (count >= 4) return vst1q_f32(at, x);
    if (count <= 0) return;
    if (count == 1) return vst1q_lane_f32(at, x, 0);
    vst1_f32(at, vget_low_f32(x));
    if (count == 3) vst1q_lane_f32(at + 2, x, 2);
}
// The first `count` lanes; zeros in the others. Out of line, or the compiler no longer unrolls the loops that call it.
__attribute__((noinline)) Floats load_some(const void* at, int64_t count) {
    const auto* const numbers = static_cast<const float*>(at);
    return {load_some_of_4(numbers, count), load_some_of_4(numbers + 4, count - 4)};
}
__attribute__((noinline)) void store_some(void* at, const Floats& x, int64_t count) {
    auto* const numbers = static_cast<float*>(at);
    store_some_of_4(numbers, x.low, count);
    store_some_of_4(numbers + 4, x.high, count - 4);
}
inline Floats to_floats(const Sums& x) { return {vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high)}; }
inline Sums widened(int16x8_t x) { return {vmovl_s16(vget_low_s16(x)), vmovl_high_s16(x)}; }
inline Floats load_bytes(const uint8_t* at) { return to_floats(widened(vreinterpretq_s16_u16(vmovl_u8(vld1_u8(at))))); }
inline Floats load(const int8_t* at) { return to_floats(widened(vmovl_s8(vld1_s8(at)))); }
// Of two bfloat16 in each lane.
inline Floats load_first_of_pairs(const baton::Bfloat16* at) {
    const auto first = [](int32x4_t pairs) { return vreinterpretq_f32_s32(vshlq_n_s32(pairs, 16)); };
    return halves(first, load_sums(reinterpret_cast<const int32_t*>(at)));
}
inline Floats load_second_of_pairs(const baton::Bfloat16* at) {
    const auto second = [](int32x4_t pairs) { return vreinterpretq_f32_s32(vandq_s32(pairs, vdupq_n_s32(-65536))); };
    return halves(second, load_sums(reinterpret_cast<const int32_t*>(at)));
}

inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
inline Floats minus_product(const Floats& c, const Floats& a, const Floats& b) {
    return {vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)};
}
inline Floats times(const Floats& a, const Floats& b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline Floats plus(const Floats& a, const Floats& b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline Floats less(const Floats& a, const Floats& b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline Floats over(const Floats& a, const Floats& b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
// The second, where one is a NaN.
inline Floats larger(const Floats& a, const Floats& b) {
    return halves([](float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }, a, b);
}
// The largest of all lanes, of which none is a NaN.
inline float largest_lane(const Floats& x) { return vmaxvq_f32(vmaxq_f32(x.low, x.high)); }
inline Floats magnitude(const Floats& x) { return {vabsq_f32(x.low), vabsq_f32(x.high)}; }
inline Floats nearest(const Floats& x) { return {vrndnq_f32(x.low), vrndnq_f32(x.high)}; }
inline float nearest(float x) { return vrndns_f32(x); }
// `x`, but 0 where `number` is below `least`.
inline Floats zero_below(const Floats& x, const Floats& number, const Floats& least) {
    const auto kept = [](float32x4_t own, float32x4_t one, float32x4_t bound) {
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(own), vcltq_f32(one, bound)));
    };
    return halves(kept, x, number, least);
}
// `x` where the lane's bit is 1, the first lane's being the lowest, and -inf elsewhere.
inline Floats with_bits(const Floats& x, uint32_t bits) {
    constexpr uint32_t OWN[] = {1, 2, 4, 8};
    const uint32x4_t own = vld1q_u32(OWN);
    const float32x4_t nothing = vdupq_n_f32(-__builtin_inff());
    return {vbslq_f32(vtstq_u32(vdupq_n_u32(bits), own), x.low, nothing),
            vbslq_f32(vtstq_u32(vdupq_n_u32(bits >> 4), own), x.high, nothing)};
}
inline Floats with_sign(const Floats& magnitude, const Floats& x) {
    const auto signed_one = [](float32x4_t size, float32x4_t sign) {
        const uint32x4_t bit = vandq_u32(vreinterpretq_u32_f32(sign), vdupq_n_u32(0x80000000));
        return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(size), bit));
    };
    return halves(signed_one, magnitude, x);
}
// x times 2 to the power of a whole number from -126 to 127.
inline Floats times_power(const Floats& x, const Floats& power) {
    const auto scaled = [](float32x4_t number, float32x4_t whole) {
        const int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(whole), vdupq_n_s32(127));
        return vmulq_f32(number, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
    };
    return halves(scaled, x, power);
}

inline void transpose_4(float32x4_t& a, float32x4_t& b, float32x4_t& c, float32x4_t& d) {
    const float32x4x2_t ab = vtrnq_f32(a, b), cd = vtrnq_f32(c, d);
    a = vcombine_f32(vget_low_f32(ab.val[0]), vget_low_f32(cd.val[0]));
    b = vcombine_f32(vget_low_f32(ab.val[1]), vget_low_f32(cd.val[1]));
    c = vcombine_f32(vget_high_f32(ab.val[0]), vget_high_f32(cd.val[0]));
    d = vcombine_f32(vget_high_f32(ab.val[1]), vget_high_f32(cd.val[1]));
}
// The lines and columns of 8 vectors change places.
inline void transpose(Floats (&x)[LANES]) {
    for (int i = 0; i < LANES; i += 4) {
        transpose_4(x[i].low, x[i + 1].low, x[i + 2].low, x[i + 3].low);
        transpose_4(x[i].high, x[i + 1].high, x[i + 2].high, x[i + 3].high);
    }
    for (int i = 0; i < 4; ++i) {
        const float32x4_t upper = x[i].high;
        x[i].high = x[4 + i].low;
        x[4 + i].low = upper;
    }
}

// Nearest integers, ties to even; they are small enough for a byte.
inline void store_nearest(int8_t* at, const Floats& x) {
    const int32x4_t low = vcvtnq_s32_f32(x.low), high = vcvtnq_s32_f32(x.high);
    vst1_s8(at, vqmovn_s16(vcombine_s16(vqmovn_s32(low), vqmovn_s32(high))));
}

inline Ints low_halves(const Ints& x) {
    return halves([](uint8x16_t bytes) { return vandq_u8(bytes, vdupq_n_u8(15)); }, x);
}
inline Ints high_halves(const Ints& x) {
    return halves([](uint8x16_t bytes) { return vshrq_n_u8(bytes, 4); }, x);
}
inline Ints both(const Ints& a, const Ints& b) { return {veorq_u8(a.low, b.low), veorq_u8(a.high, b.high)}; }
inline Sums operator*(const Sums& x, int32_t by) { return {vmulq_n_s32(x.low, by), vmulq_n_s32(x.high, by)}; }

// Each lane's 4 products of signed bytes, added to it; halves are small enough to be such.
inline Sums dot_halves(const Sums& sum, const Ints& halves_of, const Ints& x) {
    const auto dot = [](int32x4_t own, uint8x16_t a, uint8x16_t b) {
        return vdotq_s32(own, vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b));
    };
    return halves(dot, sum, halves_of, x);
}

constexpr bool WIDENS_STEPS = true;
inline Sums dot_in_group(const Sums& sum, const Ints& halves_of, const Ints& x) { return dot_halves(sum, halves_of, x); }
inline Sums add_steps(const Sums& total, const Sums& group, const Ints& steps) {
    const Sums by = as_sums(steps);
    return {vmlaq_s32(total.low, group.low, by.low), vmlaq_s32(total.high, group.high, by.high)};
}
inline Sums minus_eight_times(const Sums& x) { return x * -8; }
inline Ints of_16(int16x8_t low, int16x8_t high) { return {vreinterpretq_u8_s16(low), vreinterpretq_u8_s16(high)}; }
inline Ints all_16(int x) { return of_16(vdupq_n_s16(static_cast<int16_t>(x)), vdupq_n_s16(static_cast<int16_t>(x))); }
inline Ints plus_16(const Ints& a, const Ints& b) {
    const auto sum = [](uint8x16_t x, uint8x16_t y) {
        return vreinterpretq_u8_u16(vaddq_u16(vreinterpretq_u16_u8(x), vreinterpretq_u16_u8(y)));
    };
    return halves(sum, a, b);
}
inline Ints times_16(const Ints& a, const Ints& b) {
    const auto product = [](uint8x16_t x, uint8x16_t y) {
        return vreinterpretq_u8_u16(vmulq_u16(vreinterpretq_u16_u8(x), vreinterpretq_u16_u8(y)));
    };
    return halves(product, a, b);
}
inline int16x8_t load_wide(const uint8_t* at) { return vmovl_s8(vreinterpret_s8_u8(vld1_u8(at))); }
inline Ints load_steps(const uint8_t* at) { return as_ints(widened(load_wide(at))); }
// In both halves.
inline Ints load_step_pairs(const uint8_t* at) {
    const int16x8_t wide = load_wide(at);
    return of_16(vzip1q_s16(wide, wide), vzip2q_s16(wide, wide));
}

// Bytes come with an offset of 128; without it they are signed, as the instruction takes them.
constexpr int32_t OFFSET = 0;
using Bytes = Ints;
inline Bytes load_weights(const uint8_t* at) { return both(load_ints(at), all(static_cast<int32_t>(0x80808080))); }
inline Sums dot_bytes(const Sums& sum, const Bytes& w, const Ints& x) { return dot_halves(sum, w, x); }

}  // namespace
