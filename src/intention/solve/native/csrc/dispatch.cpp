// What Python calls: chooses the instruction set when loaded, and splits large batches between threads.
#include <algorithm>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#ifdef INTENTION_X86
#include <cpuid.h>
#endif

#include "kernels.h"
#include "threads.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

using std::int64_t;

template <class Arguments>
using Kernel = int (*)(const Arguments&, int64_t, int64_t);

struct Kernels {
    const char* name;
    Kernel<RidgeArguments> ridge_forward, ridge_backward, transform_forward, transform_backward, sigma_forward,
        sigma_backward;
    Kernel<CausalArguments> causal_forward, causal_backward;
};

#define KERNELS_OF(ARCH)                                                                                  \
    {#ARCH, ARCH::ridge_forward, ARCH::ridge_backward, ARCH::transform_forward, ARCH::transform_backward, \
     ARCH::sigma_forward, ARCH::sigma_backward, ARCH::causal_forward, ARCH::causal_backward}

#ifdef INTENTION_X86
struct Processor {
    bool avx2, avx512;
};

// Not by __builtin_cpu_supports: the table that it reads cannot be linked into a shared library by every compiler.
Processor processor() {
    constexpr unsigned YMM = 0x06, ZMM = 0xe6;  // registers that the operating system keeps
    constexpr unsigned AVX512 = bit_AVX512F | bit_AVX512DQ | bit_AVX512VL | bit_AVX512BW;
    unsigned a, b, c, d, kept, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_FMA)) return {false, false};
    asm volatile("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return {false, false};
    return {(kept & YMM) == YMM, (kept & ZMM) == ZMM && (b & AVX512) == AVX512};
}
#endif

Kernels choose() {
#ifdef INTENTION_X86
    const Processor found = processor();
    if (found.avx512) return KERNELS_OF(avx512);
    if (found.avx2) return KERNELS_OF(avx2);
#endif
    return KERNELS_OF(baseline);
}

const Kernels kernels = choose();
[[maybe_unused]] const bool watched = pthread_atfork(nullptr, nullptr, begin_anew) == 0;

constexpr double WORTH_A_THREAD = 1e6;  // multiplications: well above what waking a thread takes
constexpr int64_t PARTS = 4;            // of a thread's share: so much is left to the others if it comes late
constexpr int64_t LANES = 16;           // small elements are computed so many at once

int64_t size_of_sigma(const RidgeArguments& a) { return a.dual ? a.points : a.features; }
int64_t size_of_sigma(const CausalArguments& a) { return a.features; }

// Returns the worst status.
template <class Arguments>
int share(Kernel<Arguments> kernel, const Arguments& a, double work_per_element) {
    const double worth = double(a.batch) * work_per_element / WORTH_A_THREAD;
    int64_t threads = std::min(a.threads, a.batch);
    if (double(threads) > worth) threads = int64_t(worth);
    if (threads <= 1) return kernel(a, 0, a.batch);
    const auto divided = [&](int64_t by) { return (a.batch + by - 1) / by; };
    int64_t step = divided(PARTS * threads);
    if (size_of_sigma(a) <= LANES) step = std::min((step + LANES - 1) / LANES * LANES, divided(threads));
    std::vector<int> status(std::size_t(divided(step)), 0);
    in_parallel(threads, divided(step), [&](int64_t i) {
        status[std::size_t(i)] = kernel(a, step * i, std::min(step * (i + 1), a.batch));
    });
    return *std::max_element(status.begin(), status.end());
}

// Fresh memory is given page by page as it is written, 1 to 2 us for 4 KiB: as long as the arithmetic. Asks for 2 MiB.
void in_large_pages(void* memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr std::uintptr_t PAGE = 4096;
    if (!memory || bytes < (int64_t(4) << 20)) return;
    const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(memory), first = (at + PAGE - 1) / PAGE * PAGE;
    madvise(reinterpret_cast<void*>(first), (at + std::uintptr_t(bytes) - first) / PAGE * PAGE, MADV_HUGEPAGE);  // a wish
#else
    (void)memory, (void)bytes;
#endif
}

double forward_work(const RidgeArguments& a) {
    const double n = double(a.dual ? a.points : a.features), k = double(a.columns);
    const double rows = double(a.points + a.queries), d = double(a.features);
    return double(a.points) * d * n / 2 + rows * d * k + n * n * (n / 2 + k);
}

double backward_work(const RidgeArguments& a) {
    const double n = double(a.dual ? a.points : a.features), k = double(a.columns);
    return double(2 * a.points + 2 * a.queries) * double(a.features) * k + n * n * k;
}

double sigma_work(const RidgeArguments& a) {
    const double n = double(a.points), m = double(a.queries), d = double(a.features), size = double(size_of_sigma(a));
    return n * d * size / 2 + (m + size / 2) * size * size + m * n * (d + double(a.columns));
}

double causal_work(const CausalArguments& a) {
    const double d = double(a.features), k = double(a.columns);
    return double(a.tokens) * d * (3 * d + 4 * k);
}

}  // namespace

EXPORTED int intention_native_abi(void) { return 6; }
EXPORTED const char* intention_native_arch(void) { return kernels.name; }
EXPORTED void intention_native_forked(void) { begin_anew(); }  // where the fork was before this library was loaded

EXPORTED int intention_ridge_forward(const RidgeArguments* a) {
    const int64_t size = (a->is_double ? 8 : 4) * a->batch, n = a->dual ? a->points : a->features;
    in_large_pages(a->forward.out, size * a->queries * a->columns);
    in_large_pages(a->coef, size * n * a->columns);
    in_large_pages(a->matrix, size * n * n);
    return share(kernels.ridge_forward, *a, forward_work(*a));
}
void gradients_in_large_pages(const RidgeArguments& a) {
    const int64_t size = (a.is_double ? 8 : 4) * a.batch;
    in_large_pages(a.backward.query, size * a.queries * a.features);
    in_large_pages(a.backward.key, size * a.points * a.features);
    in_large_pages(a.backward.value, size * a.points * a.columns);
}

EXPORTED int intention_ridge_backward(const RidgeArguments* a) {
    gradients_in_large_pages(*a);
    return share(kernels.ridge_backward, *a, backward_work(*a));
}
EXPORTED int intention_transform_forward(const RidgeArguments* a) {
    const int64_t size = (a->is_double ? 8 : 4) * a->batch * a->features;
    in_large_pages(a->forward.out, size * a->queries);
    in_large_pages(a->matrix, size * a->features);
    return share(kernels.transform_forward, *a, forward_work(*a) + double(a->queries * a->features * a->features));
}
EXPORTED int intention_transform_backward(const RidgeArguments* a) {
    gradients_in_large_pages(*a);
    return share(kernels.transform_backward, *a, double((2 * a->queries + a->points) * a->features * a->features));
}
EXPORTED int intention_sigma_forward(const RidgeArguments* a) {
    in_large_pages(a->forward.out, (a->is_double ? 8 : 4) * a->batch * a->queries * a->columns);
    return share(kernels.sigma_forward, *a, sigma_work(*a));
}
EXPORTED int intention_sigma_backward(const RidgeArguments* a) {
    gradients_in_large_pages(*a);
    return share(kernels.sigma_backward, *a, 3 * sigma_work(*a));
}
EXPORTED int intention_causal_forward(const CausalArguments* a) {
    return share(kernels.causal_forward, *a, causal_work(*a));
}
EXPORTED int intention_causal_backward(const CausalArguments* a) {
    return share(kernels.causal_backward, *a, 3 * causal_work(*a));
}
