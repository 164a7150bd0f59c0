#include "thread_pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace baton {
namespace {

// How long a thread looks for news before it sleeps: as long as what a model does between two products. A thread that spins for
// longer takes a busy machine's processors from those that compute.
constexpr auto PATIENCE = std::chrono::microseconds(50);

// A look at memory, and then nothing for some tens of cycles: a core's other thread has them.
inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    asm volatile("isb" : : : "memory");
#endif
}

template <class Done>
bool spun(Done done) {
    if (done()) return true;
    const auto end = std::chrono::steady_clock::now() + PATIENCE;
    do {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// How many of a phase's tasks are taken, and how many are done.
struct Progress {
    alignas(64) std::atomic<int64_t> taken{0};
    std::atomic<int64_t> done{0};
};

class Job {
  public:
    Job(const Phase* phases, int64_t count) : phases_(phases), progress_(static_cast<size_t>(count)) {}

    void work() {
        for (size_t i = 0; i < progress_.size(); ++i) {
            const Phase& phase = phases_[i];
            Progress& progress = progress_[i];
            for (int64_t number; (number = progress.taken.fetch_add(1, std::memory_order_relaxed)) < phase.count;) {
                phase.task(phase.context, number);
                if (progress.done.fetch_add(1) + 1 == phase.count) wake();
            }
            // Who has the last phase's tasks is waited for by the pool.
            if (i + 1 < progress_.size()) wait([&] { return progress.done.load() == phase.count; });
        }
    }

  private:
    // A phase is short: what is waited for longer has no processor. A thread that sleeps may give it its own, and is owed it back.
    template <class Done>
    void wait(Done done) {
        if (spun(done)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        over_.wait(lock, done);
        sleepers_.fetch_sub(1);
    }

    void wake() {
        if (sleepers_.load() == 0) return;
        std::lock_guard<std::mutex> lock(mutex_);
        over_.notify_all();
    }

    const Phase* phases_;
    std::vector<Progress> progress_;
    std::mutex mutex_;
    std::condition_variable over_;
    std::atomic<int> sleepers_{0};
};

class Pool {
  public:
    bool try_run(int threads, Job& job) {
        std::unique_lock<std::mutex> owner(busy_, std::try_to_lock);
        if (!owner.owns_lock()) return false;
        grow(threads - 1);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = &job;
            places_ = threads - 1;
            epoch_.fetch_add(1);
        }
        news_.notify_all();
        job.work();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = nullptr;
        }
        if (!spun([&] { return active_.load() == 0; })) {
            std::unique_lock<std::mutex> lock(mutex_);
            done_.wait(lock, [&] { return active_.load() == 0; });
        }
        return true;
    }

  private:
    // Fewer threads than were asked for, where the system gives no more, compute the same.
    void grow(int wanted) {
        try {
            for (; num_workers_ < wanted; ++num_workers_) std::thread([this] { live(); }).detach();
        } catch (const std::system_error&) {
        }
    }

    void live() {
        uint64_t seen = 0;
        for (;;) {
            spun([&] { return epoch_.load() != seen; });
            Job* job;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                news_.wait(lock, [&] { return epoch_.load() != seen; });
                seen = epoch_.load();
                job = places_ > 0 ? job_ : nullptr;
                if (job == nullptr) continue;
                --places_;
                active_.fetch_add(1);
            }
            job->work();
            std::lock_guard<std::mutex> lock(mutex_);
            if (active_.fetch_sub(1) == 1) done_.notify_one();
        }
    }

    std::mutex busy_, mutex_;
    std::condition_variable news_, done_;
    std::atomic<uint64_t> epoch_{0};
    std::atomic<int> active_{0};
    Job* job_ = nullptr;
    int places_ = 0;
    int num_workers_ = 0;
};

// Never destroyed: its threads wait in it until the process ends.
Pool& the_pool() {
    static Pool& pool = *new Pool;
    return pool;
}

bool is_for_one(const Phase* phases, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        if (phases[i].count > 1) return false;
    return true;
}

}  // namespace

void run_phases(int threads, const Phase* phases, int64_t count) {
    Job job(phases, count);
    if (threads < 2 || is_for_one(phases, count) || !the_pool().try_run(threads, job)) job.work();
}

}  // namespace baton
