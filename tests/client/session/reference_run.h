// The training that a service should have done, by the scalar specification, on whole flat spaces.
// Gradients and first weights are functions of step, micro-step, group and element, so they do not
// depend on the world size.
#ifndef BALLAST_TESTS_CLIENT_SESSION_REFERENCE_RUN_H_
#define BALLAST_TESTS_CLIENT_SESSION_REFERENCE_RUN_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/norm/exact_sum.h"
#include "cpu_optimizer_service/common/rules/adam.h"
#include "tests/client/job_for_tests.h"
#include "tests/support/block_sums.h"

namespace ballast::client {

// In (-1, 1), from the bits of its arguments.
inline float Random(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  uint64_t x = a * 0x9e3779b97f4a7c15 + b * 0xbf58476d1ce4e5b9 + c * 0x94d049bb133111eb + d;
  for (int i = 0; i < 3; ++i) x = (x ^ (x >> 29)) * 0xd6e8feb86659fd93;
  return static_cast<float>(static_cast<int64_t>(x) >> 40) / static_cast<float>(1 << 23);
}

inline float FirstWeight(const Layout& layout, int group, int64_t element) {
  if (layout.ParameterAt(group, element) < 0) return 0;  // Padding.
  return Random(0, 0, static_cast<uint64_t>(group), static_cast<uint64_t>(element));
}

inline float Gradient(const Layout& layout, uint64_t step, uint32_t micro_step, int group,
                      int64_t element) {
  if (layout.ParameterAt(group, element) < 0) return 0;
  return Random(step, micro_step + 1, static_cast<uint64_t>(group), static_cast<uint64_t>(element));
}

// Elements [begin, end) of a micro-step's gradient, in the wire dtype.
inline std::string GradientBytes(const JobSpec& job, const Layout& layout, uint64_t step,
                                 uint32_t micro_step, const Chunk& chunk) {
  const DType dtype = job.groups[chunk.group].wire_dtype;
  std::string bytes(chunk.elements * SizeBytes(dtype), '\0');
  for (int64_t i = 0; i < chunk.elements; ++i) {
    StoreElement(bytes.data(), dtype, i,
                 Gradient(layout, step, micro_step, chunk.group, chunk.begin + i));
  }
  return bytes;
}

class ReferenceRun {
 public:
  explicit ReferenceRun(const JobSpec& job)
      : job_(job), layout_(Layout::Create(job.layout).value()) {
    for (int group = 0; group < layout_.group_count(); ++group) {
      const int64_t elements = layout_.flat_elements(group);
      Flat flat;
      for (int64_t i = 0; i < elements; ++i) flat.master.push_back(FirstWeight(layout_, group, i));
      flat.exp_avg.assign(elements, 0);
      flat.exp_avg_sq.assign(elements, 0);
      flat.weights.resize(elements * SizeBytes(job.groups[group].return_dtype));
      for (int64_t i = 0; i < elements; ++i) {
        StoreElement(flat.weights.data(), job.groups[group].return_dtype, i, flat.master[i]);
      }
      flats_.push_back(std::move(flat));
    }
  }

  Decision Step(uint64_t step, uint32_t micro_steps, const GradientScale& scale) {
    std::vector<std::vector<float>> sums;
    std::vector<double> group_sums;
    for (int group = 0; group < layout_.group_count(); ++group) {
      sums.push_back(SumOfMicroSteps(step, micro_steps, group));
      ExactSum sum;
      for (const int parameter : layout_.parameters_of_group(group)) {
        const ParameterPlace& place = layout_.place(parameter);
        AddBlocks(absl::MakeConstSpan(sums.back()).subspan(place.offset, place.elements), sum);
      }
      group_sums.push_back(sum.Rounded());
    }
    const Decision decision = Decide(group_sums, scale, SmallVote().clipping);
    if (!decision.apply) return decision;
    ++updates_;
    for (int group = 0; group < layout_.group_count(); ++group) {
      Update(group, sums[group], decision.multipliers[group]);
    }
    return decision;
  }

  // The weights of a chunk in the return dtype.
  std::string Weights(const Chunk& chunk) const {
    const int64_t size = SizeBytes(job_.groups[chunk.group].return_dtype);
    return flats_[chunk.group].weights.substr(chunk.begin * size, chunk.elements * size);
  }
  HyperParameters& hyper_parameters(int group) { return job_.groups[group].hyper_parameters; }

 private:
  struct Flat {
    std::vector<float> master;
    std::vector<float> exp_avg;
    std::vector<float> exp_avg_sq;
    std::string weights;
  };

  std::vector<float> SumOfMicroSteps(uint64_t step, uint32_t micro_steps, int group) const {
    const DType dtype = job_.groups[group].wire_dtype;
    std::vector<float> sum(layout_.flat_elements(group));
    for (size_t i = 0; i < sum.size(); ++i) {
      for (uint32_t m = 0; m < micro_steps; ++m) {
        char wire[4];
        StoreElement(wire, dtype, 0, Gradient(layout_, step, m, group, static_cast<int64_t>(i)));
        const float value = LoadElement(wire, dtype, 0);
        sum[i] = m == 0 ? value : sum[i] + value;
      }
    }
    return sum;
  }

  void Update(int group, const std::vector<float>& gradient, float multiplier) {
    Flat& flat = flats_[group];
    AdamRun run{};
    run.elements = layout_.flat_elements(group);
    run.gradient = gradient.data();
    run.gradient_dtype = DType::kFloat32;
    run.new_master = flat.master.data();
    run.master = run.new_master;
    run.new_exp_avg = flat.exp_avg.data();
    run.exp_avg = run.new_exp_avg;
    run.new_exp_avg_sq = flat.exp_avg_sq.data();
    run.exp_avg_sq = run.new_exp_avg_sq;
    run.shard = flat.weights.data();
    run.shard_dtype = job_.groups[group].return_dtype;
    run.scalars = MakeAdamScalars(job_.groups[group].hyper_parameters, updates_, multiplier);
    UpdateAdamReference(run);
  }

  JobSpec job_;
  const Layout layout_;
  std::vector<Flat> flats_;
  int64_t updates_ = 0;
};

}  // namespace ballast::client

#endif  // BALLAST_TESTS_CLIENT_SESSION_REFERENCE_RUN_H_
