// Products, transposes and factors: what all other kernels call.
#include "factor.h"

namespace INTENTION_ARCH {

INTENTION_PRODUCTS(, float)
INTENTION_PRODUCTS(, double)
INTENTION_FACTORS(, float)
INTENTION_FACTORS(, double)

}  // namespace INTENTION_ARCH
