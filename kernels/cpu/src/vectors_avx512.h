// Vectors of 16 lanes: AVX-512 with VNNI. What is here has internal linkage: no other file may get code for this instruction set.
#pragma once
#include <immintrin.h>

#include "layout.h"

namespace {

constexpr int LANES = 16;
using Floats = __m512;
using Ints = __m512i;
// Sums of 32 bits, by the type that the instruction has: where types change GCC copies registers, twice for each product.
using Sums = int32_t __attribute__((vector_size(64)));

// Rows of a block, and vectors of outputs at once, by how many of the 32 registers they take.
constexpr int FLOAT_ROWS = 12, WHOLE_ROWS = 12;
constexpr int float_vectors(int) { return 2; }
constexpr int int8_vectors(int) { return 2; }
constexpr int int4_vectors(int) { return 2; }
constexpr int step_vectors(int) { return 2; }

inline Floats none() { return _mm512_setzero_ps(); }
inline Ints no_ints() { return _mm512_setzero_si512(); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Ints all(int32_t x) { return _mm512_set1_epi32(x); }
inline Floats load(const float* at) { return _mm512_loadu_ps(at); }
inline Floats load(const baton::Bfloat16* at) {
    Ints wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Floats load(const baton::Float16* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>(count < LANES ? (1 << count) - 1 : 0xffff); }
// The first `count` lanes; zeros in the others.
inline Floats load_some(const void* at, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), at); }
inline void store_some(void* at, Floats x, int64_t count) { _mm512_mask_storeu_ps(at, first_lanes(count), x); }
inline Floats load_bytes(const uint8_t* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}
inline Ints load_ints(const uint8_t* at) { return _mm512_loadu_si512(at); }
// Of two bfloat16 in each lane.
inline Floats load_first_of_pairs(const baton::Bfloat16* at) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(at), 16));
}
inline Floats load_second_of_pairs(const baton::Bfloat16* at) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(at), _mm512_set1_epi32(-65536)));
}
inline void store(float* at, Floats x) { _mm512_storeu_ps(at, x); }
inline void store(int32_t* at, Ints x) { _mm512_storeu_si512(at, x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats minus_product(Floats c, Floats a, Floats b) { return _mm512_fnmadd_ps(a, b, c); }
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Sums all_sums(int32_t x) { return reinterpret_cast<Sums>(all(x)); }
inline Floats to_floats(Sums x) { return _mm512_cvtepi32_ps(reinterpret_cast<Ints>(x)); }
inline Ints low_halves(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Ints both(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
inline Ints high_halves(Ints x) { return low_halves(_mm512_srli_epi16(x, 4)); }

// Each lane's 4 products of unsigned and signed bytes, added to it.
inline Sums dot_halves(Sums sum, Ints halves, Ints x) {
    return reinterpret_cast<Sums>(_mm512_dpbusd_epi32(reinterpret_cast<Ints>(sum), halves, x));
}

constexpr bool WIDENS_STEPS = true;
// A group of STEP_INPUTS: 8 * 127 * 32 fits into 16 bits, so that an instruction for products of 16 bits takes a sum times its step,
// with 0 in the upper half.
inline Sums dot_in_group(Sums sum, Ints halves, Ints x) { return dot_halves(sum, halves, x); }
inline Sums add_steps(Sums total, Sums group, Ints steps) {
    return reinterpret_cast<Sums>(_mm512_dpwssd_epi32(reinterpret_cast<Ints>(total), reinterpret_cast<Ints>(group), steps));
}
inline Sums minus_eight_times(Sums x) { return x * -8; }
inline Sums load_sums(const int32_t* at) { return reinterpret_cast<Sums>(_mm512_loadu_si512(at)); }
inline Ints all_16(int x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); }
inline Ints plus_16(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
inline Ints times_16(Ints a, Ints b) { return _mm512_mullo_epi16(a, b); }
inline Ints load_wide(const uint8_t* at) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
inline Ints load_steps(const uint8_t* at) { return _mm512_and_si512(load_wide(at), all(0xffff)); }
// In both halves.
inline Ints load_step_pairs(const uint8_t* at) {
    const Ints wide = load_wide(at);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, wide, _mm512_slli_epi32(wide, 16));
}

// Weights come with an offset of 128, so that they are unsigned: 128 times the sum of the inputs is to be taken off.
constexpr int32_t OFFSET = 128;
using Bytes = Ints;
inline Bytes load_weights(const uint8_t* at) { return load_ints(at); }
inline Sums dot_bytes(Sums sum, const Bytes& w, Ints x) { return dot_halves(sum, w, x); }

inline Floats load(const int8_t* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}
inline Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats less(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats over(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
// The largest of all lanes, of which none is a NaN.
inline float largest_lane(Floats x) { return _mm512_reduce_max_ps(x); }
inline Floats magnitude(Floats x) { return _mm512_abs_ps(x); }
inline Floats nearest(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// `x`, but 0 where `number` is below `least`.
inline Floats zero_below(Floats x, Floats number, Floats least) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(number, least, _CMP_NLT_UQ), x);
}
// `x` where the lane's bit is 1, the first lane's being the lowest, and -inf elsewhere.
inline Floats with_bits(Floats x, uint32_t bits) {
    return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), static_cast<__mmask16>(bits), x);
}
inline Floats with_sign(Floats magnitude, Floats x) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(x, _mm512_set1_ps(-0.0f)));
}
// x times 2 to the power of a whole number from -126 to 127.
inline Floats times_power(Floats x, Floats power) { return _mm512_scalef_ps(x, power); }

// The lines and columns of 16 vectors change places.
inline void transpose(Floats (&x)[LANES]) {
    __m512 y[LANES];
    for (int i = 0; i < LANES; i += 4) {
        const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[i], x[i + 1]));
        const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(x[i], x[i + 1]));
        const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(x[i + 2], x[i + 3]));
        const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(x[i + 2], x[i + 3]));
        y[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        y[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        y[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        y[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
    // y[4 g + i] has, in its quarter q, column 4 q + i of lines 4 g to 4 g + 3.
    for (int i = 0; i < 4; ++i) {
        const __m512 a = _mm512_shuffle_f32x4(y[i], y[4 + i], 0x88), b = _mm512_shuffle_f32x4(y[i], y[4 + i], 0xdd);
        const __m512 c = _mm512_shuffle_f32x4(y[8 + i], y[12 + i], 0x88);
        const __m512 d = _mm512_shuffle_f32x4(y[8 + i], y[12 + i], 0xdd);
        x[i] = _mm512_shuffle_f32x4(a, c, 0x88);
        x[4 + i] = _mm512_shuffle_f32x4(b, d, 0x88);
        x[8 + i] = _mm512_shuffle_f32x4(a, c, 0xdd);
        x[12 + i] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
}

// Nearest integers, ties to even; they are small enough for a byte.
inline void store_nearest(int8_t* at, Floats x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

inline float nearest(float x) { return _mm_cvtss_f32(_mm_round_ss(_mm_setzero_ps(), _mm_set_ss(x), 8)); }

}  // namespace

#include "casts_x86.h"
