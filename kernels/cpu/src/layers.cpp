#include "layers.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

#include "attention.h"
#include "feed_forward.h"
#include "isa.h"
#include "rotation.h"
#include "thread_pool.h"

namespace baton {
namespace {

// What the layers of a step use one after the other.
struct Memory {
    std::vector<float> normed, qkv, queries, attended;
    RowMemory rows;
    FeedForwardMemory mlp;

    void reserve(const GivenLayer& layer, const LayerStep& step) {
        grow(normed, step.rows * step.hidden);
        grow(qkv, step.rows * layer.qkv.outputs);
        grow(queries, step.rows * layer.output.inputs);
        grow(attended, step.rows * layer.output.inputs);
        grow(mlp.inner, std::min(step.rows, piece_rows(matrix_of(layer.gate_up), step.rows)) * layer.down.inputs);
    }

  private:
    static void grow(std::vector<float>& memory, int64_t size) {
        if (static_cast<int64_t>(memory.size()) < size) memory.resize(static_cast<size_t>(size));
    }
};

// What a half of a layer still does to the rows that its last product has given, before they are added to the residual. The bias of
// that product is added by itself, as ranks add it that share a product.
struct HalfEnd {
    const float* bias;  // or null, as the next
    const float* norm;
    float eps, scale;

    bool is_empty() const { return bias == nullptr && norm == nullptr && scale == 1.0f; }

    void finish(const Kernels& kernels, float* row, int64_t size) const {
        if (bias != nullptr)
            for (int64_t i = 0; i < size; ++i) row[i] += bias[i];
        if (norm != nullptr) kernels.norm_row({row, nullptr, norm, size, eps, nullptr, row});
        if (scale != 1.0f)
            for (int64_t i = 0; i < size; ++i) row[i] *= scale;
    }
};

// Adds what the half before has given, if there was one, to `rows` rows from the `first` on, and makes their norm.
struct HalfBegin {
    const LayerStep& step;
    const Kernels& kernels;
    Memory& memory;
    const float* norm;
    float eps;
    bool has_before;
    HalfEnd before;

    void normalise(int64_t first, int64_t rows) const {
        const int64_t size = step.hidden;
        for (int64_t row = first; row < first + rows; ++row) {
            float *const residual = step.x + row * size, *const given = step.added + row * size;
            float* const normed = memory.normed.data() + row * size;
            if (!has_before) {
                kernels.norm_row({residual, nullptr, norm, size, eps, nullptr, normed});
            } else {
                before.finish(kernels, given, size);
                kernels.norm_row({given, residual, norm, size, eps, residual, normed});
            }
        }
    }
};

HalfEnd attention_end(const GivenLayer& layer) {
    return {layer.output.bias, layer.behind_attention, layer.eps, layer.residual_scale};
}

HalfEnd mlp_end(const GivenLayer& layer) { return {layer.down.bias, layer.behind_mlp, layer.eps, layer.residual_scale}; }

// Queries, keys and values of one layer in one step. Its methods are tasks, as those of the next two are.
class Projection {
  public:
    Projection(const GivenLayer& layer, const GivenLayer* before, const LayerStep& step, int64_t index, Memory& memory, int threads)
        : step_(step),
          kernels_(kernels_of(step.row_isa)),
          begin_{step, kernels_, memory, layer.attention_norm, layer.eps, before != nullptr,
                 before == nullptr ? HalfEnd{} : mlp_end(*before)},
          qkv_(matrix_of(layer.qkv), memory.normed.data(), step.rows, memory.qkv.data(), threads, memory.rows),
          rotation_{memory.qkv.data(), step.heads, step.kv_heads, step.size, step.cos[layer.rotation], step.sin[layer.rotation],
                    layer.q_norm, layer.k_norm, layer.head_eps, memory.queries.data(), nullptr, step.pools[index],
                    step.number == 1 ? dots_of(step.attention_isa) : nullptr, step.slots, step.block_size} {}

