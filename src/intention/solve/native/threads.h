// Threads that wait for work. A thread of its own for each call would pay for its scratch memory anew every time, 100 us.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

class Team {
  public:
    using Job = std::function<void(std::int64_t)>;

    // That of this process: threads do not survive a fork, so a child has a team of its own.
    static Team& here() {
        static const bool watched = pthread_atfork(nullptr, nullptr, [] { current = nullptr; }) == 0;
        (void)watched;
        Team* found = current;
        if (!found) {
            Team* fresh = new Team;  // never deleted: its threads wait until the process ends
            if (current.compare_exchange_strong(found, fresh)) return *fresh;
            delete fresh;
        }
        return *found;
    }

    // job(0) ... job(parts - 1), the first by the caller. All by the caller while another one has the team.
    void run(std::int64_t parts, const Job& job) {
        std::unique_lock<std::mutex> mine(in_use, std::try_to_lock);
        std::int64_t shared = 1;
        if (mine) shared = begin(parts, job);
        job(0);
        for (std::int64_t i = shared; i < parts; ++i) job(i);
        if (shared == 1) return;
        std::unique_lock<std::mutex> hold(lock);
        finish.wait(hold, [this] { return left == 0; });
    }

  private:
    // How many parts have a thread, counting the caller's.
    std::int64_t begin(std::int64_t parts, const Job& job) {
        std::unique_lock<std::mutex> hold(lock);
        try {
            for (; workers < parts - 1; ++workers) std::thread(&Team::work, this, workers + 1, round).detach();
        } catch (const std::system_error&) {  // the machine gives no more threads
        }
        wanted = parts < workers + 1 ? parts : workers + 1;
        left = wanted - 1, task = &job, ++round;
        hold.unlock();
        if (wanted > 1) start.notify_all();
        return wanted;
    }

    void work(std::int64_t index, std::uint64_t seen) {
        std::unique_lock<std::mutex> hold(lock);
        for (;;) {
            start.wait(hold, [&] { return round != seen; });
            seen = round;
            if (index >= wanted) continue;
            hold.unlock();
            (*task)(index);
            hold.lock();
            if (--left == 0) finish.notify_one();
        }
    }

    static inline std::atomic<Team*> current{nullptr};
    std::mutex in_use, lock;
    std::condition_variable start, finish;
    const Job* task = nullptr;
    std::int64_t workers = 0, wanted = 0, left = 0;
    std::uint64_t round = 0;
};
