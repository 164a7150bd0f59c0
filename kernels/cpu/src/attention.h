// Attention over a paged pool: tasks of a sequence's queries and one KV head, over threads.
#pragma once
#include "kernels.h"

namespace baton {

struct PagedStep {
    const float* q;  // (tokens, heads, size)
    float* out;      // the same
    int64_t heads, kv_heads, size;
    const uint8_t* kv;    // (blocks, 2, kv_heads, block_size, size)
    const float* scales;  // (blocks, 2, kv_heads, block_size), with int8
    int64_t block_size;
    int64_t window;
    float scale;
    float soft_cap;
    const float* sinks;  // (heads,) or null
    int64_t sequences;
    const int64_t* query_starts;   // (sequences + 1,)
    const int64_t* context_lens;   // (sequences,)
    const int64_t* const* tables;  // (sequences,) of the context's blocks each
};

// `number`: 0 float32, 1 bfloat16, 2 int8.
void attend(const Kernels& kernels, int number, const PagedStep& step, int threads);

}  // namespace baton
