#include "vectors_neon.h"
// Vectors come first: what follows is written in their terms.
#include "table.h"

const baton::Kernels baton::neon_kernels = make_kernels();
