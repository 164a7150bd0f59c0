// Layers of a dense decoder with KV in float32 or bfloat16: all of them for one step, as phases of one job of the threads.
//
// Each phase is made of the tasks that the single operations have, so that results have the bits of these operations one by one.
#pragma once
#include "given_matrix.h"

namespace baton {

// `kernels/cpu/layer_structs.py` has the same fields.
struct GivenLayer {
    GivenMatrix qkv, output, gate_up, down;
    const float* attention_norm;    // (hidden,)
    const float *q_norm, *k_norm;   // (size,) or null
    const float* sinks;             // (heads,) or null
    const float* behind_attention;  // (hidden,): of a norm of what attention gives, or null
    const float* mlp_norm;          // (hidden,)
    const float* behind_mlp;        // (hidden,) or null
    int64_t window;                 // 0: all
    int64_t gate;                   // 0 silu, 1 gelu
    int64_t rotation;               // which of the step's
    float score_scale, soft_cap;
    float eps, head_eps;
    float residual_scale;  // of what each half of the layer adds
};

struct LayerStep {
    float* x;      // (rows, hidden): the residual, which is overwritten; of rows that are not read it is anything
    float* added;  // (rows, hidden): what is to be added to it behind the last layer, which is written
    int64_t rows, hidden;
    int64_t row_isa, attention_isa;
    int64_t heads, kv_heads, size;
    int64_t block_size;
    int64_t sequences;
    const int64_t* slots;          // (rows,)
    const int64_t* query_starts;   // (sequences + 1,)
    const int64_t* read_starts;    // (sequences + 1,): the same of the last rows of each that are read behind the last layer
    const int64_t* context_lens;   // (sequences,)
    const int64_t* const* tables;  // (sequences,) of the context's blocks each
    int64_t number;                // what pools have: 0 float32, or 1 bfloat16, which is for AVX512_BF16 and AMX
    void* const* pools;            // (layers,) of (blocks, 2, kv_heads, block_size, size) each
    const float* const* cos;       // (rotations,) of (rows, size) each
    const float* const* sin;
};

void run_layers(const GivenLayer* layers, int64_t count, const LayerStep& step, int threads);

}  // namespace baton
