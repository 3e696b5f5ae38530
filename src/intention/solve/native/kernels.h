// The kernels of one instruction set: elements from <= b < to of a batch.
#pragma once

#include "arguments.h"

#define INTENTION_KERNELS(ARCH)                                                                 \
    namespace ARCH {                                                                            \
    void ridge_forward(const RidgeArguments&, std::int64_t from, std::int64_t to);              \
    }

INTENTION_KERNELS(baseline)
INTENTION_KERNELS(avx2)
INTENTION_KERNELS(avx512)
