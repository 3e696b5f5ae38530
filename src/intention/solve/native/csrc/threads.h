// Who does the parts of a call: the threads that torch keeps, or where they cannot be had, some of our own that wait.
#pragma once

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

using Job = std::function<void(std::int64_t)>;

// job(0) ... job(count - 1), each by whoever comes first: one who comes late finds less, or nothing.
class Parts {
  public:
    Parts(std::int64_t count, const Job& job) : count(count), job(job) {}
    void work() {
        for (std::int64_t i; (i = next.fetch_add(1)) < count;) job(i);
    }

  private:
    const std::int64_t count;
    const Job& job;
    std::atomic<std::int64_t> next{0};
};

// Threads that wait for work. A thread of its own for each call would pay for its scratch memory anew every time, 100 us.
class Team {
  public:
    // That of this process: threads do not survive a fork, so a child has a team of its own.
    static Team& here() {
        Team* found = current;
        if (!found) {
            Team* fresh = new Team;  // never deleted: its threads wait until the process ends
            if (current.compare_exchange_strong(found, fresh)) return *fresh;
            delete fresh;
        }
        return *found;
    }
    static void forget() { current = nullptr; }

    // With the caller; all by the caller while another one has the team.
    void run(std::int64_t threads, Parts& parts) {
        std::unique_lock<std::mutex> mine(in_use, std::try_to_lock);
        const bool shared = mine && begin(threads, parts);
        parts.work();
        if (!shared) return;
        std::unique_lock<std::mutex> hold(lock);
        wanted = 1;  // those who have not come are not waited for
        finish.wait(hold, [this] { return busy == 0; });
    }

  private:
    bool begin(std::int64_t threads, Parts& parts) {
        std::unique_lock<std::mutex> hold(lock);
        try {
            for (; workers < threads - 1; ++workers) std::thread(&Team::work, this, workers + 1, round).detach();
        } catch (const std::system_error&) {  // the machine gives no more threads
        }
        if (!workers) return false;
        wanted = threads, task = &parts, ++round;
        hold.unlock();
        start.notify_all();
        return true;
    }

    void work(std::int64_t index, std::uint64_t seen) {
        std::unique_lock<std::mutex> hold(lock);
        for (;;) {
            start.wait(hold, [&] { return round != seen; });
            seen = round;
            if (index >= wanted) continue;
            ++busy;
            hold.unlock();
            task->work();
            hold.lock();
            if (--busy == 0) finish.notify_one();
        }
    }

    static inline std::atomic<Team*> current{nullptr};
    std::mutex in_use, lock;
    std::condition_variable start, finish;
    Parts* task = nullptr;
    std::int64_t workers = 0, wanted = 0, busy = 0;
    std::uint64_t round = 0;
};

// torch's OpenMP, if it is in this process. Its threads spin for a while after torch's own parallel code, where ours would
// wait for a core. The entry that compilers call is a plain C function. A forked child must not use it.
class OpenMP {
  public:
    static bool run(std::int64_t threads, Parts& parts) {
        static const Entry entry = find();
        if (!entry || forked) return false;
        entry([](void* all) { static_cast<Parts*>(all)->work(); }, &parts, unsigned(threads), 0);
        return true;
    }
    static void leave() { forked = true; }

  private:
    using Entry = void (*)(void (*)(void*), void*, unsigned, unsigned);
    static Entry find() { return reinterpret_cast<Entry>(dlsym(RTLD_DEFAULT, "GOMP_parallel")); }
    static inline std::atomic<bool> forked{false};
};

// In a child of a fork no thread of its parent is there.
inline void begin_anew() {
    Team::forget();
    OpenMP::leave();
}

inline void in_parallel(std::int64_t threads, std::int64_t count, const Job& job) {
    Parts parts(count, job);
    if (!OpenMP::run(threads, parts)) Team::here().run(threads, parts);
}
