// Vectors of 8 lanes: AVX2, FMA, F16C. What is here has internal linkage: no other file may get code for this instruction set.
#pragma once
#include <immintrin.h>

#include "layout.h"

namespace {

constexpr int LANES = 8;
using Floats = __m256;
using Ints = __m256i;
using Sums = int32_t __attribute__((vector_size(32)));

// Rows of a block, and vectors of outputs at once, by how many of the 16 registers they take.
constexpr int FLOAT_ROWS = 6, WHOLE_ROWS = 4;
constexpr int float_vectors(int rows) { return rows <= 2 ? 4 : 2; }
constexpr int int8_vectors(int rows) { return rows <= 1 ? 4 : rows <= 2 ? 2 : 1; }
constexpr int int4_vectors(int rows) { return rows <= 2 ? 2 : 1; }
constexpr int step_vectors(int rows) { return rows <= 1 ? 4 : rows <= 2 ? 2 : 1; }

inline Floats none() { return _mm256_setzero_ps(); }
inline Ints no_ints() { return _mm256_setzero_si256(); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Ints all(int32_t x) { return _mm256_set1_epi32(x); }
inline Floats load(const float* at) { return _mm256_loadu_ps(at); }
inline Floats load(const baton::Bfloat16* at) {
    Ints wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Floats load(const baton::Float16* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
inline Ints first_lanes(int64_t count) {
    const Ints lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes);
}
// The first `count` lanes; zeros in the others.
inline Floats load_some(const void* at, int64_t count) {
    return _mm256_castsi256_ps(_mm256_maskload_epi32(static_cast<const int*>(at), first_lanes(count)));
}
inline void store_some(void* at, Floats x, int64_t count) {
    _mm256_maskstore_epi32(static_cast<int*>(at), first_lanes(count), _mm256_castps_si256(x));
}
inline Floats load_bytes(const uint8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}
inline Ints load_ints(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const Ints*>(at)); }
// Of two bfloat16 in each lane.
inline Floats load_first_of_pairs(const baton::Bfloat16* at) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const Ints*>(at)), 16));
}
inline Floats load_second_of_pairs(const baton::Bfloat16* at) {
    const Ints pairs = _mm256_loadu_si256(reinterpret_cast<const Ints*>(at));
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}
inline void store(float* at, Floats x) { _mm256_storeu_ps(at, x); }
inline void store(int32_t* at, Ints x) { _mm256_storeu_si256(reinterpret_cast<Ints*>(at), x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats minus_product(Floats c, Floats a, Floats b) { return _mm256_fnmadd_ps(a, b, c); }
inline Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Sums all_sums(int32_t x) { return reinterpret_cast<Sums>(all(x)); }
inline Floats to_floats(Sums x) { return _mm256_cvtepi32_ps(reinterpret_cast<Ints>(x)); }
inline Ints low_halves(Ints x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Ints both(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
inline Ints high_halves(Ints x) { return low_halves(_mm256_srli_epi16(x, 4)); }

// Each lane's 4 products of unsigned halves and signed bytes, added to it. 15 * 127 * 2 is far from 16 bits' end.
inline Sums dot_halves(Sums sum, Ints halves, Ints x) {
    return sum + reinterpret_cast<Sums>(_mm256_madd_epi16(_mm256_maddubs_epi16(halves, x), _mm256_set1_epi16(1)));
}

constexpr bool WIDENS_STEPS = false;
// A group of STEP_INPUTS: the sums of half of its inputs, 8 * 127 * 16, fit into 16 bits, and their products with a step are added up
// in 32.
inline Sums dot_in_group(Sums sum, Ints halves, Ints x) {
    return reinterpret_cast<Sums>(_mm256_add_epi16(reinterpret_cast<Ints>(sum), _mm256_maddubs_epi16(halves, x)));
}
inline Sums add_steps(Sums total, Sums group, Ints steps) {
    return total + reinterpret_cast<Sums>(_mm256_madd_epi16(reinterpret_cast<Ints>(group), steps));
}
inline Sums minus_eight_times(Sums x) {
    return reinterpret_cast<Sums>(_mm256_mullo_epi16(reinterpret_cast<Ints>(x), _mm256_set1_epi16(-8)));
}
inline Sums load_sums(const int32_t* at) {
    return reinterpret_cast<Sums>(_mm256_loadu_si256(reinterpret_cast<const Ints*>(at)));
}
inline Ints all_16(int x) { return _mm256_set1_epi16(static_cast<int16_t>(x)); }
inline Ints plus_16(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
inline Ints times_16(Ints a, Ints b) { return _mm256_mullo_epi16(a, b); }
// In both halves.
inline Ints load_step_pairs(const uint8_t* at) {
    const Ints wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    return _mm256_blend_epi16(wide, _mm256_slli_epi32(wide, 16), 0xaa);
}
inline Ints load_steps(const uint8_t* at) { return load_step_pairs(at); }

// Bytes with an offset of 128, made ready to be multiplied. Two products of whole unsigned bytes would not fit into 16 bits: they
// are magnitudes, of at most 128, with the weights' signs on the other side.
constexpr int32_t OFFSET = 0;
struct Bytes {
    Ints magnitude, value;
};
inline Bytes load_weights(const uint8_t* at) {
    Ints value = _mm256_xor_si256(load_ints(at), _mm256_set1_epi8(-128));
    return {_mm256_abs_epi8(value), value};
}
inline Sums dot_bytes(Sums sum, const Bytes& w, Ints x) {
    return dot_halves(sum, w.magnitude, _mm256_sign_epi8(x, w.value));
}

inline Floats load(const int8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}
inline Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats less(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats over(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
// The largest of all lanes, of which none is a NaN.
inline float largest_lane(Floats x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline Floats magnitude(Floats x) { return _mm256_andnot_ps(all(-0.0f), x); }
inline Floats nearest(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// `x`, but 0 where `number` is below `least`.
inline Floats zero_below(Floats x, Floats number, Floats least) {
    return _mm256_and_ps(x, _mm256_cmp_ps(number, least, _CMP_NLT_UQ));
}
// `x` where the lane's bit is 1, the first lane's being the lowest, and -inf elsewhere.
inline Floats with_bits(Floats x, uint32_t bits) {
    const Ints own = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const Ints is_set = _mm256_cmpeq_epi32(_mm256_and_si256(all(static_cast<int32_t>(bits)), own), own);
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), x, _mm256_castsi256_ps(is_set));
}
inline Floats with_sign(Floats magnitude, Floats x) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(x, _mm256_set1_ps(-0.0f)));
}
// x times 2 to the power of a whole number from -126 to 127.
inline Floats times_power(Floats x, Floats power) {
    const Ints exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

// The lines and columns of 8 vectors change places.
inline void transpose(Floats (&x)[LANES]) {
    __m256 y[LANES];
    for (int i = 0; i < LANES; i += 4) {
        const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(x[i], x[i + 1]));
        const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(x[i], x[i + 1]));
        const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(x[i + 2], x[i + 3]));
        const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(x[i + 2], x[i + 3]));
        y[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
        y[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
        y[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
        y[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
    }
    // y[4 g + i] has, in its half h, column 4 h + i of lines 4 g to 4 g + 3.
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm256_permute2f128_ps(y[i], y[4 + i], 0x20);
        x[4 + i] = _mm256_permute2f128_ps(y[i], y[4 + i], 0x31);
    }
}

// Nearest integers, ties to even; they are small enough for a byte.
inline void store_nearest(int8_t* at, Floats x) {
    const Ints whole = _mm256_cvtps_epi32(x);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(at), _mm_packs_epi16(words, words));
}

inline float nearest(float x) { return _mm_cvtss_f32(_mm_round_ss(_mm_setzero_ps(), _mm_set_ss(x), 8)); }

}  // namespace

#include "casts_x86.h"
