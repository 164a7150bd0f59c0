// The C ABI. Callers have checked dtypes, shapes and contiguity: pointers say nothing.
#include <atomic>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "feed_forward.h"
#include "isa.h"
#include "layers.h"
#include "linear.h"
#include "packing.h"
#include "rotation.h"
#include "thread_pool.h"

using baton::Format;
using baton::kernels_of;
using baton::Layout;

#define BATON_API extern "C" __attribute__((visibility("default")))

namespace {

Layout layout_of(int format, int64_t outputs, int64_t inputs, int64_t group, int zero_bytes, int scales) {
    return {static_cast<Format>(format), outputs, inputs, group, zero_bytes, static_cast<Format>(scales)};
}

}  // namespace

// Does this processor, and its system, have the instruction set?
BATON_API int baton_has(int isa) { return baton::has_isa(isa); }

// Tiles: 0 none, 1 emulated, as BATON_EMULATE_TILES asks where the processor has none, 2 the processor's.
BATON_API int baton_tiles() { return static_cast<int>(baton::kind_of_tiles()); }

BATON_API int64_t baton_packed_bytes(int format, int64_t outputs, int64_t inputs, int64_t group, int zero_bytes,
                                     int scales) {
    const Layout layout = layout_of(format, outputs, inputs, group, zero_bytes, scales);
    return layout.num_panels() * layout.panel_bytes();
}

// Not to int4. Scales are float32 with int8, bfloat16 with steps4. `format_of_numbers` says what `matrix` has: f32, bf16 or f16.
BATON_API void baton_pack_floats(int format, int64_t outputs, int64_t inputs, int64_t group, int format_of_numbers,
                                 const uint8_t* matrix, uint8_t* panels, int threads) {
    const auto scales = static_cast<Format>(format) == Format::int8 ? Format::f32 : Format::bf16;
    const Layout layout = layout_of(format, outputs, inputs, group, 0, static_cast<int>(scales));
    baton::pack_floats(layout, static_cast<Format>(format_of_numbers), matrix, panels, threads);
}

// int8 or int4: `format_of_scales` says what `scales` are; zeros are null where `zero_bytes` are 0.
BATON_API void baton_pack_whole(int format, int64_t outputs, int64_t inputs, int64_t group, int zero_bytes, int format_of_scales,
                                const uint8_t* values, const uint8_t* scales, const uint8_t* zeros, uint8_t* panels,
                                int threads) {
    const Layout layout = layout_of(format, outputs, inputs, group, zero_bytes, format_of_scales);
    baton::pack_whole(layout, values, scales, zeros, panels, threads);
}

// `unpack_rows` of packing.h
BATON_API int64_t baton_rows(int format, int64_t outputs, int64_t inputs, int64_t group, int zero_bytes, int scales,
                             const uint8_t* panels, const int64_t* numbers, int64_t count, float* out, int threads) {
    const Layout layout = layout_of(format, outputs, inputs, group, zero_bytes, scales);
    return baton::unpack_rows(layout, panels, numbers, count, out, threads);
}

BATON_API void baton_linear(int isa, int format, int64_t outputs, int64_t inputs, int64_t group, int zero_bytes,
                            int scales, const uint8_t* panels, const float* x, int64_t rows, const float* bias,
                            float* out, int threads) {
    const Layout layout = layout_of(format, outputs, inputs, group, zero_bytes, scales);
    baton::multiply({&kernels_of(isa), baton::dots_of(isa), baton::amx_of(isa), layout, panels, bias}, x, rows, out, threads);
}

// The lanes of the instruction set, of which a head's size is a multiple.
BATON_API int64_t baton_lanes(int isa) { return kernels_of(isa).lanes; }

// The first of `sequences` whose context has fewer tokens than it has queries, has more than the blocks of its table, or has a
// block that the pool does not; `sequences` where there is none.
BATON_API int64_t baton_check_tables(const int64_t* const* tables, const int64_t* table_lens, const int64_t* query_starts,
                                     const int64_t* context_lens, int64_t sequences, int64_t block_size, int64_t num_blocks) {
    for (int64_t i = 0; i < sequences; ++i) {
        const int64_t queries = query_starts[i + 1] - query_starts[i];
        if (queries < 0 || queries > context_lens[i] || table_lens[i] * block_size < context_lens[i]) return i;
        for (int64_t at = 0; at * block_size < context_lens[i]; ++at)
            if (tables[i][at] < 0 || tables[i][at] >= num_blocks) return i;
    }
    return sequences;
}

// The first of `rows` slots that a pool of `num_slots` does not have; `rows` where there is none.
BATON_API int64_t baton_check_slots(const int64_t* slots, int64_t rows, int64_t num_slots) {
    for (int64_t row = 0; row < rows; ++row)
        if (slots[row] < 0 || slots[row] >= num_slots) return row;
    return rows;
}

// `number`: what the pool has, 0 float32, 1 bfloat16, 2 int8 with scales.
BATON_API void baton_attend(int isa, int number, const float* q, float* out, int64_t heads, int64_t kv_heads,
                            int64_t size, const uint8_t* kv, const float* scales, int64_t block_size, int64_t window,
                            float scale, float soft_cap, const float* sinks, int64_t sequences, const int64_t* query_starts,
                            const int64_t* context_lens, const int64_t* const* tables, const uint8_t* both_ways,
                            int threads) {
    const baton::PagedStep step{q,     out,      heads, kv_heads,  size,         kv,           scales, block_size, window,
                                scale, soft_cap, sinks, sequences, query_starts, context_lens, tables, both_ways};
    const baton::PagedAttention attention(isa, number, step);
    const baton::Phase phase = baton::phase_of<&baton::PagedAttention::attend>(attention.num_tasks(), attention);
    baton::run_phases(threads, &phase, 1);
}

