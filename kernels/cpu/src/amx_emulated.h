// The instructions for tiles in plain C++, by their intrinsics' names: for tests on processors that have none.
//
// Bits are those that Intel's manual defines. A product of bfloat16 adds up its even and its odd inputs apart, from 0 on, by fused
// multiplications and additions in float32; then one sum to the other, and both to the tile. A denormal number counts as 0, and
// becomes 0. What a processor would refuse ends the program.
#pragma once
#include <immintrin.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int TILES = 8, LINES = 16, LINE_BYTES = 64;

struct EmulatedTiles {
    uint16_t column_bytes[TILES];
    uint8_t rows[TILES];  // 0: of a tile that is not configured
    alignas(64) uint8_t lines[TILES][LINES][LINE_BYTES];
};
thread_local EmulatedTiles emulated;

inline void refuse_unless(bool holds) {
    if (!holds) __builtin_trap();
}

void emulated_loadconfig(const void* config) {
    const auto* from = static_cast<const uint8_t*>(config);
    refuse_unless(from[0] == 1 && from[1] == 0);
    emulated = {};
    std::memcpy(emulated.column_bytes, from + 16, sizeof emulated.column_bytes);
    std::memcpy(emulated.rows, from + 48, sizeof emulated.rows);
    for (int tile = 0; tile < TILES; ++tile) {
        const int bytes = emulated.column_bytes[tile], rows = emulated.rows[tile];
        refuse_unless(bytes <= LINE_BYTES && rows <= LINES && (bytes == 0) == (rows == 0));
    }
}

void emulated_release() { emulated = {}; }

void emulated_zero(int tile) {
    refuse_unless(emulated.rows[tile] > 0);
    std::memset(emulated.lines[tile], 0, sizeof emulated.lines[tile]);
}

void emulated_loadd(int tile, const void* from, int64_t stride) {
    emulated_zero(tile);
    for (int row = 0; row < emulated.rows[tile]; ++row)
        std::memcpy(emulated.lines[tile][row], static_cast<const uint8_t*>(from) + row * stride, emulated.column_bytes[tile]);
}

void emulated_stored(int tile, void* to, int64_t stride) {
    refuse_unless(emulated.rows[tile] > 0);
    for (int row = 0; row < emulated.rows[tile]; ++row)
        std::memcpy(static_cast<uint8_t*>(to) + row * stride, emulated.lines[tile][row], emulated.column_bytes[tile]);
}

void check_product(int sums, int rows, int lines) {
    const uint16_t* bytes = emulated.column_bytes;
    refuse_unless(emulated.rows[sums] > 0 && emulated.rows[sums] == emulated.rows[rows] && bytes[sums] == bytes[lines]);
    refuse_unless(bytes[rows] == 4 * emulated.rows[lines] && bytes[sums] % 4 == 0);
}

inline float without_denormals(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

inline float as_float(uint32_t bits) {
    float made;
    std::memcpy(&made, &bits, 4);
    return without_denormals(made);
}

void emulated_dpbf16ps(int sums, int rows, int lines) {
    check_product(sums, rows, lines);
    constexpr int COLUMNS = LINE_BYTES / 4;
    float numbers[2][LINES][COLUMNS];
    for (int line = 0; line < LINES; ++line)
        for (int column = 0; column < COLUMNS; ++column) {
            uint32_t pair;
            std::memcpy(&pair, emulated.lines[lines][line] + 4 * column, 4);
            numbers[0][line][column] = as_float(pair << 16);
            numbers[1][line][column] = as_float(pair & 0xffff0000);
        }
    for (int row = 0; row < emulated.rows[sums]; ++row) {
        float found[2][COLUMNS] = {}, own[COLUMNS];
        for (int line = 0; line < emulated.rows[lines]; ++line) {
            uint32_t pair;
            std::memcpy(&pair, emulated.lines[rows][row] + 4 * line, 4);
            const float x[2] = {as_float(pair << 16), as_float(pair & 0xffff0000)};
            for (int half = 0; half < 2; ++half)
                for (int column = 0; column < COLUMNS; ++column)
                    found[half][column] = without_denormals(std::fma(x[half], numbers[half][line][column], found[half][column]));
        }
        std::memcpy(own, emulated.lines[sums][row], LINE_BYTES);
        for (int column = 0; column < COLUMNS; ++column)
            own[column] = without_denormals(without_denormals(own[column]) + without_denormals(found[0][column] + found[1][column]));
        std::memcpy(emulated.lines[sums][row], own, LINE_BYTES);
    }
}

// Signed rows, unsigned lines: what a vector instruction does with one line.
void emulated_dpbsud(int sums, int rows, int lines) {
    check_product(sums, rows, lines);
    for (int row = 0; row < emulated.rows[sums]; ++row) {
        __m512i own = _mm512_load_si512(emulated.lines[sums][row]);
        for (int line = 0; line < emulated.rows[lines]; ++line) {
            int32_t x;
            std::memcpy(&x, emulated.lines[rows][row] + 4 * line, 4);
            own = _mm512_dpbusd_epi32(own, _mm512_load_si512(emulated.lines[lines][line]), _mm512_set1_epi32(x));
        }
        _mm512_store_si512(emulated.lines[sums][row], own);
    }
}

}  // namespace

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_zero emulated_zero
#define _tile_dpbf16ps emulated_dpbf16ps
#define _tile_dpbsud emulated_dpbsud
