// A piece: some tokens of as many sequences as a register has lanes, and the sums before them.
#pragma once

#include "arena.h"
#include "forget.h"
#include "forget_factor.h"

namespace INTENTION_ARCH {
namespace {

inline Int in_panels(Int d) { return ceil_div(d, PANEL) * PANEL; }
// Registers from one row to the next: an odd number, as rows at powers of two share few sets of the cache.
inline Int step_of(Int width) { return width | 1; }

// The parts of sequences that share registers.
template <class S>
struct Group {
    static constexpr int LANES = WIDTH<S>;
    int used;
    Int sequence[LANES], first[LANES], count[LANES];
    Int longest;

    Group(const ForgetArguments& a, const ForgetPlan& plan, Int index) : longest(0) {
        const Int all = a.batch * plan.parts;
        used = int(smaller<Int>(LANES, all - index * LANES));
        for (int g = 0; g < LANES; ++g) {
            const Int part = index * LANES + smaller(g, used - 1);
            sequence[g] = part / plan.parts, first[g] = part % plan.parts * plan.length;
            count[g] = g < used ? larger<Int>(0, smaller(plan.length, a.tokens - first[g])) : 0;
            longest = larger(longest, count[g]);
        }
    }

    bool has(int lane, Int at) const { return at < count[lane] && first[lane] + at >= 0; }

    // Rows `at` ... of every lane, transposed; 0 where a lane has no token or no column. `width` >= columns. Tokens of the
    // sequence that lie before a part can be read as well.
    void gather(const CausalTensor& x, Int at, Int rows, Int columns, Int width, Vec<S>* to) const {
        const Int step = step_of(width);
        for (Int i = 0; i < rows; ++i)
            for (Int j = 0; j < width; j += LANES) {
                const int some = int(smaller<Int>(LANES, columns - j));
                Vec<S> block[LANES];
#pragma GCC unroll 16
                for (int g = 0; g < LANES; ++g) {
                    const S* p = static_cast<const S*>(x.data) + sequence[g] * x.batch + (first[g] + at + i) * x.row + j;
                    block[g] = has(g, at + i) ? load_some<S>(p, some) : Vec<S>{};
                }
                turn<S>(block);
                for (int r = 0; r < LANES && j + r < width; ++r) to[i * step + j + r] = block[r];
            }
    }
    void scatter(const Vec<S>* from, Int at, Int rows, Int columns, Int step, S* to, Int tokens) const {
        for (Int i = 0; i < rows; ++i)
            for (Int j = 0; j < columns; j += LANES) {
                const int some = int(smaller<Int>(LANES, columns - j));
                Vec<S> block[LANES];
#pragma GCC unroll 16
                for (int r = 0; r < LANES; ++r) block[r] = r < some ? from[i * step + j + r] : Vec<S>{};
                turn<S>(block);
#pragma GCC unroll 16
                for (int g = 0; g < LANES; ++g)
                    if (at + i < count[g])
                        store_some<S>(to + (sequence[g] * tokens + first[g] + at + i) * columns + j, block[g], some);
            }
    }
    // A number of every token; `missing` where there is none.
    void gather_numbers(const void* x, Int batch, Int token, Int at, Int rows, S missing, Vec<S>* to) const {
        for (Int i = 0; i < rows; ++i)
            for (int g = 0; g < LANES; ++g)
                to[i][g] = x && has(g, at + i)
                               ? static_cast<const S*>(x)[sequence[g] * batch + (first[g] + at + i) * token]
                               : missing;
    }
    void scatter_numbers(const Vec<S>* from, Int at, Int rows, int lane, int last, void* to, Int tokens) const {
        for (Int i = 0; i < rows; ++i)
            for (int g = lane; g < last; ++g)
                if (at + i < count[g]) static_cast<S*>(to)[sequence[g] * tokens + first[g] + at + i] = from[i][g];
    }
};

// Lanes `half` WIDTH<T> ... of numbers in S, as T, and back.
template <class T, class S>
struct Some {
    typedef S V __attribute__((vector_size(sizeof(S) * WIDTH<T>), aligned(sizeof(S)), may_alias));
};
template <class T, class S>
inline void some_lanes(Int n, const Vec<S>* from, int half, Vec<T>* to) {
    using V = typename Some<T, S>::V;
    for (Int i = 0; i < n; ++i)
        to[i] = __builtin_convertvector(*reinterpret_cast<const V*>(reinterpret_cast<const S*>(from + i) + half * WIDTH<T>), Vec<T>);
}
template <class T, class S>
inline void put_lanes(Int n, const Vec<T>* from, int half, Vec<S>* to) {
    using V = typename Some<T, S>::V;
    for (Int i = 0; i < n; ++i)
        *reinterpret_cast<V*>(reinterpret_cast<S*>(to + i) + half * WIDTH<T>) = __builtin_convertvector(from[i], V);
}

// Sums in double, LANES<S> numbers each: (d, d), of which j >= i counts, and (d, k).
template <class S>
struct Totals {
    static constexpr int LANES = WIDTH<S>;
    Int d, k;
    double *gram, *cross;

