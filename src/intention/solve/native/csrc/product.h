// Products of small matrices that need no packing: C = scale A B, or C += scale A B.
#pragma once

#include "transpose.h"

namespace INTENTION_ARCH {

// A matrix with any strides. A transpose costs nothing; which kernel runs depends on which strides are 1.
template <class T>
struct Mat {
    T* p;
    Int rs, cs;
    Mat t() const { return {p, cs, rs}; }
    Mat at(Int i, Int j) const { return {p + i * rs + j * cs, rs, cs}; }
    T& operator()(Int i, Int j) const { return p[i * rs + j * cs]; }
    operator Mat<const T>() const { return {p, rs, cs}; }
};
template <class T>
inline Mat<T> rows_of(T* p, Int ld) {
    return {p, ld, 1};
}
template <class T>
using In = Mat<const T>;

// Which part of C is wanted: all, or only j >= i (what is below may be overwritten or left as it is).
enum Part { FULL, UPPER };

// ---- vectors along the columns of B and C: R x (C vectors) sums in registers, entries of A broadcast ----

template <class T, int R, int C, bool PART>
void tile(Int depth, In<T> a, const T* b, Int ldb, T* c, Int ldc, int last, T scale, bool add) {
    constexpr int W = WIDTH<T>;
    Vec<T> sum[R][C] = {};
    const T* ap = a.p;
    for (Int l = 0; l < depth; ++l) {
        Vec<T> row[C];
#pragma GCC unroll 8
        for (int v = 0; v < C; ++v) row[v] = PART && v == C - 1 ? load_part(b + v * W, last) : load<T>(b + v * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const T x = ap[r * a.rs];
#pragma GCC unroll 8
            for (int v = 0; v < C; ++v) sum[r][v] += x * row[v];
        }
        ap += a.cs;
        b += ldb;
    }
    const bool scaled = !add && scale != 1;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < C; ++v) {
            T* to = c + r * ldc + v * W;
            if (scaled) sum[r][v] *= scale;
            if (PART && v == C - 1) {
                store_part(to, add ? load_part(to, last) + scale * sum[r][v] : sum[r][v], last);
            } else {
                store<T>(to, add ? load<T>(to) + scale * sum[r][v] : sum[r][v]);
            }
        }
    }
}

template <class T>
using Tile = void (*)(Int, In<T>, const T*, Int, T*, Int, int, T, bool);

template <class T, int R>
inline Tile<T> tile_of(int vectors, bool part) {
    if constexpr (TILE_VECTORS >= 4) {
        if (vectors == 4) return part ? tile<T, R, 4, true> : tile<T, R, 4, false>;
        if (vectors == 3) return part ? tile<T, R, 3, true> : tile<T, R, 3, false>;
    }
    if (vectors == 2) return part ? tile<T, R, 2, true> : tile<T, R, 2, false>;
    return part ? tile<T, R, 1, true> : tile<T, R, 1, false>;
}

template <class T>
Tile<T> tile_of(int rows, int vectors, bool part) {
    switch (rows) {
        case 1: return tile_of<T, 1>(vectors, part);
        case 2: return tile_of<T, 2>(vectors, part);
        case 3: return tile_of<T, 3>(vectors, part);
        case 4: return tile_of<T, 4>(vectors, part);
        case 5: return tile_of<T, 5>(vectors, part);
        default: return tile_of<T, 6>(vectors, part);
    }
}

// One column of tiles: n <= one tile of columns.
template <class T>
inline void column_of_tiles(Int m, Int n, Int depth, In<T> a, const T* b, Int ldb, T* c, Int ldc, T scale, bool add) {
    constexpr int W = WIDTH<T>;
    const int vectors = int(ceil_div(n, W)), last = int(n - (vectors - 1) * W);
    // equal heights: a lone last row would waste registers
    const Int step = m <= TILE_ROWS ? m : ceil_div(m, ceil_div(m, TILE_ROWS)), whole = m / step * step;
    const Tile<T> tile = tile_of<T>(int(step), vectors, last < W);
    for (Int i = 0; i < whole; i += step) tile(depth, a.at(i, 0), b, ldb, c + i * ldc, ldc, last, scale, add);
    if (const int rest = int(m - whole))
        tile_of<T>(rest, vectors, last < W)(depth, a.at(whole, 0), b, ldb, c + whole * ldc, ldc, last, scale, add);
}

constexpr Int DEPTH = 256;  // rows of B that are used again while they are near
constexpr Int NEAR = 256;   // entries between rows up to which they are so without a copy

// Wide B: columns of one tile at a time, copied so that its rows lie side by side.
template <class T>
void wide(Int m, Int n, Int depth, In<T> a, const T* b, Int ldb, T* c, Int ldc, T scale, bool add) {
    constexpr Int COLUMNS = TILE_VECTORS * WIDTH<T>;
    alignas(64) T panel[DEPTH * COLUMNS];
    for (Int j = 0; j < n; j += COLUMNS) {
        const Int columns = smaller(COLUMNS, n - j);
        for (Int l = 0; l < depth; ++l)
            for (Int i = 0; i < columns; ++i) panel[l * COLUMNS + i] = b[l * ldb + j + i];
        column_of_tiles(m, columns, depth, a, panel, COLUMNS, c + j, ldc, scale, add);
    }
}

