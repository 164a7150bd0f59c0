// What each instruction set implements: products of one panel with a block of rows, and the rounding of rows.
//
// A row's result has the same bits in every block: its sums are made in the order of the inputs, however many rows there are.
#pragma once
#include "layout.h"

namespace baton {

struct PanelProduct {
    const Layout* layout;
    const uint8_t* panel;     // whose scales and zero points count: int8 and int4
    const uint8_t* numbers;   // the panel's, from the first input on
    const uint8_t* ahead;     // what is multiplied next
    int64_t ahead_bytes;      // how much of it is fetched meanwhile
    const void* x;            // (K, rows) float, (K / 2, rows) of 2 bfloat16, or (K / 4, rows) of 4 bytes; tiles: (rows, K) of these
    const float* x_scales;    // (rows,): int8 and int4, as what follows
    const int32_t* x_starts;  // (groups, rows): what sums begin with
    const float* x_sums;      // (groups, rows): of the rounded inputs, where there are zero points
    int64_t rows;
    int64_t inputs;     // how many of them: `numbers` and `x` begin with the first; all of them but with floats
    bool goes_on;       // `out` has the sums of the inputs before
    const float* bias;  // (columns,) or null
    float* out;         // (rows, columns), rows `stride` floats apart
    int64_t stride;
    int64_t columns;  // at most PANEL
    // For tiles: bytes from one row to the next, and of a row in each step; lines of `numbers`.
    int64_t x_stride, step_bytes, lines;
};

// Rows side by side: each one's first 4 bytes, then each one's next 4.
struct Interleaving {
    const uint32_t* rows;  // (count, length)
    int64_t count;         // at most the largest block's
    int64_t length;
    uint32_t* out;         // (length, count)
};

struct RowRounding {
    const float* x;  // (inputs,)
    int64_t inputs;
    int64_t padded_inputs;
    int8_t* out;   // (padded_inputs,)
    float* scale;  // the row's
};

// What a group's inputs add up to, in each row of a block.
struct GroupSums {
    const uint32_t* x;  // (groups, length, rows) of 4 bytes
    int64_t groups;
    int64_t length;
    int64_t rows;
    int32_t offset;   // by which the numbers are too large that the rows are multiplied with
    int32_t* starts;  // (groups, rows): that many times less
    float* sums;      // (groups, rows), or null
};

// Rows of queries against the keys and values of one KV head, as far as each row sees them. Row r's position is
// first_position + r / repeats: it sees no later ones, unless all rows see up to `end`.
struct HeadAttention {
    const float* const* q;        // (rows,) of (size,) each
    float* const* out;            // (rows,) of (size,) each
    const float* const* sinks;    // (rows,) of one number each, or null
    int64_t rows;
    int64_t repeats;              // query heads of the KV head
    int64_t first_position;
    int64_t end;                  // 0: of each row its own
    int64_t size;                 // of a head: a multiple of the lanes
    int64_t window;               // 0: all
    float scale;                  // of the scores
    float soft_cap;               // 0: none
    const uint8_t* kv;            // the pool's block 0, this head's keys
    const float* scales;          // the same of the scales, or null
    int64_t block_bytes;          // from one block to the next
    int64_t values_at;            // bytes from a block's keys to its values
    int64_t block_scales;         // floats from one block's scales to the next
    int64_t value_scales_at;      // floats from a block's keys' scales to its values'
    const int64_t* table;         // the sequence's blocks
    int64_t block_size;           // tokens
};

// One row's sample. A temperature of 0 samples the likeliest token; a top_k of 0, a top_p of 1 and a min_p of 0 cut nothing.
struct RowSample {
    float* logits;  // (count,): overwritten
    int64_t count;
    double temperature;
    int64_t top_k;
    double top_p, min_p;
    double uniform;           // in [0, 1)
    const uint32_t* allowed;  // a bit for each token, or null: all are
};

// A row's norm: x, or its sum with `added`, over the root of the mean of its squares, times the weight.
struct RowNorm {
    const float* x;       // (size,)
    const float* added;   // (size,), or null
    const float* weight;  // (size,)
    int64_t size;
    float eps;
    float* total;  // (size,): the sum, where there is one
    float* out;    // (size,)
};

// A head's rotation by its position, behind its norm if there is a weight.
struct HeadTurn {
    const float* x;       // (size,), of which there are an even number
    const float* cos;     // (size,)
    const float* sin;     // (size,)
    const float* weight;  // (size,), or null
    int64_t size;
    float eps;
    float* out;  // (size,)
};

// Gates and ups of some rows: activation(gate) * up.
struct RowGates {
    const float *gates, *ups;  // (rows, size) each, `stride` apart
    int64_t rows, size, stride;
    float* out;  // (rows, size), `out_stride` apart
    int64_t out_stride;
};

using Multiply = void (*)(const PanelProduct&);

struct Kernels {
    Multiply multiply[FORMATS];
    Multiply multiply_widened;   // with panels of int4 whose numbers `widen` has made bytes
    int64_t most_rows[FORMATS];  // of a block
    int32_t int8_offset;         // by which numbers of int8 are too large as they are multiplied
    void (*round_row)(const RowRounding&);
    void (*sum_groups)(const GroupSums&);
    void (*sum_steps)(const GroupSums&);  // the same of STEP_INPUTS with steps4: 8 times less
    void (*interleave)(const Interleaving&);
    void (*widen)(const uint8_t* lines, int64_t bytes, int32_t* out);
    void (*widen_steps)(const Layout&, const uint8_t* panel, uint8_t* out);  // steps4 to int8; null: it does not pay
    void (*attend[3])(const HeadAttention&);  // KV of float32, bfloat16, int8
    int64_t lanes;
    int64_t (*sample_row)(const RowSample&);
    void (*norm_row)(const RowNorm&);
    void (*gate_rows[2])(const RowGates&);  // silu and gelu
    void (*turn_head)(const HeadTurn&);
    uint64_t (*read)(const uint8_t* from, int64_t bytes);
    int64_t (*spin)(Format format, int64_t rounds);  // products in registers, and how many of them
};

// Products of bfloat16 by bfloat16 as instructions of their own, for panels of bf16 and for KV of it: rows are rounded, and queries
// and their weights.
struct Dots {
    Multiply multiply;
    void (*round_row)(const float* x, int64_t inputs, uint16_t* out);  // as the instruction rounds
    void (*attend)(const HeadAttention&);
    int64_t head_unit;  // of which a head's size is a multiple where `attend` is to be used
    int64_t (*spin)(int64_t rounds);
};

constexpr int64_t AMX_ROWS = 32;  // of a block, at most

// Products by tiles: of rows that lie one behind the other, each with zeros up to a whole step.
struct Amx {
    Multiply multiply_pairs;                     // panels of bf16
    Multiply multiply_bytes, multiply_widened;   // of int8, and of int4 whose numbers are bytes
    void (*sum_row)(const GroupSums&);           // `sum_groups` of one row
    void (*attend)(const HeadAttention&);        // over KV of bf16, with heads of which a unit of `Dots` is a part
    void (*release)();                           // behind a thread's last product of a task
    int64_t (*spin)(Format format, int64_t rounds);
};

extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels neon_kernels;
extern const Dots avx512_dots;
extern const Amx amx_of_processor, amx_emulated;

}  // namespace baton
