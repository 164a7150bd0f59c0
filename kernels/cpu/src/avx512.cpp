#include "vectors_avx512.h"
// Vectors come first: what follows is written in their terms.
#include "table.h"

const baton::Kernels baton::avx512_kernels = make_kernels();
