// The trainer with a model whose backward reaches just the parameters that a test wants, on the
// rank, in the micro-step and in the step that it wants: the steps that the service and the local
// optimizer then take, against AdamW written out in double.
#include "gpu_worker/training/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "cpu_optimizer_service/common/reason.h"
#include "gpu_worker/base/random.h"
#include "gpu_worker/cpu/cpu_backend.h"
#include "tests/gpu_worker/training/model_in_memory.h"
#include "tests/gpu_worker/training/training.h"
#include "tests/support/messages.h"
#include "tests/support/plain_adamw.h"

namespace ballast::worker {
namespace {

struct Pass {
  uint64_t step = 1;
  uint32_t micro_step = 0;
  uint32_t micro_steps = 1;
  int rank = 0;
};
using Reach = std::function<bool(int parameter, const Pass& pass)>;
using MicroSteps = std::function<uint32_t(uint64_t step)>;

// What a pass adds to an element's gradient: a small whole number, so that sums are exact in any
// order, in fp32 and, divided by a power of two, in bf16.
float GradientAt(int parameter, int64_t element, const Pass& pass) {
  return static_cast<float>((parameter * 7 + element * 3 + pass.step) % 5) - 2 + pass.micro_step +
         2 * pass.rank;
}

constexpr int kParameters = 8;
constexpr int kZeroSized = 6;

// Two groups, a block and a half each, one without elements.
std::vector<ModelParameter> Parameters() {
  std::vector<ModelParameter> parameters;
  for (int p = 0; p < kParameters; ++p) {
    parameters.push_back({.name = "p" + std::to_string(p),
                          .shape = {p == kZeroSized ? 0 : 384},
                          .decay = p % 3 != 0});
  }
  return parameters;
}

void InitialValuesOf(int parameter, int64_t offset, absl::Span<float> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = RandomNormal(1, parameter, offset + static_cast<int64_t>(i));
  }
}

class ScriptedModel final : public ModelInMemory {
 public:
  ScriptedModel(Reach reach, MicroSteps micro_steps, int rank)
      : ModelInMemory(kParameters),
        reach_(std::move(reach)),
        micro_steps_(std::move(micro_steps)),
        rank_(rank) {}

  double ForwardBackward(const Batch&, double loss_scale,
                         const std::function<void(int)>& gradient_ready) override {
    pass_.micro_steps = micro_steps_(pass_.step);
    pass_.rank = rank_;
    // What is not reached keeps the values of an earlier pass, if any: it must not be read.
    for (const int p : backward_order()) {
      if (!reach_(p, pass_)) continue;
      const absl::Span<float> gradient = GradientOf(p);
      for (size_t e = 0; e < gradient.size(); ++e) {
        gradient[e] = static_cast<float>(loss_scale) * GradientAt(p, e, pass_);
      }
      gradient_ready(p);
    }
    if (++pass_.micro_step == pass_.micro_steps) pass_ = {.step = pass_.step + 1};
    return 1.0;
  }

