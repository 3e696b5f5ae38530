// What Python calls: chooses the instruction set when loaded, and splits large batches between threads.
#include <thread>
#include <vector>

#include "kernels.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

using std::int64_t;

struct Kernels {
    const char* name;
    void (*ridge_forward)(const RidgeArguments&, int64_t, int64_t);
};

Kernels choose() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
    if (avx2 && avx512) return {"avx512", avx512::ridge_forward};
    if (avx2) return {"avx2", avx2::ridge_forward};
#endif
    return {"baseline", baseline::ridge_forward};
}

const Kernels kernels = choose();

constexpr double WORTH_A_THREAD = 1e7;  // multiplications; starting and joining a thread takes as long as 1e6 of them

// Threads live for one call: a pool would not survive a fork.
template <class Arguments>
void share(void (*kernel)(const Arguments&, int64_t, int64_t), const Arguments& a, double work_per_element) {
    const double worth = double(a.batch) * work_per_element / WORTH_A_THREAD;
    int64_t threads = a.threads < a.batch ? a.threads : a.batch;
    if (double(threads) > worth) threads = int64_t(worth);
    if (threads <= 1) return kernel(a, 0, a.batch);
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; ++i)
        others.emplace_back(kernel, std::cref(a), a.batch * i / threads, a.batch * (i + 1) / threads);
    kernel(a, 0, a.batch / threads);
    for (std::thread& other : others) other.join();
}

double work(const RidgeArguments& a) {
    const double n = double(a.dual ? a.points : a.features), k = double(a.columns);
    const double rows = double(a.points + a.queries), d = double(a.features);
    return double(a.points) * d * n / 2 + rows * d * k + n * n * (n / 2 + k);
}

}  // namespace

EXPORTED int intention_native_abi(void) { return 1; }
EXPORTED const char* intention_native_arch(void) { return kernels.name; }

EXPORTED void intention_ridge_forward(const RidgeArguments* a) { share(kernels.ridge_forward, *a, work(*a)); }
