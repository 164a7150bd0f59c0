#include "linear.h"

#include <algorithm>
#include <vector>

#include "thread_pool.h"

namespace baton {
namespace {

constexpr int64_t TASK_BYTES = 128 << 10;  // of panels: some microseconds of memory
constexpr int64_t TASK_ROWS = 96;          // of inputs: what a core's cache holds beside a panel

// Blocks of rows, as even as they can be.
struct Blocks {
    int64_t rows, each, count;

    Blocks(int64_t rows, int64_t most) : rows(rows) {
        const int64_t least = (rows + most - 1) / most;
        each = (rows + least - 1) / least;
        count = (rows + each - 1) / each;
    }

    int64_t size(int64_t block) const { return std::min(each, rows - block * each); }
};

// The rows as kernels read them: block by block, inputs first. Memory that stays with the calling thread.
struct Rows {
    const void* data;
    const float* scales;
    const float* sums;
    int64_t row_bytes;
    int64_t num_sums;
};

struct Scratch {
    std::vector<float> numbers, scales, sums;
    std::vector<uint8_t> bytes;
};

template <class T>
void reserve(std::vector<T>& memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
}

Rows transposed(const Layout& layout, const float* x, const Blocks& blocks, Scratch& scratch, int threads) {
    const int64_t inputs = layout.inputs;
    if (blocks.each == 1) return {x, nullptr, nullptr, inputs * 4, 0};
    reserve(scratch.numbers, blocks.rows * inputs);
    auto block_of = [&](int64_t block) {
        const int64_t size = blocks.size(block), first = block * blocks.each;
        float* to = scratch.numbers.data() + first * inputs;
        for (int64_t row = 0; row < size; ++row) {
            const float* from = x + (first + row) * inputs;
            for (int64_t k = 0; k < inputs; ++k) to[k * size + row] = from[k];
        }
    };
    run(threads, blocks.count, block_of);
    return {scratch.numbers.data(), nullptr, nullptr, inputs * 4, 0};
}

Rows rounded(const Kernels& kernels, const Layout& layout, const float* x, const Blocks& blocks, Scratch& scratch,
             int threads) {
    const int64_t padded = layout.padded_inputs();
    const int64_t num_sums = layout.num_groups();
    reserve(scratch.bytes, blocks.rows * padded);
    reserve(scratch.scales, blocks.rows);
    reserve(scratch.sums, blocks.rows * num_sums);
    auto block_of = [&](int64_t block) {
        thread_local std::vector<int8_t> spare;
        reserve(spare, padded);
        const int64_t size = blocks.size(block), first = block * blocks.each;
        for (int64_t row = 0; row < size; ++row)
            kernels.round_row({x + (first + row) * layout.inputs, layout.inputs, padded, layout.group, size,
                               scratch.bytes.data() + first * padded + row * 4, scratch.scales.data() + first + row,
                               scratch.sums.data() + first * num_sums + row, spare.data()});
    };
    run(threads, blocks.count, block_of);
    return {scratch.bytes.data(), scratch.scales.data(), scratch.sums.data(), padded, num_sums};
}

}  // namespace

void multiply(const Kernels& kernels, const Layout& layout, const uint8_t* panels, const float* x, int64_t num_rows,
              const float* bias, float* out, int threads) {
    static thread_local Scratch scratch;
    const auto format = static_cast<int>(layout.format);
    const Blocks blocks(num_rows, kernels.most_rows[format]);
    const bool rounds = layout.is_whole();
    const Rows rows = rounds ? rounded(kernels, layout, x, blocks, scratch, threads)
                             : transposed(layout, x, blocks, scratch, threads);
    const int64_t panel_bytes = layout.panel_bytes(), num_panels = layout.num_panels();
    const int64_t task_panels = std::max<int64_t>(1, TASK_BYTES / panel_bytes);
    const int64_t task_blocks = std::max<int64_t>(1, TASK_ROWS / blocks.each);
    const int64_t panel_tasks = (num_panels + task_panels - 1) / task_panels;
    const int64_t block_tasks = (blocks.count + task_blocks - 1) / task_blocks;
    auto task = [&](int64_t number) {
        const int64_t first_panel = number % panel_tasks * task_panels;
        const int64_t first_block = number / panel_tasks * task_blocks;
        for (int64_t p = first_panel; p < std::min(num_panels, first_panel + task_panels); ++p)
            for (int64_t b = first_block; b < std::min(blocks.count, first_block + task_blocks); ++b) {
                const int64_t row = b * blocks.each, column = p * PANEL;
                kernels.multiply[format]({&layout, panels + p * panel_bytes,
                                          static_cast<const uint8_t*>(rows.data) + row * rows.row_bytes,
                                          rounds ? rows.scales + row : nullptr,
                                          rounds ? rows.sums + row * rows.num_sums : nullptr, blocks.size(b),
                                          bias == nullptr ? nullptr : bias + column,
                                          out + row * layout.outputs + column, layout.outputs,
                                          std::min(PANEL, layout.outputs - column)});
            }
    };
    run(threads, panel_tasks * block_tasks, task);
}

}  // namespace baton
