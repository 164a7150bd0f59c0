#include "layers.h"

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
        grow(mlp.inner, step.rows * layer.down.inputs);
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

// One layer in one step. Its methods are tasks.
class LayerTasks {
  public:
    LayerTasks(const GivenLayer& layer, const GivenLayer* before, const LayerStep& step, int64_t index, Memory& memory, int threads)
        : layer_(layer),
          before_(before),
          step_(step),
          memory_(memory),
          kernels_(kernels_of(step.row_isa)),
          qkv_(matrix_of(layer.qkv), memory.normed.data(), step.rows, memory.qkv.data(), threads, memory.rows),
          output_(matrix_of(layer.output, nullptr), memory.attended.data(), step.rows, step.added, threads, memory.rows),
          mlp_({matrix_of(layer.gate_up), layer.gate, &kernels_, matrix_of(layer.down, nullptr)}, memory.normed.data(), step.rows,
               step.added, threads, memory.mlp),
          rotation_{memory.qkv.data(), step.heads, step.kv_heads, step.size, step.cos[layer.rotation], step.sin[layer.rotation],
                    layer.q_norm, layer.k_norm, layer.head_eps, memory.queries.data(), nullptr, step.pools[index],
                    step.number == 1 ? dots_of(step.attention_isa) : nullptr, step.slots, step.block_size},
          attention_(step.attention_isa, static_cast<int>(step.number), attention_step(layer, step, index, memory)) {}

    void add_phases(std::vector<Phase>& phases) const {
        phases.push_back(phase_of<&LayerTasks::begin_attention>(qkv_.blocks().count, *this));
        phases.push_back(phase_of<&Product::multiply>(qkv_.num_tasks(), qkv_));
        phases.push_back(phase_of<&LayerTasks::turn>(step_.rows, *this));
        phases.push_back(phase_of<&PagedAttention::attend>(attention_.num_tasks(), attention_));
        phases.push_back(phase_of<&Product::lay_out>(output_.num_laid_out(), output_));
        phases.push_back(phase_of<&Product::multiply>(output_.num_tasks(), output_));
        phases.push_back(phase_of<&LayerTasks::begin_mlp>(mlp_.first().blocks().count, *this));
        mlp_.add_phases(phases);
    }

    // A phase behind the last layer, which no other layer begins with.
    void add_end(std::vector<Phase>& phases) const {
        if (!mlp_end(layer_).is_empty()) phases.push_back(phase_of<&LayerTasks::end_mlp>(step_.rows, *this));
    }

  private:
    static HalfEnd attention_end(const GivenLayer& layer) {
        return {layer.output.bias, layer.behind_attention, layer.eps, layer.residual_scale};
    }
    static HalfEnd mlp_end(const GivenLayer& layer) { return {layer.down.bias, layer.behind_mlp, layer.eps, layer.residual_scale}; }

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

    void begin_attention(int64_t block) const {
        const HalfEnd end = before_ == nullptr ? HalfEnd{} : mlp_end(*before_);
        begin_half(qkv_, layer_.attention_norm, before_ == nullptr ? nullptr : &end, block);
    }

    void begin_mlp(int64_t block) const {
        const HalfEnd end = attention_end(layer_);
        begin_half(mlp_.first(), layer_.mlp_norm, &end, block);
    }

    // Adds what the half before has given, if there was one, to a block of rows, and lays out their norm for the product.
    void begin_half(const Product& product, const float* norm, const HalfEnd* before, int64_t block) const {
        const Blocks& blocks = product.blocks();
        const int64_t size = step_.hidden, first = block * blocks.each;
        for (int64_t row = first; row < first + blocks.size(block); ++row) {
            float *const residual = step_.x + row * size, *const given = step_.added + row * size;
            float* const normed = memory_.normed.data() + row * size;
            if (before == nullptr) {
                kernels_.norm_row({residual, nullptr, norm, size, layer_.eps, nullptr, normed});
            } else {
                before->finish(kernels_, given, size);
                kernels_.norm_row({given, residual, norm, size, layer_.eps, residual, normed});
            }
        }
        product.lay_out(block);
    }

    void turn(int64_t row) const { rotate(kernels_, rotation_, row); }

    void end_mlp(int64_t row) const { mlp_end(layer_).finish(kernels_, step_.added + row * step_.hidden, step_.hidden); }

    const GivenLayer& layer_;
    const GivenLayer* before_;
    const LayerStep& step_;
    Memory& memory_;
    const Kernels& kernels_;
    Product qkv_, output_;
    FeedForwardTasks mlp_;
    Rotation rotation_;
    PagedAttention attention_;
};

}  // namespace

void run_layers(const GivenLayer* layers, int64_t count, const LayerStep& step, int threads) {
    static thread_local Memory memory;
    for (int64_t i = 0; i < count; ++i) memory.reserve(layers[i], step);
    std::deque<LayerTasks> tasks;
    std::vector<Phase> phases;
    for (int64_t i = 0; i < count; ++i) {
        tasks.emplace_back(layers[i], i > 0 ? layers + i - 1 : nullptr, step, i, memory, threads);
        tasks.back().add_phases(phases);
    }
    tasks.back().add_end(phases);
    run_phases(threads, phases.data(), static_cast<int64_t>(phases.size()));
}

}  // namespace baton
