// One element of a batch: where it lies, its centring and its weighting.
#pragma once

#include "arena.h"
#include "arguments.h"
#include "product.h"

namespace INTENTION_ARCH {

template <class T>
struct Head {
    In<T> query, key, value;  // centred where there is an intercept
    const T* weight;          // null: all 1
    T alpha, gain;
    const T* mean_value = nullptr;  // k, where there is an intercept
    const T* share = nullptr;       // N: each point's part of the total weight
    T total = 0;
};

// Whether each point of element b is there; null: all are.
inline const unsigned char* keep_of(const RidgeArguments& a, Int b) {
    return a.keep.data ? static_cast<const unsigned char*>(a.keep.data) + b * a.keep.step : nullptr;
}

// Zeros for points that are not there.
template <class T>
In<T> filled(Int n, Int columns, In<T> rows, const unsigned char* keep, Arena& arena) {
    if (!keep) return rows;
    T* to = arena.take<T>(n * columns);
    for (Int i = 0; i < n; ++i)
        for (Int j = 0; j < columns; ++j) to[i * columns + j] = keep[i] ? rows.p[i * rows.rs + j] : T(0);
    return rows_of<const T>(to, columns);
}

template <class T>
inline In<T> matrix_of(const Tensor& x, Int index, Int inner) {
    const T* data = static_cast<const T*>(x.data) + index / inner * x.outer + index % inner * x.inner;
    return {data, x.row, 1};
}

template <class T>
inline T entry(const PerElement& x, Int index, T otherwise) {
    return x.data ? static_cast<const T*>(x.data)[index * x.step] : otherwise;
}

template <class T>
inline T* of_element(void* p, Int b, Int size) {
    return p ? static_cast<T*>(p) + b * size : nullptr;
}

template <class T>
Head<T> head_of(const RidgeArguments& a, Int b, Arena& arena) {
    Head<T> head;
    head.query = matrix_of<T>(a.query, b, a.inner);
    head.key = filled(a.points, a.features, matrix_of<T>(a.key, b / a.times, a.inner), keep_of(a, b), arena);
    head.value = filled(a.points, a.columns, matrix_of<T>(a.value, b / a.times, a.inner), keep_of(a, b), arena);
    head.weight = a.weight.data ? static_cast<const T*>(a.weight.data) + b * a.weight.step : nullptr;
    head.alpha = entry<T>(a.alpha, b, 0);
    head.gain = entry<T>(a.gain, b, 1);
    return head;
}

template <class T>
inline In<double> widened(Int m, Int n, In<T> rows, Arena& arena) {
    double* to = arena.take<double>(m * n);
    for (Int i = 0; i < m; ++i)
        for (Int j = 0; j < n; ++j) to[i * n + j] = double(rows.p[i * rows.rs + j]);
    return rows_of<const double>(to, n);
}

// The same element in double, all of it: before it is centred or weighted.
template <class T>
Head<double> widened(const RidgeArguments& a, const Head<T>& from, Arena& arena) {
    Head<double> head;
    head.query = widened(a.queries, a.features, from.query, arena);
    head.key = widened(a.points, a.features, from.key, arena);
    head.value = widened(a.points, a.columns, from.value, arena);
    head.weight = from.weight ? widened(1, a.points, rows_of(from.weight, a.points), arena).p : nullptr;
    head.alpha = double(from.alpha), head.gain = double(from.gain);
    return head;
}

template <class T>
void narrowed(Int count, const double* from, T* to) {
    for (Int i = 0; to && i < count; ++i) to[i] = T(from[i]);
}

// Whether Q K' (m x n) is a shorter way through the dual than K'P (d x k).
inline bool scores_cost_less(const RidgeArguments& a) {
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns;
    return m * n * (d + k) < (n + m) * d * k;
}

// Whether Q K~'Sigma^-1 (m x n) is a shorter way than the coefficients Sigma^-1 V~ (n x k), where nobody wants those.
inline bool weights_cost_less(const RidgeArguments& a) {
    return a.dual && !a.coef && a.queries < a.columns && scores_cost_less(a);
}

// rows - mean
template <class T>
T* subtract(Int m, Int n, In<T> rows, const T* mean, T* to) {
    for (Int i = 0; i < m; ++i)
        for (Int j = 0; j < n; ++j) to[i * n + j] = rows.p[i * rows.rs + j] - mean[j];
    return to;
}

template <class T>
In<T> copy_rows(Int m, Int n, In<T> rows, T* to) {
    for (Int i = 0; i < m; ++i) std::memcpy(to + i * n, rows.p + i * rows.rs, std::size_t(n) * sizeof(T));
    return rows_of<const T>(to, n);
}

// 0 in the columns whose counted entries are all equal: their rounding would be a direction that alpha = 0 divides by.
template <class T>
void drop_rounding(Int n, Int d, In<T> rows, const T* weight, T* centred) {
    const auto counts = [&](Int i) { return !weight || weight[i] > 0; };
    for (Int j = 0; j < d; ++j) {
        Int first = 0;
        while (first < n && !counts(first)) ++first;
        Int other = first;
        while (other < n && (!counts(other) || rows.p[other * rows.rs + j] == rows.p[first * rows.rs + j])) ++other;
        if (other < n) continue;
        for (Int i = first; i < n; ++i)
            if (counts(i)) centred[i * d + j] = 0;
    }
}

// Subtract the weighted means, twice: the second pass removes the rounding of the first mean.
template <class T>
void centre(const RidgeArguments& a, Head<T>& head, Arena& arena) {
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns;
    T *share = arena.take<T>(n), *mean_key = arena.take<T>(d), *shift = arena.take<T>(k), *mean = arena.zeros<T>(k);
    T total = T(n);
    if (head.weight) {
        total = 0;
        for (Int i = 0; i < n; ++i) total += head.weight[i];
        if (!(total > 0)) total = 1;
    }
    for (Int i = 0; i < n; ++i) share[i] = (head.weight ? head.weight[i] : T(1)) / total;
    T *query = arena.take<T>(m * d), *key = arena.take<T>(n * d), *value = arena.take<T>(n * k);
    const In<T> given = head.key;
    for (int pass = 0; pass < 2; ++pass) {
        multiply<T>(1, d, n, {share, n, 1}, head.key, rows_of(mean_key, d));
        multiply<T>(1, k, n, {share, n, 1}, head.value, rows_of(shift, k));
        head.query = rows_of<const T>(subtract(m, d, head.query, mean_key, query), d);
        head.key = rows_of<const T>(subtract(n, d, head.key, mean_key, key), d);
        head.value = rows_of<const T>(subtract(n, k, head.value, shift, value), k);
        for (Int j = 0; j < k; ++j) mean[j] += shift[j];
    }
    drop_rounding(n, d, given, head.weight, key);
    head.mean_value = mean, head.share = share, head.total = total;
}

// K~ and V~: rows times sqrt(w)
template <class T>
In<T> weighted(Int n, Int columns, In<T> rows, const T* weight, Arena& arena) {
    if (!weight) return rows;
    T* to = arena.take<T>(n * columns);
    for (Int i = 0; i < n; ++i) {
        const T by = root(weight[i]);
        for (Int j = 0; j < columns; ++j) to[i * columns + j] = by * rows.p[i * rows.rs + j];
    }
    return rows_of<const T>(to, columns);
}

}  // namespace INTENTION_ARCH
