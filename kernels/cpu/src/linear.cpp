#include "linear.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "thread_pool.h"

namespace baton {
namespace {

constexpr int64_t TASK_BYTES = 128 << 10;  // of panels, for few rows: some microseconds of memory
constexpr int64_t TASK_PANELS = 2;         // for many rows: each piece of a panel is multiplied with so many rows
constexpr int64_t TASK_ROWS = 96;          // a core's second cache holds a piece of each, and the panel that follows
constexpr int64_t PIECE_BYTES = 24 << 10;  // of a block of rows: half of a core's first cache
constexpr int64_t WIDENED_FROM = 3;        // blocks of rows, of which each would take 4 bits apart: int4; 2 with steps4
constexpr int64_t WIDENED_ROW_BYTES = 256 << 10;  // of a task's rows: with fewer it would take 4 bits apart more often

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
    int64_t row_bytes, input_bytes;
    const float* scales = nullptr;
    const int32_t* starts = nullptr;
    const float* sums = nullptr;
    int64_t num_groups = 0;
};

struct Scratch {
    std::vector<float> scales, sums;
    std::vector<int32_t> starts;
    std::vector<uint32_t> units;
};

template <class T>
T* reserved(std::vector<T>& memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
    return memory.data();
}

// Units are 4 bytes: a float, 2 of bfloat16 or 4 of int8. write_row(row, its units) makes them; finish(first row, rows, units) sees
// each block of them side by side.
template <class WriteRow, class Finish>
const uint32_t* side_by_side(const Kernels& kernels, const Blocks& blocks, int64_t units, Scratch& scratch, int threads,
                             WriteRow write_row, Finish finish) {
    uint32_t* const all = reserved(scratch.units, blocks.rows * units);
    auto block_of = [&](int64_t block) {
        thread_local std::vector<uint32_t> spare;
        const int64_t size = blocks.size(block), first = block * blocks.each;
        uint32_t* const out = all + first * units;
        uint32_t* const rows = size == 1 ? out : reserved(spare, size * units);
        for (int64_t row = 0; row < size; ++row) write_row(first + row, rows + row * units);
        if (size > 1) kernels.interleave({rows, size, units, out});
        finish(first, size, out);
    };
    run(threads, blocks.count, block_of);
    return all;
}

Rows as_floats(const Kernels& kernels, const Layout& layout, const float* x, const Blocks& blocks, Scratch& scratch,
               int threads) {
    const int64_t inputs = layout.inputs;
    if (blocks.each == 1) return {x, inputs * 4, 4};
    uint32_t* const all = reserved(scratch.units, blocks.rows * inputs);
    auto block_of = [&](int64_t block) {
        const int64_t first = block * blocks.each * inputs;
        kernels.interleave({reinterpret_cast<const uint32_t*>(x) + first, blocks.size(block), inputs, all + first});
    };
    run(threads, blocks.count, block_of);
    return {all, inputs * 4, 4};
}

Rows as_bfloat16(const Kernels& kernels, const Dots& dots, const Layout& layout, const float* x, const Blocks& blocks,
                 Scratch& scratch, int threads) {
    const int64_t units = layout.padded_inputs() / 2;
    auto write_row = [&](int64_t row, uint32_t* out) {
        out[units - 1] = 0;
        dots.round_row(x + row * layout.inputs, layout.inputs, reinterpret_cast<uint16_t*>(out));
    };
    auto finish = [](int64_t, int64_t, const uint32_t*) {};
    return {side_by_side(kernels, blocks, units, scratch, threads, write_row, finish), units * 4, 2};
}

// What the panels' numbers are too large by, as far as no zero point says it.
int32_t offset_of(const Kernels& kernels, const Layout& layout) {
    if (layout.format == Format::int8) return kernels.int8_offset;
    return layout.has_zeros ? 0 : 8;
}

// `layout`: what panels are as they are multiplied. `inputs` of it are the rows'; behind them are zeros, to whole groups.
Rows as_int8(const Kernels& kernels, const Layout& layout, int64_t inputs, const float* x, const Blocks& blocks, Scratch& scratch,
             int threads) {
    const bool has_steps = layout.format == Format::steps4;
    const int64_t group = has_steps ? STEP_INPUTS : layout.group, padded = rounded_up(inputs, group), groups = padded / group;
    const int32_t offset = offset_of(kernels, layout);
    float* const scales = reserved(scratch.scales, blocks.rows);
    int32_t* const starts = reserved(scratch.starts, blocks.rows * groups);
    float* const sums = layout.has_zeros ? reserved(scratch.sums, blocks.rows * groups) : nullptr;
    auto write_row = [&](int64_t row, uint32_t* out) {
        kernels.round_row({x + row * inputs, inputs, padded, reinterpret_cast<int8_t*>(out), scales + row});
    };
    auto finish = [&](int64_t first, int64_t size, const uint32_t* block) {
        const auto sum = has_steps ? kernels.sum_steps : kernels.sum_groups;
        sum({block, groups, group / 4, size, offset, starts + first * groups,
             sums == nullptr ? nullptr : sums + first * groups});
    };
    const uint32_t* all = side_by_side(kernels, blocks, padded / 4, scratch, threads, write_row, finish);
    return {all, padded, 1, scales, starts, sums, groups};
}

// One matrix's product, cut into tasks: some panels, and some blocks of rows, by pieces of their inputs. All of a task's blocks are
// multiplied with a piece of a panel before the next, which is fetched meanwhile.
struct Product {
    const Kernels& kernels;
    const Layout& layout;
    const Layout& multiplied;  // what panels are as they are multiplied
    const uint8_t* panels;
    const float* bias;
    float* out;
    Multiply multiply_panel;
    bool widens;
    Blocks blocks;
    Rows rows;
    int threads;
    int64_t panel_bytes = layout.panel_bytes();

