#include "attention.h"

#include <algorithm>
#include <vector>

#include "thread_pool.h"

namespace baton {
namespace {

constexpr int64_t TASK_ROWS = 96;  // of queries: enough that laying out a tile of keys costs little
constexpr int64_t NUMBER_BYTES[] = {4, 2, 1};

// Tasks of each sequence, for one KV head: pieces of `tokens` queries.
struct Pieces {
    int64_t tokens;
    std::vector<int64_t> starts;  // (sequences + 1,): pieces before each sequence

    explicit Pieces(const PagedStep& step) : tokens(std::max<int64_t>(1, TASK_ROWS / (step.heads / step.kv_heads))) {
        starts.push_back(0);
        for (int64_t i = 0; i < step.sequences; ++i) {
            const int64_t queries = step.query_starts[i + 1] - step.query_starts[i];
            starts.push_back(starts.back() + (queries + tokens - 1) / tokens);
        }
    }

    int64_t sequence_of(int64_t piece) const {
        return std::upper_bound(starts.begin(), starts.end(), piece) - starts.begin() - 1;
    }
};

struct Rows {
    std::vector<const float*> q, sinks;
    std::vector<float*> out;
};

void attend_piece(const Kernels& kernels, int number, const PagedStep& step, int64_t sequence, int64_t first_query,
                  int64_t queries, int64_t head) {
    static thread_local Rows rows;
    const int64_t repeats = step.heads / step.kv_heads, first_token = step.query_starts[sequence] + first_query;
    rows.q.clear(), rows.out.clear(), rows.sinks.clear();
    for (int64_t i = 0; i < queries; ++i)
        for (int64_t r = 0; r < repeats; ++r) {
            const int64_t at = ((first_token + i) * step.heads + head * repeats + r) * step.size;
            rows.q.push_back(step.q + at);
            rows.out.push_back(step.out + at);
            if (step.sinks != nullptr) rows.sinks.push_back(step.sinks + head * repeats + r);
        }
    const int64_t before = step.context_lens[sequence] - (step.query_starts[sequence + 1] - step.query_starts[sequence]);
    const int64_t head_bytes = step.block_size * step.size * NUMBER_BYTES[number];
    HeadAttention work{};
    work.q = rows.q.data();
    work.out = rows.out.data();
    work.sinks = step.sinks == nullptr ? nullptr : rows.sinks.data();
    work.rows = queries * repeats;
    work.repeats = repeats;
    work.first_position = before + first_query;
    work.size = step.size;
    work.window = step.window;
    work.scale = step.scale;
    work.soft_cap = step.soft_cap;
    work.kv = step.kv + head * head_bytes;
    work.scales = step.scales == nullptr ? nullptr : step.scales + head * step.block_size;
    work.block_bytes = 2 * step.kv_heads * head_bytes;
    work.values_at = step.kv_heads * head_bytes;
    work.block_scales = 2 * step.kv_heads * step.block_size;
    work.value_scales_at = step.kv_heads * step.block_size;
    work.table = step.tables[sequence];
    work.block_size = step.block_size;
    kernels.attend[number](work);
}

}  // namespace

void attend(const Kernels& kernels, int number, const PagedStep& step, int threads) {
    const Pieces pieces(step);
    auto task = [&](int64_t task_number) {
        const int64_t piece = task_number / step.kv_heads, head = task_number % step.kv_heads;
        const int64_t sequence = pieces.sequence_of(piece);
        const int64_t first = (piece - pieces.starts[sequence]) * pieces.tokens;
        const int64_t queries = step.query_starts[sequence + 1] - step.query_starts[sequence];
        attend_piece(kernels, number, step, sequence, first, std::min(pieces.tokens, queries - first), head);
    };
    run(threads, pieces.starts.back() * step.kv_heads, task);
}

}  // namespace baton
