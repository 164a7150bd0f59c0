// All kernels by tiles, in terms of what was included before.
#pragma once
#include "amx_attention.h"
#include "amx_products.h"

namespace {

constexpr baton::Amx make_amx() {
    return {
        multiply_pairs, multiply_bytes<Lines8>, multiply_bytes<WidenedLines4>, sum_row, attend_by_tiles, release_tiles, spin_tiles,
    };
}

}  // namespace
