// What Python calls: chooses the instruction set when loaded, and splits large batches between threads.
#include <algorithm>
#include <cstdlib>
#include <memory>
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
    int (*forget)(const ForgetArguments&, const ForgetPlan&, ForgetStage, int64_t, int64_t);
    int64_t lanes;  // numbers of 4 bytes in a register
};

#define KERNELS_OF(ARCH, LANES)                                                                                  \
    {#ARCH, ARCH::ridge_forward, ARCH::ridge_backward, ARCH::transform_forward, ARCH::transform_backward, \
     ARCH::sigma_forward, ARCH::sigma_backward, ARCH::causal_forward, ARCH::causal_backward, ARCH::forget, LANES}

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
    if (found.avx512) return KERNELS_OF(avx512, 16);
    if (found.avx2) return KERNELS_OF(avx2, 8);
#endif
    return KERNELS_OF(baseline, 4);
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

// ---- sequences that forget: every lane of a register has a part of a sequence ----

constexpr int64_t SHORTEST = 64;  // tokens of a part: with fewer its sums are much of the work
constexpr double SUMS_SHARE = 1.1;  // what parts cost more, because their sums are made first

int64_t lanes_of(const ForgetArguments& a) { return a.is_double ? kernels.lanes / 2 : kernels.lanes; }
int64_t groups_of(const ForgetArguments& a, const ForgetPlan& plan) {
    return (a.batch * plan.parts + lanes_of(a) - 1) / lanes_of(a);
}

// As many parts as fill lanes and threads best.
void cut(const ForgetArguments& a, ForgetPlan& plan) {
    double least = 0;
    plan.parts = 1, plan.length = a.tokens;
    for (int64_t parts = 1; parts == 1 || a.tokens / parts >= SHORTEST; ++parts) {
        const ForgetPlan one = {parts, (a.tokens + parts - 1) / parts, nullptr, nullptr, nullptr, nullptr, nullptr, 0};
        const int64_t rounds = (groups_of(a, one) + a.threads - 1) / a.threads;
        const double cost = double(rounds * one.length) * (parts > 1 ? SUMS_SHARE : 1);
        if (parts == 1 || cost < least) plan = one, least = cost;
        if (a.batch * parts >= 4 * lanes_of(a) * a.threads) break;
    }
}

void each_group(const ForgetArguments& a, const ForgetPlan& plan, ForgetStage stage) {
    const int64_t groups = groups_of(a, plan);
    if (a.threads <= 1 || groups == 1) {
        kernels.forget(a, plan, stage, 0, groups);
        return;
    }
    in_parallel(std::min(a.threads, groups), groups, [&](int64_t i) { kernels.forget(a, plan, stage, i, i + 1); });
}

// Sums of each part's tokens become those of all before it, or after it.
template <class T>
void add_up(const ForgetArguments& a, const ForgetPlan& plan, double* parts, bool later) {
    const int64_t d = a.features, k = a.columns, size = d * (d + k);
    std::vector<double> sum(static_cast<std::size_t>(size));
    for (int64_t b = 0; b < a.batch; ++b) {
        for (int64_t i = 0; i < size; ++i) {
            const double* from = i < d * d ? a.gram : a.cross;
            sum[std::size_t(i)] = later || !from ? 0 : i < d * d ? from[b * d * d + i] : from[b * d * k + i - d * d];
        }
        for (int64_t j = 0; j < plan.parts; ++j) {
            const int64_t part = later ? plan.parts - 1 - j : j;
            const int64_t first = std::min(part * plan.length, a.tokens), last = std::min(first + plan.length, a.tokens);
            double fade = 1;
            for (int64_t t = first; a.decay && t < last; ++t) fade *= double(static_cast<const T*>(a.decay)[b * a.tokens + t]);
            double* own = parts + (b * plan.parts + part) * size;
            for (int64_t i = 0; i < size; ++i) {
                const double before = sum[std::size_t(i)];
                sum[std::size_t(i)] = fade * before + own[i];
                own[i] = before;
            }
        }
        if (later && a.to_gram) std::copy(sum.begin(), sum.begin() + d * d, a.to_gram + b * d * d);
        if (later && a.to_cross) std::copy(sum.begin() + d * d, sum.end(), a.to_cross + b * d * k);
    }
}
void add_up(const ForgetArguments& a, const ForgetPlan& plan, double* parts, bool later) {
    a.is_double ? add_up<double>(a, plan, parts, later) : add_up<float>(a, plan, parts, later);
}

