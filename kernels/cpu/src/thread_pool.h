// Threads that share out numbered tasks, in phases.
#pragma once
#include <cstdint>

namespace baton {

using Task = void (*)(void* context, int64_t number);

// Calls of task(context, 0..count), in any order.
struct Phase {
    Task task;
    void* context;
    int64_t count;
};

// Calls all phases' tasks on the calling thread and on at most `threads - 1` others; returns when all are done. A phase begins when
// every task of the one before is done. Tasks are taken one by one, so a thread that wakes late, or loses its processor between two
// of them, holds up nobody; one that loses it in a task holds up that task and no more. While another call has the threads, the
// caller computes alone.
void run_phases(int threads, const Phase* phases, int64_t count);

template <class Body>
Phase phase_of(int64_t count, Body& body) {
    return {[](void* context, int64_t number) { (*static_cast<Body*>(context))(number); }, &body, count};
}

// The same of a method. `owner` stays where it is until the phase is over.
template <auto METHOD, class Owner>
Phase phase_of(int64_t count, const Owner& owner) {
    return {[](void* context, int64_t number) { (static_cast<const Owner*>(context)->*METHOD)(number); },
            const_cast<Owner*>(&owner), count};
}

template <class Body>
void run(int threads, int64_t count, Body& body) {
    const Phase phase = phase_of(count, body);
    run_phases(threads, &phase, 1);
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
