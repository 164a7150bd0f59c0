// Sampling a token from a row of logits. To be included behind vectors.
//
// Sums are doubles, made in one order whatever the instruction set. A row's token does not depend on other rows.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "attention_head.h"
#include "kernels.h"

namespace {

constexpr int64_t BLOCK = 1024;  // tokens whose sum is kept

// The first of the largest numbers, and the largest of each block. A NaN is no number.
int64_t first_largest(const float* x, int64_t count, std::vector<float>& of_blocks) {
    float most = NOTHING;
    int64_t place = 0;
    of_blocks.clear();
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t end = std::min(start + BLOCK, count);
        Floats found = all(NOTHING);
        int64_t i = start;
        for (; i + LANES <= end; i += LANES) found = larger(load(x + i), found);  // the second, where the first is a NaN
        float each[LANES];
        store(each, found);
        float here = NOTHING;
        for (float one : each) here = std::max(here, one);
        for (; i < end; ++i) here = std::max(here, x[i]);
        of_blocks.push_back(here);
        if (here > most) {
            most = here;
            place = std::find(x + start, x + end, here) - x;
        }
    }
    return place;
}

// Tokens whose bit is 0 become -inf.
void mask_row(float* x, const uint32_t* bits, int64_t count) {
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const uint32_t word = bits[i / 32];
        if (word == ~uint32_t{0}) continue;
        for (int lane = 0; lane < 32; lane += LANES) store(x + i + lane, with_bits(load(x + i + lane), word >> lane));
    }
    for (; i < count; ++i)
        if (!(bits[i / 32] >> (i % 32) & 1)) x[i] = NOTHING;
}

double sum_of(const float* x, int64_t count) {
    double parts[8] = {};
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int lane = 0; lane < 8; ++lane) parts[lane] += x[i + lane];
    for (int lane = 0; i < count; ++i, ++lane) parts[lane] += x[i];
    return ((parts[0] + parts[4]) + (parts[2] + parts[6])) + ((parts[1] + parts[5]) + (parts[3] + parts[7]));
}

// Weights from 0 to 1 in bins, by their leading bits: their order is that of the numbers.
class Bins {
public:
    static int of(float weight) {
        uint32_t bits;
        std::memcpy(&bits, &weight, sizeof bits);
        return static_cast<int>(bits >> 16);
    }

    Bins(const float* weights, int64_t count) : weights_(weights), count_(count) {
        for (int64_t i = 0; i < count; ++i) {
            if (weights[i] == 0) continue;
            Bin& bin = bins_[of(weights[i])];
            ++bin.number;
            bin.sum += weights[i];
        }
    }

    // The weight of the k-th likeliest token; 0 where fewer have any.
    float kth(int64_t k) const {
        int64_t above = 0;
        for (int bin = LAST; bin >= 0; --bin) {
            if (above + bins_[bin].number >= k) {
                std::vector<float> found;
                for (const auto& [weight, id] : members(bin)) found.push_back(weight);
                std::nth_element(found.begin(), found.begin() + (k - above - 1), found.end(), std::greater<float>());
                return found[k - above - 1];
            }
            above += bins_[bin].number;
        }
        return 0;
    }

    double sum_from(float least) const {
        double sum = 0;
        for (int bin = LAST; bin > of(least); --bin) sum += bins_[bin].sum;
        for (const auto& [weight, id] : members(of(least)))
            if (weight >= least) sum += weight;
        return sum;
    }