    void place(Arena& memory, Int d_, Int k_) {
        d = d_, k = k_;
        gram = memory.take<double>(d * d * LANES), cross = memory.take<double>(d * k * LANES);
    }
    void clear() {
        std::memset(gram, 0, std::size_t(d * d * LANES) * sizeof(double));
        std::memset(cross, 0, std::size_t(d * k * LANES) * sizeof(double));
    }
    void copy(const Totals& from) {
        std::memcpy(gram, from.gram, std::size_t(d * d * LANES) * sizeof(double));
        std::memcpy(cross, from.cross, std::size_t(d * k * LANES) * sizeof(double));
    }
    // From or to numbers of single sequences; `size` is that of a row in memory, without the padding of features.
    void read(int lane, const double* from_gram, const double* from_cross, Int size) {
        for (Int i = 0; i < size; ++i) {
            for (Int j = 0; j < size; ++j) gram[(i * d + j) * LANES + lane] = from_gram[i * size + j];
            for (Int j = 0; j < k; ++j) cross[(i * k + j) * LANES + lane] = from_cross[i * k + j];
        }
    }
    void write(int lane, double* to_gram, double* to_cross, Int size) const {
        for (Int i = 0; i < size; ++i) {
            for (Int j = 0; j < size; ++j)
                to_gram[i * size + j] = gram[(smaller(i, j) * d + larger(i, j)) * LANES + lane];
            for (Int j = 0; j < k; ++j) to_cross[i * k + j] = cross[(i * k + j) * LANES + lane];
        }
    }
};

template <class T>
inline Vec<T> one_of() {
    return Vec<T>{} + T(1);
}

// As many doubles as T has lanes.
template <class T>
struct Doubles {
    typedef double V __attribute__((vector_size(8 * WIDTH<T>), aligned(8), may_alias));
};

// Numbers in double, in lanes of T.
template <class T>
inline Vec<T> rounded(const double* x) {
    return __builtin_convertvector(*reinterpret_cast<const typename Doubles<T>::V*>(x), Vec<T>);
}

// x = fade x + added, in double; and what it is rounded to.
template <class T>
inline Vec<T> fade_and_add(double* x, const double* fade, Vec<T> added) {
    using D = typename Doubles<T>::V;
    D& at = *reinterpret_cast<D*>(x);
    at = *reinterpret_cast<const D*>(fade) * at + __builtin_convertvector(added, D);
    return __builtin_convertvector(at, Vec<T>);
}

// A piece in the precision of the work.
template <class T>
struct Piece {
    Int n, d, k, row, told_row;             // tokens, features, columns; from a row of d or of k to the next
    Vec<T> *query, *key, *value, *grad;     // (n, d), (n, d), (n, k), (n, k)
    Vec<T> *weight, *decay, *alpha;         // (n)
    Vec<T> gain;
    Vec<T> *share, *from_start, *to_end;    // D_ts in row t, decays from before the piece, and to its end
    Vec<T> *solved, *told;                  // (n, d): z_t = A_t^-1 q_t, r_t = A_t^-1 B_t g_t
    Vec<T> *triangle, *lower, *reciprocal;  // H = c S, and the factor of A
    Vec<T> *gram, *cross;                   // (d, d), (d, k): the sums before the piece, or after it
    Vec<T> *rows, *others;                  // (n, max(d, k)) each: to work with
    Vec<T>* pairs[4];                       // (n, n) each
    Vec<T>* numbers[4];                     // (n) each

    void place(Arena& memory, Int d_, Int k_, bool backward) {
        d = d_, k = k_, row = step_of(d), told_row = step_of(k);
        const Int longest = larger(row, told_row);
        const auto take = [&](Int count) { return memory.take<Vec<T>>(count); };
        query = take(PIECE * row), key = take(PIECE * row);
        value = take(PIECE * told_row), grad = take(backward ? PIECE * told_row : 0);
        weight = take(PIECE), decay = take(PIECE), alpha = take(PIECE);
        share = take(PIECE * PIECE), from_start = take(PIECE), to_end = take(PIECE);
        solved = take(PIECE * row), told = take(backward ? PIECE * row : 0);
        triangle = take(row_at(d)), lower = take(row_at(d)), reciprocal = take(d);
        gram = take(d * row), cross = take(d * told_row);
        rows = take(PIECE * longest), others = take(PIECE * longest);
        for (auto& x : pairs) x = take(PIECE * PIECE);
        for (auto& x : numbers) x = take(PIECE);
    }

    Lanes<T> by_d(Vec<T>* x) const { return {x, row, 1}; }
    Lanes<T> by_k(Vec<T>* x) const { return {x, told_row, 1}; }

