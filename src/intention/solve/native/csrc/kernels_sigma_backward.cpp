// First-order gradients of softmax(X K') V with X = Q Sigma^-1. With P the shares and g the gradient of the answer:
//
//     dV = P'g,  dS = P o (g V' - rows of g.out),  dX = dS K,  dK = dS'X + c K (dSigma + dSigma'),
//     dQ = dX Sigma^-1,  dSigma = -X'dQ
//
// Scores are made again, block by block, from what the forward kept of them: the largest, and 1 / the sum.
#include "kernels.h"
#include "scores.h"
#include "in_double.h"

namespace INTENTION_ARCH {

template <class T>
struct Pulled {  // of one block of queries; all but `rows` lie as scores do
    Turned<T> lanes;
    T *rows;                     // (QUERIES, d): X, where N >= d
    T *grad;                     // (k, queries): the transpose of g
    T *shares, *scores;          // (keys at once, queries): P; g V', then dS'
    T *largest, *share, *along;  // per query; g.out
    T *back, *solved;            // (d, queries): dX', then dQ'; in the dual (N, queries): dS' G^-1

    Pulled(const RidgeArguments& a, Arena& arena)
        : lanes(a, arena),
          rows(arena.take<T>(Blocks<T>::QUERIES * a.features)),
          grad(arena.take<T>(Blocks<T>::QUERIES * a.columns)),
          shares(arena.take<T>(Blocks<T>::QUERIES * keys_at_once(a))),
          scores(arena.take<T>(Blocks<T>::QUERIES * keys_at_once(a))),
          largest(arena.take<T>(Blocks<T>::QUERIES)),
          share(arena.take<T>(Blocks<T>::QUERIES)),
          along(arena.take<T>(Blocks<T>::QUERIES)),
          back(arena.take<T>(Blocks<T>::QUERIES * size_of(a))),
          solved(arena.take<T>(Blocks<T>::QUERIES * size_of(a))) {}
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
    Sigma<T> sigma;
    In<T> grad;
    const T *out, *kept;
    T *query, *key, *value;  // wanted gradients, null where they are not
    T* d_sigma;              // n x n, null where nothing sees it
};

// What lies along the lanes of a block.
template <class T>
void begin(const RidgeArguments& a, const Element<T>& e, Int i, Int m, Int width, const Pulled<T>& block, Arena& arena) {
    const Int k = a.columns;
    block.lanes.fill(a, e.sigma, m, width, e.head.query.at(i, 0), arena);
    turn_rows<T>(m, k, width, e.grad.at(i, 0), block.grad);
    for (Int r = 0; r < width; ++r) {
        block.largest[r] = block.share[r] = block.along[r] = 0;
        if (r >= m) continue;
        block.largest[r] = e.kept[i + r], block.share[r] = e.kept[a.queries + i + r];
        for (Int c = 0; c < k; ++c) block.along[r] += e.grad(i + r, c) * e.out[(i + r) * k + c];
    }
}

// P and dS' of the keys from j on, and what the values get.
template <class T>
void pull_scores(const RidgeArguments& a, const Element<T>& e, Int i, Int m, Int j, Int keys, const Pulled<T>& block) {
    const Int k = a.columns, width = padded<T>(m);
    block.lanes.scores(a, e.head.key, j, keys, width, block.shares);
    multiply<T>(keys, width, k, e.head.value.at(j, 0), rows_of<const T>(block.grad, width), rows_of(block.scores, width));
    step_of<Unweigh, T>(width / WIDTH<T>)(keys, block);
    if (e.value)
        multiply<T>(keys, k, m, rows_of<const T>(block.shares, width), e.grad.at(i, 0), rows_of(e.value + j * k, k), 1,
                    i > 0);
}

// The m queries from i on: their gradients, and their part in those of keys, values and Sigma.
template <class T>
void pull(const RidgeArguments& a, const Element<T>& e, Int i, Int m, const Pulled<T>& block, Arena& arena) {
    const Int n = a.points, d = a.features, width = padded<T>(m);
    begin(a, e, i, m, width, block, arena);
    transpose<T>(d, m, block.lanes.moved, width, block.rows, d);
    const In<T> scores = rows_of<const T>(block.scores, width), moved = rows_of<const T>(block.lanes.moved, width);
    for (Int j = 0; j < n; j += KEYS) {
        const Int keys = smaller(KEYS, n - j);
        pull_scores(a, e, i, m, j, keys, block);
        if (e.key) multiply<T>(keys, d, m, scores, rows_of<const T>(block.rows, d), rows_of(e.key + j * d, d), 1, i > 0);
        multiply<T>(d, width, keys, e.head.key.at(j, 0).t(), scores, rows_of(block.back, width), 1, j > 0);
    }
    solve_columns<T>(a, e.sigma, width, block.back, block.solved, block.lanes.refinement, arena);
    T* query = e.query ? e.query + i * d : block.rows;
    transpose<T>(d, m, block.solved, width, query, d);
    if (e.d_sigma) multiply<T>(d, d, m, moved, rows_of<const T>(query, d), rows_of(e.d_sigma, d), -1, true);
}

// The same with fewer points than features: with A = dS G^-1, dQ = A K, dK = A'Q + c (dG + dG')K, dG = -S'A.
template <class T>
void pull_dual(const RidgeArguments& a, const Element<T>& e, Int i, Int m, const Pulled<T>& block, Arena& arena) {
    const Int n = a.points, d = a.features, width = padded<T>(m);
    begin(a, e, i, m, width, block, arena);
    pull_scores(a, e, i, m, 0, n, block);
    solve_columns<T>(a, e.sigma, width, block.scores, block.solved, block.lanes.refinement, arena);
    const In<T> turned = rows_of<const T>(block.solved, width), moved = rows_of<const T>(block.lanes.moved, width);  // A', S'
    if (e.query) multiply<T>(m, d, n, turned.t(), e.head.key, rows_of(e.query + i * d, d));
    if (e.key) multiply<T>(n, d, m, turned, e.head.query.at(i, 0), rows_of(e.key, d), 1, i > 0);
    if (e.d_sigma) multiply<T>(n, n, m, moved, turned.t(), rows_of(e.d_sigma, n), -1, true);
}

// dSigma reaches keys, alpha and c.
template <class T>
void through_sigma(const RidgeArguments& a, const Element<T>& e, Int b, Arena& arena) {
    const Int n = a.points, d = a.features, size = size_of(a);
    if (T* alpha = of_element<T>(a.backward.alpha, b, 1)) {
        *alpha = 0;
        for (Int i = 0; i < size; ++i) *alpha += e.d_sigma[i * size + i];
    }
    T* gain = of_element<T>(a.backward.gain, b, 1);
    if (!e.key && !gain) return;
    plus_transpose(size, e.d_sigma, arena.take<T>(size * size));
    const In<T> both = rows_of<const T>(e.d_sigma, size), left = a.dual ? both : e.head.key, right = a.dual ? e.head.key : both;
    if (e.key) multiply<T>(n, d, size, left, right, rows_of(e.key, d), e.head.gain, true);
    if (!gain) return;
    const Mat<T> product = rows_of(arena.take<T>(n * d), d);
    multiply<T>(n, d, size, left, right, product);
    *gain = 0;
    for (Int i = 0; i < n; ++i)
        for (Int j = 0; j < d; ++j) *gain += product(i, j) * e.head.key(i, j) / 2;
}

// An element that float could not do: answer and gradients in double, rounded at the end.
template <class T>
void pull_in_double(const RidgeArguments& a, Int b, Arena& arena) {
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns, size = size_of(a);
    RidgeArguments wide = in_double<T>(a, b, arena);
    double told[3] = {};
    double *out = arena.take<double>(m * k);
    wide.coef = arena.take<double>(2 * m), wide.matrix = arena.take<double>(size * size);
    wide.forward.out = out, wide.forward.report = told;
    sigma_forward(wide, 0, 1);
    const Tensor grad = tensor_in_double(m, k, matrix_of<T>(a.backward.grad, b, a.inner), arena);
    const auto room = [&](const void* wanted, Int count) { return wanted ? arena.take<double>(count) : nullptr; };
    const auto& to = a.backward;
    double *query = room(to.query, m * d), *key = room(to.key, n * d), *value = room(to.value, n * k),
           *alpha = room(to.alpha, 1), *gain = room(to.gain, 1);
    wide.backward = {{told, 0}, out, grad, query, key, value, nullptr, alpha, nullptr, gain};
    sigma_backward(wide, 0, 1);
    narrow(m * d, query, of_element<T>(to.query, b, m * d));
    narrow(n * d, key, of_element<T>(to.key, b, n * d));
    narrow(n * k, value, of_element<T>(to.value, b, n * k));
    narrow(1, alpha, of_element<T>(to.alpha, b, 1));
    narrow(1, gain, of_element<T>(to.gain, b, 1));
}

template <class T>
int sigma_gradients(const RidgeArguments& a, Int from, Int to) {
    static thread_local Arena arena, near;
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns, size = size_of(a);
    const auto& wanted = a.backward;
    const Blocks<T> blocks(m);
    near.reset();
    const Pulled<T> block(a, near);
    for (Int b = from; b < to; ++b) {
        arena.reset();
        const T route = entry<T>(wanted.route, b, a.dual ? DUAL : PRIMAL);
        if constexpr (sizeof(T) == 4) {
            if (route == FLOAT64) {
                pull_in_double<T>(a, b, arena);
                continue;
            }
        }
        const Head<T> head = head_of<T>(a, b, arena);
        Element<T> e = {head, {head.key, head.alpha, head.gain, saved_solver<T>(a, b, size, arena), route == FLOAT64},
                        matrix_of<T>(wanted.grad, b, a.inner),
                        static_cast<const T*>(wanted.out) + b * m * k, static_cast<const T*>(a.coef) + b * 2 * m,
                        of_element<T>(wanted.query, b, m * d), of_element<T>(wanted.key, b, n * d),
                        of_element<T>(wanted.value, b, n * k), nullptr};
        if (wanted.key || wanted.alpha || wanted.gain) e.d_sigma = arena.zeros<T>(size * size);
        for (Int i = 0; i < m; i += blocks.step) {
            if (a.dual) {
                pull_dual(a, e, i, blocks.rows(i), block, arena);
            } else {
                pull(a, e, i, blocks.rows(i), block, arena);
            }
        }
        if (e.d_sigma) through_sigma(a, e, b, arena);
    }
    arena.reset();
    return PLAIN;
}

int sigma_backward(const RidgeArguments& a, Int from, Int to) {
    return a.is_double ? sigma_gradients<double>(a, from, to) : sigma_gradients<float>(a, from, to);
}

}  // namespace INTENTION_ARCH
