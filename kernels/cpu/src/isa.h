// Instruction sets as callers number them, and what each has.
#pragma once
#include "kernels.h"

namespace baton {

// On x86-64 a later one has all of an earlier one. NEON is ARM's.
enum Isa : int64_t { AVX2 = 0, AVX512 = 1, AVX512_BF16 = 2, AMX = 3, NEON = 4 };

// Whether this processor, and its system, have it; of the other architecture it has none. Of Intel's first AVX-512 processors, without
// VNNI, AVX2 is used.
bool has_isa(int64_t isa);

enum class Tiles : int { none = 0, emulated = 1, of_processor = 2 };
Tiles kind_of_tiles();

#if defined(__x86_64__)

inline const Kernels& kernels_of(int64_t isa) { return isa == AVX2 ? avx2_kernels : avx512_kernels; }

inline const Dots* dots_of(int64_t isa) { return isa >= AVX512_BF16 ? &avx512_dots : nullptr; }

inline const Amx* amx_of(int64_t isa) {
    if (isa < AMX) return nullptr;
    return kind_of_tiles() == Tiles::of_processor ? &amx_of_processor : &amx_emulated;
}

#else

inline const Kernels& kernels_of(int64_t) { return neon_kernels; }

inline const Dots* dots_of(int64_t) { return nullptr; }

inline const Amx* amx_of(int64_t) { return nullptr; }

#endif

}  // namespace baton
