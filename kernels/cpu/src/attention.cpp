#include "attention.h"

#include <algorithm>

#include "isa.h"

namespace baton {
namespace {

constexpr int64_t TASK_ROWS = 192;  // of queries: enough that laying out a tile of keys costs little
constexpr int64_t NUMBER_BYTES[] = {4, 2, 1};

struct Rows {
    std::vector<const float*> q, sinks;
    std::vector<float*> out;
};

Attend attend_with(int64_t isa, int number, int64_t size) {
    const Dots* dots = number == 1 ? dots_of(isa) : nullptr;
    if (dots == nullptr || size % dots->head_unit != 0) return kernels_of(isa).attend[number];
    const Amx* amx = amx_of(isa);
    return amx != nullptr ? amx->attend : dots->attend;
}

}  // namespace

PagedAttention::PagedAttention(int64_t isa, int number, const PagedStep& step)
    : number_(number),
      attend_(attend_with(isa, number, step.size)),
      step_(step),
      tokens_(std::max<int64_t>(1, TASK_ROWS / (step.heads / step.kv_heads))),
      starts_(1, 0) {
    for (int64_t i = 0; i < step.sequences; ++i) starts_.push_back(starts_.back() + (queries_of(i) + tokens_ - 1) / tokens_);
}

void PagedAttention::attend(int64_t task) const {
    // The last queries of a prompt see most keys: begun first, they leave no thread waiting at the end.
    const int64_t piece = starts_.back() - 1 - task / step_.kv_heads, head = task % step_.kv_heads;
    const int64_t sequence = std::upper_bound(starts_.begin(), starts_.end(), piece) - starts_.begin() - 1;
    const int64_t first = (piece - starts_[sequence]) * tokens_;
    attend_piece(sequence, first, std::min(tokens_, queries_of(sequence) - first), head);
}

void PagedAttention::attend_piece(int64_t sequence, int64_t first_query, int64_t queries, int64_t head) const {
    static thread_local Rows rows;
    const int64_t repeats = step_.heads / step_.kv_heads, first_token = step_.query_starts[sequence] + first_query;
    rows.q.clear(), rows.out.clear(), rows.sinks.clear();
    for (int64_t i = 0; i < queries; ++i)
        for (int64_t r = 0; r < repeats; ++r) {
            const int64_t at = ((first_token + i) * step_.heads + head * repeats + r) * step_.size;
            rows.q.push_back(step_.q + at);
            rows.out.push_back(step_.out + at);
            if (step_.sinks != nullptr) rows.sinks.push_back(step_.sinks + head * repeats + r);
        }
    const int64_t before = step_.context_lens[sequence] - queries_of(sequence);
    const int64_t head_bytes = step_.block_size * step_.size * NUMBER_BYTES[number_];
    HeadAttention work{};
    work.q = rows.q.data();
    work.out = rows.out.data();
    work.sinks = step_.sinks == nullptr ? nullptr : rows.sinks.data();
    work.rows = queries * repeats;
    work.repeats = repeats;
    work.first_position = before + first_query;
    work.end = step_.both_ways != nullptr && step_.both_ways[sequence] ? step_.context_lens[sequence] : 0;
    work.size = step_.size;
    work.window = step_.window;
    work.scale = step_.scale;
    work.soft_cap = step_.soft_cap;
    work.kv = step_.kv + head * head_bytes;
    work.scales = step_.scales == nullptr ? nullptr : step_.scales + head * step_.block_size;
    work.block_bytes = 2 * step_.kv_heads * head_bytes;
    work.values_at = step_.kv_heads * head_bytes;
    work.block_scales = 2 * step_.kv_heads * step_.block_size;
    work.value_scales_at = step_.kv_heads * step_.block_size;
    work.table = step_.tables[sequence];
    work.block_size = step_.block_size;
    attend_(work);
}

}  // namespace baton
