// client/ballast.h as a program in another language uses it: only its functions are called here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/ballast.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/reason.h"
#include "tests/client/c_api/c_refused.h"
#include "tests/support/plain_adamw.h"
#include "tests/support/service_for_tests.h"

namespace ballast::client {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(CHyperParameters, HaveTorchsDefaults) {
  constexpr ballast_hyper_parameters kAdamW = BALLAST_ADAMW_DEFAULTS;
  const HyperParameters adam_w;
  EXPECT_EQ(kAdamW.lr, adam_w.lr);
  EXPECT_EQ(kAdamW.beta1, adam_w.beta1);
  EXPECT_EQ(kAdamW.beta2, adam_w.beta2);
  EXPECT_EQ(kAdamW.eps, adam_w.eps);
  EXPECT_EQ(kAdamW.weight_decay, adam_w.weight_decay);
  EXPECT_EQ(kAdamW.decoupled_weight_decay, 1);
  EXPECT_EQ(kAdamW.bias_correction, 1);
  EXPECT_EQ(kAdamW.amsgrad, 0);
  EXPECT_EQ(kAdamW.maximize, 0);
  ballast_hyper_parameters adam = BALLAST_ADAM_DEFAULTS;
  EXPECT_EQ(adam.weight_decay, 0);
  EXPECT_EQ(adam.decoupled_weight_decay, 0);
  adam.weight_decay = kAdamW.weight_decay;
  adam.decoupled_weight_decay = 1;
  EXPECT_EQ(std::memcmp(&adam, &kAdamW, sizeof(adam)), 0);
}

constexpr int kParameters = 4;
// Elements of each: one is longer than a chunk, one is frozen, one is alone in its group.
constexpr int64_t kShapes[kParameters][2] = {{30, 20}, {7, 1}, {5, 1}, {300, 1}};
constexpr int kGroups[kParameters] = {0, 0, 0, 1};
constexpr int kFrozen = 2;

int64_t Elements(int parameter) { return kShapes[parameter][0] * kShapes[parameter][1]; }

float FirstWeight(int parameter, int64_t element) {
  return 0.01f * static_cast<float>((parameter * 31 + element * 7) % 101 - 50);
}
float Gradient(uint64_t step, int parameter, int64_t element) {
  const auto number = static_cast<int64_t>((step * 13 + parameter * 17 + element * 5) % 89);
  return 0.03f * static_cast<float>(number - 44);
}

// A rank with everything in fp32, and its own copy of each parameter.
class CRank {
 public:
  CRank(const std::string& job, const std::string& service, int rank = 0, int world_size = 1) {
    names_.reserve(kParameters);  // Their bytes must not move.
    for (int p = 0; p < kParameters; ++p) {
      weights_.emplace_back(Elements(p), std::numeric_limits<float>::quiet_NaN());
      gradients_.emplace_back(Elements(p));
      names_.push_back(absl::StrCat("p", p));
      parameters_.push_back({.size = sizeof(ballast_parameter),
                             .name = names_[p].c_str(),
                             .shape = kShapes[p],
                             .dimensions = 2,
                             .group = kGroups[p],
                             .frozen = p == kFrozen});
      places_.push_back(p == kFrozen ? nullptr : weights_[p].data());
    }
    for (int g = 0; g < 2; ++g) {
      groups_[g] = {.size = sizeof(ballast_group),
                    .name = g == 0 ? "decay" : "no_decay",
                    .hyper_parameters = hyper_parameters_[g],
                    .wire_dtype = BALLAST_FLOAT32,
                    .return_dtype = BALLAST_FLOAT32};
    }
    job_name_ = job;
    service_ = service;
    job_ = {.size = sizeof(ballast_job),
            .name = job_name_.c_str(),
            .groups = groups_,
            .group_count = 2,
            .parameters = parameters_.data(),
            .parameter_count = kParameters,
            .world_size = world_size,
            .chunk_elements = 256};
    options_ = {.size = sizeof(ballast_options),
                .service = service_.c_str(),
                .job = &job_,
                .rank = rank,
                .wait_seconds = 20,
                .weights = places_.data()};
  }
  ~CRank() { ballast_close(session_); }
  CRank(const CRank&) = delete;
  CRank& operator=(const CRank&) = delete;

  ballast_job& job() { return job_; }
  ballast_options& options() { return options_; }
  ballast_session* session() { return session_; }
  std::vector<std::vector<float>>& weights() { return weights_; }

  int32_t Open() { return ballast_open(&options_, &session_); }
  ballast_info Info() {
    ballast_info info = {.size = sizeof(info)};
    EXPECT_EQ(ballast_get_info(session_, &info), BALLAST_OK) << ballast_message();
    return info;
  }
  int32_t Upload() {
    std::vector<const float*> first;
    for (int p = 0; p < kParameters; ++p) {
      for (int64_t i = 0; i < Elements(p); ++i) gradients_[p][i] = FirstWeight(p, i);
      first.push_back(p == kFrozen ? nullptr : gradients_[p].data());
    }
    return ballast_upload_weights(session_, first.data(), first.size());
  }
  void OpenWithWeights() {
    ASSERT_EQ(Open(), BALLAST_OK) << ballast_message();
    if (Info().awaiting_weights) ASSERT_EQ(Upload(), BALLAST_OK) << ballast_message();
    ASSERT_EQ(ballast_read_weights(session_), BALLAST_OK) << ballast_message();
  }

  int32_t Begin() {
    const ballast_step step = {.size = sizeof(step), .hyper_parameters = hyper_parameters_};
    return ballast_begin_step(session_, &step);
  }
  // `scale` / 4 in each of 4 micro-steps is the same gradient.
  int32_t PushAll(uint64_t step, uint32_t micro_step = 0, float scale = 1, int unused = kFrozen) {
    std::vector<const void*> pointers;
    for (int p = 0; p < kParameters; ++p) {
      for (int64_t i = 0; i < Elements(p); ++i) gradients_[p][i] = scale * Gradient(step, p, i);
      pointers.push_back(p == kFrozen || p == unused ? nullptr : gradients_[p].data());
    }
    return ballast_push_gradients(session_, micro_step, pointers.data(), pointers.size(), 0);
  }
  void Step(uint64_t step, uint32_t micro_steps = 1) {
    ASSERT_EQ(Begin(), BALLAST_OK) << ballast_message();
    for (uint32_t m = 0; m < micro_steps; ++m) {
      ASSERT_EQ(PushAll(step, m, 1.0f / micro_steps), BALLAST_OK) << ballast_message();
    }
    ASSERT_EQ(ballast_seal_and_vote(session_, micro_steps, nullptr, &decision), BALLAST_OK)
        << ballast_message();
    ASSERT_TRUE(decision.applied) << ballast_message();
    ASSERT_EQ(ballast_receive_weights(session_), BALLAST_OK) << ballast_message();
  }

