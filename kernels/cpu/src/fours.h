// Vectors of 4 floats, and float16, as every processor of an architecture has them (on x86-64, every one with AVX2).
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

namespace baton {

#if defined(__x86_64__)

using Four = __m128;
inline Four four(float x) { return _mm_set1_ps(x); }
inline Four load_four(const float* at) { return _mm_loadu_ps(at); }
inline void store_four(float* at, Four x) { _mm_storeu_ps(at, x); }
// The second, where the first is a NaN.
inline Four lesser(Four a, Four b) { return _mm_min_ps(a, b); }
inline Four greater(Four a, Four b) { return _mm_max_ps(a, b); }
// Quotients, each to the nearest whole number; the least of all where that has no 32 bits.
inline void store_quotients(int32_t* at, Four a, Four b) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm_cvtps_epi32(_mm_div_ps(a, b)));
}
inline int32_t quotient(float a, float b) { return _mm_cvtss_si32(_mm_set_ss(a / b)); }

#define BATON_OF_FLOAT16 __attribute__((target("f16c"))) inline
BATON_OF_FLOAT16 uint16_t float16_of(float x) { return _cvtss_sh(x, 0); }
BATON_OF_FLOAT16 float float_of(uint16_t float16) { return _cvtsh_ss(float16); }

#else

using Four = float32x4_t;
inline Four four(float x) { return vdupq_n_f32(x); }
inline Four load_four(const float* at) { return vld1q_f32(at); }
inline void store_four(float* at, Four x) { vst1q_f32(at, x); }
inline Four lesser(Four a, Four b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Four greater(Four a, Four b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline int32x4_t whole(Four x) {
    const uint32x4_t fits = vcltq_f32(vabsq_f32(x), vdupq_n_f32(2147483648.0f));
    return vbslq_s32(fits, vcvtnq_s32_f32(x), vdupq_n_s32(INT32_MIN));
}
inline void store_quotients(int32_t* at, Four a, Four b) { vst1q_s32(at, whole(vdivq_f32(a, b))); }
inline int32_t quotient(float a, float b) { return vgetq_lane_s32(whole(four(a / b)), 0); }

#define BATON_OF_FLOAT16 inline
BATON_OF_FLOAT16 uint16_t float16_of(float x) {
    const auto narrow = static_cast<__fp16>(x);
    uint16_t bits;
    std::memcpy(&bits, &narrow, sizeof bits);
    return bits;
}
BATON_OF_FLOAT16 float float_of(uint16_t float16) {
    __fp16 narrow;
    std::memcpy(&narrow, &float16, sizeof narrow);
    return narrow;
}

#endif

BATON_OF_FLOAT16 void to_float16(const float* from, int64_t count, uint16_t* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = float16_of(from[i]);
}

// `from` may begin anywhere, as a row in a file does.
BATON_OF_FLOAT16 void from_float16(const uint8_t* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) {
        uint16_t half;
        std::memcpy(&half, from + 2 * i, 2);
        to[i] = float_of(half);
    }
}

}  // namespace baton
