#include "linear.h"

#include <algorithm>
#include <vector>

#include "thread_pool.h"

namespace baton {
namespace {

constexpr int64_t TASK_BYTES = 128 << 10;  // of panels, for few rows: some microseconds of memory
constexpr int64_t TASK_PANELS = 4;         // for many rows: each piece of a block of rows is multiplied with so many
constexpr int64_t TASK_ROWS = 96;          // a core's second cache holds a piece of each, and of the panels
constexpr int64_t PIECE_BYTES = 24 << 10;  // of a block of rows: half of a core's first cache

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
    int64_t input_bytes;
    int64_t num_sums;
};

struct Scratch {
    std::vector<float> scales, sums;
    std::vector<uint32_t> units;
};

template <class T>
T* reserved(std::vector<T>& memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
    return memory.data();
}

// Units are 4 bytes: a float, 2 of bfloat16 or 4 of int8. write_row(row, the block's rows, the row's units) makes them.
template <class WriteRow>
const uint32_t* side_by_side(const Kernels& kernels, const Blocks& blocks, int64_t units, Scratch& scratch, int threads,
                             WriteRow write_row) {
    uint32_t* const all = reserved(scratch.units, blocks.rows * units);
    auto block_of = [&](int64_t block) {
        thread_local std::vector<uint32_t> spare;
        const int64_t size = blocks.size(block), first = block * blocks.each;
        uint32_t* const out = all + first * units;
        uint32_t* const rows = size == 1 ? out : reserved(spare, size * units);
        for (int64_t row = 0; row < size; ++row) write_row(first + row, size, rows + row * units);
        if (size > 1) kernels.interleave({rows, size, units, out});
    };
    run(threads, blocks.count, block_of);
    return all;
}

Rows as_floats(const Kernels& kernels, const Layout& layout, const float* x, const Blocks& blocks, Scratch& scratch,
               int threads) {
    const int64_t inputs = layout.inputs;
    if (blocks.each == 1) return {x, nullptr, nullptr, inputs * 4, 4, 0};
    uint32_t* const all = reserved(scratch.units, blocks.rows * inputs);
    auto block_of = [&](int64_t block) {
        const int64_t first = block * blocks.each * inputs;
        kernels.interleave({reinterpret_cast<const uint32_t*>(x) + first, blocks.size(block), inputs, all + first});
    };
    run(threads, blocks.count, block_of);
    return {all, nullptr, nullptr, inputs * 4, 4, 0};
}

Rows as_bfloat16(const Kernels& kernels, const Dots& dots, const Layout& layout, const float* x, const Blocks& blocks,
                 Scratch& scratch, int threads) {
    const int64_t units = layout.padded_inputs() / 2;
    auto write_row = [&](int64_t row, int64_t, uint32_t* out) {
        out[units - 1] = 0;
        dots.round_row(x + row * layout.inputs, layout.inputs, reinterpret_cast<uint16_t*>(out));
    };
    return {side_by_side(kernels, blocks, units, scratch, threads, write_row), nullptr, nullptr, units * 4, 2, 0};
}

Rows as_int8(const Kernels& kernels, const Layout& layout, const float* x, const Blocks& blocks, Scratch& scratch,
             int threads) {
    const int64_t padded = layout.padded_inputs(), num_sums = layout.num_groups();
    float* const scales = reserved(scratch.scales, blocks.rows);
    float* const sums = reserved(scratch.sums, blocks.rows * num_sums);
    auto write_row = [&](int64_t row, int64_t size, uint32_t* out) {
        const int64_t place = row % blocks.each;
        kernels.round_row({x + row * layout.inputs, layout.inputs, padded, layout.group, size,
                           reinterpret_cast<int8_t*>(out), scales + row, sums + (row - place) * num_sums + place});
    };
    const uint32_t* all = side_by_side(kernels, blocks, padded / 4, scratch, threads, write_row);
    return {all, scales, sums, padded, 1, num_sums};
}

// One matrix's product, cut into tasks: some panels, and some blocks of rows, by pieces of their inputs.
struct Product {
    const Layout& layout;
    const uint8_t* panels;
    const float* bias;
    float* out;
    Multiply multiply_panel;
    Blocks blocks;
    Rows rows;

    int64_t panel_bytes() const { return layout.panel_bytes(); }

    int64_t task_panels() const {
        return blocks.count > 1 ? TASK_PANELS : std::max<int64_t>(1, TASK_BYTES / panel_bytes());
    }

    int64_t task_blocks() const { return std::max<int64_t>(1, TASK_ROWS / blocks.each); }

    // Numbers of few bits are multiplied whole: their sums are no floats on the way.
    int64_t piece_inputs() const {
        if (layout.is_whole()) return layout.inputs;
        return PIECE_BYTES / (rows.input_bytes * blocks.each) / 2 * 2;
    }

    int64_t panel_tasks() const { return (layout.num_panels() + task_panels() - 1) / task_panels(); }

    int64_t num_tasks() const { return panel_tasks() * ((blocks.count + task_blocks() - 1) / task_blocks()); }

    void task(int64_t number) const {
        const int64_t first_panel = number % panel_tasks() * task_panels();
        const int64_t first_block = number / panel_tasks() * task_blocks();
        const int64_t end_panel = std::min(layout.num_panels(), first_panel + task_panels());
        const int64_t end_block = std::min(blocks.count, first_block + task_blocks());
        for (int64_t from = 0; from < layout.inputs; from += piece_inputs())
            for (int64_t block = first_block; block < end_block; ++block)
                for (int64_t panel = first_panel; panel < end_panel; ++panel) piece(panel, block, from);
    }

    void piece(int64_t panel, int64_t block, int64_t from) const {
        const int64_t row = block * blocks.each, column = panel * PANEL, size = blocks.size(block);
        const int64_t end = std::min(layout.inputs, from + piece_inputs());
        const bool is_last = end == layout.inputs;
        const auto* x = static_cast<const uint8_t*>(rows.data) + row * rows.row_bytes;
        multiply_panel({&layout, panels + panel * panel_bytes() + from * panel_bytes() / layout.padded_inputs(),
                        x + from * size * rows.input_bytes,
                        rows.scales == nullptr ? nullptr : rows.scales + row,
                        rows.sums == nullptr ? nullptr : rows.sums + row * rows.num_sums, size, end - from, from > 0,
                        is_last && bias != nullptr ? bias + column : nullptr, out + row * layout.outputs + column,
                        layout.outputs, std::min(PANEL, layout.outputs - column)});
    }
};

}  // namespace

void multiply(const Kernels& kernels, const Dots* dots, const Layout& layout, const uint8_t* panels, const float* x,
              int64_t num_rows, const float* bias, float* out, int threads) {
    static thread_local Scratch scratch;
    const auto format = static_cast<int>(layout.format);
    const Blocks blocks(num_rows, kernels.most_rows[format]);
    const bool by_dots = dots != nullptr && layout.format == Format::bf16 && blocks.count > 1;
    const Rows rows = layout.is_whole() ? as_int8(kernels, layout, x, blocks, scratch, threads)
                      : by_dots         ? as_bfloat16(kernels, *dots, layout, x, blocks, scratch, threads)
                                        : as_floats(kernels, layout, x, blocks, scratch, threads);
    const Product product{layout, panels, bias, out, by_dots ? dots->multiply : kernels.multiply[format], blocks, rows};
    auto task = [&](int64_t number) { product.task(number); };
    run(threads, product.num_tasks(), task);
}

}  // namespace baton
