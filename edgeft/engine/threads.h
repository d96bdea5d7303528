// Threads that share pieces of work. Any thread takes the next piece, so that one that is held up by another program
// delays the others by a piece at most. What a piece computes never depends on who computes it.

#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <sched.h>
#endif

class Threads {
  public:
    // work(piece, thread) for every piece in [0, pieces), on at most `count` threads, this one among them
    template <typename F>
    void share(long pieces, int count, const F &work) {
        count = std::min(count, MOST);
        if (count < 2 || pieces < 2) {
            for (long piece = 0; piece < pieces; piece++) work(piece, 0);
            return;
        }
        std::lock_guard<std::mutex> only(caller);
        grow(std::min<long>(count, pieces) - 1);
        const uint64_t job = (ticket.load() >> 32) + 1;
        ticket.store((job - 1) << 32 | NO_PIECE);  // whoever has read the last job's ticket cannot take a piece with it
        call.store(+[](const void *f, long piece, int thread) { (*(const F *)f)(piece, thread); });
        context.store(&work);
        total.store(pieces);
        limit.store(count - 1);
        done.store(0);
        ticket.store(job << 32);
        if (asleep.load()) {
            std::lock_guard<std::mutex> lock(mutex);
            wake.notify_all();
        }
        run(job, 0);
        wait([&] { return done.load() == pieces; }, finished, waiting, 0);
    }

  private:
    typedef void (*Call)(const void *, long, int);
    static constexpr uint64_t NO_PIECE = 0xffffffff;
    // A waiting thread spins, then it sleeps: waking takes 5 to 50 µs, and several ms where another program has its core.
    static constexpr auto SPIN = std::chrono::microseconds(4000);
    static constexpr int MOST = 256;
    std::mutex caller, mutex;
    std::condition_variable wake, finished;
    std::atomic<uint64_t> ticket{0};  // number of the job, and its next piece
    std::atomic<Call> call{nullptr};
    std::atomic<const void *> context{nullptr};
    std::atomic<long> total{0}, done{0};
    std::atomic<int> asleep{0}, waiting{0}, limit{0};
    std::atomic<int> core[MOST] = {};  // the number of the one that a thread runs on, and 1; 0: none, or not known
    int started = 0;

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb" ::: "memory");
#endif
    }

    static int this_core() {
#if defined(__linux__)
        return sched_getcpu() + 1;
#else
        return 0;
#endif
    }

    // whether another thread of these has work on this core, or waits for some: spinning would keep it from that
    bool crowded(int thread) {
        const int here = this_core();
        core[thread].store(here);
        for (int other = 0; other <= limit.load(); other++)
            if (other != thread && core[other].load() == here && here) return true;
        return false;
    }

    template <typename C>
    void wait(const C &ready, std::condition_variable &sign, std::atomic<int> &sleepers, int thread) {
        const auto begin = std::chrono::steady_clock::now();
        do
            for (int i = 0; i < 50; i++) {
                if (ready()) return;
                pause();
            }
        while (!crowded(thread) && std::chrono::steady_clock::now() - begin < SPIN);
        core[thread].store(0);
        std::unique_lock<std::mutex> lock(mutex);
        sleepers.fetch_add(1);
        sign.wait(lock, ready);
        sleepers.fetch_sub(1);
    }

    // takes pieces of this job until there are none
    void run(uint64_t job, int thread) {
        uint64_t seen = ticket.load();
        core[thread].store(this_core());
        while (seen >> 32 == job) {
            const Call function = call.load();
            const void *given = context.load();
            const long pieces = total.load(), piece = seen & NO_PIECE;
            if (piece >= pieces) return;
            if (!ticket.compare_exchange_weak(seen, seen + 1)) continue;  // else none of these has changed since
            function(given, piece, thread);
            if (done.fetch_add(1) + 1 == pieces && waiting.load()) {
                std::lock_guard<std::mutex> lock(mutex);
                finished.notify_all();
            }
            seen = ticket.load();
        }
    }

    void grow(int workers) {
        for (; started < workers; started++) std::thread(&Threads::work, this, started + 1).detach();
    }

    void work(int thread) {
        for (uint64_t last = 0;;) {
            wait([&] { return ticket.load() >> 32 != last; }, wake, asleep, thread);
            last = ticket.load() >> 32;
            if (thread <= limit.load()) run(last, thread);
        }
    }
};

static Threads &threads_of_process() {
    static Threads *threads = new Threads;  // never destroyed: workers wait in it until the process ends
    return *threads;
}

template <typename F>
static void share(long pieces, int threads, const F &work) {
    threads_of_process().share(pieces, threads, work);
}

// work(start, stop) for [0, count) in pieces of `step`
template <typename F>
static void share_range(long count, long step, int threads, const F &work) {
    share((count + step - 1) / step, threads, [&](long piece, int) { work(piece * step, std::min((piece + 1) * step, count)); });
}

// work(row) for every row, some 16,000 numbers at a time
template <typename F>
static void share_rows(long rows, long width, int threads, const F &work) {
    share_range(rows, std::max<long>(1, (1 << 14) / std::max<long>(1, width)), threads, [&](long start, long stop) {
        for (long row = start; row < stop; row++) work(row);
    });
}

// work(start) for the start of every group of [0, count), 64 groups at a time
template <typename F>
static void share_groups(long count, long group, int threads, const F &work) {
    share_range(count, 64 * group, threads, [&](long start, long stop) {
        for (long at = start; at < stop; at += group) work(at);
    });
}