    void measure_decays() {
        for (Int t = 0; t < n; ++t) {
            from_start[t] = t ? decay[t] * from_start[t - 1] : decay[t];
            for (Int s = 0; s < t; ++s) share[t * n + s] = decay[t] * share[(t - 1) * n + s];
            share[t * n + t] = one_of<T>();
        }
        for (Int s = 0; s < n; ++s) to_end[s] = share[(n - 1) * n + s];
    }
};

// Sums of products in registers, PANEL x ACROSS where there are as many; each goes to take(i, j, sum).
template <class T, int R, int S, class Take>
inline void sum_tile(Int depth, Lanes<T> a, Lanes<T> b, Int i, Int j, const Take& take) {
    Vec<T> sum[R][S] = {};
    a = a.at(i, 0), b = b.at(0, j);
    for (Int l = 0; l < depth; ++l) {
        Vec<T> row[S];
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) row[s] = in_register<T>(b(l, s));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const Vec<T> x = in_register<T>(a(r, l));
#pragma GCC unroll 4
            for (int s = 0; s < S; ++s) sum[r][s] += x * row[s];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) take(i + r, j + s, sum[r][s]);
}
template <class T, int R, class Take>
inline void sum_rows(Int n, Int depth, Lanes<T> a, Lanes<T> b, Int i, Int j, const Take& take) {
    for (; n - j > ACROSS + 1 || n - j == ACROSS; j += ACROSS) sum_tile<T, R, ACROSS>(depth, a, b, i, j, take);
    for (; n - j > 1; j += 2) sum_tile<T, R, 2>(depth, a, b, i, j, take);
    if (j < n) sum_tile<T, R, 1>(depth, a, b, i, j, take);
}
// All sums, or with UPPER those of which j >= i, and some others.
template <class T, class Take>
inline void sum_products(Int m, Int n, Int depth, Lanes<T> a, Lanes<T> b, Part part, const Take& take) {
    Int i = 0;
    for (; i + PANEL <= m; i += PANEL) sum_rows<T, PANEL>(n, depth, a, b, i, part == UPPER ? i : 0, take);
    for (; i < m; ++i) sum_rows<T, 1>(n, depth, a, b, i, part == UPPER ? i : 0, take);
}
template <class T>
void set_products(Int m, Int n, Int depth, Lanes<T> a, Lanes<T> b, Lanes<T> c, Part part = FULL) {
    sum_products<T>(m, n, depth, a, b, part, [&](Int i, Int j, Vec<T> sum) { c(i, j) = sum; });
}
template <class T>
void add_products(Int m, Int n, Int depth, Lanes<T> a, Lanes<T> b, Lanes<T> c, Vec<T> scale) {
    sum_products<T>(m, n, depth, a, b, FULL, [&](Int i, Int j, Vec<T> sum) { c(i, j) += scale * sum; });
}

// x_s y_t of all s <= t in row s, 0 elsewhere.
template <class T>
void later_pairs(Int n, Int depth, Lanes<T> x, Lanes<T> y, Vec<T>* to) {
    set_products<T>(n, n, depth, x, y.t(), {to, n, 1}, UPPER);
    for (Int s = 1; s < n; ++s)
        for (Int t = 0; t < s; ++t) to[s * n + t] = Vec<T>{};
}

// Rows t: sum over s <= t of pairs[s, t] x_s, added.
template <class T>
void add_earlier(Int n, Int columns, const Vec<T>* pairs, Lanes<T> x, Lanes<T> to) {
    const Lanes<T> turned = {const_cast<Vec<T>*>(pairs), 1, n};
    for (Int t = 0; t < n; t += PANEL) {
        const Int some = smaller<Int>(PANEL, n - t);
        add_products<T>(some, columns, t + some, turned.at(t, 0), x, to.at(t, 0), one_of<T>());
    }
}
// Rows s: scale times the sum over t >= s of pairs[s, t] x_t, added.
template <class T>
void add_later(Int n, Int columns, const Vec<T>* pairs, Lanes<T> x, Lanes<T> to, Vec<T> scale) {
    const Lanes<T> own = {const_cast<Vec<T>*>(pairs), n, 1};
    for (Int s = 0; s < n; s += PANEL)
        add_products<T>(smaller<Int>(PANEL, n - s), columns, n - s, own.at(s, s), x.at(s, 0), to.at(s, 0), scale);
}

template <class T>
inline Vec<T> dot_lanes(Int n, const Vec<T>* x, const Vec<T>* y) {
    Vec<T> one = {}, two = {};
    Int i = 0;
    for (; i + 2 <= n; i += 2) one += x[i] * y[i], two += x[i + 1] * y[i + 1];
    if (i < n) one += x[i] * y[i];
    return one + two;
}

}  // namespace
}  // namespace INTENTION_ARCH
