// Up to 32 rows times the lines of a panel, as a processor's tiles take them: two tiles of rows, two of a panel's outputs, and four of
// sums. To be included behind vectors and the intrinsics of tiles.
//
// A panel of bf16 or of bytes lies as a tile wants it: a line is 4 bytes of each output. Rows lie as they are, one behind the other.
#pragma once
#include "tiles.h"

namespace {

constexpr int64_t TILE_ROWS = 16, TILE_BYTES = 64, TILE_LINES = 16, LINE_BYTES_OF_PANEL = baton::PANEL * 4;
static_assert(baton::AMX_ROWS == 2 * TILE_ROWS);

// As the processor reads it.
struct TileConfig {
    uint8_t palette = 1, start_row = 0, unused[14] = {};
    uint16_t column_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int64_t of_rows, int64_t of_bytes) {
        rows[tile] = static_cast<uint8_t>(of_rows);
        column_bytes[tile] = static_cast<uint16_t>(of_rows > 0 ? of_bytes : 0);
    }
};

// What this thread's tiles are configured for; nothing between two tasks, since others use tiles as well.
struct TileShape {
    int64_t rows, bytes;
};
thread_local TileShape configured{0, 0};

// For so many rows, of which a tile takes so many bytes at once.
void configure(int64_t rows, int64_t bytes) {
    if (configured.rows == rows && configured.bytes == bytes) return;
    configured = {rows, bytes};
    const int64_t first = rows < TILE_ROWS ? rows : TILE_ROWS;
    alignas(64) TileConfig config;
    for (int tile = 0; tile < 2; ++tile) {
        config.set(tile, first, TILE_BYTES);
        config.set(2 + tile, rows - first, TILE_BYTES);
        config.set(4 + tile, tile == 0 ? first : rows - first, bytes);
        config.set(6 + tile, bytes / 4, TILE_BYTES);
    }
    keep_in_memory(&config);  // GCC 12 takes the instruction to read 8 bytes of it.
    _tile_loadconfig(&config);
}

void release_tiles() {
    configured = {0, 0};
    _tile_release();
}

// Products of rows 0 to 15, and of those behind them, as sums of the tiles 0 to 3.
struct PairTiles {
    static void add_first() {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    static void add_second() {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
};
struct ByteTiles {
    static void add_first() {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
    }
    static void add_second() {
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
};

struct TileProduct {
    const uint8_t* x;
    int64_t rows, x_stride;  // bytes, as all that follows
    const uint8_t* lines;
    int64_t line_stride;
    int64_t steps, bytes;  // how many, and of a row's bytes in each
    void* sums;            // of 32 numbers of 4 bytes
    int64_t stride;
    bool goes_on;          // they are there already
    const uint8_t* ahead;  // what is fetched meanwhile, so much with each step
    int64_t ahead_bytes;
};

template <class Products, bool HAS_SECOND>
void multiply_tiles(const TileProduct& work) {
    auto* const first = static_cast<uint8_t*>(work.sums);
    uint8_t* const second = first + TILE_ROWS * work.stride;
    const int64_t stride = work.stride, x_stride = work.x_stride, line_stride = work.line_stride;
    if (work.goes_on) {
        _tile_loadd(0, first, stride);
        _tile_loadd(1, first + TILE_BYTES, stride);
        if constexpr (HAS_SECOND) {
            _tile_loadd(2, second, stride);
            _tile_loadd(3, second + TILE_BYTES, stride);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (HAS_SECOND) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    const uint8_t *x = work.x, *lines = work.lines, *ahead = work.ahead;
    for (int64_t step = 0; step < work.steps; ++step, x += work.bytes, lines += work.bytes / 4 * line_stride) {
        for (const uint8_t* end = ahead + work.ahead_bytes; ahead < end; ahead += 64)
            _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
        _tile_loadd(6, lines, line_stride);
        _tile_loadd(4, x, x_stride);
        _tile_loadd(7, lines + TILE_BYTES, line_stride);
        Products::add_first();
        if constexpr (HAS_SECOND) {
            _tile_loadd(5, x + TILE_ROWS * x_stride, x_stride);
            Products::add_second();
        }
    }
    _tile_stored(0, first, stride);
    _tile_stored(1, first + TILE_BYTES, stride);
    if constexpr (HAS_SECOND) {
        _tile_stored(2, second, stride);
        _tile_stored(3, second + TILE_BYTES, stride);
    }
}

template <class Products>
void multiply_tiles(const TileProduct& work) {
    configure(work.rows, work.bytes);
    keep_in_memory(work.sums);  // GCC 12 does not know that a tile is loaded from memory.
    if (work.rows > TILE_ROWS)
        multiply_tiles<Products, true>(work);
    else
        multiply_tiles<Products, false>(work);
}

}  // namespace
