// The number formats of sent gradients and weight shards.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_DTYPE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_DTYPE_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace ballast {

enum class DType : uint8_t { kBFloat16, kFloat16, kFloat32 };

inline constexpr int64_t SizeBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// "bf16", "fp16" or "fp32".
inline constexpr absl::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat16:
      return "fp16";
    case DType::kFloat32:
      return "fp32";
  }
  return "unknown";
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_DTYPE_H_
