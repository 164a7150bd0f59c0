#include "feed_forward.h"

#include <algorithm>
#include <deque>

namespace baton {

GatedProduct::GatedProduct(const Matrix& matrix, int64_t gate, const Kernels& of_gate, const float* x, int64_t rows, float* out,
                           const Product& next, int threads, RowMemory& memory)
    : product_(matrix, x, rows, nullptr, threads, memory),
      size_(matrix.layout.outputs / 2),
      panels_((size_ + PANEL - 1) / PANEL),
      shares_(product_.shares(panels_, 2)),
      gate_rows_(of_gate.gate_rows[gate]),
      out_(out),
      next_(next),
      lays_out_(next.takes_columns(product_.blocks())),
      threads_(threads) {}

// Where ups do not begin with a panel, those of a task lie in one more than its gates.
void GatedProduct::multiply(int64_t task) const {
    static thread_local std::vector<float> spare;
    const Blocks& blocks = product_.blocks();
    const int64_t first_block = task / shares_.tasks * shares_.blocks;
    const int64_t end_block = std::min(blocks.count, first_block + shares_.blocks);
    const int64_t first_row = first_block * blocks.each, rows = std::min(blocks.rows, end_block * blocks.each) - first_row;
    const int64_t first = first_panel_of(task), end = std::min(panels_, first + shares_.panels);
    const int64_t column = first * PANEL, columns = std::min(size_, end * PANEL) - column;
    const int64_t up = size_ + column, first_up = up / PANEL, end_up = (up + columns + PANEL - 1) / PANEL;
    const int64_t ups_at = (end - first) * PANEL, stride = ups_at + (end_up - first_up) * PANEL;
    float* const sums = reserved(spare, rows * stride);
    product_.multiply_tile({first, end, first_block, end_block, sums, stride, product_.panel_at(first_up)});
    product_.multiply_tile({first_up, end_up, first_block, end_block, sums + ups_at, stride,
                       product_.panel_at(first_panel_of(task + threads_))});
    RowGates gates{sums, sums + ups_at + up % PANEL, rows, columns, stride, out_ + first_row * size_ + column, size_};
    if (lays_out_) gates.out = sums, gates.out_stride = stride;
    gate_rows_(gates);
    if (!lays_out_) return;
    for (int64_t block = first_block; block < end_block; ++block)
        next_.lay_out_columns(block, column, columns, sums + (block - first_block) * blocks.each * stride, stride);
}

FeedForwardTasks::FeedForwardTasks(const FeedForward& work, const float* x, int64_t rows, float* out, int threads,
                                   FeedForwardMemory& memory)
    : down_(work.down, reserved(memory.inner, rows * work.down.layout.inputs), rows, out, threads, memory.inner_rows),
      gated_(work.gate_up, work.gate, *work.of_gate, x, rows, memory.inner.data(), down_, threads, memory.rows) {}

void FeedForwardTasks::add_phases(std::vector<Phase>& phases) const {
    phases.push_back(phase_of<&GatedProduct::multiply>(gated_.num_tasks(), gated_));
    if (!gated_.lays_out()) phases.push_back(phase_of<&Product::lay_out>(down_.num_laid_out(), down_));
    phases.push_back(phase_of<&Product::multiply>(down_.num_tasks(), down_));
}

void feed_forward(const FeedForward& work, const float* x, int64_t rows, float* out, int threads) {
    static thread_local FeedForwardMemory memory;
    const int64_t inputs = work.gate_up.layout.inputs, outputs = work.down.layout.outputs;
    const Blocks blocks(rows, piece_rows(work.gate_up, rows));
    reserved(memory.inner, blocks.each * work.down.layout.inputs);
    std::deque<FeedForwardTasks> pieces;
    std::vector<Phase> phases;
    for (int64_t i = 0; i < blocks.count; ++i) {
        const int64_t row = i * blocks.each;
        pieces.emplace_back(work, x + row * inputs, blocks.size(i), out + row * outputs, threads, memory);
        const Product& first = pieces.back().first();
        phases.push_back(phase_of<&Product::lay_out>(first.num_laid_out(), first));
        pieces.back().add_phases(phases);
    }
    run_phases(threads, phases.data(), static_cast<int64_t>(phases.size()));
}

}  // namespace baton
