// Instruction sets as callers number them, and what each has.
#pragma once
#include "kernels.h"

namespace baton {

enum Isa : int64_t { AVX2 = 0, AVX512 = 1, AVX512_BF16 = 2 };

inline const Kernels& kernels_of(int64_t isa) { return isa == AVX2 ? avx2_kernels : avx512_kernels; }

inline const Dots* dots_of(int64_t isa) { return isa == AVX512_BF16 ? &avx512_dots : nullptr; }

}  // namespace baton
