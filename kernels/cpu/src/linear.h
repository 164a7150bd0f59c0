// Rows times a matrix in panels.
#pragma once
#include "kernels.h"

namespace baton {

// x (rows, K), bias (N,) or null -> out (rows, N).
void multiply(const Kernels& kernels, const Layout& layout, const uint8_t* panels, const float* x, int64_t rows,
              const float* bias, float* out, int threads);

}  // namespace baton
