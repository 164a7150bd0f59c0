#include "isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace baton {
namespace {

bool has_amx_instructions() {
    constexpr uint32_t BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, ALL = BF16 | TILE | INT8;
    uint32_t a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & ALL) == ALL;
}

// Whether the system saves tiles when it switches threads.
bool saves_tiles() {
    constexpr uint32_t OSXSAVE = 1u << 27, TILES = 3u << 17;
    uint32_t a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & OSXSAVE) == 0) return false;
    asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (a & TILES) == TILES;
}

// The system gives a process tiles that asks for them, once for all its threads. A sandbox may refuse.
bool are_given() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

Tiles find_tiles() {
    if (!has_isa(AVX512_BF16)) return Tiles::none;
    if (has_amx_instructions() && saves_tiles() && are_given()) return Tiles::of_processor;
    const char* const wanted = std::getenv("BATON_EMULATE_TILES");
    return wanted != nullptr && std::strcmp(wanted, "1") == 0 ? Tiles::emulated : Tiles::none;
}

}  // namespace

Tiles kind_of_tiles() {
    static const Tiles found = find_tiles();
    return found;
}

bool has_isa(int64_t isa) {
    if (isa > AMX) return false;
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (isa == AVX2) return avx2;
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
    if (isa == AVX512) return avx512;
    return avx512 && __builtin_cpu_supports("avx512bf16") && (isa == AVX512_BF16 || kind_of_tiles() != Tiles::none);
}

}  // namespace baton
