// The gated block of a layer: a product of rows with a matrix of gates and ups, activation(gate) * up, and another product.
#pragma once
#include <vector>

#include "linear.h"
#include "thread_pool.h"

namespace baton {

// Of a matrix of as many gates as ups. Each task multiplies with panels of gates and with those of their ups, and gates them while
// its sums are in the first cache: neither is ever written elsewhere. The results have the bits of a product and a gate behind it.
class GatedProduct {
  public:
    // x (rows, K) -> out (rows, outputs / 2). `gate`: 0 silu, 1 gelu, by the kernels `of_gate`. `next`: the product with what is
    // made, for which it is laid out at once, and `out` not written, where that can be. It has a `memory` of its own.
    GatedProduct(const Matrix& matrix, int64_t gate, const Kernels& of_gate, const float* x, int64_t rows, float* out,
                 const Product& next, int threads, RowMemory& memory);

    const Product& product() const { return product_; }
    bool lays_out() const { return lays_out_; }
    int64_t num_tasks() const { return product_.num_tasks_of(shares_); }
    void multiply(int64_t task) const;

  private:
    int64_t first_panel_of(int64_t task) const { return task % shares_.tasks * shares_.panels; }

    Product product_;
    int64_t size_, panels_;  // gates, and panels that they begin with
    Shares shares_;
    void (*gate_rows_)(const RowGates&);
    float* out_;
    const Product& next_;
    bool lays_out_;
    int threads_;
};

// Rows of a block that are computed at once, as many as a task takes: what lies between its products stays in a cache.
inline int64_t piece_rows(const Matrix& gate_up, int64_t rows) { return goes_by_tiles(gate_up, rows) ? AMX_TASK_ROWS : TASK_ROWS; }

struct FeedForward {
    Matrix gate_up;
    int64_t gate;
    const Kernels* of_gate;
    Matrix down;
};

// Blocks one after the other may share it.
struct FeedForwardMemory {
    std::vector<float> inner;
    RowMemory rows, inner_rows;
};

// The block for some rows. `memory` gets room: it may have moved until all that share it are made. It does not move itself.
class FeedForwardTasks {
  public:
    FeedForwardTasks(const FeedForward& work, const float* x, int64_t rows, float* out, int threads, FeedForwardMemory& memory);
    FeedForwardTasks(const FeedForwardTasks&) = delete;

    // Whose rows are to be laid out before these phases.
    const Product& first() const { return gated_.product(); }
    void add_phases(std::vector<Phase>& phases) const;

  private:
    Product down_;
    GatedProduct gated_;
};

// x (rows, K) -> out (rows, outputs of `down`)
void feed_forward(const FeedForward& work, const float* x, int64_t rows, float* out, int threads);

}  // namespace baton
