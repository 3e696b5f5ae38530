// One element of a batch in double, for a fit that float cannot do: the same kernels run on it, as on a batch of one.
#pragma once

#include "head.h"

namespace INTENTION_ARCH {

// Below the first a factor in double leaves errors of 1e-10; up to the second one refinement step is tried.
constexpr double WIDE_EASY = 1e6, WIDE_HARD = 1e12;

template <class T>
Tensor tensor_in_double(Int m, Int n, In<T> x, Arena& arena) {
    double* to = arena.take<double>(m * n);
    for (Int i = 0; i < m; ++i)
        for (Int j = 0; j < n; ++j) to[i * n + j] = double(x.p[i * x.rs + j]);
    return {to, 0, 0, n};
}

inline PerElement one_number(double x, Arena& arena) {
    double* to = arena.take<double>(1);
    *to = x;
    return {to, 0};
}

// The element's inputs and limits. Where its results go is left to the caller.
template <class T>
RidgeArguments in_double(const RidgeArguments& a, Int b, Arena& arena) {
    const Head<T> head = head_of<T>(a, b, arena);
    RidgeArguments wide = a;
    wide.is_double = 1, wide.batch = wide.inner = wide.times = 1;
    wide.easy = WIDE_EASY, wide.hard = WIDE_HARD;
    wide.query = tensor_in_double(a.queries, a.features, head.query, arena);
    wide.key = tensor_in_double(a.points, a.features, head.key, arena);
    if (a.value.data) wide.value = tensor_in_double(a.points, a.columns, head.value, arena);
    if (head.weight) wide.weight = {tensor_in_double<T>(1, a.points, {head.weight, 0, 1}, arena).data, 0};
    wide.keep = {nullptr, 0};  // keys and values are filled
    wide.alpha = one_number(double(head.alpha), arena);
    if (a.gain.data) wide.gain = one_number(double(head.gain), arena);
    return wide;
}

// double -> T, where it is wanted
template <class T>
void narrow(Int count, const double* from, T* to) {
    for (Int i = 0; to && i < count; ++i) to[i] = T(from[i]);
}

}  // namespace INTENTION_ARCH
