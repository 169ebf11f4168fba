#include "gpu_worker/cpu/cpu_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/float_format.h"
#include "tests/gpu_worker/collective/ranks.h"
#include "tests/gpu_worker/training/model_in_memory.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

constexpr int kParameters = 4;
constexpr int64_t kElements = 640;  // Two blocks and a half.

// Whole numbers, so that sums are exact in bf16 too.
float GradientAt(int parameter, int64_t element, int rank, int pass) {
  return static_cast<float>((3 * parameter + element) % 7 + rank + 2 * pass);
}

// Which parameters a rank's pass reaches, counted from the first of the run.
using Reaches = std::function<bool(int parameter, int pass)>;

// Backward goes from the last parameter to the first.
class PlainModel final : public ModelInMemory {
 public:
  PlainModel(int rank, Reaches reaches, float spoilt)
      : ModelInMemory(kParameters), rank_(rank), reaches_(std::move(reaches)), spoilt_(spoilt) {}

  double ForwardBackward(const Batch&, double,
                         const std::function<void(int)>& gradient_ready) override {
    for (const int p : backward_order()) {
      if (reaches_ && !reaches_(p, passes_)) continue;
      const absl::Span<float> gradient = GradientOf(p);
      for (size_t e = 0; e < gradient.size(); ++e) gradient[e] = GradientAt(p, e, rank_, passes_);
      if (p == 2) gradient[5] += spoilt_;
      gradient_ready(p);
    }
    ++passes_;
    return 1.5;
  }

 private:
  const int rank_;
  const Reaches reaches_;
  const float spoilt_;  // Added to an element of p2.
  int passes_ = 0;
};

TrainingJob JobOf(int world_size) {
  std::vector<ModelParameter> parameters;
  for (int p = 0; p < kParameters; ++p) {
    parameters.push_back(
        {.name = "p" + std::to_string(p), .shape = {kElements}, .decay = p % 2 == 0});
  }
  return MakeTrainingJob(parameters,
                         {.world_size = world_size, .bucket_elements = 1024, .chunk_elements = 256})
      .value();
}

struct Pushed {
  int chunk = 0;
  uint32_t begin = 0;
  uint32_t end = 0;
  bool final = false;
  const std::byte* at = nullptr;
  std::vector<float> values;
};

struct Settings {
  CpuBackendOptions options = {};
  Reaches reaches = nullptr;  // Null: all.
  float spoilt = 0;
};

// One rank: its backend, and the sink, which keeps what arrives and returns what it was given.
class Rank final : public GradientSink {
 public:
  explicit Rank(Collective& collective, const Settings& settings = {})
      : job_(JobOf(collective.world_size())),
        collective_(collective),
        backend_(settings.options,
                 std::make_unique<PlainModel>(collective.rank(), settings.reaches, settings.spoilt),
                 job_, collective) {
    backend_.Start(*this);
  }

  absl::Status Push(client::GradientPush push) override {
    ++calls_;
    Keep(push);
    push.released();
    return answer_to_push_;
  }
  absl::Status EndMicroStep(uint32_t micro_step, const UsedParameters& used) override {
    ++calls_;
    ended_after_[micro_step] = pushed_.size();
    used_ = used;
    return answer_to_end_;
  }

  absl::Status MicroStep(uint32_t micro_step, uint32_t of) {
    return backend_.MicroStep(
        {.step = 1, .micro_step = micro_step, .micro_steps = of, .batch = batch_});
  }
  // All micro-steps of a step, as the trainer goes through them: the first error ends them.
  absl::Status MicroSteps(uint32_t of) {
    absl::Status status;
    for (uint32_t m = 0; m < of && status.ok(); ++m) status = MicroStep(m, of);
    return status;
  }
  void AnswerPushes(absl::Status status) { answer_to_push_ = std::move(status); }
  void AnswerEnds(absl::Status status) { answer_to_end_ = std::move(status); }

