// The tokens of a sequence, and how their rows are read.
#pragma once

#include "product.h"

namespace INTENTION_ARCH {
namespace {

template <class S>
struct Sequence {
    Int n, d, k;  // k = 0: no values, the answers are q_t A_t^-1
    const S *query, *key, *value, *weight;
    Int query_row, key_row, value_row;
    double alpha, gain;
};

// How many of some tokens count.
template <class S>
Int counted(const Sequence<S>& s, Int first, Int n) {
    Int found = s.weight ? 0 : n;
    for (Int i = first; s.weight && i < first + n; ++i) found += s.weight[i] != 0;
    return found;
}

// Whole chunks of `unit` tokens from `first` on, until `enough` of them count: tokens that do not cost little.
template <class S>
Int until(const Sequence<S>& s, Int first, Int unit, Int enough) {
    Int n = 0;
    for (Int found = 0; first + n < s.n && found < enough; n += unit) found += counted(s, first + n, smaller(unit, s.n - first - n));
    return smaller(n, s.n - first);
}

// Tokens in the precision of the work: keys and values times the root of their weight.
template <class T>
struct Rows {
    In<T> query, key, value;
    Rows from(Int i) const { return {query.at(i, 0), key.at(i, 0), value.at(i, 0)}; }
};

template <class T, class S>
void copy_rows(Int n, Int columns, const S* from, Int row, const S* weight, T* to, Int ldt) {
    for (Int i = 0; i < n; ++i) {
        const T scale = weight ? root(T(weight[i])) : T(1);
        for (Int j = 0; j < columns; ++j) to[i * ldt + j] = scale * T(from[i * row + j]);
    }
}

template <class T, class S>
In<T> in_place_or_copied(Int n, Int columns, const S* from, Int row, const S* weight, T* room) {
    if constexpr (sizeof(T) == sizeof(S))
        if (!weight) return rows_of<const T>(from, row);
    copy_rows<T, S>(n, columns, from, row, weight, room, columns);
    return rows_of<const T>(room, columns);
}

// a b', in double: many sums at once, which do not wait for each other.
template <class T>
double dot(const T* a, const T* b, Int n) {
    constexpr Int LANES = 32;
    double sums[LANES] = {}, sum = 0;
    Int j = 0;
    for (; j + LANES <= n; j += LANES)
        for (Int l = 0; l < LANES; ++l) sums[l] += double(a[j + l]) * double(b[j + l]);
    for (; j < n; ++j) sum += double(a[j]) * double(b[j]);
    for (Int l = 0; l < LANES; ++l) sum += sums[l];
    return sum;
}

// Asks for rows that will be read, or written, soon.
template <bool WRITTEN, class S>
inline void prefetch_rows(Int n, Int columns, const S* rows, Int row) {
    for (Int i = 0; i < n; ++i)
        for (Int j = 0; j < columns; j += 64 / Int(sizeof(S))) __builtin_prefetch(rows + i * row + j, WRITTEN);
}

}  // namespace
}  // namespace INTENTION_ARCH
