// Rotations of a step's queries and keys, which write keys and values where they belong.
#pragma once
#include "kernels.h"

namespace baton {

struct Rotation {
    const float* qkv;  // (rows, heads + 2 kv_heads, size)
    int64_t heads, kv_heads, size;
    const float *cos, *sin;            // (rows, size)
    const float *q_weight, *k_weight;  // (size,) of norms, or null
    float eps;
    float* queries;        // (rows, heads, size)
    float* keys;           // (rows, kv_heads, size), where there is no pool
    void* pool;            // (blocks, 2, kv_heads, block_size, size) of float32, or null
    const Dots* rounding;  // null, or what makes numbers of the pool bfloat16
    const int64_t* slots;  // (rows,): block * block_size + place
    int64_t block_size;
};

void rotate(const Kernels& kernels, const Rotation& work, int64_t row);

}  // namespace baton