    int64_t task_panels() const {
        return blocks.count > 1 ? TASK_PANELS : std::max<int64_t>(1, TASK_BYTES / panel_bytes);
    }

    int64_t task_blocks() const {
        const int64_t most = widens ? std::max(TASK_ROWS, WIDENED_ROW_BYTES / rows.row_bytes) : TASK_ROWS;
        return std::max<int64_t>(1, most / blocks.each);
    }

    // Numbers of few bits are multiplied whole: their sums are no floats on the way.
    int64_t piece_inputs() const {
        if (layout.is_whole()) return layout.inputs;
        const int64_t most = PIECE_BYTES / (rows.input_bytes * blocks.each);
        const int64_t pieces = (layout.inputs + most - 1) / most;
        return rounded_up((layout.inputs + pieces - 1) / pieces, 2);
    }

    int64_t panel_tasks() const { return (layout.num_panels() + task_panels() - 1) / task_panels(); }

    int64_t num_tasks() const { return panel_tasks() * ((blocks.count + task_blocks() - 1) / task_blocks()); }

    int64_t first_panel_of(int64_t task) const { return task % panel_tasks() * task_panels(); }

    const uint8_t* numbers_of(int64_t panel, int64_t from) const {
        return panels + panel * panel_bytes + (from == 0 ? 0 : from * panel_bytes / layout.padded_inputs());
    }

    void task(int64_t number) const {
        const int64_t first = first_panel_of(number), end = std::min(layout.num_panels(), first + task_panels());
        for (int64_t from = 0; from < layout.inputs; from += piece_inputs())
            for (int64_t panel = first; panel < end; ++panel) {
                const int64_t behind = from + piece_inputs();
                piece(number, panel, from,
                      panel + 1 < end          ? numbers_of(panel + 1, from)
                      : behind < layout.inputs ? numbers_of(first, behind)
                                               : numbers_of(first_panel_of(number + threads), 0));
            }
    }

