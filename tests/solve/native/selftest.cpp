// The library's functions against plain loops in double: for processors where there is no torch to compare with.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "arguments.h"
#include "causal.h"
#include "forget.h"

extern "C" {
int intention_native_abi(void);
const char* intention_native_arch(void);
int intention_ridge_forward(const RidgeArguments*);
int intention_ridge_backward(const RidgeArguments*);
int intention_sigma_forward(const RidgeArguments*);
int intention_causal_forward(const CausalArguments*);
int intention_causal_backward(const CausalArguments*);
int intention_forget_forward(const ForgetArguments*);
int intention_forget_backward(const ForgetArguments*);
}

using std::int64_t;
using Numbers = std::vector<double>;

// ---- plain loops ----

struct Matrix {
    int64_t rows, columns;
    Numbers x;
    Matrix(int64_t rows, int64_t columns) : rows(rows), columns(columns), x(std::size_t(rows * columns)) {}
    double& operator()(int64_t i, int64_t j) { return x[std::size_t(i * columns + j)]; }
    double operator()(int64_t i, int64_t j) const { return x[std::size_t(i * columns + j)]; }
};

Matrix turned(const Matrix& a) {
    Matrix t(a.columns, a.rows);
    for (int64_t i = 0; i < a.rows; ++i)
        for (int64_t j = 0; j < a.columns; ++j) t(j, i) = a(i, j);
    return t;
}
Matrix product(const Matrix& a, const Matrix& b) {
    Matrix c(a.rows, b.columns);
    for (int64_t i = 0; i < a.rows; ++i)
        for (int64_t l = 0; l < a.columns; ++l)
            for (int64_t j = 0; j < b.columns; ++j) c(i, j) += a(i, l) * b(l, j);
    return c;
}
Matrix difference(Matrix a, const Matrix& b) {
    for (std::size_t i = 0; i < a.x.size(); ++i) a.x[i] -= b.x[i];
    return a;
}
// (K'K + alpha I)^-1 B by Gauss and Jordan; positive definite, so without pivots
Matrix solved(const Matrix& key, double alpha, Matrix b) {
    Matrix s = product(turned(key), key);
    for (int64_t i = 0; i < s.rows; ++i) s(i, i) += alpha;
    for (int64_t p = 0; p < s.rows; ++p) {
        const double by = 1 / s(p, p);
        for (int64_t j = 0; j < s.columns; ++j) s(p, j) *= by;
        for (int64_t j = 0; j < b.columns; ++j) b(p, j) *= by;
        for (int64_t i = 0; i < s.rows; ++i) {
            const double f = s(i, p);
            if (i == p || f == 0) continue;
            for (int64_t j = 0; j < s.columns; ++j) s(i, j) -= f * s(p, j);
            for (int64_t j = 0; j < b.columns; ++j) b(i, j) -= f * b(p, j);
        }
    }
    return b;
}
Matrix first_rows(const Matrix& a, int64_t rows) {
    Matrix part(rows, a.columns);
    std::memcpy(part.x.data(), a.x.data(), part.x.size() * sizeof(double));
    return part;
}

// ---- comparing ----

int failures = 0, checks = 0;

template <class T>
void compare(const char* what, const std::vector<T>& got, const Numbers& want, const char* of) {
    double off = 0, size = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
        off += (double(got[i]) - want[i]) * (double(got[i]) - want[i]);
        size += want[i] * want[i];
    }
    const double error = std::sqrt(off / size), allowed = sizeof(T) == 4 ? 1e-4 : 1e-11;
    ++checks;
    if (error < allowed) return;  // a NaN is not
    ++failures;
    std::printf("%s of %s, %zu bytes: relative error %g\n", what, of, sizeof(T), error);
}

double uniform() {
    static unsigned long long state = 1;
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return double(state >> 11) / double(1ull << 53) * 2 - 1;
}

