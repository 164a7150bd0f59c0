// Matrices brought into panels, some rounded on the way, and rows read back.
#pragma once
#include "layout.h"

namespace baton {

// (N, K) of the format `numbers`, which is f32, bf16 or f16, to the nearest number of the layout's. int8: each group's largest
// magnitude becomes 127. steps4: a group has the step with which it has room.
void pack_floats(const Layout& layout, Format numbers, const uint8_t* matrix, uint8_t* panels, int threads);

// values (N, K): signed bytes with int8, 0..15 with int4; scales (N, groups) in layout.scales; zeros (N, groups) in
// layout.zero_bytes, or null where these are 0. All are copied as they are.
void pack_whole(const Layout& layout, const uint8_t* values, const uint8_t* scales, const uint8_t* zeros,
                uint8_t* panels, int threads);

// The `count` rows with those numbers -> (count, K). Not of steps4. Returns `count`, or the place of the first number that the
// matrix does not have; nothing is written then.
int64_t unpack_rows(const Layout& layout, const uint8_t* panels, const int64_t* numbers, int64_t count, float* out, int threads);

}  // namespace baton