    // The smallest weight among the likeliest tokens that have `share` of the sum of those with at least `least`, the one that
    // reaches it included; `dropped`: equally likely tokens behind the last of them.
    float reaching(double share, float least, std::vector<int64_t>& dropped) const {
        const double wanted = share * sum_from(least);
        double before = 0;
        for (int bin = LAST; bin >= of(least); --bin) {
            if (bin > of(least) && before + bins_[bin].sum < wanted) {
                before += bins_[bin].sum;
                continue;
            }
            auto found = members(bin);
            std::sort(found.begin(), found.end(),
                      [](const auto& a, const auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
            float last = least;
            for (size_t i = 0; i < found.size() && found[i].first >= least; ++i) {
                if (before >= wanted) {
                    for (; i < found.size() && found[i].first == last; ++i) dropped.push_back(found[i].second);
                    return last;
                }
                last = found[i].first;
                before += last;
            }
            if (before >= wanted) return last;
        }
        return least;
    }

private:
    static constexpr int LAST = 0x3f80;  // that of 1
    struct Bin {
        int64_t number = 0;
        double sum = 0;
    };

    std::vector<std::pair<float, int64_t>> members(int bin) const {
        std::vector<std::pair<float, int64_t>> found;
        for (int64_t i = 0; i < count_; ++i)
            if (weights_[i] != 0 && of(weights_[i]) == bin) found.emplace_back(weights_[i], i);
        return found;
    }

    const float* weights_;
    int64_t count_;
    std::vector<Bin> bins_ = std::vector<Bin>(LAST + 1);
};

// Tokens that may not be sampled get the weight 0.
void cut(float* weights, const baton::RowSample& row) {
    float least = static_cast<float>(row.min_p);
    std::vector<int64_t> dropped;
    const bool has_top_k = row.top_k > 0 && row.top_k < row.count;
    if (has_top_k || row.top_p < 1) {
        const Bins bins(weights, row.count);
        float smallest = has_top_k ? bins.kth(row.top_k) : 0;
        if (row.top_p < 1) smallest = bins.reaching(row.top_p, smallest, dropped);
        least = std::max(least, smallest);
    }
    for (int64_t id : dropped) weights[id] = 0;
    int64_t i = 0;
    for (; i + LANES <= row.count; i += LANES) {
        const Floats here = load(weights + i);
        store(weights + i, zero_below(here, here, all(least)));
    }
    for (; i < row.count; ++i)
        if (weights[i] < least) weights[i] = 0;
}

// Logits become weights, 1 where they are `most` and 0 where they are a NaN: `Bins` have a place for what is from 0 to 1 alone.
void weigh(float* x, int64_t count, float most, float inverse) {
    constexpr float FAR = -88;  // the exponential of which is 0
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store(x + i, exp_of(larger(times(less(load(x + i), all(most)), all(inverse)), all(FAR))));
    for (; i < count; ++i) {
        const float away = (x[i] - most) * inverse;
        x[i] = away > FAR ? exp_of(away) : 0;
    }
}

// The first token whose cumulative weight exceeds the number's part of the sum. The logits are overwritten.
int64_t sample_row(const baton::RowSample& row) {
    static thread_local std::vector<float> largest;
    static thread_local std::vector<double> sums;
    float* x = row.logits;
    if (row.allowed != nullptr) mask_row(x, row.allowed, row.count);
    const int64_t likeliest = first_largest(x, row.count, largest);
    const float most = x[likeliest];
    if (row.temperature <= 0 || !std::isfinite(most)) return likeliest;
    const float inverse = static_cast<float>(std::min(1 / row.temperature, 1e30));
    const bool is_cut = row.top_k > 0 || row.top_p < 1 || row.min_p > 0;
    if (is_cut) {
        weigh(x, row.count, most, inverse);
        cut(x, row);
    }
    sums.clear();
    double total = 0;
    for (int64_t start = 0; start < row.count; start += BLOCK) {
        const int64_t count = std::min(BLOCK, row.count - start);
        const bool has_any = largest[start / BLOCK] > NOTHING;  // blocks without are left as they are, and looked at no more
        if (has_any && !is_cut) weigh(x + start, count, most, inverse);
        sums.push_back(has_any ? sum_of(x + start, count) : 0);
        total += sums.back();
    }
    const double wanted = row.uniform * total;
    // Sums in another order may differ by a rounding: where none exceeds what is wanted, the last token with a weight is taken.
    double before = 0, reached = 0;
    int64_t start = 0;
    for (size_t block = 0; block < sums.size(); ++block) {
        if (sums[block] == 0) continue;
        start = static_cast<int64_t>(block) * BLOCK;
        reached = before;
        before += sums[block];
        if (before > wanted) break;
    }
    int64_t last = start;
    for (int64_t id = start; id < std::min(start + BLOCK, row.count) && reached <= wanted; ++id) {
        if (x[id] == 0) continue;
        reached += x[id];
        last = id;
    }
    return last;
}

}  // namespace
