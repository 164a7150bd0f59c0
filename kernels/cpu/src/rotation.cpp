#include "rotation.h"

#include <cstring>
#include <vector>

namespace baton {
namespace {

void write(const Rotation& work, const float* vector, int64_t at) {
    if (work.rounding != nullptr)
        work.rounding->round_row(vector, work.size, static_cast<uint16_t*>(work.pool) + at);
    else
        std::memcpy(static_cast<float*>(work.pool) + at, vector, static_cast<size_t>(work.size) * sizeof(float));
}

}  // namespace

void rotate(const Kernels& kernels, const Rotation& work, int64_t row) {
    thread_local std::vector<float> key;
    const int64_t heads = work.heads, kv_heads = work.kv_heads, size = work.size;
    const float* q = work.qkv + row * (heads + 2 * kv_heads) * size;
    const float *k = q + heads * size, *v = k + kv_heads * size;
    const float *cos = work.cos + row * size, *sin = work.sin + row * size;
    for (int64_t head = 0; head < heads; ++head)
        kernels.turn_head({q + head * size, cos, sin, work.q_weight, size, work.eps, work.queries + (row * heads + head) * size});
    key.resize(static_cast<size_t>(size));
    for (int64_t head = 0; head < kv_heads; ++head) {
        float* const turned = work.pool == nullptr ? work.keys + (row * kv_heads + head) * size : key.data();
        kernels.turn_head({k + head * size, cos, sin, work.k_weight, size, work.eps, turned});
        if (work.pool == nullptr) continue;
        const int64_t block = work.slots[row] / work.block_size, place = work.slots[row] % work.block_size;
        const int64_t at = ((2 * block * kv_heads + head) * work.block_size + place) * size;
        write(work, turned, at);
        write(work, v + head * size, at + kv_heads * work.block_size * size);
    }
}

}  // namespace baton
