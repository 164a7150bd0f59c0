#include "vectors_avx512.h"
// Vectors come first: what follows is written in their terms.
#include "amx_table.h"

const baton::Amx baton::amx_of_processor = make_amx();
