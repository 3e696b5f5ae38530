// Triangular factors and products of the causal solve.
#pragma once

#include "factor.h"

namespace INTENTION_ARCH {
namespace {

constexpr Int STRIP = 16;  // rows of a triangle that are made together
constexpr Int SHORT = 16;  // products in a sum: long sums round more

// X = U'^-1 X; row t depends on rows <= t alone. X has room for `size` rows and whole registers of columns.
template <class T>
void half_solve(Int size, const T* u, const T* inverse_root, Int columns, T* x, Int ldx) {
    constexpr Int W = WIDTH<T>;
    const auto subtract = [=](Int from, Int to, Int rows) {  // what rows from..to are in those from `to` on
        const In<T> above = rows_of(u + from * size + to, size), done = rows_of<const T>(x + from * ldx, ldx);
        if (to > from) multiply<T>(rows, columns, to - from, above.t(), done, rows_of(x + to * ldx, ldx), T(-1), true);
    };
    for (Int b = 0; b < size; b += W) {
        const Int strip = b / STRIP * STRIP;
        if (b == strip) subtract(0, b, smaller(STRIP, size - b));
        subtract(strip, b, W);
        substitute<T>(u + b * size + b, size, inverse_root + b, x + b * ldx, ldx, columns / W);
    }
}

// The inverse of A, (size, size) with a unit diagonal from n on, in the upper left of `out`; A and `half` are used up.
template <class T>
bool inverse(Int n, T* a, T* half, T* out, Int ldo, T* inverse_root) {
    const Int size = padded<T>(n);
    if (cholesky<T>(n, size, a, inverse_root).failed) return false;
    invert_factor<T>(size, a, inverse_root, half);
    cross<T>(size, half, a);
    for (Int i = 0; i < n; ++i) __builtin_memcpy(out + i * ldo, a + i * size, n * sizeof(T));
    return true;
}

// The lower triangle of a symmetric matrix from its upper one, of which whole registers are there.
template <class T>
void mirror(Int n, T* x, Int ld) {
    constexpr Int W = WIDTH<T>;
    for (Int b = W; b < n; b += W) transpose<T>(W, n - b, x + (b - W) * ld + b, ld, x + b * ld + b - W, ld);
}

// C = tril(A B), for a C of n rows and columns, in sums of `most` products.
template <class T>
void lower_of(Int n, Int depth, In<T> a, In<T> b, Mat<T> c, Int most = INT64_MAX) {
    for (Int i = 0; i < n; i += STRIP) {
        const Int rows = smaller(STRIP, n - i);
        for (Int l = 0; l < depth; l += smaller(most, depth))
            multiply<T>(rows, i + rows, smaller(most, depth - l), a.at(i, l), b.at(l, 0), c.at(i, 0), T(1), l > 0);
        for (Int r = i; r < i + rows; ++r)
            for (Int j = r + 1; j < i + rows; ++j) c(r, j) = 0;
    }
}

// C = triu(scale A B), or C += that.
template <class T>
void upper_of(Int n, Int depth, In<T> a, In<T> b, Mat<T> c, T scale, bool add) {
    for (Int i = 0; i < n; i += STRIP) {
        const Int rows = smaller(STRIP, n - i);
        multiply<T>(rows, n - i, depth, a.at(i, 0), b.at(0, i), c.at(i, i), scale, add);
        for (Int r = i; r < i + rows; ++r)
            for (Int j = i; j < r; ++j) c(r, j) = 0;
    }
}

// C = scale L X or C += scale L X for a lower L as `lower_of` leaves it.
template <class T>
void lower_times(Int n, Int columns, In<T> l, In<T> x, Mat<T> c, T scale, bool add) {
    for (Int i = 0; i < n; i += STRIP) {
        const Int rows = smaller(STRIP, n - i);
        multiply<T>(rows, columns, i + rows, l.at(i, 0), x, c.at(i, 0), scale, add);
    }
}

// C = U X for an upper U as `upper_of` leaves it.
template <class T>
void upper_times(Int n, Int columns, In<T> u, In<T> x, Mat<T> c) {
    for (Int i = 0; i < n; i += STRIP)
        multiply<T>(smaller(STRIP, n - i), columns, n - i, u.at(i, i), x.at(i, 0), c.at(i, 0));
}

}  // namespace
}  // namespace INTENTION_ARCH
