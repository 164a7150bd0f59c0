#include "vectors_avx512.h"
// Vectors come first, and then what takes the place of the instructions: what follows is written in their terms.
#include "amx_emulated.h"
#include "amx_table.h"

const baton::Amx baton::amx_emulated = make_amx();