template <class T>
void by_rows(Int m, Int n, Int depth, In<T> a, const T* b, Int ldb, T* c, Int ldc, T scale, bool add, Part part) {
    constexpr Int COLUMNS = TILE_VECTORS * WIDTH<T>;
    for (Int l = 0; l < depth; l += DEPTH, add = true) {
        const Int some = smaller(DEPTH, depth - l);
        const In<T> al = a.at(0, l);
        const T* bl = b + l * ldb;
        if (part == UPPER) {
            for (Int i = 0; i < m; i += TILE_ROWS)
                for (Int j = i / WIDTH<T> * WIDTH<T>; j < n; j += COLUMNS)
                    column_of_tiles(smaller<Int>(TILE_ROWS, m - i), smaller(COLUMNS, n - j), some, al.at(i, 0), bl + j,
                                    ldb, c + i * ldc + j, ldc, scale, add);
        } else if (m >= 32 && n > COLUMNS && some > 8 && ldb > NEAR) {
            wide(m, n, some, al, bl, ldb, c, ldc, scale, add);
        } else {
            for (Int j = 0; j < n; j += COLUMNS)
                column_of_tiles(m, smaller(COLUMNS, n - j), some, al, bl + j, ldb, c + j, ldc, scale, add);
        }
    }
}

// B' has contiguous rows: turned, one tile of its columns at a time. Worth its while from a few rows of A on.
template <class T>
void by_turned_rows(Int m, Int n, Int depth, In<T> a, const T* b, Int ldb, T* c, Int ldc, T scale, bool add, Part part) {
    constexpr Int COLUMNS = TILE_VECTORS * WIDTH<T>;
    alignas(64) T panel[DEPTH * COLUMNS];
    for (Int l = 0; l < depth; l += DEPTH, add = true) {
        const Int some = smaller(DEPTH, depth - l);
        for (Int j = 0; j < n; j += COLUMNS) {
            const Int columns = smaller(COLUMNS, n - j), full = part == UPPER ? smaller(j, m) : m;
            transpose<T>(columns, some, b + j * ldb + l, ldb, panel, COLUMNS);
            if (full) column_of_tiles(full, columns, some, a.at(0, l), panel, COLUMNS, c + j, ldc, scale, add);
            if (full < m)
                by_rows(smaller(m - full, columns), columns, some, a.at(full, l), panel, COLUMNS, c + full * ldc + j, ldc,
                        scale, add, UPPER);
        }
    }
}

// ---- vectors along the depth: A and B' both have contiguous rows ----

template <class T, int R, int S>
void dots(Int depth, const T* a, Int lda, const T* b, Int ldb, T* c, Int ldc, T scale, bool add) {
    constexpr int W = WIDTH<T>, ROWS = W / S < R ? W / S : R;  // of C, whose sums share a register
    Vec<T> sum[(R + ROWS - 1) / ROWS * ROWS * S] = {};  // whole registers of sums
    Int l = 0;
    for (; l + W <= depth; l += W) {
        Vec<T> y[S];
#pragma GCC unroll 8
        for (int s = 0; s < S; ++s) y[s] = kept<T>(load<T>(b + s * ldb + l));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec<T> x = load<T>(a + r * lda + l);
#pragma GCC unroll 8
            for (int s = 0; s < S; ++s) sum[r * S + s] += x * y[s];
        }
    }
    if (const int rest = int(depth - l)) {
        Vec<T> y[S];
#pragma GCC unroll 8
        for (int s = 0; s < S; ++s) y[s] = load_part(b + s * ldb + l, rest);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec<T> x = load_part(a + r * lda + l, rest);
#pragma GCC unroll 8
            for (int s = 0; s < S; ++s) sum[r * S + s] += x * y[s];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r += ROWS) {
        Vec<T> out = scale * sums_of<T, ROWS * S>(sum + r * S);
        for (int i = 0; i < ROWS && r + i < R; ++i) {
            T* to = c + (r + i) * ldc;
            store_first<T, S>(to, add ? load_part(to, S) + out : out);
            out = shifted<T, S>(out);
        }
    }
}

template <class T>
using Dots = void (*)(Int, const T*, Int, const T*, Int, T*, Int, T, bool);

template <class T, int S>
inline Dots<T> dots_of(int rows) {
    if constexpr (DOT_SUMS / S >= 4) {
        if (rows >= 4) return dots<T, 4, S>;
    }
    if (rows == 3) return dots<T, 3, S>;
    return rows == 2 ? dots<T, 2, S> : dots<T, 1, S>;
}

template <class T>
inline Dots<T> dots_of(int rows, int columns) {
    if constexpr (DOT_COLUMNS >= 5) {
        if (columns == 5) return dots_of<T, 5>(rows);
        if (columns == 4) return dots_of<T, 4>(rows);
        if (columns == 3) return dots_of<T, 3>(rows);
    }
    return columns == 2 ? dots_of<T, 2>(rows) : dots_of<T, 1>(rows);
}