template <class T>
struct Batch {  // rounded to T, and the same numbers in double
    int64_t count, rows, columns;
    std::vector<T> data;
    Batch(int64_t count, int64_t rows, int64_t columns)
        : count(count), rows(rows), columns(columns), data(std::size_t(count * rows * columns)) {}
    Batch& random() {
        for (T& x : data) x = T(uniform());
        return *this;
    }
    Matrix element(int64_t b) const {
        Matrix m(rows, columns);
        for (std::size_t i = 0; i < m.x.size(); ++i) m.x[i] = double(data[std::size_t(b) * m.x.size() + i]);
        return m;
    }
    Tensor tensor() const { return {data.data(), rows * columns, 0, columns}; }
    CausalTensor tokens() const { return {data.data(), rows * columns, columns}; }
};

void append(Numbers& to, const Matrix& from) { to.insert(to.end(), from.x.begin(), from.x.end()); }

struct Size {
    int64_t batch, n, m, d, k;
};

template <class T>
RidgeArguments arguments(const Size& s, const Batch<T>& query, const Batch<T>& key, const Batch<T>& value, const T* alpha) {
    RidgeArguments a;
    std::memset(&a, 0, sizeof a);
    a.is_double = sizeof(T) == 8, a.threads = 2, a.batch = s.batch, a.inner = a.times = 1;
    a.points = s.n, a.queries = s.m, a.features = s.d, a.columns = s.k;
    a.scale = 1, a.easy = 1e30, a.hard = 1e30, a.step = 1;
    a.query = query.tensor(), a.key = key.tensor(), a.value = value.tensor();
    a.alpha = {alpha, 1};
    return a;
}

template <class T>
void ridge(const Size& s, bool dual, bool inverse) {
    char name[99];
    std::snprintf(name, sizeof name, "ridge %lld %lld %lld %lld %lld dual %d inverse %d", (long long)s.batch, (long long)s.n,
                  (long long)s.m, (long long)s.d, (long long)s.k, dual, inverse);
    Batch<T> query(s.batch, s.m, s.d), key(s.batch, s.n, s.d), value(s.batch, s.n, s.k), grad(s.batch, s.m, s.k);
    query.random(), key.random(), value.random(), grad.random();
    const std::vector<T> alpha(std::size_t(s.batch), T(0.75));
    const int64_t size = dual ? s.n : s.d;
    std::vector<T> out(grad.data.size()), report(std::size_t(3 * s.batch)), coef(std::size_t(s.batch * size * s.k)),
        matrix(std::size_t(s.batch * size * size));
    RidgeArguments a = arguments(s, query, key, value, alpha.data());
    a.dual = dual, a.inverse = inverse, a.coef = coef.data(), a.matrix = matrix.data();
    a.forward.out = out.data(), a.forward.report = report.data();
    if (intention_ridge_forward(&a) != PLAIN) ++failures, std::printf("%s: not plain\n", name);

    std::vector<T> to_query(query.data.size()), to_key(key.data.size()), to_value(value.data.size()),
        to_alpha(alpha.size()), terms(alpha.size());
    std::memset(&a.forward, 0, sizeof a.forward);
    std::memset(&a.backward, 0, sizeof a.backward);
    a.backward.route = {report.data(), 3}, a.backward.grad = grad.tensor();
    a.backward.query = to_query.data(), a.backward.key = to_key.data(), a.backward.value = to_value.data();
    a.backward.alpha = to_alpha.data(), a.backward.alpha_terms = terms.data();
    intention_ridge_backward(&a);

    Numbers out_want, query_want, key_want, value_want, alpha_want;
    for (int64_t b = 0; b < s.batch; ++b) {
        const Matrix q = query.element(b), k = key.element(b), v = value.element(b), g = grad.element(b);
        const Matrix w = solved(k, 0.75, product(turned(k), v)), z = solved(k, 0.75, product(turned(q), g));
        const Matrix off = difference(v, product(k, w)), seen = product(k, z);
        append(out_want, product(q, w));
        append(query_want, product(g, turned(w)));
        append(key_want, difference(product(off, turned(z)), product(seen, turned(w))));
        append(value_want, seen);
        double sum = 0;
        for (std::size_t i = 0; i < w.x.size(); ++i) sum -= w.x[i] * z.x[i];
        alpha_want.push_back(sum);
    }
    compare("answer", out, out_want, name);
    compare("gradient of the queries", to_query, query_want, name);
    compare("gradient of the keys", to_key, key_want, name);
    compare("gradient of the values", to_value, value_want, name);
    compare("gradient of alpha", to_alpha, alpha_want, name);
}

