// What Python hands over: one block of 8-byte numbers per call. The order is that of the formats in call.py.
#pragma once

#include <cstdint>

struct Tensor {  // (outer, inner, rows, columns) with columns side by side
    const void* data;
    std::int64_t outer, inner, row;
};

struct PerElement {  // (batch,) or None
    const void* data;
    std::int64_t step;
};

struct RidgeArguments {
    std::int64_t is_double, threads;
    std::int64_t batch, inner;                      // batch = outer * inner
    std::int64_t times;                             // neighbours that share keys and values
    std::int64_t points, queries, features, columns;  // N, M, d, k
    std::int64_t dual, intercept, inverse;
    double scale;
    double easy, hard, step;  // what a factor is judged by, as in factor.py
    Tensor query, key, value;
    PerElement weight;  // (batch, N), step between rows
    PerElement alpha, gain;
    PerElement keep;      // (batch, N) bytes, step between rows: 0 where a point is not there, whatever it holds
    void *coef, *matrix;  // outputs of the forward, inputs of the backward
    union {
        struct {
            void *out, *report;  // (batch, M, k); (batch, 3): route, ratio, error, or null
        } forward;
        struct {
            PerElement route;
            const void* out;  // (batch, M, k): the answer, for those who want it
            Tensor grad;
            void *query, *key, *value, *weight, *alpha, *alpha_terms, *gain;
        } backward;
    };
};

enum Route { PRIMAL, DUAL, REFINED, FLOAT64 };  // as in ladder.py

// How a forward ended, for the whole batch; the worst of its elements.
enum Status { PLAIN, SOME_REFINED, SOME_LEFT };