constexpr Int LONG = 512;  // entries of a row that are used again while they are near

template <class T>
void by_dots(Int m, Int n, Int depth, const T* a, Int lda, const T* b, Int ldb, T* c, Int ldc, T scale, bool add,
             Part part) {
    const Int columns = ceil_div(n, ceil_div(n, DOT_COLUMNS)), step = smaller<Int>(4, DOT_SUMS / columns);
    for (Int l = 0; l < depth; l += LONG, add = true) {
        const Int some = smaller(LONG, depth - l);
        for (Int i = 0; i < m; i += step) {
            const int rows = int(smaller(step, m - i));
            for (Int j = part == UPPER ? i / columns * columns : 0; j < n; j += columns) {
                const int now = int(smaller(columns, n - j));
                dots_of<T>(rows, now)(some, a + i * lda + l, lda, b + j * ldb + l, ldb, c + i * ldc + j, ldc, scale,
                                      add);
            }
        }
    }
}

template <class T>
void by_entries(Int m, Int n, Int depth, In<T> a, In<T> b, Mat<T> c, T scale, bool add) {
    for (Int i = 0; i < m; ++i)
        for (Int j = 0; j < n; ++j) {
            T sum = 0;
            for (Int l = 0; l < depth; ++l) sum += a(i, l) * b(l, j);
            c(i, j) = add ? c(i, j) + scale * sum : scale * sum;
        }
}

// C (m x n) = scale A (m x depth) B (depth x n), or += if `add`, by the cheapest kernel that the strides allow.
template <class T>
void multiply(Int m, Int n, Int depth, In<T> a, In<T> b, Mat<T> c, T scale = 1, bool add = false, Part part = FULL) {
    if (m == 0 || n == 0) return;
    if (n == 1) b.cs = c.cs = 1;
    if (m == 1) a.rs = c.rs = 1;
    if (depth == 1) a.cs = b.rs = 1;
    constexpr Int W = WIDTH<T>, NEVER = INT64_MAX;
    const Int rows = b.cs == 1 && c.cs == 1 ? m * ceil_div(n, W) * depth : NEVER;
    const Int columns = a.rs == 1 && c.rs == 1 && part == FULL ? n * ceil_div(m, W) * depth : NEVER;
    const Int of_dots = part == UPPER ? m * 5 / 8 : m, of_tiles = part == UPPER ? m * 3 / 4 : m;  // rows, as measured
    const bool dots_fit = a.cs == 1 && b.rs == 1 && (c.cs == 1 || (c.rs == 1 && part == FULL));
    const Int dot = dots_fit ? of_dots * n * (ceil_div(depth, W) + 4) : NEVER;
    constexpr Int TURNING = 9;  // B, in rows of A
    const Int turned = b.rs == 1 && c.cs == 1 ? (of_tiles + TURNING) * ceil_div(n, W) * depth : NEVER;
    const Int also = a.cs == 1 && c.rs == 1 && part == FULL ? (n + TURNING) * ceil_div(m, W) * depth : NEVER;
    const Int straight = smaller(smaller(rows, columns), dot);
    if (depth > 0 && turned < straight && turned <= also) {
        by_turned_rows<T>(m, n, depth, a, b.p, b.cs, c.p, c.rs, scale, add, part);
    } else if (depth > 0 && also < straight) {
        by_turned_rows<T>(n, m, depth, b.t(), a.p, a.rs, c.p, c.cs, scale, add, FULL);
    } else if (depth > 0 && rows != NEVER && rows <= columns && rows <= dot) {
        by_rows<T>(m, n, depth, a, b.p, b.rs, c.p, c.rs, scale, add, part);
    } else if (depth > 0 && columns != NEVER && columns <= dot) {
        by_rows<T>(n, m, depth, b.t(), a.p, a.cs, c.p, c.cs, scale, add, FULL);
    } else if (depth > 0 && dot != NEVER && c.cs == 1) {
        by_dots<T>(m, n, depth, a.p, a.rs, b.p, b.cs, c.p, c.rs, scale, add, part);
    } else if (depth > 0 && dot != NEVER) {
        by_dots<T>(n, m, depth, b.p, b.cs, a.p, a.rs, c.p, c.cs, scale, add, FULL);
    } else {
        by_entries<T>(m, n, depth, a, b, c, scale, add);
    }
}

// Compiled once for all files, in kernels_shared.cpp: the tiles are most of the code.
#define INTENTION_PRODUCTS(PREFIX, T)                                                     \
    PREFIX template Tile<T> tile_of<T>(int, int, bool);                                   \
    PREFIX template void multiply<T>(Int, Int, Int, In<T>, In<T>, Mat<T>, T, bool, Part); \
    PREFIX template void transpose<T>(Int, Int, const T*, Int, T*, Int);

INTENTION_PRODUCTS(extern, float)
INTENTION_PRODUCTS(extern, double)

}  // namespace INTENTION_ARCH