  // The sum over ranks of what their passes [begin, end) gave an element of the chunk.
  float Expected(int chunk_index, int64_t element, int begin, int end) const {
    const Chunk& chunk = job_.layout.chunks()[chunk_index];
    for (int p = 0; p < kParameters; ++p) {
      const int64_t in_parameter = chunk.begin + element - job_.layout.place(p).offset;
      if (job_.layout.spec().parameters[p].group != chunk.group || in_parameter < 0 ||
          in_parameter >= kElements) {
        continue;
      }
      float sum = 0;
      for (int pass = begin; pass < end; ++pass) {
        for (int rank = 0; rank < collective_.world_size(); ++rank) {
          sum += GradientAt(p, in_parameter, rank, pass);
        }
      }
      return sum;
    }
    return 0;  // Padding.
  }
  void ExpectRight(const Pushed& pushed) const {
    for (size_t e = 0; e < pushed.values.size(); ++e) {
      ASSERT_EQ(pushed.values[e], Expected(pushed.chunk, e, pushed.begin, pushed.end))
          << "chunk " << pushed.chunk << " element " << e;
    }
  }

  CpuBackend& backend() { return backend_; }
  const TrainingJob& job() const { return job_; }
  absl::Span<const int> my_chunks() const { return job_.layout.chunks_of_rank(collective_.rank()); }
  const std::vector<Pushed>& pushed() const { return pushed_; }
  size_t pushed_before_end_of(uint32_t micro_step) { return ended_after_.at(micro_step); }
  const UsedParameters& used() const { return used_; }
  int calls() const { return calls_; }

 private:
  void Keep(const client::GradientPush& push) {
    Pushed& kept = pushed_.emplace_back(Pushed{.chunk = push.chunk,
                                               .begin = push.micro_step_begin,
                                               .end = push.micro_step_end,
                                               .final = push.final,
                                               .at = push.payload.data(),
                                               .values = {}});
    for (int64_t e = 0; e < job_.layout.chunks()[push.chunk].elements; ++e) {
      kept.values.push_back(LoadElement(push.payload.data(), DType::kBFloat16, e));
    }
  }

  const TrainingJob job_;
  Collective& collective_;
  const Batch batch_;
  absl::Status answer_to_push_;
  absl::Status answer_to_end_;
  int calls_ = 0;
  std::vector<Pushed> pushed_;
  std::map<uint32_t, size_t> ended_after_;
  UsedParameters used_;
  CpuBackend backend_;
};

TEST(CpuBackend, HandsOverEachChunkOnceAMicroStepAndThenEndsIt) {
  for (const int world_size : {1, 2, 3}) {
    RunRanks(world_size, [](Collective& collective) {
      Rank rank(collective);
      for (uint32_t m = 0; m < 2; ++m) ASSERT_TRUE(rank.MicroStep(m, 2).ok());
      const size_t chunks = rank.my_chunks().size();
      ASSERT_EQ(rank.pushed().size(), 2 * chunks);
      for (uint32_t m = 0; m < 2; ++m) {
        EXPECT_EQ(rank.pushed_before_end_of(m), (m + 1) * chunks);
        std::vector<int> of_micro_step;
        for (size_t i = m * chunks; i < (m + 1) * chunks; ++i) {
          const Pushed& pushed = rank.pushed()[i];
          EXPECT_EQ(pushed.begin, m);
          EXPECT_EQ(pushed.end, m + 1);
          EXPECT_EQ(pushed.final, m == 1);
          rank.ExpectRight(pushed);
          of_micro_step.push_back(pushed.chunk);
        }
        EXPECT_THAT(of_micro_step, testing::UnorderedElementsAreArray(rank.my_chunks()));
      }
      EXPECT_TRUE(rank.used().all);
      EXPECT_EQ(rank.backend().FinishStep()->loss_sum, 3.0);
    });
  }
}

TEST(CpuBackend, AccumulationOnTheWorkerHandsOverTheSumOfAllMicroSteps) {
  RunRanks(2, [](Collective& collective) {
    Rank rank(collective, {.options = {.accumulation = Accumulation::kWorker}});
    ASSERT_TRUE(rank.MicroStep(0, 2).ok());
    EXPECT_TRUE(rank.pushed().empty());
    ASSERT_TRUE(rank.MicroStep(1, 2).ok());
    ASSERT_EQ(rank.pushed().size(), rank.my_chunks().size());
    for (const Pushed& pushed : rank.pushed()) {
      EXPECT_EQ(pushed.begin, 0);
      EXPECT_EQ(pushed.end, 2);
      EXPECT_TRUE(pushed.final);
      rank.ExpectRight(pushed);
    }
  });
}

