// UpdateByRule for numpy_adam_test.py. Without arguments: names the instruction sets, one a line.
// With one of them: reads updates from standard input until it ends and writes their results to
// standard output.
//
// An update is a Header, the gradient, and the planes master, exp_avg, exp_avg_sq, max_exp_avg_sq;
// a result is the new planes (max_exp_avg_sq only with amsgrad) and the shard. Little-endian.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {
namespace {

struct Header {
  double lr, beta1, beta2, eps, weight_decay;
  uint8_t decoupled_weight_decay, bias_correction, amsgrad, maximize;
  uint8_t gradient_dtype, shard_dtype;
  uint8_t unused[2];
  int64_t update_count, elements;
  float multiplier;
  uint8_t unused_too[4];
};
static_assert(sizeof(Header) == 72);

template <typename T>
bool Read(std::vector<T>& values) {
  return std::fread(values.data(), sizeof(T), values.size(), stdin) == values.size();
}

template <typename T>
void Write(const std::vector<T>& values) {
  std::fwrite(values.data(), sizeof(T), values.size(), stdout);
}

// False if the input ends within the update.
bool RunOne(const Header& header) {
  const auto elements = static_cast<size_t>(header.elements);
  const auto gradient_dtype = static_cast<DType>(header.gradient_dtype);
  const auto shard_dtype = static_cast<DType>(header.shard_dtype);
  std::vector<char> gradient(elements * static_cast<size_t>(SizeBytes(gradient_dtype)));
  std::vector<float> master(elements), exp_avg(elements), exp_avg_sq(elements), largest(elements);
  std::vector<char> shard(elements * static_cast<size_t>(SizeBytes(shard_dtype)));
  if (!Read(gradient) || !Read(master) || !Read(exp_avg) || !Read(exp_avg_sq) || !Read(largest)) {
    return false;
  }
  const HyperParameters values = {.lr = header.lr,
                                  .beta1 = header.beta1,
                                  .beta2 = header.beta2,
                                  .eps = header.eps,
                                  .weight_decay = header.weight_decay,
                                  .decoupled_weight_decay = header.decoupled_weight_decay != 0,
                                  .bias_correction = header.bias_correction != 0,
                                  .amsgrad = header.amsgrad != 0,
                                  .maximize = header.maximize != 0};
  float* const max_exp_avg_sq = values.amsgrad ? largest.data() : nullptr;
  RuleRun run = {.elements = header.elements,
                 .gradient = gradient.data(),
                 .gradient_dtype = gradient_dtype,
                 .from = {master.data(), exp_avg.data(), exp_avg_sq.data(), max_exp_avg_sq},
                 .shard = shard.data(),
                 .shard_dtype = shard_dtype,
                 .values = &values,
                 .update_count = header.update_count,
                 .multiplier = header.multiplier};
  run.to = {master.data(), exp_avg.data(), exp_avg_sq.data(), max_exp_avg_sq};
  UpdateByRule(run);
  Write(master);
  Write(exp_avg);
  Write(exp_avg_sq);
  if (values.amsgrad) Write(largest);
  Write(shard);
  return true;
}

int Main(int argc, char** argv) {
  if (argc == 1) {
    for (const std::string& target : SupportedKernelTargets()) std::puts(target.c_str());
    return 0;
  }
  if (!SetKernelTargetForTest(argv[1])) {
    std::fprintf(stderr, "run_adam: this machine cannot run %s\n", argv[1]);
    return 1;
  }
  std::vector<Header> header(1);
  while (Read(header)) {
    if (!RunOne(header[0])) {
      std::fprintf(stderr, "run_adam: the input ends within an update\n");
      return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace ballast

int main(int argc, char** argv) { return ballast::Main(argc, argv); }
