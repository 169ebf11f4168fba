// Scalar conversions between fp32 and the 16-bit formats. They are the specification: every vector
// version equals them bit for bit, except for NaN payloads.
//
// Rounding is to nearest, ties to even, by integer arithmetic on the bits. So the hardware's
// rounding and flushing modes do not matter. A NaN stays a (quiet) NaN of the same sign.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_FLOAT_FORMAT_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_FLOAT_FORMAT_H_

#include <cstddef>
#include <cstdint>

#include "cpu_optimizer_service/common/dtype.h"

namespace ballast {

float BFloat16ToFloat(uint16_t bits);
uint16_t FloatToBFloat16(float value);
float Float16ToFloat(uint16_t bits);
uint16_t FloatToFloat16(float value);  // Values beyond 65504 + half an ulp become infinity.

// Element `index` of an array of `dtype` at `data`, which need not be aligned.
float LoadElement(const void* data, DType dtype, int64_t index);
// Rounds `value` to `dtype` and stores it as element `index` of `data`, which need not be aligned.
void StoreElement(void* data, DType dtype, int64_t index, float value);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_FLOAT_FORMAT_H_
