// softmax(Q Sigma^-1 K') V for a batch, Sigma = c K'K + alpha I.
#include "kernels.h"
#include "scores.h"

namespace INTENTION_ARCH {

// The queries of a block and what is known of their softmax so far.
template <class T>
struct Block {
    T *moved;   // (QUERIES, d): Q Sigma^-1
    T *query;   // (d, queries of the block): its transpose
    T *scores;  // (KEYS, queries of the block)
    T *largest, *total;  // per query
    T *shrink;  // what the keys before count less, since the largest score has grown

    Block(Int d, Arena& arena)
        : moved(arena.take<T>(Blocks<T>::QUERIES * d)),
          query(arena.take<T>(Blocks<T>::QUERIES * d)),
          scores(arena.take<T>(Blocks<T>::QUERIES * KEYS)),
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

// out (m x k) for the m queries of the block; their largest scores and 1 / totals where a backward will want them
template <class T>
void attend(const RidgeArguments& a, Int m, In<T> query, const Fit<T>& f, T* out, T* kept, const Block<T>& block,
            Arena& arena) {
    const Int n = a.points, d = a.features, k = a.columns, width = padded<T>(m);
    const auto weigh = step_of<Weigh, T>(width / WIDTH<T>);
    f.solve(m, query.t(), rows_of(block.moved, d).t(), arena);
    turn_rows<T>(m, d, width, rows_of<const T>(block.moved, d), block.query);
    for (Int i = 0; i < width; ++i) block.largest[i] = lowest<T>(), block.total[i] = 0;
    const In<T> scores = rows_of<const T>(block.scores, width);
    for (Int j = 0; j < n; j += KEYS) {
        const Int keys = smaller(KEYS, n - j);
        multiply<T>(keys, width, d, f.key.at(j, 0), rows_of<const T>(block.query, width), rows_of(block.scores, width));
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

template <class T>
int sigma(const RidgeArguments& a, Int from, Int to) {
    static thread_local Arena arena, near;
    const Int m = a.queries, d = a.features, k = a.columns;
    const Blocks<T> blocks(m);
    near.reset();
    const Block<T> block(d, near);
    Fit<T> fits[WIDTH<T>];
    int status = PLAIN;
    for (Int b = from; b < to && status == PLAIN;) {
        const int count = fit_next(a, b, to, true, fits, arena);
        for (int g = 0; g < count && status == PLAIN; ++g, ++b) {
            const Fit<T>& f = fits[g];
            const T ratio = screened(a, f, ratio_of(a, f, d, arena));
            static_cast<T*>(a.forward.report)[b] = ratio;
            if (!(ratio < T(a.easy))) status = SOME_LEFT;  // the whole call goes another way
            T *out = static_cast<T*>(a.forward.out) + b * m * k, *kept = of_element<T>(a.coef, b, 2 * m);
            for (Int i = 0; i < m && status == PLAIN; i += blocks.step)
                attend(a, blocks.rows(i), f.head.query.at(i, 0), f, out + i * k, kept ? kept + i : kept, block, arena);
            keep_factor(a, f, b, d);
        }
    }
    arena.reset();
    return status;
}

int sigma_forward(const RidgeArguments& a, Int from, Int to) {
    return a.is_double ? sigma<double>(a, from, to) : sigma<float>(a, from, to);
}

}  // namespace INTENTION_ARCH
