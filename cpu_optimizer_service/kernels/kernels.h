// The vector versions of the arithmetic in common/: same bits, many elements at a time. Dispatched
// at run time to the best instruction set that the machine has.
//
// All of it is thread-compatible and allocates nothing. Pointers need the alignment of their
// element type only. Each call fixes the floating-point mode (rounding, flushing) for its own
// duration.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_KERNELS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_KERNELS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/packed/packed_state.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/rules/adam.h"
#include "cpu_optimizer_service/common/rules/newton_schulz.h"
#include "cpu_optimizer_service/kernels/redo_lane.h"

namespace ballast {

// UpdateReference, vectorised. With `redo`, of an update in place, each turn is recorded before its
// first store to the planes.
void UpdateByRule(const RuleRun& run, RedoWriter* redo = nullptr);
// The same for Adam, with scalars instead of run.values.
void UpdateAdam(const RuleRun& run, const AdamScalars& scalars, RedoWriter* redo = nullptr);

// UpdatePackedReference, vectorised.
void UpdatePacked(const PackedRun& run, RedoWriter* redo = nullptr);

// sums[b] = BlockSumOfSquaresReference of block b of `gradient`; sums.size() blocks.
void BlockSumsOfSquares(const void* gradient, DType dtype, absl::Span<double> sums);

// accumulator[i] += gradient[i], in fp32; denormals are kept.
void AddGradient(float* accumulator, const void* gradient, DType dtype, int64_t elements);
// accumulator[i] = first[i] + second[i], in fp32; denormals are kept.
void SumGradients(float* accumulator, const void* first, const void* second, DType dtype,
                  int64_t elements);

// to[i] = from[i] in the other format, as StoreElement and LoadElement convert.
void ConvertFromFloat(const float* from, void* to, DType to_dtype, int64_t elements);
void ConvertToFloat(const void* from, DType from_dtype, float* to, int64_t elements);

// The master weights of elements [begin, begin + elements) as they go out, in `dtype`. Of packed state
// bf16 weights are those that are stored; else as ConvertFromFloat.
void ReadWeights(const Slot& slot, int64_t begin, int64_t elements, DType dtype, void* out);

// out = scale * addend + factor * (a * b), in fp32, row-major; without an addend a * b. a has
// `rows` rows and `inner` columns, b `inner` rows, and b, addend and out have `columns` columns, a
// multiple of kMatrixColumns. Each sum begins with 0 and adds rounded products in the order of a's
// columns; denormals are kept. `out` is none of the others.
struct MatrixProduct {
  int64_t rows = 0;
  int64_t inner = 0;
  int64_t columns = 0;
  const float* a = nullptr;
  int64_t a_stride = 0;
  const float* b = nullptr;
  int64_t b_stride = 0;
  const float* addend = nullptr;  // As the next, with out_stride.
  float* out = nullptr;
  int64_t out_stride = 0;
  float scale = 1;
  float factor = 1;
};
void MultiplyMatrices(const MatrixProduct& product);

// Names of the instruction sets that this machine can run, best first ("AVX3", "AVX2", ..., as
// Highway names them), and the one in use.
std::vector<std::string> SupportedKernelTargets();
std::string KernelTarget();
// For tests: uses this one from now on, in all threads; the empty name goes back to the best.
// False if the machine cannot run it.
bool SetKernelTargetForTest(const std::string& name);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_KERNELS_H_