 private:
  const Reach reach_;
  const MicroSteps micro_steps_;
  const int rank_;
  Pass pass_;
};

constexpr int kBatch = 4;
constexpr int kContext = 16;

struct Script {
  Reach reach;
  MicroSteps micro_steps = [](uint64_t) { return 3; };
  UnusedPolicy unused_policy = UnusedPolicy::kError;
  Accumulation accumulation = Accumulation::kService;
  DType dtype = DType::kFloat32;
  int world_size = 2;
  uint64_t steps = 5;
};

struct Outcome {
  std::vector<std::vector<float>> weights;  // By parameter, as rank 0 has them.
  std::vector<absl::Status> statuses;       // By rank.
  uint64_t steps = 0;                       // That rank 0 has seen the end of.
};

LearningRateSchedule Schedule(const Script& script) {
  return {.peak = 1e-2, .warmup_steps = 2, .decay_end = script.steps};
}

Outcome Play(const Script& script, const MakeOptimizer& make_optimizer) {
  Outcome outcome;
  outcome.statuses.resize(script.world_size);
  const TokenData data = TokenData::Read(kDefaultText, kContext).value();
  RunRanks(script.world_size, [&](Collective& collective) {
    const TrainingJob job = MakeTrainingJob(Parameters(), {.world_size = script.world_size,
                                                           .micro_steps = 0,
                                                           .wire_dtype = script.dtype,
                                                           .weights_dtype = script.dtype,
                                                           .unused_policy = script.unused_policy,
                                                           .bucket_elements = 512,
                                                           .chunk_elements = 256})
                                .value();
    CpuBackend backend(
        {.accumulation = script.accumulation, .timeout = absl::Seconds(60)},
        std::make_unique<ScriptedModel>(script.reach, script.micro_steps, collective.rank()), job,
        collective);
    const std::unique_ptr<StepOptimizer> optimizer =
        make_optimizer(job, backend, collective).value();
    Trainer trainer({.steps = script.steps,
                     .micro_steps_of_step = script.micro_steps,
                     .batch = kBatch,
                     .context = kContext,
                     .learning_rate = Schedule(script)},
                    {.backend = backend,
                     .data = data,
                     .job = job,
                     .initial_values = InitialValuesOf,
                     .collective = collective,
                     .optimizer = *optimizer});
    absl::Status status = trainer.Join();
    if (status.ok()) {
      status = trainer.Run([&](const StepReport& report) {
        if (collective.rank() == 0) outcome.steps = report.step;
        return absl::OkStatus();
      });
    }
    if (status.ok()) status = collective.Barrier();
    outcome.statuses[collective.rank()] = status;
    if (collective.rank() != 0) return;
    for (int p = 0; p < kParameters; ++p) {
      const ParameterPlace& place = job.layout.place(p);
      const int group = job.layout.spec().parameters[p].group;
      std::vector<std::byte> space(job.layout.flat_elements(group) * SizeBytes(script.dtype));
      ASSERT_TRUE(backend.ReadWeights(group, absl::MakeSpan(space)).ok());
      std::vector<float>& values = outcome.weights.emplace_back(place.elements);
      for (int64_t e = 0; e < place.elements; ++e) {
        values[e] = LoadElement(space.data(), script.dtype, place.offset + e);
      }
    }
  });
  return outcome;
}

std::vector<std::vector<float>> Reference(const Script& script) {
  std::vector<std::vector<float>> weights(kParameters);
  for (int p = 0; p < kParameters; ++p) {
    weights[p].resize(p == kZeroSized ? 0 : 384);
    InitialValuesOf(p, 0, absl::MakeSpan(weights[p]));
    const double weight_decay = Parameters()[p].decay ? 0.1 : 0;
    for (size_t e = 0; e < weights[p].size(); ++e) {
      PlainAdamW element{.weight = weights[p][e],
                         .values = {.beta2 = 0.95, .weight_decay = weight_decay}};
      for (uint64_t step = 1; step <= script.steps; ++step) {
        const uint32_t micro_steps = script.micro_steps(step);
        double sum = 0;
        bool used = false;
        for (uint32_t micro_step = 0; micro_step < micro_steps; ++micro_step) {
          for (int rank = 0; rank < script.world_size; ++rank) {
            const Pass pass{step, micro_step, micro_steps, rank};
            if (!script.reach(p, pass)) continue;
            used = true;
            sum += GradientAt(p, e, pass);
          }
        }
        if (!used && script.unused_policy == UnusedPolicy::kSkip) continue;
        element.values.lr = LearningRate(Schedule(script), step);
        element.Update(sum / (kBatch * kContext * micro_steps));
      }
      weights[p][e] = static_cast<float>(element.weight);
    }
  }
  return weights;
}

void ExpectTrains(const Script& script) {
  Service service;
  const Outcome with_service = Play(script, service.Optimizer());
  const Outcome local = Play(script, MakeLocalOptimizer);
  for (const Outcome* outcome : {&with_service, &local}) {
    for (const absl::Status& status : outcome->statuses) ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(outcome->steps, script.steps);
  }
  EXPECT_EQ(with_service.weights, local.weights);
  if (script.dtype != DType::kFloat32) return;
  const std::vector<std::vector<float>> expected = Reference(script);
  for (int p = 0; p < kParameters; ++p) {
    EXPECT_THAT(with_service.weights[p], testing::Pointwise(testing::FloatNear(2e-5f), expected[p]))
        << "parameter " << p;
  }
}

// Each parameter has a mind of its own; every pass reaches at least one of them.
bool ReachesByItsOwnMind(int parameter, const Pass& pass) {
  switch (parameter) {
    case 0:
      return true;
    case 1:
      return pass.micro_step == 0;
    case 2:
      return pass.micro_step + 1 == pass.micro_steps;
    case 3:
      return pass.rank == 1;
    case 4:  // The heads of two windows, A, B, A, ...
      return pass.step % 2 == 1;
    case 5:
      return pass.step % 2 == 0;
    case kZeroSized:
      return pass.step == 3;
    default:  // Thawed in step 4, on one rank and in one micro-step.
      return pass.step >= 4 && pass.rank == 0 && pass.micro_step == 0;
  }
}

TEST(Trainer, ParametersThatChangeTheirMindAreUpdatedByTheGradientsThatTheyHad) {
  for (const UnusedPolicy policy : {UnusedPolicy::kSkip, UnusedPolicy::kZero}) {
    for (const Accumulation accumulation : {Accumulation::kService, Accumulation::kWorker}) {
      ExpectTrains(
          {.reach = ReachesByItsOwnMind, .unused_policy = policy, .accumulation = accumulation});
    }
  }
}

TEST(Trainer, TheNumberOfMicroStepsMayDifferFromStepToStep) {
  for (const Accumulation accumulation : {Accumulation::kService, Accumulation::kWorker}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      ExpectTrains({.reach = ReachesByItsOwnMind,
                    .micro_steps = [](uint64_t step) { return 1 + step % 3; },
                    .unused_policy = UnusedPolicy::kSkip,
                    .accumulation = accumulation,
                    .dtype = dtype,
                    .world_size = 3,
                    .steps = 6});
    }
  }
}

