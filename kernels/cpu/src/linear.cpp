#include "linear.h"

#include <cstring>
#include <memory>

#include "thread_pool.h"

namespace baton {
namespace {

constexpr size_t LINE = 64;                // of the cache
constexpr int64_t TASK_BYTES = 128 << 10;  // of panels, for few rows: some microseconds of memory
constexpr int64_t TASK_PANELS = 2;         // for many rows: each piece of a panel is multiplied with so many rows
constexpr int64_t PIECE_BYTES = 24 << 10;  // of a block of rows: half of a core's first cache
constexpr int64_t WIDENED_FROM = 3;        // blocks of rows, of which each would take 4 bits apart: int4; 2 with steps4
constexpr int64_t AMX_PIECE = 512;   // inputs of bfloat16: half of a core's first cache has them of a panel
constexpr int64_t AMX_PANELS = 8;    // of a task, at most: so often a piece of its rows is read from the second cache
constexpr int64_t AMX_TASKS = 3;     // at least, of each thread
constexpr int64_t NEVER = INT64_MAX;
// The rows from which on tiles multiply, by format. With bfloat16 it is one, since vectors would give a row other bits. Bytes have the
// same: below a tile's rows, vectors are as fast as memory. Vectors take 4 bits apart in each block, tiles once.
constexpr int64_t TILES_FROM[FORMATS] = {NEVER, 1, NEVER, 16, 8, 8};
constexpr int64_t WIDENED_ROW_BYTES = 256 << 10;  // of a task's rows: with fewer it would take 4 bits apart more often

// What the panels' numbers are too large by, as far as no zero point says it.
int32_t offset_of(const Kernels& kernels, const Layout& layout) {
    if (layout.format == Format::int8) return kernels.int8_offset;
    return layout.has_zeros() ? 0 : 8;
}

}  // namespace

bool goes_by_tiles(const Matrix& matrix, int64_t rows) {
    return matrix.amx != nullptr && rows >= TILES_FROM[static_cast<int>(matrix.layout.format)];
}

Product::Product(const Matrix& matrix, const float* x, int64_t rows, float* out, int threads, RowMemory& memory)
    : matrix_(matrix),
      by_tiles_(goes_by_tiles(matrix, rows)),
      blocks_(rows, by_tiles_ ? AMX_ROWS : matrix.kernels->most_rows[static_cast<int>(matrix.layout.format)]),
      panel_bytes_(matrix.layout.panel_bytes()),
      x_(x),
      out_(out),
      threads_(threads),
      memory_(&memory) {
    const Layout& layout = matrix_.layout;
    const Kernels& kernels = *matrix_.kernels;
    by_dots_ = matrix_.dots != nullptr && layout.format == Format::bf16;
    widens_halves_ = layout.format == Format::int4 && (by_tiles_ || blocks_.count >= WIDENED_FROM);
    widens_steps_ = layout.format == Format::steps4 && (by_tiles_ || blocks_.count > 1) && kernels.widen_steps != nullptr;
    reads_x_ = !layout.is_whole() && !by_dots_ && blocks_.each == 1;
    multiplied_ = widens_steps_ ? layout.widened() : layout;
    multiply_panel_ = by_tiles_ ? by_dots_         ? matrix_.amx->multiply_pairs
                                  : widens_halves_ ? matrix_.amx->multiply_widened
                                                   : matrix_.amx->multiply_bytes
                      : by_dots_       ? matrix_.dots->multiply
                      : widens_halves_ ? kernels.multiply_widened
                                       : kernels.multiply[static_cast<int>(multiplied_.format)];
    row_group_ = multiplied_.format == Format::steps4 ? STEP_INPUTS : layout.is_whole() ? multiplied_.group : layout.inputs;
    row_groups_ = layout.is_whole() ? (layout.inputs + row_group_ - 1) / row_group_ : 0;
    input_bytes_ = layout.is_whole() ? 1 : by_dots_ ? 2 : 4;
    row_bytes_ = layout.is_whole() ? row_groups_ * row_group_ : (by_dots_ ? layout.padded_inputs() : layout.inputs) * input_bytes_;
    if (by_tiles_) row_bytes_ = rounded_up(row_bytes_, multiplied_.tile_inputs() * input_bytes_);
    shares_ = shares(layout.num_panels(), 1);
    set_pieces();
    if (!reads_x_) reserved(memory.units, (rows * row_bytes_ + LINE) / 4);
    if (!layout.is_whole()) return;
    reserved(memory.scales, rows);
    reserved(memory.starts, rows * row_groups_);
    if (layout.has_zeros()) reserved(memory.sums, rows * row_groups_);
}

// Tiles and vectors of rows do not lie across two lines of the cache.
uint8_t* Product::laid_out(int64_t row) const {
    const auto start = reinterpret_cast<uintptr_t>(memory_->units.data());
    return reinterpret_cast<uint8_t*>((start + LINE - 1) / LINE * LINE) + row * row_bytes_;
}

// Units are 4 bytes: a float, 2 of bfloat16 or 4 of int8. write_row(x, its units) makes those of a row.
template <class WriteRow>
const uint32_t* Product::side_by_side(int64_t block, WriteRow write_row) const {
    thread_local std::vector<uint32_t> spare;
    const int64_t units = row_bytes_ / 4, size = blocks_.size(block), first = block * blocks_.each;
    auto* const out = reinterpret_cast<uint32_t*>(laid_out(first));
    if (by_tiles_) {
        for (int64_t row = 0; row < size; ++row) write_row(first + row, out + row * units);
        return out;
    }
    uint32_t* const rows = size == 1 ? out : reserved(spare, size * units);
    for (int64_t row = 0; row < size; ++row) write_row(first + row, rows + row * units);
    if (size > 1) matrix_.kernels->interleave({rows, size, units, out});
    return out;
}

void Product::lay_out(int64_t block) const {
    const int64_t inputs = matrix_.layout.inputs, units = row_bytes_ / 4;
    if (reads_x_) return;
    if (matrix_.layout.is_whole()) return lay_out_bytes(block);
    if (by_dots_) {
        side_by_side(block, [&](int64_t row, uint32_t* out) {
            std::fill(out + inputs / 2, out + units, 0);
            matrix_.dots->round_row(x_ + row * inputs, inputs, reinterpret_cast<uint16_t*>(out));
        });
        return;
    }
    const int64_t first = block * blocks_.each;
    matrix_.kernels->interleave({reinterpret_cast<const uint32_t*>(x_) + first * inputs, blocks_.size(block), inputs,
                                 reinterpret_cast<uint32_t*>(laid_out(first))});
}

bool Product::takes_columns(const Blocks& blocks) const {
    const bool whole_units = !by_dots_ || matrix_.layout.inputs % 2 == 0;
    return !matrix_.layout.is_whole() && !reads_x_ && whole_units && blocks.rows == blocks_.rows && blocks.each == blocks_.each;
}

void Product::lay_out_columns(int64_t block, int64_t first, int64_t columns, const float* rows, int64_t stride) const {
    thread_local std::vector<uint32_t> spare;
    const int64_t size = blocks_.size(block), units = columns * input_bytes_ / 4, row = block * blocks_.each;
    if (by_tiles_) {
        const int64_t end = first + columns, behind = end < matrix_.layout.inputs ? 0 : row_bytes_ - 2 * end;
        for (int64_t i = 0; i < size; ++i) {
            uint8_t* const to = laid_out(row + i);
            matrix_.dots->round_row(rows + i * stride, columns, reinterpret_cast<uint16_t*>(to) + first);
            std::memset(to + 2 * end, 0, static_cast<size_t>(behind));
        }
        return;
    }
    auto* const out = reinterpret_cast<uint32_t*>(laid_out(row)) + first * input_bytes_ / 4 * size;
    uint32_t* const made = reserved(spare, size * units);
    for (int64_t i = 0; i < size; ++i) {
        if (by_dots_)
            matrix_.dots->round_row(rows + i * stride, columns, reinterpret_cast<uint16_t*>(made + i * units));
        else
            std::memcpy(made + i * units, rows + i * stride, static_cast<size_t>(units) * sizeof(float));
    }
    matrix_.kernels->interleave({made, size, units, out});
}

// Behind the rows' inputs are zeros, to whole groups.
void Product::lay_out_bytes(int64_t block) const {
    const Kernels& kernels = *matrix_.kernels;
    const int64_t inputs = matrix_.layout.inputs, first = block * blocks_.each;
    const uint32_t* const out = side_by_side(block, [&](int64_t row, uint32_t* units) {
        kernels.round_row({x_ + row * inputs, inputs, row_bytes_, reinterpret_cast<int8_t*>(units), memory_->scales.data() + row});
    });
    GroupSums work{out, row_groups_, row_group_ / 4, blocks_.size(block), offset_of(kernels, multiplied_),
                   memory_->starts.data() + first * row_groups_,
                   multiplied_.has_zeros() ? memory_->sums.data() + first * row_groups_ : nullptr};
    if (!by_tiles_) return multiplied_.format == Format::steps4 ? kernels.sum_steps(work) : kernels.sum_groups(work);
    for (int64_t row = 0; row < work.rows; ++row, work.x += row_bytes_ / 4, ++work.starts, work.sums += multiplied_.has_zeros())
        matrix_.amx->sum_row(work);
}

Shares Product::shares(int64_t panels, int64_t together) const {
    if (by_tiles_ && blocks_.count > 1) {
        const int64_t parts = (blocks_.rows + AMX_TASK_ROWS - 1) / AMX_TASK_ROWS, wanted = AMX_TASKS * threads_;
        const int64_t each = std::max<int64_t>(1, std::min(panels * parts / wanted, AMX_PANELS / together));
        return {each, (panels + each - 1) / each, (blocks_.count + parts - 1) / parts};
    }
    // For few rows each thread gets as many tasks, as far as panels can be shared out.
    const int64_t few = rounded_up((panels * together * panel_bytes_ + TASK_BYTES - 1) / TASK_BYTES, threads_);
    const int64_t each = blocks_.count > 1 ? std::max<int64_t>(1, TASK_PANELS / together) : (panels + few - 1) / few;
    const bool widens = widens_halves_ || widens_steps_;
    const int64_t rows = widens ? std::max(TASK_ROWS, WIDENED_ROW_BYTES / row_bytes_) : TASK_ROWS;
    return {each, (panels + each - 1) / each, std::max<int64_t>(1, rows / blocks_.each)};
}

void Product::set_pieces() {
    const int64_t inputs = matrix_.layout.inputs;
    // Numbers of few bits are multiplied whole: their sums are no floats on the way.
    const bool at_once = matrix_.layout.is_whole() || (by_tiles_ && blocks_.count == 1);
    const int64_t most = at_once ? inputs : by_tiles_ ? AMX_PIECE : PIECE_BYTES / (input_bytes_ * blocks_.each);
    const int64_t pieces = (inputs + most - 1) / most;
    piece_inputs_ = pieces == 1 ? inputs : rounded_up((inputs + pieces - 1) / pieces, by_tiles_ ? 32 : 2);
}

const uint8_t* Product::numbers_of(int64_t panel, int64_t from) const {
    return matrix_.panels + panel * panel_bytes_ + (from == 0 ? 0 : from * panel_bytes_ / matrix_.layout.padded_inputs());
}

void Product::multiply(int64_t task) const {
    const int64_t outputs = matrix_.layout.outputs, first = task % shares_.tasks * shares_.panels;
    const int64_t first_block = task / shares_.tasks * shares_.blocks;
    multiply_tile({first, std::min(matrix_.layout.num_panels(), first + shares_.panels), first_block,
              std::min(blocks_.count, first_block + shares_.blocks), out_ + first_block * blocks_.each * outputs + first * PANEL,
              outputs, panel_at((task + threads_) % shares_.tasks * shares_.panels)});
}

void Product::multiply_tile(const Tile& tile) const {
    const int64_t inputs = matrix_.layout.inputs;
    for (int64_t from = 0; from < inputs; from += piece_inputs_)
        for (int64_t panel = tile.first_panel; panel < tile.end_panel; ++panel) {
            const int64_t behind = from + piece_inputs_;
            multiply_piece(tile, panel, from,
                           panel + 1 < tile.end_panel ? numbers_of(panel + 1, from)
                           : behind < inputs          ? numbers_of(tile.first_panel, behind)
                                                      : tile.next);
        }
    if (by_tiles_) matrix_.amx->release();
}

void Product::multiply_piece(const Tile& tile, int64_t panel, int64_t from, const uint8_t* next) const {
    const int64_t first = tile.first_block, end = tile.end_block;
    const int64_t all_inputs = matrix_.layout.inputs, inputs = std::min(all_inputs - from, piece_inputs_);
    const int64_t share = panel_bytes_ * inputs / all_inputs / (end - first);
    const uint8_t* const numbers = widens_halves_ || widens_steps_ ? widened(panel) : numbers_of(panel, from);
    for (int64_t block = first; block < end; ++block) {
        PanelProduct work = block_product(tile, panel, block, from, inputs);
        work.panel = widens_steps_ ? numbers : numbers_of(panel, 0);
        work.numbers = numbers;
        work.ahead = next + (block - first) * share;
        work.ahead_bytes = end > first + 1 ? share : 0;
        multiply_panel_(work);
    }
}

// Its vectors do not lie across two lines of the cache.
const uint8_t* Product::widened(int64_t panel) const {
    thread_local std::vector<uint8_t> spare;
    const Layout& layout = matrix_.layout;
    const auto size = static_cast<size_t>(layout.widened().panel_bytes());
    size_t room = size + LINE;
    void* made = reserved(spare, static_cast<int64_t>(room));
    auto* const out = static_cast<uint8_t*>(std::align(LINE, size, made, room));
    if (widens_halves_)
        matrix_.kernels->widen(numbers_of(panel, 0), layout.scales_at(), reinterpret_cast<int32_t*>(out));
    else
        matrix_.kernels->widen_steps(layout, numbers_of(panel, 0), out);
    return out;
}

// Of a block of rows, without the panel.
PanelProduct Product::block_product(const Tile& tile, int64_t panel, int64_t block, int64_t from, int64_t inputs) const {
    const int64_t row = block * blocks_.each, column = panel * PANEL, size = blocks_.size(block);
    const bool is_last = from + inputs == matrix_.layout.inputs, is_whole = matrix_.layout.is_whole();
    PanelProduct work{};
    work.layout = &multiplied_;
    const auto* const rows = reads_x_ ? reinterpret_cast<const uint8_t*>(x_) + row * row_bytes_ : laid_out(row);
    work.x = rows + from * input_bytes_ * (by_tiles_ ? 1 : size);
    work.x_scales = is_whole ? memory_->scales.data() + row : nullptr;
    work.x_starts = is_whole ? memory_->starts.data() + row * row_groups_ : nullptr;
    work.x_sums = multiplied_.has_zeros() ? memory_->sums.data() + row * row_groups_ : nullptr;
    work.rows = size;
    work.inputs = inputs;
    work.goes_on = from > 0;
    work.bias = is_last && matrix_.bias != nullptr ? matrix_.bias + column : nullptr;
    work.out = tile.out + (block - tile.first_block) * blocks_.each * tile.stride + (panel - tile.first_panel) * PANEL;
    work.stride = tile.stride;
    work.columns = std::min(PANEL, matrix_.layout.outputs - column);
    if (!by_tiles_) return work;
    work.x_stride = row_bytes_;
    work.step_bytes = multiplied_.tile_inputs() * input_bytes_;
    work.lines = is_whole ? multiplied_.padded_inputs() / 4 : (inputs + 1) / 2;
    return work;
}

void multiply(const Matrix& matrix, const float* x, int64_t rows, float* out, int threads) {
    static thread_local RowMemory memory;
    const Product product(matrix, x, rows, out, threads, memory);
    const Phase phases[] = {phase_of<&Product::lay_out>(product.num_laid_out(), product),
                            phase_of<&Product::multiply>(product.num_tasks(), product)};
    run_phases(threads, phases, 2);
}

}  // namespace baton
