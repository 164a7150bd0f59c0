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

}  // namespace baton