template <class T>
void sigma(const Size& s) {
    Batch<T> query(s.batch, s.m, s.d), key(s.batch, s.n, s.d), value(s.batch, s.n, s.k);
    query.random(), key.random(), value.random();
    const std::vector<T> alpha(std::size_t(s.batch), T(0.75));
    const bool dual = s.n < s.d;
    const int64_t size = dual ? s.n : s.d;
    std::vector<T> out(std::size_t(s.batch * s.m * s.k)), report(std::size_t(3 * s.batch)),
        kept(std::size_t(s.batch * 2 * s.m)), matrix(std::size_t(s.batch * size * size));
    RidgeArguments a = arguments(s, query, key, value, alpha.data());
    a.dual = dual, a.inverse = 4 * (s.m - 16) >= size, a.coef = kept.data(), a.matrix = matrix.data();
    a.forward.out = out.data(), a.forward.report = report.data();
    if (intention_sigma_forward(&a) == SOME_LEFT) ++failures, std::printf("sigma: left\n");
    Numbers want;
    for (int64_t b = 0; b < s.batch; ++b) {
        const Matrix q = query.element(b), k = key.element(b);
        Matrix shares = product(q, solved(k, 0.75, turned(k)));
        for (int64_t i = 0; i < s.m; ++i) {
            double sum = 0;
            for (int64_t j = 0; j < s.n; ++j) sum += shares(i, j) = std::exp(shares(i, j));
            for (int64_t j = 0; j < s.n; ++j) shares(i, j) /= sum;
        }
        append(want, product(shares, value.element(b)));
    }
    compare("answer", out, want, dual ? "sigma, fewer points than features" : "sigma");
}

// Answers, and gradients of queries and values, of fits in which a token counts `decay` times less with every later one.
template <class T>
void compare_causal(const char* what, double decay, const Batch<T>& query, const Batch<T>& key, const Batch<T>& value,
                    const Batch<T>& grad, const std::vector<T>& out, const std::vector<T>& to_query,
                    const std::vector<T>& to_value) {
    Numbers out_want, query_want, value_want;
    for (int64_t b = 0; b < query.count; ++b) {
        const Matrix q = query.element(b), all = key.element(b), v = value.element(b), g = grad.element(b);
        const int64_t n = q.rows, d = q.columns, k = v.columns;
        Matrix answer(n, k), slope(n, d), pulled(n, k);
        for (int64_t t = 0; t < n; ++t) {  // token t fits tokens up to itself
            Matrix seen = first_rows(all, t + 1), told = first_rows(v, t + 1);
            Numbers root(std::size_t(t + 1));
            for (int64_t s = 0; s <= t; ++s) {
                root[std::size_t(s)] = std::pow(decay, 0.5 * double(t - s));
                for (int64_t i = 0; i < d; ++i) seen(s, i) *= root[std::size_t(s)];
                for (int64_t j = 0; j < k; ++j) told(s, j) *= root[std::size_t(s)];
            }
            const Matrix w = solved(seen, 0.75, product(turned(seen), told));
            Matrix column(d, 1);
            for (int64_t i = 0; i < d; ++i) column(i, 0) = q(t, i);
            const Matrix shares = product(seen, solved(seen, 0.75, column));
            for (int64_t j = 0; j < k; ++j) {
                for (int64_t i = 0; i < d; ++i) answer(t, j) += q(t, i) * w(i, j), slope(t, i) += g(t, j) * w(i, j);
                for (int64_t s = 0; s <= t; ++s) pulled(s, j) += root[std::size_t(s)] * shares(s, 0) * g(t, j);
            }
        }
        append(out_want, answer), append(query_want, slope), append(value_want, pulled);
    }
    compare("answer", out, out_want, what);
    compare("gradient of the queries", to_query, query_want, what);
    compare("gradient of the values", to_value, value_want, what);
}

