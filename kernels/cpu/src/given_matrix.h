// A matrix in panels as callers describe it: `kernels/cpu/layer_structs.py` has the same fields.
#pragma once
#include "isa.h"
#include "linear.h"

namespace baton {

struct GivenMatrix {
    int64_t isa, format, outputs, inputs, group, zero_bytes, scales;
    const uint8_t* panels;
    const float* bias;  // (outputs,) or null
};

inline Matrix matrix_of(const GivenMatrix& given, const float* bias) {
    const Layout layout{static_cast<Format>(given.format), given.outputs,    given.inputs, given.group,
                        given.zero_bytes,                  static_cast<Format>(given.scales)};
    return {&kernels_of(given.isa), dots_of(given.isa), amx_of(given.isa), layout, given.panels, bias};
}

inline Matrix matrix_of(const GivenMatrix& given) { return matrix_of(given, given.bias); }

}  // namespace baton
