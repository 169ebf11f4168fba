// The Newton-Schulz iteration that makes Muon's O of a direction.
//
// Source: torch.optim.Muon. There it runs in bf16. Here it begins with the direction's bf16 values and
// ends with bf16, and is fp32 in between: on a processor bf16 would save nothing. X is the matrix, or
// its transpose if it has more rows than columns, so that X has m rows and n >= m columns:
//
//   norm = sqrt(sum of x * x)                    in double, by rows: each row's, then the rows'
//   X = X / max(fp32(norm), eps)
//   ns_steps times:
//     A[i][j] = sum of X[i][k] * X[j][k]         m x m
//     B[i][j] = ns_b * A[i][j] + ns_c * sum of A[i][k] * A[k][j]
//     X[i][j] = ns_a * X[i][j] + sum of B[i][k] * X[k][j]
//   O = round(X) to bf16, transposed back
//
// Every sum begins with 0, and adds rounded products in the order of k. Denormals are kept.
//
// An element of O that is not finite makes all of the matrix useless.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_NEWTON_SCHULZ_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_NEWTON_SCHULZ_H_

#include <cstdint>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"

namespace ballast {

// The fast version pads rows to a multiple of this.
inline constexpr int64_t kMatrixColumns = 64;
// Its scratch memory for a matrix, in floats.
int64_t NewtonSchulzScratch(int64_t rows, int64_t columns);

// `matrix`: rows x columns values in bf16, in row-major order, which O replaces. The specification;
// kernels/newton_schulz.h has the fast version.
void OrthogonalizeReference(absl::Span<uint16_t> matrix, int64_t rows, int64_t columns,
                            const HyperParameters& values);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_NEWTON_SCHULZ_H_
