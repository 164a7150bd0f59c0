#include <asm/hwcap.h>
#include <sys/auxv.h>

#include "isa.h"

namespace baton {

Tiles kind_of_tiles() { return Tiles::none; }

bool has_isa(int64_t isa) { return isa == NEON && (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }

}  // namespace baton
