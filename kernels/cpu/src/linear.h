// Rows times a matrix in panels.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels.h"

namespace baton {

// A matrix and what multiplies with it.
struct Matrix {
    const Kernels* kernels;
    const Dots* dots;  // or null; with them rows are rounded to bfloat16 where the panels are of it
    Layout layout;
    const uint8_t* panels;
    const float* bias;  // (outputs,) or null
};

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

    int64_t num_tasks() const { return panel_tasks_ * ((blocks_.count + task_blocks_ - 1) / task_blocks_); }
    void multiply(int64_t task) const;

  private:
    template <class WriteRow>
    const uint32_t* side_by_side(int64_t block, WriteRow write_row) const;
    void lay_out_bytes(int64_t block) const;

    void share_out();
    int64_t first_panel_of(int64_t task) const { return task % panel_tasks_ * task_panels_; }
    const uint8_t* numbers_of(int64_t panel, int64_t from) const;
    const uint8_t* widened(int64_t panel) const;
    void multiply_piece(int64_t task, int64_t panel, int64_t from, const uint8_t* next) const;
    PanelProduct block_product(int64_t panel, int64_t block, int64_t from, int64_t inputs) const;

    Matrix matrix_;
    Blocks blocks_;
    bool by_dots_, widens_halves_, widens_steps_, reads_x_;
    Layout multiplied_;  // what panels are as they are multiplied
    Multiply multiply_panel_;
    int64_t row_bytes_, input_bytes_;
    int64_t row_group_, row_groups_;  // inputs that are added up together, and how often; with numbers of few bits
    int64_t panel_bytes_;
    int64_t task_panels_, panel_tasks_, task_blocks_;
    int64_t piece_inputs_;
    const float* x_;
    float* out_;
    int threads_;
    RowMemory* memory_;
};

// The product at once.
void multiply(const Matrix& matrix, const float* x, int64_t rows, float* out, int threads);

}  // namespace baton
