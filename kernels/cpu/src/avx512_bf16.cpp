#include "vectors_avx512.h"
// Vectors come first: what follows is written in their terms.
#include "dot_attention.h"
#include "dot_panels.h"

const baton::Dots baton::avx512_dots = {by_rows<DotPanels, FLOAT_ROWS>, round_to_bfloat16, attend<DotProducts>, DOT_SIZE, spin_dots};
