// Threads that share out numbered tasks.
#pragma once
#include <cstdint>

namespace baton {

using Task = void (*)(void* context, int64_t number);

// Calls task(context, 0..count) on the calling thread and on at most `threads - 1` others; returns when all are done. Tasks are
// taken one by one, so a thread that wakes late or loses its processor holds up one task and no more. While another call has the
// threads, the caller computes alone.
void run_tasks(int threads, int64_t count, Task task, void* context);

template <class Body>
void run(int threads, int64_t count, Body& body) {
    run_tasks(threads, count, [](void* context, int64_t number) { (*static_cast<Body*>(context))(number); }, &body);
}

// Calls body(0..rows), several rows as one task: a thread is not woken for what is done before it is awake. `numbers` are those of
// a row, by what is done with each.
template <class Body>
void run_rows(int threads, int64_t rows, int64_t numbers, Body& body) {
    constexpr int64_t LEAST_NUMBERS = 32 << 10;
    const int64_t together = numbers < LEAST_NUMBERS ? LEAST_NUMBERS / (numbers > 0 ? numbers : 1) : 1;
    auto task = [&](int64_t number) {
        const int64_t end = (number + 1) * together < rows ? (number + 1) * together : rows;
        for (int64_t row = number * together; row < end; ++row) body(row);
    };
    run(threads, (rows + together - 1) / together, task);
}

}  // namespace baton