  int32_t ReadState(size_t parameter, int32_t plane, std::vector<float>& out, uint64_t* step,
                    int64_t* updates) {
    const std::string name =
        absl::StrCat("jobs/", job_name_, "/parameters/",
                     parameter < parameters_.size() ? parameters_[parameter].name : "none");
    return ballast_read_state(&options_, name.c_str(), plane, out.data(),
                              static_cast<int64_t>(out.size()), step, updates);
  }

  ballast_decision decision = {.size = sizeof(ballast_decision)};

 private:
  ballast_hyper_parameters hyper_parameters_[2] = {{.lr = 0.01,
                                                    .beta1 = 0.9,
                                                    .beta2 = 0.95,
                                                    .eps = 1e-8,
                                                    .weight_decay = 0.1,
                                                    .decoupled_weight_decay = 1,
                                                    .bias_correction = 1},
                                                   {.lr = 0.02,
                                                    .beta1 = 0.8,
                                                    .beta2 = 0.99,
                                                    .eps = 1e-7,
                                                    .weight_decay = 0,
                                                    .decoupled_weight_decay = 1,
                                                    .bias_correction = 1}};
  std::string job_name_, service_;
  std::vector<std::string> names_;
  std::vector<ballast_parameter> parameters_;
  ballast_group groups_[2];
  ballast_job job_;
  ballast_options options_;
  std::vector<std::vector<float>> weights_, gradients_;
  std::vector<void*> places_;
  ballast_session* session_ = nullptr;
};

std::vector<double> Expected(int parameter, uint64_t steps) {
  const bool decay = kGroups[parameter] == 0;
  const HyperParameters values =
      decay ? HyperParameters{.lr = 0.01, .beta2 = 0.95, .weight_decay = 0.1}
            : HyperParameters{
                  .lr = 0.02, .beta1 = 0.8, .beta2 = 0.99, .eps = 1e-7, .weight_decay = 0};
  std::vector<double> weights;
  for (int64_t i = 0; i < Elements(parameter); ++i) {
    PlainAdamW element{.weight = FirstWeight(parameter, i), .values = values};
    for (uint64_t step = 1; step <= steps; ++step) element.Update(Gradient(step, parameter, i));
    weights.push_back(element.weight);
  }
  return weights;
}

void ExpectTrained(CRank& rank, uint64_t steps, int64_t& compared) {
  for (int p = 0; p < kParameters; ++p) {
    const std::vector<double> expected = Expected(p, steps);
    for (int64_t i = 0; i < Elements(p); ++i) {
      const float weight = rank.weights()[p][i];
      if (std::isnan(weight)) continue;  // Never written: another rank's, or frozen.
      ASSERT_NEAR(weight, expected[i], 2e-6) << "parameter " << p << " element " << i;
      ++compared;
    }
  }
}

class CApi : public testing::Test {
 protected:
  std::string service() { return service_.server().addresses()[0]; }
  ServiceForTests service_;
};

TEST_F(CApi, TrainsAsAdamWIsDefined) {
  for (const bool shares : {true, false}) {
    for (const uint32_t max_micro_steps : {0u, 1u}) {
      CRank rank(absl::StrCat("one", shares, max_micro_steps), service());
      rank.options().never_share_memory = !shares;
      rank.job().max_micro_steps = max_micro_steps;
      rank.OpenWithWeights();
      EXPECT_EQ(rank.Info().shares_memory, shares);
      for (uint64_t step = 1; step <= 5; ++step) rank.Step(step);
      EXPECT_EQ(rank.Info().committed_step, 5);
      int64_t compared = 0;
      ExpectTrained(rank, 5, compared);
      EXPECT_EQ(compared, 600 + 7 + 300);
    }
  }
}

TEST_F(CApi, EachRankGivesAndGetsWhatItOwns) {
  constexpr int kRanks = 3;
  std::atomic<int64_t> compared = 0;
  std::vector<std::thread> ranks;
  for (int r = 0; r < kRanks; ++r) {
    ranks.emplace_back([&, r] {
      CRank rank("three", service(), r, kRanks);
      rank.OpenWithWeights();
      for (uint64_t step = 1; step <= 3; ++step) rank.Step(step);
      int64_t own = 0;
      ExpectTrained(rank, 3, own);
      compared += own;
      size_t chunks = 0;
      EXPECT_EQ(ballast_chunks(rank.session(), nullptr, 0, &chunks), BALLAST_OK);
      std::vector<ballast_chunk> list(chunks);
      EXPECT_EQ(ballast_chunks(rank.session(), list.data(), chunks, &chunks), BALLAST_OK);
      int64_t elements = 0;
      for (const ballast_chunk& chunk : list) elements += chunk.elements;
      EXPECT_GE(elements, own);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(compared, 600 + 7 + 300) << "each element has one owner";
}

TEST_F(CApi, AShortWaitForOtherRanksIsTakenUpAgain) {
  CRank first("late", service(), 0, 2);
  first.options().wait_seconds = 0.02;
  std::atomic<bool> second_may_seal = false;
  std::thread late([&] {
    CRank second("late", service(), 1, 2);
    second.OpenWithWeights();
    EXPECT_EQ(second.Begin(), BALLAST_OK) << ballast_message();
    EXPECT_EQ(second.PushAll(1), BALLAST_OK) << ballast_message();
    while (!second_may_seal) std::this_thread::yield();
    EXPECT_EQ(ballast_seal_and_vote(second.session(), 1, nullptr, &second.decision), BALLAST_OK);
    EXPECT_EQ(ballast_receive_weights(second.session()), BALLAST_OK) << ballast_message();
  });
  const auto until_done = [](auto call) {
    int32_t status = BALLAST_DEADLINE_EXCEEDED;
    while (status == BALLAST_DEADLINE_EXCEEDED) status = call();
    EXPECT_EQ(status, BALLAST_OK) << ballast_message();
  };
  first.OpenWithWeights();
  EXPECT_EQ(first.Begin(), BALLAST_OK) << ballast_message();
  until_done([&] { return first.PushAll(1); });
  EXPECT_TRUE(Refused(ballast_seal_and_vote(first.session(), 1, nullptr, &first.decision),
                      BALLAST_DEADLINE_EXCEEDED));
  second_may_seal = true;
  until_done([&] { return ballast_seal_and_vote(first.session(), 1, nullptr, &first.decision); });
  until_done([&] { return ballast_receive_weights(first.session()); });
  late.join();
  int64_t compared = 0;
  ExpectTrained(first, 1, compared);
  EXPECT_GT(compared, 0);
}

TEST_F(CApi, ADiscardedAttemptIsAsIfItHadNotBeen) {
  for (const bool shares : {false, true}) {
    CRank rank(shares ? "discards-shared" : "discards", service());
    rank.options().never_share_memory = !shares;
    rank.OpenWithWeights();
    for (uint64_t step = 1; step <= 3; ++step) {
      ASSERT_EQ(rank.Begin(), BALLAST_OK) << ballast_message();
      for (uint32_t m = 0; m < step; ++m) {
        ASSERT_EQ(rank.PushAll(step + 50, m), BALLAST_OK) << ballast_message();
      }
      ASSERT_EQ(ballast_discard(rank.session()), BALLAST_OK) << ballast_message();
      rank.Step(step, 4);
    }
    int64_t compared = 0;
    ExpectTrained(rank, 3, compared);
    EXPECT_EQ(compared, 600 + 7 + 300);
    EXPECT_EQ(rank.decision.step, 3u);
    ASSERT_EQ(rank.Begin(), BALLAST_OK);
    ASSERT_EQ(rank.PushAll(4), BALLAST_OK);
    ASSERT_EQ(ballast_seal_and_vote(rank.session(), 1, nullptr, &rank.decision), BALLAST_OK)
        << ballast_message();
    EXPECT_TRUE(Refused(ballast_discard(rank.session()), BALLAST_FAILED_PRECONDITION));
    ASSERT_EQ(ballast_receive_weights(rank.session()), BALLAST_OK) << ballast_message();
  }
  EXPECT_TRUE(Refused(ballast_discard(nullptr), BALLAST_INVALID_ARGUMENT));
}

TEST_F(CApi, AnUndoneStepIsAsIfItHadNotBeen) {
  const auto open = [](CRank& rank, bool shares) {
    rank.options().never_share_memory = !shares;
    rank.job().keep_previous = 1;
    rank.OpenWithWeights();
  };
  for (const bool shares : {false, true}) {
    const std::string job = shares ? "undoes-shared" : "undoes";
    {
      CRank rank(job, service());
      open(rank, shares);
      EXPECT_TRUE(Refused(ballast_undo(rank.session(), nullptr), BALLAST_FAILED_PRECONDITION));
      rank.Step(1);
      rank.Step(77);
      uint64_t undone = 0;
      ASSERT_EQ(ballast_undo(rank.session(), &undone), BALLAST_OK) << ballast_message();
      EXPECT_EQ(undone, 2u);
      // Who says so first is told by the message.
      EXPECT_EQ(ballast_read_weights(rank.session()), BALLAST_ABORTED);
      EXPECT_STREQ(ballast_reason(), "OLDER_GENERATION");
    }
    CRank rank(job, service());
    open(rank, shares);
    EXPECT_EQ(rank.Info().committed_step, 1u);
    rank.Step(2);
    int64_t compared = 0;
    ExpectTrained(rank, 2, compared);
    EXPECT_EQ(compared, 600 + 7 + 300);
  }
  EXPECT_TRUE(Refused(ballast_undo(nullptr, nullptr), BALLAST_INVALID_ARGUMENT));
  CRank other("undoes", service());
  EXPECT_TRUE(Refused(other.Open(), BALLAST_FAILED_PRECONDITION, "OTHER_DESCRIPTION"));
  other.job().keep_previous = 2;
  EXPECT_TRUE(Refused(other.Open(), BALLAST_INVALID_ARGUMENT));
}

TEST_F(CApi, WhatIsReportedIsInTheHistory) {
  CRank rank("reported", service());
  rank.OpenWithWeights();
  ASSERT_EQ(rank.Begin(), BALLAST_OK);
  ASSERT_EQ(rank.PushAll(1, 0, 1), BALLAST_OK);
  ASSERT_EQ(ballast_report_number(rank.session(), "loss", 2.5), BALLAST_OK);
  ASSERT_EQ(ballast_report_seconds(rank.session(), 4, 3, 2, 1), BALLAST_OK);
  EXPECT_TRUE(
      Refused(ballast_report_number(rank.session(), "a loss", 2.5), BALLAST_INVALID_ARGUMENT));
  EXPECT_TRUE(
      Refused(ballast_report_number(rank.session(), nullptr, 2.5), BALLAST_INVALID_ARGUMENT));
  for (int i = 1; i < 16; ++i) {
    EXPECT_EQ(ballast_report_number(rank.session(), std::to_string(i).c_str(), i), BALLAST_OK);
  }
  EXPECT_TRUE(
      Refused(ballast_report_number(rank.session(), "one too many", 1), BALLAST_INVALID_ARGUMENT));
  ASSERT_EQ(ballast_seal_and_vote(rank.session(), 1, nullptr, &rank.decision), BALLAST_OK)
      << ballast_message();
  ASSERT_EQ(ballast_receive_weights(rank.session()), BALLAST_OK);
  const ballast::LatestReports latest =
      service_.engine().FindJob("reported").value()->Status().latest;
  EXPECT_EQ(latest.numbers.at("loss"), 2.5);
  EXPECT_EQ(latest.numbers.size(), 16u);
  EXPECT_EQ(latest.seconds.compute, 4);
  EXPECT_EQ(latest.seconds.wait, 1);
}

// All elements of a plane are `value`, if that is given, at this step and after so many updates.
void ExpectState(CRank& rank, uint64_t at_step, size_t parameter, int32_t plane,
                 std::optional<float> value, int64_t updates) {
  std::vector<float> read(Elements(static_cast<int>(parameter)));
  uint64_t step = 0;
  int64_t count = -1;
  ASSERT_EQ(rank.ReadState(parameter, plane, read, &step, &count), BALLAST_OK) << ballast_message();
  if (value.has_value()) {
    EXPECT_EQ(read, std::vector<float>(read.size(), *value)) << parameter << " plane " << plane;
  }
  EXPECT_EQ(step, at_step);
  EXPECT_EQ(count, updates);
}

// What a caller of ballast_upload_by has, and where it gives up.
struct Written {
  int calls = 0;
  int ends_at = -1;
  std::vector<std::string> out_of_order = {};
  size_t parameter = 0;
};

int32_t Write(void* context, size_t parameter, int32_t plane, int64_t offset, int64_t elements,
              float* out) {
  auto& written = *static_cast<Written*>(context);
  if (written.calls++ == written.ends_at) return 7;
  if (parameter < written.parameter) written.out_of_order.push_back(absl::StrCat("p", parameter));
  written.parameter = parameter;
  for (int64_t e = 0; e < elements; ++e) {
    out[e] = plane == BALLAST_MASTER ? FirstWeight(static_cast<int>(parameter), offset + e)
                                     : 0.25f * static_cast<float>(plane);
  }
  return 0;
}

TEST_F(CApi, UploadsWhatAFunctionWrites) {
  CRank rank("by-function", service());
  ASSERT_EQ(rank.Open(), BALLAST_OK) << ballast_message();
  EXPECT_TRUE(Refused(ballast_upload_by(rank.session(), 0, nullptr, 0, nullptr, nullptr),
                      BALLAST_INVALID_ARGUMENT));
  Written ended = {.ends_at = 2};
  EXPECT_TRUE(
      Refused(ballast_upload_by(rank.session(), 0, nullptr, 0, Write, &ended), BALLAST_CANCELLED));
  EXPECT_EQ(ended.calls, 3);
  Written written;
  ASSERT_EQ(ballast_upload_by(rank.session(), 0, nullptr, 0, Write, &written), BALLAST_OK)
      << ballast_message();
  EXPECT_GE(written.calls, 4);  // Chunks are smaller than the parameters.
  EXPECT_THAT(written.out_of_order, testing::IsEmpty());
  ASSERT_EQ(ballast_read_weights(rank.session()), BALLAST_OK) << ballast_message();
  for (const int p : {0, 1, 3}) {
    for (int64_t e = 0; e < Elements(p); ++e) ASSERT_EQ(rank.weights()[p][e], FirstWeight(p, e));
  }
}

TEST_F(CApi, UploadsMomentsThatAFunctionWrites) {
  CRank rank("moments-by-function", service());
  const_cast<ballast_group*>(rank.job().groups)[1].hyper_parameters.amsgrad = 1;
  ASSERT_EQ(rank.Open(), BALLAST_OK) << ballast_message();
  Written written;
  const int64_t counts[kParameters] = {9, 0, 0, 8};
  EXPECT_TRUE(Refused(ballast_upload_by(rank.session(), 9, nullptr, kParameters, Write, &written),
                      BALLAST_INVALID_ARGUMENT));
  EXPECT_TRUE(Refused(ballast_upload_by(rank.session(), 9, counts, 3, Write, &written),
                      BALLAST_INVALID_ARGUMENT));
  ASSERT_EQ(ballast_upload_by(rank.session(), 9, counts, kParameters, Write, &written), BALLAST_OK)
      << ballast_message();
  ASSERT_EQ(ballast_read_weights(rank.session()), BALLAST_OK) << ballast_message();
  EXPECT_EQ(rank.Info().committed_step, 9u);
  ExpectState(rank, 9, 0, BALLAST_EXP_AVG, 0.5f, 9);
  ExpectState(rank, 9, 3, BALLAST_EXP_AVG_SQ, 0.75f, 8);
  ExpectState(rank, 9, 3, BALLAST_MAX_EXP_AVG_SQ, 1.0f, 8);
  EXPECT_TRUE(Refused(ballast_upload_by(rank.session(), 9, counts, kParameters, Write, &written),
                      BALLAST_FAILED_PRECONDITION, "HAS_WEIGHTS"));
  rank.Step(10);
}

TEST_F(CApi, WritesStateBetweenSteps) {
  CRank rank("written", service());
  ASSERT_EQ(rank.Open(), BALLAST_OK) << ballast_message();
  Written written;
  ASSERT_EQ(ballast_upload_by(rank.session(), 0, nullptr, 0, Write, &written), BALLAST_OK);
  ASSERT_EQ(ballast_read_weights(rank.session()), BALLAST_OK) << ballast_message();
  rank.Step(1);
  const size_t parameters[] = {0, 3};
  const int32_t planes[] = {BALLAST_EXP_AVG, BALLAST_EXP_AVG_SQ};
  const int64_t counts[] = {1, 0};
  ballast_state_write write = {.size = sizeof(write),
                               .parameters = parameters,
                               .count = 2,
                               .planes = planes,
                               .plane_count = 2,
                               .update_counts = counts};
  written = {.ends_at = 1};
  EXPECT_TRUE(
      Refused(ballast_write_state(rank.session(), &write, Write, &written), BALLAST_CANCELLED));
  EXPECT_TRUE(Refused(ballast_write_state(rank.session(), &write, nullptr, nullptr),
                      BALLAST_INVALID_ARGUMENT));
  written = {};
  ASSERT_EQ(ballast_write_state(rank.session(), &write, Write, &written), BALLAST_OK)
      << ballast_message();
  ExpectState(rank, 1, 0, BALLAST_EXP_AVG, 0.5f, 1);
  ExpectState(rank, 1, 0, BALLAST_EXP_AVG_SQ, 0.75f, 1);
  ExpectState(rank, 1, 3, BALLAST_EXP_AVG_SQ, 0.75f, 0);
  ExpectState(rank, 1, 1, BALLAST_MASTER, std::nullopt, 1);
  const size_t frozen[] = {kFrozen};
  write.parameters = frozen;
  write.count = 1;
  EXPECT_TRUE(Refused(ballast_write_state(rank.session(), &write, Write, &written),
                      BALLAST_INVALID_ARGUMENT));
  const size_t far[] = {size_t{1} << 40};
  write.parameters = far;
  EXPECT_TRUE(Refused(ballast_write_state(rank.session(), &write, Write, &written),
                      BALLAST_INVALID_ARGUMENT));
  const int32_t none[] = {9};
  write.parameters = parameters;
  write.planes = none;
  write.plane_count = 1;
  EXPECT_TRUE(Refused(ballast_write_state(rank.session(), &write, Write, &written),
                      BALLAST_INVALID_ARGUMENT));
  rank.Step(2);
  write.planes = planes;
  ASSERT_EQ(rank.Begin(), BALLAST_OK) << ballast_message();
  EXPECT_TRUE(Refused(ballast_write_state(rank.session(), &write, Write, &written),
                      BALLAST_FAILED_PRECONDITION));
}

// A job with a parameter less and one that is new goes on from the old one's state.
TEST_F(CApi, DerivesAJobFromAnother) {
  CRank before("derived", service());
  before.OpenWithWeights();
  before.Step(1);
  const std::string uid = before.Info().job_uid;
  CRank after("derived", service());
  const_cast<ballast_parameter*>(after.job().parameters)[1].name = "new";
  after.options().derive_from_uid = uid.c_str();
  ASSERT_EQ(after.Open(), BALLAST_OK) << ballast_message();
  EXPECT_NE(after.Info().job_uid, uid);
  EXPECT_EQ(after.Info().committed_step, 1u);
  ASSERT_EQ(after.Info().awaiting_weights, 1);
  ASSERT_EQ(after.Upload(), BALLAST_OK) << ballast_message();
  ASSERT_EQ(ballast_read_weights(after.session()), BALLAST_OK) << ballast_message();
  EXPECT_EQ(after.weights()[0], before.weights()[0]);
  EXPECT_EQ(after.weights()[3], before.weights()[3]);
  for (int64_t e = 0; e < Elements(1); ++e) ASSERT_EQ(after.weights()[1][e], FirstWeight(1, e));
  ExpectState(after, 1, 1, BALLAST_EXP_AVG, 0.0f, 0);
  ExpectState(after, 1, 0, BALLAST_MASTER, std::nullopt, 1);
  after.Step(2);
  EXPECT_NE(before.Begin(), BALLAST_OK);
  // The old one is gone.
  CRank late("derived", service());
  const_cast<ballast_parameter*>(late.job().parameters)[1].name = "newer";
  late.options().derive_from_uid = uid.c_str();
  EXPECT_TRUE(Refused(late.Open(), BALLAST_NOT_FOUND, "OTHER_JOB"));
  EXPECT_EQ(late.session(), nullptr);
}

TEST_F(CApi, AParameterOfNoElementsNeedsNoMemory) {
  CRank rank("empty", service());
  const int64_t empty[] = {0, 4};
  const_cast<ballast_parameter*>(rank.job().parameters)[1].shape = empty;
  const_cast<void**>(rank.options().weights)[1] = nullptr;
  ASSERT_EQ(rank.Open(), BALLAST_OK) << ballast_message();
  std::vector<float> ones(600, 1.0f);
  const float* first[kParameters] = {ones.data(), nullptr, nullptr, ones.data()};
  ASSERT_EQ(ballast_upload_weights(rank.session(), first, kParameters), BALLAST_OK)
      << ballast_message();
  ASSERT_EQ(ballast_read_weights(rank.session()), BALLAST_OK) << ballast_message();
  ASSERT_EQ(rank.Begin(), BALLAST_OK) << ballast_message();
  ASSERT_EQ(rank.PushAll(1, 0, 1, /*unused=*/1), BALLAST_OK) << ballast_message();
  ASSERT_EQ(ballast_seal_and_vote(rank.session(), 1, nullptr, &rank.decision), BALLAST_OK)
      << ballast_message();
  ASSERT_EQ(ballast_receive_weights(rank.session()), BALLAST_OK) << ballast_message();
  EXPECT_NE(rank.weights()[0][0], 1.0f);
}

TEST_F(CApi, PlanesAreReadWhole) {
  CRank rank("planes", service());
  rank.job().unused_policy = BALLAST_UNUSED_SKIP;
  rank.OpenWithWeights();
  rank.Step(1);
  ASSERT_EQ(rank.Begin(), BALLAST_OK);
  ASSERT_EQ(rank.PushAll(2, 0, 1, /*unused=*/1), BALLAST_OK);
  ASSERT_EQ(ballast_seal_and_vote(rank.session(), 1, nullptr, &rank.decision), BALLAST_OK)
      << ballast_message();
  ASSERT_EQ(ballast_receive_weights(rank.session()), BALLAST_OK);
  uint64_t step = 0;
  int64_t updates = 0;
  std::vector<float> plane(600);
  const auto read = [&](size_t parameter, int32_t which) {
    return rank.ReadState(parameter, which, plane, &step, &updates);
  };
  ASSERT_EQ(read(0, BALLAST_MASTER), BALLAST_OK) << ballast_message();
  EXPECT_EQ(plane, rank.weights()[0]);
  EXPECT_EQ(step, 2);
  EXPECT_EQ(updates, 2);
  ASSERT_EQ(read(0, BALLAST_EXP_AVG), BALLAST_OK) << ballast_message();
  for (int64_t i = 0; i < 600; ++i) {
    EXPECT_NEAR(plane[i], 0.1 * 0.9 * Gradient(1, 0, i) + 0.1 * Gradient(2, 0, i), 1e-6) << i;
  }
  plane.resize(7);
  ASSERT_EQ(read(1, BALLAST_EXP_AVG_SQ), BALLAST_OK) << ballast_message();
  EXPECT_EQ(step, 2);
  EXPECT_EQ(updates, 1);
  EXPECT_NEAR(plane[3], 0.05 * std::pow(Gradient(1, 1, 3), 2), 1e-6);

  EXPECT_TRUE(Refused(read(0, BALLAST_MASTER), BALLAST_INVALID_ARGUMENT));
  EXPECT_TRUE(Refused(read(1, BALLAST_SUM + 1), BALLAST_INVALID_ARGUMENT));
  EXPECT_TRUE(Refused(read(9, BALLAST_MASTER), BALLAST_NOT_FOUND));
  EXPECT_TRUE(Refused(read(1, BALLAST_MAX_EXP_AVG_SQ), BALLAST_INVALID_ARGUMENT));
}

TEST_F(CApi, ACallBesideASessionTakesAndGivesJson) {
  CRank rank("calls", service());
  rank.OpenWithWeights();
  rank.Step(1);
  const char* answer = nullptr;
  const auto call = [&](const char* method, const char* request) {
    return ballast_call(&rank.options(), method, request, &answer);
  };
  ASSERT_EQ(call("StateService/SummarizeState", R"({"name": "jobs/calls/parameters/p0"})"),
            BALLAST_OK)
      << ballast_message();
  EXPECT_THAT(answer, AllOf(HasSubstr(R"("update_count": 1,)"), HasSubstr(R"("MASTER")")));
  ASSERT_EQ(call("JobService/ListJobs", "{}"), BALLAST_OK) << ballast_message();
  EXPECT_THAT(answer, HasSubstr(R"("name": "jobs/calls")"));
  EXPECT_TRUE(Refused(call("JobService/GetJob", R"({"name": "jobs/clals"})"), BALLAST_NOT_FOUND,
                      "NO_SUCH_JOB"));
  EXPECT_TRUE(Refused(call("StateService/SaveJob", R"({"name": "jobs/calls"})"),
                      BALLAST_FAILED_PRECONDITION, "NO_CHECKPOINT_DIR"));
  EXPECT_TRUE(
      Refused(call("JobService/GetJob", R"({"nmae": "jobs/calls"})"), BALLAST_INVALID_ARGUMENT));
  EXPECT_TRUE(Refused(call("StateService/ReadState", "{}"), BALLAST_UNIMPLEMENTED));
  EXPECT_TRUE(Refused(call("JobService/GetJob", nullptr), BALLAST_INVALID_ARGUMENT));
  EXPECT_TRUE(
      Refused(ballast_call(nullptr, "JobService/GetJob", "{}", &answer), BALLAST_INVALID_ARGUMENT));
  rank.options().service = "unix:/no/such/socket";
  rank.options().reconnect_timeout_seconds = 1e-3;
  EXPECT_TRUE(Refused(call("JobService/ListJobs", "{}"), BALLAST_UNAVAILABLE));
}

TEST_F(CApi, WhatASealTellsNamesTheFirstUnusedParametersAndTheFirstElementThatIsNotFinite) {
  CRank rank("told", service());
  rank.job().unused_policy = BALLAST_UNUSED_SKIP;
  rank.OpenWithWeights();
  size_t unused[2] = {99, 99}, count = 99;
  ASSERT_EQ(ballast_unused(rank.session(), unused, 2, &count), BALLAST_OK);
  EXPECT_EQ(count, 0u);
  ASSERT_EQ(rank.Begin(), BALLAST_OK);
  ASSERT_EQ(rank.PushAll(1, 0, std::numeric_limits<float>::infinity(), /*unused=*/1), BALLAST_OK);
  ballast_norm norm = {.size = sizeof(norm)};
  double groups[2] = {};
  ASSERT_EQ(ballast_seal(rank.session(), 1, &norm, groups, 2), BALLAST_OK) << ballast_message();
  EXPECT_EQ(norm.non_finite, 1);
  EXPECT_THAT(ballast_message(), HasSubstr("p0"));
  EXPECT_FALSE(std::isfinite(norm.norm));
  EXPECT_FALSE(std::isfinite(groups[0]));
  EXPECT_EQ(norm.unused_parameters, 1u);
  ASSERT_EQ(ballast_unused(rank.session(), unused, 2, &count), BALLAST_OK);
  EXPECT_EQ(count, 1u);
  EXPECT_EQ(unused[0], 1u);
  EXPECT_EQ(unused[1], 99u);
  ASSERT_EQ(ballast_vote(rank.session(), nullptr, &rank.decision), BALLAST_OK) << ballast_message();
  EXPECT_EQ(rank.decision.applied, 0);
  ASSERT_EQ(ballast_receive_weights(rank.session()), BALLAST_OK);
  // Of a decision without a look; and of one in which none was unused.
  ASSERT_EQ(rank.Begin(), BALLAST_OK);
  ASSERT_EQ(rank.PushAll(2, 0, 1, /*unused=*/3), BALLAST_OK);
  ASSERT_EQ(ballast_seal_and_vote(rank.session(), 1, nullptr, &rank.decision), BALLAST_OK);
  ASSERT_EQ(ballast_receive_weights(rank.session()), BALLAST_OK);
  ASSERT_EQ(ballast_unused(rank.session(), unused, 2, &count), BALLAST_OK);
  EXPECT_EQ(count, 1u);
  EXPECT_EQ(unused[0], 3u);
  rank.Step(3);
  ASSERT_EQ(ballast_unused(rank.session(), nullptr, 0, &count), BALLAST_OK);
  EXPECT_EQ(count, 0u);
}

TEST_F(CApi, TheTrainersStateComesBack) {
  CRank rank("state", service());
  rank.OpenWithWeights();
  const std::string state("a\0b", 3);
  const ballast_step step = {
      .size = sizeof(step), .trainer_state = state.data(), .trainer_state_bytes = state.size()};
  ASSERT_EQ(ballast_begin_step(rank.session(), &step), BALLAST_OK) << ballast_message();
  ASSERT_EQ(rank.PushAll(1), BALLAST_OK);
  ASSERT_EQ(ballast_seal_and_vote(rank.session(), 1, nullptr, &rank.decision), BALLAST_OK);
  ASSERT_EQ(ballast_receive_weights(rank.session()), BALLAST_OK);
  CRank again("state", service());
  ASSERT_EQ(again.Open(), BALLAST_OK) << ballast_message();
  char found[8];
  size_t bytes = 0;
  ASSERT_EQ(ballast_trainer_state(again.session(), found, sizeof(found), &bytes), BALLAST_OK);
  EXPECT_EQ(std::string(found, bytes), state);
  EXPECT_FALSE(again.Info().awaiting_weights);
}

TEST_F(CApi, MakesAnIdentityOfAnAddress) {
  const char* certificate = nullptr;
  const char* key = nullptr;
  ASSERT_EQ(ballast_make_identity("10.77.0.1", &certificate, &key), BALLAST_OK);
  EXPECT_THAT(certificate, testing::StartsWith("-----BEGIN CERTIFICATE-----\n"));
  EXPECT_THAT(key, testing::StartsWith("-----BEGIN PRIVATE KEY-----\n"));
  EXPECT_TRUE(Refused(ballast_make_identity("gpu1", &certificate, &key), BALLAST_INVALID_ARGUMENT));
  EXPECT_TRUE(
      Refused(ballast_make_identity(nullptr, &certificate, &key), BALLAST_INVALID_ARGUMENT));
}

// ---------------------------------------------------------------- bad input

TEST_F(CApi, RefusesWhatCannotBe) {
  EXPECT_EQ(ballast_api_version(), BALLAST_API_VERSION);
  ballast_session* session = nullptr;
  EXPECT_TRUE(Refused(ballast_open(nullptr, &session), BALLAST_INVALID_ARGUMENT));
  const auto refused = [&](auto change) {
    CRank rank("refused", service());
    change(rank);
    EXPECT_TRUE(Refused(rank.Open(), BALLAST_INVALID_ARGUMENT));
    EXPECT_EQ(rank.session(), nullptr);
  };
  refused([](CRank& r) { r.options().size = 0; });
  refused([](CRank& r) { r.options().service = nullptr; });
  refused([](CRank& r) { r.options().service = "nowhere"; });
  refused([](CRank& r) { r.options().job = nullptr; });
  refused([](CRank& r) { r.options().wait_seconds = -1; });
  refused([](CRank& r) { r.options().join_timeout_seconds = NAN; });
  refused([](CRank& r) { r.job().name = "a/b"; });
  refused([](CRank& r) { r.job().world_size = 0; });
  refused([](CRank& r) { r.job().unused_policy = 3; });
  refused([](CRank& r) { r.job().update_mode = 2; });
  refused([](CRank& r) { r.job().parameter_count = size_t{1} << 40; });
  refused([](CRank& r) { r.job().group_count = 1; });
  refused([](CRank& r) { r.job().chunk_elements = 100; });
  const auto with_parameter = [&](auto change) {
    refused([&](CRank& r) { change(const_cast<ballast_parameter*>(r.job().parameters)[0]); });
  };
  with_parameter([](ballast_parameter& p) { p.name = nullptr; });
  with_parameter([](ballast_parameter& p) { p.dimensions = -1; });
  with_parameter([](ballast_parameter& p) { p.shape = nullptr; });
  const int64_t negative[] = {2, -3}, huge[] = {int64_t{1} << 40, 8};
  with_parameter([&](ballast_parameter& p) { p.shape = negative; });
  with_parameter([&](ballast_parameter& p) { p.shape = huge; });
  refused([](CRank& r) { const_cast<ballast_group*>(r.job().groups)[1].wire_dtype = 7; });
  refused([](CRank& r) { const_cast<void**>(r.options().weights)[1] = nullptr; });
}

TEST_F(CApi, WeightsAreAwaitedByParameter) {
  CRank rank("layers", service()), reference("whole", service());
  rank.OpenWithWeights();
  reference.OpenWithWeights();
  const size_t all[] = {3, 0, kFrozen, 1}, none = kParameters;
  for (uint64_t step = 1; step <= 3; ++step) {
    reference.Step(step);
    ASSERT_EQ(rank.Begin(), BALLAST_OK) << ballast_message();
    EXPECT_TRUE(
        Refused(ballast_await_weights(rank.session(), all, 1), BALLAST_FAILED_PRECONDITION));
    ASSERT_EQ(rank.PushAll(step), BALLAST_OK) << ballast_message();
    ASSERT_EQ(ballast_seal_and_vote(rank.session(), 1, nullptr, &rank.decision), BALLAST_OK);
    for (const size_t& p : all) {
      ASSERT_EQ(ballast_await_weights(rank.session(), &p, 1), BALLAST_OK) << ballast_message();
      if (p != kFrozen) EXPECT_EQ(rank.weights()[p], reference.weights()[p]);
    }
    EXPECT_EQ(ballast_await_weights(rank.session(), all, kParameters), BALLAST_OK);
    EXPECT_TRUE(Refused(ballast_await_weights(rank.session(), &none, 1), BALLAST_INVALID_ARGUMENT));
    EXPECT_TRUE(Refused(rank.Begin(), BALLAST_FAILED_PRECONDITION));  // The step has not ended.
    ASSERT_EQ(ballast_receive_weights(rank.session()), BALLAST_OK) << ballast_message();
  }
  EXPECT_TRUE(Refused(ballast_await_weights(rank.session(), nullptr, 0), BALLAST_INVALID_ARGUMENT));
}

TEST_F(CApi, RefusesCallsOutOfTurnAndGoesOn) {
  CRank rank("turns", service());
  EXPECT_TRUE(Refused(ballast_read_weights(nullptr), BALLAST_INVALID_ARGUMENT));
  ballast_close(nullptr);
  rank.OpenWithWeights();
  EXPECT_TRUE(Refused(rank.PushAll(1), BALLAST_FAILED_PRECONDITION));
  EXPECT_TRUE(
      Refused(ballast_push_gradients(rank.session(), 0, nullptr, 4, 0), BALLAST_INVALID_ARGUMENT));
  const void* one[1] = {nullptr};
  EXPECT_TRUE(
      Refused(ballast_push_gradients(rank.session(), 0, one, 1, 0), BALLAST_INVALID_ARGUMENT));
  const float* none[kParameters] = {};
  EXPECT_TRUE(
      Refused(ballast_upload_weights(rank.session(), none, kParameters), BALLAST_INVALID_ARGUMENT));
  ballast_info none_of_size = {};
  EXPECT_TRUE(Refused(ballast_get_info(rank.session(), &none_of_size), BALLAST_INVALID_ARGUMENT));
  size_t count = 0;
  EXPECT_TRUE(
      Refused(ballast_pieces(rank.session(), 99, nullptr, 0, &count), BALLAST_INVALID_ARGUMENT));
  rank.Step(1);
}

TEST_F(CApi, TheNormIsToldBeforeTheVote) {
  CRank rank("votes", service());
  rank.OpenWithWeights();
  ballast_ballot ballot = {.size = sizeof(ballot)};
  EXPECT_TRUE(
      Refused(ballast_vote(rank.session(), &ballot, &rank.decision), BALLAST_FAILED_PRECONDITION));
  const auto give = [&](uint32_t seed) {
    const ballast_step step = {.size = sizeof(step)};
    ASSERT_EQ(ballast_begin_step(rank.session(), &step), BALLAST_OK) << ballast_message();
    EXPECT_TRUE(Refused(ballast_vote(rank.session(), &ballot, &rank.decision),
                        BALLAST_FAILED_PRECONDITION));
    ASSERT_EQ(rank.PushAll(seed), BALLAST_OK) << ballast_message();
  };
  ballast_norm norm = {.size = sizeof(norm)};
  double group_norms[2] = {-1, -1};
  give(1);
  EXPECT_TRUE(
      Refused(ballast_seal(rank.session(), 1, &norm, group_norms, 1), BALLAST_INVALID_ARGUMENT));
  ASSERT_EQ(ballast_seal(rank.session(), 1, &norm, group_norms, 2), BALLAST_OK)
      << ballast_message();
  EXPECT_EQ(norm.step, 1u);
  EXPECT_EQ(norm.non_finite, 0);
  EXPECT_DOUBLE_EQ(norm.norm, std::hypot(group_norms[0], group_norms[1]));
  const double nan[2] = {std::nan(""), 1};
  ballot.multipliers = nan;
  EXPECT_TRUE(
      Refused(ballast_vote(rank.session(), &ballot, &rank.decision), BALLAST_INVALID_ARGUMENT));
  ballot.multipliers = nullptr;
  // A look, and another try.
  ASSERT_EQ(ballast_discard(rank.session()), BALLAST_OK) << ballast_message();
  give(2);
  ASSERT_EQ(ballast_seal(rank.session(), 1, &norm, nullptr, 0), BALLAST_OK) << ballast_message();
  ballot.max_norm = norm.norm / 2;
  ballot.trainer_state = "voted";
  ballot.trainer_state_bytes = 5;
  ASSERT_EQ(ballast_vote(rank.session(), &ballot, &rank.decision), BALLAST_OK) << ballast_message();
  EXPECT_EQ(rank.decision.applied, 1);
  EXPECT_EQ(rank.decision.norm, norm.norm);
  EXPECT_NEAR(rank.decision.clip_coefficient, 0.5, 1e-6);
  ASSERT_EQ(ballast_receive_weights(rank.session()), BALLAST_OK);
  // Multipliers and hyper-parameters, with the seal.
  const double halves[2] = {0.5, 0.25};
  ballot = {.size = sizeof(ballot), .multipliers = halves};
  give(3);
  ASSERT_EQ(ballast_seal_and_vote(rank.session(), 1, &ballot, &rank.decision), BALLAST_OK)
      << ballast_message();
  EXPECT_EQ(rank.decision.clip_coefficient, 1);
  ASSERT_EQ(ballast_receive_weights(rank.session()), BALLAST_OK);
  give(4);
  ballot = {.size = sizeof(ballot), .abandon = 1};
  ASSERT_EQ(ballast_seal_and_vote(rank.session(), 1, &ballot, &rank.decision), BALLAST_OK);
  EXPECT_EQ(rank.decision.applied, 0);
  EXPECT_TRUE(Says(ballast_message()));
  ASSERT_EQ(ballast_receive_weights(rank.session()), BALLAST_OK);
  EXPECT_TRUE(Refused(ballast_end_gradients(rank.session(), 0, 3), BALLAST_INVALID_ARGUMENT));
}

TEST_F(CApi, AnotherDescriptionOfTheJobIsNamed) {
  CRank rank("described", service());
  rank.OpenWithWeights();
  CRank other("described", service());
  other.job().on_abort = BALLAST_ON_ABORT_SKIP;
  EXPECT_TRUE(Refused(other.Open(), BALLAST_FAILED_PRECONDITION, "OTHER_DESCRIPTION"));
}

TEST_F(CApi, AServiceThatIsNotThereIsUnavailable) {
  CRank rank("nowhere", "unix:/no/such/socket");
  rank.options().join_timeout_seconds = 0.2;
  EXPECT_TRUE(Refused(rank.Open(), BALLAST_UNAVAILABLE));
}

TEST_F(CApi, OfSeveralServicesASessionGoesToItsRanksAndACallToTheFirst) {
  const std::string nowhere = "unix:/no/such/socket";
  CRank first("spread", absl::StrCat(nowhere, ",", service()), 0, 2);
  first.options().join_timeout_seconds = 0.2;
  EXPECT_TRUE(Refused(first.Open(), BALLAST_UNAVAILABLE));
  // Its service answers, and has no job of rank 0.
  CRank second("spread", absl::StrCat(nowhere, ",", service()), 1, 2);
  second.options().join_timeout_seconds = 0.2;
  EXPECT_TRUE(Refused(second.Open(), BALLAST_DEADLINE_EXCEEDED));

  const char* response = nullptr;
  const std::string services = absl::StrCat(service(), ", ", nowhere);
  ballast_options options = {.size = sizeof(options), .service = services.c_str()};
  EXPECT_EQ(ballast_call(&options, "JobService/ListJobs", "{}", &response), BALLAST_OK)
      << ballast_message();
}

TEST_F(CApi, OtherServicesOnAnotherRankAreNamed) {
  CRank alone("others", service(), 0, 2);
  ASSERT_EQ(alone.Open(), BALLAST_OK) << ballast_message();
  CRank spread("others", absl::StrCat("unix:/no/such/socket,", service()), 1, 2);
  EXPECT_TRUE(Refused(spread.Open(), BALLAST_FAILED_PRECONDITION, reason::kOtherDescription));
}

TEST_F(CApi, RefusesAListOfServicesThatCannotBe) {
  for (const char* services :
       {"", "gpu1", "a:7070,", "a:7070,b:7070, a:7070", "a:7070,gpu2", "a:7070,b:7070,c:7070"}) {
    EXPECT_TRUE(Refused(CRank("refused", services, 0, 2).Open(), BALLAST_INVALID_ARGUMENT))
        << services;
  }
  const char* response = nullptr;
  ballast_options options = {.size = sizeof(options), .service = "a:7070,,b:7070"};
  EXPECT_TRUE(Refused(ballast_call(&options, "JobService/ListJobs", "{}", &response),
                      BALLAST_INVALID_ARGUMENT));
}

TEST_F(CApi, TakesAStructureOfAnOlderHeader) {
  CRank rank("older", service());
  // As if the last members had not existed: they count as zero, whatever lies there.
  rank.options().size = offsetof(ballast_options, derive_from_uid);
  rank.options().derive_from_uid = "none";
  rank.job().size = offsetof(ballast_job, mesh);
  rank.job().mesh_dimensions = 7;
  rank.OpenWithWeights();
  EXPECT_EQ(rank.weights()[0][3], FirstWeight(0, 3));
}

TEST_F(CApi, AForkDoesNotTouchItsParentsSession) {
  CRank rank("forked", service());
  rank.OpenWithWeights();
  const pid_t child = fork();
  ASSERT_NE(child, -1);
  if (child == 0) {
    bool right = ballast_read_weights(rank.session()) == BALLAST_FAILED_PRECONDITION;
    ballast_session* another = nullptr;
    right &= ballast_open(&rank.options(), &another) == BALLAST_FAILED_PRECONDITION;
    right &= absl::StrContains(ballast_message(), "by spawn or exec");
    const char* answer = nullptr;
    right &= ballast_call(&rank.options(), "JobService/ListJobs", "{}", &answer) ==
             BALLAST_FAILED_PRECONDITION;
    ballast_close(rank.session());
    _exit(right ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  rank.Step(1);
}

}  // namespace
}  // namespace ballast::client
