// The jobs that the load generator trains: their description, first weights and gradients, all from
// its options and a seed, so that two runs over different transports end with the same bits.
#ifndef BALLAST_TESTS_BENCH_LOAD_LOAD_JOB_H_
#define BALLAST_TESTS_BENCH_LOAD_LOAD_JOB_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "tests/bench/load/load_options.h"

namespace ballast::bench {

// Tensors of equal size, dealt to the groups in turn; bf16 both ways; whole chunks wherever the
// model has so much.
JobSpec MakeLoadJob(const LoadOptions& options, const std::string& name);

// What all ranks vote.
StepVote LoadVote(const LoadOptions& options);

// What step `step`, from 0, divides gradients by: another number than the step before, so that a
// step's gradient that was lost, late or counted twice shows in the weights.
GradientScale LoadScale(const JobSpec& spec, uint64_t step);

// What a rank sends and begins with. Constant, and so thread-safe.
class LoadValues {
 public:
  // `layout` is borrowed.
  LoadValues(const Layout& layout, uint64_t seed) : layout_(&layout), seed_(seed) {}

  // Every step and micro-step has the same gradient, before it is divided. In the wire dtype, zeros
  // in the padding.
  void FillGradient(int chunk, absl::Span<std::byte> out) const;
  void FillWeights(int chunk, absl::Span<float> out) const;

 private:
  // set(element, a number of its own) for the chunk's elements, without padding.
  template <class Set>
  void ForEach(int chunk, uint64_t seed, const Set& set) const;

  const Layout* layout_;
  const uint64_t seed_;
};

}  // namespace ballast::bench

#endif  // BALLAST_TESTS_BENCH_LOAD_LOAD_JOB_H_
