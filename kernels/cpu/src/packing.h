// Matrices brought into panels; some are rounded on the way.
#pragma once
#include "layout.h"

namespace baton {

// (N, K) float32, to the nearest number of the format. int8: each output's largest magnitude becomes 127. int4: each group's
// becomes -8, without zero points (as in llama.cpp's Q4_0).
void pack_floats(const Layout& layout, const float* matrix, uint8_t* panels, int threads);

// values (N, K), scales (N,)
void pack_int8(const Layout& layout, const int8_t* values, const float* scales, uint8_t* panels, int threads);

// values (N, K) 0..15, scales (N, groups) float16, zeros (N, groups) or null
void pack_int4(const Layout& layout, const uint8_t* values, const uint16_t* scales, const uint8_t* zeros,
               uint8_t* panels, int threads);

}  // namespace baton
