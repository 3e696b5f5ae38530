// Q (c K'WK + alpha I)^-1 K'WV for a batch, one element (or one register of small elements) at a time.
#include "factor.h"
#include "head.h"
#include "kernels.h"

namespace INTENTION_ARCH {

template <class T>
struct Work {  // of one element, between the steps
    Head<T> head;
    In<T> key, value;  // K~, V~
    T* sigma;          // then U
    T largest;         // of Sigma's diagonal
    Pivots<T> pivots;
    const T *x = nullptr, *inverse = nullptr;  // X = U^-T where there is no inverse
};

// c K~'K~ + alpha I, or c K~K~' + alpha I; upper triangle, padded with a unit diagonal
template <class T>
void gram(const RidgeArguments& a, Work<T>& w, Int n, Int size, Arena& arena) {
    w.sigma = arena.zeros<T>(size * size);
    const In<T> left = a.dual ? w.key : w.key.t();
    multiply<T>(n, n, a.dual ? a.features : a.points, left, left.t(), rows_of(w.sigma, size), w.head.gain, false, UPPER);
    w.largest = -T(__builtin_inf());
    for (Int i = 0; i < n; ++i) {
        T& entry = w.sigma[i * size + i];
        entry += w.head.alpha;
        w.largest = entry > w.largest || entry != entry ? entry : w.largest;
    }
    for (Int i = 0; i < size; ++i) {
        for (Int j = larger(n, i + 1); j < size; ++j) w.sigma[i * size + j] = 0;
        if (i >= n) w.sigma[i * size + i] = 1;
    }
}

template <class T>
void factor_one(Work<T>& w, Int n, Int size, bool inverse, Arena& arena) {
    T *reciprocal = arena.take<T>(size), *x = arena.take<T>(size * size);
    w.pivots = cholesky(n, size, w.sigma, reciprocal);
    invert_factor<T>(size, w.sigma, reciprocal, x);
    w.x = x;
    if (inverse) {
        T* full = arena.take<T>(size * size);
        cross(size, x, full);
        w.inverse = full;
    }
}

template <class T>
void factor_group(Work<T>* w, int count, Int n, Int size, Arena& arena) {
    constexpr int W = WIDTH<T>;
    const Int all = size * size;
    T *mixed = arena.zeros<T>(all * W), *apart = arena.zeros<T>(all * W);  // entry by entry; element by element
    Vec<T>*s = reinterpret_cast<Vec<T>*>(mixed), *x = reinterpret_cast<Vec<T>*>(arena.take<T>(all * W)),
    *inverse = reinterpret_cast<Vec<T>*>(arena.take<T>(all * W));
    for (int g = 0; g < W; ++g)
        if (g < count) std::memcpy(apart + g * all, w[g].sigma, std::size_t(all) * sizeof(T));
    for (Int i = 0; i < n; ++i) transpose<T>(W, n, apart + i * size, all, mixed + i * size * W, W);
    Pivots<T> pivots[W];
    factor_together<T>(n, size, s, x, inverse, pivots);
    for (Int i = 0; i < n; ++i) transpose<T>(n, W, reinterpret_cast<T*>(inverse + i * size), W, apart + i * size, all);
    for (Int i = 0; i < n; ++i)
        for (int g = 0; g < count; ++g)
            for (Int j = i; j < n; ++j) w[g].sigma[i * size + j] = mixed[(i * size + j) * W + g];
    for (int g = 0; g < count; ++g) w[g].pivots = pivots[g], w[g].inverse = apart + g * all;
}

// rows Sigma^-1 for few rows, padded to `size` with zeros
template <class T>
void solve_rows(const Work<T>& w, Int rows, Int size, const T* rhs, T* out, Arena& arena) {
    const In<T> right = rows_of(rhs, size);
    if (w.inverse) {
        multiply<T>(rows, size, size, right, rows_of(w.inverse, size), rows_of(out, size));
        return;
    }
    const In<T> x = rows_of(w.x, size);
    T* half = arena.take<T>(rows * size);
    multiply<T>(rows, size, size, right, x.t(), rows_of(half, size));
    multiply<T>(rows, size, size, rows_of<const T>(half, size), x, rows_of(out, size));
}

constexpr Int PROBED = 8;  // as in factor.py

template <class T>
T ratio_of(const Work<T>& w, Int n, Int size, const T* probe, T probe_size) {
    if (w.pivots.failed) return T(__builtin_inf());
    T grown = w.pivots.grown;
    if (probe) {
        T sum = 0;
        for (Int i = 0; i < n; ++i) sum += probe[i] * probe[i];
        const T by_probe = root(sum) / probe_size;
        if (!(by_probe <= grown)) grown = by_probe;
    } else if (probe_size < 0) {  // the diagonal of the inverse
        for (Int i = 0; i < n; ++i)
            if (const T x = w.inverse[i * size + i]; !(x <= grown)) grown = x;
    }
    return w.largest * grown;
}

// Few columns: coefficients as rows (k x n), so that every vector lies along the longer side.
template <class T>
Mat<T> coefficients_as_rows(const RidgeArguments& a, const Work<T>& w, Int n, Int size, T& ratio, Arena& arena) {
    const Int k = a.columns;
    const bool probe = n > PROBED;
    T *rhs = arena.zeros<T>((k + 1) * size), *coef = arena.take<T>((k + 1) * size);
    if (a.dual) {
        transpose<T>(n, k, w.value.p, w.value.rs, rhs, size);
    } else {
        multiply<T>(k, n, a.points, w.value.t(), w.key, rows_of(rhs, size));
    }
    T square = 0;
    for (Int i = 0; probe && i < n; ++i) {
        const T b = 1 + T(i) / T(n - 1);
        rhs[k * size + i] = b;
        square += b * b;
    }
    solve_rows(w, k + probe, size, rhs, coef, arena);
    ratio = ratio_of<T>(w, n, size, probe ? coef + k * size : nullptr, probe ? root(square) : T(0));
    return rows_of(coef, size);
}

template <class T>
void coefficients(const RidgeArguments& a, const Work<T>& w, Int n, Int size, T* coef, Arena& arena) {
    const Int k = a.columns;
    In<T> rhs = w.value;
    if (!a.dual) {
        const Mat<T> y = rows_of(arena.take<T>(n * k), k);
        multiply<T>(n, k, a.points, w.key.t(), w.value, y);
        rhs = y;
    }
    multiply<T>(n, k, n, rows_of(w.inverse, size), rhs, rows_of(coef, k));
}

constexpr Int QUERY_BLOCK = 64;

// Q W, or Q K~'P in the order that costs less. `coef` is n x k with one of its strides 1.
template <class T>
void predict(const RidgeArguments& a, const Work<T>& w, In<T> coef, T* out, Arena& arena) {
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns;
    const T scale = T(a.scale);
    if (a.dual && (n + m) * d * k <= m * n * (d + k)) {
        const bool as_rows = coef.cs != 1 || k == 1;
        T* map = arena.take<T>(d * k);
        const Mat<T> wide = as_rows ? Mat<T>{map, 1, d} : Mat<T>{map, k, 1};
        multiply<T>(d, k, n, w.key.t(), coef, wide);
        multiply<T>(m, k, d, w.head.query, wide, rows_of(out, k), scale);
    } else if (a.dual) {
        T* scores = arena.take<T>(QUERY_BLOCK * n);
        for (Int i = 0; i < m; i += QUERY_BLOCK) {
            const Int some = smaller(QUERY_BLOCK, m - i);
            multiply<T>(some, n, d, w.head.query.at(i, 0), w.key.t(), rows_of(scores, n));
            multiply<T>(some, k, n, rows_of<const T>(scores, n), coef, rows_of(out + i * k, k), scale);
        }
    } else {
        multiply<T>(m, k, d, w.head.query, coef, rows_of(out, k), scale);
    }
    if (w.head.mean_value)
        for (Int i = 0; i < m; ++i)
            for (Int j = 0; j < k; ++j) out[i * k + j] += w.head.mean_value[j];
}

template <class T>
void finish(const RidgeArguments& a, const Work<T>& w, Int b, Int n, Int size, Arena& arena) {
    const Int k = a.columns;
    T* out = static_cast<T*>(a.forward.out) + b * a.queries * k;
    T* coef = static_cast<T*>(a.coef) + b * n * k;
    T* matrix = static_cast<T*>(a.matrix) + b * n * n;
    T& ratio = static_cast<T*>(a.forward.ratio)[b];
    if (a.inverse) {
        coefficients(a, w, n, size, coef, arena);
        ratio = ratio_of<T>(w, n, size, nullptr, -1);
        predict<T>(a, w, rows_of<const T>(coef, k), out, arena);
        copy_rows<T>(n, n, rows_of(w.inverse, size), matrix);
        return;
    }
    const Mat<T> rows = coefficients_as_rows(a, w, n, size, ratio, arena);
    predict<T>(a, w, rows.t(), out, arena);
    transpose<T>(k, n, rows.p, size, coef, k);
    for (Int i = 0; i < n; ++i) {
        std::memset(matrix + i * n, 0, std::size_t(i) * sizeof(T));
        std::memcpy(matrix + i * n + i, w.sigma + i * size + i, std::size_t(n - i) * sizeof(T));
    }
}

template <class T>
void forward(const RidgeArguments& a, Int from, Int to) {
    static thread_local Arena arena;
    const Int n = a.dual ? a.points : a.features, size = padded<T>(n);
    const bool copies = a.intercept || a.weight.data;
    const Int copied = copies ? a.points * (a.features + a.columns) + a.queries * a.features : 0;
    const bool together = n <= SMALL && copied <= 4096;
    Work<T> work[WIDTH<T>];
    for (Int b = from; b < to;) {
        arena.reset();
        const int count = together ? int(smaller<Int>(WIDTH<T>, to - b)) : 1;
        for (int g = 0; g < count; ++g) {
            Work<T>& w = work[g];
            w.head = head_of<T>(a, b + g);
            if (a.intercept) centre(a, w.head, arena);
            w.key = weighted(a.points, a.features, w.head.key, w.head.weight, arena);
            w.value = weighted(a.points, a.columns, w.head.value, w.head.weight, arena);
            gram(a, w, n, size, arena);
        }
        if (together) {
            factor_group(work, count, n, size, arena);
        } else {
            factor_one(work[0], n, size, bool(a.inverse), arena);
        }
        for (int g = 0; g < count; ++g) finish(a, work[g], b + g, n, size, arena);
        b += count;
    }
    arena.reset();
}

void ridge_forward(const RidgeArguments& a, Int from, Int to) {
    if (a.is_double) {
        forward<double>(a, from, to);
    } else {
        forward<float>(a, from, to);
    }
}

}  // namespace INTENTION_ARCH