template <class T>
void causal(int64_t batch, int64_t n, int64_t d, int64_t k) {
    Batch<T> query(batch, n, d), key(batch, n, d), value(batch, n, k), grad(batch, n, k);
    query.random(), key.random(), value.random(), grad.random();
    const std::vector<T> alpha(std::size_t(batch), T(0.75));
    std::vector<T> out(grad.data.size()), report(std::size_t(3 * batch)), to_query(query.data.size()),
        to_key(key.data.size()), to_value(value.data.size());
    Numbers to_alpha(alpha.size()), to_gain(alpha.size()), gram(std::size_t(batch * d * d)), cross(std::size_t(batch * d * k));
    CausalArguments a;
    std::memset(&a, 0, sizeof a);
    a.is_double = sizeof(T) == 8, a.threads = 2, a.batch = batch, a.tokens = n, a.features = d, a.columns = k;
    a.query = query.tokens(), a.key = key.tokens(), a.value = value.tokens(), a.alpha = alpha.data();
    a.out = out.data(), a.report = report.data(), a.largest = a.worst = 1e30;
    if (intention_causal_forward(&a) != PLAIN) ++failures, std::printf("causal: left\n");
    a.grad = grad.tokens(), a.to_query = to_query.data(), a.to_key = to_key.data(), a.to_value = to_value.data();
    a.to_alpha = to_alpha.data(), a.to_gain = to_gain.data(), a.later_gram = gram.data(), a.later_cross = cross.data();
    intention_causal_backward(&a);
    compare_causal<T>("causal", 1, query, key, value, grad, out, to_query, to_value);
}

template <class T>
void forgetting(int64_t batch, int64_t n, int64_t d, int64_t k, double fade) {
    Batch<T> query(batch, n, d), key(batch, n, d), value(batch, n, k), grad(batch, n, k);
    query.random(), key.random(), value.random(), grad.random();
    const std::vector<T> alpha(std::size_t(batch), T(0.75)), decay(std::size_t(batch * n), T(fade));
    std::vector<T> out(grad.data.size()), report(std::size_t(3 * batch)), to_query(query.data.size()),
        to_key(key.data.size()), to_value(value.data.size()), to_decay(decay.size()), to_alpha(decay.size());
    ForgetArguments a;
    std::memset(&a, 0, sizeof a);
    a.is_double = sizeof(T) == 8, a.threads = 2, a.batch = batch, a.tokens = n, a.features = d, a.columns = k;
    a.query = query.tokens(), a.key = key.tokens(), a.value = value.tokens(), a.grad = grad.tokens();
    a.alpha = alpha.data(), a.alpha_batch = 1, a.decay = decay.data(), a.easy = 1e-5, a.easy_slopes = 4e-5;
    a.out = out.data(), a.report = report.data(), a.to_query = to_query.data(), a.to_key = to_key.data();
    a.to_value = to_value.data(), a.to_decay = to_decay.data(), a.to_alpha = to_alpha.data();
    intention_forget_forward(&a);
    intention_forget_backward(&a);
    compare_causal<T>("forgetting", double(T(fade)), query, key, value, grad, out, to_query, to_value);
}

template <class T>
void all() {
    for (const Size& s : {Size{37, 7, 5, 3, 2}, Size{3, 41, 19, 23, 5}, Size{2, 11, 13, 29, 31}, Size{5, 1, 1, 1, 1}})
        for (bool dual : {false, true})
            for (bool inverse : {false, true}) ridge<T>(s, dual, inverse);
    sigma<T>({3, 41, 19, 23, 5});
    sigma<T>({2, 11, 67, 29, 7});
    causal<T>(2, 71, 13, 3);
    forgetting<T>(2, 71, 13, 3, 0.9);
    forgetting<T>(1, 200, 6, 5, 0.5);  // in parts
}

int main() {
    all<float>();
    all<double>();
    std::printf("interface %d, %s: %d of %d comparisons failed\n", intention_native_abi(), intention_native_arch(), failures,
                checks);
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