// The worst part of each sequence.
template <class T>
void tell(const ForgetArguments& a, const ForgetPlan& plan) {
    constexpr double EPS = sizeof(T) == 4 ? __FLT_EPSILON__ : __DBL_EPSILON__;
    for (int64_t b = 0; b < a.batch; ++b) {
        double ratio = 1, error = 0, wide = 0;
        for (const double* part = plan.reports + 3 * b * plan.parts; part < plan.reports + 3 * (b + 1) * plan.parts; part += 3)
            wide = std::max(wide, part[0]), ratio = std::max(ratio, part[1]), error = std::max(error, part[2]);
        T* to = static_cast<T*>(a.report) + 3 * b;
        to[0] = T(wide != 0 ? FLOAT64 : PRIMAL), to[1] = T(ratio), to[2] = T(error + EPS);
    }
}

}  // namespace

EXPORTED int intention_native_abi(void) { return 8; }
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

// Parts of sequences, and the sums before each.
void cut_and_sum(const ForgetArguments& a, ForgetPlan& plan, std::vector<double>& starts) {
    cut(a, plan);
    if (plan.parts == 1) return;
    starts.resize(std::size_t(a.batch * plan.parts * a.features * (a.features + a.columns)));
    plan.starts = starts.data();
    each_group(a, plan, SUMS);
    add_up(a, plan, plan.starts, false);
}

EXPORTED int intention_forget_forward(const ForgetArguments* a) {
    ForgetPlan plan = {};
    std::vector<double> starts;
    cut_and_sum(*a, plan, starts);
    std::vector<double> reports(std::size_t(3 * a->batch * plan.parts));
    plan.reports = reports.data();
    each_group(*a, plan, ANSWERS);
    a->is_double ? tell<double>(*a, plan) : tell<float>(*a, plan);
    return 0;
}

EXPORTED int intention_forget_backward(const ForgetArguments* a) {
    ForgetPlan plan = {};
    std::vector<double> starts, ends;
    cut_and_sum(*a, plan, starts);
    std::vector<double> gains(std::size_t(a->batch * plan.parts));
    plan.gains = gains.data();
    if (plan.parts == 1) {
        each_group(*a, plan, BOTH_SWEEPS);
    } else {
        constexpr int64_t REGISTER = 64, HALVES = 2;  // bytes; floats may be done in double
        plan.room_bytes = (plan.length + PIECE - 1) / PIECE * REGISTER * (1 + HALVES * kept_of_a_piece(*a));
        const std::unique_ptr<char, void (*)(void*)> room(
            static_cast<char*>(std::aligned_alloc(64, std::size_t(groups_of(*a, plan) * plan.room_bytes))), std::free);
        plan.room = room.get();
        ends.resize(starts.size());
        plan.ends = ends.data();
        each_group(*a, plan, SOLUTIONS);
        each_group(*a, plan, LATER_SUMS);
        add_up(*a, plan, plan.ends, true);
        each_group(*a, plan, SLOPES);
    }
    for (int64_t b = 0; a->to_gain && b < a->batch; ++b) {
        a->to_gain[b] = 0;
        for (int64_t j = 0; j < plan.parts; ++j) a->to_gain[b] += gains[std::size_t(b * plan.parts + j)];
    }
    return 0;
}
