// softmax(Q Sigma^-1 K') V for a batch, Sigma = c K'K + alpha I.
#include "kernels.h"
#include "scores.h"
#include "in_double.h"

namespace INTENTION_ARCH {

// The queries of a block and what is known of their softmax so far.
template <class T>
struct Block {
    Turned<T> lanes;
    T *scores;  // (keys at once, queries of the block)
    T *largest, *total;  // per query
    T *shrink;  // what the keys before count less, since the largest score has grown

    Block(const RidgeArguments& a, Arena& arena)
        : lanes(a, arena),
          scores(arena.take<T>(Blocks<T>::QUERIES * keys_at_once(a))),
          largest(arena.take<T>(Blocks<T>::QUERIES)),
          total(arena.take<T>(Blocks<T>::QUERIES)),
          shrink(arena.take<T>(Blocks<T>::QUERIES)) {}
};

template <class T>
inline T lowest() {
    return sizeof(T) == 4 ? T(-__FLT_MAX__) : T(-__DBL_MAX__);
}

// Scores become exp(score - largest). The sums are taken block by block, as those of the product with V are.
template <class T, int C>
struct Weigh {
    static void run(Int keys, const Block<T>& block) {
        constexpr int W = WIDTH<T>;
        Vec<T> top[C], sum[C] = {};
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) top[v] = load<T>(block.largest + v * W);
        for (Int j = 0; j < keys; ++j) {
#pragma GCC unroll 4
            for (int v = 0; v < C; ++v) {
                const Vec<T> x = load<T>(block.scores + (j * C + v) * W);
                top[v] = x > top[v] ? x : top[v];
            }
        }
        for (Int j = 0; j < keys; ++j) {
#pragma GCC unroll 4
            for (int v = 0; v < C; ++v) {
                T* at = block.scores + (j * C + v) * W;
                const Vec<T> x = exponential<T>(load<T>(at) - top[v]);
                store<T>(at, x);
                sum[v] += x;
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) {
            const Vec<T> shrink = exponential<T>(load<T>(block.largest + v * W) - top[v]);
            store<T>(block.shrink + v * W, shrink);
            store<T>(block.total + v * W, load<T>(block.total + v * W) * shrink + sum[v]);
            store<T>(block.largest + v * W, top[v]);
        }
    }
};

// out (m x k) for the m queries of the block, whose scores are to be made of `lanes`; their largest scores and 1 / totals
// where a backward will want them
template <class T>
void attend(const RidgeArguments& a, Int m, const Fit<T>& f, T* out, T* kept, const Block<T>& block) {
    const Int n = a.points, k = a.columns, width = padded<T>(m), step = keys_at_once(a);
    const auto weigh = step_of<Weigh, T>(width / WIDTH<T>);
    for (Int i = 0; i < width; ++i) block.largest[i] = lowest<T>(), block.total[i] = 0;
    const In<T> scores = rows_of<const T>(block.scores, width);
    for (Int j = 0; j < n; j += step) {
        const Int keys = smaller(step, n - j);
        block.lanes.scores(a, f.key, j, keys, width, block.scores);
        weigh(keys, block);
        for (Int i = 0; i < m && j; ++i)
            for (Int c = 0; c < k && block.shrink[i] != 1; ++c) out[i * k + c] *= block.shrink[i];
        multiply<T>(m, k, keys, scores.t(), f.value.at(j, 0), rows_of(out, k), 1, j > 0);
    }
    for (Int i = 0; i < m; ++i) {
        const T share = 1 / block.total[i];
        for (Int c = 0; c < k; ++c) out[i * k + c] *= share;
        if (kept) kept[i] = block.largest[i], kept[a.queries + i] = share;
    }
}

// Rounding moves a score by eps times this: |x| |k|, or in the dual |q| |k| |G^-1|.
template <class T>
T reach(const RidgeArguments& a, const Fit<T>& f, T ratio, T longest_key, Int width, const Turned<T>& lanes) {
    if (a.dual) return longest_column(a.features, width, lanes.query) * longest_key * ratio / f.largest;
    return longest_column(a.features, width, lanes.moved) * longest_key;
}

constexpr double MOVED_SCORE = 1e-5;  // more than that is worth a higher rung of the ladder

// How far scores may be off: in float by their rounding, in double by that of X, which one refinement step removes. A
// good factor in double is as far as anybody goes.
template <class T>
bool trusted(const RidgeArguments& a, T ratio, bool refined, T size, T rounding) {
    constexpr T GOOD = 30;
    if (sizeof(T) == 8) rounding *= ratio < GOOD ? 0 : refined ? 1 : ratio;
    return rounding <= T(MOVED_SCORE) && size < T(a.step);
}

// All queries of one element. SOME_LEFT: a refinement step, or the rounding of scores, was too large. Where there are
// numbers that square to infinity, rounding is not what matters.
template <class T>
Status answer(const RidgeArguments& a, const Fit<T>& f, Int b, bool refined, T* report, const Block<T>& block,
              Arena& arena) {
    const Int m = a.queries, k = a.columns;
    const T ratio = report[1], eps = sizeof(T) == 4 ? T(__FLT_EPSILON__) : T(__DBL_EPSILON__);
    const Sigma<T> sigma = {f.key, f.head.alpha, f.head.gain, f.solve, refined};
    const Blocks<T> blocks(m);
    const T longest_key = longest_row(a.points, a.features, f.key);
    T *out = static_cast<T*>(a.forward.out) + b * m * k, *kept = of_element<T>(a.coef, b, 2 * m), size = 0, furthest = 0;
    for (Int i = 0; i < m; i += blocks.step) {
        const Int rows = blocks.rows(i), width = padded<T>(rows);
        size = larger(size, block.lanes.fill(a, sigma, rows, width, f.head.query.at(i, 0), arena));
        const T moved = eps * reach(a, f, ratio, longest_key, width, block.lanes);
        if (__builtin_isfinite(moved)) furthest = larger(furthest, moved);
        if (!trusted(a, ratio, refined, size, furthest)) return SOME_LEFT;
        attend(a, rows, f, out + i * k, kept ? kept + i : kept, block);
    }
    report[2] = larger(refined ? size : report[2], furthest);
    if (!refined) return PLAIN;
    report[0] = FLOAT64;
    return SOME_REFINED;
}

// The same in double, rounded at the end.
template <class T>
Status answer_in_double(const RidgeArguments& a, Int b, T* report, Arena& arena) {
    const Int count = a.queries * a.columns;
    RidgeArguments wide = in_double<T>(a, b, arena);
    double told[3], *out = arena.take<double>(count);
    wide.coef = wide.matrix = nullptr;  // a backward makes them again
    wide.forward.out = out, wide.forward.report = told;
    if (sigma_forward(wide, 0, 1) == SOME_LEFT) return SOME_LEFT;
    narrow(count, out, static_cast<T*>(a.forward.out) + b * count);
    report[0] = FLOAT64, report[1] = T(told[1]), report[2] = T(told[2] + double(__FLT_EPSILON__));
    return SOME_REFINED;
}

template <class T>
Status element(const RidgeArguments& a, Fit<T>& f, Int b, const Block<T>& block, Arena& arena) {
    T* report = static_cast<T*>(a.forward.report) + b * 3;
    const T ratio = screened(a, f, ratio_of(a, f, size_of(a), arena));
    const T eps = sizeof(T) == 4 ? T(__FLT_EPSILON__) : T(__DBL_EPSILON__);
    report[0] = a.dual ? DUAL : PRIMAL, report[1] = ratio, report[2] = ratio * eps;
    Status status = ratio < T(a.easy) ? answer(a, f, b, false, report, block, arena) : SOME_LEFT;
    if constexpr (sizeof(T) == 4) {
        if (status == SOME_LEFT) status = answer_in_double(a, b, report, arena);
    } else {
        if (status == SOME_LEFT && ratio < T(a.hard)) status = answer(a, f, b, true, report, block, arena);
    }
    keep_factor(a, f, b, size_of(a));
    return status;
}

template <class T>
int sigma(const RidgeArguments& a, Int from, Int to) {
    static thread_local Arena arena, near;
    near.reset();
    const Block<T> block(a, near);
    Fit<T> fits[WIDTH<T>];
    int status = PLAIN;
    for (Int b = from; b < to && status != SOME_LEFT;) {  // then the whole call goes another way
        const int count = fit_next(a, b, to, true, fits, arena);
        for (int g = 0; g < count && status != SOME_LEFT; ++g, ++b)
            status = larger<int>(status, element(a, fits[g], b, block, arena));
    }
    arena.reset();
    return status;
}

int sigma_forward(const RidgeArguments& a, Int from, Int to) {
    return a.is_double ? sigma<double>(a, from, to) : sigma<float>(a, from, to);
}

}  // namespace INTENTION_ARCH
