// First-order gradients of softmax(X K') V with X = Q Sigma^-1. With P the shares and g the gradient of the answer:
//
//     dV = P'g,  dS = P o (g V' - rows of g.out),  dX = dS K,  dK = dS'X + c K (dSigma + dSigma'),
//     dQ = dX Sigma^-1,  dSigma = -X'dQ
//
// Scores are made again, block by block, from what the forward kept of them: the largest, and 1 / the sum.
#include "kernels.h"
#include "scores.h"

namespace INTENTION_ARCH {

template <class T>
struct Pulled {  // of one block of queries; all but the first and the last lie as scores do
    T *moved;                    // (QUERIES, d): X
    T *query, *grad;             // (d, queries), (k, queries): transposes of X and g
    T *shares, *scores;          // (KEYS, queries): P; g V', then dS
    T *largest, *share, *along;  // per query; g.out
    T *back;                     // (QUERIES, d): dX

    Pulled(Int d, Int k, Arena& arena)
        : moved(arena.take<T>(Blocks<T>::QUERIES * d)),
          query(arena.take<T>(Blocks<T>::QUERIES * d)),
          grad(arena.take<T>(Blocks<T>::QUERIES * k)),
          shares(arena.take<T>(Blocks<T>::QUERIES * KEYS)),
          scores(arena.take<T>(Blocks<T>::QUERIES * KEYS)),
          largest(arena.take<T>(Blocks<T>::QUERIES)),
          share(arena.take<T>(Blocks<T>::QUERIES)),
          along(arena.take<T>(Blocks<T>::QUERIES)),
          back(arena.take<T>(Blocks<T>::QUERIES * d)) {}
};

template <class T, int C>
struct Unweigh {
    static void run(Int keys, const Pulled<T>& block) {
        constexpr int W = WIDTH<T>;
        for (Int j = 0; j < keys; ++j) {
#pragma GCC unroll 4
            for (int v = 0; v < C; ++v) {
                T *share = block.shares + (j * C + v) * W, *score = block.scores + (j * C + v) * W;
                const Vec<T> p =
                    exponential<T>(load<T>(share) - load<T>(block.largest + v * W)) * load<T>(block.share + v * W);
                store<T>(share, p);
                store<T>(score, p * (load<T>(score) - load<T>(block.along + v * W)));
            }
        }
    }
};

template <class T>
struct Element {
    Head<T> head;
    Solver<T> solve;
    In<T> grad;
    const T *out, *kept;
    T *query, *key, *value;  // wanted gradients, null where they are not
    T* sigma;                // d x d, null where nothing sees it
};

// What lies along the lanes of a block.
template <class T>
void begin(const RidgeArguments& a, const Element<T>& e, Int i, Int m, Int width, const Pulled<T>& block, Arena& arena) {
    const Int d = a.features, k = a.columns;
    e.solve(m, e.head.query.at(i, 0).t(), rows_of(block.moved, d).t(), arena);
    turn_rows<T>(m, d, width, rows_of<const T>(block.moved, d), block.query);
    turn_rows<T>(m, k, width, e.grad.at(i, 0), block.grad);
    for (Int r = 0; r < width; ++r) {
        block.largest[r] = block.share[r] = block.along[r] = 0;
        if (r >= m) continue;
        block.largest[r] = e.kept[i + r], block.share[r] = e.kept[a.queries + i + r];
        for (Int c = 0; c < k; ++c) block.along[r] += e.grad(i + r, c) * e.out[(i + r) * k + c];
    }
}

// The m queries from i on: their gradients, and their part in those of keys, values and Sigma.
template <class T>
void pull(const RidgeArguments& a, const Element<T>& e, Int i, Int m, const Pulled<T>& block, Arena& arena) {
    const Int n = a.points, d = a.features, k = a.columns, width = padded<T>(m);
    const auto unweigh = step_of<Unweigh, T>(width / WIDTH<T>);
    begin(a, e, i, m, width, block, arena);
    const Mat<T> shares = rows_of(block.shares, width), scores = rows_of(block.scores, width), back = rows_of(block.back, d);
    const In<T> moved = rows_of<const T>(block.moved, d);
    for (Int j = 0; j < n; j += KEYS) {
        const Int keys = smaller(KEYS, n - j);
        const In<T> key = e.head.key.at(j, 0);
        multiply<T>(keys, width, d, key, rows_of<const T>(block.query, width), shares);
        multiply<T>(keys, width, k, e.head.value.at(j, 0), rows_of<const T>(block.grad, width), scores);
        unweigh(keys, block);
        if (e.value) multiply<T>(keys, k, m, shares, e.grad.at(i, 0), rows_of(e.value + j * k, k), 1, i > 0);
        if (e.key) multiply<T>(keys, d, m, scores, moved, rows_of(e.key + j * d, d), 1, i > 0);
        multiply<T>(m, d, keys, scores.t(), key, back, 1, j > 0);
    }
    const Mat<T> query = rows_of(e.query ? e.query + i * d : arena.take<T>(m * d), d);
    e.solve(m, back.t(), query.t(), arena);
    if (e.sigma) multiply<T>(d, d, m, moved.t(), query, rows_of(e.sigma, d), -1, true);
}

// dSigma reaches keys, alpha and c.
template <class T>
void through_sigma(const RidgeArguments& a, const Element<T>& e, Int b, Arena& arena) {
    const Int n = a.points, d = a.features;
    if (T* alpha = of_element<T>(a.backward.alpha, b, 1)) {
        *alpha = 0;
        for (Int i = 0; i < d; ++i) *alpha += e.sigma[i * d + i];
    }
    plus_transpose(d, e.sigma, arena.take<T>(d * d));
    const In<T> both = rows_of<const T>(e.sigma, d);
    if (e.key) multiply<T>(n, d, d, e.head.key, both, rows_of(e.key, d), e.head.gain, true);
    if (T* gain = of_element<T>(a.backward.gain, b, 1)) {
        const Mat<T> product = rows_of(arena.take<T>(n * d), d);
        multiply<T>(n, d, d, e.head.key, both, product);
        *gain = 0;
        for (Int i = 0; i < n; ++i)
            for (Int j = 0; j < d; ++j) *gain += product(i, j) * e.head.key(i, j) / 2;
    }
}

template <class T>
int sigma_gradients(const RidgeArguments& a, Int from, Int to) {
    static thread_local Arena arena, near;
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns;
    const auto& wanted = a.backward;
    const Blocks<T> blocks(m);
    near.reset();
    const Pulled<T> block(d, k, near);
    for (Int b = from; b < to; ++b) {
        arena.reset();
        Element<T> e = {head_of<T>(a, b), saved_solver<T>(a, b, d, arena), matrix_of<T>(wanted.grad, b, a.inner),
                        static_cast<const T*>(wanted.out) + b * m * k, static_cast<const T*>(a.coef) + b * 2 * m,
                        of_element<T>(wanted.query, b, m * d), of_element<T>(wanted.key, b, n * d),
                        of_element<T>(wanted.value, b, n * k), nullptr};
        if (wanted.key || wanted.alpha || wanted.gain) e.sigma = arena.zeros<T>(d * d);
        for (Int i = 0; i < m; i += blocks.step) pull(a, e, i, blocks.rows(i), block, arena);
        if (e.sigma) through_sigma(a, e, b, arena);
    }
    arena.reset();
    return PLAIN;
}

int sigma_backward(const RidgeArguments& a, Int from, Int to) {
    return a.is_double ? sigma_gradients<double>(a, from, to) : sigma_gradients<float>(a, from, to);
}

}  // namespace INTENTION_ARCH