    void piece(int64_t task, int64_t panel, int64_t from, const uint8_t* next) const {
        const int64_t first = task / panel_tasks() * task_blocks(), end = std::min(blocks.count, first + task_blocks());
        const int64_t inputs = std::min(layout.inputs - from, piece_inputs());
        const int64_t share = panel_bytes * inputs / layout.inputs / (end - first);
        const uint8_t* const numbers = widens ? widened(panel) : numbers_of(panel, from);
        const uint8_t* const tables = &multiplied == &layout ? numbers_of(panel, 0) : numbers;
        for (int64_t block = first; block < end; ++block)
            multiply(tables, numbers, panel, block, from, inputs, next + (block - first) * share,
                     end > first + 1 ? share : 0);
    }

    // Its vectors do not lie across two lines of the cache.
    const uint8_t* widened(int64_t panel) const {
        constexpr size_t LINE = 64;
        thread_local std::vector<uint8_t> spare;
        const auto size = static_cast<size_t>(layout.widened().panel_bytes());
        size_t room = size + LINE;
        void* made = reserved(spare, static_cast<int64_t>(room));
        auto* const out = static_cast<uint8_t*>(std::align(LINE, size, made, room));
        if (&multiplied == &layout)
            kernels.widen(numbers_of(panel, 0), layout.scales_at(), reinterpret_cast<int32_t*>(out));
        else
            kernels.widen_steps(layout, numbers_of(panel, 0), out);
        return out;
    }

    void multiply(const uint8_t* tables, const uint8_t* numbers, int64_t panel, int64_t block, int64_t from, int64_t inputs,
                  const uint8_t* ahead, int64_t ahead_bytes) const {
        const int64_t row = block * blocks.each, column = panel * PANEL, size = blocks.size(block);
        const bool is_last = from + inputs == layout.inputs;
        const auto* x = static_cast<const uint8_t*>(rows.data) + row * rows.row_bytes;
        multiply_panel({&multiplied, tables, numbers, ahead, ahead_bytes, x + from * size * rows.input_bytes,
                        rows.scales == nullptr ? nullptr : rows.scales + row,
                        rows.starts == nullptr ? nullptr : rows.starts + row * rows.num_groups,
                        rows.sums == nullptr ? nullptr : rows.sums + row * rows.num_groups, size, inputs, from > 0,
                        is_last && bias != nullptr ? bias + column : nullptr, out + row * layout.outputs + column,
                        layout.outputs, std::min(PANEL, layout.outputs - column)});
    }
};

}  // namespace

void multiply(const Kernels& kernels, const Dots* dots, const Layout& layout, const uint8_t* panels, const float* x,
              int64_t num_rows, const float* bias, float* out, int threads) {
    static thread_local Scratch scratch;
    const Blocks blocks(num_rows, kernels.most_rows[static_cast<int>(layout.format)]);
    const bool by_dots = dots != nullptr && layout.format == Format::bf16 && blocks.count > 1;
    const bool widens_halves = layout.format == Format::int4 && blocks.count >= WIDENED_FROM;
    const bool widens_steps = layout.format == Format::steps4 && blocks.count > 1 && kernels.widen_steps != nullptr;
    const Layout in_bytes = layout.widened();
    const Layout& multiplied = widens_steps ? in_bytes : layout;
    const Rows rows = layout.is_whole() ? as_int8(kernels, multiplied, layout.inputs, x, blocks, scratch, threads)
                      : by_dots         ? as_bfloat16(kernels, *dots, layout, x, blocks, scratch, threads)
                                        : as_floats(kernels, layout, x, blocks, scratch, threads);
    const Multiply multiply_panel = by_dots         ? dots->multiply
                                    : widens_halves ? kernels.multiply_widened
                                                    : kernels.multiply[static_cast<int>(multiplied.format)];
    const Product product{kernels, layout,         multiplied,                    panels, bias, out,
                          multiply_panel, widens_halves || widens_steps, blocks, rows,   threads};
    auto task = [&](int64_t number) { product.task(number); };
    run(threads, product.num_tasks(), task);
}

}  // namespace baton
