// Rows times a matrix in panels.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels.h"

namespace baton {

// Rows of a task, where there are many: a core's second cache holds a piece of each, and the panel that follows. Tiles multiply as fast
// as memory gives panels only with more rows.
constexpr int64_t TASK_ROWS = 96, AMX_TASK_ROWS = 256;

// A matrix and what multiplies with it.
struct Matrix {
    const Kernels* kernels;
    const Dots* dots;  // or null; with them rows are rounded to bfloat16 where the panels are of it
    const Amx* amx;    // or null
    Layout layout;
    const uint8_t* panels;
    const float* bias;  // (outputs,) or null
};

// Whether so many rows are multiplied by tiles.
bool goes_by_tiles(const Matrix& matrix, int64_t rows);

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

// Rows as kernels read them, block by block, inputs first. Products one after the other may share it.
struct RowMemory {
    std::vector<float> scales, sums;
    std::vector<int32_t> starts;
    std::vector<uint32_t> units;
};

// What of a product is computed at once: panels, by blocks of rows.
struct Tile {
    int64_t first_panel, end_panel;
    int64_t first_block, end_block;
    float* out;  // of the first row and the first panel's first column
    int64_t stride;
    const uint8_t* next;  // what is multiplied behind it
};

// How tasks share panels out: each has so many, and so many blocks of rows.
struct Shares {
    int64_t panels, tasks;  // of a task, and tasks for the same blocks
    int64_t blocks;
};

// One product, in two passes of tasks: each block of rows is laid out, and then panels are multiplied with them. A task of the second
// is some panels, and some blocks of rows, by pieces of their inputs. All of its blocks are multiplied with a piece of a panel before
// the next, which is fetched meanwhile.
class Product {
  public:
    // x (rows, K) -> out (rows, N). `memory` gets room for the rows: it may have moved until all products that share it are made.
    Product(const Matrix& matrix, const float* x, int64_t rows, float* out, int threads, RowMemory& memory);

    const Blocks& blocks() const { return blocks_; }

    // Of rows that are read as they are there are none.
    int64_t num_laid_out() const { return reads_x_ ? 0 : blocks_.count; }
    void lay_out(int64_t block) const;

    // Whether columns may be laid out as they are made, in place of `lay_out`, by who makes them for such blocks.
    bool takes_columns(const Blocks& blocks) const;
    // Some columns of a block, from an even one on: (its rows, columns), `stride` apart.
    void lay_out_columns(int64_t block, int64_t first, int64_t columns, const float* rows, int64_t stride) const;

    int64_t num_tasks() const { return num_tasks_of(shares_); }
    void multiply(int64_t task) const;

    // For who shares out the panels otherwise: `panels` of them, each of which is multiplied with `together - 1` others.
    Shares shares(int64_t panels, int64_t together) const;
    int64_t num_tasks_of(const Shares& shares) const { return shares.tasks * ((blocks_.count + shares.blocks - 1) / shares.blocks); }
    void multiply_tile(const Tile& tile) const;
    const uint8_t* panel_at(int64_t panel) const { return numbers_of(panel, 0); }

  private:
    template <class WriteRow>
    const uint32_t* side_by_side(int64_t block, WriteRow write_row) const;
    void lay_out_bytes(int64_t block) const;

    void set_pieces();
    uint8_t* laid_out(int64_t row) const;
    const uint8_t* numbers_of(int64_t panel, int64_t from) const;
    const uint8_t* widened(int64_t panel) const;
    void multiply_piece(const Tile& tile, int64_t panel, int64_t from, const uint8_t* next) const;
    PanelProduct block_product(const Tile& tile, int64_t panel, int64_t block, int64_t from, int64_t inputs) const;

    Matrix matrix_;
    bool by_tiles_;
    Blocks blocks_;
    bool by_dots_, widens_halves_, widens_steps_, reads_x_;
    Layout multiplied_;  // what panels are as they are multiplied
    Multiply multiply_panel_;
    int64_t row_bytes_, input_bytes_;
    int64_t row_group_, row_groups_;  // inputs that are added up together, and how often; with numbers of few bits
    int64_t panel_bytes_;
    Shares shares_;
    int64_t piece_inputs_;
    const float* x_;
    float* out_;
    int threads_;
    RowMemory* memory_;
};

template <class T>
T* reserved(std::vector<T>& memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(static_cast<size_t>(size));
    return memory.data();
}

// The product at once.
void multiply(const Matrix& matrix, const float* x, int64_t rows, float* out, int threads);

}  // namespace baton