    void add_phases(std::vector<Phase>& phases) const {
        phases.push_back(phase_of<&Projection::begin>(qkv_.blocks().count, *this));
        phases.push_back(phase_of<&Product::multiply>(qkv_.num_tasks(), qkv_));
        phases.push_back(phase_of<&Projection::turn>(step_.rows, *this));
    }

  private:
    void begin(int64_t block) const {
        begin_.normalise(block * qkv_.blocks().each, qkv_.blocks().size(block));
        qkv_.lay_out(block);
    }

    void turn(int64_t row) const { rotate(kernels_, rotation_, row); }

    const LayerStep& step_;
    const Kernels& kernels_;
    HalfBegin begin_;
    Product qkv_;
    Rotation rotation_;
};

// The gated block of some rows.
class FeedForwardPiece {
  public:
    FeedForwardPiece(const GivenLayer& layer, const HalfBegin& begin, int64_t first, int64_t rows, int threads)
        : begin_(begin),
          first_(first),
          tasks_({matrix_of(layer.gate_up), layer.gate, &begin.kernels, matrix_of(layer.down, nullptr)},
                 begin.memory.normed.data() + first * begin.step.hidden, rows, begin.step.added + first * begin.step.hidden, threads,
                 begin.memory.mlp) {}

    void add_phases(std::vector<Phase>& phases) const {
        phases.push_back(phase_of<&FeedForwardPiece::begin>(tasks_.first().blocks().count, *this));
        tasks_.add_phases(phases);
    }

  private:
    void begin(int64_t block) const {
        const Blocks& blocks = tasks_.first().blocks();
        begin_.normalise(first_ + block * blocks.each, blocks.size(block));
        tasks_.first().lay_out(block);
    }

    const HalfBegin& begin_;
    int64_t first_;
    FeedForwardTasks tasks_;
};

// What follows them: attention, and the gated block.
class Mixing {
  public:
    Mixing(const GivenLayer& layer, const LayerStep& step, int64_t index, Memory& memory, int threads)
        : layer_(layer),
          step_(step),
          begin_{step, kernels_of(step.row_isa), memory, layer.mlp_norm, layer.eps, true, attention_end(layer)},
          attention_(step.attention_isa, static_cast<int>(step.number), attention_step(layer, step, index, memory)),
          output_(matrix_of(layer.output, nullptr), memory.attended.data(), step.rows, step.added, threads, memory.rows) {
        const Blocks pieces(step.rows, piece_rows(matrix_of(layer.gate_up), step.rows));
        for (int64_t i = 0; i < pieces.count; ++i)
            mlp_.emplace_back(layer, begin_, i * pieces.each, pieces.size(i), threads);
    }

    void add_phases(std::vector<Phase>& phases) const {
        phases.push_back(phase_of<&PagedAttention::attend>(attention_.num_tasks(), attention_));
        phases.push_back(phase_of<&Product::lay_out>(output_.num_laid_out(), output_));
        phases.push_back(phase_of<&Product::multiply>(output_.num_tasks(), output_));
        for (const FeedForwardPiece& piece : mlp_) piece.add_phases(phases);
    }

    // A phase behind the last layer, which no other layer begins with.
    void add_end(std::vector<Phase>& phases) const {
        if (!mlp_end(layer_).is_empty()) phases.push_back(phase_of<&Mixing::end_mlp>(step_.rows, *this));
    }

  private:
    static PagedStep attention_step(const GivenLayer& layer, const LayerStep& step, int64_t index, Memory& memory) {
        PagedStep made{};
        made.q = memory.queries.data();
        made.out = memory.attended.data();
        made.heads = step.heads;
        made.kv_heads = step.kv_heads;
        made.size = step.size;
        made.kv = static_cast<const uint8_t*>(step.pools[index]);
        made.block_size = step.block_size;
        made.window = layer.window;
        made.scale = layer.score_scale;
        made.soft_cap = layer.soft_cap;
        made.sinks = layer.sinks;
        made.sequences = step.sequences;
        made.query_starts = step.query_starts;
        made.context_lens = step.context_lens;
        made.tables = step.tables;
        return made;
    }

