// Causal least squares: the fit of token t sees tokens <= t. One sequence at a time, block by block of tokens.
//
// The formulas and their names are those of solve/causal.py: P = A^-1 and W before a block; R R' = I + c K P K',
// E = R^-1 K P, Y = R^-1 (V - c K W); then P - c E'E and W + E'Y. P is factored anew from sums in double at every
// chunk, so nothing drifts; a chunk that float does not serve is done in double.
#include "causal.h"

#include "arena.h"
#include "factor.h"

namespace INTENTION_ARCH {
namespace {

constexpr Int BLOCK = 32;     // tokens that share a triangular factor
constexpr Int CHUNK = 64;     // tokens whose gradients are made together
constexpr Int FIRST = 128;    // tokens before the first Gram matrix is factored
constexpr Int LONGEST = 512;  // and at most between two later ones
// Float serves up to a ratio of 30, as in factor.py. Here: up to 10 before a chunk in which Sigma grows up to 3 times, so
// that later tokens hardly ever change the precision of earlier ones. The first tokens of all are always in double.
constexpr double EASY_BEFORE = 10, GROWTH = 3;

// ---- factors -------------------------------------------------------------------------------------------------------

// U_bb'^-1 times a block of rows, in place: forward substitution, one register of columns at a time.
template <class T>
void substitute_rows(const T* u, Int ldu, const T* inverse_root, T* rows, Int ld, Int columns) {
    constexpr int W = WIDTH<T>;
    for (Int c = 0; c < columns; c += W, rows += W) {
        Vec<T> x[W];
#pragma GCC unroll 16
        for (int r = 0; r < W; ++r) x[r] = load<T>(rows + r * ld);
#pragma GCC unroll 16
        for (int j = 0; j < W; ++j) {
            x[j] *= inverse_root[j];
            store<T>(rows + j * ld, x[j]);
#pragma GCC unroll 16
            for (int i = j + 1; i < W; ++i) x[i] -= u[j * ldu + i] * x[j];
        }
    }
}

// X = U'^-1 X; row t depends on rows <= t alone. X has room for `size` rows and whole registers of columns.
template <class T>
void half_solve(Int size, const T* u, const T* inverse_root, Int columns, T* x, Int ldx) {
    constexpr Int W = WIDTH<T>;
    for (Int b = 0; b < size; b += W) {
        if (b)
            multiply<T>(W, columns, b, rows_of(u + b, size).t(), rows_of<const T>(x, ldx), rows_of(x + b * ldx, ldx), T(-1), true);
        substitute_rows<T>(u + b * size + b, size, inverse_root + b, x + b * ldx, ldx, columns);
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

// ---- triangles -----------------------------------------------------------------------------------------------------

constexpr Int STRIP = 16;  // rows of a triangle that are made together

// C = tril(A B), for a C of n rows and columns.
template <class T>
void lower_of(Int n, Int depth, In<T> a, In<T> b, Mat<T> c) {
    for (Int i = 0; i < n; i += STRIP) {
        const Int rows = smaller(STRIP, n - i);
        multiply<T>(rows, i + rows, depth, a.at(i, 0), b, c.at(i, 0));
        for (Int r = i; r < i + rows; ++r)
            for (Int j = r + 1; j < i + rows; ++j) c(r, j) = 0;
    }
}

// C = triu(A B)
template <class T>
void upper_of(Int n, Int depth, In<T> a, In<T> b, Mat<T> c) {
    for (Int i = 0; i < n; i += STRIP) {
        const Int rows = smaller(STRIP, n - i);
        multiply<T>(rows, n - i, depth, a.at(i, 0), b.at(0, i), c.at(i, i));
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

// ---- one sequence --------------------------------------------------------------------------------------------------

template <class S>
struct Sequence {
    Int n, d, k;  // k = 0: no values, the answers are q_t A_t^-1
    const S *query, *key, *value, *weight;
    Int query_row, key_row, value_row;
    double alpha, gain;
};

struct Sums {  // of all tokens so far
    bool empty;
    double *gram, *cross;  // (d, d), (d, k)
};

// What the blocks of a chunk work with, in the precision of the chunk.
template <class T>
struct Work {
    T *query, *key, *value;  // (BLOCK, d), (BLOCK, d), (BLOCK, k): room for copies
    In<T> queries, keys, values;
    T *both, *pair, *inner, *seen, *answer;
    T *gram, *cross, *half, *pivots;  // sums of a chunk; the first also serves `inverse`
    void place(Arena& s, Int d, Int k) {
        query = s.take<T>(BLOCK * d), key = s.take<T>(BLOCK * d), value = s.take<T>(BLOCK * k);
        both = s.take<T>(d * padded<T>(d + k)), pair = s.zeros<T>(BLOCK * padded<T>(d + k));
        inner = s.take<T>(BLOCK * BLOCK), seen = s.take<T>(BLOCK * BLOCK), answer = s.take<T>(BLOCK * (d + k));
        const Int size = padded<T>(d);
        gram = s.take<T>(size * size), cross = s.take<T>(d * k), half = s.take<T>(size * size), pivots = s.take<T>(larger(size, BLOCK));
    }
};

template <class T, class S>
void copy_rows(Int n, Int columns, const S* from, Int row, const S* weight, T* to) {
    for (Int i = 0; i < n; ++i) {
        const T scale = weight ? root(T(weight[i])) : T(1);
        for (Int j = 0; j < columns; ++j) to[i * columns + j] = scale * T(from[i * row + j]);
    }
}

template <class T, class S>
In<T> in_place_or_copied(Int n, Int columns, const S* from, Int row, const S* weight, T* room) {
    if constexpr (sizeof(T) == sizeof(S))
        if (!weight) return rows_of<const T>(from, row);
    copy_rows<T, S>(n, columns, from, row, weight, room);
    return rows_of<const T>(room, columns);
}

// The tokens at `first`, in the precision of the work: keys and values times the root of their weight.
template <class T, class S>
void load_block(const Sequence<S>& s, Int first, Int n, Work<T>& w) {
    const S* weight = s.weight ? s.weight + first : nullptr;
    w.queries = in_place_or_copied<T, S>(n, s.d, s.query + first * s.query_row, s.query_row, nullptr, w.query);
    w.keys = in_place_or_copied<T, S>(n, s.d, s.key + first * s.key_row, s.key_row, weight, w.key);
    if (s.k) w.values = in_place_or_copied<T, S>(n, s.k, s.value + first * s.value_row, s.value_row, weight, w.value);
}

// The largest diagonal entries of Sigma before and after a chunk.
struct Largest {
    double before, after;
};

template <class S>
Largest largest_of(const Sequence<S>& s, Int first, Int n, const Sums& sums, double* diagonal) {
    const auto top = [&] {
        double found = 0;
        for (Int j = 0; j < s.d; ++j)
            if (!(diagonal[j] <= found)) found = diagonal[j];  // NaN stays
        return s.gain * found + s.alpha;
    };
    for (Int j = 0; j < s.d; ++j) diagonal[j] = sums.empty ? 0.0 : sums.gram[j * s.d + j];
    const double before = top();
    for (Int i = first; i < first + n; ++i) {
        const S* key = s.key + i * s.key_row;
        const double weight = s.weight ? double(s.weight[i]) : 1.0;
        for (Int j = 0; j < s.d; ++j) diagonal[j] += weight * double(key[j]) * double(key[j]);
    }
    return {before, top()};
}

// both = [P, -W] from the sums; returns the largest diagonal entry of P, infinite where there is no factor.
template <class T, class S>
double fit_before(const Sequence<S>& s, const Sums& sums, const Work<T>& w) {
    const Int d = s.d, k = s.k, width = padded<T>(d + k);
    for (Int i = 0; i < d * width; ++i) w.both[i] = 0;
    if (sums.empty) {
        for (Int i = 0; i < d; ++i) w.both[i * width + i] = T(1 / s.alpha);
        return 1 / s.alpha;
    }
    const Int size = padded<T>(d);
    for (Int i = 0; i < size; ++i)
        for (Int j = 0; j < size; ++j)
            w.gram[i * size + j] = (i < d && j < d ? T(s.gain * sums.gram[i * d + j]) : T(0)) + T(i == j ? (i < d ? s.alpha : 1) : 0);
    if (!inverse(d, w.gram, w.half, w.both, width, w.pivots)) return __builtin_inf();
    double top = 0;
    for (Int i = 0; i < d; ++i) top = larger(top, double(w.both[i * width + i]));
    for (Int i = 0; i < d * k; ++i) w.cross[i] = T(sums.cross[i]);
    multiply<T>(d, k, d, rows_of<const T>(w.both, width), rows_of<const T>(w.cross, k), rows_of(w.both + d, width), T(-1));
    return top;
}

// pair = [E, Y] of the block's rows.
template <class T>
void fit_block(Int n, Int d, Int k, T gain, const Work<T>& w) {
    const Int width = padded<T>(d + k);
    const In<T> key = w.keys;
    multiply<T>(n, width, d, key, rows_of<const T>(w.both, width), rows_of(w.pair, width));  // [K P, -K W]
    for (Int i = 0; i < n; ++i)
        for (Int j = 0; j < k; ++j) w.pair[i * width + d + j] = gain * w.pair[i * width + d + j] + w.values(i, j);
    const Int size = padded<T>(n);
    multiply<T>(n, n, d, rows_of<const T>(w.pair, width), key.t(), rows_of(w.inner, size), gain, false, UPPER);
    for (Int i = 0; i < size; ++i)
        for (Int j = larger(i, n); j < size; ++j) w.inner[i * size + j] = 0;
    for (Int i = 0; i < size; ++i) w.inner[i * size + i] = i < n ? w.inner[i * size + i] + 1 : T(1);
    cholesky<T>(n, size, w.inner, w.pivots);  // eigenvalues are 1 and more where the ratio is served
    half_solve(size, w.inner, w.pivots, width, w.pair, width);
}

// both = [P, -W] with the tokens of a block.
template <class T>
void pass_block(Int n, Int d, Int k, T gain, const Work<T>& w) {
    const Int width = padded<T>(d + k);
    const In<T> pair = rows_of<const T>(w.pair, width);
    if (gain == 1) {
        multiply<T>(d, width, n, pair.t(), pair, rows_of(w.both, width), T(-1), true);
        return;
    }
    multiply<T>(d, d, n, pair.t(), pair, rows_of(w.both, width), -gain, true);
    multiply<T>(d, k, n, pair.t(), pair.at(0, d), rows_of(w.both + d, width), T(-1), true);
}

// x_t A_t^-1 for rows x_t (n, d).
template <class T>
void transformed(Int n, Int d, Int k, T gain, In<T> x, const T* both, const T* pair, T* seen, T* out) {
    const Int width = padded<T>(d + k);
    const In<T> rows = rows_of<const T>(pair, width);
    lower_of<T>(n, d, x, rows.t(), rows_of(seen, n));
    multiply<T>(n, d, d, x, rows_of<const T>(both, width), rows_of(out, d));
    lower_times<T>(n, d, rows_of<const T>(seen, n), rows, rows_of(out, d), -gain, true);
}

template <class T>
void answers(Int n, Int d, Int k, T gain, const Work<T>& w) {
    const Int width = padded<T>(d + k);
    if (k == 0) return transformed<T>(n, d, k, gain, w.queries, w.both, w.pair, w.seen, w.answer);
    const In<T> pair = rows_of<const T>(w.pair, width);
    lower_of<T>(n, d, w.queries, pair.t(), rows_of(w.seen, n));
    multiply<T>(n, k, d, w.queries, rows_of<const T>(w.both + d, width), rows_of(w.answer, k), T(-1));
    lower_times<T>(n, k, rows_of<const T>(w.seen, n), pair.at(0, d), rows_of(w.answer, k), T(1), true);
}

template <class T>
void add_to(double* sums, const T* x, Int count) {
    for (Int i = 0; i < count; ++i) sums[i] += double(x[i]);
}

// Adds a chunk's K'WK and K'WV to the sums.
template <class T>
void add_chunk(Int d, Int k, const Work<T>& w, Sums& sums) {
    for (Int i = 0; i < d; ++i)
        for (Int j = 0; j < i; ++j) w.gram[i * d + j] = w.gram[j * d + i];
    if (sums.empty) {
        for (Int i = 0; i < d * d; ++i) sums.gram[i] = 0;
        for (Int i = 0; i < d * k; ++i) sums.cross[i] = 0;
        sums.empty = false;
    }
    add_to(sums.gram, w.gram, d * d);
    add_to(sums.cross, w.cross, d * k);
}

// Where the fits of a chunk of CHUNK tokens are kept for its gradients: [P, -W] before it, then its [E, Y].
struct Kept {
    void* fits;
    bool wide;
};

// Answers of a chunk, or, with `kept`, its fits.
template <class T, class S>
void run_chunk(const Sequence<S>& s, Int first, Int count, Sums& sums, bool last, Work<T>& w, Arena& scratch,
               S* out, Kept* kept) {
    const Int d = s.d, k = s.k, width = padded<T>(d + k), columns = k ? k : d;
    const T gain = T(s.gain);
    for (Int at = first; at < first + count; at += BLOCK) {
        const Int n = smaller(BLOCK, first + count - at);
        const bool end = at + n == first + count;
        load_block<T, S>(s, at, n, w);
        if (kept && at % CHUNK == 0) {
            Kept& here = kept[at / CHUNK];
            here.wide = sizeof(T) > sizeof(S);
            here.fits = scratch.take<T>((d + CHUNK) * width);
            __builtin_memcpy(here.fits, w.both, d * width * sizeof(T));
        }
        fit_block<T>(n, d, k, gain, w);
        if (kept) {
            T* rows = static_cast<T*>(kept[at / CHUNK].fits) + d * width + at % CHUNK * width;
            __builtin_memcpy(rows, w.pair, n * width * sizeof(T));
        } else {
            answers<T>(n, d, k, gain, w);
            for (Int i = 0; i < n * columns; ++i) out[at * columns + i] = S(w.answer[i]);
        }
        if (!end) pass_block<T>(n, d, k, gain, w);
        if (!last) {
            multiply<T>(d, d, n, w.keys.t(), w.keys, rows_of(w.gram, d), T(1), at > first, UPPER);
            multiply<T>(d, k, n, w.keys.t(), w.values, rows_of(w.cross, k), T(1), at > first);
        }
    }
    if (!last) add_chunk<T>(d, k, w, sums);
}

inline double worse(double a, double b) { return a != a || a > b ? a : b; }  // NaN stays

struct Outcome {
    double ratio, error;
    bool wide;
};

// All chunks of a sequence in order, each in the precision that it needs.
template <class S>
Outcome run(const Sequence<S>& s, const double* gram, const double* cross, Arena& scratch, S* out, Kept* kept) {
    Work<S> narrow;
    Work<double> wide;
    narrow.place(scratch, s.d, s.k);
    wide.place(scratch, s.d, s.k);
    Sums sums = {gram == nullptr, scratch.take<double>(s.d * s.d), scratch.take<double>(s.d * s.k)};
    double* diagonal = scratch.take<double>(s.d);
    if (gram) __builtin_memcpy(sums.gram, gram, s.d * s.d * sizeof(double));
    if (gram && s.k) __builtin_memcpy(sums.cross, cross, s.d * s.k * sizeof(double));
    constexpr double eps = sizeof(S) == 4 ? 1.1920928955078125e-07 : 2.220446049250313e-16;
    Outcome found = {0, 0, false};
    for (Int first = 0; first < s.n;) {
        const Int count = smaller(s.n - first, first ? smaller(first, LONGEST) : FIRST);
        const bool last = first + count == s.n;
        const Largest largest = largest_of<S>(s, first, count, sums, diagonal);
        const bool steady = sizeof(S) == 8 || (largest.before > s.alpha && largest.after < GROWTH * largest.before);
        double top = steady ? fit_before<S, S>(s, sums, narrow) : 0.0, smallest = eps;
        if (sizeof(S) == 4 && !(steady && largest.before * top < EASY_BEFORE)) {
            top = fit_before<double, S>(s, sums, wide), smallest = 2.220446049250313e-16;
            run_chunk<double, S>(s, first, count, sums, last, wide, scratch, out, kept);
            found.wide = true;
        } else {
            run_chunk<S, S>(s, first, count, sums, last, narrow, scratch, out, kept);
        }
        // eigenvalues are at least diagonal entries: of Sigma after the chunk, of its inverse before it
        const double ratio = largest.after * top, error = ratio * smallest;
        found.ratio = worse(found.ratio, ratio), found.error = worse(found.error, error);
        first += count;
    }
    return found;
}

// ---- gradients -----------------------------------------------------------------------------------------------------

// Sums over the tokens after a chunk, in double: z_t r_t' (d, d) and z_t g_t' (d, k).
struct Later {
    double *gram, *cross;
};

template <class S>
struct Slopes {  // of one sequence; null where not wanted
    S *query, *key, *value, *weight;
    double alpha, gain;
};

// What the gradients of a chunk work with.
template <class T>
struct Pull {
    T *query, *key, *value, *grad;  // as they are, without weights
    T *z, *r, *one, *two, *whole, *values, *seen, *also;
    T *gram, *cross;
    void place(Arena& s, Int d, Int k) {
        const Int g = k ? k : d;
        query = s.take<T>(CHUNK * d), key = s.take<T>(CHUNK * d), value = s.take<T>(CHUNK * k), grad = s.take<T>(CHUNK * g);
        z = s.take<T>(CHUNK * d), r = s.take<T>(CHUNK * d), one = s.take<T>(CHUNK * d), two = s.take<T>(CHUNK * d);
        whole = s.take<T>(CHUNK * d), values = s.take<T>(CHUNK * k), seen = s.take<T>(CHUNK * CHUNK), also = s.take<T>(CHUNK * CHUNK);
        gram = s.take<T>(d * d), cross = s.take<T>(d * k);
    }
};

// x = sums (count,) in the precision of the chunk.
template <class T>
void narrowed(const double* sums, T* x, Int count) {
    for (Int i = 0; i < count; ++i) x[i] = T(sums[i]);
}

// z_t = A_t^-1 q_t and r_t = W_t g_t, or A_t^-1 g_t without values.
template <class T>
void solve_chunk(Int n, Int d, Int k, T gain, const T* both, const T* pair, const Pull<T>& p) {
    const Int width = padded<T>(d + k);
    const In<T> query = rows_of<const T>(p.query, d), grad = rows_of<const T>(p.grad, k ? k : d);
    transformed<T>(n, d, k, gain, query, both, pair, p.seen, p.z);
    if (k == 0) return transformed<T>(n, d, k, gain, grad, both, pair, p.seen, p.r);
    const In<T> rows = rows_of<const T>(pair, width);
    lower_of<T>(n, k, grad, rows.at(0, d).t(), rows_of(p.seen, n));
    multiply<T>(n, d, k, grad, rows_of<const T>(both + d, width).t(), rows_of(p.r, d), T(-1));
    lower_times<T>(n, d, rows_of<const T>(p.seen, n), rows, rows_of(p.r, d), T(1), true);
}

// one = sum z_t (r_t k_s), two = sum r_t (z_t k_s), whole = sum z_t (g_t v_s), values = sum g_t (z_t k_s), over t >= s.
template <class T>
void sum_chunk(Int n, Int d, Int k, const Later& later, const Pull<T>& p) {
    const In<T> key = rows_of<const T>(p.key, d), z = rows_of<const T>(p.z, d), r = rows_of<const T>(p.r, d);
    const In<T> seen = rows_of<const T>(p.seen, n), also = rows_of<const T>(p.also, n), gram = rows_of<const T>(p.gram, d);
    upper_of<T>(n, d, key, z.t(), rows_of(p.seen, n));
    upper_of<T>(n, d, key, r.t(), rows_of(p.also, n));
    narrowed(later.gram, p.gram, d * d);
    upper_times<T>(n, d, also, z, rows_of(p.one, d));
    multiply<T>(n, d, d, key, gram.t(), rows_of(p.one, d), T(1), true);
    upper_times<T>(n, d, seen, r, rows_of(p.two, d));
    multiply<T>(n, d, d, key, gram, rows_of(p.two, d), T(1), true);
    multiply<T>(d, d, n, z.t(), r, rows_of(p.gram, d));
    add_to(later.gram, p.gram, d * d);
    if (k == 0) return;
    const In<T> value = rows_of<const T>(p.value, k), grad = rows_of<const T>(p.grad, k), cross = rows_of<const T>(p.cross, k);
    narrowed(later.cross, p.cross, d * k);
    upper_times<T>(n, k, seen, grad, rows_of(p.values, k));
    multiply<T>(n, k, d, key, cross, rows_of(p.values, k), T(1), true);
    upper_of<T>(n, k, value, grad.t(), rows_of(p.also, n));
    upper_times<T>(n, d, also, z, rows_of(p.whole, d));
    multiply<T>(n, d, k, value, cross.t(), rows_of(p.whole, d), T(1), true);
    multiply<T>(d, k, n, z.t(), grad, rows_of(p.cross, k));
    add_to(later.cross, p.cross, d * k);
}

template <class T, class S>
void write_slopes(const Sequence<S>& s, Int first, Int n, const Pull<T>& p, Slopes<S>& to) {
    const Int d = s.d, k = s.k;
    const T gain = T(s.gain);
    double alpha = 0, share = 0;
    for (Int i = 0; i < n; ++i) {
        const T weight = s.weight ? T(s.weight[first + i]) : T(1);
        double along = 0, of_one = 0;
        for (Int j = 0; j < d; ++j) {
            const Int at = i * d + j;
            const T both = (k ? p.whole[at] : T(0)) - gain * p.one[at];
            alpha -= double(p.z[at]) * double(p.r[at]);
            along += double(p.key[at]) * double(both), of_one += double(p.key[at]) * double(p.one[at]);
            if (to.query) to.query[first * d + at] = S(p.r[at]);
            if (to.key) to.key[first * d + at] = S(weight * (both - gain * p.two[at]));
        }
        share -= double(weight) * of_one;
        if (to.weight) to.weight[first + i] = S(along);
        for (Int j = 0; j < k && to.value; ++j) to.value[(first + i) * k + j] = S(weight * p.values[i * k + j]);
    }
    to.alpha += alpha, to.gain += share;
}

template <class T, class S>
void pull_chunk(const Sequence<S>& s, Int first, Int n, const S* grad, Int grad_row, const T* fits, const Later& later,
                const Pull<T>& p, Slopes<S>& to) {
    const Int d = s.d, k = s.k;
    copy_rows<T, S>(n, d, s.query + first * s.query_row, s.query_row, nullptr, p.query);
    copy_rows<T, S>(n, d, s.key + first * s.key_row, s.key_row, nullptr, p.key);
    if (k) copy_rows<T, S>(n, k, s.value + first * s.value_row, s.value_row, nullptr, p.value);
    copy_rows<T, S>(n, k ? k : d, grad + first * grad_row, grad_row, nullptr, p.grad);
    solve_chunk<T>(n, d, k, T(s.gain), fits, fits + d * padded<T>(d + k), p);
    sum_chunk<T>(n, d, k, later, p);
    write_slopes<T, S>(s, first, n, p, to);
}

template <class S>
void pull(const Sequence<S>& s, const double* gram, const double* cross, const S* grad, Int grad_row, Arena& scratch,
          const Later& later, Slopes<S>& to) {
    Kept* kept = scratch.take<Kept>(ceil_div(s.n, CHUNK));
    Pull<S> narrow;
    Pull<double> wide;
    narrow.place(scratch, s.d, s.k);
    wide.place(scratch, s.d, s.k);
    run<S>(s, gram, cross, scratch, nullptr, kept);
    for (Int c = ceil_div(s.n, CHUNK) - 1; c >= 0; --c) {
        const Int first = c * CHUNK, n = smaller(CHUNK, s.n - first);
        if (kept[c].wide) {
            pull_chunk<double, S>(s, first, n, grad, grad_row, static_cast<double*>(kept[c].fits), later, wide, to);
        } else {
            pull_chunk<S, S>(s, first, n, grad, grad_row, static_cast<S*>(kept[c].fits), later, narrow, to);
        }
    }
}

// ---- calls ---------------------------------------------------------------------------------------------------------

template <class S>
Sequence<S> sequence_of(const CausalArguments& a, Int b) {
    const auto rows = [b](const CausalTensor& x) { return x.data ? static_cast<const S*>(x.data) + b * x.batch : nullptr; };
    return {a.tokens,
            a.features,
            a.columns,
            rows(a.query),
            rows(a.key),
            rows(a.value),
            a.weight ? static_cast<const S*>(a.weight) + b * a.tokens : nullptr,
            a.query.row,
            a.key.row,
            a.value.row,
            double(static_cast<const S*>(a.alpha)[b]),
            a.gain ? double(static_cast<const S*>(a.gain)[b]) : 1.0};
}

template <class S>
void solve_sequences(const CausalArguments& a, Int from, Int to) {
    const Int d = a.features, k = a.columns, width = k ? k : d;
    Arena memory;
    for (Int b = from; b < to; ++b) {
        memory.reset();
        const double* gram = a.gram ? a.gram + b * d * d : nullptr;
        const double* cross = a.cross ? a.cross + b * d * k : nullptr;
        const Outcome found =
            run<S>(sequence_of<S>(a, b), gram, cross, memory, static_cast<S*>(a.out) + b * a.tokens * width, nullptr);
        a.report[3 * b] = found.wide, a.report[3 * b + 1] = found.ratio, a.report[3 * b + 2] = found.error;
    }
}

template <class S>
void pull_sequences(const CausalArguments& a, Int from, Int to) {
    const Int n = a.tokens, d = a.features, k = a.columns;
    Arena memory;
    const auto part = [](void* x, Int at) { return x ? static_cast<S*>(x) + at : nullptr; };
    for (Int b = from; b < to; ++b) {
        memory.reset();
        const double* gram = a.gram ? a.gram + b * d * d : nullptr;
        const double* cross = a.cross ? a.cross + b * d * k : nullptr;
        Slopes<S> slopes = {part(a.to_query, b * n * d), part(a.to_key, b * n * d), part(a.to_value, b * n * k),
                            part(a.to_weight, b * n), 0, 0};
        const Later later = {a.later_gram + b * d * d, a.later_cross + b * d * k};
        pull<S>(sequence_of<S>(a, b), gram, cross, static_cast<const S*>(a.grad.data) + b * a.grad.batch, a.grad.row,
                memory, later, slopes);
        a.to_alpha[b] = slopes.alpha, a.to_gain[b] = slopes.gain;
    }
}

}  // namespace

int causal_forward(const CausalArguments& a, Int from, Int to) {
    a.is_double ? solve_sequences<double>(a, from, to) : solve_sequences<float>(a, from, to);
    return 0;
}
int causal_backward(const CausalArguments& a, Int from, Int to) {
    a.is_double ? pull_sequences<double>(a, from, to) : pull_sequences<float>(a, from, to);
    return 0;
}

}  // namespace INTENTION_ARCH
