// The second round of a step with rules of two rounds: what it does to each matrix.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_UPDATE_SECOND_ROUND_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_UPDATE_SECOND_ROUND_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/state_bounds.h"
#include "cpu_optimizer_service/job/core/job_record.h"
#include "cpu_optimizer_service/job/step/chunk_update.h"

namespace ballast {

// The parameters that the second round updates, ascending.
std::vector<int> MatricesOf(const Layout& layout, const StepUpdate& update);

// A bound of the weights of a matrix after its second round. `weight` and `orthogonal`: the largest
// magnitudes of its weights before, and of O. Unknown if fp32 might not hold them.
double WeightBoundAfter(const HyperParameters& values, const std::vector<int64_t>& shape,
                        double weight, double orthogonal);

// The largest magnitude; infinity also for NaN.
double LargestOf(absl::Span<const uint16_t> bf16);

// What the round updates; once it is decided, without what is left.
StepUpdate SecondUpdateOf(const KeptDirections& directions);

// "the weights of h.0.w and 3 more were left as they were: ..."; empty if none was.
std::string WhatWasLeft(const LayoutSpec& layout, const SecondDecision& decision);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_UPDATE_SECOND_ROUND_H_
