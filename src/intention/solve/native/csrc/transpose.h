// Transposes, one square of a register's width at a time.
#pragma once

#include "vector.h"

namespace INTENTION_ARCH {

#ifdef INTENTION_SHUFFLE
template <class T, int H, int... I>
inline void swap_blocks(Vec<T>& a, Vec<T>& b, Indices<I...>) {
    constexpr int W = WIDTH<T>;
    const Vec<T> first = __builtin_shufflevector(a, b, (I / H % 2 == 0 ? I : W + I - H)...);
    b = __builtin_shufflevector(a, b, (I / H % 2 == 0 ? I + H : W + I)...);
    a = first;
}
// Of every four lanes two of a and two of b: one by one in turn, or side by side; the first two or the others.
template <class T, int SECOND, int... I>
inline Vec<T> in_turn(Vec<T> a, Vec<T> b, Indices<I...>) {
    return __builtin_shufflevector(a, b, (I / 4 * 4 + I % 4 / 2 + 2 * SECOND + I % 2 * WIDTH<T>)...);
}
template <class T, int SECOND, int... I>
inline Vec<T> side_by_side(Vec<T> a, Vec<T> b, Indices<I...>) {
    return __builtin_shufflevector(a, b, (I / 4 * 4 + I % 2 + 2 * SECOND + I % 4 / 2 * WIDTH<T>)...);
}
// Squares of four lanes, one instruction for each vector of a step where they are as long as a register of SSE.
template <class T>
inline void turn_fours(Vec<T>* x) {
    using All = typename Count<WIDTH<T>>::type;
#pragma GCC unroll 4
    for (int r = 0; r < WIDTH<T>; r += 4) {
        const Vec<T> a = in_turn<T, 0>(x[r], x[r + 1], All()), b = in_turn<T, 1>(x[r], x[r + 1], All()),
                     c = in_turn<T, 0>(x[r + 2], x[r + 3], All()), d = in_turn<T, 1>(x[r + 2], x[r + 3], All());
        x[r] = side_by_side<T, 0>(a, c, All()), x[r + 1] = side_by_side<T, 1>(a, c, All());
        x[r + 2] = side_by_side<T, 0>(b, d, All()), x[r + 3] = side_by_side<T, 1>(b, d, All());
    }
}
template <class T, int H = WIDTH<T> / 2>
inline void turn(Vec<T>* x) {
    constexpr int W = WIDTH<T>;
    if constexpr (H == 2 && sizeof(T) == 4) {
        turn_fours<T>(x);
    } else {
#pragma GCC unroll 16
        for (int r = 0; r < W; ++r)
            if (r % (2 * H) < H) swap_blocks<T, H>(x[r], x[r + H], typename Count<W>::type());
        if constexpr (H > 1) turn<T, H / 2>(x);
    }
}
#else
template <class T>
inline void turn(Vec<T>* x) {
    for (int r = 0; r < WIDTH<T>; ++r)
        for (int s = 0; s < r; ++s) {
            const T below = x[r][s];
            x[r][s] = x[s][r], x[s][r] = below;
        }
}
#endif

// `count` entries, which may be all.
template <class T>
inline Vec<T> load_some(const T* p, int count) {
    return count < WIDTH<T> ? load_part(p, count) : load<T>(p);
}
template <class T>
inline void store_some(T* p, Vec<T> x, int count) {
    if (count < WIDTH<T>) {
        store_part(p, x, count);
    } else {
        store<T>(p, x);
    }
}

// m x n -> n x m, neither above a register's width
template <class T>
inline void transpose_block(int m, int n, const T* from, Int ld, T* to, Int ldt) {
    constexpr int W = WIDTH<T>;
    Vec<T> x[W];
    const Vec<T> none = {};
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) x[r] = r < m ? load_some<T>(from + r * ld, n) : none;
    turn<T>(x);
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) {
        if (r >= n) break;
        store_some<T>(to + r * ldt, x[r], m);
    }
}

// to (n x m) = from (m x n)'
template <class T>
void transpose(Int m, Int n, const T* from, Int ld, T* to, Int ldt) {
    constexpr Int W = WIDTH<T>;
    for (Int i = 0; i < m; i += W)
        for (Int j = 0; j < n; j += W)
            transpose_block<T>(int(smaller(W, m - i)), int(smaller(W, n - j)), from + i * ld + j, ld, to + j * ldt + i,
                               ldt);
}

// X + X', for a square X; `room` for as many entries
template <class T>
void plus_transpose(Int n, T* x, T* room) {
    transpose<T>(n, n, x, n, room, n);
    for (Int i = 0; i < n * n; ++i) x[i] += room[i];
}

}  // namespace INTENTION_ARCH