    void end_mlp(int64_t row) const {
        mlp_end(layer_).finish(begin_.kernels, step_.added + row * step_.hidden, step_.hidden);
    }

    const GivenLayer& layer_;
    const LayerStep& step_;
    HalfBegin begin_;
    PagedAttention attention_;
    Product output_;
    std::deque<FeedForwardPiece> mlp_;
};

// Behind the last layer some rows are read, the last ones of each sequence. What follows its keys and values is computed of them
// alone: they lie first meanwhile.
class ReadRows {
  public:
    ReadRows(const LayerStep& step, Memory& memory) : step_(step), memory_(memory), fewer_(step) {
        for (int64_t i = 0; i < step.sequences; ++i) {
            const int64_t count = step.read_starts[i + 1] - step.read_starts[i];
            for (int64_t row = step.query_starts[i + 1] - count; row < step.query_starts[i + 1]; ++row) rows_.push_back(row);
        }
        fewer_.rows = static_cast<int64_t>(rows_.size());
        fewer_.query_starts = step.read_starts;
    }

    const LayerStep& fewer() const { return fewer_; }
    bool are_all() const { return fewer_.rows == step_.rows; }

    void put_first(int64_t) const {
        for (int64_t i = 0; i < fewer_.rows; ++i) {
            move(memory_.queries.data(), step_.heads * step_.size, rows_[i], i);
            move(step_.x, step_.hidden, rows_[i], i);
            move(step_.added, step_.hidden, rows_[i], i);
        }
    }

    // Each row to its place again; to the others there is nothing to be added.
    void put_back(int64_t) const {
        int64_t end = step_.rows;
        for (int64_t i = fewer_.rows; i-- > 0;) {
            move(step_.x, step_.hidden, i, rows_[i]);
            move(step_.added, step_.hidden, i, rows_[i]);
            clear(rows_[i] + 1, end);
            end = rows_[i];
        }
        clear(0, end);
    }

  private:
    static void move(float* rows, int64_t size, int64_t from, int64_t to) {
        if (from != to) std::memcpy(rows + to * size, rows + from * size, static_cast<size_t>(size) * sizeof(float));
    }

    void clear(int64_t first, int64_t end) const {
        std::fill(step_.added + first * step_.hidden, step_.added + end * step_.hidden, 0.0f);
    }

    const LayerStep& step_;
    Memory& memory_;
    LayerStep fewer_;
    std::vector<int64_t> rows_;
};

}  // namespace

void run_layers(const GivenLayer* layers, int64_t count, const LayerStep& step, int threads) {
    static thread_local Memory memory;
    for (int64_t i = 0; i < count; ++i) memory.reserve(layers[i], step);
    const ReadRows read(step, memory);
    std::deque<Projection> projections;
    std::deque<Mixing> mixings;
    std::vector<Phase> phases;
    for (int64_t i = 0; i < count; ++i) {
        const bool is_last = i + 1 == count;
        projections.emplace_back(layers[i], i > 0 ? layers + i - 1 : nullptr, step, i, memory, threads);
        projections.back().add_phases(phases);
        if (is_last && !read.are_all()) phases.push_back(phase_of<&ReadRows::put_first>(1, read));
        if (is_last && read.fewer().rows == 0) break;
        mixings.emplace_back(layers[i], is_last ? read.fewer() : step, i, memory, threads);
        mixings.back().add_phases(phases);
        if (is_last) mixings.back().add_end(phases);
    }
    if (!read.are_all()) phases.push_back(phase_of<&ReadRows::put_back>(1, read));
    run_phases(threads, phases.data(), static_cast<int64_t>(phases.size()));
}

}  // namespace baton