TEST(Trainer, AParameterThatNoRankReachedRefusesTheSealUnderTheErrorPolicy) {
  Service service;
  const Outcome outcome =
      Play({.reach = [](int p, const Pass& pass) { return p != 4 || pass.step != 2; }},
           service.Optimizer());
  EXPECT_EQ(outcome.steps, 1);
  for (const absl::Status& status : outcome.statuses) {
    EXPECT_TRUE(Refused(status, absl::StatusCode::kFailedPrecondition, reason::kAbortAndRedo));
  }
}

// Hooks that never fire: on one of two ranks, on both, in any micro-step.
TEST(Trainer, ABackwardThatReachesNothingEndsTheRunBeforeTheSeal) {
  for (const Accumulation accumulation : {Accumulation::kService, Accumulation::kWorker}) {
    for (const uint32_t micro_step : {0u, 1u, 2u}) {
      for (const bool both : {false, true}) {
        Service service;
        const Outcome outcome = Play({.reach =
                                          [&](int, const Pass& pass) {
                                            return pass.step != 2 ||
                                                   pass.micro_step != micro_step ||
                                                   (pass.rank == 0 && !both);
                                          },
                                      .accumulation = accumulation},
                                     service.Optimizer());
        EXPECT_EQ(outcome.steps, 1);
        EXPECT_EQ(service.job()->Status().committed_step, 1);
        for (int rank = 0; rank < 2; ++rank) {
          const absl::Status& status = outcome.statuses[rank];
          if (rank == 0 && !both) {  // Told by the loss of its peer, at once.
            EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
            continue;
          }
          EXPECT_TRUE(Refused(status, absl::StatusCode::kFailedPrecondition));
        }
      }
    }
  }
}

}  // namespace
}  // namespace ballast::worker
