// Attention over a paged pool: tasks of a sequence's queries and one KV head, in any order.
#pragma once
#include <vector>

#include "kernels.h"

namespace baton {

using Attend = void (*)(const HeadAttention&);

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
    const uint8_t* both_ways;      // (sequences,): whether its queries see all of its context; null: none does
};

class PagedAttention {
  public:
    // `number`: 0 float32, 1 bfloat16, 2 int8.
    PagedAttention(int64_t isa, int number, const PagedStep& step);

    int64_t num_tasks() const { return starts_.back() * step_.kv_heads; }
    void attend(int64_t task) const;

  private:
    int64_t queries_of(int64_t sequence) const { return step_.query_starts[sequence + 1] - step_.query_starts[sequence]; }
    void attend_piece(int64_t sequence, int64_t first_query, int64_t queries, int64_t head) const;

    int number_;
    Attend attend_;
    PagedStep step_;
    int64_t tokens_;               // of a piece of a sequence's queries
    std::vector<int64_t> starts_;  // (sequences + 1,): pieces before each sequence
};

}  // namespace baton
