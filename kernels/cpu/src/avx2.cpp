#include "vectors_avx2.h"
// Vectors come first: what follows is written in their terms.
#include "table.h"

const baton::Kernels baton::avx2_kernels = make_kernels();
