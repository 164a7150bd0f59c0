#include "rotation.h"

#include <cstring>

namespace baton {

void rotate(const Kernels& kernels, const Rotation& work, int64_t row) {
    const int64_t heads = work.heads, kv_heads = work.kv_heads, size = work.size;
    const float* q = work.qkv + row * (heads + 2 * kv_heads) * size;
    const float *k = q + heads * size, *v = k + kv_heads * size;
    const float *cos = work.cos + row * size, *sin = work.sin + row * size;
    for (int64_t head = 0; head < heads; ++head)
        kernels.turn_head({q + head * size, cos, sin, work.q_weight, size, work.eps, work.queries + (row * heads + head) * size});
    for (int64_t head = 0; head < kv_heads; ++head) {
        float* to = nullptr;
        if (work.pool != nullptr) {
            const int64_t block = work.slots[row] / work.block_size, place = work.slots[row] % work.block_size;
            to = work.pool + ((2 * block * kv_heads + head) * work.block_size + place) * size;
            std::memcpy(to + kv_heads * work.block_size * size, v + head * size, static_cast<size_t>(size) * sizeof(float));
        } else {
            to = work.keys + (row * kv_heads + head) * size;
        }
        kernels.turn_head({k + head * size, cos, sin, work.k_weight, size, work.eps, to});
    }
}

}  // namespace baton
