// What a layer does between its products, a row at a time. To be included behind vectors.
//
// A row's result has the same bits whatever other rows come with it.
#pragma once
#include <cmath>

#include "attention_head.h"
#include "kernels.h"
#include "tiles.h"

namespace {

// 1 over the root of the mean of the squares, `eps` added to the mean.
inline float inverse_rms(const float* x, int64_t size, float eps) {
    Floats sums[4] = {none(), none(), none(), none()};
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int64_t j = 0; j < 4; ++j) {
            const Floats here = load(x + i + j * LANES);
            sums[j] = fma(here, here, sums[j]);
        }
    for (; i < size; i += LANES) {
        const Floats here = load_columns(x, i, size);
        sums[0] = fma(here, here, sums[0]);
    }
    float each[LANES], sum = 0;
    store(each, plus(plus(sums[0], sums[1]), plus(sums[2], sums[3])));
    for (float one : each) sum += one;
    return 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
}

void norm_row(const baton::RowNorm& work) {
    const float* x = work.x;
    if (work.added != nullptr) {
        for (int64_t i = 0; i < work.size; i += LANES)
            store_columns(work.total, i, work.size, plus(load_columns(work.added, i, work.size), load_columns(x, i, work.size)));
        keep_in_memory(work.total);
        x = work.total;
    }
    const Floats factor = all(inverse_rms(x, work.size, work.eps));
    for (int64_t i = 0; i < work.size; i += LANES) {
        const Floats normed = times(load_columns(x, i, work.size), factor);
        store_columns(work.out, i, work.size, times(normed, load_columns(work.weight, i, work.size)));
    }
}

// 1 / (1 + e^-x), by the exponential of what is not above 0.
inline Floats sigmoid(Floats x) {
    const Floats small = exp_of(less(none(), magnitude(x)));
    const Floats above = zero_below(all(1.0f), x, none());
    const Floats below = less(small, zero_below(small, x, none()));
    return over(plus(above, below), plus(all(1.0f), small));
}

inline Floats silu(Floats x) { return times(x, sigmoid(x)); }

// x / 2 (1 + tanh(y)) of y = sqrt(2 / pi) (x + 0.044715 x^3), which is x times the sigmoid of 2 y.
inline Floats gelu_tanh(Floats x) {
    const Floats cube = times(times(x, x), x);
    return times(x, sigmoid(times(all(1.5957691216f), fma(all(0.044715f), cube, x))));
}

template <Floats (*activation)(Floats)>
void gate_rows(const baton::RowGates& work) {
    const float *gates = work.gates, *ups = work.ups;
    float* out = work.out;
    for (int64_t row = 0; row < work.rows; ++row, gates += work.stride, ups += work.stride, out += work.out_stride)
        for (int64_t i = 0; i < work.size; i += LANES)
            store_columns(out, i, work.size, times(activation(load_columns(gates, i, work.size)), load_columns(ups, i, work.size)));
}

// A head's halves are rotated against each other.
void turn_head(const baton::HeadTurn& work) {
    const int64_t half = work.size / 2;
    const Floats factor = all(work.weight == nullptr ? 1.0f : inverse_rms(work.x, work.size, work.eps));
    for (int64_t i = 0; i < half; i += LANES) {
        Floats first = load_columns(work.x, i, half), second = load_columns(work.x + half, i, half);
        if (work.weight != nullptr) {
            first = times(times(first, factor), load_columns(work.weight, i, half));
            second = times(times(second, factor), load_columns(work.weight + half, i, half));
        }
        const Floats to_first = minus_product(times(first, load_columns(work.cos, i, half)), second, load_columns(work.sin, i, half));
        const Floats to_second = fma(first, load_columns(work.sin + half, i, half), times(second, load_columns(work.cos + half, i, half)));
        store_columns(work.out, i, half, to_first);
        store_columns(work.out + half, i, half, to_second);
    }
}

}  // namespace