TEST(CpuBackend, ASecondStepBeginsItsLossAndTimesAnew) {
  RunRanks(1, [](Collective& collective) {
    Rank rank(collective);
    for (int step = 0; step < 2; ++step) {
      ASSERT_TRUE(rank.MicroStep(0, 1).ok());
      EXPECT_EQ(rank.backend().FinishStep()->loss_sum, 1.5);
    }
    EXPECT_EQ(rank.backend().FinishStep()->compute_seconds, 0);
  });
}

TEST(CpuBackend, GradientsLieInTheOptimizersMemoryWhereItGivesSome) {
  RunRanks(1, [](Collective& collective) {
    Rank rank(collective);
    std::map<int, std::vector<std::byte>> memory;  // For chunks with an even index.
    for (int chunk = 0; chunk < static_cast<int>(rank.my_chunks().size()); chunk += 2) {
      memory[chunk].resize(rank.job().layout.chunks()[chunk].elements * sizeof(uint16_t));
    }
    ASSERT_TRUE(rank.backend()
                    .UseGradientMemory([&](int chunk) {
                      return memory.contains(chunk) ? absl::MakeSpan(memory[chunk])
                                                    : absl::Span<std::byte>();
                    })
                    .ok());
    ASSERT_TRUE(rank.MicroStep(0, 1).ok());
    for (const Pushed& pushed : rank.pushed()) {
      rank.ExpectRight(pushed);
      if (pushed.chunk % 2 == 0) EXPECT_EQ(pushed.at, memory[pushed.chunk].data());
    }
  });
}

TEST(CpuBackend, SaysWhatWasUsedAndWhatWasNotFinite) {
  RunRanks(1, [](Collective& collective) {
    Rank rank(collective, {.options = {.check_gradients = true},
                           .reaches = [](int parameter, int) { return parameter > 0; },
                           .spoilt = std::numeric_limits<float>::infinity()});
    ASSERT_TRUE(rank.MicroStep(0, 1).ok());
    EXPECT_FALSE(rank.used().all);
    EXPECT_THAT(rank.used().parameters, testing::ElementsAre(1, 2, 3));
    ASSERT_TRUE(rank.used().non_finite.has_value());
    EXPECT_EQ(rank.used().non_finite->parameter, 2);
    EXPECT_EQ(rank.used().non_finite->element, 5);
  });
}

// ---------------------------------------------------------------- errors

// The whole next step of both ranks, with nothing of the one before in it.
void ExpectAWholeStep(Rank& rank, int passes_before, Accumulation accumulation) {
  const size_t before = rank.pushed().size();
  ASSERT_TRUE(rank.MicroSteps(3).ok());
  ASSERT_TRUE(rank.backend().FinishStep().ok());
  const size_t reductions = accumulation == Accumulation::kWorker ? 1 : 3;
  ASSERT_EQ(rank.pushed().size() - before, reductions * rank.my_chunks().size());
  for (size_t i = before; i < rank.pushed().size(); ++i) {
    Pushed pushed = rank.pushed()[i];
    pushed.begin += passes_before;
    pushed.end += passes_before;
    rank.ExpectRight(pushed);
  }
}