// `columns` (5, rows): temperature, top-k, top-p, min-p, and a number in [0, 1). The rows whose numbers are in `masked` may sample
// tokens whose bit is 1, `words` of bits each. Overwrites the logits.
BATON_API void baton_sample(int isa, float* logits, int64_t rows, int64_t count, const double* columns, const int64_t* masked,
                          const uint32_t* bits, int64_t words, int64_t num_masked, int64_t* tokens, int threads) {
    std::vector<const uint32_t*> allowed(rows, nullptr);
    for (int64_t i = 0; i < num_masked; ++i) allowed[masked[i]] = bits + i * words;
    auto sample = [&](int64_t row) {
        const double* own = columns + row;
        tokens[row] = kernels_of(isa).sample_row({logits + row * count, count, own[0], static_cast<int64_t>(own[rows]),
                                                own[2 * rows], own[3 * rows], own[4 * rows], allowed[row]});
    };
    baton::run(threads, rows, sample);
}

// `added` may be null, and `total` is then not written. (rows, size) each but the weight.
BATON_API void baton_norm(int isa, const float* x, const float* added, const float* weight, float eps, int64_t rows, int64_t size,
                          float* total, float* out, int threads) {
    auto norm = [&](int64_t row) {
        const int64_t at = row * size;
        kernels_of(isa).norm_row({x + at, added == nullptr ? nullptr : added + at, weight, size, eps, total + at, out + at});
    };
    baton::run_rows(threads, rows, size, norm);
}

// `gate`: 0 silu, 1 gelu. x (rows, 2 size) -> out (rows, size)
BATON_API void baton_gate(int isa, int gate, const float* x, int64_t rows, int64_t size, float* out, int threads) {
    auto one = [&](int64_t row) {
        const float* gates = x + 2 * row * size;
        kernels_of(isa).gate_rows[gate]({gates, gates + size, 1, size, 0, out + row * size, 0});
    };
    baton::run_rows(threads, rows, 4 * size, one);
}

// x (rows, inputs) -> out (rows, outputs of `down`): gate_up's gates and ups, gated, times `down`. `isa`: of the gate.
BATON_API void baton_feed_forward(int isa, int gate, const baton::GivenMatrix* gate_up, const baton::GivenMatrix* down,
                                  const float* x, int64_t rows, float* out, int threads) {
    baton::feed_forward({baton::matrix_of(*gate_up), gate, &kernels_of(isa), baton::matrix_of(*down)}, x, rows, out, threads);
}

// qkv (rows, heads + 2 kv_heads, size) -> queries (rows, heads, size); keys and values go where the slots say in a pool (blocks,
// 2, kv_heads, block_size, size) of float32 or, where `number` is 1, of bfloat16, which is for AVX512_BF16 and AMX. Without a pool only keys (rows, kv_heads, size) are written. The weights of norms may be null.
BATON_API void baton_turn(int isa, const float* qkv, int64_t rows, int64_t heads, int64_t kv_heads, int64_t size, const float* cos,
                          const float* sin, const float* q_weight, const float* k_weight, float eps, float* queries, float* keys,
                          int number, void* pool, const int64_t* slots, int64_t block_size, int threads) {
    const baton::Dots* rounding = number == 1 ? baton::dots_of(isa) : nullptr;
    const baton::Rotation work{qkv, heads,   kv_heads, size, cos,      sin,   q_weight,  k_weight,
                               eps, queries, keys,     pool, rounding, slots, block_size};
    auto turn = [&](int64_t row) { baton::rotate(kernels_of(isa), work, row); };
    baton::run_rows(threads, rows, 2 * (heads + 2 * kv_heads) * size, turn);
}

// `count` layers, of which there is at least one, for a step of at least one row.
BATON_API void baton_run_layers(const baton::GivenLayer* layers, int64_t count, const baton::LayerStep* step, int threads) {
    baton::run_layers(layers, count, *step, threads);
}

// Multiplies and adds up in registers, as products with panels of that format do: what they are measured against. Returns how many
// products these were.
BATON_API int64_t baton_spin(int isa, int format, int64_t rounds) {
    const auto kind = static_cast<Format>(format);
    if (isa == baton::AMX && (kind == Format::bf16 || kind >= Format::int8)) return baton::amx_of(isa)->spin(kind, rounds);
    if (isa == baton::AVX512_BF16 && kind == Format::bf16) return baton::dots_of(isa)->spin(rounds);
    return kernels_of(isa).spin(kind, rounds);
}

// Reads memory as a product reads panels: what a decode step is measured against.
BATON_API uint64_t baton_read(int isa, const uint8_t* memory, int64_t bytes, int threads) {
    constexpr int64_t PIECE = 128 << 10;
    std::atomic<uint64_t> found{0};
    auto piece = [&](int64_t number) {
        const int64_t from = number * PIECE;
        found ^= kernels_of(isa).read(memory + from, bytes - from < PIECE ? bytes - from : PIECE);
    };
    baton::run(threads, (bytes + PIECE - 1) / PIECE, piece);
    return found;
}
