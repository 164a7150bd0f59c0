// Rows times a matrix in panels.
#pragma once
#include "kernels.h"

namespace baton {

// x (rows, K), bias (N,) or null -> out (rows, N). With `dots` more rows than a block has are rounded to bfloat16 where the panels
// are of it: fewer take as long as memory does.
void multiply(const Kernels& kernels, const Dots* dots, const Layout& layout, const uint8_t* panels, const float* x, int64_t rows,
              const float* bias, float* out, int threads);

}  // namespace baton