// The other rank has its own step to finish, and would wait for collectives that never come.
TEST(CpuBackend, AnErrorOfTheSinkEndsTheStepOnOneRankAndNoCollectiveOfTheOthers) {
  for (const Accumulation accumulation : {Accumulation::kService, Accumulation::kWorker}) {
    for (const bool at_end : {false, true}) {
      RunRanks(2, [&](Collective& collective) {
        Rank rank(collective, {.options = {.accumulation = accumulation}});
        const bool fails = collective.rank() == 0;
        const absl::Status gone = absl::UnavailableError("the service is gone");
        if (fails && at_end) rank.AnswerEnds(gone);
        if (fails && !at_end) rank.AnswerPushes(gone);
        ASSERT_TRUE(rank.MicroSteps(3).ok());
        const absl::StatusOr<FinishedStep> finished = rank.backend().FinishStep();
        if (fails) {
          EXPECT_EQ(finished.status(), gone);
          // Not after its error, in the first micro-step or with the sums of all.
          const bool sums = accumulation == Accumulation::kWorker;
          const int before = at_end && !sums   ? static_cast<int>(rank.my_chunks().size())
                             : !at_end && sums ? 2
                                               : 0;
          EXPECT_EQ(rank.calls(), before + 1);
        } else {
          EXPECT_TRUE(finished.ok()) << finished.status();
          EXPECT_EQ(rank.pushed().size(),
                    (accumulation == Accumulation::kWorker ? 1 : 3) * rank.my_chunks().size());
          for (const Pushed& pushed : rank.pushed()) rank.ExpectRight(pushed);
        }
        rank.AnswerPushes(absl::OkStatus());
        rank.AnswerEnds(absl::OkStatus());
        ExpectAWholeStep(rank, 3, accumulation);
      });
    }
  }
}

TEST(CpuBackend, ABackwardThatReachesNothingIsAnErrorOfThisRanksStepAlone) {
  for (const Accumulation accumulation : {Accumulation::kService, Accumulation::kWorker}) {
    RunRanks(2, [&](Collective& collective) {
      const bool fails = collective.rank() == 1;
      Rank rank(collective, {.options = {.accumulation = accumulation},
                             .reaches = [&](int, int pass) { return !fails || pass != 0; }});
      ASSERT_TRUE(rank.MicroSteps(3).ok());
      const absl::Status finished = rank.backend().FinishStep().status();
      if (fails) {
        EXPECT_TRUE(Refused(finished, absl::StatusCode::kFailedPrecondition));
      } else {
        EXPECT_TRUE(finished.ok()) << finished;
      }
      ExpectAWholeStep(rank, 3, accumulation);
    });
  }
}

TEST(CpuBackend, AFailureOfTheCollectiveOutranksTheStepsErrorAndStays) {
  RunRanks(2, [](Collective& collective) {
    Rank rank(collective);
    if (collective.rank() == 1) {  // Gone after one micro-step of three.
      EXPECT_TRUE(rank.MicroStep(0, 3).ok());
      return;
    }
    rank.AnswerPushes(absl::AbortedError("the service took it back"));
    const absl::Status lost = rank.MicroSteps(3);
    EXPECT_EQ(lost.code(), absl::StatusCode::kUnavailable) << lost;
    EXPECT_EQ(rank.backend().FinishStep().status(), lost);
    EXPECT_EQ(rank.MicroStep(0, 1), lost);
    EXPECT_EQ(rank.backend().FinishStep().status(), lost);
    EXPECT_EQ(rank.calls(), 1);
  });
}

TEST(CpuBackend, GatheredWeightsAreTheSameOnAllRanks) {
  RunRanks(3, [](Collective& collective) {
    Rank rank(collective);
    const Layout& layout = rank.job().layout;
    const auto weight = [](int group, int64_t element) {
      return static_cast<uint16_t>(1 + 3 * element + group);
    };
    for (const int index : rank.my_chunks()) {
      const Chunk& chunk = layout.chunks()[index];
      auto* weights = reinterpret_cast<uint16_t*>(rank.backend().weights(index).data());
      ASSERT_EQ(rank.backend().weights(index).size(), 2 * chunk.elements);
      for (int64_t e = 0; e < chunk.elements; ++e) {
        weights[e] = weight(chunk.group, chunk.begin + e);
      }
    }
    ASSERT_TRUE(rank.backend().GatherWeights().ok());
    for (int group = 0; group < layout.group_count(); ++group) {
      std::vector<uint16_t> all(layout.flat_elements(group));
      ASSERT_TRUE(rank.backend()
                      .ReadWeights(group, {reinterpret_cast<std::byte*>(all.data()),
                                           all.size() * sizeof(uint16_t)})
                      .ok());
      for (size_t e = 0; e < all.size(); ++e) ASSERT_EQ(all[e], weight(group, e)) << e;
    }
  });
}

}  // namespace
}  // namespace ballast::worker
