// The kernels of one instruction set, for the elements from <= b < to of a batch. They return a Status.
#pragma once

#include "arguments.h"
#include "causal.h"
#include "forget.h"

#define INTENTION_KERNELS(ARCH)                                                      \
    namespace ARCH {                                                                 \
    int ridge_forward(const RidgeArguments&, std::int64_t from, std::int64_t to);    \
    int ridge_backward(const RidgeArguments&, std::int64_t from, std::int64_t to);   \
    int causal_forward(const CausalArguments&, std::int64_t from, std::int64_t to);  \
    int causal_backward(const CausalArguments&, std::int64_t from, std::int64_t to); \
    int forget(const ForgetArguments&, const ForgetPlan&, ForgetStage, std::int64_t from, std::int64_t to); \
    int transform_forward(const RidgeArguments&, std::int64_t from, std::int64_t to);  \
    int transform_backward(const RidgeArguments&, std::int64_t from, std::int64_t to); \
    int sigma_forward(const RidgeArguments&, std::int64_t from, std::int64_t to);    \
    int sigma_backward(const RidgeArguments&, std::int64_t from, std::int64_t to);   \
    }

INTENTION_KERNELS(baseline)
INTENTION_KERNELS(avx2)
INTENTION_KERNELS(avx512)
